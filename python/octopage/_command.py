"""The `octopage` command: the program that the package carries."""

import os
import pathlib
import sys


def main():
    program = pathlib.Path(__file__).resolve().parent / "bin" / "octopage"
    os.execv(program, [str(program), *sys.argv[1:]])
