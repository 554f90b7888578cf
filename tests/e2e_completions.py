#!/usr/bin/env python3
"""/v1/completions on the demo model, asked as its clients ask: their bodies, and what they read.
TAP."""

import os

from e2e import SRCDIR, Daemon, check, done, until

with open(os.path.join(SRCDIR, "tests", "models", "demo", "heldout.txt"), encoding="utf-8") as f:
    TEXT = f.read()


def complete(d, **fields):
    return d.ask("POST", "/v1/completions", fields)


def tokens(d, text):
    return d.ask("POST", "/tokenize", {"prompt": text}).json()["tokens"]


def lm_eval_scores(choice, ctxlen):
    """lm-evaluation-harness's own arithmetic (openai_completions.py, parse_logprobs)."""
    logprobs = choice["logprobs"]["token_logprobs"][ctxlen:-1]
    tops = choice["logprobs"]["top_logprobs"][ctxlen:-1]
    is_greedy = all(a == max(b.values()) for a, b in zip(logprobs, tops, strict=True))
    return sum(logprobs), is_greedy


def scoring(d):
    """Contexts and continuations as ids, several to a body; against /v1/prefill, bit for bit."""
    questions = []
    for i, (context, continuation) in enumerate([
            (TEXT[:400], TEXT[400:430]), (TEXT[1000:1300], " the LORD"), ("And God", " said"),
            (TEXT[5000:5009], TEXT[5009:5100])]):
        questions.append((tokens(d, context), tokens(d, continuation)))
    # One that the model itself would go on with.
    greedy = complete(d, prompt=TEXT[:200], max_tokens=5, temperature=0, return_token_ids=True)
    j = greedy.json()["choices"][0]
    questions.append((j["prompt_token_ids"], j["token_ids"]))
    a = complete(d, model="demo", prompt=[c + t for c, t in questions], temperature=0,
                 max_tokens=1, logprobs=1, seed=1234, echo=True)
    choices = sorted(a.json()["choices"], key=lambda c: c["index"])
    check(a.status == 200 and len(choices) == len(questions), "a choice for each prompt", a)
    for (context, continuation), choice in zip(questions, choices):
        n = len(context) + len(continuation)
        p = d.prefill(prompt=context + continuation, logprobs="all", top_logprobs=1).json()
        lp = choice["logprobs"]
        check(lp["token_logprobs"][:n] == p["prompt_logprobs"], f"{n} tokens: prefill's numbers")
        check(lp["token_logprobs"][n] == p["next"]["logprob"] and
              choice["text"].endswith(p["next"]["token"]), f"{n} tokens: and its next")
        check(all(len(lp[k]) == n + 1 for k in lp), f"{n} tokens: one more entry in each list")
        check(all(choice["text"][o:].startswith(t) or "\ufffd" in t
                  for o, t in zip(lp["text_offset"], lp["tokens"])), f"{n} tokens: offsets")
        total, is_greedy = lm_eval_scores(choice, len(context))
        tops = p["prompt_top"][len(context):]
        check(is_greedy == all(t[0]["id"] == i for t, i in zip(tops, continuation)),
              f"{n} tokens: is_greedy is {is_greedy}")
        check(total == sum(p["prompt_logprobs"][len(context):]), f"{n} tokens: the sum")
    check(lm_eval_scores(choices[-1], len(questions[-1][0]))[1], "a greedy answer is greedy")
    alone = [complete(d, prompt=c + t, temperature=0, max_tokens=1, logprobs=1, echo=True)
             .json()["choices"][0]["logprobs"] for c, t in questions]
    check(alone == [c["logprobs"] for c in choices], "alone: the same bits")


def generating(d):
    """generate_until of lm-evaluation-harness, and what its relatives read."""
    a = complete(d, model="demo", prompt=TEXT[:200], max_tokens=40, temperature=0, seed=1)
    whole = a.json()["choices"][0]["text"]
    check(a.status == 200 and len(whole) > 20, "a text", a)
    stop = whole[17:20]
    a = complete(d, prompt=TEXT[:200], max_tokens=40, temperature=0, stop=["\n\n\n", stop])
    j = a.json()["choices"][0]
    check(j["text"] == whole[:whole.index(stop)] and j["finish_reason"] == "stop" and
          j["stop_reason"] == stop, "a stop string", a)
    a = complete(d, prompt=[TEXT[:200], TEXT[300:400]], max_tokens=4, temperature=0, n=2)
    j = a.json()
    texts = [c["text"] for c in j["choices"]]
    check([c["index"] for c in j["choices"]] == [0, 1, 2, 3] and texts[0] == texts[1] and
          texts[2] == texts[3] and whole.startswith(texts[0]), "two of each", a)
    check(j["usage"]["completion_tokens"] == 16 and j["usage"]["prompt_tokens"] ==
          len(tokens(d, TEXT[:200])) + len(tokens(d, TEXT[300:400])), "usage", a)
    a = complete(d, prompt=TEXT[:200], max_tokens=0, echo=True, logprobs=0)
    j = a.json()["choices"][0]
    check(j["text"] == TEXT[:200] and j["finish_reason"] == "length" and
          len(j["logprobs"]["tokens"]) == len(tokens(d, TEXT[:200])), "scores only", a)
    a = complete(d, prompt=TEXT[:200], max_tokens=3, stream=False, repetition_penalty=1.0,
                 logprobs=None, ignore_eos=True, user="u", temperature=0)
    check(a.json()["usage"]["completion_tokens"] == 3, "nulls are absences", a)


def groups(d):
    """A body of many prompts is one call: taken whole, refused whole, and let go whole."""
    a = complete(d, prompt=[[5, 6, 7]] * 100, max_tokens=1, temperature=0)
    check(a.status == 200 and len({c["text"] for c in a.json()["choices"]}) == 1, "a hundred")
    before = d.counted("cancelled")
    with d.conn() as c:
        body = b'{"prompt": [' + b",".join([b"[" + b",".join([b"9"] * 900) + b"]"] * 60) + b"]}"
        c.send(b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\n\r\n" %
               len(body) + body)
        until(lambda: d.metrics()["prefilld_requests_running"] > 0)
    check(until(lambda: d.counted("cancelled") == before + 1) and until(d.is_idle),
          "a hang-up ends all of them")
    a = complete(d, prompt=[[5]] * 2000)
    check(a.status == 400 and "queue-length" in a.error()["message"], "more than the queue", a)


with Daemon() as daemon:
    scoring(daemon)
    generating(daemon)
    groups(daemon)
    check(until(daemon.is_idle), "everything is back")
    check(daemon.stop() == 0, "it ends with 0")
done()
