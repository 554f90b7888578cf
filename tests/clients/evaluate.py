#!/usr/bin/env python3
"""Runs lm-evaluation-harness on the tasks of make_tasks.py and writes what it found as JSON.

    evaluate.py TASKS OUT hf MODEL LIMIT                    transformers in float32, LIMIT questions
    evaluate.py TASKS OUT BACKEND URL BATCH CONCURRENCY     local-completions or sglang-generate
"""

import json
import sys
import time

import lm_eval
from lm_eval.tasks import TaskManager


def main(folder, out, backend, *rest):
    tasks = ["heldout_mc", "heldout_roll", "heldout_gen"]
    limit = None
    if backend == "hf":
        args, batch = {"pretrained": rest[0], "dtype": "float32", "device": "cpu"}, 8
        limit = int(rest[1])
        tasks.remove("heldout_gen")  # without fast kernels a token takes seconds
    else:
        url, batch, concurrency = rest[0], int(rest[1]), int(rest[2])
        args = {"model": "demo", "base_url": url, "num_concurrent": concurrency,
                "tokenizer_backend": "remote", "tokenized_requests": True, "max_retries": 1}
        if backend == "sglang-generate":
            args["tokenizer_backend"] = "huggingface"
            args["tokenizer"] = rest[3]
            tasks.remove("heldout_gen")  # it sends ids under prompt for text; only scores here
    start = time.monotonic()
    found = lm_eval.simple_evaluate(model=backend, model_args=args, tasks=tasks, batch_size=batch,
                                    task_manager=TaskManager(include_path=folder),
                                    log_samples=True, bootstrap_iters=0, limit=limit)
    taken = time.monotonic() - start
    rows = {t: [s["resps"] for s in found["samples"][t]] for t in tasks}
    with open(out, "w", encoding="utf-8") as f:
        json.dump({"results": found["results"], "responses": rows, "seconds": taken}, f, indent=1)


main(*sys.argv[1:])
