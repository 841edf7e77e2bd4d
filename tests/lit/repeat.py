# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Writes out IR that is too long for a file: `repeat.py N FILE` prints the file, each line with `[i]` N times.

In place of `[i]` are the numbers 1 to N, in place of `[i-1]` one less, in place of `[N]` is N. Comments stay.
"""

import sys
from collections.abc import Iterator
from pathlib import Path


def repeat(text: str, count: int) -> Iterator[str]:
    """The lines of `text`, written out."""
    for line in text.splitlines():
        times = range(1, count + 1) if "[i]" in line and not line.startswith("//") else [0]
        yield from (line.replace("[i-1]", str(i - 1)).replace("[i]", str(i)).replace("[N]", str(count)) for i in times)


if __name__ == "__main__":
    print("\n".join(repeat(Path(sys.argv[2]).read_text(encoding="utf-8"), int(sys.argv[1]))))
