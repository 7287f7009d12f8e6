"""Columns that grow: rows are appended in parts, and parts are joined only for the columns that someone reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

# What was found in place of a number. Kept beside every column of numbers, so that a NaN in it says why it is one.
NUMBER, NULL, MISSING, NON_FINITE = range(4)


class Table:
    """Rows of columns, each a numpy array whose first axis is the row.

    A column that begins or ends before others has `fill_value` of its dtype in the other rows. Copies share parts.
    """

    def __init__(self, rows: int = 0, columns: Mapping[str, np.ndarray] | None = None) -> None:
        self.rows = rows
        self._parts: dict[str, list[np.ndarray]] = {name: [array] for name, array in (columns or {}).items()}
        self._filled = {name: rows for name in self._parts}  # rows of its parts
        self._ragged: set[str] = set()

    def copy(self) -> Table:
        other = Table(self.rows)
        other._parts = {name: list(parts) for name, parts in self._parts.items()}
        other._filled, other._ragged = dict(self._filled), set(self._ragged)
        return other

    def append(self, rows: int, columns: Mapping[str, np.ndarray]) -> None:
        """Appends rows. A column whose entries have another shape than before is given up; see `ragged`."""
        for name, array in columns.items():
            parts = self._parts.get(name)
            if parts is not None and parts[0].shape[1:] != array.shape[1:]:
                self.give_up(name)
            if name in self._ragged:
                continue
            if parts is None:
                parts, self._filled[name] = self._parts.setdefault(name, []), 0
            self._fill(name, array)
            parts.append(array)
            self._filled[name] += rows
        self.rows += rows

    def give_up(self, name: str) -> None:
        """Keeps a column no longer; see `ragged`."""
        self._ragged.add(name)
        self._parts.pop(name, None)

    @property
    def names(self) -> list[str]:
        return list(self._parts)

    @property
    def ragged(self) -> set[str]:
        """Columns that are not kept, for their entries have different shapes."""
        return self._ragged

    def column(self, name: str) -> np.ndarray | None:
        """A whole column, read-only; None if no row has it, or it is ragged."""
        parts = self._parts.get(name)
        if parts is None:
            return None
        self._fill(name, parts[0])
        if len(parts) > 1:
            parts[:] = [np.concatenate(parts)]
        found = parts[0].view()
        found.flags.writeable = False
        return found

    def parts(self, name: str) -> Iterator[np.ndarray]:
        """The same without joining them."""
        parts = self._parts[name]
        self._fill(name, parts[0])
        yield from parts

    def _fill(self, name: str, like: np.ndarray) -> None:
        missing = self.rows - self._filled[name]
        if missing:
            self._parts[name].append(np.full((missing, *like.shape[1:]), fill_value(like.dtype), like.dtype))
            self._filled[name] = self.rows


def merged(parts: Sequence[Mapping[str, np.ndarray]], by: str) -> dict[str, np.ndarray]:
    """The rows of several tables in the order of a column that all have; `fill_value` where one lacks another."""
    order = np.argsort(np.concatenate([part[by] for part in parts]), kind="stable")
    found = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        like = next(part[name] for part in parts if name in part)
        shapes = [(len(part[by]), *like.shape[1:]) for part in parts]
        absent = (np.full(shape, fill_value(like.dtype), like.dtype) for shape in shapes)
        found[name] = np.concatenate([part.get(name, gap) for part, gap in zip(parts, absent, strict=True)])[order]
    return found


def fill_value(dtype: np.dtype) -> float | int | bool:
    """NaN; `MISSING` of kinds; -1 of codes; False."""
    return {"f": np.nan, "u": MISSING, "i": -1, "b": False}[dtype.kind]
