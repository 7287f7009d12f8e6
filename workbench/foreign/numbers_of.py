"""Values that others logged, as numbers: what is none is named."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import UNSET

from ..errors import TelemetryError

WORDS = {"nan": np.nan, "inf": np.inf, "infinity": np.inf, "-inf": -np.inf, "-infinity": -np.inf}


def numbers_of(path: Path, name: str, values: Sequence[Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """
    Args:
        values: numbers; the words NaN, inf, Infinity, for one that is not finite; None for null; `UNSET` for nothing.

    Returns:
        float64, NaN where there is none; which are numbers, finite or not; which are null.

    Raises:
        TelemetryError: a value is something else.
    """
    kinds = set(map(type, values))
    if kinds <= {float, int}:
        return _doubles(values), np.ones(len(values), bool), np.zeros(len(values), bool)
    found = np.full(len(values), np.nan)
    there, nulls = np.zeros(len(values), bool), np.zeros(len(values), bool)
    for place, value in enumerate(values):
        if value is UNSET:
            continue
        if value is None:
            nulls[place] = True
            continue
        if isinstance(value, str) and value.lower() in WORDS:
            value = WORDS[value.lower()]
        if type(value) not in (float, int):
            raise TelemetryError(
                f"{path}: entry {place + 1} has {str(value)[:60]!r} ({type(value).__name__}) for {name!r}; "
                "expected a number"
            )
        found[place], there[place] = _double(value), True
    return found, there, nulls


def _doubles(values: Sequence[float]) -> np.ndarray:
    try:
        return np.array(values, np.float64)
    except OverflowError:
        return np.array([_double(value) for value in values], np.float64)


def _double(value: float) -> float:
    """An integer beyond the largest double is inf, as 1e999 is to a parser of JSON."""
    try:
        return float(value)
    except OverflowError:
        return np.inf if value > 0 else -np.inf
