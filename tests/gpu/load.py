#!/usr/bin/env python3
"""How fast a large checkpoint is loaded: one of the shape of the dense 27B model is written, of as many layers
as were asked for, and the daemon started on it twice, from the disk and from the page cache, each beside
the rate at which the same files are read to nowhere. Arguments: [LAYERS [FOLDER]]; the folder needs 0.8 GB a
layer and 5 GB. Prints a table; exits 1 when the daemon does not start."""

import json
import os
import re
import shutil
import struct
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

sys.path.insert(0, os.path.join(os.environ.get("SRCDIR", "."), "tests"))
from e2e import MODEL, SRCDIR, Daemon  # noqa: E402

CONFIG = os.path.join(SRCDIR, "tests", "bench", "models", "27b", "config.json")
BLOCK = 1 << 24


def tensors(c, layers):
    """Names and shapes."""
    M, F, D, V = c["hidden_size"], c["intermediate_size"], c["head_dim"], c["vocab_size"]
    H, HV = c["linear_num_key_heads"], c["linear_num_value_heads"]
    HQ, HK = c["num_attention_heads"], c["num_key_value_heads"]
    qkv = (2 * H + HV) * 128
    yield "model.embed_tokens.weight", [V, M]
    yield "lm_head.weight", [V, M]
    yield "model.norm.weight", [M]
    for i in range(layers):
        at = f"model.layers.{i}."
        yield at + "input_layernorm.weight", [M]
        yield at + "post_attention_layernorm.weight", [M]
        yield at + "mlp.gate_proj.weight", [F, M]
        yield at + "mlp.up_proj.weight", [F, M]
        yield at + "mlp.down_proj.weight", [M, F]
        if i % 4 == 3:
            yield at + "self_attn.q_proj.weight", [2 * HQ * D, M]
            yield at + "self_attn.k_proj.weight", [HK * D, M]
            yield at + "self_attn.v_proj.weight", [HK * D, M]
            yield at + "self_attn.o_proj.weight", [M, HQ * D]
            yield at + "self_attn.q_norm.weight", [D]
            yield at + "self_attn.k_norm.weight", [D]
            continue
        at += "linear_attn."
        yield at + "in_proj_qkv.weight", [qkv, M]
        yield at + "in_proj_z.weight", [HV * 128, M]
        yield at + "in_proj_b.weight", [HV, M]
        yield at + "in_proj_a.weight", [HV, M]
        yield at + "conv1d.weight", [qkv, 1, 4]
        yield at + "A_log", [HV]
        yield at + "dt_bias", [HV]
        yield at + "norm.weight", [128]
        yield at + "out_proj.weight", [M, HV * 128]


def write(folder, layers):
    """Shards of some 5 GB. Each value is bf16 of either sign, about 2^-6."""
    with open(CONFIG, encoding="utf-8") as f:
        config = json.load(f)
    config["num_hidden_layers"] = layers
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as f:
        json.dump(config, f)
    shutil.copy(os.path.join(MODEL, "tokenizer.json"), folder)
    block = bytearray(os.urandom(BLOCK))
    block[1::2] = bytes(0x3c | (x & 0x80) for x in block[1::2])
    shards, used = [{}], 0
    for name, shape in tensors(config, layers):
        n = 2
        for d in shape:
            n *= d
        if used > 5 << 30:
            shards.append({})
            used = 0
        shards[-1][name] = {"dtype": "BF16", "shape": shape, "data_offsets": [used, used + n]}
        used += n
    where = {}
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        header = json.dumps(shard).encode()
        header += b" " * (-len(header) % 8)
        with open(os.path.join(folder, file), "wb") as f:
            f.write(struct.pack("<Q", len(header)) + header)
            left = max(t["data_offsets"][1] for t in shard.values())
            while left > 0:
                left -= f.write(block[:min(left, BLOCK)])
            f.flush()
            os.fsync(f.fileno())
        where.update({name: file for name in shard})
    with open(os.path.join(folder, "model.safetensors.index.json"), "w", encoding="utf-8") as f:
        json.dump({"metadata": {}, "weight_map": where}, f)


def files(folder):
    return [os.path.join(folder, f) for f in sorted(os.listdir(folder)) if ".safetensors" in f]


def forget(folder):
    """Takes the files out of the page cache."""
    for path in files(folder):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def read_part(path, at, n):
    buffer = bytearray(BLOCK)
    with open(path, "rb", buffering=0) as f:
        f.seek(at)
        while n > 0:
            got = f.readinto(memoryview(buffer)[:min(n, BLOCK)])
            if not got:
                break
            n -= got


def read_rate(folder, threads=8):
    """GB/s of reading all files to nowhere."""
    parts, total = [], 0
    for path in files(folder):
        size = os.path.getsize(path)
        total += size
        parts += [(path, at, min(1 << 28, size - at)) for at in range(0, size, 1 << 28)]
    start = time.monotonic()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda p: read_part(*p), parts))
    return total / (time.monotonic() - start) / 1e9


def load(folder, backend):
    with Daemon("--backend", backend, "--state-slots", 8, "--kv-tokens", 8192, "--max-step-tokens",
                1024, "--log-level", "info", model=folder) as d:
        found = re.search(r"event=loaded seconds=(\S+) gb_per_s=(\S+)", d.log_text())
        answer = d.prefill(prompt=[1, 2, 3], logprobs="next")
        ok = answer.status == 200
        d.stop()
    return float(found.group(1)), float(found.group(2)), ok


def main():
    layers = int(sys.argv[1]) if len(sys.argv) > 1 else 24
    backend = os.environ.get("E2E_BACKEND", "cuda")
    folder = tempfile.mkdtemp(dir=sys.argv[2] if len(sys.argv) > 2 else None)
    good = True
    try:
        start = time.monotonic()
        write(folder, layers)
        size = sum(os.path.getsize(p) for p in files(folder)) / 1e9
        print(f"# {layers} layers, {size:.1f} GB, written in {time.monotonic() - start:.0f} s")
        for what in ("disk", "page cache"):
            if what == "disk":
                forget(folder)
            rate = read_rate(folder)
            if what == "disk":
                forget(folder)
            seconds, gb_s, ok = load(folder, backend)
            good = good and ok
            print(f"| {what} | read {rate:.2f} GB/s | loaded in {seconds:.2f} s, {gb_s:.2f} GB/s |"
                  f"{'' if ok else ' FAIL'}", flush=True)
    finally:
        shutil.rmtree(folder)
    sys.exit(not good)


main()
