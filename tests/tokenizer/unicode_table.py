#!/usr/bin/env python3
"""Writes src/tokenizer_unicode.c from the fixtures' unicode.json and Python's unicodedata.

    python3 tests/tokenizer/unicode_table.py ../shared/fixtures/tokenizer/unicode.json \
        > src/tokenizer_unicode.c

Letters, marks, numbers and blanks are the reference's (Unicode 16). What NFC looks at is from
unicodedata, any version from 9 on: for assigned code points it never changes, and those that the
reference's older data do not know are in nfc_inert.
"""
import json
import sys
import unicodedata

LETTER, MARK, NUMBER, SPACE, NFC_CHECK, NFC_CCC, NFC_INERT = (1 << i for i in range(7))
N_CODES = 0x110000


def covered(ranges):
    return {c for first, last in ranges for c in range(first, last + 1)}


def nfc_check():
    """Code points whose NFC_Quick_Check is not Yes: changed by NFC, or joined to one before."""
    joining = set(range(0x1161, 0x1176)) | set(range(0x11A8, 0x11C3))  # Hangul vowels, finals
    changed = set()
    for code in range(N_CODES):
        if 0xD800 <= code <= 0xDFFF:
            continue
        char = chr(code)
        if unicodedata.normalize("NFC", char) != char:
            changed.add(code)
            continue
        parts = unicodedata.decomposition(char).split()
        if len(parts) == 2 and not parts[0].startswith("<"):
            joining.add(int(parts[1], 16))
    return changed | joining


def main():
    tables = json.load(open(sys.argv[1], encoding="ascii"))
    inert = covered(tables["nfc_inert"])
    combining = {c for c in range(N_CODES) if unicodedata.combining(chr(c))}
    flags = [0] * N_CODES
    for bit, codes in (
        (LETTER, covered(tables["classes"]["L"])),
        (MARK, covered(tables["classes"]["M"])),
        (NUMBER, covered(tables["classes"]["N"])),
        (SPACE, covered(tables["classes"]["space"])),
        (NFC_CHECK, nfc_check() - inert),
        (NFC_CCC, combining - inert),
        (NFC_INERT, inert),
    ):
        for code in codes:
            flags[code] |= bit
    runs = [c for c in range(N_CODES) if c == 0 or flags[c] != flags[c - 1]]
    print("/* Made by tests/tokenizer/unicode_table.py: do not edit. It is data: one entry,")
    print(" * first code point << 8 | CHAR_* flags, for each run of equals. */")
    print('#include "tokenizer_internal.h"\n')
    print("const uint32_t tokenizer_unicode_runs[] = {")
    for i in range(0, len(runs), 7):
        print("    " + ", ".join(f"0x{c << 8 | flags[c]:08x}" for c in runs[i : i + 7]) + ",")
    print("};\n")
    print("const size_t tokenizer_unicode_n_runs =")
    print("    sizeof(tokenizer_unicode_runs) / sizeof(tokenizer_unicode_runs[0]);")


main()
