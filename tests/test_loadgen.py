#!/usr/bin/env python3
"""clients/loadgen against a server that answers, stalls, refuses and hangs up as the test says,
and against the daemon. TAP."""

import asyncio
import contextlib
import importlib.machinery
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time

from e2e import Daemon, check, done, on_terminal

SRCDIR = os.environ.get("SRCDIR", ".")
LOADGEN = os.path.join(SRCDIR, "clients", "loadgen")
VOCAB, MAX_LEN = 1000, 4096
QUANTILES = {"p50", "p90", "p99", "p99.9", "max"}


class Stub:
    """Answers POST /v1/prefill. behave(i, body) is asked for each request: None for an answer, a
    status, "close", "garbage", "never", or a number of seconds (float) to answer after."""

    def __init__(self, path=None, key=None):
        self.path, self.key = path, key
        self.ready = threading.Event()
        self.reset()
        threading.Thread(target=lambda: asyncio.run(self.serve()), daemon=True).start()
        self.ready.wait()

    def reset(self, behave=lambda i, body: None, limit=10 ** 9):
        """limit: requests a connection carries before it is closed without word."""
        self.behave, self.limit = behave, limit
        self.bodies, self.times, self.n_now, self.most_now, self.n_dropped = [], [], 0, 0, 0
        self.stalled_until = 0.0

    async def serve(self):
        if self.path:
            server = await asyncio.start_unix_server(self.talk, self.path)
        else:
            server = await asyncio.start_server(self.talk, "127.0.0.1", 0, backlog=1024)
            self.url = "http://127.0.0.1:%d" % server.sockets[0].getsockname()[1]
        self.gate = asyncio.Lock()
        self.ready.set()
        async with server:
            await server.serve_forever()

    async def talk(self, reader, writer):
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            for _ in range(self.limit):
                if not await self.one(reader, writer):
                    break
        writer.close()

    async def one(self, reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        if self.key and f"Authorization: Bearer {self.key}" not in head:
            await self.answer(writer, 401, {"error": {"message": "key"}})
            return True
        if head.startswith("GET /v1/models"):
            await self.answer(writer, 200, {"data": [{"id": "stub", "vocab_size": VOCAB,
                                                      "max_model_len": MAX_LEN}]})
            return True
        body = json.loads(await reader.readexactly(
            int(re.search(r"Content-Length: (\d+)", head, re.I)[1])))
        i = len(self.bodies)
        self.bodies.append(body)
        self.times.append(time.monotonic())
        self.n_now += 1
        self.most_now = max(self.most_now, self.n_now)
        try:
            return await self.react(i, body, reader, writer)
        finally:
            self.n_now -= 1

    async def react(self, i, body, reader, writer):
        what = self.behave(i, body)
        if what == "never" or isinstance(what, float):
            try:
                gone = await asyncio.wait_for(reader.read(1), 60 if what == "never" else what)
                self.n_dropped += gone == b""
                return False
            except asyncio.TimeoutError:
                what = None
        if what == "serial":  # one at a time, 20 ms each
            async with self.gate:
                await asyncio.sleep(0.02)
            what = None
        if what == "close":
            return False
        if what == "garbage":
            writer.write(b"hello\r\n\r\n")
            return True
        n = len(body["prompt"]) if isinstance(body["prompt"], list) else 7
        await self.answer(writer, what or 200, {
            "object": "prefill", "usage": {"prompt_tokens": n},
            "timings": {"queue_ms": 0.25, "prefill_ms": 1.5}})
        return True

    async def answer(self, writer, status, body):
        data = json.dumps(body).encode()
        writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(data), data))
        await writer.drain()


def run(url, *args, status=0):
    """The JSON that it writes, and what it prints."""
    with tempfile.TemporaryDirectory() as tmp:
        path = os.path.join(tmp, "out.json")
        r = subprocess.run([sys.executable, LOADGEN, "--url", url, "--json", path,
                            *map(str, args)], capture_output=True, text=True, timeout=120)
        if r.returncode != status:
            check(False, f"exit status {status}", f"{args}\n{r}")
        result = None
        if os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                result = json.load(file)
        return result, r


def adds_up(r):
    return r["requests"] == r["ok"] + r["hangups"] + sum(r["errors"].values())


def test_counts(stub):
    stub.reset()
    r, out = run(stub.url, "--arrival", "constant", "--rate", 200, "--duration", 1,
                 "--length", "fixed:100")
    check(r["requests"] == r["ok"] == len(stub.bodies) == 200, "a constant rate sends R a second",
          out.stdout)
    check(r["errors"] == {} and r["hangups"] == 0 and adds_up(r), "no error, an empty table", r)
    check(set(r["latency_ms"]) == {"queue", "prefill", "total"}
          and all(set(v) == QUANTILES for v in r["latency_ms"].values()), "latency's shape", r)
    check(r["latency_ms"]["queue"]["max"] == 0.25 and r["latency_ms"]["prefill"]["p50"] == 1.5,
          "queue and prefill are the server's numbers", r["latency_ms"])
    values = list(r["latency_ms"]["total"].values())
    check(values == sorted(values) and values[0] > 0, "quantiles rise", values)
    # Some answers come just past the window's end.
    rate = r["throughput"]["requests_per_s"]
    check(0 < rate <= 200 and abs(r["throughput"]["input_tokens_per_s"] - 100 * rate) < 1,
          "throughput in requests and tokens", r["throughput"])
    check("200 answered" in out.stdout and "total latency, ms" in out.stdout, "a text report",
          out.stdout)
    r, _ = run(stub.url, "--rate", 200, "--arrival", "constant", "--duration", 0.5,
               "--warmup", 0.5)
    check(r["requests"] == 100, "the warm-up does not count", r["requests"])
    r, _ = run(stub.url, "--rate", 1000, "--requests", 37, "--duration", 5)
    check(r["requests"] == 37, "--requests ends it", r["requests"])


def test_omission(stub):
    """The server stands still for a second. An open loop that waits for answers, or counts from
    sending, would show a handful of slow requests; the third of them that fell due is charged."""
    for connections in (1000, 1):
        stub.reset()
        first = []

        def stall(i, body):
            now = time.monotonic()
            first.append(now)
            left = first[0] + 1.5 - now
            return left if 0 < left <= 1 else None

        stub.behave = stall
        r, out = run(stub.url, "--arrival", "constant", "--rate", 100, "--duration", 3,
                     "--length", "fixed:8", "--connections", connections, "--processes", 1)
        total = r["latency_ms"]["total"]
        # 300 requests; those due in the stalled second wait for 1000, 990, ... ms.
        check(r["ok"] == 300 and total["p99"] > 900 and total["p90"] > 600,
              f"a stall of 1 s shows in p99 and p90, {connections} connections", out.stdout)
    check(r["lag_ms"]["p90"] > 600, "waiting for a connection shows as lag", r["lag_ms"])


def test_errors(stub):
    kinds = {0: 503, 1: 504, 2: "close", 3: "garbage", 4: "never"}
    stub.reset(lambda i, body: kinds.get(i % 10))
    r, out = run(stub.url, "--arrival", "constant", "--rate", 100, "--duration", 1,
                 "--length", "fixed:8", "--timeout", 1, "--processes", 1, "--connections", 200)
    e = r["errors"]
    # A connection that closes before its answer began is tried once more when it had carried one.
    check(adds_up(r) and r["requests"] == 100 and len(stub.bodies) == 100 + r["resent"],
          "requests = answered + failed", r)
    check(set(e) == {"503", "504", "closed", "protocol", "timeout"} or
          set(e) == {"503", "504", "protocol", "timeout"}, "by status and cause", e)
    check(all(8 <= e[k] <= 13 for k in ("503", "504", "protocol", "timeout")), "counted", e)
    check("answered 503" in out.stdout and "not answered within" in out.stdout, "in words",
          out.stdout)
    stub.reset(lambda i, body: 500)
    r, _ = run(stub.url, "--concurrency", 2, "--duration", 0.5, status=1)
    check(r["ok"] == 0 and r["latency_ms"]["total"]["p50"] is None and 2 <= r["requests"] <= 20,
          "nothing answered is status 1, and refusals are not hammered", r)
    stub.reset(limit=3)
    r, _ = run(stub.url, "--concurrency", 2, "--duration", 0.5)
    check(r["errors"] == {} and r["ok"] > 6, "idle connections that close lose nothing", r)


def test_hangups(stub):
    stub.reset(lambda i, body: 2.0)
    r, _ = run(stub.url, "--rate", 100, "--arrival", "constant", "--duration", 1, "--hangup", 1,
               "--hangup-ms", 50)
    time.sleep(0.2)
    check(r["hangups"] == 100 and r["errors"] == {} and adds_up(r), "each one is hung up on", r)
    check(stub.n_dropped == 100, "and the server sees it", stub.n_dropped)
    stub.reset()
    r, _ = run(stub.url, "--rate", 200, "--duration", 1, "--hangup", 0.5, "--hangup-ms", 10000)
    check(r["hangups"] < 20 and adds_up(r), "an answer that was first counts as one", r)


def test_contents(stub):
    def bodies(*args):
        stub.reset()
        run(stub.url, "--requests", 300, "--rate", 2000, "--duration", 10, *args)
        return sorted(json.dumps(b, sort_keys=True) for b in stub.bodies)

    one = bodies("--length", "uniform:5:300", "--processes", 1)
    check(len(one) == 300 and one == bodies("--length", "uniform:5:300", "--processes", 2),
          "the same seed sends the same, however many processes")
    check(one != bodies("--length", "uniform:5:300", "--seed", 2), "another seed, something else")
    prompts = [json.loads(b)["prompt"] for b in one]
    lengths = [len(p) for p in prompts]
    check(5 <= min(lengths) <= 15 and 290 <= max(lengths) <= 300, "uniform fills its bounds",
          lengths)
    check(all(0 <= i < VOCAB for p in prompts for i in p), "ids lie in the vocabulary")
    heads = {tuple(p[:64]) for p in prompts if len(p) >= 64}
    check(len(heads) == sum(n >= 64 for n in lengths), "no two share a first block")

    lengths = [len(json.loads(b)["prompt"]) for b in bodies("--length", "lognormal:100:0.5")]
    # The median of 300 draws: exp(0.5 * 1.25 / sqrt(300)) = 4% a sigma; 5 of them.
    check(80 < statistics.median(lengths) < 122 and max(lengths) > 200, "lognormal", lengths)
    lengths = [len(json.loads(b)["prompt"]) for b in bodies("--length", "lognormal:4000:3")]
    check(max(lengths) == MAX_LEN, "lognormal keeps below what the model takes", max(lengths))
    with tempfile.NamedTemporaryFile("w") as file:
        file.write("3\n\n77\n")
        file.flush()
        lengths = {len(json.loads(b)["prompt"]) for b in bodies("--length", "file:" + file.name)}
        check(lengths == {3, 77}, "lengths from a file", lengths)
    prompts = [json.loads(b)["prompt"]
               for b in bodies("--length", "fixed:10", "--shared-prefix", "128:3")]
    check({len(p) for p in prompts} == {138} and len({tuple(p[:128]) for p in prompts}) == 3,
          "shared prefixes")
    with tempfile.NamedTemporaryFile("w", encoding="utf-8") as file:
        file.write("caf\u00e9 \"x\"\nother\n")
        file.flush()
        texts = {json.loads(b)["prompt"] for b in bodies("--text-file", file.name)}
        check(texts == {"caf\u00e9 \"x\"", "other"}, "text from a file", texts)
    body = json.loads(bodies("--priority=-3:3", "--deadline-ms", 900, "--logprobs", "none",
                             "--length", "fixed:1")[0])
    check(body["deadline_ms"] == 900 and body["logprobs"] == "none", "fields travel", body)
    priorities = {b.get("priority", 0) for b in stub.bodies}
    check(priorities == set(range(-3, 4)), "priorities fill their bounds", priorities)


def load_plan(*args):
    """The seconds at which requests are due: the tool's own plan, without a clock."""
    sys.dont_write_bytecode = True
    loader = importlib.machinery.SourceFileLoader("loadgen", LOADGEN)
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("loadgen", loader))
    loader.exec_module(module)
    sys.argv = ["loadgen", *map(str, args)]
    plan = module.Plan(module.parse_args(), {"vocab": VOCAB, "max_tokens": MAX_LEN})
    return [[r.at for r in plan.requests(i, 2)] for i in range(2)]


def test_arrivals(stub):
    two = load_plan("--rate", 300, "--duration", 4, "--length", "fixed:8")
    due = sorted(two[0] + two[1])
    # 1200 arrivals, sigma 34.6; the gaps of a Poisson process vary as much as they measure, and
    # the estimate of that from 1200 of them has a sigma of about 1/sqrt(1200) = 3%.
    check(abs(len(due) - 1200) < 5 * 34.6 and abs(len(two[0]) - len(two[1])) <= 1,
          "poisson: as many as asked for, shared evenly", len(due))
    gaps = [b - a for a, b in zip(due, due[1:])]
    variation = statistics.pstdev(gaps) / statistics.mean(gaps)
    check(0.85 < variation < 1.15, "poisson: gaps are exponential", variation)
    due = sorted(sum(load_plan("--rate", 100, "--arrival", "burst", "--burst", 20, "--duration", 1,
                               "--length", "fixed:8"), []))
    check(len(due) == 100 and sorted(set(due)) == [0, 0.2, 0.4, 0.6, 0.8], "burst", due)
    with tempfile.NamedTemporaryFile("w") as file:
        file.write("# seconds tokens priority\n0.5 30 -2\n0.1 10\n0.3, 20, 5\n")
        file.flush()
        check(load_plan("--trace", file.name) == [[0.1, 0.5], [0.3]], "a trace: times")
        stub.reset()
        run(stub.url, "--trace", file.name)
        sent = sorted((len(b["prompt"]), b.get("priority", 0)) for b in stub.bodies)
        check(sent == [(10, 0), (20, 5), (30, -2)], "a trace: lengths and priorities", sent)
    stub.reset(lambda i, body: 0.05)
    r, _ = run(stub.url, "--concurrency", 7, "--duration", 1, "--length", "fixed:8")
    check(stub.most_now == 7 and r["requests"] > 30, "a closed loop keeps C under way",
          (stub.most_now, r["requests"]))


def test_sweep(stub):
    stub.reset(lambda i, body: "serial")
    r, out = run(stub.url, "--sweep", "--rate", 20, "--p99-ms", 300, "--duration", 2,
                 "--arrival", "constant", "--length", "fixed:8")
    knee = r["knee"]["requests_per_s"]
    # A busy machine only lowers it.
    check(10 <= knee <= 60 and knee < r["knee"]["breaks_at"] and "knee:" in out.stdout,
          "a sweep finds the knee of a server of 50 requests/s at most", out.stdout)
    check(all(s["holds"] == (s["rate"] <= knee) for s in r["sweep"]), "below holds, above breaks",
          [(s["rate"], s["holds"]) for s in r["sweep"]])


def test_ways(stub, tmp):
    stub.reset()
    page = os.path.join(tmp, "page.html")
    run(stub.url, "--rate", 100, "--duration", 1, "--length", "uniform:1:99", "--html", page)
    with open(page, encoding="utf-8") as file:
        text = file.read()
    check(text.count("<svg") == 3 and "circle" in text and "requests/s" in text, "a page of plots")
    check(not re.search(r"(src|href)=|https?://(?!127)|@import|url\(", text), "it loads nothing")
    secret = Stub(os.path.join(tmp, "s.sock"), key="sesame")
    with open(os.path.join(tmp, "key"), "w", encoding="ascii") as file:
        file.write("sesame\nother\n")
    url = "unix:" + secret.path
    r, _ = run(url, "--concurrency", 2, "--requests", 20, "--api-key-file", file.name)
    check(r["ok"] == 20, "a unix socket, a key", r)
    _, out = run(url, "--concurrency", 2, status=2)
    check("--api-key-file" in out.stderr, "no key: exit 2", out.stderr)
    for args, status, part in [
            (["--rate", 5, "--concurrency", 1], 2, "give one of"), ([], 2, "give one of"),
            (["--rate", 5, "--length", "fixed:0"], 2, "fixed:N"), (["--rate", -5], 2, "--rate"),
            (["--rate", 5, "--hangup", 2], 2, "--hangup"), (["--sweep", "--rate", 5], 2, "--p99"),
            (["--trace", "/nonexistent"], 2, "No such file"),
            (["--rate", 5, "--priority", "9:1"], 2, "--priority"),
            (["--rate", 5, "--shared-prefix", "x"], 2, "--shared-prefix")]:
        _, out = run(stub.url, *args, status=status)
        check(part in out.stderr, f"status {status}: {' '.join(map(str, args))}", out.stderr)
    _, out = run("127.0.0.1:1", "--rate", 5, status=3)
    check("start prefilld" in out.stderr, "no server: exit 3", out.stderr)
    r, _ = run("127.0.0.1:1", "--rate", 50, "--duration", 0.5, "--vocab", 10, status=1)
    check(r["errors"] == {"connect": r["requests"]}, "it goes away: connect", r["errors"])


def test_progress(stub):
    stub.reset()
    status, seen = on_terminal(sys.executable, LOADGEN, "--url", stub.url, "--rate", "50",
                               "--duration", "3", "--length", "fixed:10")
    lines = re.findall(r"\r +(\d+) s  (\d+) sent, (\d+) answered, 0 failed, (\d+) out, (\d+) a second ",
                       seen)
    rest = seen.rsplit("\r", 1)[1]
    check(status == 0 and 2 <= len(lines) <= 4 and rest.startswith("\033[K"),
          "a line that is written over, once a second, and goes", repr(seen))
    n_answered = [int(line[2]) for line in lines]
    check(n_answered == sorted(n_answered) and 0 < n_answered[-1] <= len(stub.bodies),
          "it counts", lines)


def test_daemon():
    with Daemon("--max-step-tokens", 512) as d:
        url = "http://" + d.address
        r, out = run(url, "--concurrency", 4, "--duration", 1, "--length", "fixed:64",
                     "--timeout", 100)
        m = d.metrics()
        check(r["errors"] == {} and r["ok"] == m['prefilld_requests_total{outcome="ok"}'],
              "the daemon has answered what was counted", out.stdout)
        check(r["throughput"]["requests_per_s"] > 0, "at some rate", r["throughput"])
        r, _ = run(url, "--rate", 20, "--duration", 1, "--length", "fixed:2000", "--hangup", 0.5,
                   "--timeout", 100)
        check(r["hangups"] > 0 and r["errors"] == {} and adds_up(r), "hang-ups", r)
        m = d.metrics()
        check(m['prefilld_state_slots{state="held"}'] == 0 and
              m['prefilld_requests_total{outcome="cancelled"}'] <= r["hangups"],
              "and nothing is held by them")


def main():
    stub = Stub()
    with tempfile.TemporaryDirectory() as tmp:
        test_counts(stub)
        test_omission(stub)
        test_errors(stub)
        test_hangups(stub)
        test_contents(stub)
        test_arrivals(stub)
        test_sweep(stub)
        test_ways(stub, tmp)
        test_progress(stub)
        test_daemon()
    done()


if __name__ == "__main__":
    main()
