#!/usr/bin/env python3
"""Prompts that share prefixes, from outside: /v1/score, n choices, lists and one call after another
give the numbers of a cold start, on pools of any size; hang-ups and deadlines leave nothing
behind. TAP."""

import json
import os
import random
import time

from e2e import MODEL, Daemon, check, done, is_sanitized, request, until

with open(os.path.join(MODEL, "heldout.txt"), encoding="utf-8") as f:
    TEXT = f.read()


# Context and tails.
CASES = ((1, 2), (63, 3), (64, 3), (65, 9), (128, 5), (129, 1), (320, 2), (321, 20), (383, 7),
         (384, 8), (385, 9))
known = {}  # the same bits from every daemon


def cold(d, ids, **fields):
    """Under a salt of its own a prompt is computed from its start."""
    key = json.dumps([ids, fields])
    if key not in known:
        known[key] = d.prefill(prompt=ids, logprobs="all", cache_salt=f"cold {len(known)}",
                               **fields).json()
        assert known[key]["usage"]["cached_tokens"] == 0, known[key]["usage"]
    return known[key]


def score(d, context, tails, **fields):
    return d.ask("POST", "/v1/score", {"context": context, "continuations": tails, **fields})


def scores(d, ids, what, least_shared):
    """Contexts around the multiples of 64, one tail and many."""
    bad, saved = [], 0
    for n_context, n_tails in CASES:
        context = ids[:n_context]
        tails = [ids[500 + 7 * i:501 + 7 * i + i % 5] for i in range(n_tails)]
        answer = score(d, context, tails).json()
        for tail, got in zip(tails, answer["data"], strict=True):
            want = cold(d, context + tail, top_logprobs=0)["prompt_logprobs"][n_context:]
            if got["logprobs"] != want:
                bad.append((n_context, n_tails))
        saved += answer["usage"]["cached_tokens"]
        if answer["usage"]["cached_tokens"] % 64:
            bad.append(answer["usage"])
    check(not bad, f"{what}: each tail has the numbers of its prompt alone", bad)
    check(saved >= least_shared, f"{what}: {saved} tokens were not computed again", saved)
    check(until(d.is_idle), f"{what}: everything is back")


def one_step(d, ids):
    """All tails of a long context are in the step behind the context's last."""
    before = d.metrics()["prefilld_steps_total"]
    answer = score(d, ids[:500], [[i] for i in range(100)]).json()
    n_steps = d.metrics()["prefilld_steps_total"] - before
    check(n_steps == 2 and answer["usage"]["cached_tokens"] == 99 * 448,
          "a context in one step, 100 tails in the next", (n_steps, answer["usage"]))


def choices(d, ids):
    """n choices are those of n calls, each with its seed."""
    ask = {"prompt": ids[:400], "max_tokens": 5, "temperature": 1.0, "logprobs": 2}
    before = d.metrics()["prefilld_prefix_hit_tokens_total"]
    a = d.ask("POST", "/v1/completions", {**ask, "n": 6, "seed": 11}).json()
    alone = [d.ask("POST", "/v1/completions", {**ask, "seed": 11 + i}).json()["choices"][0]
             for i in range(6)]
    check([c["logprobs"] for c in a["choices"]] == [c["logprobs"] for c in alone] and
          d.metrics()["prefilld_prefix_hit_tokens_total"] - before >= 5 * 384,
          "six choices of one prompt, computed once", a["usage"])
    prompts = [ids[:330] + ids[600 + i:610 + i] for i in range(5)]
    a = d.ask("POST", "/v1/completions", {"prompt": prompts, "max_tokens": 3, "temperature": 0,
                                          "logprobs": 1}).json()
    alone = [d.ask("POST", "/v1/completions", {"prompt": p, "max_tokens": 3, "temperature": 0,
                                               "logprobs": 1}).json()["choices"][0]
             for p in prompts]
    check([c["logprobs"] for c in a["choices"]] == [c["logprobs"] for c in alone] and
          a["usage"]["prompt_tokens_details"]["cached_tokens"] == 4 * 320,
          "a list of prompts that begin alike", a["usage"])
    ask = {"prompt": ids[:300], "max_tokens": 1, "echo": True, "logprobs": 1, "n": 3}
    a = d.ask("POST", "/v1/completions", ask).json()
    want = cold(d, ids[:300])["prompt_logprobs"]
    check(all(c["logprobs"]["token_logprobs"][:300] == want for c in a["choices"]),
          "with echo no number is left out", a["usage"])


def reuse(d, ids):
    """One call after another: a long prompt's end and middle, where two part, and salts."""
    def ask(prompt, **fields):
        a = d.prefill(prompt=prompt, **fields).json()
        want = cold(d, prompt)
        return a["usage"]["cached_tokens"], a["next"] == want["next"] and \
            (not a["pieces"] or a["pieces"][0]["start"] == a["usage"]["cached_tokens"])
    long = ids[:1000]
    first, good = ask(long)
    check(first == 0 and good, "nothing is kept at first", first)
    for prompt, want in ((long + ids[1500:1600], 960), (long, 960), (long[:999], 960),
                         (long[:961], 960), (long[:960], 512), (long[:600], 512), (long[:513], 512),
                         (long[:512], 0), (long[:500] + ids[1700:1750], 0),
                         (long[:500] + ids[1800:1850], 448), (long[:501], 448)):
        got, good = ask(prompt)
        check(got == want and good, f"a prompt of {len(prompt)}: {want} tokens from a state",
              (got, good))
    got, good = ask(long, cache_salt="x")
    check(got == 0 and good, "another salt meets nothing", got)
    got, good = ask(long, cache_salt="x")
    check(got == 960 and good, "the same one does", got)
    got, good = ask(long)
    check(got == 960 and good, "and none is a salt of its own", got)
    for salt in ("", 5, "x" * 257):
        a = d.prefill(prompt=[1], cache_salt=salt)
        check(a.status == 400 and a.error()["param"] == "cache_salt", "a salt that is none", a)
    m = d.metrics()
    check(m["prefilld_prefix_hits_total"] >= 8 and m["prefilld_checkpoints_total"] >= 3 and
          m["prefilld_prefix_hit_tokens_total"] >= 8 * 448 and
          m["prefilld_prefix_queries_total"] > m["prefilld_prefix_hits_total"], "all is counted", m)
    check(m['prefilld_state_slots{state="cached"}'] >= 3 and d.is_idle(), "kept, not held", m)


def numbers(d, ids):
    """Numbers of tokens that were not computed again are those that were."""
    def ask(prompt, n_top):
        a = d.prefill(prompt=prompt, logprobs="all", top_logprobs=n_top, cache_salt="n").json()
        want = cold(d, prompt, top_logprobs=n_top)
        return a["usage"]["cached_tokens"], all(a.get(k) == want.get(k) for k in
                                                ("prompt_logprobs", "prompt_top", "next"))
    d.prefill(prompt=ids[:700], cache_salt="n")  # keeps its state, at 640, and no numbers
    for prompt, n_top, want in ((ids[:700], 2, 0), (ids[:700], 2, 640), (ids[:700], 1, 640),
                                (ids[:700], 3, 0), (ids[:690], 3, 640), (ids[:641], 0, 640),
                                (ids[:640] + ids[900:950], 2, 512),
                                (ids[:512] + ids[900:950], 2, 0)):
        got, good = ask(prompt, n_top)
        check(got == want and good, f"{len(prompt)} tokens, {n_top} candidates: {want} told", got)


def mishaps(d, ids):
    """Hang-ups and deadlines in the middle of a call's prompts."""
    rng = random.Random(5)
    sums = d.pool_sums()
    for i in range(12):
        long = [rng.randrange(2000) for _ in range(3000)]
        with d.conn() as c:
            c.send(request("POST", "/v1/score", {"context": long,
                                                 "continuations": [[j] for j in range(20)]}))
            time.sleep(rng.random() * 0.1)
    statuses = {score(d, ids[:3000 - i], [[j] for j in range(30)], deadline_ms=1 + 4 * i).status
                for i in range(8)}
    check(504 in statuses and statuses <= {200, 504}, "deadlines", statuses)
    check(until(d.is_idle) and d.pool_sums() == sums, "everything is back", d.metrics())
    a = score(d, ids[:300], [[5], [6]]).json()
    check([s["logprobs"] for s in a["data"]] ==
          [cold(d, ids[:300] + [t])["prompt_logprobs"][300:] for t in (5, 6)], "and it goes on")


def whole_or_none(ids):
    """A list is admitted whole or refused whole."""
    with Daemon("--queue-length", 8, "--max-step-tokens", 64) as d:
        with d.conn() as c:
            c.send(request("POST", "/v1/score", {"context": ids * 4, "continuations": [[1]] * 7}))
            until(lambda: d.metrics()["prefilld_requests_waiting"] > 0)
            a = score(d, ids[:10], [[1], [2], [3]])
            check(a.status == 503 and d.metrics()["prefilld_requests_waiting"] <= 7,
                  "too many together wait for nobody", a)
            check(score(d, ids[:10], [[1]] * 9).status == 400, "more than ever fit")
        check(until(d.is_idle), "everything is back")


# Under ASan what ends in the middle: the numbers, and kept states behind them, are those of
# tests/test_share and tests/test_prefix_faults, which run there.
with Daemon("--state-slots", 128) as daemon:
    IDS = daemon.ask("POST", "/tokenize", {"prompt": TEXT[:20000]}).json()["tokens"][:4000]
    if not is_sanitized():
        scores(daemon, IDS, "by default", 1500)
    one_step(daemon, IDS[1000:])
    if not is_sanitized():
        choices(daemon, IDS[2000:])
    mishaps(daemon, IDS)
    check(daemon.stop() == 0, "it ends with 0")
whole_or_none(IDS)
if is_sanitized():
    done()
with Daemon("--checkpoint-tokens", 512, "--state-slots", 64) as daemon:
    reuse(daemon, IDS)
    numbers(daemon, IDS[500:])
with Daemon("--prefix-cache", "no", "--max-step-tokens", 256) as daemon:
    scores(daemon, IDS, "without a cache", 1500)
    first = [daemon.prefill(prompt=IDS[:3000]).json()["usage"]["cached_tokens"] for _ in "ab"]
    check(first == [0, 0], "each call for itself", first)
    m = daemon.metrics()
    check(m['prefilld_state_slots{state="cached"}'] == 0, "nothing is kept", m)
    mishaps(daemon, IDS)
for slots, tokens in ((1, 512), (2, 512), (3, 1024)):
    with Daemon("--state-slots", slots, "--kv-tokens", tokens, "--max-step-tokens", 128) as daemon:
        scores(daemon, IDS, f"{slots} slots", 0)
done()
