#!/usr/bin/env python3
"""Sessions as files: out and in again with the same bits, refusals by name with nothing left behind,
slow and vanished clients, renewal, SIGTERM in the middle. TAP."""

import json
import os
import random
import resource
import signal
import socket
import struct
import tempfile
import threading
import time

from e2e import MODEL, Daemon, check, done, is_sanitized, request, until

with open(os.path.join(MODEL, "heldout.txt"), encoding="utf-8") as f:
    TEXT = f.read()


def keep(d, ids, **fields):
    return d.prefill(prompt=ids, keep=True, **fields).json()["session"]


def state(d, name):
    return d.ask("GET", f"/v1/sessions/{name}/state")


def bring(d, data, query=""):
    return d.ask("POST", "/v1/sessions" + query, data)


def parts(data):
    """Header, and the bytes of each tensor."""
    n, = struct.unpack("<Q", data[:8])
    head = json.loads(data[8:8 + n])
    return head, {k: data[8 + n + v["data_offsets"][0]:8 + n + v["data_offsets"][1]]
                  for k, v in head.items() if k != "__metadata__"}


def checksum(data):
    """src/state_sum.h."""
    mask, n = (1 << 64) - 1, len(data)

    def mix(x):
        y = x * 0x9e3779b97f4a7c15 & mask
        return y ^ y >> 32
    data += bytes(-n % 64)
    lanes = []
    words = struct.unpack(f"<{len(data) // 8}Q", data)
    for i in range(8):
        lane = i
        for w in words[i::8]:
            y = (lane ^ w) * 0x9e3779b97f4a7c15 & mask
            lane = y ^ y >> 32
        lanes.append(lane)
    for lane in lanes:
        n = mix(n ^ lane)
    return n


def made_up(file, ids):
    """A file of as many tokens, of states and keys that are 0."""
    head, _ = parts(file)
    meta = head.pop("__metadata__")
    at = 0
    for name, t in head.items():
        size = {"F32": 4, "I32": 4, "U64": 8}[t["dtype"]]
        if name == "token_ids" or ".attn." in name:
            t["shape"][0] = len(ids)
        for n in t["shape"]:
            size *= n
        t["data_offsets"] = [at, at + size]
        at += size
    text = json.dumps({"__metadata__": {**meta, "position": str(len(ids))}, **head}).encode()
    data = struct.pack("<Q", len(text)) + text + struct.pack(f"<{len(ids)}i", *ids)
    data += bytes(at - 8 - 4 * len(ids))
    return data + struct.pack("<Q", checksum(data))


def as_bf16(file):
    """Its numbers other than ids and states cut to BF16, as a GPU would have them; and as F32 again."""
    head, tensors = parts(file)
    meta = head.pop("__metadata__")
    at, data, wide = 0, b"", {}
    for name, t in head.items():
        part = tensors[name]
        if name.endswith((".conv", ".k", ".v")):
            t["dtype"] = "BF16"
            part = b"".join(part[i + 2:i + 4] for i in range(0, len(part), 4))
            wide[name] = b"".join(b"\0\0" + part[i:i + 2] for i in range(0, len(part), 2))
        t["data_offsets"] = [at, at + len(part)]
        at += len(part)
        data += part
    text = json.dumps({"__metadata__": {**meta, "dtype": "BF16"}, **head}).encode()
    data = struct.pack("<Q", len(text)) + text + data[:-8]
    return data + struct.pack("<Q", checksum(data)), wide


def with_head(data, change):
    n, = struct.unpack("<Q", data[:8])
    head = json.loads(data[8:8 + n])
    change(head)
    text = json.dumps(head).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + n:]


def slow_reader(d, name):
    """Has asked for a session's file, and takes little: neither side's system keeps much of it."""
    s = socket.socket()
    s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    host, port = d.address.rsplit(":", 1)
    s.connect((host, int(port)))
    s.sendall(request("GET", f"/v1/sessions/{name}/state"))
    s.recv(100)
    return s


def out_and_in(d, other, ids):
    name = keep(d, ids[:200])
    a = state(d, name)
    check(a.status == 200 and int(a.headers["content-length"]) == len(a.body) and
          a.headers["content-type"] == "application/octet-stream", "a file", a)
    h = d.ask("HEAD", f"/v1/sessions/{name}/state")
    check(h.status == 200 and h.headers["content-length"] == a.headers["content-length"] and
          d.ask("HEAD", "/v1/sessions/s-0/state").status == 404, "HEAD tells its length", h)
    head, tensors = parts(a.body)
    meta = head["__metadata__"]
    check(meta["format"] == "prefilld-session" and meta["version"] == "1" and
          meta["position"] == "200" and meta["dtype"] == "F32" and len(meta["fingerprint"]) == 16,
          "says what it is", meta)
    check(struct.unpack("<200i", tensors["token_ids"]) == tuple(ids[:200]), "has the ids")
    check(max(v["data_offsets"][1] for k, v in head.items() if k != "__metadata__") ==
          len(a.body) - 8 - struct.unpack("<Q", a.body[:8])[0], "without a hole at its end")
    check(struct.unpack("<Q", tensors["checksum"])[0] == checksum(a.body[:-8]), "has its checksum")
    check(state(d, name).body == a.body, "twice the same")
    for to, what in ((d, "the same daemon"), (other, "another daemon")):
        b = bring(to, a.body)
        s = b.json()
        check(b.status == 200 and s["object"] == "session" and s["tokens"] == 200 and
              s["id"] != name and s["converted"] is None and not s["pinned"], f"into {what}", b)
        check(state(to, s["id"]).body == a.body, "out again, the same")
        got = to.prefill(prompt=ids[200:500], session=s["id"], logprobs="all", top_logprobs=3).json()
        want = d.prefill(prompt=ids[200:500], fork=name, logprobs="all", top_logprobs=3).json()
        check(got["next"] == want["next"] and got["prompt_logprobs"] == want["prompt_logprobs"] and
              got["prompt_top"] == want["prompt_top"], "goes on with the same bits", got["next"])
        to.ask("DELETE", f"/v1/sessions/{s['id']}")
    narrow, wide = as_bf16(a.body)
    s = bring(d, narrow).json()
    _, got = parts(state(d, s["id"]).body)
    check(s["converted"] == "BF16 to F32" and all(got[k] == v for k, v in wide.items()),
          "a file of bf16 is widened, and that is said", s)
    d.ask("DELETE", f"/v1/sessions/{s['id']}")
    s = bring(d, a.body, "?ttl_s=77&pinned=true").json()
    check(s["pinned"] and 70 < s["expires_in_s"] <= 77, "on terms of the query", s)
    renewed = d.ask("POST", f"/v1/sessions/{s['id']}", {"ttl_s": 500, "pinned": False}).json()
    check(not renewed["pinned"] and 400 < renewed["expires_in_s"] <= 500, "renewed", renewed)
    for body, status in (({"ttl_s": 0}, 400), ({"pinned": 3}, 400)):
        check(d.ask("POST", f"/v1/sessions/{s['id']}", body).status == status, f"not with {body}")
    check(d.ask("POST", "/v1/sessions/s-0", {}).status == 404, "nor an unknown one")
    check(d.ask("GET", "/v1/sessions/s-0/state").status == 404, "which has no state")
    d.ask("DELETE", f"/v1/sessions/{s['id']}")
    chunked = (b"POST /v1/sessions HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n" +
               b"".join(b"%x\r\n%s\r\n" % (len(c), c) for c in
                        (a.body[i:i + 70001] for i in range(0, len(a.body), 70001))) + b"0\r\n\r\n")
    with d.conn() as c:
        c.send(chunked)
        b = c.read()
        check(b.status == 200, "in chunks, too", b)
        check(c.ask("GET", "/health").status == 200, "the connection stays")
    d.ask("DELETE", f"/v1/sessions/{b.json()['id']}")
    d.ask("DELETE", f"/v1/sessions/{name}")
    return a.body


def refusals(d, file):
    before = d.ask("GET", "/v1/sessions").json()["total"]
    rng = random.Random(8)
    n_head = 8 + struct.unpack("<Q", file[:8])[0]
    altered = bytearray(file)
    altered[-100] ^= 4
    flipped = [bytearray(file) for _ in range(30)]
    for data in flipped:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)

    def meta(name, value):
        return with_head(file, lambda h: h["__metadata__"].__setitem__(name, value))

    def tensor(name, field, value):
        return with_head(file, lambda h: h[name].__setitem__(field, value))
    cases = [(b"", "cut short"), (b"{}", "cut short"), (file[:7], "cut short"), (file[:n_head], "cut short"),
             (file[:-1], "cut short"), (file[:len(file) // 2], "cut short"),
             (file + b"x", "too long"), (bytes(altered), "checksum"),
             (b"\xff" * 100, "no length"),
             (struct.pack("<Q", (1 << 19) + 1) + b"{" * 9, "no length"), (meta("version", "2"), "version 2"),
             (meta("format", "other"), "format"), (meta("fingerprint", "0" * 16), "another model"),
             (meta("position", "0"), "position"), (meta("position", "199"), "token_ids"),
             (meta("position", "9999999"), "at most"), (meta("dtype", "F64"), "dtype"),
             (tensor("token_ids", "dtype", "I64"), "token_ids"),
             (tensor("layers.0.gdn.state", "shape", [1, 2]), "layers.0.gdn.state"),
             (tensor("layers.3.attn.k", "data_offsets", [0, 8]), "layers.3.attn.k"),
             (with_head(file, lambda h: h.pop("layers.3.attn.v")), "layers.3.attn.v"),
             (with_head(file, lambda h: h.update(more=h["checksum"])), "tensors"),
             (file[:n_head] + b"\xff" * 4 + file[n_head + 4:], "vocabulary")]
    for data, words in cases:
        a = bring(d, data)
        check(a.status == 400 and words in a.error()["message"], f"refused: {words}", a)
    answers = {bring(d, bytes(data)).status for data in flipped}
    check(answers == {400}, "whichever bit was changed", answers)
    for query, param in (("?ttl_s=x", "ttl_s"), ("?ttl_s=0", "ttl_s"), ("?ttl_s=", "ttl_s"),
                         ("?ttl_s=5&pinned=1", "pinned"), ("?pinned=", "pinned")):
        a = bring(d, file, query)
        check(a.status == 400 and a.error()["param"] == param, f"terms that are none: {query}", a)
    with d.conn() as c:
        c.send(b"POST /v1/sessions HTTP/1.1\r\nHost: t\r\nContent-Length: 99999999999999\r\n\r\n")
        check(c.read().status == 413, "too large by its length")
    with d.conn() as c:  # a client that sends on meets the answer, not a reset
        c.send(request("POST", "/v1/sessions", b"\xff" * 40_000_000)[:1 << 20])
        check(c.read().status == 400, "an early answer")
    check(d.ask("GET", "/v1/sessions").json()["total"] == before and until(d.is_idle),
          "nothing is left behind")


def clients(d, ids, file, long):
    """Slow and vanished ones."""
    name = bring(d, long).json()["id"]
    sums = d.pool_sums()
    for i in range(12):
        with d.conn() as c:
            c.send(request("GET", f"/v1/sessions/{name}/state"))
            c.sock.recv(1 + i * 30000)
    for i in range(12):
        with d.conn() as c:
            c.send(request("POST", "/v1/sessions", file)[:200 + i * len(file) // 12])
            if i % 2:
                time.sleep(0.02)
    check(until(d.is_idle) and until(lambda: not d.ask("GET", f"/v1/sessions/{name}").json()["busy"]),
          "hang-ups in the middle leave nothing")
    check(d.ask("GET", "/v1/sessions").json()["total"] == 1 and d.pool_sums() == sums, "held")
    slow = slow_reader(d, name)
    a = d.prefill(prompt=ids[:10], session=name)
    check(a.status == 409 and "reads" in a.error()["message"], "while it is read it does not go on", a)
    check(d.prefill(prompt=ids[:10], fork=name).status == 200, "a copy does")
    check(d.ask("DELETE", f"/v1/sessions/{name}").status == 200, "deleted meanwhile")
    for _ in range(20):
        slow.recv(1 << 16)
    slow.close()
    check(until(lambda: d.metrics()['prefilld_state_slots{state="held"}'] == 0), "and hung up on")


def too_many(d, long):
    """Four at a time; the fifth is told to come back."""
    name = bring(d, long).json()["id"]
    readers = [slow_reader(d, name) for _ in range(4)]
    a = state(d, name)
    check(a.status == 503 and "retry-after" in a.headers, "a fifth has to wait", a)
    for c in readers:
        c.close()
    check(until(lambda: state(d, name).status == 200), "it has its turn")
    d.ask("DELETE", f"/v1/sessions/{name}")


def whole_while_deleted(d, ids, long):
    name = bring(d, long).json()["id"]
    with d.conn() as c:
        c.send(request("GET", f"/v1/sessions/{name}/state"))
        head = c.sock.recv(2000)
        check(d.ask("DELETE", f"/v1/sessions/{name}").status == 200, "deleted while it is sent")
        for i in range(3):
            d.prefill(prompt=ids[i:i + 300], cache_salt="x" + str(i))
        c.rest = head
        check(parts(c.read().body)[1]["layers.3.attn.v"] == parts(long)[1]["layers.3.attn.v"],
              "its file is whole")
    check(until(d.is_idle), "and its room comes back")


def small_pools(file, long):
    with Daemon("--state-slots", 2, "--kv-tokens", 320, "--prefix-cache", "no",
                "--transfer-timeout-s", 5 if is_sanitized() else 2) as d:
        name = bring(d, file, "?pinned=true").json()["id"]
        idle = bring(d, made_up(file, [1] * 20)).json()["id"]
        a = bring(d, file)
        check(a.status == 503 and "retry-after" in a.headers and "no room" in a.error()["message"],
              "no room beside a pinned one", a)
        check(d.ask("GET", f"/v1/sessions/{idle}").status == 200, "so none goes in vain")
        d.ask("DELETE", f"/v1/sessions/{idle}")
        d.ask("POST", f"/v1/sessions/{name}", {"pinned": False})
        check(bring(d, file).status == 200, "an idle one makes room")
        check(d.ask("GET", f"/v1/sessions/{name}").status == 404, "and is gone")
        a = bring(d, long)
        check(a.status == 413 and "any session" in a.error()["message"], "larger than the pools", a)
        with d.conn() as c:
            c.send(request("POST", "/v1/sessions", file)[:len(file) // 2])
            a = c.read()
            check(a is not None and a.status == 408, "a body that takes too long", a)
        check(until(d.is_idle), "nothing is held")


def files_in(folder):
    return sorted(set(os.listdir(folder)) - {"prefilld.lock"})


def hands_over(file):
    """A successor that starts while its predecessor serves, then drains."""
    with tempfile.TemporaryDirectory() as folder, Daemon("--session-dir", folder) as old:
        name = bring(old, file).json()["id"]
        with Daemon("--session-dir", folder, waits=False) as new:
            until(lambda: "event=session_dir_is_held" in new.log_text() or new.addresses)
            check(f'by="process {old.process.pid} on ' in new.log_text() and not new.addresses,
                  "it is told who has the folder, and waits", new.log_text())
            check(old.stop() == 0 and until(lambda: new.addresses) and
                  new.ask("GET", f"/v1/sessions/{name}").status == 200 and not files_in(folder),
                  "and has the sessions then", new.log_text())
            old = new
            with Daemon("--session-dir", folder, waits=False) as third:
                until(lambda: "event=session_dir_is_held" in third.log_text() or third.addresses)
                check(third.stop() == 0, "one that waits may be stopped", third.log_text())
            with Daemon("--session-dir", folder, waits=False) as third:
                until(lambda: "event=session_dir_is_held" in third.log_text() or third.addresses)
                old.signal(signal.SIGKILL)
                check(until(lambda: third.addresses) and third.stop() == 0,
                      "a crash lets go of the folder", third.log_text())


def stops(d, folder, file, long):
    """SIGTERM with files under way; kept over a restart; files that are no good."""
    pinned = bring(d, file, "?pinned=true&ttl_s=5000").json()["id"]
    name = bring(d, long).json()["id"]
    with slow_reader(d, name), d.conn() as into:
        into.send(request("POST", "/v1/sessions", file)[:len(file) // 2])
        check(until(lambda: d.metrics()['prefilld_state_slots{state="held"}'] == 1), "comes")
        check(d.stop() == 0, "it ends with files under way")
    check("leak" not in d.log_text(), "and nothing is lost", d.log_text())
    names = files_in(folder)
    check(names == sorted(f"{n}.safetensors" for n in (pinned, name)), "both are saved", names)
    with open(os.path.join(folder, f"{name}.safetensors"), "r+b") as f:
        f.seek(-3000, 2)
        f.write(b"\0\1")
    os.mkfifo(os.path.join(folder, "s-2.safetensors"))
    for other in ("s-0.safetensors.tmp", "s-1.safetensors", "mine.txt"):
        with open(os.path.join(folder, other), "wb") as f:
            f.write(with_head(file, lambda h: h["__metadata__"].__setitem__(
                "fingerprint", "0" * 16)))
    with Daemon("--session-dir", folder, "--state-slots", 8, "--kv-tokens", 5120) as again:
        s = again.ask("GET", f"/v1/sessions/{pinned}").json()
        check(s["pinned"] and s["tokens"] == 200 and 4000 < s["expires_in_s"] < 5000,
              "it is back, with its name and time", s)
        check(parts(state(again, pinned).body)[1].items() - parts(file)[1].items() <=
              {("checksum", parts(state(again, pinned).body)[1]["checksum"])}, "and its state")
        check(again.ask("GET", f"/v1/sessions/{name}").status == 404 and
              f"{name}.safetensors" in again.log_text() and "altered" in again.log_text() and
              "another model" in again.log_text(), "an altered one is named", again.log_text())
        names = files_in(folder)
        check(names == sorted([f"{name}.safetensors.bad", "s-1.safetensors", "s-2.safetensors",
                               "mine.txt"]), "and moved aside; those of others, and a pipe, stay", names)
        check(again.stop() == 0 and f"{pinned}.safetensors" in files_in(folder), "and again")
    with tempfile.TemporaryDirectory() as other, Daemon("--session-dir", other) as many:
        all_of_them = {bring(many, file, "?ttl_s=500").json()["id"] for _ in range(4)}
        many.stop()
        with Daemon("--session-dir", other, "--state-slots", 2) as few:
            back = {s["id"] for s in few.ask("GET", "/v1/sessions").json()["data"]}
            left = {n.split(".")[0] for n in files_in(other)}
            check(len(back) == 2 and back | left == all_of_them and
                  few.log_text().count("no room") == 2, "those without room stay as files", few.log_text())
            few.stop()
        with Daemon("--session-dir", other) as many:
            check(many.ask("GET", "/v1/sessions").json()["total"] == 4, "until there is room")
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, 4 << 20))
    with tempfile.TemporaryDirectory() as other, Daemon("--session-dir", other, before=limit) as d:
        name = bring(d, file).json()["id"]
        bring(d, long)
        check(d.stop() == 0 and files_in(other) == [f"{name}.safetensors"] and
              "too large" in d.log_text(), "a file that cannot be written leaves the others", d.log_text())
    with Daemon("--session-dir", "/nowhere/at/all", waits=False) as d:
        check(d.wait() == 78 and "session-dir" in d.log_text(), "a folder that is not there")


def complete(d, ids, kv, **fields):
    return d.ask("POST", "/v1/completions", {
        "prompt": ids, "max_tokens": 1, "logprobs": 1, "temperature": 0,
        "kv_transfer_params": kv, **fields}).json()


def cached(a):
    return a["usage"]["prompt_tokens_details"]["cached_tokens"]


def handles(d, other, ids):
    """What a proxy hands from a prefill server to a decode server."""
    asked = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
             "remote_block_ids": None, "remote_host": None, "remote_port": None}
    a = complete(d, ids[:128], asked, cache_salt="k")
    kv = a["kv_transfer_params"]
    check(kv["do_remote_prefill"] is True and kv["lease_s"] == 2 and
          f"{kv['remote_host']}:{kv['remote_port']}" == d.address, "a handle", kv)
    s = d.ask("GET", f"/v1/sessions/{kv['session']}").json()
    check(s["tokens"] == 128 and 0 < s["expires_in_s"] <= 2, "is a session with a lease", s)
    check(d.ask("POST", f"/v1/sessions/{kv['session']}", {"ttl_s": 60}).status == 200, "extended")
    want = complete(d, ids[:300], None, cache_salt="k2")
    got = complete(d, ids[:300], kv, cache_salt="k3")
    check(cached(got) == 128 and got["choices"] == want["choices"], "begins there, the same bits", got)
    more = complete(d, ids[:128], asked, cache_salt="k", max_tokens=5, ignore_eos=True)
    kv5 = more["kv_transfer_params"]
    n = d.ask("GET", f"/v1/sessions/{kv5['session']}").json()["tokens"]
    check(n == 128 + more["usage"]["completion_tokens"] - 1, "what was computed is kept", (n, more))
    for what, params, prompt, salt in (
            ("the prompt itself", kv, ids[:128], "k4"), ("another prompt", kv, ids[1:300], "k5"),
            ("another server's", {**kv, "remote_engine_id": "e-0"}, ids[:300], "k6"),
            ("an unknown one", {**kv, "session": "s-0"}, ids[:300], "k7"),
            ("none", {"do_remote_prefill": True}, ids[:300], "k8")):
        a = complete(d, prompt, params, cache_salt=salt)
        check(cached(a) == 0 and a["kv_transfer_params"]["do_remote_prefill"] is False,
              f"{what}: computed", a)
    a = complete(d, [ids[:64], ids[:70]], asked)
    check(a["kv_transfer_params"]["do_remote_prefill"] is False and
          "session" not in a["kv_transfer_params"], "several prompts leave none", a)
    check(complete(other, ids[:64], asked)["kv_transfer_params"]["do_remote_prefill"] is False,
          "nor any where it is switched off")
    check(until(lambda: d.ask("GET", f"/v1/sessions/{kv5['session']}").status == 404) and
          d.ask("GET", f"/v1/sessions/{kv['session']}").status == 200, "past its lease it frees itself")
    a = complete(d, ids[:300], kv5, cache_salt="k9")
    check(cached(a) == 0, "and is computed", a)
    d.ask("DELETE", f"/v1/sessions/{kv['session']}")
    check(until(d.is_idle), "nothing is held")


def side_by_side(d, ids):
    """Exports, imports and prompts at once."""
    names = [keep(d, ids[i:i + 50 + i], cache_salt="s") for i in range(4)]
    files = [state(d, n).body for n in names]
    bad = []

    def work(i):
        for _ in range(3):
            a = bring(d, files[i])
            if a.status == 503:
                continue
            b = state(d, a.json()["id"])
            if b.status != 503 and b.body != files[i]:
                bad.append((a, b))
            d.ask("DELETE", f"/v1/sessions/{a.json()['id']}")
    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for i in range(6):
        d.prefill(prompt=ids[i:i + 200], cache_salt=str(i))
    for t in threads:
        t.join()
    check(not bad, "side by side each has its own", bad)
    for n in names:
        d.ask("DELETE", f"/v1/sessions/{n}")
    check(until(d.is_idle), "all is back")


POOLS = ("--state-slots", 8, "--kv-tokens", 10240)
with tempfile.TemporaryDirectory() as FOLDER, Daemon("--kv-lease-s", 2, *POOLS) as daemon, \
        Daemon(*POOLS, "--page-tokens", 128, "--cpu-threads", 1, "--kv-lease-s", 0, "--drain-s", 1,
               "--session-dir", FOLDER) as second:
    IDS = daemon.ask("POST", "/tokenize", {"prompt": TEXT[:20000]}).json()["tokens"][:3000]
    FILE = out_and_in(daemon, second, IDS)
    LONG = made_up(FILE, IDS)
    refusals(daemon, FILE)
    clients(daemon, IDS, FILE, LONG)
    too_many(daemon, LONG)
    whole_while_deleted(daemon, IDS, LONG)
    handles(daemon, second, IDS)
    side_by_side(daemon, IDS)
    M = daemon.metrics()
    check(all(M[f'prefilld_session_files_total{{direction="{way}",outcome="{how}"}}'] > 0
              for way in ("in", "out") for how in ("ok", "failed")) and
          M['prefilld_session_file_bytes_total{direction="in"}'] > len(LONG), "all is counted", M)
    check(daemon.stop() == 0, "it ends with 0")
    small_pools(FILE, LONG)
    stops(second, FOLDER, FILE, LONG)
    hands_over(FILE)
done()
