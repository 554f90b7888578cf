#!/usr/bin/env python3
"""The sixteen groups of faults of serving that users of other servers report (../shared/serving.md, 3c), each a test by
its number, from outside; where another test looks closer, its comment says where. TAP."""

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time

from e2e import MODEL, PREFILLD, SRCDIR, Daemon, check, done, request, until

LONG = [7] * 20000  # tokens that take seconds in steps of 64
seen = set()


def fault(number, good, what, detail=""):
    seen.add(number)
    check(good, f"serving fault {number}: {what}", detail)


def numbers(d, prompt):
    """All numbers of a prompt, or the whole answer when there are none."""
    j = d.prefill(prompt=prompt, logprobs="all", top_logprobs=2).json()
    return (j["prompt_logprobs"], j["prompt_top"], j["next"]) if "next" in j else j


def together(n, ask):
    """What ask(i) gives, for all i at a time."""
    found = [None] * n

    def run(i):
        found[i] = ask(i)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(n)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return found


def send(d, path, body):
    c = d.conn()
    c.send(request("POST", path, body))
    return c


def fault_1(tmp):
    """Pools are sized, and refused, before a weight is read: here there are none."""
    shutil.copy(os.path.join(MODEL, "config.json"), tmp)
    start = time.monotonic()
    r = subprocess.run([PREFILLD, "--model", tmp, "--state-slots", "1000000", "--check"],
                       capture_output=True, text=True, check=False)
    fault(1, r.returncode != 0 and ("does not fit" in r.stderr or "safetensors" in r.stderr) and
          time.monotonic() - start < 20, "what cannot fit is refused before loading", r.stderr)
    r = subprocess.run([PREFILLD, "--model", MODEL, "--state-slots", "1000000", "--check"],
                       capture_output=True, text=True, check=False)
    fault(1, r.returncode != 0 and "does not fit" in r.stderr and "state slots" in r.stderr and
          "free:" in r.stderr and "lower state-slots" in r.stderr, "with the numbers", r.stderr)
    with open(os.path.join(tmp, "config.json"), "w", encoding="utf-8") as file:
        json.dump({"model_type": "qwen3_5_text", "vocab_size": 1 << 24, "hidden_size": 1 << 16}, file)
    r = subprocess.run([PREFILLD, "--model", tmp, "--load", "dummy", "--check"],
                       capture_output=True, text=True, check=False)
    fault(1, r.returncode != 0 and "weights alone" in r.stderr and "lower" not in r.stderr,
          "and no advice that cannot help", r.stderr)
    with Daemon("--max-seqs", 1024, "--state-slots", 3, "--kv-tokens", 2048) as d:
        a = d.ask("POST", "/v1/completions", {"prompt": [[5, 6]] * 40, "max_tokens": 2})
        fault(1, a.status == 200 and len(a.json()["choices"]) == 40,
              "more max-seqs than slots is no failure", a)


def fault_2():
    """Admission counts slots and pages: what does not fit waits, and is served."""
    with Daemon("--state-slots", 3, "--kv-tokens", 1024, "--max-prompt-tokens", 512) as d:
        a = together(60, lambda i: d.prefill(prompt=[i + 1] * (8 * i + 8), logprobs="none").status)
        fault(2, set(a) == {200}, "60 prompts, 3 slots, pages for 2: all served", a)
        m = d.metrics()
        fault(2, m['prefilld_requests_total{outcome="error"}'] == 0 and until(d.is_idle),
              "none failed for memory")


def fault_3():
    """Slots and pages are pools of their own: one that is full leaves the other free."""
    with Daemon("--state-slots", 8, "--kv-tokens", 4096, "--max-step-tokens", 64) as d:
        with send(d, "/v1/prefill", {"prompt": [7] * 4096}):
            held = until(lambda: d.metrics()['prefilld_kv_pages{state="held"}'] == 64)
            m = d.metrics()
            fault(3, held and m['prefilld_kv_pages{state="free"}'] == 0 and
                  m['prefilld_state_slots{state="held"}'] == 1, "all pages, one slot", m)
        fault(3, until(d.is_idle), "and back")
        sizes = {k: v for k, v in d.metrics().items() if k.startswith("prefilld_memory_bytes{")}
        fault(3, len(sizes) == 4 and all(v > 0 for v in sizes.values()), "each has its bytes", sizes)


def fault_4():
    """A queue that is full, deadlines and hang-ups while waiting leak nothing (test_queue.c, test_engine.c, e2e_storm.py)."""
    with Daemon("--state-slots", 1, "--queue-length", 3, "--max-step-tokens", 64) as d:
        sums = d.pool_sums()
        first = send(d, "/v1/prefill", {"prompt": LONG})
        until(lambda: d.metrics()["prefilld_requests_running"] == 1)
        late = send(d, "/v1/prefill", {"prompt": [1], "deadline_ms": 300})
        gone = [send(d, "/v1/prefill", {"prompt": [1]}) for _ in range(2)]
        until(lambda: d.metrics()["prefilld_requests_waiting"] == 3)
        a = d.prefill(prompt=[1])
        fault(4, a.status == 503 and int(a.headers["retry-after"]) >= 1, "full: 503", a)
        fault(4, late.read().status == 504, "a deadline passes in the queue")
        for c in [*gone, first, late]:
            c.close()
        fault(4, until(d.is_idle) and d.pool_sums() == sums, "every slot and page is back", d.metrics())
        fault(4, d.prefill(prompt=[1]).status == 200, "and it serves")


def fault_5():
    """Who hangs up leaves no work behind, waiting or streaming; and few lines (test_streams.c)."""
    with Daemon("--max-step-tokens", 64) as d:
        c = send(d, "/v1/completions", {"prompt": "And", "max_tokens": 30000, "ignore_eos": True, "stream": True})
        c.sock.recv(1000)
        c.close()
        c = send(d, "/v1/prefill", {"prompt": LONG})
        until(lambda: d.metrics()["prefilld_requests_running"] > 0)
        c.close()
        fault(5, until(lambda: d.counted("cancelled") == 2) and until(d.is_idle), "both are cancelled")
        before = d.metrics()["prefilld_step_tokens_total"]
        fault(5, before < 10000 and len(d.log) < 30, "early, and in few lines", (before, len(d.log)))
    with Daemon("--sse-ping-s", 1, "--max-step-tokens", 64) as d:
        c = send(d, "/v1/completions", {"prompt": LONG, "max_tokens": 1, "stream": True})
        data = c.sock.recv(1000)
        fault(5, b"text/event-stream" in data and b": ping" in data + c.sock.recv(1000),
              "a clock keeps a stream alive while its prompt is computed", data)
        c.close()


def fault_6():
    """A slot's former content is met by none (test_bits.c and test_cpu_gdn_bits.c fill freed ones with NaN)."""
    prompt = [11 * i % 2000 for i in range(150)]
    with Daemon("--state-slots", 1, "--max-step-tokens", 64, "--kv-tokens", 20480) as d:
        alone = numbers(d, prompt)
        # Ends of former prompts 4 to 10 past a chunk or a page, and one that is cut off in the middle.
        for n in (64 + 4, 64 + 7, 128 + 10, 1, 63, 65):
            d.prefill(prompt=[9] * n)
            fault(6, numbers(d, prompt) == alone, f"behind a prompt of {n}: the same bits")
        c = send(d, "/v1/prefill", {"prompt": LONG})
        until(lambda: d.metrics()["prefilld_requests_running"] > 0)
        c.close()
        fault(6, numbers(d, prompt) == alone, "behind one that was cut off: the same bits")


def fault_7_8_9():
    """Batches: places, company, sizes of steps (test_bits.c has random schedules)."""
    prompt = [13 * i % 2000 for i in range(77)]
    others = [[(i * k) % 2000 for i in range(n)] for k, n in
              enumerate((1, 2, 63, 64, 65, 127, 128, 129, 200, 31, 300), 3)]
    fields = {"max_tokens": 1, "temperature": 0, "logprobs": 2, "echo": True}
    with Daemon() as d, Daemon("--max-step-tokens", 64, "--max-seqs", 5) as small:
        alone = d.ask("POST", "/v1/completions", {"prompt": prompt, **fields}).json()["choices"][0]
        for place in range(12):
            batch = others[:place] + [prompt] + others[place:]
            got = d.ask("POST", "/v1/completions", {"prompt": batch, **fields}).json()["choices"]
            fault(7, got[place]["logprobs"] == alone["logprobs"], f"place {place} of 12: the same bits")
        every = [x for c in got for x in c["logprobs"]["token_logprobs"][1:]]
        fault(8, all(isinstance(x, float) and -1e4 < x <= 0 for x in every), "all are numbers")
        a = together(40, lambda i: d.prefill(prompt=others[i % 11] + prompt[:i + 1]).status)
        fault(8, set(a) == {200} and d.process.poll() is None, "under load nothing breaks", a)
        got = small.ask("POST", "/v1/completions", {"prompt": others + [prompt], **fields}).json()["choices"]
        fault(9, got[-1]["logprobs"] == alone["logprobs"], "small steps, other company: the same bits")
        other_prompt = numbers(small, prompt[:-1] + [1])
        fault(9, other_prompt[0][-1] != alone["logprobs"]["token_logprobs"][76], "another token is another number")


def fault_10():
    """A stall is seen by /health while HTTP goes on; steps do not spin without tokens (e2e_systemd.py: the watchdog)."""
    with Daemon("--stall-s", 1, "--debug-calls", "yes", "--state-slots", 2, "--kv-tokens", 4096,
                "--max-step-tokens", 64) as d:
        fault(10, d.ask("POST", "/v1/debug/stall", {"seconds": 4}).status == 200, "an engine that stands still")
        c = send(d, "/v1/prefill", {"prompt": [1]})
        fault(10, until(lambda: d.ask("GET", "/health").status == 503), "is seen by /health")
        fault(10, d.ask("GET", "/version").status == 200, "while HTTP answers")
        fault(10, c.read().status == 200 and until(lambda: d.ask("GET", "/health").status == 200), "until it goes on")
        c.close()
        before = d.metrics()["prefilld_steps_total"]
        a = together(3, lambda i: d.prefill(prompt=[7] * 4000, logprobs="none").status)
        steps = d.metrics()["prefilld_steps_total"] - before
        fault(10, a == [200] * 3 and steps <= 3 * 64 + 3, f"prompts that wait for pages cost no steps: {steps:.0f}", a)


def fault_11():
    """Too long by one is a 400, and nothing else."""
    with Daemon("--max-prompt-tokens", 200, "--kv-tokens", 4096) as d:
        fault(11, d.prefill(prompt=[5] * 200).status == 200, "the longest")
        a = d.prefill(prompt=[5] * 201)
        fault(11, a.status == 400 and "201" in a.error()["message"] and "200" in a.error()["message"],
              "one more: both numbers", a)
        a = d.ask("POST", "/v1/completions", {"prompt": [5] * 200, "max_tokens": 2})
        fault(11, a.status == 400 and a.error()["param"] == "max_tokens", "no room for an answer", a)
        fault(11, d.ask("POST", "/v1/completions", {"prompt": [5] * 200, "max_tokens": 1}).status == 200 and
              d.prefill(prompt=[5]).status == 200, "and it goes on")


def fault_12_13():
    """Texts that are none, and HTTP that others stumble over (test_json.c, test_http.c, test_http_life.c)."""
    with Daemon("--max-body-bytes", "8M") as d:
        for what, body in (("a lone surrogate", b'{"prompt": "a\\ud800b"}'), ("bytes", b'{"prompt": "\xff\xfe"}'),
                           ("a cut character", b'{"prompt": "\xe2\x98"}'),
                           ("a surrogate as bytes", b'{"prompt": "\xed\xa0\x80"}'),
                           ("in a name", b'{"pro\\udc00mpt": "a"}')):
            a = d.ask("POST", "/v1/completions", body)
            fault(12, a.status == 400 and a.error()["type"] == "invalid_request_error" and a.body.decode() and
                  b"\\ud" not in a.body.lower(), f"{what}: 400, without it", a)
        fault(12, d.ask("POST", "/v1/completions", {"prompt": "\u0000\U0001f600", "max_tokens": 1}).status == 200,
              "NUL and all planes are text")
        a = d.prefill(prompt=[5] * 150000)
        fault(13, a.status == 400 and "150000" in a.error()["message"], "a body of 450 kB is read", a)
        with d.conn() as c:
            fault(13, [c.ask("POST", "/v1/prefill", {"prompt": [i]}).status for i in range(1, 31)] == [200] * 30,
                  "30 requests on a connection")
        fault(13, together(64, lambda i: d.prefill(prompt=[i + 1]).status) == [200] * 64, "64 connections at once")
        with d.conn() as c:
            c.send(b"GET /health HTTP/1.1\r\nHost: t\r\nX-A: " + b"a" * 100000)
            a = c.read()
            fault(13, a is None or a.status == 431, "a header without end", a)
        with d.conn() as c:
            start = time.monotonic()
            c.send(b"POST /v1/prefill HTTP/1.1\r\nHost: t\r\nContent-Length: 100000000\r\n\r\n")
            fault(13, c.read().status == 413 and time.monotonic() - start < 5, "100 MB are refused unread")
        fault(13, until(lambda: d.metrics()["prefilld_connections"] <= 1), "no connection stays")


def fault_14():
    """SIGTERM: what was accepted ends, what comes is refused, the status is 0 (e2e_life.py)."""
    with Daemon("--max-step-tokens", 64) as d:
        c = send(d, "/v1/prefill", {"prompt": [7] * 5000, "logprobs": "none"})
        late = d.conn()
        until(lambda: d.metrics()["prefilld_requests_running"] > 0)
        d.signal(signal.SIGTERM)
        until(lambda: "why=SIGTERM" in d.log_text())
        late.send(request("POST", "/v1/prefill", {"prompt": [1]}))
        a = late.read()
        fault(14, a is None or a.status == 503, "what comes is refused", a)
        fault(14, c.read().status == 200, "what was accepted is answered")
        fault(14, d.wait() == 0, "and it ends with 0", d.log_text())


def fault_15():
    """The device that was asked for, or none: never another in silence."""
    r = subprocess.run([PREFILLD, "--model", MODEL, "--backend", "cuda", "--listen", "127.0.0.1:0"],
                       capture_output=True, text=True, check=False, timeout=60,
                       env=dict(os.environ, CUDA_VISIBLE_DEVICES=""))
    fault(15, r.returncode != 0 and "cuda" in r.stderr and "ready" not in r.stderr, "no device, no service", r.stderr)
    with Daemon("--backend", "cpu") as d:
        fault(15, any(re.match(r"ready .* backend=cpu ", x) for x in d.log) and
              d.ask("GET", "/version").json()["backend"] == "cpu", "and it says what it is on")


def fault_16():
    """Nothing on the way of a step waits for the device but its end (tests/gpu measures the gap): by the source."""
    waits = re.compile(r"cuda\w*Synchronize\(|cudaMemcpy\(|cudaMalloc|cudaFree\(|cudaStreamQuery")
    found = []
    for folder, names in (("src", ("cuda_ops.c", "cuda_graph.c")),
                          ("kernels", sorted(os.listdir(os.path.join(SRCDIR, "kernels"))))):
        for name in names:
            with open(os.path.join(SRCDIR, folder, name), encoding="utf-8") as f:
                found += [f"{name}:{i}" for i, line in enumerate(f, 1) if waits.search(line)]
    fault(16, not found, "operations and kernels never wait nor allocate", found)
    with open(os.path.join(SRCDIR, "src", "cuda_step.c"), encoding="utf-8") as f:
        calls = re.findall(r"cudaEventSynchronize\((\S+?)\)", f.read())
    fault(16, calls == ["s->copied_out"], "a step has one wait, for its results", calls)
    with Daemon("--max-step-tokens", 64) as d:
        d.prefill(prompt=[7] * 1000, logprobs="none")
        names = {e["name"] for e in d.ask("GET", "/v1/trace?last=8").json()["traceEvents"] if e["ph"] == "X"}
        fault(16, {"plan", "pack", "launch", "publish"} <= names, "the trace shows what the host does", names)


with tempfile.TemporaryDirectory() as folder:
    fault_1(folder)
fault_2()
fault_3()
fault_4()
fault_5()
fault_6()
fault_7_8_9()
fault_10()
fault_11()
fault_12_13()
fault_14()
fault_15()
fault_16()
check(seen == set(range(1, 17)), "all sixteen", seen)
done()
