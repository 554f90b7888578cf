#!/usr/bin/env python3
"""The HTTP contract against the real daemon on the demo model. TAP."""

import json
import math
import os
import re
import shutil
import subprocess
import threading
import time

from e2e import SRCDIR, Daemon, check, done, skip, until

with open(os.path.join(SRCDIR, "tests", "models", "demo", "heldout.txt"), encoding="utf-8") as f:
    TEXT = f.read()


def numbers(answer):
    """What must be equal bit for bit: the text of the answer's numbers."""
    a = answer.json()
    return [a.get("next"), a.get("prompt_logprobs"), a.get("prompt_top")]


def check_answer(a, n_tokens, mode, n_top, what):
    """Every rule of the answer's form."""
    wrong = []
    j = a.json()

    def rule(good, text):
        if not good:
            wrong.append(text)

    rule(a.status == 200, "status")
    rule(a.headers["content-type"] == "application/json", "content-type")
    rule(a.headers["x-request-id"] == j["id"], "id")
    rule(j["object"] == "prefill" and j["model"] == "demo", "object, model")
    rule(abs(j["created"] - time.time()) < 100, "created")
    rule(j["usage"] == {"prompt_tokens": n_tokens, "cached_tokens": 0, "total_tokens": n_tokens},
         "usage")
    if mode == "none":
        rule("next" not in j, "none has no next")
    else:
        top = j["next"]["top"]
        rule(len(top) == n_top, "length of top")
        rule(top == sorted(top, key=lambda t: (-t["logprob"], t["id"])), "order of top")
        rule(not top or {k: j["next"][k] for k in top[0]} == top[0], "next is the first of top")
        rule(sum(math.exp(t["logprob"]) for t in top) <= 1 + 1e-5, "probabilities")
        for t in top + [j["next"]]:
            rule(("bytes" in t) == ("\ufffd" in t["token"]), "bytes")
    if mode == "all":
        p = j["prompt_logprobs"]
        rule(len(p) == n_tokens and p[0] is None, "prompt_logprobs")
        rule(all(x <= 0 for x in p[1:]), "logprobs are not positive")
        rule(("prompt_top" in j) == (n_top > 0), "prompt_top")
        if n_top > 0:
            rule(len(j["prompt_top"]) == n_tokens and j["prompt_top"][0] is None, "prompt_top")
            for t in j["prompt_top"][1:]:
                rule(len(t) == n_top, "length of prompt_top")
                rule(t == sorted(t, key=lambda c: (-c["logprob"], c["id"])), "order")
    else:
        rule("prompt_logprobs" not in j and "prompt_top" not in j, "prompt numbers not asked for")
    t = j["timings"]
    rule(t["queue_ms"] >= 0 and t["prefill_ms"] >= 0 and t["tokens_per_s"] > 0, "timings")
    rule(t["total_ms"] >= t["queue_ms"] + t["prefill_ms"] - 0.002, "total_ms")
    start = 0
    for i, piece in enumerate(j["pieces"]):
        rule(piece["start"] == start, "pieces without gaps")
        rule(i + 1 == len(j["pieces"]) or piece["tokens"] % 64 == 0, "multiples of 64")
        rule(i == 0 or piece["step"] > j["pieces"][i - 1]["step"], "steps rise")
        start += piece["tokens"]
    rule(start == n_tokens, "pieces end at the end")
    check(not wrong, what, f"{wrong}\n{a}")


def test_answers(d):
    ids = d.ask("POST", "/tokenize", {"prompt": TEXT[:1000]}).json()["tokens"]
    n = len(ids)
    check(n > 200, f"the text has {n} tokens")
    for mode in ("none", "next", "all"):
        for n_top in (0, 1, 5, 20):
            a = d.prefill(prompt=ids, logprobs=mode, top_logprobs=n_top)
            check_answer(a, n, mode, n_top, f"logprobs {mode}, top_logprobs {n_top}")
    a = d.prefill(prompt=ids)
    check_answer(a, n, "next", 5, "the defaults")
    b = d.prefill(prompt=TEXT[:1000], model=None, logprobs=None, top_logprobs=None, priority=None,
                  deadline_ms=None, request_id=None, return_token_ids=None, session=None,
                  fork=None, keep=None)
    check(numbers(a) == numbers(b), "text is its ids, and null is absent")
    a = d.prefill(prompt=TEXT[:1000], return_token_ids=True)
    check(a.json()["prompt_token_ids"] == ids, "return_token_ids")

    # The distribution after a prefix is the one that scores the next token of the whole.
    whole = d.prefill(prompt=ids, logprobs="all", top_logprobs=20).json()
    hits = 0
    for t in (1, 2, 63, 64, 65, 128, n - 1):
        part = d.prefill(prompt=ids[:t], top_logprobs=20).json()
        top = [{"id": c["id"], "logprob": c["logprob"]} for c in part["next"]["top"]]
        same = top == whole["prompt_top"][t]
        for c in top:
            if c["id"] == ids[t]:
                hits += 1
                same = same and c["logprob"] == whole["prompt_logprobs"][t]
        check(same, f"the prefix of {t} tokens gives the bits of the whole")
    check(hits > 0, "some of the next tokens were among the candidates")
    mean = -sum(whole["prompt_logprobs"][1:]) / (n - 1)
    check(math.exp(mean) < 100, f"the model knows the text: perplexity {math.exp(mean):.1f}")


def test_cuts_and_company(d):
    """The same bits in small steps, large steps, and among others."""
    prompt = TEXT[3000:5500]
    alone = numbers(d.prefill(prompt=prompt, logprobs="all"))
    with Daemon("--max-step-tokens", 192, "--max-seqs", 3, "--state-slots", 5, "--policy",
                "fcfs") as small:
        a = small.prefill(prompt=prompt, logprobs="all")
        check(len(a.json()["pieces"]) > 3, f"{len(a.json()['pieces'])} pieces in small steps")
        check(numbers(a) == alone, "small steps give the same bits")
        got = [None] * 12

        def one(i):
            if i % 3 == 0:
                got[i] = numbers(small.prefill(prompt=prompt, logprobs="all"))
            else:
                small.prefill(prompt=TEXT[i * 50:i * 100 + 120])

        threads = [threading.Thread(target=one, args=(i,)) for i in range(12)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        check(all(got[i] == alone for i in range(0, 12, 3)), "and so they do among others")
        check(until(small.is_idle), "the pools are full again")


def test_text(d):
    cases = ["a\u0000b", "\u0000", "naïve 中文 \U0001f600", "<|im_start|>user\n", "\n\n  \t", "é"]
    for text in cases:
        ids = d.ask("POST", "/tokenize", {"prompt": text}).json()["tokens"]
        back = d.ask("POST", "/detokenize", {"tokens": ids}).json()["prompt"]
        a = d.prefill(prompt=text, return_token_ids=True)
        check(a.status == 200 and a.json()["prompt_token_ids"] == ids and back == text,
              f"{text!r} is text", f"{ids} {back!r} {a}")
    ids = d.ask("POST", "/tokenize", {"prompt": "<|im_start|>"}).json()["tokens"]
    check(len(ids) == 1, "a special token is one id")
    both = d.ask("POST", "/tokenize", {"prompt": "ab", "return_token_strs": True}).json()
    check(len(both["token_strs"]) == both["count"] == len(both["tokens"]), "token_strs")
    a = d.prefill(prompt=[2047, 2046, 2045])
    check(a.status == 200, "ids to the end of vocab_size are accepted")
    a = d.prefill(prompt=[1, 2048])
    check(a.status == 400 and "prompt[1]" in a.error()["message"] and "2048)" in
          a.error()["message"], "the id behind it is not", a)


def test_refusals(d):
    cases = [
        ({"prompt": "secret", "top_logprobs": 21}, 400, "top_logprobs"),
        ({"prompt": "secret", "logprobs": "some"}, 400, "logprobs"),
        ({"prompt": "secret", "model": "secret"}, 404, "model"),
        ({"prompt": ["secret"]}, 400, "prompt"),
        ({"prompt": [[1]]}, 400, "prompt"),
        ({"prompt": [-1]}, 400, "prompt"),
        ({"prompt": [1.5]}, 400, "prompt"),
        ({"prompt": [True]}, 400, "prompt"),
        ({"prompt": {"a": 1}}, 400, "prompt"),
        ({"prompt": ""}, 400, "prompt"),
        ({}, 400, "prompt"),
        ({"prompt": "secret", "session": "s"}, 404, "session"),
        ({"prompt": "secret", "fork": "s"}, 404, "fork"),
        ({"prompt": "secret", "keep": {"ttl_s": 0}}, 400, "ttl_s"),
        ({"prompt": "secret", "priority": 1.5}, 400, "priority"),
        ({"prompt": "secret", "deadline_ms": 86400001}, 400, "deadline_ms"),
        ({"prompt": "secret", "request_id": "x" * 129}, 400, "request_id"),
        ({"prompt": "secret", "return_token_ids": "yes"}, 400, "return_token_ids"),
        (b'{"prompt":"secret","prompt":"secret"}', 400, "prompt"),
        (b'{"prompt":[1],"\\u0070rompt":[1]}', 400, "prompt"),
        (b'{"prompt":"\\ud800secret"}', 400, "prompt"),
        (b'{"prompt":"\xff\xfe"}', 400, "prompt"),
        (b'{"prompt":[1],"top_logprobs":1e400}', 400, "top_logprobs"),
        (b'{"prompt":' + b"[" * 100000 + b"]" * 100000 + b"}", 400, "prompt"),
        (b'{"model":' + b"[" * 100000 + b"]" * 100000 + b"}", 400, "model"),
        (b'{"prompt":[1]', 400, "prompt"),
        (b'{"prompt":[1]}x', 400, None),
        (b'"secret"', 400, None),
        (b"", 400, None),
    ]
    before = d.counted("invalid")
    for body, status, param in cases:
        a = d.ask("POST", "/v1/prefill", body)
        e = a.error()
        kind = "not_found_error" if status == 404 else "invalid_request_error"
        check(a.status == status and e["param"] == param and e["type"] == kind and
              e["code"] == status and "secret" not in a.body.decode() and
              a.headers["content-type"] == "application/json" and len(a.body) < 1000 and
              "x-request-id" in a.headers, f"{str(body)[:60]}: {status} {param}", a)
    check(d.counted("invalid") == before + len(cases), "each is counted")
    for method, path, status in (("GET", "/nothing", 404), ("POST", "/v1/embeddings", 404),
                                 ("GET", "/v1/sessions/s", 404), ("GET", "/v1/prefill", 405),
                                 ("POST", "/health", 405), ("PUT", "/v1/models", 405)):
        a = d.ask(method, path)
        check(a.status == status and a.error()["code"] == status and
              (status != 405 or "allow" in a.headers), f"{method} {path}: {status}", a)


def test_head(d):
    """HEAD has no body, so that the next answer on the connection is the next answer."""
    for path in ("/health", "/metrics", "/v1/models", "/v1/trace", "/v1/steps", "/nothing"):
        with d.conn() as c:
            a = c.ask("HEAD", path)
            b = c.ask("GET", "/version")
            check(a.status == (404 if path == "/nothing" else 200) and b.status == 200 and
                  b.json()["backend"], f"HEAD {path}, then another call", (a, b))


def test_limit():
    with Daemon("--kv-tokens", 1024, "--max-prompt-tokens", 500) as d:
        n = d.ask("GET", "/v1/models").json()["data"][0]["max_model_len"]
        check(n == 500, "max_model_len is max-prompt-tokens")
        check(d.prefill(prompt=[5] * 500).status == 200, "500 of 500 tokens")
        a = d.prefill(prompt=[5] * 501)
        check(a.status == 400 and "501" in a.error()["message"] and "500" in a.error()["message"],
              "501 of 500 tokens: both numbers", a)
        a = d.prefill(prompt=TEXT[:10000])
        n = d.ask("POST", "/tokenize", {"prompt": TEXT[:10000]}).json()["count"]
        check(a.status == 400 and f"{n} tokens" in a.error()["message"] and
              "500" in a.error()["message"], "text: both numbers", a)
    with Daemon("--kv-tokens", 256) as d:
        n = d.ask("GET", "/v1/models").json()["data"][0]["max_model_len"]
        check(n == 256, f"the limit is what the pool holds: {n}")
        check(d.prefill(prompt=[5] * 256).status == 200 and
              d.prefill(prompt=[5] * 257).status == 400, "and it is kept")


def test_requests(d):
    """Headers, ids, transfer forms."""
    a = d.ask("POST", "/v1/prefill", {"prompt": [1], "request_id": "body/1"},
              ["X-Request-Id: header/1"])
    check(a.json()["id"] == "body/1" == a.headers["x-request-id"], "the body's id wins")
    a = d.ask("POST", "/v1/prefill", {"prompt": [1]}, ["X-Request-Id: header/1"])
    check(a.json()["id"] == "header/1" == a.headers["x-request-id"], "else the header's")
    a = d.prefill(prompt=[1], stream=True, n=1, **{"ü": 1, "x" * 64: 1, "y" * 65: 1})
    check(a.headers["x-prefilld-ignored"] == "stream,n,?," + "x" * 64 + ",?", "ignored fields", a)
    a = d.prefill(prompt=[1])
    check("x-prefilld-ignored" not in a.headers, "nothing ignored, no header")
    a = d.ask("POST", "/v1/prefill", {"prompt": [1]}, ["Content-Type: text/plain"])
    check(a.status == 200, "any Content-Type is read as JSON")
    body = json.dumps({"prompt": list(range(1000)), "logprobs": "none"}).encode()
    with d.conn() as c:
        c.send(b"POST /v1/prefill HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n")
        for i in range(0, len(body), 100):
            part = body[i:i + 100]
            c.send(b"%x\r\n%s\r\n" % (len(part), part))
        c.send(b"0\r\n\r\n")
        check(c.read().status == 200, "a chunked body")
        c.send(b"POST /v1/prefill HTTP/1.1\r\nHost: t\r\nExpect: 100-continue\r\n"
               b"Content-Length: %d\r\n\r\n" % len(body))
        check(c.read().status == 100, "100 Continue")
        c.send(body)
        check(c.read().status == 200, "and the answer")
        c.send(b"GET /health HTTP/1.1\r\nHost: t\r\n\r\n" * 3)
        check([c.read().status for _ in range(3)] == [200] * 3, "three requests in one packet")
        a = c.ask("HEAD", "/health")
        check(a.status == 200 and a.body == b"", "HEAD")


def test_deadlines():
    with Daemon("--max-step-tokens", 64) as d:
        a = d.prefill(prompt=[7] * 30000, logprobs="none", deadline_ms=50)
        check(a.status == 504 and a.error()["type"] == "timeout_error", "past its deadline: 504", a)
        check(d.counted("deadline") == 1, "counted")
        check(until(d.is_idle), "the pools are full again")
        check(d.metrics()["prefilld_step_tokens_total"] < 10000, "the rest was not computed")
        a = d.prefill(prompt=[7] * 20, deadline_ms=60000)
        check(a.status == 200, "a deadline that is kept")


def test_trace():
    with Daemon("--max-step-tokens", 64) as d:
        d.prefill(prompt=[7] * 300, logprobs="none")
        # A step is recorded when it was published, so after its answers.
        until(lambda: b'"step": 5}' in d.ask("GET", "/v1/trace").body)
        events = d.ask("GET", "/v1/trace").json()["traceEvents"]
        spans = [e for e in events if e["ph"] == "X"]
        check(all({"ph", "pid", "ts"} <= set(e) and ("dur" in e) == (e["ph"] == "X")
                  for e in events), "/v1/trace: events have what Perfetto needs", events[:3])
        steps = sorted({e["args"]["step"] for e in spans})
        check(len(steps) == 5 and {e["name"] for e in spans} >= {"plan", "pack", "launch", "publish"},
              "/v1/trace: five steps with their phases", steps)
        last = d.ask("GET", "/v1/trace?last=2").json()["traceEvents"]
        check(sorted({e["args"]["step"] for e in last if e["ph"] == "X"}) == steps[-2:],
              "/v1/trace?last=2: the last two")
        for query in ("last=0", "last=", "last=-1", "last=1x", "last=99999999999"):
            a = d.ask("GET", "/v1/trace?" + query)
            check(a.status == 400 and a.error()["param"] == "last", f"/v1/trace?{query}: 400", a)


def test_metrics_form(d):
    """Prometheus's own tool where it is, and the parser of its Python client."""
    text = d.ask("GET", "/metrics").body.decode()
    if shutil.which("promtool"):
        r = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True,
                           text=True, check=False)
        # 3: only matters of taste; vLLM's names with a colon are one.
        lint = [line for line in r.stderr.splitlines() if not line.startswith("vllm:")]
        check(r.returncode in (0, 3) and not lint, "promtool finds nothing in /metrics", r.stderr)
    else:
        skip("promtool on /metrics", "not installed (Debian package prometheus)")
    try:
        from prometheus_client.parser import text_string_to_metric_families as families
    except ImportError:
        skip("the Prometheus client reads /metrics",
             "not installed (Debian package python3-prometheus-client)")
        return
    kinds = {f.name: f.type for f in families(text)}
    n_typed = len(re.findall(r"^# TYPE ", text, re.M))
    check(len(kinds) == n_typed and "unknown" not in kinds.values() and
          kinds["prefilld_queue_age_seconds"] == "gauge" and kinds["prefilld_steps"] == "counter" and
          kinds["vllm:time_to_first_token_seconds"] == "histogram",
          "the Prometheus client reads /metrics", (kinds, n_typed))


def test_dashboard(d):
    with open(os.path.join(SRCDIR, "etc", "grafana.json"), encoding="utf-8") as f:
        panels = json.load(f)["panels"]
    served = {name.split("{")[0] for name in d.metrics()}
    read = set()
    for panel in panels:
        for target in panel["targets"]:
            read |= set(re.findall(r"(?:prefilld|vllm):?_?[a-z_]+", target["expr"]))
    check(len(read) > 10 and read <= served, "the dashboard reads metrics that are served",
          sorted(read - served))


def main():
    with Daemon() as d:
        sums = d.pool_sums()
        test_answers(d)
        test_metrics_form(d)
        test_cuts_and_company(d)
        test_text(d)
        test_refusals(d)
        test_head(d)
        test_requests(d)
        test_dashboard(d)
        check(until(d.is_idle) and d.pool_sums() == sums, "all slots and pages are back", sums)
        m = d.metrics()
        check(m["prefilld_steps_total"] > 20 and m["prefilld_step_tokens_total"] > 3000 and
              m["prefilld_requests_total{outcome=\"ok\"}"] > 30, "the counters have counted")
        lines = [s for s in d.log if "status=200" in s]
        check(lines and all(w in lines[0] for w in ("id=", " tokens=", " cached=", " pieces=",
                                                    " queue_ms=", " prefill_ms=")),
              "one line for each request", lines[:1])
        check(not any("beginning" in s for s in d.log), "which has nothing of the prompt")
        check(d.stop() == 0, "SIGTERM: exit 0", d.log_text())
    test_deadlines()
    test_trace()
    test_limit()
    done()


main()
