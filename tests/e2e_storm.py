#!/usr/bin/env python3
"""10,000 requests from 64 connections with hang-ups at every stage: each that stays is answered,
none leaks, the pools are full again, memory stays flat. TAP. Arguments: [REQUESTS [SEED]]."""

import random
import socket
import struct
import sys
import threading
import time

from e2e import Conn, Daemon, check, done, is_sanitized, request, skip, until

N_CONNECTIONS = 64
N_SLOTS, KV_TOKENS = 4, 8192
# Between the first fifth and the end: 8,000 requests, of which 2,400 hang up; every slot, page and
# buffer of a step was touched before. A leak of each hang-up's struct request (4.5 KiB) would be
# 11 MiB, one of each exchange with its body (0.8 KiB) 6 MiB.
MAX_GROWTH_KIB = 4 * 1024

BODIES = [
    lambda r: {"prompt": [r.randrange(2048) for _ in range(r.randrange(1, 20))]},
    lambda r: {"prompt": "In the beginning God created", "logprobs": "all"},
    lambda r: {"prompt": [r.randrange(2048)] * r.randrange(1, 150), "logprobs": "none"},
    lambda r: {"prompt": [1, 2, 3], "priority": r.randrange(-5, 5), "deadline_ms": 100000},
    lambda r: {"prompt": [1, 2, 3], "deadline_ms": 1},
    lambda r: {"prompt": [5] * 5000, "logprobs": "none", "deadline_ms": r.randrange(1, 30)},
    lambda r: {"prompt": [99999]},
    lambda r: {"prompt": "a" * 3000, "top_logprobs": 21},
]
WEIGHTS = [30, 10, 10, 10, 5, 3, 5, 3]


def make_request(r):
    if r.random() < 0.1:
        return request("GET", r.choice(["/health", "/metrics", "/v1/models", "/nothing"]))
    return request("POST", "/v1/prefill", r.choices(BODIES, WEIGHTS)[0](r))


def reset(c):
    c.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def hang_up(r, c, data):
    """Leaves the server alone with it at some stage."""
    stage = r.randrange(7)
    if stage == 0:
        pass
    elif stage == 1:
        c.send(data[:r.randrange(1, 60)])
    elif stage == 2:
        c.send(data[:r.randrange(1, len(data))])
    else:
        c.send(data)
    if stage == 4:
        time.sleep(r.random() * 0.05)
    elif stage == 5:
        c.sock.settimeout(0.05)
        try:
            c.sock.recv(10)
        except OSError:
            pass
    elif stage == 6:
        c.sock.shutdown(socket.SHUT_WR)
        time.sleep(r.random() * 0.02)
    if r.random() < 0.3:
        reset(c)
    c.close()


class Client(threading.Thread):
    def __init__(self, d, seed, n):
        super().__init__()
        self.d, self.r, self.n = d, random.Random(seed), n
        self.statuses, self.errors = {}, []

    def run(self):
        c = None
        for _ in range(self.n):
            try:
                if c is None:
                    c = Conn(self.d.address)
                data = make_request(self.r)
                if self.r.random() < 0.3:
                    hang_up(self.r, c, data)
                    c = None
                    continue
                c.send(data)
                a = c.read()
                if a is None:
                    raise ConnectionError("closed without an answer")
                self.statuses[a.status] = self.statuses.get(a.status, 0) + 1
            except OSError as e:
                self.errors.append(repr(e))
                c = None
        if c:
            c.close()


def storm(d, seed, n):
    clients = [Client(d, seed + i, n // N_CONNECTIONS) for i in range(N_CONNECTIONS)]
    for c in clients:
        c.start()
    for c in clients:
        c.join()
    statuses, errors = {}, []
    for c in clients:
        errors += c.errors
        for status, k in c.statuses.items():
            statuses[status] = statuses.get(status, 0) + k
    return statuses, errors


def touch_all(d):
    """Fills the pools: prompts that together hold every slot and page."""
    def one(first):
        d.prefill(prompt=[(first + 7 * t) % 2048 for t in range(KV_TOKENS // N_SLOTS)],
                  logprobs="all")
    threads = [threading.Thread(target=one, args=(i,)) for i in range(N_SLOTS)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()


def main():
    # Sanitizers make it ten times as slow, TSan thirty, and find in fewer requests what they find.
    n = 640 if is_sanitized("tsan") else 2000 if is_sanitized() else 10000
    if len(sys.argv) > 1:
        n = int(sys.argv[1])
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    with Daemon("--state-slots", N_SLOTS, "--kv-tokens", KV_TOKENS, "--max-step-tokens", 512,
                "--log-level", "warn") as d:
        sums = d.pool_sums()
        start = time.monotonic()
        touch_all(d)
        storm(d, seed, n // 5)
        until(d.is_idle)
        rss = d.rss_kib()
        statuses, errors = storm(d, seed + 1000, n - n // 5)
        print(f"# seed {seed}: {n} requests in {time.monotonic() - start:.1f} s, "
              f"answers of the last {n - n // 5}: {statuses}")
        check(not errors, "who stays is answered", errors[:20])
        check(set(statuses) <= {200, 400, 404, 503, 504}, "with these statuses", statuses)
        check(statuses.get(200, 0) > n // 4, "most of them served")
        check(until(d.is_idle), "nothing runs or waits, nothing is held", d.metrics())
        check(d.pool_sums() == sums, "the pools are full again", d.pool_sums())
        check(until(lambda: d.metrics()["prefilld_connections"] == 1), "no connection is left",
              d.metrics())
        m = d.metrics()
        counts = {k: v for k, v in m.items() if k.startswith("prefilld_requests_total")}
        print(f"# {counts}")
        check(counts['prefilld_requests_total{outcome="cancelled"}'] > 0, "hang-ups cancelled")
        check(counts['prefilld_requests_total{outcome="error"}'] == 0, "nothing failed")
        growth = d.rss_kib() - rss
        if is_sanitized():
            skip("memory stays flat", "the sanitizer keeps freed memory")
        else:
            check(growth < MAX_GROWTH_KIB, f"memory stays flat: {rss} KiB and {growth} more")
        check(d.prefill(prompt=[1, 2, 3]).status == 200, "and it still serves")
        check(d.stop() == 0, "exit 0", d.log_text())
        check(not any("event=leak" in s for s in d.log), "the engine saw no leak")
    done()


main()
