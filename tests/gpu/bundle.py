#!/usr/bin/env python3
"""Makes the folder that a bare machine with a GPU needs to test and measure prefilld: programs, the
shared libraries that it may lack, models, fixtures and run.sh.

    bundle.py SRCDIR BUILDDIR OUT

Called by `make gpu-bundle`. Programs and libraries are packed, since a bundle travels with the tree and both
together may have 64 MiB; the scripts unpack them. The demo model stays in the tree. Fixtures come from SRCDIR/../shared/fixtures when that is there; their
answers are cut to what tests/gpu/test_models.c reads."""

import glob
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tarfile

PROGRAMS = ["prefilld", "tests/test_bits", "tests/test_engine", "tests/test_share",
            "tests/test_session", "tests/test_export", "tests/gpu/test_backend",
            "tests/gpu/test_models", "tests/gpu/test_records", "tests/bench/gpu_prefill",
            "tests/bench/export", "tests/bench/share"]
# What every glibc system has, and what comes with the driver or the toolkit.
SYSTEM = re.compile(r"(ld-linux|libc|libm|libdl|librt|libpthread|libgcc_s|libstdc\+\+|linux-vdso)"
                    r"[.-]")
HIDDEN_TOKENS = 130  # longer cases go without their residual streams


def copy(path, to):
    os.makedirs(os.path.dirname(to), exist_ok=True)
    shutil.copy(path, to)


def add_program(path, out):
    to = os.path.join(out, os.path.basename(path))
    copy(path, to)
    subprocess.run(["strip", to], check=True)
    listing = subprocess.run(["ldd", path], capture_output=True, text=True, check=True).stdout
    for name, lib in re.findall(r"(\S+) => (/\S+)", listing):
        if not SYSTEM.match(name):
            copy(os.path.realpath(lib), os.path.join(out, "lib", name))


def cut_goldens(path, to):
    """Keeps ids and logprobs of all cases, and hidden of short ones."""
    with open(path, "rb") as f:
        size, = struct.unpack("<Q", f.read(8))
        header = json.loads(f.read(size))
        base = 8 + size
        length = {k.split(".")[0]: v["shape"][-1] for k, v in header.items()
                  if k.endswith(".ids")}
        kept, data = {}, b""
        for name, t in header.items():
            case, _, what = name.partition(".")
            if what not in ("ids", "logprobs") and not (
                    what.startswith("hidden") and length.get(case, 1 << 30) <= HIDDEN_TOKENS):
                continue
            f.seek(base + t["data_offsets"][0])
            part = f.read(t["data_offsets"][1] - t["data_offsets"][0])
            kept[name] = dict(t, data_offsets=[len(data), len(data) + len(part)])
            data += part
    text = json.dumps(kept).encode()
    text += b" " * (-len(text) % 8)
    with open(to, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + data)


def add_fixtures(src, out):
    for answers in glob.glob(os.path.join(src, "..", "shared", "fixtures", "*",
                                          "goldens.safetensors")):
        folder = os.path.dirname(answers)
        to = os.path.join(out, "shared", "fixtures", os.path.basename(folder))
        for pattern in ("config.json", "*.index.json", "model*.safetensors", "tokenizer.json"):
            for path in glob.glob(os.path.join(folder, pattern)):
                copy(path, os.path.join(to, os.path.basename(path)))
        os.makedirs(to, exist_ok=True)
        cut_goldens(answers, os.path.join(to, "goldens.safetensors"))


def pack(out):
    """All that is there so far into programs.tar.gz."""
    names = sorted(os.listdir(out))
    with tarfile.open(os.path.join(out, "programs.tar.gz"), "w:gz") as tar:
        for name in names:
            tar.add(os.path.join(out, name), name)
    for name in names:
        path = os.path.join(out, name)
        if os.path.isdir(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)


def main():
    src, build, out = sys.argv[1:4]
    shutil.rmtree(out, ignore_errors=True)
    os.makedirs(out)
    for program in PROGRAMS:
        add_program(os.path.join(build, program), out)
    # The kernels' own tests and benchmarks (tests/gpu/Makefile).
    for path in glob.glob(os.path.join(build, "gpu-tests", "*")):
        if os.path.isfile(path) and os.access(path, os.X_OK) and not path.endswith(".sh"):
            add_program(path, out)
    shutil.copytree(os.path.join(build, "gpu-tests", "faulty"), os.path.join(out, "faulty"))
    pack(out)
    tests = os.path.join(out, "src", "tests")
    shutil.copytree(os.path.join(src, "tests", "models"), os.path.join(tests, "models"),
                    ignore=shutil.ignore_patterns("demo"))
    shutil.copytree(os.path.join(src, "tests", "bench", "models"),
                    os.path.join(tests, "bench", "models"))
    for path in glob.glob(os.path.join(src, "tests", "e2e*.py")):
        copy(path, os.path.join(tests, os.path.basename(path)))
    for script in ("daemon.py", "export.py", "load.py", "lost.py"):
        copy(os.path.join(src, "tests", "gpu", script), os.path.join(out, script))
    copy(os.path.join(src, "etc", "grafana.json"), os.path.join(out, "src", "etc", "grafana.json"))
    copy(os.path.join(src, "tests", "gpu", "run.sh"), os.path.join(out, "kernels.sh"))
    copy(os.path.join(src, "tests", "gpu", "models.sh"), os.path.join(out, "models.sh"))
    with open(os.path.join(out, "run.sh"), "w", encoding="ascii") as f:
        f.write('#!/bin/sh\n# Kernels first, then whole models. Usage: run.sh [log folder].\n'
                'here=$(cd "$(dirname "$0")" && pwd) || exit 1\nfailed=0\n'
                'sh "$here/kernels.sh" "$@" || failed=1\n'
                'sh "$here/models.sh" "$@" || failed=1\nexit $failed\n')
    add_fixtures(src, out)
    size = sum(os.path.getsize(os.path.join(d, f)) for d, _, fs in os.walk(out) for f in fs)
    print(f"{out}: {size / (1 << 20):.1f} MiB")


main()
