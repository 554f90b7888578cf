"""What the end-to-end tests share: the daemon as a child process, raw HTTP, TAP."""

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
import time

SRCDIR = os.environ.get("SRCDIR", ".")
BUILDDIR = os.environ.get("BUILDDIR", ".")
PREFILLD = os.path.join(BUILDDIR, "prefilld")
MODEL = os.path.join(SRCDIR, "tests", "models", "demo")
WAIT_S = 120  # under sanitizers everything takes longer

count = failed = 0


def check(good, what, detail=""):
    global count, failed
    count += 1
    print(f"{'ok' if good else 'not ok'} {count} - {what}")
    if not good:
        failed += 1
        for line in str(detail).splitlines():
            print(f"# {line}")
    sys.stdout.flush()
    return bool(good)


def skip(what, why):
    global count
    count += 1
    print(f"ok {count} - {what} # SKIP {why}")


def done():
    print(f"1..{count}")
    sys.exit(failed > 0)


def until(condition, wait_s=WAIT_S):
    """Waits until condition() is true; returns it."""
    end = time.monotonic() + wait_s
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.01)
    return condition()


def is_sanitized(by="asan|tsan"):
    with open(PREFILLD, "rb") as f:
        return re.search(b"__(%s)_init" % by.encode(), f.read()) is not None


def on_terminal(*command, environment=()):
    """Runs it to its end: its exit status, and what a terminal gets to see of both streams."""
    ours, theirs = pty.openpty()
    child = subprocess.Popen(command, stdout=theirs, stderr=theirs, stdin=subprocess.DEVNULL,
                             env={"TERM": "xterm", "LC_ALL": "C.UTF-8", **dict(environment)})
    os.close(theirs)
    seen = b""
    try:
        while data := os.read(ours, 1 << 16):
            seen += data
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    return child.wait(30), seen.decode().replace("\r\n", "\n")


class Answer:
    def __init__(self, status, headers, body):
        self.status, self.headers, self.body = status, headers, body

    def json(self):
        return json.loads(self.body)

    def error(self):
        return self.json()["error"]

    def __repr__(self):
        return f"{self.status} {self.headers} {self.body[:500]!r}"


class Conn:
    """One connection. What is sent need not be HTTP."""

    def __init__(self, address, timeout=WAIT_S):
        if address.startswith("unix:"):
            self.sock = socket.socket(socket.AF_UNIX)
            self.sock.settimeout(timeout)
            self.sock.connect(address[5:])
        else:
            host, port = address.rsplit(":", 1)
            self.sock = socket.create_connection((host.strip("[]"), int(port)), timeout)
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.rest = b""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self.sock.close()

    def send(self, data):
        self.sock.sendall(data)

    def read(self, has_body=True):
        """The next answer, or None when the connection ends without one."""
        while b"\r\n\r\n" not in self.rest:
            data = self.sock.recv(1 << 16)
            if not data:
                return None
            self.rest += data
        head, self.rest = self.rest.split(b"\r\n\r\n", 1)
        lines = head.decode("latin-1").split("\r\n")
        headers = {}
        for line in lines[1:]:
            name, value = line.split(":", 1)
            headers[name.strip().lower()] = value.strip()
        length = int(headers.get("content-length", 0)) if has_body else 0
        while len(self.rest) < length:
            data = self.sock.recv(1 << 20)
            if not data:
                return None
            self.rest += data
        body, self.rest = self.rest[:length], self.rest[length:]
        return Answer(int(lines[0].split()[1]), headers, body)

    def read_all(self, n_bytes=1 << 16, pause_s=0):
        """Whatever comes until the other side closes."""
        data = self.rest
        while more := self.sock.recv(n_bytes):
            data += more
            time.sleep(pause_s)
        return data

    def ends(self):
        """Does the connection end without another byte?"""
        try:
            return self.rest == b"" and self.sock.recv(1) == b""
        except ConnectionError:
            return True
        except TimeoutError:
            return False

    def ask(self, method, path, body=None, headers=()):
        self.send(request(method, path, body, headers))
        return self.read(method != "HEAD")


def chunks_of(data):
    """What the chunks hold that follow data's header, one by one; None when the last is not there."""
    rest, found = data.split(b"\r\n\r\n", 1)[1], []
    while b"\r\n" in rest:
        size, rest = rest.split(b"\r\n", 1)
        n = int(size, 16)
        if n == 0:
            return found
        found.append(rest[:n])
        rest = rest[n + 2:]
    return None


def request(method, path, body=None, headers=()):
    if body is not None and not isinstance(body, bytes):
        body = json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", "Host: t", *headers]
    if body is not None:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + (body or b"")


# Pools that hold the longest prompt; to fill the default ones with NaN takes a minute under TSan.
DEFAULTS = {"--state-slots": 16, "--kv-tokens": 40960}


class Daemon:
    """prefilld, started with the demo model on a free port; ended with the `with` block."""

    def __init__(self, *args, model=MODEL, listen=("127.0.0.1:0",), waits=True, before=None,
                 launcher=(), environment=None, fds=()):
        command = [*launcher, PREFILLD, "--model", model]
        for address in listen:
            command += ["--listen", address]
        for name, value in DEFAULTS.items():
            if name not in args:
                command += [name, str(value)]
        self.log = []
        self.process = subprocess.Popen(command + [str(a) for a in args], stderr=subprocess.PIPE,
                                        stdin=subprocess.DEVNULL, text=True, preexec_fn=before,
                                        env=environment, pass_fds=fds)
        self.addresses = []  # before the reader, which fills it
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        if waits and not until(lambda: self.addresses or self.process.poll() is not None):
            self.process.kill()
            raise RuntimeError("prefilld is not ready:\n" + "".join(self.log))
        if waits and not self.addresses:
            raise RuntimeError("prefilld has ended:\n" + "".join(self.log))

    def _read(self):
        for line in self.process.stderr:
            self.log.append(line)
            found = re.match(r"ready listen=(\S+)", line)
            if found:
                self.addresses = found.group(1).split(",")

    @property
    def address(self):
        return self.addresses[0]

    def __enter__(self):
        return self

    def __exit__(self, mistake=None, *_):
        status = self.process.poll()
        if status is None:
            self.process.kill()
        self.process.wait()
        self.reader.join()
        self.process.stderr.close()
        if mistake:  # a connection that ended, say: what had the daemon to say?
            print(f"# prefilld, exit status {status}:")
            for line in self.log[-80:]:
                print("#", line.rstrip())

    def signal(self, number):
        self.process.send_signal(number)

    def wait(self, wait_s=WAIT_S):
        """The exit status, or None when it does not end in time."""
        try:
            status = self.process.wait(wait_s)
            self.reader.join()
            return status
        except subprocess.TimeoutExpired:
            return None

    def stop(self):
        self.signal(signal.SIGTERM)
        return self.wait()

    def log_text(self):
        return "".join(self.log)

    def conn(self):
        return Conn(self.address)

    def ask(self, method, path, body=None, headers=()):
        with self.conn() as c:
            return c.ask(method, path, body, headers)

    def prefill(self, **fields):
        return self.ask("POST", "/v1/prefill", fields)

    def metrics(self):
        values = {}
        for line in self.ask("GET", "/metrics").body.decode().splitlines():
            if not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                values[name] = float(value)
        return values

    def is_idle(self):
        """Nothing runs or waits, and every slot and page is back."""
        m = self.metrics()
        return (m["prefilld_requests_running"] == 0 and m["prefilld_requests_waiting"] == 0 and
                m['prefilld_state_slots{state="held"}'] == 0 and
                m['prefilld_kv_pages{state="held"}'] == 0)

    def pool_sums(self):
        m = self.metrics()
        return [sum(v for k, v in m.items() if k.startswith(p))
                for p in ("prefilld_state_slots{", "prefilld_kv_pages{")]

    def counted(self, outcome):
        return self.metrics()[f'prefilld_requests_total{{outcome="{outcome}"}}']

    def rss_kib(self):
        with open(f"/proc/{self.process.pid}/status") as f:
            return int(re.search(r"VmRSS:\s+(\d+)", f.read()).group(1))


def big_model(directory, hidden=1024):
    """A configuration without weights (--load dummy) that takes seconds to load."""
    with open(os.path.join(MODEL, "config.json")) as f:
        config = json.load(f)
    config.update(hidden_size=hidden, num_experts=16, moe_intermediate_size=512,
                  intermediate_size=1024, shared_expert_intermediate_size=512)
    with open(os.path.join(directory, "config.json"), "w") as f:
        json.dump(config, f)
    return directory
