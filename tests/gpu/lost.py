#!/usr/bin/env python3
"""A device that is lost under the running daemon: requests of the step get 503 that says so, /health
fails, and the process ends with its own exit status. The fault is real: tests/gpu/faulty_lt.c, built as
libcublasLt.so.13 and found before the library itself, writes a product to an address that no device has.
TAP. Argument: the folder that holds it."""

import glob
import os
import sys
import tempfile

sys.path.insert(0, os.path.join(os.environ.get("SRCDIR", "."), "tests"))
from e2e import Conn, Daemon, check, done, request  # noqa: E402

EXIT_DEVICE_LOST = 70


def main():
    folder = os.path.abspath(sys.argv[1])
    real = [p for d in ("/usr/local/cuda/lib64", "/usr/lib/x86_64-linux-gnu")
            for p in glob.glob(os.path.join(d, "libcublasLt.so.13"))]
    trigger = tempfile.mktemp()
    environment = dict(os.environ, FAULTY_LT_REAL=real[0], FAULTY_LT_WHEN=trigger)
    environment["LD_LIBRARY_PATH"] = folder + ":" + os.environ.get("LD_LIBRARY_PATH", "")
    # Twice: the products are launched one by one, and recorded.
    for warm_ups in (1, 8):
        with Daemon("--backend", "cuda", "--state-slots", 4, "--kv-tokens", 4096,
                    environment=environment) as d:
            fields = {"prompt": list(range(100)), "logprobs": "next"}
            good = [d.prefill(**fields).status for _ in range(warm_ups)]
            check(good == [200] * warm_ups, f"{warm_ups} good steps before", good)
            with open(trigger, "wb"):
                pass
            with Conn(d.address) as first, Conn(d.address) as second:
                data = request("POST", "/v1/prefill", fields)
                first.send(data)
                second.send(data)
                answers = [c.read() for c in (first, second)]
            told = [a.status == 503 and "device lost" in a.error()["message"]
                    for a in answers if a]
            # The other one may come when the door is closed.
            check(told and all(told), "requests in flight hear 503, device lost", answers)
            status = d.wait(30)
            check(status == EXIT_DEVICE_LOST, f"exit status {EXIT_DEVICE_LOST}", status)
            check("device" in d.log_text(), "the log says why", d.log_text())
            print("# " + "# ".join(s for s in d.log if "level=error" in s or "lost" in s).strip())
        os.unlink(trigger)
    done()


main()
