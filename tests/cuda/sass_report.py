#!/usr/bin/env python3
"""Reads the machine code of the Hopper attention kernels and checks what makes them fast.

In every kernel the matrix unit's instructions (HGMMA) are there and no register is spilled. Where the
softmax of a batch is meant to run beside the products of the batch before, its exponentials must stand
between the wait for the scores and the wait for the products: compilers have moved them.

    sass_report.py PROGRAM-OR-LIBRARY        exit code 77: cuobjdump is not installed
"""

import re
import shutil
import subprocess
import sys

MARKS = {"HGMMA": "H", "WARPGROUP.DEPBAR": "W", "MUFU.EX2": "e", "STL": "s", "LDL": "s"}
SCORES = r"union_attentionINS0_11UnionTraitsILi(\d+)E(\w+?)Li(\d)E"
KINDS = {"13__nv_bfloat16": "bf16", "6__half": "f16", "NS0_2F8E": "f8"}


def outline(sass):
    """One letter per instruction of interest."""
    letters = []
    for instruction in re.findall(r"/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)", sass):
        for name, letter in MARKS.items():
            if instruction.startswith(name):
                letters.append(letter)
    return "".join(letters)


def overlaps(letters):
    """Scores and products are issued, the scores are waited for, 32 exponentials, the products."""
    return re.search(r"H{8,}We{32}e*WH", letters) is not None


def main():
    assert overlaps("HHHHHHHHHHWe" + "e" * 40 + "WHH") and not overlaps("HHHHHHHHHHWW" + "e" * 40 + "HH")
    if shutil.which("cuobjdump") is None:
        print("cuobjdump is not installed")
        return 77
    done = subprocess.run(["cuobjdump", "-sass", sys.argv[1]], capture_output=True, text=True, check=True)
    kernels, bad = 0, []
    for part in done.stdout.split("Function : ")[1:]:
        name = part.split(None, 1)[0]
        match = re.search(SCORES, name)
        if not match:
            continue
        kernels += 1
        dim, kind, rows = int(match.group(1)), KINDS[match.group(2)], match.group(3)
        letters = outline(part)
        what = f"dim {dim} {kind} rows {rows}"
        print(f"{what}: {letters.count('H')} HGMMA, {letters.count('s')} spills, "
              f"overlap {'yes' if overlaps(letters) else 'no'}")
        if letters.count("H") < dim // 16 + 4:
            bad.append(f"{what}: matrix instructions are missing")
        if "s" in letters:
            bad.append(f"{what}: registers are spilled")
        if dim <= 192 and not overlaps(letters):
            bad.append(f"{what}: the softmax does not run beside the products")
    if kernels != 21:
        bad.append(f"{kernels} kernels were found, 21 are compiled")
    for line in bad:
        print("FAILED", line)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
