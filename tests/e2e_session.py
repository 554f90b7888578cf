#!/usr/bin/env python3
"""Sessions from outside: kept, continued, forked, listed, deleted, expired, evicted; two requests
on one; hang-ups and refusals leave it as it was. TAP."""

import os
import threading
import time

from e2e import MODEL, Daemon, check, done, request, until

with open(os.path.join(MODEL, "heldout.txt"), encoding="utf-8") as f:
    TEXT = f.read()


def keep(d, prompt, **fields):
    return d.prefill(prompt=prompt, keep=True, **fields).json()


def get(d, name):
    return d.ask("GET", f"/v1/sessions/{name}")


def going_on(d, ids):
    """Continued at multiples of 64 a prompt has the bits of the whole."""
    whole = d.prefill(prompt=ids[:700], logprobs="all", top_logprobs=1, cache_salt="w").json()
    a = keep(d, ids[:128], cache_salt="a")
    name = a["session"]
    check(get(d, name).json()["tokens"] == 128 and a["usage"]["cached_tokens"] == 0, "kept", a)
    b = d.prefill(prompt=ids[128:320], session=name, logprobs="all", top_logprobs=1).json()
    check(b["session"] == name and b["usage"] == {"prompt_tokens": 320, "cached_tokens": 128,
                                                  "total_tokens": 320} and
          b["pieces"][0]["start"] == 128, "goes on behind it", b["usage"])
    check(b["prompt_logprobs"] == [None] * 129 + whole["prompt_logprobs"][129:320] and
          b["prompt_top"] == [None] * 129 + whole["prompt_top"][129:320] and
          b["next"]["top"] == whole["prompt_top"][320] or
          [t["id"] for t in b["next"]["top"]] == [t["id"] for t in whole["prompt_top"][320]],
          "with the bits of the whole prompt")
    forks = [d.prefill(prompt=ids[320:n], fork=name).json()["next"] for n in (330, 400, 700)]
    alone = [d.prefill(prompt=ids[:n], cache_salt=str(n)).json()["next"] for n in (330, 400, 700)]
    check(forks == alone and get(d, name).json()["tokens"] == 320, "forks, too; it stays", forks)
    copy = keep(d, ids[320:384], fork=name)
    check(copy["session"] != name and get(d, copy["session"]).json()["tokens"] == 384 and
          get(d, name).json()["tokens"] == 320, "a fork that is kept is another", copy)
    c = d.prefill(prompt=ids[384:700], session=copy["session"]).json()
    check(c["next"] == whole["next"] or c["next"]["id"] == whole["next"]["id"] and
          c["next"]["logprob"] == whole["next"]["logprob"], "and goes on", c["next"])
    c = d.prefill(prompt=ids[320:501], session=name).json()
    e = d.prefill(prompt=ids[501:510], session=name).json()
    want = d.prefill(prompt=ids[:510], cache_salt="o").json()
    check(abs(e["next"]["logprob"] - want["next"]["logprob"]) < 1e-4 and
          e["usage"]["cached_tokens"] == 501, "between multiples of 64, to rounding",
          (e["next"]["logprob"], want["next"]["logprob"]))
    names = {s["id"] for s in d.ask("GET", "/v1/sessions").json()["data"]}
    check(names == {name, copy["session"]}, "both are listed", names)
    for n in names:
        check(d.ask("DELETE", f"/v1/sessions/{n}").json()["deleted"], "deleted")
        for a in (get(d, n), d.ask("DELETE", f"/v1/sessions/{n}"), d.prefill(prompt=[1], session=n)):
            check(a.status == 404 and "deleted" in a.error()["message"], "and gone", a)
    check(until(lambda: d.metrics()['prefilld_state_slots{state="held"}'] == 0) and
          d.ask("GET", "/v1/sessions").json() == {"object": "list", "total": 0, "data": []},
          "none is left")


def refusals(d, ids):
    name = keep(d, ids[:100])["session"]
    for fields, status, param, words in (
            ({"session": "s-0"}, 404, "session", "no such session"),
            ({"fork": name + "x" * 100}, 404, "fork", "no such session"),
            ({"fork": name + "\0x"}, 404, "fork", "no such session"),
            ({"session": 5}, 400, "session", "a string"),
            ({"session": name, "fork": name}, 400, "fork", "one of them"),
            ({"keep": 1}, 400, "keep", "ttl_s"),
            ({"keep": {"ttl_s": 0}}, 400, "ttl_s", "1 to"),
            ({"session": name, "prompt": ids[:2000] * 20}, 400, "prompt", "at most"),
            ({"session": name, "prompt": []}, 400, "prompt", "")):
        a = d.prefill(**{"prompt": [1], **fields})
        check(a.status == status and a.error()["param"] == param and words in a.error()["message"],
              f"{list(fields)}: {status}", a)
    check("session" not in d.prefill(prompt=[1], keep=False).json(), "not kept")
    check(d.ask("PUT", f"/v1/sessions/{name}").headers["allow"] == "GET, HEAD, POST, DELETE", "methods")
    s = get(d, name).json()
    check(s["tokens"] == 100 and not s["busy"], "it is as it was", s)


def two_at_once(d, ids):
    """While a long one runs the session is busy; a hang-up gives it back."""
    name = keep(d, ids[:64])["session"]
    with d.conn() as c:
        c.send(request("POST", "/v1/prefill", {"prompt": ids * 6, "session": name}))
        check(until(lambda: get(d, name).json()["busy"]), "busy")
        for field in ("session", "fork"):
            a = d.prefill(prompt=[1], **{field: name})
            check(a.status == 409 and a.error()["param"] == field and
                  "continues" in a.error()["message"], "a second one has to wait", a)
    check(until(lambda: not get(d, name).json()["busy"]), "a hang-up")
    check(get(d, name).json()["tokens"] == 64, "leaves it as it was")
    late = d.prefill(prompt=ids * 6, session=name, deadline_ms=50)
    check(late.status == 504 and get(d, name).json()["tokens"] == 64, "a deadline, too", late)
    check(d.prefill(prompt=ids[64:128], session=name).json()["next"] ==
          d.prefill(prompt=ids[:128], cache_salt="z").json()["next"], "and it goes on")
    answers = []

    def fork(i):
        answers.append((i, d.prefill(prompt=ids[128:200 + i], fork=name).json()["next"]))
    threads = [threading.Thread(target=fork, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    check(all(next_ == d.prefill(prompt=ids[:200 + i], cache_salt=str(i)).json()["next"]
              for i, next_ in answers) and len(answers) == 8, "eight forks side by side")


def ends(d, ids):
    """Time and pressure end sessions."""
    name = d.prefill(prompt=ids[:70], keep={"ttl_s": 1}).json()["session"]
    check(0 < get(d, name).json()["expires_in_s"] <= 1, "its time")
    check(until(lambda: get(d, name).status == 404, 5) and
          "expired" in get(d, name).error()["message"], "has passed", get(d, name))
    names = [keep(d, ids[i:i + 200])["session"] for i in range(8)]  # of 4 slots
    statuses = [get(d, n).status for n in names]
    check(statuses[:4] == [404] * 4 and statuses[-2:] == [200] * 2, "the oldest go", statuses)
    check("evicted" in get(d, names[0]).error()["message"], "and say why", get(d, names[0]))
    check(d.prefill(prompt=ids[:900]).status == 200, "a prompt finds room")
    pinned = d.prefill(prompt=ids[:64], keep={"pinned": True}).json()["session"]
    names = [keep(d, ids[i:i + 200])["session"] for i in range(6)] + [pinned]
    check(get(d, pinned).json()["pinned"] and get(d, names[0]).status == 404, "a pinned one stays",
          get(d, pinned))
    d.prefill(prompt=ids[64:65], session=pinned, keep={"ttl_s": 9})
    check(get(d, pinned).json()["pinned"] and get(d, pinned).json()["expires_in_s"] <= 9,
          "also when it goes on", get(d, pinned))
    check(d.prefill(prompt=ids[:1024]).status == 200 and get(d, pinned).status == 404,
          "but for a prompt that takes all")
    sums = d.pool_sums()
    for n in names:
        d.ask("DELETE", f"/v1/sessions/{n}")
    check(until(d.is_idle) and d.pool_sums() == sums, "everything is back")


with Daemon("--prefix-cache-share", 0.25) as daemon:
    IDS = daemon.ask("POST", "/tokenize", {"prompt": TEXT[:20000]}).json()["tokens"][:3000]
    going_on(daemon, IDS)
    refusals(daemon, IDS)
    check(daemon.stop() == 0, "it ends with 0, with a session kept")
with Daemon("--max-step-tokens", 64) as daemon:
    two_at_once(daemon, IDS)
with Daemon("--state-slots", 4, "--kv-tokens", 1024, "--prefix-cache", "no") as daemon:
    ends(daemon, IDS)
done()
