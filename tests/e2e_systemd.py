#!/usr/bin/env python3
"""The daemon under a service manager, played by this program: what it reports, sockets that are
handed over, a restart under load, the watchdog, reload. TAP."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

from e2e import MODEL, SRCDIR, Conn, Daemon, big_model, check, done, is_sanitized, request, until

LOADGEN = os.path.join(SRCDIR, "clients", "loadgen")
SLOW = ("--max-step-tokens", 64)

# Puts descriptors where the protocol wants them and the process's own number into LISTEN_PID.
LAUNCHER = """
import os, sys
names, fds, command = sys.argv[1], [int(f) for f in sys.argv[2].split(",") if f], sys.argv[3:]
copies = [os.dup(f) for f in fds]
high = [os.dup2(f, 100 + i) for i, f in enumerate(copies)]
for i, f in enumerate(high):
    os.dup2(f, 3 + i)
if fds:
    os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS=str(len(fds)), LISTEN_FDNAMES=names)
os.execv(command[0], command)
"""


class Manager:
    """NOTIFY_SOCKET, and everything that was said there."""

    def __init__(self, tmp, is_abstract=False):
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.name = f"@prefilld-e2e-{os.getpid()}" if is_abstract else os.path.join(tmp, "notify")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.name)
        self.sock.bind(self.name.replace("@", "\0"))
        self.heard = []  # (monotonic time, message)
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self):
        with contextlib.suppress(OSError):
            while True:
                message = self.sock.recv(4096).decode()
                self.heard.append((time.monotonic(), message))

    def lines(self):
        return [line for _, message in list(self.heard) for line in message.split("\n")]

    def count(self, line):
        return self.lines().count(line)

    def wait(self, line, n=1):
        return until(lambda: self.count(line) >= n)


def service(manager, *args, sockets=(), names="a:b", env=(), **more):
    """A Daemon as systemd would start it; without --listen when sockets are handed over."""
    environment = {**os.environ, "NOTIFY_SOCKET": manager.name, **dict(env)}
    fds = [s.fileno() for s in sockets]
    more.setdefault("listen", () if sockets else ("127.0.0.1:0",))
    return Daemon(*args, **more, environment=environment, fds=fds,
                  launcher=(sys.executable, "-c", LAUNCHER, names, ",".join(map(str, fds))))


def listen_on(tmp):
    tcp = socket.create_server(("127.0.0.1", 0), backlog=1024)
    path = os.path.join(tmp, "p.sock")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    unix = socket.socket(socket.AF_UNIX)
    unix.bind(path)
    unix.listen(1024)
    return tcp, unix, "127.0.0.1:%d" % tcp.getsockname()[1], path


def test_words(tmp):
    model = big_model(tmp)
    for is_abstract in (False, True):
        manager = Manager(tmp, is_abstract)
        with service(manager, "--load", "dummy", "--state-slots", 4, "--kv-tokens", 1024,
                     model=model) as d:
            manager.wait("READY=1")
            lines = manager.lines()
            percents = [int(x[1]) for x in (re.match(r"STATUS=loading (\d+)%$", s) for s in lines)
                        if x]
            ready = lines.index("READY=1")
            check(len(percents) >= 2 and percents == sorted(percents) and
                  any(s.startswith("EXTEND_TIMEOUT_USEC=") for s in lines[:ready]),
                  "while loading: percent, and more time", lines)
            check(d.ask("GET", "/ready").status == 200, "READY=1 when it is ready")
            check(manager.wait("STATUS=ready, 0 running, 0 waiting"), "then what runs and waits")
            check(manager.count("WATCHDOG=1") == 0, "no watchdog that was not asked for")
            check(d.stop() == 0, "exit 0", d.log_text())
            check(manager.count("STOPPING=1") == 1 and manager.count("READY=1") == 1,
                  "STOPPING=1 at the end", manager.lines())
    manager = Manager(tmp)
    with service(manager, "--load", "dummy", "--state-slots", 4, "--kv-tokens", 1024, model=model,
                 waits=False) as d:
        until(lambda: any("loading" in s for s in manager.lines()))
        d.signal(signal.SIGTERM)
        check(d.wait() == 0 and manager.count("READY=1") == 0, "SIGTERM while loading: no READY",
              manager.lines())
    manager = Manager(tmp)
    with service(manager, *SLOW, "--state-slots", 1) as d:
        c = d.conn()
        c.send(request("POST", "/v1/prefill", {"prompt": [7] * 30000}))
        check(manager.wait("STATUS=ready, 1 running, 0 waiting"), "a request shows in the status")
        c.close()
    with service(Manager(tmp), env={"NOTIFY_SOCKET": "nonsense"}) as d:
        check("event=no_manager" in d.log_text() and d.stop() == 0,
              "a bad NOTIFY_SOCKET is said, and borne")


def test_watchdog(tmp):
    manager = Manager(tmp)
    with service(manager, "--debug-calls", "yes", "--stall-s", 1,
                 env={"WATCHDOG_USEC": "2000000"}) as d:
        check(manager.wait("WATCHDOG=1", 4), "an idle engine feeds the watchdog")
        fed = [at for at, message in manager.heard if message == "WATCHDOG=1"]
        gaps = [b - a for a, b in zip(fed, fed[1:])]
        # Sent at least 500 ms apart; one may be read late by so much that they seem closer.
        check(min(gaps) > 0.3, "four times in its interval, no more", gaps)
        a = d.ask("POST", "/v1/debug/stall", {"seconds": 5})
        check(a.status == 200, "the engine is made to stand still", a)
        time.sleep(1)  # what was under way
        n = manager.count("WATCHDOG=1")
        with d.conn() as waiting:
            waiting.send(request("POST", "/v1/prefill", {"prompt": [1]}))
            end = time.monotonic() + 3
            statuses = []
            while time.monotonic() < end:
                statuses.append(d.ask("GET", "/version").status)
                time.sleep(0.1)
            health, age_s = d.ask("GET", "/health"), d.metrics()["prefilld_queue_age_seconds"]
            check(len(statuses) > 3 and set(statuses) == {200} and
                  manager.count("WATCHDOG=1") == n,
                  f"a stalled engine starves it, while HTTP answers ({len(statuses)} times)")
            check(health.status == 503 and health.json()["status"] == "stalled",
                  "/health says so, with a request waiting", health)
            check(2 < age_s < 60, f"whose age is told: {age_s} s")
            check(waiting.read().status == 200 and manager.wait("WATCHDOG=1", n + 1),
                  "it goes on, and so does the feeding")
        check(d.ask("POST", "/v1/debug/stall", {"seconds": 600}).status == 200 and d.stop() == 0,
              "a stop ends a stall", d.log_text())


def test_sockets(tmp):
    tcp, unix, address, path = listen_on(tmp)
    with service(Manager(tmp), sockets=(tcp, unix), names="prefilld.socket:other") as d:
        check(d.addresses == [address, "unix:" + path], "the ready line has what was handed over",
              d.log_text())
        check('name="prefilld.socket"' in d.log_text() and 'name="other"' in d.log_text(),
              "the log has their names")
        for a in d.addresses:
            with Conn(a) as c:
                check(c.ask("POST", "/v1/prefill", {"prompt": [1, 2]}).status == 200,
                      f"{a.split(':')[0]}: a request")
        check(d.stop() == 0 and os.path.exists(path), "exit 0; the path stays")
    # Connected before there is a daemon at all, and while it loads.
    with Conn(address) as early:
        early.send(request("POST", "/v1/prefill", {"prompt": [1]}))
        with service(Manager(tmp), "--load", "dummy", "--state-slots", 4, "--kv-tokens", 1024,
                     sockets=(tcp,), model=big_model(tmp), waits=False) as d:
            until(lambda: any("event=loading" in s for s in d.log))
            with Conn(address) as late:
                late.send(request("POST", "/v1/prefill", {"prompt": [1]}))
                a, b = early.read(), late.read()
                check(a.status == 200 and b.status == 200,
                      "who connects before or while it loads waits and is answered", (a, b))
            check(d.stop() == 0, "exit 0")
    with service(Manager(tmp), sockets=(tcp,), listen=(address, "127.0.0.1:0")) as d:
        check(d.addresses[0] == address and len(d.addresses) == 2,
              "a listen of the same address is the same socket; others are added", d.log_text())
        check(Conn(d.addresses[1]).ask("GET", "/health").status == 200, "and answer")
        check(d.stop() == 0, "exit 0")
    with service(Manager(tmp), env={"LISTEN_FDS": "1", "LISTEN_PID": "1"}) as d:
        check(len(d.addresses) == 1 and d.stop() == 0, "another process's sockets are not taken")
    with tempfile.TemporaryFile() as file:
        with service(Manager(tmp), sockets=(file,), waits=False) as d:
            check(d.wait() == 78 and "no listening" in d.log_text(), "a file is no socket: 78",
                  d.log_text())


def test_restart(tmp):
    """Three daemons in a row on the same sockets, under load: nobody is refused."""
    tcp, unix, address, path = listen_on(tmp)
    out = [os.path.join(tmp, f"{i}.json") for i in range(2)]
    # What a sanitized daemon can do before drain-s strikes.
    rate, n_lanes, most = ("1", "1", 10) if is_sanitized() else ("20", "3", 100)
    d = service(Manager(tmp), sockets=(tcp, unix))
    loads = [subprocess.Popen(
        [sys.executable, LOADGEN, "--url", url, "--duration", "8", "--length", f"uniform:1:{most}",
         "--json", file, *how], stdout=subprocess.DEVNULL)
        for url, file, how in (("http://" + address, out[0], ("--rate", rate)),
                               ("unix:" + path, out[1], ("--concurrency", n_lanes)))]
    n_restarts = 0
    while any(load.poll() is None for load in loads):
        time.sleep(1.5)
        status = d.stop()
        if status != 0:
            check(False, "exit 0 under load", d.log_text())
        d.__exit__()
        d = service(Manager(tmp), sockets=(tcp, unix))
        n_restarts += 1
    for file, what in zip(out, ("an open loop over TCP", "a closed loop over the unix socket")):
        with open(file, encoding="utf-8") as f:
            r = json.load(f)
        check(r["errors"] == {} and r["ok"] == r["requests"] > 0 and n_restarts >= 2,
              f"{n_restarts} restarts under {what}: {r['ok']} answered, none failed",
              (r["errors"], r["requests"], r["resent"]))
    check(d.stop() == 0, "exit 0")
    d.__exit__()
    # A second signal still ends it.
    with service(Manager(tmp), *SLOW, "--drain-s", 1000, sockets=(tcp,)) as d:
        c = Conn(address)
        c.send(request("POST", "/v1/prefill", {"prompt": [7] * 30000}))
        until(lambda: d.metrics()["prefilld_requests_running"] == 1)
        d.signal(signal.SIGTERM)
        time.sleep(0.3)
        check(d.process.poll() is None, "a drain waits for what runs")
        d.signal(signal.SIGTERM)
        check(d.wait() == 0, "a second SIGTERM ends it", d.log_text())


def test_reload(tmp):
    conf, keys = os.path.join(tmp, "conf"), os.path.join(tmp, "keys")

    def write(path, text):
        with open(path, "w", encoding="ascii") as f:
            f.write(text)

    def status(key):
        return d.ask("POST", "/v1/prefill", {"prompt": [1]},
                     [f"Authorization: Bearer {key}"]).status

    write(keys, "alpha\n")
    write(conf, f"model {MODEL}\napi-key-file {keys}\nlog-level info\n")
    manager = Manager(tmp)
    with service(manager, "--config", conf) as d:
        check(status("alpha") == 200 and status("beta") == 401, "the first keys")
        n_lines = len(d.log)
        write(keys, "beta\n")
        write(conf, f"model {MODEL}\napi-key-file {keys}\nlog-level debug\nmax-seqs 1\n")
        d.signal(signal.SIGHUP)
        manager.wait("READY=1", 2)
        message = next(m for _, m in manager.heard if m.startswith("RELOADING=1"))
        at = int(re.fullmatch(r"RELOADING=1\nMONOTONIC_USEC=(\d+)", message)[1])
        check(0 <= time.monotonic() * 1e6 - at < 60e6, "RELOADING=1 and when, then READY=1", message)
        check(status("alpha") == 401 and status("beta") == 200, "the keys are new")
        check(until(lambda: any(" debug " in s for s in d.log[n_lines:])), "so is the log-level")
        for text, what in ((f"model {MODEL}\nnonsense 1\n", "a bad configuration"),
                           (f"model {MODEL}\napi-key-file /nonexistent\n", "no key file")):
            write(conf, text)
            n = manager.count("READY=1")
            d.signal(signal.SIGHUP)
            manager.wait("READY=1", n + 1)
            check(status("beta") == 200 and status("alpha") == 401 and
                  until(lambda: "event=reload_failed" in d.log_text()),
                  f"{what}: said, and all stays", d.log_text())
        write(conf, f"model {MODEL}\n")
        n = manager.count("READY=1")
        d.signal(signal.SIGHUP)
        manager.wait("READY=1", n + 1)
        check(status("anything") == 200, "no key file: no key is asked for")
        check(d.stop() == 0, "exit 0", d.log_text())


def test_journal(tmp):
    """Levels in front of lines when stderr is the journal's, and only then."""
    code = ("import os, sys; s = os.fstat(2); os.environ['JOURNAL_STREAM'] = f'{s.st_dev}:{s.st_ino}';"
            "os.execv(sys.argv[1], sys.argv[1:])")
    with Daemon(launcher=(sys.executable, "-c", code)) as d:
        check(any(s.startswith("<6>event=") for s in d.log) and d.stop() == 0,
              "lines have the journal's levels", d.log_text())
    with Daemon("--served-name", "a\nb", launcher=(sys.executable, "-c", code), waits=False) as d:
        check(d.wait() == 78 and d.log[-1].startswith("<3>prefilld: "), "the last word too", d.log)
    with Daemon(environment={**os.environ, "JOURNAL_STREAM": "1:1"}) as d:
        check(not any(s.startswith("<") for s in d.log), "not when stderr goes elsewhere", d.log)


def main():
    with tempfile.TemporaryDirectory() as tmp:
        for test in (test_words, test_watchdog, test_sockets, test_restart, test_reload,
                     test_journal):
            test(tmp)
    done()


if __name__ == "__main__":
    main()
