"""CSV: of any program, and what W&B and TensorBoard export."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from ..errors import TelemetryError
from .entries import Entries
from .naming import left_out, mapped
from .numbers_of import WORDS

_SIGNS = ",;\t"
_SPREAD = ("__MIN", "__MAX")  # W&B's range of what it averaged into one row


def delimiter_of(text: str) -> str | None:
    """What separates the fields of CSV: a line of names, and lines with as many values. None if the text is none."""
    lines = [line for line in text.splitlines()[:20] if line.strip()]
    for sign in _SIGNS:
        try:
            rows = list(csv.reader(io.StringIO("\n".join(lines)), delimiter=sign))
        except csv.Error:  # a field of more than 128 KiB, say
            continue
        if len(rows) > 1 and len(rows[0]) > 1 and len({len(row) for row in rows[:-1]}) == 1:
            if not any(map(_is_number, rows[0])) and any(map(_is_number, rows[1])):
                return sign
    return None


def read_delimited(path: Path, sign: str, columns: Mapping[str, str | None] | None) -> Entries:
    """
    Raises:
        TelemetryError: the columns can't be mapped, or a value is no number.
    """
    try:
        table = pd.read_csv(path, sep=sign, dtype=str, keep_default_na=False)
    except (ValueError, pd.errors.ParserError) as error:
        raise TelemetryError(f"{path} can't be read as CSV: {error}") from error
    keys = [key for key in table.columns if not key.endswith(_SPREAD)]
    mapping = mapped(path, keys, columns)
    notices = []
    if any(key.endswith(_SPREAD) for key in table.columns):
        notices.append(
            "An export of W&B: a row may stand for several steps, whose means it has; minima and maxima are left out."
        )
    found, present = {}, {}
    for name, key in mapping.items():
        found[name], present[name] = _numbers(path, key, table[key])
    if "step" in mapping:
        step, there = found.pop("step"), present.pop("step")
        if not (np.isfinite(step[there]) & (step[there] == np.floor(step[there]))).all():
            raise TelemetryError(f"{path}: column {mapping['step']!r} holds other things than whole numbers")
        if not there.all():
            notices.append(left_out(int((~there).sum()), "row", "rows", mapping["step"]))
        found, present = ({name: one[there] for name, one in group.items()} for group in (found, present))
        steps = step[there].astype(np.int64)
    else:
        notices.append("The steps are the numbers of the rows: the log names none.")
        steps = np.arange(1, len(table) + 1)
    return Entries(steps, found, present, mapping=mapping, keys=keys, notices=notices)


def _numbers(path: Path, key: str, texts: pd.Series) -> tuple[np.ndarray, np.ndarray]:
    """A column as float64, each the nearest to the decimal number; and which fields are not empty."""
    words = texts.str.strip()
    there = (words != "").to_numpy()
    numbers = np.full(len(texts), np.nan)
    try:
        numbers[there] = words[there].astype("float64").to_numpy()
    except ValueError:
        for row in np.flatnonzero(there):
            if not _is_number(words.iloc[row]):
                hint = ""
                if words.iloc[row].count(",") == 1 and _is_number(words.iloc[row].replace(",", ".")):
                    hint = " with a decimal point, not a comma: export the file so, or replace the commas"
                raise TelemetryError(
                    f"{path}, line {row + 2}: column {key!r} has {words.iloc[row]!r}; expected a number{hint}"
                ) from None
            word = words.iloc[row].lower()
            numbers[row] = WORDS[word] if word in WORDS else float(word)
    return numbers, there


def _is_number(text: str) -> bool:
    if text.strip().lower() in WORDS:
        return True
    try:
        float(text)
    except ValueError:
        return False
    return True
