#!/usr/bin/env python3
"""Lays what evaluate.py found side by side: compare.py FOLDER. Exit 1 when something differs that
must not: numbers by batch size or concurrency, accuracy, perplexity by more than 1e-4."""

import json
import math
import os
import sys


def read(folder, name):
    path = os.path.join(folder, name + ".json")
    if not os.path.exists(path):
        return None
    with open(path, encoding="utf-8") as f:
        return json.load(f)


def pair(response):
    """(loglikelihood, is_greedy) of one response; a rolling one has no second."""
    value = response[0]
    return (float(value[0]), value[1]) if isinstance(value, list) else (float(value), None)


def accuracies(folder, rows):
    with open(os.path.join(folder, "tasks", "mc.jsonl"), encoding="utf-8") as f:
        docs = [json.loads(line) for line in f][:len(rows)]
    hits = [0, 0]
    for doc, choices in zip(docs, rows):
        values = [pair(c)[0] for c in choices]
        sizes = [len(c.encode()) for c in doc["choices"]]
        hits[0] += max(range(4), key=lambda i: values[i]) == doc["gold"]
        hits[1] += max(range(4), key=lambda i: values[i] / sizes[i]) == doc["gold"]
    return [h / len(rows) for h in hits]


def perplexity(folder, rows):
    with open(os.path.join(folder, "tasks", "roll.jsonl"), encoding="utf-8") as f:
        docs = [json.loads(line)["text"] for line in f][:len(rows)]
    return math.exp(-sum(pair(r[0])[0] for r in rows) / sum(len(d.split()) for d in docs))


def main(folder):
    good = True
    base = read(folder, "local-1-1")
    for name in ("local-1-1", "local-1-8", "local-16-1", "local-16-8"):
        found = read(folder, name)
        same = found["responses"] == base["responses"]
        good &= same
        mc, roll = found["responses"]["heldout_mc"], found["responses"]["heldout_roll"]
        acc, norm = accuracies(folder, mc)
        print(f"{name:12} {found['seconds']:6.1f} s  acc {acc:.4f} norm {norm:.4f}  "
              f"word perplexity {perplexity(folder, roll):.6f}  {'same' if same else 'DIFFERS'}")
    for name in ("sglang", "hf"):
        found = read(folder, name)
        if not found:
            continue
        mc, roll = found["responses"]["heldout_mc"], found["responses"]["heldout_roll"]
        ours = base["responses"]["heldout_mc"][:len(mc)]
        rolls = base["responses"]["heldout_roll"][:len(roll)]
        far = max(abs(pair(a)[0] - pair(b)[0]) / abs(pair(b)[0])
                  for x, y in zip(ours + rolls, mc + roll) for a, b in zip(x, y))
        a, b = perplexity(folder, rolls), perplexity(folder, roll)
        same = accuracies(folder, ours) == accuracies(folder, mc) and abs(a - b) <= 1e-4 * b
        # sglang-generate of lm-eval 0.4.13 says greedy where no token is the best.
        if name == "hf":
            same &= all(pair(p)[1] == pair(q)[1] for x, y in zip(ours, mc) for p, q in zip(x, y))
        good &= same
        print(f"{name:12} {len(mc)} questions, {len(roll)} texts: acc "
              f"{accuracies(folder, mc)[0]:.4f} here {accuracies(folder, ours)[0]:.4f}, word "
              f"perplexity {b:.6f} here {a:.6f}, loglikelihoods within {far:.1e}  "
              f"{'same' if same else 'DIFFERS'}")
    sys.exit(not good)


main(sys.argv[1])
