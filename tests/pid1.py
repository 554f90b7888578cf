#!/usr/bin/env python3
"""prefilld under a real systemd, PID 1 of a small Debian made here: start, restart under load,
watchdog, drain, crash, bad configuration, reload, no network. TAP.

Needs root, debootstrap and a mirror; without them it is skipped in words. Not part of make check:
tests/run.sh runs it once. PID1_DIR (build/pid1): where the Debian is kept for the next time.
PID1_DEB: a package to be installed there in the end, started and purged. Argument: [--prepare],
to make the Debian and no more."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time

from e2e import BUILDDIR, MODEL, SRCDIR, Conn, check, done, skip, until

HOME = os.path.abspath(os.environ.get("PID1_DIR", os.path.join("build", "pid1")))
ROOT = os.path.join(HOME, "root")
LOADGEN = os.path.join(SRCDIR, "clients", "loadgen")
PACKAGES = "systemd,systemd-sysv,libmicrohttpd12,libjansson4,libutf8proc2,iproute2"
CONF = "/usr/local/etc/prefilld/prefilld.conf"
GOOD = ("model /var/lib/prefilld/demo\nstate-slots 16\nkv-tokens 40960\nmax-step-tokens 256\n"
        "api-key-file /usr/local/etc/prefilld/keys\ndebug-calls yes\n")

# In namespaces of its own: a root, cgroups, devices, then systemd.
INIT = r"""
set -e
cd "$1"
mount --bind . .
cd "$1"
mount -t proc proc proc
mount -t sysfs -o ro sysfs sys
if [ "$2" = unified ]; then
    mount -t cgroup2 cgroup2 sys/fs/cgroup
else
    mount -t tmpfs -o mode=755 tmpfs sys/fs/cgroup
    for c in $2; do
        mkdir "sys/fs/cgroup/$c"
        case $c in
        systemd) mount -t cgroup -o none,name=systemd cgroup sys/fs/cgroup/systemd ;;
        unified) mount -t cgroup2 cgroup2 sys/fs/cgroup/unified ;;
        *) mount -t cgroup -o "$c" cgroup "sys/fs/cgroup/$c" ;;
        esac
    done
fi
mount -t tmpfs -o mode=755 tmpfs dev
for d in null zero full random urandom tty; do
    touch "dev/$d"
    mount --bind "/dev/$d" "dev/$d"
done
mkdir dev/pts dev/shm
mount -t devpts -o newinstance,ptmxmode=0666 devpts dev/pts
ln -s pts/ptmx dev/ptmx
mount -t tmpfs tmpfs dev/shm
mount -t tmpfs -o mode=755 tmpfs run
mkdir -p .old
pivot_root . .old
umount -l /.old
ip link set lo up
exec env -i container=other PATH=/usr/sbin:/usr/bin:/sbin:/bin /lib/systemd/systemd \
    --show-status=0 systemd.unit=multi-user.target
"""


def run(*command, wait_s=120):
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=wait_s)


def find_cgroups():
    """Where cgroups are mounted, by kind: for systemd's own use."""
    kinds = {}
    with open("/proc/mounts", encoding="utf-8") as f:
        for line in f:
            _, where, kind, options, *_ = line.split()
            if kind == "cgroup2":
                kinds["unified"] = where
            elif kind == "cgroup":
                name = where.rsplit("/", 1)[1]
                if name in ("systemd", "devices", "memory", "pids", "cpu", "blkio"):
                    kinds[name] = where
    return kinds


class Machine:
    def __init__(self, kinds):
        self.kinds = kinds
        self.groups = [os.path.join(where, f"prefilld-test-{os.getpid()}")
                       for where in kinds.values()]
        for group in self.groups:
            os.mkdir(group)
        script = os.path.join(HOME, "init.sh")
        with open(script, "w", encoding="ascii") as f:
            f.write(INIT)
        self.log = open(os.path.join(HOME, "console.log"), "w", encoding="utf-8")
        self.unshare = subprocess.Popen(
            ["unshare", "-m", "-p", "-f", "-u", "-C", "-i", "-n", "--propagation", "private",
             "--kill-child", "sh", script, ROOT, " ".join(kinds)],
            stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log, preexec_fn=self.join)

    def join(self):
        for group in self.groups:
            with open(os.path.join(group, "cgroup.procs"), "w", encoding="ascii") as f:
                f.write(str(os.getpid()))

    def find_init(self):
        path = f"/proc/{self.unshare.pid}/task/{self.unshare.pid}/children"
        with open(path, encoding="ascii") as f:
            child = f.read().split()
        if not child:
            return None
        with open(f"/proc/{child[0]}/comm", encoding="ascii") as f:
            return child[0] if f.read() == "systemd\n" else None

    def start(self):
        """Is systemd there, and does it answer?"""
        if not until(lambda: self.unshare.poll() is not None or self.find_init(), 20):
            return False
        if self.unshare.poll() is not None:
            return False
        self.init = self.find_init()
        return until(lambda: self("systemctl", "is-system-running").stdout.strip()
                     in ("running", "degraded"), 30)

    def __call__(self, *command, wait_s=120):
        return run("nsenter", "-t", self.init, "-m", "-p", "-u", "-C", "-i", "-n", "-r", "-w",
                   *command, wait_s=wait_s)

    def show(self, name, unit="prefilld.service"):
        return self("systemctl", "show", "--value", "-p", name, unit).stdout.strip()

    def host_pid(self):
        """The daemon's number outside: the main process by its place in the tree."""
        inner = self.show("MainPID")
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{pid}/status", encoding="utf-8") as f:
                    text = f.read()
            except OSError:
                continue
            if "Name:\tprefilld\n" in text and f"\t{inner}\n" in text.split("NSpid:")[1][:60]:
                return int(pid)
        return None

    def write(self, path, text):
        with open(ROOT + path, "w", encoding="utf-8") as f:
            f.write(text)
        self("chgrp", "prefilld", path)
        os.chmod(ROOT + path, 0o640)

    def journal(self, *more):
        return self("journalctl", "--no-pager", "-u", "prefilld", *more).stdout

    def ask(self, prompt, address="127.0.0.1:8080", wait_s=60):
        """From within the machine's network, with the program's own client; its exit status."""
        key = os.path.join(HOME, "key")
        with open(key, "w", encoding="ascii") as f:
            f.write("alpha\n")
        client = [sys.executable, os.path.join(SRCDIR, "clients", "prefill"), "--url", address,
                  "--ids", ",".join(map(str, prompt)), "--json", "--logprobs", "none",
                  "--api-key-file", key, "--timeout", str(wait_s)]
        return run("nsenter", "-t", self.init, "-n", *client, wait_s=wait_s + 20).returncode

    def close(self):
        self.unshare.kill()
        self.unshare.wait()
        self.log.close()
        for group in self.groups:
            for folder, _, _ in list(os.walk(group, topdown=False)):
                until(lambda f=folder: not os.path.isdir(f) or remove(f), 5)


def remove(folder):
    try:
        os.rmdir(folder)
        return True
    except OSError:
        return False


def make_debian():
    """Returns why not, or None."""
    if os.geteuid() != 0:
        return "not root"
    if os.path.exists(ROOT):
        return None
    if not shutil.which("debootstrap"):
        return "no debootstrap (Debian package debootstrap)"
    # Under its name only when it is whole.
    half = ROOT + ".part"
    shutil.rmtree(half, ignore_errors=True)
    os.makedirs(HOME, exist_ok=True)
    r = run("debootstrap", "--variant=minbase", "--include=" + PACKAGES, "bookworm", half,
            wait_s=900)
    if r.returncode != 0:
        return "debootstrap could not make a Debian: " + (r.stdout + r.stderr)[-200:]
    os.rename(half, ROOT)
    return None


def make_root():
    """Returns why not, or None."""
    why = make_debian()
    if why:
        return why
    if os.path.exists(ROOT + "/var/lib/dpkg/info/prefilld.list"):
        run("chroot", ROOT, "dpkg", "-P", "prefilld")
    for path in ("/etc/systemd/system/prefilld.service.d", "/var/log/journal"):
        shutil.rmtree(ROOT + path, ignore_errors=True)
    r = run("make", "-C", BUILDDIR, "install", f"DESTDIR={ROOT}")
    if r.returncode != 0:
        return "make install failed: " + r.stderr[-200:]
    os.makedirs(ROOT + "/var/lib/prefilld", exist_ok=True)
    shutil.copytree(MODEL, ROOT + "/var/lib/prefilld/demo", dirs_exist_ok=True)
    os.makedirs(os.path.dirname(ROOT + CONF), exist_ok=True)
    return None


def test_start(m):
    m("systemd-sysusers")
    m("systemd-tmpfiles", "--create")
    m.write(CONF, GOOD)
    m.write("/usr/local/etc/prefilld/keys", "alpha\n")
    m("systemctl", "daemon-reload")
    r = m("systemctl", "start", "prefilld.socket", "prefilld.service")
    check(r.returncode == 0 and m.show("ActiveState") == "active", "it starts", m.journal())
    check(until(lambda: m.show("StatusText") == "ready, 0 running, 0 waiting"),
          "its status is there", m.show("StatusText"))
    check(m.ask([1, 2, 3]) == 0, "TCP")
    check(m.ask([1], f"unix:/proc/{m.init}/root/run/prefilld/prefilld.sock") == 0,
          "the unix socket")
    with open(f"/proc/{m.host_pid()}/status", encoding="ascii") as f:
        status = f.read()
    check("CapEff:\t0000000000000000" in status and "NoNewPrivs:\t1" in status and
          "Seccomp:\t2" in status and "Uid:\t0\t" not in status,
          "it runs as nobody special, with a filter of system calls", status)


def test_restart(m):
    out = os.path.join(HOME, "load.json")
    load = subprocess.Popen(["nsenter", "-t", m.init, "-n", sys.executable, LOADGEN, "--rate", "10",
                             "--duration", "10", "--length", "uniform:1:200", "--json", out,
                             "--api-key-file", os.path.join(HOME, "key")],
                            stdout=subprocess.DEVNULL)
    n_restarts = 0
    while load.poll() is None:
        time.sleep(1.5)
        r = m("systemctl", "restart", "prefilld.service")
        n_restarts += r.returncode == 0
    with open(out, encoding="utf-8") as f:
        r = json.load(f)
    check(n_restarts >= 2 and r["errors"] == {} and r["ok"] == r["requests"] > 0,
          f"{n_restarts} restarts under load: {r['ok']} answered, none failed", r["errors"])


def test_watchdog(m):
    folder = ROOT + "/etc/systemd/system/prefilld.service.d"
    os.makedirs(folder, exist_ok=True)
    with open(folder + "/watchdog.conf", "w", encoding="ascii") as f:
        f.write("[Service]\nWatchdogSec=3\nRestartSec=1\n")
    m("systemctl", "daemon-reload")
    m("systemctl", "restart", "prefilld.service")
    time.sleep(5)
    check(m.show("NRestarts") == "0", "an idle daemon lives on under a watchdog of 3 s")
    before = m.show("MainPID")
    with Conn(f"unix:/proc/{m.init}/root/run/prefilld/prefilld.sock") as c:
        a = c.ask("POST", "/v1/debug/stall", {"seconds": 600}, ["Authorization: Bearer alpha"])
        check(a.status == 200, "its engine is made to stand still", a)
    check(until(lambda: m.show("ActiveState") == "active" and m.show("MainPID") != before, 60) and
          "Watchdog timeout" in m.journal(), "a stalled engine is killed, and a new one started",
          m.journal("-n", "20"))
    check(m.ask([1]) == 0, "which answers")
    os.unlink(folder + "/watchdog.conf")
    m("systemctl", "daemon-reload")


def test_drain(m):
    codes = []
    slow = threading.Thread(target=lambda: codes.append(m.ask([7] * 6000)))
    slow.start()
    check(until(lambda: "1 running" in m.show("StatusText"), 20), "a long request runs")
    r = m("systemctl", "stop", "prefilld.service")
    slow.join()
    check(codes == [0] and r.returncode == 0 and m.show("Result") == "success" and
          "event=drained" in m.journal("-n", "20"), "a stop lets it end", (codes, m.journal("-n", "20")))
    check(m.ask([1]) == 0 and m.show("ActiveState") == "active",
          "the next connection starts it again")


def test_crash(m):
    before = m.show("MainPID")
    m("systemctl", "kill", "-s", "SEGV", "--kill-who=main", "prefilld.service")
    check(until(lambda: m.show("MainPID") not in (before, "0") and
                m.show("ActiveState") == "active", 60), "after a crash there is a new one")
    check(m.ask([1]) == 0, "which answers")


def test_reload(m):
    m.write("/usr/local/etc/prefilld/keys", "beta\n")
    r = m("systemctl", "reload", "prefilld.service")
    check(r.returncode == 0 and until(lambda: m.show("ActiveState") == "active"), "reload",
          (r, m.journal("-n", "20")))
    # The signal is sent when systemctl returns, and heard a little later.
    check(until(lambda: m.ask([1]) == 1), "the old key is refused", m.journal("-n", "20"))
    m.write("/usr/local/etc/prefilld/keys", "alpha\n")
    m("systemctl", "reload", "prefilld.service")
    check(until(lambda: m.ask([1]) == 0), "and good again after another")


def test_bad_configuration(m):
    m("systemctl", "stop", "prefilld.socket", "prefilld.service")
    m.write(CONF, GOOD + "nonsense 1\n")
    r = m("systemctl", "start", "prefilld.service")
    time.sleep(5)
    check(r.returncode != 0 and m.show("ExecMainStatus") == "78" and m.show("NRestarts") == "0" and
          m.show("ActiveState") == "failed", "a bad configuration: 78, and no second try",
          m.journal("-n", "10"))
    last = m.journal("-n", "20", "-p", "err")
    check("nonsense" in last, "the reason stands in the journal as an error", last)
    m.write(CONF, GOOD)


def test_no_network(m):
    folder = ROOT + "/etc/systemd/system/prefilld.service.d"
    os.makedirs(folder, exist_ok=True)
    for name in ("cpu.conf", "cpu-private-network.conf"):
        shutil.copy(ROOT + "/usr/local/share/doc/prefilld/" + name, folder)
    m("systemctl", "daemon-reload")
    r = m("systemctl", "start", "prefilld.service")
    check(r.returncode == 0, "it starts with both drop-ins", m.journal("-n", "20"))
    check(os.readlink(f"/proc/{m.host_pid()}/ns/net") != os.readlink(f"/proc/{m.init}/ns/net"),
          "without the network")
    check(m.ask([1, 2]) == 0, "and answers over TCP all the same")
    check(m.ask([1], f"unix:/proc/{m.init}/root/run/prefilld/prefilld.sock") == 0,
          "and over the unix socket")
    r = m("systemd-analyze", "security", "--no-pager", "prefilld.service")
    score = float(r.stdout.split("Overall exposure level for prefilld.service:")[1].split()[0])
    check(score <= 0.8, f"its exposure as it runs: {score}")


def test_package(m, deb):
    """Installed with dpkg alone: the clients' Python is not in this small Debian."""
    m("systemctl", "stop", "prefilld.socket", "prefilld.service")
    r = run("make", "-C", BUILDDIR, "uninstall", f"DESTDIR={ROOT}")
    shutil.rmtree(ROOT + "/etc/systemd/system/prefilld.service.d")
    shutil.copy(deb, ROOT + "/tmp/prefilld.deb")
    m("systemctl", "daemon-reload")
    r = m("dpkg", "--force-depends", "-i", "/tmp/prefilld.deb")
    check(r.returncode == 0 and m.show("ActiveState") == "inactive" and
          m.show("UnitFileState") == "disabled", "the package is installed, and starts nothing", r)
    r = m("systemctl", "start", "prefilld.service")
    check(r.returncode != 0 and m.show("ExecMainStatus") == "78",
          "without a model in its configuration it does not start", m.journal("-n", "10"))
    conf = "/etc/prefilld/prefilld.conf"
    with open(ROOT + conf, encoding="utf-8") as f:
        sample = f.read()
    model = re.sub(r"^#?model .*$", "model /var/lib/prefilld/demo", sample, flags=re.M)
    m.write(conf, model + "state-slots 16\nkv-tokens 40960\n")
    m("systemctl", "reset-failed")
    r = m("systemctl", "start", "prefilld.socket", "prefilld.service")
    check(r.returncode == 0 and model != sample and m.ask([1, 2]) == 0, "with one it answers",
          m.journal("-n", "20"))
    pid, bound = m.show("MainPID"), m.show("ActiveEnterTimestampMonotonic", "prefilld.socket")
    r = m("dpkg", "--force-depends", "-i", "/tmp/prefilld.deb")
    check(r.returncode == 0 and m.show("MainPID") != pid and m.ask([1]) == 0 and
          m.show("ActiveEnterTimestampMonotonic", "prefilld.socket") == bound,
          "an upgrade restarts it, and keeps the socket", (r, m.journal("-n", "20")))
    with open(ROOT + conf, encoding="utf-8") as f:
        check("/var/lib/prefilld/demo" in f.read(), "with the configuration as it was")
    r = m("dpkg", "-r", "prefilld")
    check(r.returncode == 0 and m.show("ActiveState") == "inactive" and
          m.show("ActiveState", "prefilld.socket") == "inactive" and os.path.exists(ROOT + conf),
          "removed, it has stopped", r)
    r = m("dpkg", "-P", "prefilld")
    left = m("find", "/etc", "/usr", "/lib/systemd", "-name", "*prefill*", "!", "-path",
             "/usr/local/*").stdout
    check(r.returncode == 0 and left == "", "purged, nothing is left", left)


def main():
    if sys.argv[1:] == ["--prepare"]:
        print(make_debian() or "ready")
        return
    why = make_root()
    m = None
    if not why:
        try:
            m = Machine(find_cgroups())
            if not m.start():
                why = "systemd does not start in namespaces here, see build/pid1/console.log"
        except OSError as error:
            why = f"no cgroups to give it: {error}"
    if why:
        skip("a real systemd as PID 1", why)
        if m:
            m.close()
        done()
    try:
        for test in (test_start, test_restart, test_watchdog, test_drain, test_crash, test_reload,
                     test_bad_configuration, test_no_network):
            m("systemctl", "reset-failed")  # starts count, and past StartLimitBurst= there is no more
            test(m)
        if "PID1_DEB" in os.environ:
            test_package(m, os.environ["PID1_DEB"])
        else:
            skip("the Debian package", "none was built (PID1_DEB)")
    finally:
        m.close()
    done()


if __name__ == "__main__":
    main()
