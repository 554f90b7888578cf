#!/usr/bin/env python3
"""Every option that `prefilld --help` prints stands, with its default, in the README's table, in
the man pages and in the sample file; and they have none that it lacks. The README's example of
logprobs and its program give what it says. TAP."""

import json
import os
import re
import shutil
import subprocess
import sys

from e2e import PREFILLD, SRCDIR, Daemon, check, done, skip


def read(*path):
    with open(os.path.join(SRCDIR, *path), encoding="utf-8") as file:
        return file.read()


def help_options():
    """Two maps, name -> default or None: keys of the file, and options of the command line."""
    text = subprocess.run([PREFILLD, "--help"], capture_output=True, text=True, check=True).stdout
    keys, line_only = {}, {}
    into = None
    for row in re.split(r"\n(?=\S|  --)", text):
        match = re.match(r"  --([a-z0-9-]+)", row)
        if not match:
            into = line_only if row.startswith("Command line only") else keys
            continue
        words = " ".join(row.split())
        default = re.search(r"default:? ([^;)]+)\)", words)
        into[match[1]] = default[1] if default else None
    return keys, line_only


def readme_options():
    table = re.search(r"\| option \| default \|.*?\n\|[-| ]+\n((?:\|.*\n)+)", read("README.md"))
    rows = {}
    for line in table[1].splitlines() if table else []:
        name, default, *_ = [cell.strip() for cell in line.strip("|").split("|")]
        rows[name.strip("`")] = default.strip("`")
    return rows


def man_options(page, macro):
    """name -> the paragraph that describes it."""
    found = re.findall(rf"^\.It {macro}([a-z0-9-]+)(?: .*)?\n((?:(?!\.It|\.El).*\n)*)",
                       read("etc", page), re.M)
    return {name: " ".join(text.split()) for name, text in found}


def sample_options():
    """name -> its values: commented ones are defaults. Each has words above it."""
    values, problems = {}, []
    above = ""
    for line in read("etc", "prefilld.conf.in").splitlines():
        match = re.match(r"#?([a-z][a-z0-9-]*) (\S+)$", line)
        if match and not line.startswith("# "):
            values.setdefault(match[1], []).append(match[2])
            if not above:
                problems.append(f"{match[1]} has no comment above it")
        elif not line:
            above = ""
        else:
            above += line
    return values, problems


def compare(where, found, wanted):
    check(set(found) == set(wanted), f"{where} has each option and no other",
          f"missing {sorted(set(wanted) - set(found))}\nstale {sorted(set(found) - set(wanted))}")


def alike(a, b):
    """Equal, but for the last digits of logarithms, which another CPU computes otherwise."""
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b) < 1e-4
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(alike(a[k], b[k]) for k in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(alike, a, b))
    return a == b


def check_examples():
    readme = read("README.md")
    lines = re.findall(r'^ {4}("prompt_(?:token_ids|logprobs)": \[.*?\]|"prompt_top": \[.*?\]\]),',
                       readme, re.M | re.S)
    said = json.loads("{" + ",".join(lines) + "}")
    program = re.search(r"```python\n(.*?)```\n\nIt prints ([\d.]+) and ([\d.]+) and `(.*?)`",
                        readme, re.S)
    with Daemon() as daemon:
        answer = daemon.prefill(prompt="In the beginning", logprobs="all", top_logprobs=2,
                                return_token_ids=True).json()
        got = {name: answer[name] for name in said}
        check(len(said) == 3 and alike(said, got), "README.md's logprobs are the daemon's",
              f"{said}\n{got}")
        text = program[1].replace("127.0.0.1:8080", daemon.address)
        ran = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
        printed = [line.split()[0] for line in ran.stdout.splitlines()]
        check(text != program[1] and len(printed) == 3 and printed[2] == program[4].strip()
              and all(abs(float(printed[i]) / float(program[i + 2]) - 1) < 1e-3 for i in (0, 1)),
              "README.md's program prints what is said", ran)
        daemon.stop()


def main():
    keys, line_only = help_options()
    check(len(keys) > 10 and len(line_only) == 4, "prefilld --help lists options",
          f"{keys}\n{line_only}")

    readme = readme_options()
    compare("README.md", readme, keys)
    wrong = [f"{k}: {readme.get(k)}, not {d}" for k, d in keys.items() if d and readme.get(k) != d]
    check(not wrong, "README.md has the defaults", "\n".join(wrong))

    page = man_options("prefilld.conf.5", "Ic ")
    compare("prefilld.conf(5)", page, keys)
    wrong = [f"{k}: Default {d}" for k, d in keys.items()
             if d and re.match(r"[\w.:-]+$", d) and f"Default {d}." not in page.get(k, "")]
    check(not wrong, "prefilld.conf(5) has the defaults", "\n".join(wrong))
    compare("prefilld(8)", man_options("prefilld.8", "Fl -"), line_only)

    sample, problems = sample_options()
    compare("the sample file", sample, keys)
    wrong = [f"{k}: {sample.get(k)}, not {d}" for k, d in keys.items()
             if d and re.match(r"[\w.:-]+$", d) and d not in sample.get(k, [])]
    check(not wrong and not problems, "the sample file has the defaults, explained",
          "\n".join(wrong + problems))

    for name in ("loadgen", "prefill"):
        client = subprocess.run([sys.executable, os.path.join(SRCDIR, "clients", name), "--help"],
                                capture_output=True, text=True, check=True).stdout
        compare(f"{name}(1)", man_options(f"{name}.1", "Fl -"),
                set(re.findall(r"^  --([a-z0-9-]+)", client, re.M)))

    for page in ("loadgen.1", "prefill.1", "prefilld.8", "prefilld.conf.5"):
        if not shutil.which("mandoc"):
            skip(page, "no mandoc (Debian package mandoc)")
            continue
        lint = subprocess.run(["mandoc", "-T", "lint", os.path.join(SRCDIR, "etc", page)],
                              capture_output=True, text=True).stdout
        # Pages that are not installed yet are not found.
        lint = [line for line in lint.splitlines() if "referenced manual not found" not in line]
        check(not lint, f"mandoc finds nothing in {page}", "\n".join(lint))
    check_examples()
    done()


if __name__ == "__main__":
    main()
