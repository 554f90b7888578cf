#!/usr/bin/env python3
"""The systemd units: whether systemd finds fault with them, and how exposed they are. TAP."""

import os
import re
import shutil
import subprocess
import tempfile

from e2e import BUILDDIR, SRCDIR, check, done, skip

# Scores of systemd-analyze security, and what is allowed at most.
EXPOSURES = [("the shipped unit", [], 1.5),
             ("with cpu.conf", ["cpu.conf"], 1.2),
             ("with cpu-private-network.conf as well",
              ["cpu.conf", "cpu-private-network.conf"], 0.8)]


def run(*command):
    return subprocess.run(command, capture_output=True, text=True, check=False)


def exposure(folder, unit, drop_ins):
    """The unit as it is with its drop-ins: one file, as later assignments win in either form."""
    path = os.path.join(folder, "prefilld.service")
    with open(path, "w", encoding="utf-8") as out:
        out.write(unit)
        for name in drop_ins:
            with open(os.path.join(SRCDIR, "systemd", name), encoding="utf-8") as file:
                out.write("\n" + file.read())
    r = run("systemd-analyze", "security", "--offline=true", "--no-pager", path)
    found = re.search(r"Overall exposure level for \S+: ([0-9.]+)", r.stdout)
    return float(found[1]) if found else None, r.stdout + r.stderr


def check_verify(folder, unit):
    """Paths of the installation stand for programs that are here."""
    program = os.path.abspath(os.path.join(BUILDDIR, "prefilld"))
    unit = re.sub(r"^(ExecStart(?:Pre)?=)\S+", lambda m: m[1] + program, unit, flags=re.M)
    with open(os.path.join(folder, "prefilld.service"), "w", encoding="utf-8") as out:
        out.write(unit)
    shutil.copy(os.path.join(SRCDIR, "systemd", "prefilld.socket"), folder)
    paths = [os.path.join(folder, name) for name in ("prefilld.service", "prefilld.socket")]
    for name in (None, "cpu.conf", "cpu-private-network.conf"):
        if name:
            os.makedirs(paths[0] + ".d", exist_ok=True)
            shutil.copy(os.path.join(SRCDIR, "systemd", name), paths[0] + ".d")
        r = run("systemd-analyze", "verify", "--man=no", *paths)
        # A key that it does not know is not an error to it; what a bare machine lacks is not ours.
        mine = [line for line in (r.stdout + r.stderr).splitlines() if "prefilld" in line]
        check(r.returncode == 0 and not mine,
              f"systemd-analyze verify{', with ' + name if name else ''}", r.stdout + r.stderr)


def main():
    with open(os.path.join(BUILDDIR, "systemd", "prefilld.service"), encoding="utf-8") as file:
        unit = file.read()
    check("@" not in re.sub(r"[=~]@[a-z-]+|[ ]@[a-z-]+", "", re.sub(r"#.*", "", unit)),
          "every path is filled in", unit)
    words = dict(re.findall(r"^(\w+)=(.*)$", unit, re.M))
    check(words["Type"] == "notify" and words["RestartPreventExitStatus"] == "78" and
          words["ExecStartPre"].endswith("--check") and "PrivateDevices" not in words,
          "it is what prefilld keeps to", words)
    if not shutil.which("systemd-analyze"):
        skip("systemd-analyze verify and security", "no systemd (Debian package systemd)")
        done()
    with tempfile.TemporaryDirectory() as folder:
        for what, drop_ins, most in EXPOSURES:
            score, text = exposure(folder, unit, drop_ins)
            if score is None:
                skip(f"exposure {what}", "this systemd-analyze has no security --offline")
                continue
            check(score <= most, f"exposure {what}: {score}, at most {most}", text)
        check_verify(folder, unit)
    done()


if __name__ == "__main__":
    main()
