#!/usr/bin/env python3
"""Writes two tasks for lm-evaluation-harness into a folder, made of the demo model's held-out text:
heldout_mc, which of four endings is the text's own, and heldout_roll, its perplexity."""

import json
import os
import random
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
HELDOUT = os.path.join(HERE, "..", "models", "demo", "heldout.txt")
N_QUESTIONS, N_TEXTS = 60, 12

MC = """task: heldout_mc
dataset_path: json
dataset_kwargs: {data_files: {test: %s/mc.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_choice: "{{choices}}"
doc_to_target: gold
target_delimiter: ""
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
"""

ROLL = """task: heldout_roll
dataset_path: json
dataset_kwargs: {data_files: {test: %s/roll.jsonl}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - {metric: word_perplexity}
  - {metric: byte_perplexity}
  - {metric: bits_per_byte}
"""

GEN = """task: heldout_gen
dataset_path: json
dataset_kwargs: {data_files: {test: %s/mc.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{context}}"
doc_to_target: "{{choices[gold]}}"
target_delimiter: ""
generation_kwargs: {until: [",", "."], max_gen_toks: 24, temperature: 0, do_sample: false}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
"""


def main(folder):
    folder = os.path.abspath(folder)
    os.makedirs(folder, exist_ok=True)
    rng = random.Random(6)
    with open(HELDOUT, encoding="utf-8") as f:
        words = f.read().split(" ")

    def span(at, n):
        return " ".join(words[at:at + n])

    with open(os.path.join(folder, "mc.jsonl"), "w", encoding="utf-8") as f:
        for _ in range(N_QUESTIONS):
            at, n = rng.randrange(len(words) - 200), rng.randrange(20, 120)
            others = [" " + span(rng.randrange(len(words) - 20), 6) for _ in range(3)]
            gold = rng.randrange(4)
            choices = others[:gold] + [" " + span(at + n, 6)] + others[gold:]
            f.write(json.dumps({"context": span(at, n), "choices": choices, "gold": gold}) + "\n")
    with open(os.path.join(folder, "roll.jsonl"), "w", encoding="utf-8") as f:
        for _ in range(N_TEXTS):
            f.write(json.dumps({"text": span(rng.randrange(len(words) - 900), 800)}) + "\n")
    for name, text in (("mc", MC), ("roll", ROLL), ("gen", GEN)):
        with open(os.path.join(folder, f"heldout_{name}.yaml"), "w", encoding="utf-8") as f:
            f.write(text % folder)


main(sys.argv[1])
