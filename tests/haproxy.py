#!/usr/bin/env python3
"""etc/haproxy.cfg with two daemons: affinity by a header, and a drain of one under load without a
failed request. TAP."""

import os
import re
import shutil
import socket
import subprocess
import tempfile
import threading

from e2e import Conn, Daemon, check, done, until

SRCDIR = os.environ.get("SRCDIR", ".")
THREADS = 8


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def config(directory, port, daemons):
    with open(os.path.join(SRCDIR, "etc/haproxy.cfg"), encoding="utf-8") as f:
        text = f.read()
    for old, new in ((8090, port), (8081, daemons[0].address.rsplit(":", 1)[1]),
                     (8082, daemons[1].address.rsplit(":", 1)[1])):
        assert text.count(f":{old}") == 1, old
        text = text.replace(f":{old}", f":{new}")
    path = os.path.join(directory, "haproxy.cfg")
    with open(path, "w", encoding="utf-8") as f:
        f.write(text)
    return path


class Load:
    """Clients that ask one after another and keep their connections."""

    def __init__(self, address):
        self.address, self.ends, self.n_ok, self.wrong = address, False, 0, []
        self.lock = threading.Lock()
        self.threads = [threading.Thread(target=self.run, args=(i,)) for i in range(THREADS)]
        for t in self.threads:
            t.start()

    def run(self, number):
        headers = [f"X-Prefilld-Affinity: client-{number}"] if number % 2 else []
        with Conn(self.address) as c:
            while not self.ends:
                try:
                    a = c.ask("POST", "/v1/prefill", {"prompt": [number + 1] * 200}, headers)
                except (OSError, ValueError) as e:
                    a = e
                with self.lock:
                    if getattr(a, "status", None) == 200:
                        self.n_ok += 1
                    else:
                        self.wrong.append(f"client {number}: {a}")
                        return

    def stop(self):
        self.ends = True
        for t in self.threads:
            t.join()


def served(daemon):
    return daemon.metrics()['prefilld_requests_total{outcome="ok"}']


def test_affinity(address, daemons):
    with Conn(address) as c:
        moved = []
        for key in range(12):
            before = [served(d) for d in daemons]
            for _ in range(3):
                c.ask("POST", "/v1/prefill", {"prompt": [1, 2, 3]},
                      [f"X-Prefilld-Affinity: key-{key}"])
            moved.append(tuple(int(served(d) - b) for d, b in zip(daemons, before)))
    check(all(sorted(m) == [0, 3] for m in moved), "requests of one key go to one daemon", moved)
    check(len(set(moved)) == 2, "keys are spread over both", moved)


def test_drain(address, daemons):
    load = Load(address)
    check(until(lambda: load.n_ok > 20 or load.wrong) and not load.wrong, "requests go through",
          load.wrong)
    status = daemons[0].stop()
    check(status == 0 and "event=drained" in daemons[0].log_text(), "one daemon drains", status)
    at_end = load.n_ok
    check(until(lambda: load.n_ok > at_end + 20 or load.wrong), "the other one goes on")
    load.stop()
    check(not load.wrong, f"none of {load.n_ok} requests failed", load.wrong)


def main():
    if not shutil.which("haproxy"):
        print("ok 1 - behind HAProxy # SKIP haproxy is not installed (Debian package haproxy)")
        print("1..1")
        return
    with tempfile.TemporaryDirectory() as directory, \
            Daemon("--served-name", "m") as one, Daemon("--served-name", "m") as other:
        port = free_port()
        path = config(directory, port, (one, other))
        proxy = subprocess.Popen(["haproxy", "-db", "-f", path], stdout=subprocess.DEVNULL,
                                 stderr=subprocess.PIPE, text=True)
        try:
            address = f"127.0.0.1:{port}"

            def is_up():
                try:
                    with Conn(address) as c:
                        return c.ask("GET", "/ready").status == 200
                except OSError:
                    return False

            check(until(is_up), "the proxy serves")
            test_affinity(address, (one, other))
            test_drain(address, (one, other))
        finally:
            proxy.terminate()
            log = proxy.communicate()[1]
            if re.search("ALERT", log):
                print("# " + log.replace("\n", "\n# "))
    done()


main()
