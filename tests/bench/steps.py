#!/usr/bin/env python3
"""What readers of GET /v1/steps cost the daemon: microseconds of CPU a step, by thread.

    steps.py [--readers 0 1 4 16 64] [--seconds 4] PREFILLD...

The demo model generates from one prompt, a step a token; readers are curl. Several daemons are
measured in turns.
"""
import argparse
import os
import subprocess
import sys
import time

TESTS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
os.environ.setdefault("SRCDIR", os.path.join(TESTS, ".."))
sys.path.insert(0, TESTS)
import e2e  # noqa: E402
TICK_US = 1e6 / os.sysconf("SC_CLK_TCK")


def cpu_us(pid):
    """CPU time by thread, of the engine, libmicrohttpd's, and all others, which are workers but for main."""
    times = {"engine": 0, "MHD": 0, "workers": 0}
    for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/stat", encoding="ascii") as f:
            name, rest = f.read().split("(", 1)[1].rsplit(")", 1)
        kind = "engine" if name == "engine" else "MHD" if name.startswith("MHD") else "workers"
        times[kind] += sum(map(int, rest.split()[11:13])) * TICK_US
    return times


def curl(address, path, *more):
    return subprocess.Popen(["curl", "-sN", "-o", "/dev/null", f"http://{address}{path}", *more])


def measure(n_readers, seconds):
    """Steps a second, and CPU time a step by thread."""
    with e2e.Daemon("--cpu-threads", 1) as d:
        others = [curl(d.address, "/v1/completions", "-d",
                       '{"prompt": [5, 6, 7], "max_tokens": 30000, "ignore_eos": true}')]
        others += [curl(d.address, "/v1/steps") for _ in range(n_readers)]
        time.sleep(1)
        steps, before, start = d.metrics()["prefilld_steps_total"], cpu_us(d.process.pid), time.monotonic()
        time.sleep(seconds)
        after, took = cpu_us(d.process.pid), time.monotonic() - start
        steps = d.metrics()["prefilld_steps_total"] - steps
        for p in others:
            p.kill()
            p.wait()
        return steps / took, {k: (after[k] - before[k]) / steps for k in after}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prefilld", nargs="+")
    parser.add_argument("--readers", type=int, nargs="+", default=[0, 1, 4, 16, 64])
    parser.add_argument("--seconds", type=float, default=4)
    args = parser.parse_args()
    print("| readers | daemon | steps/s | workers, us a step | libmicrohttpd's thread |\n|---|---|---|---|---|")
    for n in args.readers:
        for path in args.prefilld:
            e2e.PREFILLD = path
            rate, us = measure(n, args.seconds)
            print(f"| {n} | {path} | {rate:.0f} | {us['workers']:.0f} | {us['MHD']:.0f} |", flush=True)


main()
