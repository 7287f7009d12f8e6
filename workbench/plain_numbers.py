"""What a setting may be given as: a whole number, a real one or a truth value, of Python or numpy, as Python's own.

The value stays the very same one; a truth value is no number, and a number no truth value. Knows nothing else.
"""

from __future__ import annotations

import numbers
import operator
from typing import Any

import numpy as np

_LONGEST = 1 << 63  # JSON's whole numbers are read as 64 bits


def whole(value: Any) -> int | None:
    """The whole number that a value is; None: it is none."""
    if truth(value) is not None:
        return None
    try:
        return int(operator.index(value))
    except TypeError:
        return None


def real(value: Any) -> int | float | None:
    """The number that a value is, NaN and infinities too; None: it is none, or has more digits than a float."""
    found: int | float | None = whole(value)
    if found is not None and abs(found) < _LONGEST:
        return found
    if truth(value) is not None or not isinstance(value, numbers.Real):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if found == value or value != value else None


def truth(value: Any) -> bool | None:
    """The truth value that a value is; None: it is none."""
    return bool(value) if isinstance(value, (bool, np.bool_)) else None
