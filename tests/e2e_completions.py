#!/usr/bin/env python3
"""/v1/completions and its relatives on the demo model, asked as its clients ask: their bodies, and what they read.
TAP."""

import json
import math
import os
import signal
import struct
import tempfile

from e2e import SRCDIR, Daemon, check, chunks_of, done, until

with open(os.path.join(SRCDIR, "tests", "models", "demo", "heldout.txt"), encoding="utf-8") as f:
    TEXT = f.read()


def complete(d, **fields):
    return d.ask("POST", "/v1/completions", fields)


def tokens(d, text):
    return d.ask("POST", "/tokenize", {"prompt": text}).json()["tokens"]


def f32(x):
    """The number that was printed: nine digits name one float32."""
    return struct.unpack("f", struct.pack("f", x))[0]


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


def sampling(d):
    """How a token is chosen, as far as it shows from outside."""
    def texts(**fields):
        return [c["text"] for c in complete(d, max_tokens=12, **fields).json()["choices"]]

    alone = texts(prompt="And God said", n=3, seed=7)
    check(len(set(alone)) == 3, "three choices from one seed differ", alone)
    check(alone == texts(prompt=["And God said", TEXT[:300]], n=3, seed=7)[:3],
          "a seed gives the same text in other company")
    check(alone[:1] == texts(prompt="And God said", seed=7), "and for one choice")
    check(alone[0] not in texts(prompt="And God said", n=8, seed=8), "another seed, another text")
    greedy = texts(prompt="And God said", temperature=0)
    check(greedy == texts(prompt="And God said", top_k=1, seed=1) ==
          texts(prompt="And God said", top_p=1e-6, seed=2) ==
          texts(prompt="And God said", min_p=1, seed=3), "one candidate is the best one", greedy)
    forced = complete(d, prompt="And God said", max_tokens=3, temperature=0,
                      logit_bias={"5": 100}, return_token_ids=True).json()["choices"][0]
    check(forced["token_ids"] == [5, 5, 5], "a bias decides", forced)
    numbers = complete(d, prompt="And God said", max_tokens=3, temperature=0, logprobs=1,
                       logit_bias={"5": 100}).json()["choices"][0]["logprobs"]
    p = d.prefill(prompt="And God said", top_logprobs=1).json()["next"]
    check(p["token"] in numbers["top_logprobs"][0] and numbers["token_logprobs"][0] < p["logprob"],
          "numbers are the model's, before the bias", numbers)


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
    a = complete(d, prompt=[[5] * 1000] * 400, echo=True, logprobs=20, max_tokens=1)
    check(a.status == 400 and "8388608 in one call" in a.error()["message"], "too many numbers", a)


def events(d, **fields):
    """The events of a stream."""
    body = json.dumps(fields).encode()
    with d.conn() as c:
        c.send(b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nConnection: close\r\n"
               b"Content-Length: %d\r\n\r\n" % len(body) + body)
        data = c.read_all()
    text = b"".join(chunks_of(data)).decode()
    lines = text.split("\n\n")
    assert lines.pop() == "" and all(x.startswith("data: ") and "\n" not in x for x in lines), text
    assert lines.pop() == "data: [DONE]", text
    return [json.loads(x[6:]) for x in lines]


def streams(d):
    """As vllm bench serve, sglang.bench_serving and guidellm ask, and what they read."""
    # Their tokens are bytes, parts of characters: no event may split one.
    snowman = tokens(d, "\u2603\U0001f600" * 3)
    question = {"prompt": TEXT[:100], "max_tokens": 20, "temperature": 0.0}
    whole = complete(d, **question).json()
    e = events(d, **question, model="demo", repetition_penalty=1.0, logprobs=None, stream=True,
               ignore_eos=True, stream_options={"include_usage": True})
    check(len(e) == 21 and all(x["object"] == "text_completion" for x in e), "an event a token",
          len(e))
    check("".join(x["choices"][0]["text"] for x in e[:-1]) == whole["choices"][0]["text"],
          "the same text")
    check(e[-1]["choices"] == [] and e[-1]["usage"] == whole["usage"], "usage is last", e[-1])
    check([x["choices"][0]["finish_reason"] for x in e[:-1]] == [None] * 19 + ["length"],
          "the end is with the last token")
    e = events(d, prompt=TEXT[:100], max_tokens=1, temperature=0, best_of=1, stream=True)
    check(len(e) == 1 and e[0]["choices"][0]["text"] != "" and
          e[0]["choices"][0]["finish_reason"] == "length", "one token, one event", e)
    stop = whole["choices"][0]["text"][11:16]
    e = events(d, **question, stop=[stop], stream=True, echo=True, logprobs=1)
    text = "".join(x["choices"][0]["text"] for x in e)
    check(text == TEXT[:100] + whole["choices"][0]["text"].split(stop)[0] and
          e[-1]["choices"][0]["stop_reason"] == stop, "stop and echo", text)
    joined = [v for x in e for v in x["choices"][0]["logprobs"]["token_logprobs"]]
    at_once = complete(d, **question, stop=[stop], echo=True, logprobs=1).json()
    check(joined == at_once["choices"][0]["logprobs"]["token_logprobs"] and
          [v for x in e for v in x["choices"][0]["logprobs"]["text_offset"]] ==
          at_once["choices"][0]["logprobs"]["text_offset"], "the same numbers")
    e = events(d, prompt=[snowman], max_tokens=12, temperature=0, stream=True, echo=True)
    check("".join(x["choices"][0]["text"] for x in e).startswith("\u2603\U0001f600" * 3),
          "whole characters")
    e = events(d, prompt=["And", "God"], n=2, max_tokens=3, temperature=0, stream=True,
               stream_options={"include_usage": True, "continuous_usage_stats": True})
    check(sorted(x["choices"][0]["index"] for x in e[:-1]) == [i for i in range(4) for _ in "abc"],
          "four choices")
    check([x["usage"]["completion_tokens"] for x in e] == list(range(1, 13)) + [12],
          "usage in each")
    before = d.counted("cancelled")
    with d.conn() as c:
        body = b'{"prompt": "And God said", "max_tokens": 5000, "ignore_eos": true, "stream": true}'
        c.send(b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\n\r\n" %
               len(body) + body)
        c.sock.recv(1000)
    check(until(lambda: d.counted("cancelled") == before + 1) and until(d.is_idle),
          "a hang-up in the middle frees everything")


def others(d):
    """/v1/score, label scoring, SGLang's /generate, chats: against /v1/prefill and each other."""
    context, tails = TEXT[:500], [" the LORD", ", and", TEXT[500:600]]
    a = d.ask("POST", "/v1/score", {"context": context, "continuations": tails,
                                    "top_logprobs": 2}).json()
    for tail, s in zip(tails, a["data"], strict=True):
        ids = tokens(d, context) + tokens(d, tail)
        p = d.prefill(prompt=ids, logprobs="all", top_logprobs=2).json()
        n = len(s["tokens"])
        check(s["tokens"] == ids[-n:] and s["logprobs"] == p["prompt_logprobs"][-n:] and
              s["logprob"] == sum(f32(v) for v in s["logprobs"]), f"a tail of {n} tokens: prefill's bits", s)
        check(s["top"] == p["prompt_top"][-n:] or
              [[t["id"] for t in row] for row in s["top"]] ==
              [[t["id"] for t in row] for row in p["prompt_top"][-n:]], "and candidates")
        check(s["is_greedy"] == all(t[0]["id"] == i
                                    for t, i in zip(p["prompt_top"][-n:], s["tokens"])), "greedy")
    labels = tokens(d, " yes") + tokens(d, " no")
    item, query = "The king said", "Is it so? "
    p = [f32(d.prefill(prompt=tokens(d, query) + tokens(d, item) + [i], logprobs="all")
             .json()["prompt_logprobs"][-1]) for i in labels[:2]]
    a = d.ask("POST", "/generative_scoring", {"query": query, "items": [item, "x"],
                                              "label_token_ids": labels[:2]}).json()
    want = math.exp(p[0]) / (math.exp(p[0]) + math.exp(p[1]))
    check(abs(a["data"][0]["score"] - want) < 1e-12, "a label among labels", a)
    a = d.ask("POST", "/rerank", {"query": query, "documents": ["a", item, "b"],
                                  "label_token_ids": labels[:2]}).json()
    scores = [r["relevance_score"] for r in a["results"]]
    check(scores == sorted(scores, reverse=True) and sorted(r["index"] for r in a["results"]) ==
          [0, 1, 2] and any(abs(s - want) < 1e-12 for s in scores), "ranked", a)
    # sglang-generate of lm-evaluation-harness.
    ids = [tokens(d, TEXT[:200]), tokens(d, TEXT[300:350])]
    a = d.ask("POST", "/generate", {
        "input_ids": ids, "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "logprob_start_len": 0, "top_logprobs_num": 1, "return_logprob": True}).json()
    for one, prompt in zip(a, ids, strict=True):
        p = d.prefill(prompt=prompt, logprobs="all", top_logprobs=1).json()
        meta = one["meta_info"]
        check([x[0] for x in meta["input_token_logprobs"]] == p["prompt_logprobs"] and
              [x[1] for x in meta["input_token_logprobs"]] == prompt, "SGLang's triples")
        check([x and x[0][1] for x in meta["input_top_logprobs"]] ==
              [t and t[0]["id"] for t in p["prompt_top"]], "and candidates")
        check(one["output_ids"] == [p["next"]["id"]], "and the next")
    chat = {"messages": [{"role": "user", "content": "Who is the LORD?"}], "max_tokens": 6,
            "temperature": 0}
    prompt = "<|im_start|>user\nWho is the LORD?<|im_end|>\n<|im_start|>assistant\n"
    a = d.ask("POST", "/v1/chat/completions", chat).json()
    b = complete(d, prompt=prompt, max_tokens=6, temperature=0).json()
    check(a["choices"][0]["message"] == {"role": "assistant", "content": b["choices"][0]["text"]}
          and a["object"] == "chat.completion" and a["usage"] == b["usage"], "a chat", a)
    # What a disaggregation sidecar sends to the prefiller.
    a = d.ask("POST", "/v1/chat/completions", dict(
        chat, max_tokens=1, max_completion_tokens=1, stream=False, kv_transfer_params={
            "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
            "remote_block_ids": None, "remote_host": None, "remote_port": None})).json()
    kv = a["kv_transfer_params"]
    s = d.ask("GET", f"/v1/sessions/{kv['session']}").json()
    check(kv["do_remote_prefill"] is True and s["tokens"] == a["usage"]["prompt_tokens"] and
          a["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, "a sidecar's request", (a, s))
    d.ask("DELETE", f"/v1/sessions/{kv['session']}")
    check(d.ask("GET", "/v1/models/demo").json()["id"] == "demo", "one model")


def begin_stream(d, n_tokens, **fields):
    """A connection with a stream that has begun, and its first bytes."""
    c = d.conn()
    body = json.dumps({"prompt": "And God said", "max_tokens": n_tokens, "ignore_eos": True,
                       "temperature": 0, "stream": True, **fields}).encode()
    c.send(b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\n\r\n" %
           len(body) + body)
    return c, c.sock.recv(2000)


def stopping():
    """A stream is work like any other: a drain waits for it, a second signal cuts it."""
    with Daemon() as d:
        c, data = begin_stream(d, 100)
        d.signal(signal.SIGTERM)
        data += c.read_all()
        check(data.count(b"data: {") == 100 and b"data: [DONE]" in data, "drained to its end",
              data[-300:])
        check(d.wait() == 0, "then the daemon ends")
    with Daemon() as d:
        c, data = begin_stream(d, 30000)
        d.signal(signal.SIGTERM)
        until(lambda: "why=SIGTERM" in d.log_text())
        d.signal(signal.SIGTERM)
        data += c.read_all()
        check(b'data: {"error": {"message": "the server is shutting down"' in data, "cut in words",
              data[-300:])
        check(d.wait() == 0, "and the daemon ends")
    # What a unix socket holds does not grow: the rest waits in the daemon, for longer than that lives.
    with (tempfile.TemporaryDirectory() as tmp,
          Daemon("--drain-s", 0, listen=(f"unix:{tmp}/socket",)) as d):
        c, data = begin_stream(d, 30000, logprobs=20)
        until(lambda: d.metrics()["prefilld_generated_tokens_total"] > 400)
        d.signal(signal.SIGTERM)
        until(lambda: "event=drain_cut" in d.log_text())
        data += c.read_all(4096, 0.05)
        events = b"".join(chunks_of(data) or []).split(b"\n\n")
        check(len(events) > 2 and events[-2:] == [b"data: [DONE]", b""] and
              events[-3].startswith(b'data: {"error": {"message": "the server is shutting down"') and
              all(json.loads(e.removeprefix(b"data: "))["choices"] for e in events[:-3]),
              "a slow reader is told, too, behind whole events", data[-300:])
        check(d.wait() == 0, "and not waited for")


stopping()
with Daemon() as daemon:
    scoring(daemon)
    generating(daemon)
    sampling(daemon)
    groups(daemon)
    streams(daemon)
    others(daemon)
    check(until(daemon.is_idle), "everything is back")
    check(daemon.stop() == 0, "it ends with 0")
done()
