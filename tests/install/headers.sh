#!/usr/bin/env bash
# headers.sh SOURCE CXX CC: every public header compiles alone and includes only the standard library
# and octopage's own.
set -euo pipefail
include=$1/include cxx=$2 cc=$3
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
count=0
for header in "$include"/octopage/*.hpp "$include"/octopage/*.h; do
  name=octopage/$(basename "$header")
  echo "#include <$name>" >"$scratch/alone.cpp"
  "$cxx" -std=c++20 -Wall -Wextra -Werror -fsyntax-only -I"$include" "$scratch/alone.cpp"
  if [[ $header == *.h ]]; then
    echo "#include <$name>
typedef int not_empty;" >"$scratch/alone.c"
    "$cc" -std=c11 -pedantic -Wall -Wextra -Werror -fsyntax-only -I"$include" "$scratch/alone.c"
  fi
  # Third-party headers have a slash or .h/.hpp; the standard library's C++ headers have neither.
  foreign=$(sed -nE 's/^ *# *include *[<"]([^>"]+)[>"].*/\1/p' "$header" | grep -vE '^octopage/' |
    grep -E '[/.]' | grep -vE '^(stddef|stdint|stdbool)\.h$' || true)
  [ -z "$foreign" ] || { echo "$name includes $foreign"; exit 1; }
  count=$((count + 1))
done
echo "$count headers"
[ "$count" -ge 10 ]
