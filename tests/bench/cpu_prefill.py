#!/usr/bin/env python3
"""Races the CPU backend against transformers on the same checkpoint, threads and tokens.

    cpu_prefill.py BENCH_BINARY [--threads 2] [--repeats 3] [--work DIR] [--models demo 0.8b]

Needs torch, numpy, safetensors and transformers 5.24 (PyPI). The 0.8B-shaped checkpoint is made
here with random weights and read by both sides, so the next token of each shape is compared: a row
counts only when both give the same answer. Rows alternate between the contestants.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM

HERE = os.path.dirname(os.path.abspath(__file__))
SHAPES = ["1x512", "1x2048", "8x256"]


def tokens(n, length, repeat, vocab):
    t = torch.arange(1, length + 1).unsqueeze(0)
    p = torch.arange(1, n + 1).unsqueeze(1)
    return (7919 * t + 104729 * p + 1299709 * repeat) % vocab


def make_checkpoint(work):
    path = os.path.join(work, "0.8b")
    if not os.path.exists(os.path.join(path, "model.safetensors")):
        torch.manual_seed(1)
        config = AutoConfig.from_pretrained(os.path.join(HERE, "models/0.8b"))
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(path, max_shard_size="10GB")
    return path


def run_torch(model, shape, repeats):
    n, length = map(int, shape.split("x"))
    vocab = model.config.vocab_size
    times = []
    with torch.inference_mode():
        for k in range(repeats + 1):
            ids = tokens(n, length, k, vocab)
            start = time.perf_counter()
            out = model(ids, use_cache=True, logits_to_keep=1)
            times.append(time.perf_counter() - start)
            if k == 0:
                lp = torch.log_softmax(out.logits[0, -1].float(), -1)
                best = int(lp.argmax())
                first = (best, float(lp[best]))
    return statistics.median(times[1:]), first


def run_ours(binary, path, args, shape):
    out = subprocess.run([binary, path, "file", str(args.threads), str(args.repeats), shape],
                         check=True, capture_output=True, text=True).stdout
    return json.loads(out)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("binary")
    p.add_argument("--models", nargs="+", default=["demo", "0.8b"])
    p.add_argument("--threads", type=int, default=os.cpu_count())
    p.add_argument("--repeats", type=int, default=3)
    p.add_argument("--work", default="/tmp/prefilld-bench")
    args = p.parse_args()
    os.makedirs(args.work, exist_ok=True)
    torch.set_num_threads(args.threads)
    bad = 0
    print("| model | shape | prefilld tok/s | transformers f32 | transformers bf16 | ratio |")
    print("|---|---|---|---|---|---|")
    for name in args.models:
        path = os.path.join(HERE, "../models/demo") if name == "demo" else make_checkpoint(args.work)
        models = {d: AutoModelForCausalLM.from_pretrained(path, dtype=d).eval()
                  for d in (torch.float32, torch.bfloat16)}
        for shape in SHAPES:
            n, length = map(int, shape.split("x"))
            ours = run_ours(args.binary, path, args, shape)
            f32, answer = run_torch(models[torch.float32], shape, args.repeats)
            bf16, _ = run_torch(models[torch.bfloat16], shape, args.repeats)
            same = abs(ours["next_logprob"] - answer[1]) < 1e-3 and ours["next_id"] == answer[0]
            bad += not same
            best = n * length / min(f32, bf16)
            print(f"| {name} | {shape} | {ours['tokens_per_s']:.0f} | {n * length / f32:.0f} | "
                  f"{n * length / bf16:.0f} | {ours['tokens_per_s'] / best:.2f}"
                  f"{'' if same else ' WRONG ANSWER'} |", flush=True)
    return bad


if __name__ == "__main__":
    sys.exit(main())
