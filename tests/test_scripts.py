#!/usr/bin/env python3
"""clients/quickstart.sh and the start of tests/run.sh in a small tree whose tools are stand-ins:
what they do about an interrupted run, missing packages and a tree that they cannot use. TAP."""

import os
import shutil
import subprocess
import tempfile

from e2e import SRCDIR, check, done

# Each tool notes in `calls` that it ran. `packages` has those that are installed.
TOOLS = {
    "autoreconf": """
        echo '#!/bin/sh' >configure
        echo 'echo configure >>"$TREE/calls"; [ ! -f "$TREE/fail" ]' >>configure
        chmod +x configure
        [ ! -f "$TREE/cut" ] || exit 1
        echo .NOEXPORT: >Makefile.in""",
    "make": 'cp -p bin/daemon build/quickstart/prefilld; mkdir -p "$2"',
    "daemon": """
        trap 'exit 0' TERM
        echo 'ready listen=127.0.0.1:1 model=demo' >&2
        while [ -d "$TREE" ] && sleep 0.05; do :; done""",
    "dpkg-query": 'for p; do :; done; grep -qx "$p" packages && printf installed',
    "dpkg": 'case $1 in --audit) cat audit 2>/dev/null ;; *) rm -f audit ;; esac; exit 0',
    # As the real one, it takes the default of a signal that was ignored. The interrupt comes while
    # it installs, to all who share the script's session.
    "apt-get": """
        [ ! -f audit ] || exit 1
        read -r pid name state parent group rest </proc/self/stat
        case " $* " in
        *' --download-only '* | *' update '*) echo "$group" >group ;;
        *) env --default-signal=INT sh -c '
               kill -s INT -- "-$(cat group)"
               sleep 0.2
               echo installed >>calls
               printf "%s\n" "$@" >>packages' sh "$@" ;;
        esac""",
    "id": "case $1 in -u) cat uid 2>/dev/null || echo 0 ;; *) echo someone ;; esac",
    "nproc": "echo 1",
}


class Tree:
    def __init__(self, folder):
        self.folder = folder
        for name in ("clients", "tests", "bin", "tests/models/demo"):
            os.makedirs(os.path.join(folder, name))
        for name in ("clients/quickstart.sh", "clients/packages.sh", "tests/run.sh"):
            shutil.copy(os.path.join(SRCDIR, name), os.path.join(folder, name))
        self.write("tests/models/demo/heldout.txt", "a\nAnd he told it to his father, and to his x\n")
        self.script("clients/prefill", 'echo "client $*"')
        for name, body in TOOLS.items():
            self.script(f"bin/{name}", f'cd "$TREE" && echo {name} "$@" >>calls\n{body}')
        packages = [line for line in self.read("tests/run.sh").split("'")
                    if "build-essential" in line or "mandoc" in line]
        self.write("packages", "\n".join(" ".join(packages).split() + ["curl", ""]))

    def write(self, name, text):
        with open(os.path.join(self.folder, name), "w", encoding="utf-8") as file:
            file.write(text)

    def script(self, name, body):
        self.write(name, f"#!/bin/sh\n{body}\n")
        os.chmod(os.path.join(self.folder, name), 0o755)

    def read(self, name):
        try:
            with open(os.path.join(self.folder, name), encoding="utf-8") as file:
                return file.read()
        except FileNotFoundError:
            return ""

    def remove(self, *names):
        for name in names:
            path = os.path.join(self.folder, name)
            if os.path.isdir(path):
                shutil.rmtree(path)
            elif os.path.exists(path):
                os.remove(path)

    def run(self, *command):
        """What it said; calls has the tools that ran."""
        self.write("calls", "")
        env = dict(os.environ, TREE=self.folder, LC_ALL="C",
                   PATH=os.path.join(self.folder, "bin") + ":" + os.environ["PATH"])
        done = subprocess.run(["sh", *command], cwd=self.folder, env=env, timeout=60, text=True,
                              stdin=subprocess.DEVNULL, capture_output=True,
                              start_new_session=True)
        self.calls = self.read("calls").split("\n")
        return done

    def quickstart(self, *args):
        return self.run("clients/quickstart.sh", *args)

    def ran(self, name):
        return any(line.split(" ")[0] == name for line in self.calls)


def check_interrupted(tree):
    r = tree.quickstart()
    check(r.returncode == 0 and "client --url http://127.0.0.1:1" in r.stdout
          and tree.ran("autoreconf") and tree.ran("configure"), "a fresh tree is built and asked", r)
    r = tree.quickstart()
    check(r.returncode == 0 and not tree.ran("autoreconf") and not tree.ran("configure"),
          "again, nothing is configured", tree.calls)

    for what, left in [("no Makefile.in", None), ("half a Makefile.in", "VPATH = @srcdir@\n")]:
        tree.remove("Makefile.in", "build")
        if left:
            tree.write("Makefile.in", left)
        r = tree.quickstart()
        check(r.returncode == 0 and tree.ran("autoreconf"), f"{what}: autoreconf runs again", r)
    tree.remove("Makefile.in", "build")
    tree.write("cut", "")
    r = tree.quickstart()
    tree.remove("cut")
    check(r.returncode == 1 and "the build failed" in r.stderr, "autoreconf that fails is said", r)
    check(tree.quickstart().returncode == 0, "and the next run does it again")

    tree.remove("build")
    tree.write("fail", "")
    tree.quickstart()
    tree.write("build/quickstart/Makefile", "")
    tree.remove("fail")
    r = tree.quickstart()
    check(r.returncode == 0 and tree.ran("configure"), "configure that was cut short is run again", r)


def check_kept(tree):
    first = tree.quickstart("--keep")
    pid = first.stdout.rsplit("kill ", 1)[-1].strip()
    check(pid.isdigit() and os.path.join(tree.folder, "clients/prefill") in first.stdout,
          "--keep says how to ask and how to stop it, with whole paths", first)
    logs = [name for name in os.listdir(os.path.join(tree.folder, "build/quickstart"))
            if name.startswith("prefilld-")]
    r = tree.quickstart()
    text = tree.read(f"build/quickstart/{logs[0]}") if logs else ""
    check(r.returncode == 0 and len(logs) == 1 and text.startswith("ready"),
          "another run leaves a kept daemon's log alone", (logs, text))
    if pid.isdigit():
        os.kill(int(pid), 15)
    for args in (["--keep", "foo"], ["foo"], ["--keep", "--keep"]):
        r = tree.quickstart(*args)
        check(r.returncode == 2 and r.stderr.startswith("usage:"), f"refused: {args}", r)


def check_packages(tree):
    installed = tree.read("packages")
    tree.write("packages", installed.replace("python3\n", ""))
    tree.write("audit", "half done\n")
    r = tree.quickstart()
    order = [line.split(" ")[0] for line in tree.calls]
    check(r.returncode == 130 and "python3" in tree.read("packages") and "installed" in order,
          "an interrupt waits until what is missing is installed", (r, tree.calls))
    check("dpkg --configure -a" in tree.calls and order.index("dpkg") < order.index("apt-get"),
          "what an interrupted dpkg left is mended first", tree.calls)

    tree.write("packages", installed.replace("python3\n", ""))
    tree.write("uid", "1000\n")
    tree.script("bin/sudo", "exit 1")
    r = tree.quickstart()
    check(r.returncode == 1 and r.stderr.count("apt-get install") == 1
          and "as root" in r.stderr, "not root: the advice stands once", r)
    r = tree.run("tests/run.sh")
    check(r.returncode == 1 and r.stdout.count("apt-get install") == 1
          and r.stdout.endswith("0 passed, 1 failed, 0 skipped\n") and not tree.ran("autoreconf"),
          "run.sh stops at packages that it needs", r)
    tree.remove("uid", "bin/sudo")
    tree.write("packages", installed)


def check_trees(tree):
    tree.write("config.status", "")
    for script in ("clients/quickstart.sh", "tests/run.sh"):
        r = tree.run(script)
        check(r.returncode == 1 and "distclean" in r.stdout + r.stderr and not tree.ran("make"),
              f"{script} says so when the tree is configured in place", r)
    tree.remove("config.status", "build")
    if os.getuid() == 0:
        check(True, "a tree that cannot be written # SKIP root can write everywhere")
        return
    os.chmod(tree.folder, 0o555)
    r = tree.quickstart()
    os.chmod(tree.folder, 0o755)
    check(r.returncode == 1 and "cannot write" in r.stderr, "a tree that cannot be written is named", r)


def main():
    with tempfile.TemporaryDirectory(prefix="prefilld scripts ") as folder:
        tree = Tree(folder)
        check_interrupted(tree)
        check_kept(tree)
        check_packages(tree)
        check_trees(tree)
    done()


if __name__ == "__main__":
    main()
