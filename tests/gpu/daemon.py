#!/usr/bin/env python3
"""The daemon on the GPU under load with hang-ups: every answer has the bits of the same request
to an idle daemon, the pools are full again, nothing fails. TAP. Arguments: [CLIENTS [REQUESTS]].
E2E_BACKEND names the backend (cuda)."""

import json
import os
import random
import sys
import threading
import time

sys.path.insert(0, os.path.join(os.environ.get("SRCDIR", "."), "tests"))
from e2e import Conn, Daemon, check, done, request, until  # noqa: E402

LENGTHS = [1, 2, 17, 63, 64, 65, 128, 130, 300, 511, 700, 1500]
VOCAB = 2048


def fields(i):
    r = random.Random(1000 + i)
    length = LENGTHS[i % len(LENGTHS)]
    return {"prompt": [r.randrange(VOCAB) for _ in range(length)],
            "logprobs": "all" if i % 3 else "next", "top_logprobs": i % 7}


def numbers(answer):
    return {k: answer.json().get(k) for k in ("next", "prompt_logprobs", "prompt_top")}


class Client(threading.Thread):
    def __init__(self, d, seed, n, want):
        super().__init__()
        self.d, self.r, self.n, self.want = d, random.Random(seed), n, want
        self.same = self.differ = self.hung_up = 0
        self.wrong = []

    def run(self):
        for _ in range(self.n):
            i = self.r.randrange(len(self.want))
            data = request("POST", "/v1/prefill", fields(i))
            try:
                with Conn(self.d.address) as c:
                    c.send(data)
                    if self.r.random() < 0.25:
                        time.sleep(self.r.random() * 0.02)
                        self.hung_up += 1
                        continue
                    a = c.read()
            except OSError as e:
                self.wrong.append(repr(e))
                continue
            if a is None or a.status != 200:
                self.wrong.append(repr(a))
            elif numbers(a) == self.want[i]:
                self.same += 1
            else:
                self.differ += 1
                self.wrong.append(f"prompt {i} of {LENGTHS[i % len(LENGTHS)]} tokens differs")


def main():
    n_clients = int(sys.argv[1]) if len(sys.argv) > 1 else 32
    n_requests = int(sys.argv[2]) if len(sys.argv) > 2 else 40
    backend = os.environ.get("E2E_BACKEND", "cuda")
    with Daemon("--backend", backend, "--state-slots", 12, "--kv-tokens", 32768,
                "--max-step-tokens", 1024, "--log-level", "warn") as d:
        check(d.ask("GET", "/version").json()["backend"] == backend, f"the backend is {backend}")
        sums = d.pool_sums()
        want = []
        for i in range(2 * len(LENGTHS)):
            a = d.prefill(**fields(i))
            if not check(a.status == 200, f"prompt {i} alone", a):
                done()
            want.append(numbers(a))
        check(all(numbers(d.prefill(**fields(i))) == want[i] for i in range(len(want))),
              "asked again, the same bits")
        start = time.monotonic()
        clients = [Client(d, i, n_requests, want) for i in range(n_clients)]
        for c in clients:
            c.start()
        for c in clients:
            c.join()
        same = sum(c.same for c in clients)
        differ = sum(c.differ for c in clients)
        wrong = [w for c in clients for w in c.wrong]
        print(f"# {n_clients} clients, {same} answers equal, {differ} differ, "
              f"{sum(c.hung_up for c in clients)} hung up, {time.monotonic() - start:.1f} s")
        check(not wrong and same > 0, "under load every answer has the bits of the idle daemon",
              "\n".join(wrong[:20]))
        check(until(d.is_idle, 20), "nothing runs or waits, nothing is held", d.metrics())
        check(d.pool_sums() == sums, "the pools are full again", d.pool_sums())
        m = d.metrics()
        check(m['prefilld_requests_total{outcome="error"}'] == 0, "nothing failed", m)
        check(d.ask("GET", "/health").status == 200, "healthy")
        text = d.ask("GET", "/v1/trace?last=256").body
        events = json.loads(text)["traceEvents"]
        steps = [e for e in events if e["name"] == "step"]
        gaps = sorted(e["args"]["gap_us"] for e in steps if "gap_us" in e["args"])
        if backend != "cpu":
            check(steps and gaps and all(e["dur"] > 0 for e in steps),
                  f"/v1/trace has {len(steps)} steps on the device, {len(gaps)} behind another")
            check(m["prefilld_gap_seconds_count"] >= len(gaps), "gaps are counted", m)
            print(f"# gaps under this load: p50 {gaps[len(gaps) // 2]:.1f} us, "
                  f"p99 {gaps[(len(gaps) - 1) * 99 // 100]:.1f} us")
        if "TRACE_OUT" in os.environ:
            with open(os.environ["TRACE_OUT"], "wb") as f:
                f.write(text)
        check(d.stop() == 0, "exit 0", d.log_text())
        check(not any("event=leak" in s for s in d.log), "the engine saw no leak", d.log_text())
    done()


main()
