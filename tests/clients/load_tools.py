#!/usr/bin/env python3
"""guidellm, aiperf, sglang.bench_serving and vllm bench serve, unmodified, against a daemon with the demo model, which
does nothing else:

    load_tools.py URL MODEL-DIRECTORY WORK PROGRAM...    guidellm, aiperf, and the python that has the other two

What they count is held against what the daemon counted. Exit 1 when a request failed, a token is
missing, or no first token was measured."""

import json
import os
import subprocess
import sys
import urllib.request

N_REQUESTS, N_NEW, CONCURRENCY = 64, 8, 8


def run(command, log):
    """Away from hubs: everything is local. aiperf's offline mode knows its cache alone."""
    environment = dict(os.environ, NO_COLOR="1")
    if "aiperf" in os.path.basename(command[0]):
        environment.pop("HF_HUB_OFFLINE", None)
    with open(log, "w", encoding="utf-8") as f:
        status = subprocess.run(command, stdout=f, stderr=subprocess.STDOUT, env=environment,
                                timeout=300, check=False).returncode
    if status != 0:
        sys.exit(f"{command[0]} ended with {status}; see {log}")


def counted(url):
    """Requests answered, and tokens of prompts and of answers."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as f:
        lines = f.read().decode().splitlines()
    values = {n: float(v) for n, v in (x.rsplit(" ", 1) for x in lines if x[0] != "#")}
    return [values['prefilld_requests_total{outcome="ok"}'],
            sum(v for n, v in values.items() if n.startswith("vllm:prompt_tokens_total")),
            sum(v for n, v in values.items() if n.startswith("vllm:generation_tokens_total"))]


def guidellm(program, url, model, work, path):
    out = os.path.join(work, "guidellm.json")
    run([program, "run", "--backend", f"kind=openai_http,target={url},request_format={path}",
         "--profile", f"kind=concurrent,streams={CONCURRENCY}",
         "--constraint", f"kind=max_requests,count={N_REQUESTS}",
         "--data", f"kind=synthetic_text,prompt_tokens=200,output_tokens={N_NEW}",
         "--tokenizer", f"kind=hf_auto,model={model}", "--output", f"kind=json,path={out}",
         "--disable-progress"], os.path.join(work, "guidellm.log"))
    with open(out, encoding="utf-8") as f:
        metrics = json.load(f)["benchmarks"][0]["metrics"]
    return {"ok": metrics["request_totals"]["successful"],
            "failed": metrics["request_totals"]["errored"],
            "prompt": metrics["prompt_token_count"]["successful"]["total_sum"],
            "new": metrics["output_token_count"]["successful"]["total_sum"],
            "ttft_ms": metrics["time_to_first_token_ms"]["successful"]["median"]}


def aiperf(program, url, model, work, kind):
    out = os.path.join(work, f"aiperf-{kind}")
    run([program, "profile", "--model", "demo", "--url", url, "--endpoint-type", kind, "--streaming",
         "--concurrency", str(CONCURRENCY), "--request-count", str(N_REQUESTS), "--tokenizer", model,
         "--synthetic-input-tokens-mean", "200", "--synthetic-input-tokens-stddev", "50",
         "--output-tokens-mean", str(N_NEW), "--use-server-token-count",
         "--extra-inputs", "ignore_eos:true", "--ui", "none", "--artifact-dir", out],
        os.path.join(work, "aiperf.log"))
    with open(os.path.join(out, "profile_export_aiperf.json"), encoding="utf-8") as f:
        found = json.load(f)
    return {"ok": found["completed_request_count"]["avg"],
            "failed": len(found["error_summary"]),
            "prompt": found["total_usage_prompt_tokens"]["avg"],
            "new": found["total_usage_completion_tokens"]["avg"],
            "ttft_ms": found["time_to_first_token"]["p50"]}


def sglang(program, url, model, work, kind):
    """Its prompts are texts of random ids, which it counts; as texts they have other ids."""
    out = os.path.join(work, f"{kind}.jsonl")
    if os.path.exists(out):
        os.remove(out)
    run([program, "-m", "sglang.bench_serving", "--backend", kind, "--base-url", url, "--model", "demo",
         "--tokenizer", model, "--dataset-name", "random-ids", "--random-input-len", "200",
         "--random-output-len", str(N_NEW), "--random-range-ratio", "1", "--num-prompts", str(N_REQUESTS),
         "--max-concurrency", str(CONCURRENCY), "--warmup-requests", "0", "--output-file", out],
        os.path.join(work, "sglang.log"))
    with open(out, encoding="utf-8") as f:
        found = json.loads(f.readline())
    return {"ok": found["completed"], "failed": N_REQUESTS - found["completed"],
            "prompt": None, "new": found["total_output_tokens"],
            "ttft_ms": found["median_ttft_ms"]}


def vllm(program, url, model, work, kind):
    out = f"vllm-{kind}.json"
    path = "/v1/chat/completions" if kind == "openai-chat" else "/v1/completions"
    run([program, "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--backend", kind, "--base-url", url,
         "--endpoint", path, "--model", "demo", "--tokenizer", model, "--dataset-name", "random",
         "--random-input-len", "200", "--random-output-len", str(N_NEW), "--num-prompts", str(N_REQUESTS),
         "--max-concurrency", str(CONCURRENCY), "--ignore-eos", "--save-result", "--result-dir", work,
         "--result-filename", out], os.path.join(work, "vllm.log"))
    with open(os.path.join(work, out), encoding="utf-8") as f:
        found = json.load(f)
    return {"ok": found["completed"], "failed": N_REQUESTS - found["completed"],
            "prompt": found["total_input_tokens"], "new": found["total_output_tokens"],
            "ttft_ms": found["median_ttft_ms"]}


TOOLS = {"guidellm": [(guidellm, "/v1/completions"), (guidellm, "/v1/chat/completions")],
         "aiperf": [(aiperf, "completions"), (aiperf, "chat")],
         "python": [(vllm, "openai"), (vllm, "openai-chat"),
                    (sglang, "sglang"), (sglang, "sglang-oai"), (sglang, "sglang-oai-chat")]}


def main(url, model, work, *programs):
    good = True
    model = os.path.abspath(model)
    os.makedirs(work, exist_ok=True)
    for program in programs:
        for tool, kind in TOOLS[os.path.basename(program)]:
            before = counted(url)
            found = tool(program, url, model, work, kind)
            n, prompt, new = (b - a for a, b in zip(before, counted(url), strict=True))
            same = (found["ok"] == n == N_REQUESTS and found["failed"] == 0 and
                    found["prompt"] in (prompt, None) and found["new"] == new == N_REQUESTS * N_NEW and
                    found["ttft_ms"] > 0)
            good &= same
            counted_there = found["prompt"] and f"{found['prompt']:.0f}"
            print(f"{tool.__name__:9} {kind:21} {found['ok']:.0f} ok, {found['failed']} failed; "
                  f"prompt tokens {counted_there} here {prompt:.0f}, new {found['new']:.0f} "
                  f"here {new:.0f}; first token p50 {found['ttft_ms']:.0f} ms  "
                  f"{'same' if same else 'DIFFERS'}")
    sys.exit(not good)


main(*sys.argv[1:])
