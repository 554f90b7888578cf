#!/usr/bin/env python3
"""The live page in a real browser (headless Chromium, through its debugging port) while requests
run: what it shows is read back, and compared with what was asked. With PAGE_PNG=FOLDER pictures
are left there. TAP."""

import base64
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import tempfile
import threading
import urllib.request

from e2e import Daemon, check, done, until


class Browser:
    """One tab. A WebSocket of our own: text frames, and none that is cut in parts."""

    def __init__(self, folder):
        self.process = subprocess.Popen(
            ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
             "--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank"],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        port = None
        for line in self.process.stderr:
            found = re.search(r"ws://127\.0\.0\.1:(\d+)/", line)
            if found:
                port = int(found.group(1))
                break
        threading.Thread(target=self.process.stderr.read, daemon=True).start()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json") as a:
            page = [t for t in json.load(a) if t["type"] == "page"][0]
        path = page["webSocketDebuggerUrl"].split(f":{port}", 1)[1]
        self.sock = socket.create_connection(("127.0.0.1", port), 30)
        self.sock.sendall((f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUpgrade: websocket\r\n"
                           "Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
                           "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n").encode())
        self.data = b""
        while b"\r\n\r\n" not in self.data:
            self.data += self.sock.recv(1 << 16)
        self.data = self.data.split(b"\r\n\r\n", 1)[1]
        self.number = 0

    def bytes(self, n):
        while len(self.data) < n:
            self.data += self.sock.recv(1 << 16)
        taken, self.data = self.data[:n], self.data[n:]
        return taken

    def call(self, method, **params):
        self.number += 1
        text = json.dumps({"id": self.number, "method": method, "params": params}).encode()
        size = (bytes([0x80 | len(text)]) if len(text) < 126 else
                struct.pack(">BH", 0xfe, len(text)))
        self.sock.sendall(b"\x81" + size + b"\0\0\0\0" + text)
        while True:
            n = self.bytes(2)[1] & 127
            if n > 125:
                n = struct.unpack(">H" if n == 126 else ">Q", self.bytes(2 if n == 126 else 8))[0]
            answer = json.loads(self.bytes(n))
            if answer.get("id") == self.number:
                return answer["result"]

    def value(self, expression):
        return self.call("Runtime.evaluate", expression=expression,
                         returnByValue=True)["result"].get("value")

    def picture(self, name, width, height, dark=False):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=1, mobile=width < 600)
        self.call("Emulation.setEmulatedMedia", features=[
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])
        wide = self.value("document.documentElement.scrollWidth")
        if "PAGE_PNG" in os.environ:
            png = base64.b64decode(self.call("Page.captureScreenshot")["data"])
            with open(os.path.join(os.environ["PAGE_PNG"], name + ".png"), "wb") as f:
                f.write(png)
        return wide

    def close(self):
        self.process.terminate()
        self.process.wait()


def test_page(d, b):
    b.call("Runtime.enable")
    b.call("Page.navigate", url=f"http://{d.address}/")
    check(until(lambda: b.value("document.querySelector('#state')?.textContent") ==
                "live, no step yet"), "it is connected before the first step",
          b.value("document.body.innerText"))
    d.prefill(prompt=[1] * 130, request_id="first")
    check(until(lambda: b.value("document.querySelectorAll('.step').length") == 3),
          "130 tokens in steps of 64 are three bars", b.value("document.body.innerText"))
    title = b.value("document.querySelector('.bar i').title")
    check(re.fullmatch(r"first: tokens 128 to 129, the end, [\d.,]+ (\u00b5s|ms|s) after it came", title),
          "the newest is on top, and tells its numbers", title)
    check(b.value("document.querySelectorAll('#map i').length") == 1, "its chunk map has one chunk")
    b.value("document.querySelectorAll('.step')[2].click()")
    check(b.value("document.querySelector('#mapof').textContent").startswith("of step #1: 1 in 1"),
          "a click shows another step's", b.value("document.querySelector('#mapof').textContent"))
    numbers = b.value("document.querySelector('#numbers').textContent")
    check("waiting longest" in numbers and "latency, half below" in numbers,
          "and how long requests wait and take", numbers)
    check("16 free" in b.value("document.querySelector('#slotsof').textContent"),
          "the pools are told")
    b.value("document.querySelector('#pause').click()")
    d.prefill(prompt=[2] * 10)
    check(b.value("document.querySelectorAll('.step').length") == 3, "paused, nothing moves")
    b.value("document.querySelector('#pause').click()")
    threads = [threading.Thread(target=lambda n=n: [
        d.prefill(prompt=[n + 1] * (37 * (n + 1)), request_id=f"r{n}") for _ in range(6)])
        for n in range(8)]
    for t in threads:
        t.start()
    check(until(lambda: b.value("new Set([...document.querySelectorAll('.bar i')].map("
                                "i => i.style.background)).size") >= 6),
          "requests that run together have colours of their own")
    check(b.picture("light", 1000, 1300) <= 1000, "it fits a desk's width")
    check(b.picture("phone", 390, 1300, dark=True) <= 390, "and a phone's")
    colours = []
    for scheme in ("dark", "light"):
        b.call("Emulation.setEmulatedMedia",
               features=[{"name": "prefers-color-scheme", "value": scheme}])
        colours.append(b.value("getComputedStyle(document.body).backgroundColor"))
    check(colours[0] != colours[1], "dark and light differ", colours)
    for t in threads:
        t.join()
    d.signal(9)
    check(until(lambda: "no connection" in b.value("document.querySelector('#state').textContent")),
          "it says when the daemon has gone")


def main():
    if not shutil.which("chromium"):
        print("ok 1 - the live page # SKIP chromium is not installed (Debian package chromium)")
        print("1..1")
        return
    # Chromium's children may still write there when it has ended.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, \
            Daemon("--max-step-tokens", 64) as d:
        b = Browser(folder)
        try:
            test_page(d, b)
        finally:
            b.close()
    done()


main()
