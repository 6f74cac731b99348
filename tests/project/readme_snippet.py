#!/usr/bin/env python3
"""The first C++ program in README.md is examples/first_program.cpp, word for word.

    readme_snippet.py ROOT
"""

import pathlib
import re
import sys

root = pathlib.Path(sys.argv[1])
snippets = re.findall(r"```cpp\n(.*?)```", (root / "README.md").read_text(), re.DOTALL)
program = (root / "examples/first_program.cpp").read_text()
if program not in snippets:
    sys.exit("README.md does not show examples/first_program.cpp as it is")
print("ok")
