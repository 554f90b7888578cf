#!/usr/bin/env python3
"""A GPU driver that is installed and fails, or is too old: the daemon says so and does not start, by
`backend cuda` as by `backend auto`, which never takes the CPU instead. The driver is tests/fake_driver.c.
TAP."""

import os
import shutil
import subprocess
import sys
import tempfile

from e2e import MODEL, PREFILLD, SRCDIR, check, done, skip

EXIT_CONFIG = 78


def start(backend, environment=None):
    return subprocess.run([PREFILLD, "--model", MODEL, "--backend", backend, "--check"],
                          capture_output=True, text=True, env=environment, timeout=60, check=False)


def main():
    compiler = shutil.which(os.environ.get("CC", "cc"))
    plain = start("cuda")
    if "--with-cuda" in plain.stderr or not compiler:
        skip("drivers that fail", "this build has no CUDA" if compiler else "no C compiler")
        done()
    if "no NVIDIA driver" not in plain.stderr:
        skip("drivers that fail", "a real one is installed")
        done()
    check(plain.returncode == EXIT_CONFIG, "without a driver `backend cuda` refuses", plain)
    check(start("auto").returncode == 0, "and `backend auto` takes the CPU")
    with tempfile.TemporaryDirectory() as folder:
        library = os.path.join(folder, "libcuda.so.1")
        subprocess.run([compiler, "-shared", "-fPIC", "-o", library,
                        os.path.join(SRCDIR, "tests", "fake_driver.c")], check=True)
        for version, error, words in (
                (13000, 100, "gives no device (no CUDA-capable device is detected)"),
                (13000, 803, "gives no device (system has unsupported display driver"),
                (12040, 999, "the driver is for CUDA 12.4, this build needs 13.0 or newer")):
            environment = dict(os.environ, LD_LIBRARY_PATH=folder,
                               FAKE_DRIVER_VERSION=str(version), FAKE_DRIVER_ERROR=str(error))
            for backend in ("cuda", "auto"):
                r = start(backend, environment)
                check(r.returncode == EXIT_CONFIG and words in r.stderr and
                      "backend cpu" in r.stderr, f"{backend}: {words}", r)
    done()


if __name__ == "__main__":
    sys.exit(main())
