"""A warning at the line of the loop that called the recorder, however deep in the recorder's parts it is said.

Knows Python's frames; nothing of recordings.
"""

from __future__ import annotations

import sys
import warnings
from types import FrameType

_PARTS = __name__.rpartition(".")[0]
_OWN = (f"{_PARTS}.", f"{_PARTS.rpartition('.')[0]}.record")


def warn(sentence: str) -> None:
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and str(frame.f_globals.get("__name__")).startswith(_OWN):
        frame, level = frame.f_back, level + 1
    warnings.warn(sentence, stacklevel=level)
