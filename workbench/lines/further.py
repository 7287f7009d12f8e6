"""How many lines of a log can't be read beside the one that an error names: two writers at once leave many.

Knows lines as bytes; what a line has to be, the reader says.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..enumeration import some
from ..untrusted import open_regular

LOOKED_AT = 1 << 26  # bytes behind the named line: enough for a verdict, and some seconds at most
LONGEST = 1 << 20  # bytes of a line that is worth a look


def further_damage(path: Path, number: int, readable: Callable[[bytes], bool]) -> str:
    """A sentence that begins with a space on the damaged lines behind line `number`; empty if there are none.

    Args:
        readable: whether a line, given with its end, can be read. An unended last line is not asked about.
    """
    damaged: list[int] = []
    try:
        with open_regular(path) as file:
            for _ in range(number):
                while (line := file.readline(LONGEST)) and not line.endswith(b"\n"):
                    pass
            place, end = number, file.tell() + LOOKED_AT
            while file.tell() < end and (line := file.readline(LONGEST)).endswith(b"\n"):
                place += 1
                if line.strip() and not readable(line):
                    damaged.append(place)
    except OSError:
        return ""
    if not damaged:
        return ""
    lines = f"line {damaged[0]}" if len(damaged) == 1 else f"{len(damaged)} lines behind it ({some(damaged)})"
    return f" Beside it {lines} can't be read either: two processes may have written to this file at once."
