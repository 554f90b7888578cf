#!/usr/bin/env python3
"""The daemon's life from outside: addresses, loading, overload, hang-ups, drain, signals,
framing, keys, exit status. TAP."""

import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time

from e2e import MODEL, PREFILLD, Conn, Daemon, big_model, check, done, request, until

LONG = [7] * 30000  # tokens that take seconds in steps of 64
SLOW = ("--max-step-tokens", 64)


def send_prefill(d, prompt, **fields):
    c = d.conn()
    c.send(request("POST", "/v1/prefill", {"prompt": prompt, "logprobs": "none", **fields}))
    return c


def accepted(d):
    m = d.metrics()
    return m["prefilld_requests_running"] + m["prefilld_requests_waiting"]


def test_start(tmp):
    path = os.path.join(tmp, "s")
    with Daemon("--served-name", "my model", listen=("127.0.0.1:0", f"unix:{path}")) as d:
        ready = [s for s in d.log if s.startswith("ready ")][0]
        check(re.match(r"ready listen=127\.0\.0\.1:[1-9]\d*,unix:\S+ model=my model backend=cpu ",
                       ready), "the start-up line", ready)
        check(d.ask("GET", "/v1/models").json()["data"][0]["id"] == "my model", "served-name")
        with Conn(d.addresses[1]) as c:
            check(c.ask("POST", "/v1/prefill", {"prompt": [1]}).status == 200, "the unix socket")
        check(d.prefill(prompt=[1], model="my model").status == 200, "the served model")
        second = subprocess.run([PREFILLD, "--model", MODEL, "--listen", d.address],
                                stderr=subprocess.PIPE, text=True, check=False)
        check(second.returncode == 1 and d.address in second.stderr, "a port in use: exit 1",
              second.stderr)
        check(d.stop() == 0 and not os.path.exists(path), "exit 0, and the path is gone")
    folder = tempfile.mkdtemp()
    fifo, nul, bom = (os.path.join(folder, n) for n in ("fifo", "nul", "bom"))
    os.mkfifo(fifo)
    with open(nul, "wb") as f:
        f.write(b"good\nab\0cdefghijklmnop\n")
    with open(bom, "wb") as f:
        f.write(b"\xef\xbb\xbfmax-seqs 3\r\n")
    r = subprocess.run([PREFILLD, "--model", MODEL, "--check", "--config", bom,
                        "--log-level", "error"], capture_output=True, text=True, check=False)
    check(r.returncode == 0 and "in 3 pieces" in r.stdout and not r.stderr,
          "--check prints its sizes at any log level; a byte order mark is passed over", r.stdout)
    r = subprocess.run([PREFILLD, "-h"], capture_output=True, text=True, check=False)
    check(r.returncode == 0 and "--max-seqs" in r.stdout, "-h", r.stderr)
    for args, word in ((["--model", "/nonexistent"], "/nonexistent"),
                       (["--model", MODEL, "--max-seqs", "0"], "max-seqs"),
                       (["--model", MODEL, "--nonsense", "1"], "nonsense"),
                       (["--model", MODEL, "--listen", "nowhere"], "nowhere"),
                       (["--model", "--check"], "needs a value"),
                       (["--model", MODEL, "--check", "--served-name", "a\nready listen=x"],
                        "served-name"),
                       (["--model", MODEL, "--check", "--served-name", os.fsdecode(b"\xff")], "served-name"),
                       (["--model", MODEL, "--check", "--api-key-file", fifo], "regular file"),
                       (["--model", MODEL, "--check", "--api-key-file", nul], "nul:2"),
                       (["--model", MODEL, "--listen", "127.0.0.1:0", "--api-key-file",
                         "/nonexistent"], "/nonexistent"),
                       (["--model", MODEL, "--check", "--api-key-file", "/nonexistent"],
                        "/nonexistent")):
        r = subprocess.run([PREFILLD, *args], stderr=subprocess.PIPE, text=True, check=False,
                           timeout=60)
        check(r.returncode == 78 and word in r.stderr, f"{args[-2:]}: exit 78", r.stderr)
    shutil.rmtree(folder)


def test_loading(tmp):
    model = big_model(tmp)
    with socket.create_server(("127.0.0.1", 0)) as s:
        address = "127.0.0.1:%d" % s.getsockname()[1]
    args = ("--load", "dummy", "--state-slots", 4, "--kv-tokens", 1024)
    with Daemon(*args, model=model, listen=(address,), waits=False) as d:
        d.addresses = [address]

        def answers():
            try:
                return d.ask("GET", "/ready")
            except OSError:
                return None

        a = until(answers)
        check(a.status == 503 and a.json()["status"] == "loading" and
              0 <= a.json()["progress"] <= 1, "the socket answers while loading", a)
        check(d.ask("GET", "/health").status == 200, "health while loading")
        check(d.ask("GET", "/version").json()["backend"] == "cpu", "version while loading")
        check("prefilld_connections" in d.metrics(), "metrics while loading")
        a = d.prefill(prompt=[1])
        check(a.status == 503 and "loading" in a.error()["message"] and
              int(a.headers["retry-after"]) >= 1, "prefill: 503 with Retry-After", a)
        check(d.ask("GET", "/v1/models").status == 503, "models: 503")
        d.signal(signal.SIGTERM)
        check(d.wait() == 0, "SIGTERM while loading: exit 0", d.log_text())
    with Daemon(*args, model=model) as d:
        check(d.ask("GET", "/ready").json() == {"status": "ready"}, "ready")
        check(d.prefill(prompt=[1, 2, 3]).status == 200, "ids need no tokenizer")
        a = d.prefill(prompt="text")
        check(a.status == 400 and a.error()["param"] == "prompt", "text does", a)
        check(d.ask("GET", "/tokenizer_info").status == 404, "no tokenizer, no info")


def test_overload():
    with Daemon(*SLOW, "--state-slots", 1, "--max-seqs", 1, "--queue-length", 2) as d:
        sums = d.pool_sums()
        first = send_prefill(d, LONG)
        until(lambda: d.metrics()["prefilld_requests_running"] == 1)
        others = [send_prefill(d, LONG) for _ in range(2)]
        until(lambda: d.metrics()["prefilld_requests_waiting"] == 2)
        start = time.monotonic()
        a = d.prefill(prompt=[1])
        m = d.metrics()
        seconds = int(a.headers.get("retry-after", 0))
        check(a.status == 503 and a.error()["type"] == "overloaded_error" and seconds >= 1,
              f"a full queue: 503 with Retry-After {seconds}", a)
        check(time.monotonic() - start < 10, "without a wait")
        expected = m["prefilld_backlog_tokens"] / max(m["prefilld_rate_tokens_per_second"], 1)
        check(seconds >= 3600 or 0.3 * expected <= seconds <= 3 * expected + 2,
              f"which is about what the backlog takes: {expected:.0f} s")
        check(m["prefilld_requests_waiting"] == 2 and m["prefilld_requests_running"] == 1,
              "one runs, two wait")
        check(d.ask("GET", "/health").status == 200, "health under load")
        # Hang up on one that waits and on the one that runs; the last is served or dropped too.
        others[0].close()
        check(until(lambda: d.counted("cancelled") == 1), "one that waits hangs up: cancelled")
        first.sock.shutdown(socket.SHUT_WR)
        check(until(lambda: d.counted("cancelled") == 2), "one that runs half-closes: cancelled")
        check(first.ends(), "it gets no answer")
        others[1].close()
        first.close()
        check(until(d.is_idle) and d.pool_sums() == sums, "the pools are full again")
        check(d.prefill(prompt=[1]).status == 200, "and requests are served again")
        check(d.metrics()["prefilld_step_tokens_total"] < 60000, "what was cancelled stopped early")


def test_drain():
    with Daemon(*SLOW, "--drain-s", 300) as d:
        slow = [send_prefill(d, [7] * 2000) for _ in range(3)]
        idle = d.conn()
        idle.ask("GET", "/health")
        check(until(lambda: accepted(d) == 3, 10), "three are accepted")
        d.signal(signal.SIGTERM)
        until(lambda: d.ask("GET", "/ready").status == 503, 10)
        a = d.ask("GET", "/ready")
        check(a.status == 503 and a.json()["status"] == "draining",
              "a new connection hears that it drains", a)
        a = d.ask("POST", "/v1/prefill", {"prompt": [1]})
        check(a.status == 503 and "retry-after" in a.headers, "and is refused with Retry-After", a)
        try:
            a = idle.ask("POST", "/v1/prefill", {"prompt": [1]})
        except ConnectionError:
            a = None
        check(a is None or (a.status == 503 and "retry-after" in a.headers),
              "new work is refused while draining", a)
        answers = [c.read() for c in slow]
        check(all(a and a.status == 200 and a.headers.get("connection") == "close" for a in answers),
              "what was accepted is answered", answers)
        check(d.wait() == 0, "exit 0 after a drain", d.log_text())
    with Daemon(*SLOW, "--drain-s", 1) as d:
        c = send_prefill(d, LONG)
        until(lambda: d.metrics()["prefilld_requests_running"] == 1)
        start = time.monotonic()
        d.signal(signal.SIGTERM)
        a = c.read()
        check(a is None or a.status == 503, "past drain-s the rest gets 503 or a close", a)
        check(d.wait() is not None, "and the daemon ends")
        check(time.monotonic() - start < 30, "in about drain-s")
    with Daemon("--drain-s", 0, "--log-level", "info") as d:
        d.prefill(prompt=[1, 2, 3])
        check(d.stop() == 0 and "event=drained" in d.log_text() and
              "drain_cut" not in d.log_text(), "with drain-s 0 nothing is cut when nothing runs",
              d.log_text())
    with Daemon(*SLOW, "--drain-s", 1000) as d:
        c = send_prefill(d, LONG)
        until(lambda: d.metrics()["prefilld_requests_running"] == 1)
        d.signal(signal.SIGTERM)
        time.sleep(0.3)
        check(d.process.poll() is None, "a drain waits for what runs")
        d.signal(signal.SIGTERM)
        a = c.read()
        check(a is None or a.status == 503, "a second SIGTERM ends it", a)
        check(d.wait() is not None and d.process.returncode >= 0, "without an abort",
              d.process.returncode)


FRAMING = [
    (b"POST /v1/prefill HTTP/1.1\r\nHost: t\r\nContent-Length: 14\r\nContent-Length: 15\r\n\r\n"
     b'{"prompt":[1]}', 400),
    (b"POST /v1/prefill HTTP/1.1\r\nHost: t\r\nContent-Length: 5\r\n"
     b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    (b"POST /v1/prefill HTTP/1.1\r\nContent-Length: 14\r\n\r\n{\"prompt\":[1]}", 400),
    (b"GET /health HTTP/1.1\r\n\r\n", 400),
    (b"POST /v1/prefill HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: gzip\r\n\r\n", 501),
    (b"POST /v1/prefill HTTP/1.1\r\nHost: t\r\nContent-Length: 1000000000\r\n\r\n", 413),
    (b"POST /v1/prefill HTTP/1.1\r\nHost: t\r\nContent-Length: 1000000000\r\n"
     b"Expect: 100-continue\r\n\r\n", 413),
    (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: t\r\n\r\n", 414),
    (b"GET /health HTTP/1.1\r\nHost: t\r\nA: " + b"b" * 17000 + b"\r\n\r\n", 431),
]


def test_framing():
    with Daemon("--max-body-bytes", 1 << 20, "--header-timeout-s", 1, "--body-timeout-s", 1) as d:
        for text, status in FRAMING:
            with d.conn() as c:
                c.send(text + b"GET /smuggled HTTP/1.1\r\nHost: t\r\n\r\n")
                a = c.read()
                kind = a.error()["type"] if a.body[:1] == b"{" else None
                check(a.status == status and kind == "invalid_request_error" and
                      a.headers.get("connection") == "close" and c.ends(),
                      f"{text[:60]}: {status} and a close", a)
        # These libmicrohttpd refuses itself, with a second head in the body (README): nothing else comes.
        for value, status in ((b"abc", 400), (b"-1", 400), (b"", 400), (b"5, 5", 400), (b"9" * 23, 413)):
            with d.conn() as c:
                c.send(b"POST /v1/prefill HTTP/1.1\r\nHost: t\r\nContent-Length: " + value +
                       b"\r\n\r\nGET /smuggled HTTP/1.1\r\nHost: t\r\n\r\n")
                text = b""
                try:
                    while data := c.sock.recv(1 << 16):
                        text += data
                except ConnectionError:  # it was closed before all was read
                    pass
                heads = re.findall(rb"HTTP/1\.1 (\d+)", text)
                check(set(heads) == {b"%d" % status} and len(heads) <= 2 and
                      b"\r\nConnection: close\r\n" in text, f"Content-Length: {value}", text)
        # Drips: headers, and a body.
        start = time.monotonic()
        with d.conn() as head, d.conn() as body:
            body.send(b"POST /v1/prefill HTTP/1.1\r\nHost: t\r\nContent-Length: 100\r\n\r\n")
            for _ in range(40):
                for c in (head, body):
                    try:
                        c.send(b"a")
                    except ConnectionError:
                        pass
                time.sleep(0.05)
            for c in (head, body):
                try:
                    a = c.read()
                except ConnectionError:
                    a = None
                check(a is None or a.status == 408, "a dripping sender: 408 or a close", a)
        check(time.monotonic() - start < 10, "in time")
        # A large body within the limit.
        prompt = json.dumps({"prompt": [1] * 200000}).encode()
        a = d.ask("POST", "/v1/prefill", prompt)
        check(a.status == 400 and "200000" in a.error()["message"], "a body of 600 kB", a)
        a = d.ask("POST", "/v1/prefill", b" " * ((1 << 20) + 1))
        check(a.status == 413, "one byte too many", a)
        check(until(lambda: d.metrics()["prefilld_connections"] == 1), "no connection is left")


def test_limits(tmp):
    with Daemon("--max-connections", 3) as d:
        conns = [d.conn() for _ in range(3)]
        for c in conns:
            c.ask("GET", "/health")
        with d.conn() as c:
            try:
                a = c.ask("GET", "/health")
            except ConnectionError:
                a = None
            check(a is None or a.status == 503, "the fourth of three connections", a)
        conns[0].close()

        def served():
            try:
                return d.ask("GET", "/health").status == 200
            except (ConnectionError, AttributeError):
                return False

        check(until(served), "after one has left there is room")
    # More connections than the system lets it have: fewer are taken, and that is said.
    few = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (160, 160))
    with Daemon(before=few) as d:
        check(any("event=fewer_connections max_connections=32 " in s for s in d.log),
              "fewer connections than asked for, in words", d.log)
        conns = [d.conn() for _ in range(100)]
        try:
            a = conns[99].read()
        except ConnectionError:
            a = None
        check(a is None or a.status == 503, "the hundredth is refused", a)
        for c in conns:
            c.close()
        check(until(served), "and service again when there is room")
        check(len(d.log) < 1000, "without a flood of lines", len(d.log))
    none = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60))
    r = subprocess.run([PREFILLD, "--model", MODEL, "--listen", "127.0.0.1:0"], text=True,
                       stderr=subprocess.PIPE, check=False, preexec_fn=none)
    check(r.returncode == 78 and "open files is 60" in r.stderr, "too few: exit 78", r.stderr)
    # A soft limit is raised to what max-connections needs.
    soft = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (60, 1000))
    with Daemon("--max-connections", 300, before=soft) as d:
        conns = [d.conn() for _ in range(200)]
        check(all(c.ask("GET", "/health").status == 200 for c in conns),
              "200 connections with a soft limit of 60")
        for c in conns:
            c.close()
    keys = os.path.join(tmp, "keys")
    with open(keys, "w") as f:
        f.write("alpha\nbeta\n")
    with Daemon("--api-key-file", keys) as d:
        check(d.prefill(prompt=[1]).status == 401, "no key")
        for key, status in (("alpha", 200), ("beta", 200), ("alph", 401), ("gamma", 401)):
            a = d.ask("POST", "/v1/prefill", {"prompt": [1]}, [f"Authorization: Bearer {key}"])
            check(a.status == status and
                  (status == 200 or a.error()["type"] == "authentication_error"), f"key {key}", a)
        check(d.ask("GET", "/health").status == 200 and d.ask("GET", "/metrics").status == 200,
              "health and metrics need no key")
        check(not any("alpha" in s or "gamma" in s for s in d.log), "keys are not logged")
    with Daemon("--api-key-file", keys, "--api-key-scope", "all-but-health") as d:
        check(d.ask("GET", "/health").status == 200 and d.ask("GET", "/metrics").status == 401 and
              d.ask("GET", "/metrics", None, ["Authorization: Bearer beta"]).status == 200,
              "api-key-scope: metrics need a key, health does not")


def test_log():
    """One line of key=value a request, its id first; never a prompt, also where all is told."""
    with Daemon("--log-level", "debug") as d:
        asked = [("/v1/prefill", {"prompt": "leviathan " * 9, "request_id": "one"}, 200),
                 ("/v1/prefill", {"prompt": "leviathan", "request_id": "two", "top_logprobs": 99}, 400),
                 ("/v1/completions", {"prompt": ["leviathan"] * 3, "max_tokens": 2}, 200),
                 ("/v1/score", {"context": "leviathan", "continuations": ["leviathan"]}, 200),
                 ("/v1/prefill", b'{"prompt": "leviathan', 400),
                 ("/tokenize", {"prompt": "leviathan"}, 200)]
        for path, body, status in asked:
            a = d.ask("POST", path, body)
            check(a.status == status, f"{path}: {status}", a)
        d.stop()
        log = d.log_text()
    form = (r"^\S+ info id=(\S+) status=(\d+) outcome=\w+ tokens=(\d+) cached=\d+ pieces=(\d+) "
            r"queue_ms=[\d.]+ prefill_ms=[\d.]+( requests=3 new=6)?$")
    lines = re.findall(form, log, re.M)
    check([line[1] for line in lines] == ["200", "400", "200", "200", "400"] and
          lines[0][0] == "one" and int(lines[0][2]) > 9 and lines[0][3] == "1" and
          lines[1][0] == "two" and lines[2][4], "a line a request", (lines, log))
    check("leviathan" not in log, "prompts are not logged", log)


def test_priorities():
    """With one slot, the order in which what waits is served."""
    with Daemon(*SLOW, "--state-slots", 1, "--max-seqs", 1) as d:
        first = send_prefill(d, [7] * 3000)
        until(lambda: d.metrics()["prefilld_requests_running"] == 1)
        order = []

        def wait(name, c):
            order.append((c.read().json()["pieces"][0]["step"], name))

        threads = []
        for name, n, priority in (("long", 640, 0), ("short", 64, 0), ("late", 64, 5),
                                  ("urgent", 640, -5)):
            c = send_prefill(d, [7] * n, priority=priority)
            until(lambda n=len(threads): d.metrics()["prefilld_requests_waiting"] == n + 1)
            threads.append(threading.Thread(target=wait, args=(name, c)))
            threads[-1].start()
        first.read()
        for t in threads:
            t.join()
        order = [name for _, name in sorted(order)]
        check(order == ["urgent", "short", "long", "late"], f"priority, then short first: {order}")


def events_of(c, n):
    """The next n events of a stream; c.rest is used up."""
    data = b""
    while data.count(b"data: ") < n or not data.endswith(b"\r\n"):
        got = c.rest or c.sock.recv(1 << 16)
        c.rest = b""
        if not got:
            break
        data += got
    return data, [json.loads(line[6:]) for line in data.decode().splitlines()
                  if line.startswith("data: ")]


def test_steps():
    with Daemon("--max-step-tokens", 64) as d:
        d.prefill(prompt=[1, 2, 3], request_id="before")
        early = d.conn()
        early.send(request("GET", "/v1/steps"))
        raw, seen = events_of(early, 1)
        piece = seen[0]["pieces"][0]
        latency_ms = piece.pop("latency_ms")
        check(b"text/event-stream" in raw and len(seen) == 1 and seen[0]["step"] == 1 and
              piece == {"id": "before", "start": 0, "tokens": 3, "last": True} and latency_ms > 0,
              "a reader gets the latest steps at once", raw)
        check(seen[0]["slots"][0] + seen[0]["slots"][1] == 16 and seen[0]["ms"] > 0,
              "with times and pools", seen)
        readers = [d.conn() for _ in range(20)]
        for c in readers:
            c.send(request("GET", "/v1/steps"))
            events_of(c, 1)
        for c in readers[:10]:
            c.close()
        d.prefill(prompt=[5] * 100, request_id="after")
        seen = events_of(early, 2)[1]
        check([(e["step"], [(p["start"], p["tokens"], p["last"]) for p in e["pieces"]])
               for e in seen] == [(2, [(0, 64, False)]), (3, [(64, 36, True)])] and
              ["latency_ms" in e["pieces"][0] for e in seen] == [False, True],
              "and each step as it ends", seen)
        check(until(lambda: d.metrics()["prefilld_connections"] == 12), "who left is let go")
        check(d.ask("GET", "/").headers["content-type"].startswith("text/html"), "the live page")
        d.signal(signal.SIGTERM)
        check(d.wait() == 0 and "event=drained" in d.log_text(), "readers do not hold up a drain")
        raw = early.read_all()
        check(raw.endswith(b"0\r\n\r\n"), "a stream ends whole", raw)


def main():
    with tempfile.TemporaryDirectory() as tmp:
        test_start(tmp)
        test_loading(tmp)
        test_overload()
        test_drain()
        test_framing()
        test_limits(tmp)
        test_log()
        test_priorities()
        test_steps()
    done()


main()
