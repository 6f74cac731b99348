#!/usr/bin/env python3
"""Cuts the device code out of a .cu file, for the test that runs it on the host: everything before the
paragraph of the marker, without the includes, and without dynamic shared memory, which the test defines.

    extract_kernel.py FILE.cu MARKER OUT.inc
"""

import pathlib
import re
import sys

source, marker, out = pathlib.Path(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3])
text = source.read_text()
if text.count(marker) != 1:
    sys.exit(f"{source}: '{marker}' must stand there once, stands there {text.count(marker)} times")
kernel = re.sub(r'^(#include|  extern __shared__) .*\n', "\n", text[:text.rindex("\n\n", 0, text.index(marker)) + 2], flags=re.MULTILINE)
out.write_text(f'#line 1 "{source}"\n{kernel}\n}}  // namespace\n}}  // namespace octopage::cuda\n')
