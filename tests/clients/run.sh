#!/bin/sh
# Real clients, unmodified, against the daemon with the demo model. Needs a Python with pip, and the
# network for PyPI once; takes minutes. With --hf also the reference, for which that Python needs
# torch and transformers, and some minutes. With --tools guidellm, aiperf, vllm bench serve and
# sglang.bench_serving alone, in environments of 2, 2 and 8 GB; Python 3.11.
#
#   tests/clients/run.sh BUILD-DIRECTORY [--hf PYTHON | --tools]
set -eu
here=$(cd "$(dirname "$0")" && pwd)
build=$(cd "$1" && pwd)
model=$here/../models/demo
work=$build/clients
url=http://127.0.0.1:18087
mkdir -p "$work"
[ -x "$work/venv/bin/lm_eval" ] || {
    python3 -m venv "$work/venv"
    "$work/venv/bin/pip" install -q 'openai==3.57.0' 'lm_eval[api]==0.4.13'
}
python=$work/venv/bin/python
if [ "${2-}" = --tools ]; then
    for tool in guidellm==0.8.1 aiperf==0.13.0; do
        name=${tool%%=*}
        [ -x "$work/$name/bin/$name" ] || {
            python3 -m venv "$work/$name"
            "$work/$name/bin/pip" install -q "$tool"
        }
    done
    # The benchmarks of the two servers, whose kernels are for a GPU.
    [ -e "$work/servers/done" ] || {
        python3 -m venv "$work/servers"
        "$work/servers/bin/pip" install -q --no-deps -r "$here/servers.txt"
        touch "$work/servers/done"
    }
fi
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TOKENIZERS_PARALLELISM=false

"$build/prefilld" --model "$model" --listen 127.0.0.1:18087 --state-slots 32 --kv-tokens 131072 \
    2>"$work/prefilld.log" &
daemon=$!
trap 'kill $daemon' EXIT
for _ in $(seq 100); do
    grep -q '^ready' "$work/prefilld.log" && break
    sleep 0.1
done

if [ "${2-}" = --tools ]; then
    "$python" "$here/load_tools.py" $url "$model" "$work/tools" "$work/guidellm/bin/guidellm" \
        "$work/aiperf/bin/aiperf" "$work/servers/bin/python"
    exit
fi
"$python" "$here/openai_client.py" $url
"$python" "$here/make_tasks.py" "$work/tasks"
cd "$work"
for batch in 1 16; do
    for concurrency in 1 8; do
        "$python" "$here/evaluate.py" "$work/tasks" "$work/local-$batch-$concurrency.json" \
            local-completions $url/v1/completions $batch $concurrency 2>"$work/lm_eval.log"
    done
done
if [ "${2-}" = --hf ]; then
    packages=$("$3" -c 'import torch, os; print(os.path.dirname(os.path.dirname(torch.__file__)))')
    "$python" -m pip install -q --no-deps accelerate psutil
    PYTHONPATH=$packages "$python" "$here/evaluate.py" "$work/tasks" "$work/sglang.json" \
        sglang-generate $url/generate 8 4 "$model" 2>"$work/sglang.log"
    PYTHONPATH=$packages "$python" "$here/evaluate.py" "$work/tasks" "$work/hf.json" \
        hf "$model" 60 2>"$work/hf.log"
fi
"$python" "$here/compare.py" "$work"
