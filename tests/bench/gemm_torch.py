#!/usr/bin/env python3
"""Races prefilld's products against torch's, in turns, in one run, on the same threads.

usage: gemm_torch.py GEMM [THREADS] [ROUNDS]     (GEMM: the built tests/bench/gemm)

Each row is one shape [M, K] x [K, N]; each figure the best of all rounds, in GFLOP/s. prefilld's
activations are f32 in every column; torch's bf16 column rounds them to bf16. Small M goes
through as many different weights as hold 256 MB, as a model's layers do.
"""
import subprocess
import sys
import time

import torch

SHAPES = [(512, 2048, 2048), (2048, 3584, 1024), (64, 2048, 2048), (16, 2048, 2048),
          (1, 2048, 2048)]
COLD_BYTES = 256 << 20
BURST_S = 0.15


class Ours:
    def __init__(self, program, threads, dtype, kernel, shape, mats):
        self.line = "%d %d %d %s %s %d" % (*shape, dtype, kernel, mats)
        self.process = program
        self.best = float("inf")

    def burst(self, seconds):
        runs = max(3, int(seconds / self.best)) if self.best < 1 else 3
        self.process.stdin.write("%s %d\n" % (self.line, runs))
        self.process.stdin.flush()
        kernel, best, _ = self.process.stdout.readline().split()
        if kernel != "-":
            self.best = min(self.best, float(best))


class Torch:
    def __init__(self, dtype, shape, mats):
        m, k, n = shape
        self.a = torch.randn(m, k).to(dtype)
        self.w = [torch.randn(n, k).to(dtype) for _ in range(mats)]
        self.best = float("inf")

    def burst(self, seconds):
        end = time.perf_counter() + seconds
        i = 0
        while i < 3 or time.perf_counter() < end:
            w = self.w[i % len(self.w)]
            start = time.perf_counter()
            torch.nn.functional.linear(self.a, w)
            self.best = min(self.best, time.perf_counter() - start)
            i += 1


def race(program, threads, rounds, shape):
    m, k, n = shape
    mats = max(1, COLD_BYTES // (k * n * 2)) if m <= 16 else 1
    racers = {
        "amx bf16": Ours(program, threads, "bf16", "amx", shape, mats),
        "amx f32": Ours(program, threads, "f32", "amx", shape, mats),
        "avx512 bf16": Ours(program, threads, "bf16", "avx512", shape, mats),
        "avx512 f32": Ours(program, threads, "f32", "avx512", shape, mats),
        "avx2 f32": Ours(program, threads, "f32", "avx2", shape, mats),
        "torch f32": Torch(torch.float32, shape, mats),
        "torch bf16": Torch(torch.bfloat16, shape, mats),
    }
    for _ in range(rounds):
        for racer in racers.values():
            racer.burst(BURST_S)
    return {name: 2e-9 * m * k * n / r.best for name, r in racers.items()}


def main():
    threads = int(sys.argv[2]) if len(sys.argv) > 2 else 2
    rounds = int(sys.argv[3]) if len(sys.argv) > 3 else 5
    torch.set_num_threads(threads)
    program = subprocess.Popen([sys.argv[1], str(threads)], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, text=True)
    print("torch %s, %d threads, %d rounds" % (torch.__version__, threads, rounds))
    for shape in SHAPES:
        speed = race(program, threads, rounds, shape)
        print("%dx%dx%d" % shape)
        for name, gflops in speed.items():
            print("  %-12s %7.0f GFLOP/s  %5.2f of torch f32  %5.2f of torch bf16" % (
                name, gflops, gflops / speed["torch f32"], gflops / speed["torch bf16"]))
        sys.stdout.flush()
    program.stdin.close()
    program.wait()


if __name__ == "__main__":
    main()
