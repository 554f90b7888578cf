#!/usr/bin/env python3
"""clients/prefill against a server that answers what the test says. TAP."""

import http.server
import json
import os
import signal
import socket
import socketserver
import subprocess
import sys
import tempfile
import threading
import time

from e2e import SRCDIR, check, done, on_terminal

CLIENT = os.path.join(SRCDIR, "clients", "prefill")


ANSWER = {
    "id": "pf-1", "object": "prefill", "created": 1, "model": "demo",
    "usage": {"prompt_tokens": 4, "cached_tokens": 0, "total_tokens": 4},
    "next": {"id": 17, "token": " the", "logprob": -0.5,
             "top": [{"id": 17, "token": " the", "logprob": -0.5},
                     {"id": 3, "token": "\ufffd", "bytes": [0xe4], "logprob": -2.0},
                     {"id": 900, "token": "", "logprob": -3.0},
                     {"id": 5, "token": "\n\u0000\u2028", "logprob": -4.0}]},
    "prompt_logprobs": [None, -1.0, -2.0, -3.0],
    "timings": {"queue_ms": 0.25, "prefill_ms": 12.5, "total_ms": 13, "tokens_per_s": 320.4},
    "pieces": [{"step": 17, "start": 0, "tokens": 4}]}


class Handler(http.server.BaseHTTPRequestHandler):
    status, answer, headers_out, seen, auth = 200, ANSWER, {}, None, None
    reads_body, delay_s, words, steps = True, 0, {}, None

    def do_GET(self):
        """/v1/steps of a request that is half computed."""
        self.send_response(200 if Handler.steps else 404)
        self.end_headers()
        if Handler.steps:
            piece = {"id": Handler.seen["request_id"][:39], "start": 64, "tokens": 64}
            others = {"id": "another", "start": 0, "tokens": 9000}
            self.wfile.write(b": hello\n\ndata: %b\n\n" %
                             json.dumps({"pieces": [piece, others]}).encode())
            self.wfile.flush()
            time.sleep(Handler.delay_s)

    def do_POST(self):
        if Handler.reads_body:
            length = int(self.headers["Content-Length"])
            body = json.loads(self.rfile.read(length))
            if self.path == "/detokenize":
                self.send_response(200 if Handler.words else 404)
                self.end_headers()
                text = "".join(Handler.words.get(i, "") for i in body["tokens"])
                self.wfile.write(json.dumps({"prompt": text}).encode())
                return
            Handler.seen = body
            time.sleep(Handler.delay_s)
        Handler.auth, Handler.path_seen = self.headers["Authorization"], self.path
        body = Handler.answer
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(Handler.status)
        for name, value in Handler.headers_out.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        if not Handler.reads_body:
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_WR)
            while self.connection.recv(1 << 16):
                pass

    def log_message(self, *_):
        pass

    def address_string(self):
        return ""


class UnixServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


def run_settings(settings):
    Handler.status, Handler.answer, Handler.headers_out = 200, ANSWER, {}
    Handler.seen, Handler.reads_body = None, True
    Handler.delay_s, Handler.words, Handler.steps = 0, {}, None
    for name, value in settings.items():
        setattr(Handler, name, value)


def run(url, *args, stdin=b"", **settings):
    run_settings(settings)
    return subprocess.run([sys.executable, CLIENT, "--url", url, *args], input=stdin,
                          capture_output=True, timeout=30)


def run_shell(url, tail, *args, **settings):
    """The client with redirections, as a shell makes them."""
    run_settings(settings)
    return subprocess.run(["sh", "-c", f'exec "$@" {tail}', "sh", sys.executable, CLIENT, "--url",
                           url, *args], capture_output=True, timeout=30)


def error(message, code, **more):
    return {"error": {"message": message, "type": "x", "param": None, "code": code}, **more}


def check_answers(url):
    r = run(url, "--text", "In the beginning")
    out = r.stdout.decode()
    check(r.returncode == 0 and r.stderr == b"", "an answer is status 0", r)
    check(Handler.seen == {"prompt": "In the beginning", "logprobs": "all", "top_logprobs": 5},
          "the body says what is asked", Handler.seen)
    check("perplexity 7.4 over 3 tokens (2.000 nats" in out, "perplexity is exp of the mean", out)
    check("demo: 4 tokens, 320 tokens/s" in out, "the rate is shown", out)
    check(" 60.7%   17  \" the\"" in out, "a candidate has its probability, id and text", out)
    check("\"\\xe4\"" in out, "bytes that are no text are shown as bytes", out)
    check("900  (no text)" in out, "an id without a token is shown as such", out)
    check("\"\\n\\u0000\\u2028\"" in out, "control characters are escaped", out)
    check("ran in 1 piece\n  step 17: 4 tokens, 0 to 3\n" in out, "pieces are shown", out)

    r = run(url, "--text", "x", "--json")
    check(r.returncode == 0 and json.loads(r.stdout) == ANSWER, "--json is the answer", r)

    many = dict(ANSWER, pieces=[{"step": i, "start": 64 * i, "tokens": 64} for i in range(40)])
    out = run(url, "--text", "x", answer=many).stdout.decode()
    check("ran in 40 pieces" in out and "... 32 more" in out and "step 39: " in out
          and out.count("  step ") == 8, "many pieces are cut short", out)
    bare = {k: v for k, v in ANSWER.items() if k not in ("next", "prompt_logprobs")}
    r = run(url, "--text", "x", "--logprobs", "none", answer=bare)
    check(r.returncode == 0 and b"next" not in r.stdout and Handler.seen["logprobs"] == "none",
          "without logprobs there is still an answer", r)
    r = run(url, "--text", "x", answer=dict(ANSWER, prompt_logprobs=[None]))
    check(b"needs a prompt of two" in r.stdout, "one token has no perplexity", r)
    r = run(url, "--text", "x", answer=dict(ANSWER, prompt_logprobs=[None, None]))
    check(b"no number" in r.stdout, "a null logprob is no number", r)
    r = run(url, "--text", "x", headers_out={"X-Prefilld-Ignored": "foo"})
    check(b"ignored foo" in r.stderr and r.returncode == 0, "an ignored field is named", r)


def run_tty(url, *args, environment=(), **settings):
    run_settings(settings)
    return on_terminal(sys.executable, CLIENT, "--url", url, *args, environment=environment)


def check_all(url):
    answer = dict(ANSWER, prompt_token_ids=[5, 6, 7, 8, 9, 5],
                  prompt_logprobs=[None, -1.0, -2.0, -4.0, -4.5, -10.0],
                  prompt_top=[None, [{"id": 6, "logprob": -1.0}], [{"id": 4, "logprob": -0.25}],
                              [], [], []])
    # Two tokens that are a character together only.
    words = {4: " four", 5: "a\n\x1b", 6: " b", 7: " c", 8: "\ufffd", 9: "\ufffd"}
    r = run(url, "--text", "x", "--all", answer=answer, words=words)
    rows = r.stdout.decode().split("most probable\n")[1].split("\nperplexity")[0].split("\n")
    check(Handler.seen["return_token_ids"] is True and len(rows) == 6, "--all: a row each", r)
    check(rows[0].split() == ["0", "5", '"a\\n\\u001b"'] and
          rows[1].split() == ["1", "6", "36.8%", "1.4", "#", '"', 'b"'], "the first has none", rows)
    check(rows[2].split() == ["2", "7", "13.5%", "2.9", "###", '"', 'c"', "not", '"', 'four"',
                              "77.9%"], "what was expected instead", rows[2])
    r = run(url, "--text", "x", "--all", answer=answer)
    check(r.returncode == 0 and b"(no text)" in r.stdout, "without /detokenize: ids alone", r)
    r = run(url, "--text", "x", "--all", answer=ANSWER)
    check(r.returncode == 3 and b"not as prefilld" in r.stderr, "an answer without ids", r)
    r = run(url, "--text", "x", "--all", "--logprobs", "next")
    check(r.returncode == 2 and b"--all" in r.stderr, "--all needs the logprobs", r)

    def on(n, text):
        return f"\033[38;5;16;48;5;{n}m{text}\033[0m"
    status, seen = run_tty(url, "--text", "x", "--all", answer=answer, words=words)
    check(status == 0 and seen.split("\n", 1)[1].startswith(
        "a\n\\u001b b" + on(229, " c") + on(209, "\ufffd\ufffd") + on(203, "a\\n") + "\n" +
        on(203, "\\u001b") + "\n\nsurprise"), "on a terminal: the text, coloured", repr(seen))
    status, seen = run_tty(url, "--text", "x", "--all", answer=answer, words=words,
                           environment={"NO_COLOR": "1"})
    check(status == 0 and "\033[38" not in seen and " 13.5%" in seen, "NO_COLOR: no colour",
          repr(seen))


def check_progress(url):
    status, seen = run_tty(url, "--text", "x", delay_s=2, steps=True)
    check(status == 0 and "\r\033[K128 tokens computed, " in seen and "\r\033[Kdemo: 4 tokens" in seen,
          "a long wait has a line, which tells how far it is, and goes in the end", repr(seen))
    status, seen = run_tty(url, "--ids", "1,2", "--request-id", "x" * 128, delay_s=2, steps=True)
    check("128 of 2 tokens computed" in seen and Handler.seen["request_id"] == "x" * 128,
          "also by an id of one's own", repr(seen))
    status, seen = run_tty(url, "--text", "x", delay_s=2, status=503, answer=error("why", 503))
    check(status == 4 and "\r\033[Kwaiting, 1 s" in seen and
          "\r\033[Kprefill: the server could not" in seen, "without steps: the time", repr(seen))
    status, seen = run_tty(url, "--text", "x")
    check("\r" not in seen, "a short one has none", repr(seen))
    r = run(url, "--text", "x", delay_s=2)
    check(r.stderr == b"" and "request_id" not in Handler.seen, "nor what is no terminal", r)


def check_prompts(url):
    run(url, "--ids", "17, 4,256", "--top", "3", "--priority", "-2", "--deadline-ms", "50",
        "--request-id", "a", "--model", "demo")
    check(Handler.seen == {"prompt": [17, 4, 256], "logprobs": "all", "top_logprobs": 3,
                           "priority": -2, "deadline_ms": 50, "request_id": "a",
                           "model": "demo"}, "ids and every option travel", Handler.seen)
    text = "caf\u00e9 \u2603\r\n\u0000 end\n"
    run(url, stdin=text.encode())
    check(Handler.seen["prompt"] == text, "standard input is the prompt, as it is", Handler.seen)
    with tempfile.NamedTemporaryFile() as file:
        file.write(text.encode())
        file.flush()
        run(url, "--file", file.name)
        check(Handler.seen["prompt"] == text, "--file is the prompt, as it is", Handler.seen)
        file.seek(0)
        file.write(b"\xff")
        file.flush()
        r = run(url, "--file", file.name)
        check(r.returncode == 2 and b"not UTF-8 text (byte 0)" in r.stderr, "bytes are refused", r)
    for args, part in [(["--text", ""], b"is empty"), (["--ids", "1,x"], b"--ids"),
                       (["--file", "/nonexistent"], b"No such file"),
                       (["--text", "a", "--ids", "1"], b"not allowed"),
                       (["--url", "ftp://x", "--text", "a"], b"give http"),
                       (["--url", "http://h:x", "--text", "a"], b"--url"),
                       (["--url", "unix:", "--text", "a"], b"unix:PATH"),
                       (["--url", "http://a..b:80", "--text", "a"], b"no address"),
                       (["--url", f"http://{70 * 'a'}:80", "--text", "a"], b"no address"),
                       (["--url", "http://127.0.0.1:1/a b", "--text", "a"], b"no address"),
                       (["--url", "http://127.0.0.1:1/\u00e9", "--text", "a"], b"no address"),
                       (["--timeout", "0", "--text", "a"], b"more than 0"),
                       (["--timeout", "-1", "--text", "a"], b"more than 0"),
                       (["--timeout", "nan", "--text", "a"], b"more than 0"),
                       (["--timeout", "1e20", "--text", "a"], b"at most"),
                       (["--api-key-file", "/dev/null", "--text", "a"], b"first line"),
                       (["--api-key-file", "", "--text", "a"], b"No such file")]:
        r = run(url, *args)
        check(r.returncode == 2 and part in r.stderr and b"Traceback" not in r.stderr,
              f"status 2: {ascii(' '.join(args))}", r)
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"sesame\nother\n")
        file.flush()
        with open(file.name + ".bad", "wb") as bad:
            bad.write(b"ses\x01ame\n")
        r = run(url, "--text", "a", "--api-key-file", bad.name)
        os.remove(bad.name)
        check(r.returncode == 2 and b"printable" in r.stderr, "a key with a control character", r)
        run(url + "/base/", "--text", "a", "--api-key-file", file.name)
        check(Handler.auth == "Bearer sesame", "the key is the first line", Handler.auth)
        check(Handler.path_seen == "/base/v1/prefill", "a path before /v1 is kept",
              Handler.path_seen)


def check_errors(url):
    for status, code, parts in [(400, 1, [b"(400)", b"why"]), (404, 1, [b"(404)"]),
                                (401, 1, [b"--api-key-file"]), (429, 4, [b"again in 7 s"]),
                                (503, 4, [b"again in 7 s", b"why"]), (504, 4, [b"(504)"]),
                                (500, 4, [b"(500)"])]:
        r = run(url, "--text", "a", status=status, answer=error("why", status),
                headers_out={"Retry-After": "7"} if status in (429, 503) else {})
        check(r.returncode == code and all(p in r.stderr for p in parts) and not r.stdout,
              f"status {status} is exit {code}", r)
    r = run(url, "--text", "a", status=404, answer=b"<html>")
    check(r.returncode == 3 and b"not as prefilld" in r.stderr, "another server: 404", r)
    r = run(url, "--text", "a", answer=b"hello")
    check(r.returncode == 3 and b"not prefilld" in r.stderr, "another server: 200", r)
    r = run(url, stdin=b"a" * (8 << 20), status=413, answer=error("too large", 413),
            reads_body=False)
    check(r.returncode == 1 and b"too large" in r.stderr, "an early refusal is read", r)


def check_answers_of_others(url):
    top = dict(ANSWER["next"], top=[{"id": 1, "token": " x", "logprob": 800.0}])
    odd = [{"object": "prefill"}, dict(ANSWER, next={"id": 17}), dict(ANSWER, usage=7),
           dict(ANSWER, pieces=[{}]), dict(ANSWER, pieces="x"), dict(ANSWER, next=[]),
           dict(ANSWER, prompt_logprobs=[None, "a"]), dict(ANSWER, next=top),
           dict(ANSWER, timings={"tokens_per_s": "fast"})]
    for answer in odd:
        r = run(url, "--text", "a", answer=answer)
        check(r.returncode == 3 and not r.stdout and b"not as prefilld" in r.stderr
              and b"Traceback" not in r.stderr, f"exit 3: {str(answer)[:60]}", r)
    for body in (b"[" * 100000, b'{"object":' * 100000):
        r = run(url, "--text", "a", answer=body)
        check(r.returncode == 3 and b"Traceback" not in r.stderr, "exit 3: a deep answer", r)
    r = run(url, "--text", "a", "--json", answer=odd[0])
    check(r.returncode == 0 and json.loads(r.stdout) == odd[0], "--json shows it as it came", r)


def check_streams(url):
    for tail, args, code, part in [
            ("<&-", [], 2, b"no prompt"), ("< /proc/self/mem", [], 2, b"standard input"),
            (">&-", ["--text", "a"], 2, b"standard output is closed"),
            ("> /dev/full", ["--text", "a"], 2, b"No space left"),
            ("> /dev/full", ["--text", "a", "--json"], 2, b"No space left")]:
        r = run_shell(url, tail, *args)
        check(r.returncode == code and part in r.stderr and b"Traceback" not in r.stderr
              and b"Exception" not in r.stderr, f"exit {code}: {tail} {' '.join(args)}", r)
    reader, writer = os.pipe()
    os.close(reader)
    run_settings({})
    r = subprocess.run([sys.executable, CLIENT, "--url", url, "--text", "a"], stdout=writer,
                       stderr=subprocess.PIPE, timeout=30)
    os.close(writer)
    check(r.returncode == 0 and r.stderr == b"", "a reader that went away is no failure", r)
    for tail in ("2>&-", "2> /dev/full"):
        r = run_shell(url, tail, "--text", "a", status=503, answer=error("why", 503))
        check(r.returncode == 4 and r.stdout == b"", f"the exit status holds: {tail}", r)


def check_interrupt():
    with socket.socket() as idle:
        idle.bind(("127.0.0.1", 0))
        idle.listen()
        client = subprocess.Popen([sys.executable, CLIENT, "--text", "a", "--url",
                                   f"http://127.0.0.1:{idle.getsockname()[1]}"],
                                  stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                  preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
        with idle.accept()[0] as waiting:
            waiting.recv(1)
            client.send_signal(signal.SIGINT)
            out = client.communicate(timeout=30)
        check(client.returncode == -signal.SIGINT and out == (b"", b""),
              "an interrupt ends it, without a word", (client.returncode, out))


def check_connections(url):
    with socket.socket() as idle:
        idle.bind(("127.0.0.1", 0))
        closed = f"http://127.0.0.1:{idle.getsockname()[1]}"
        r = run(closed, "--text", "a")
        check(r.returncode == 3 and b"nothing listens" in r.stderr, "no server: exit 3", r)
        idle.listen()
        r = run(closed, "--text", "a", "--timeout", "0.2")
        check(r.returncode == 3 and b"no answer" in r.stderr, "a silent server: exit 3", r)
    r = run(url.removeprefix("http://"), "--text", "a")
    check(r.returncode == 0, "ADDR:PORT is an address too", r)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "p.sock")
        r = run("unix:" + path, "--text", "a")
        check(r.returncode == 3 and b"nothing listens" in r.stderr, "no socket: exit 3", r)
        server = UnixServer(path, Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for form in ("unix:", "unix://"):
            r = run(form + path, "--text", "a")
            check(r.returncode == 0 and b"perplexity" in r.stdout, f"{form}PATH works", r)
        server.shutdown()


def main():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    check_answers(url)
    check_all(url)
    check_progress(url)
    check_prompts(url)
    check_errors(url)
    check_answers_of_others(url)
    check_streams(url)
    check_interrupt()
    check_connections(url)
    done()


if __name__ == "__main__":
    main()
