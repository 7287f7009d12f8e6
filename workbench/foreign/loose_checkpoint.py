"""A checkpoint that is only a file of tensors: its norms, what it lacks for a replay, how it differs from another."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from ..bits import ulp_difference
from ..enumeration import some
from .state_file import Tensor, read_tensors

# What MLX's optimizers keep for each parameter (mlx/optimizers/optimizers.py), and PyTorch's names of the same.
_MOMENTS = ("m", "v", "u", "exp_avg", "exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col")
_COUNTERS = ("step", "learning_rate")
_RANDOM = ("rng", "rng_state", "random_state")


@dataclass(frozen=True)
class LooseCheckpoint:
    """A file of tensors.

    Attributes:
        path: the file, or a folder of shards.
        tensors: by name.
    """

    path: Path
    tensors: dict[str, Tensor]

    def part(self, name: str) -> str:
        """What a tensor is: "weight", "step", "learning_rate", "random state"; or what the optimizer keeps: m, v, …"""
        stem, _, last = name.rpartition(".")
        if last in _COUNTERS and self.tensors[name].size == 1:
            return last
        if last in _RANDOM:
            return "random state"
        beside = stem in self.tensors or stem.partition(".")[2] in self.tensors  # "optimizer." may stand before it
        return last if last in _MOMENTS and stem and (beside or self._counts) else "weight"

    @property
    def _counts(self) -> bool:
        """Whether it has a count of steps, as the state of every optimizer of MLX: a weight may be called v too."""
        return any(name.rpartition(".")[2] == "step" and tensor.size == 1 for name, tensor in self.tensors.items())

    def frame(self) -> pd.DataFrame:
        """One row a tensor: tensor, part, dtype, shape, size, l2, rms, max_abs (of the finite elements; float64 sums of
        the exact values), nonfinite (a count)."""
        rows = []
        for name, tensor in self.tensors.items():
            squares, largest, nonfinite = 0.0, 0.0, 0
            for chunk in tensor.chunks():
                finite = np.isfinite(chunk)
                nonfinite += int(finite.size - np.count_nonzero(finite))
                values = np.abs(chunk[finite] if nonfinite else chunk)
                squares += float(np.dot(values, values))
                largest = max(largest, float(values.max(initial=0.0)))
            count = tensor.size - nonfinite
            rms = math.sqrt(squares / count) if count else float("nan")
            shape = "×".join(map(str, tensor.shape)) or "scalar"
            numbers = (tensor.size, math.sqrt(squares), rms, largest, nonfinite)
            rows.append((name, self.part(name), tensor.dtype, shape, *numbers))
        return pd.DataFrame(rows, columns=[*_COLUMNS])

    def missing(self) -> list[str]:
        """What a replayable state has and this file has not."""
        parts = {self.part(name) for name in self.tensors}
        found = [] if "weight" in parts else ["weights"]
        moments = {part for part in parts if part in _MOMENTS}
        if not moments:
            found.append("the optimizer's moments")
        else:
            weights = [name for name in self.tensors if self.part(name) == "weight"]
            for moment in sorted(moments):
                stems = [name.rpartition(".")[0] for name in self.tensors if self.part(name) == moment]
                lacking = [name for name in weights if not any(_same_stem(stem, name) for stem in stems)]
                if weights and lacking:
                    found.append(f"{moment} of {len(lacking)} of {len(weights)} weights ({some(lacking)})")
        found += [f"the optimizer's {counter}" for counter in _COUNTERS if counter not in parts]
        found += [] if "random state" in parts else ["the random state"]
        return [*found, "the data cursor", "the optimizer's settings"]

    def sentence(self) -> str:
        """What the file is, and what it lacks."""
        parts = [self.part(name) for name in self.tensors]
        counted = [(part, parts.count(part)) for part in dict.fromkeys(parts)]
        what = ", ".join(f"{number} × {part}" for part, number in counted) or "no tensors"
        return f"{self.path}: {what}. Not a replayable state: it lacks {', '.join(self.missing())}."


_COLUMNS = ("tensor", "part", "dtype", "shape", "size", "l2", "rms", "max_abs", "nonfinite")


def open_checkpoint(path: str | os.PathLike[str]) -> LooseCheckpoint:
    """Opens a file of tensors (.safetensors, .npz) of any MLX program: weights, with or without an optimizer's state.

    Raises:
        CheckpointError: it is damaged, or of a format that is not opened, which is named; nothing is ever unpickled.
    """
    return LooseCheckpoint(Path(path), read_tensors(Path(path)))


def compare_checkpoints(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> pd.DataFrame:
    """Two files of tensors, tensor by tensor.

    Returns:
        One row a tensor: tensor, verdict ("equal": bit for bit; "differs", "other shape", "other dtype", "only in a",
        "only in b"), dtype, shape, differing (elements whose bits differ), max_ulp, max_abs (the greatest difference),
        relative (‖b - a‖ / ‖a‖). What has no meaning is NaN. `attrs["notices"]` has sentences; where all names of one
        file differ from the other's by one prefix, tensors are compared across it.

    Raises:
        CheckpointError: as `open_checkpoint`.
    """
    left, right = open_checkpoint(a), open_checkpoint(b)
    notices, names = [], dict(zip(right.tensors, right.tensors, strict=True))  # of b: the name that it has in a
    prefix = _prefix(left.tensors, right.tensors)
    if prefix is not None:
        longer, cut = prefix
        notices.append(f"Every name in {longer} begins with {cut!r}, which those of the other file lack.")
        names = {n: n.removeprefix(cut) if longer == "b" else cut + n for n in right.tensors}
    rows = []
    theirs = {names[name]: tensor for name, tensor in right.tensors.items()}
    for name in dict.fromkeys([*left.tensors, *theirs]):
        rows.append(_compared(name, left.tensors.get(name), theirs.get(name)))
    frame = pd.DataFrame(rows, columns=["tensor", "verdict", "dtype", "shape", *_DIFFERENCES])
    frame.attrs["notices"] = notices
    return frame


_DIFFERENCES = ("differing", "max_ulp", "max_abs", "relative")


def _compared(name: str, ours: Tensor | None, theirs: Tensor | None) -> tuple:
    nothing = (float("nan"),) * len(_DIFFERENCES)
    if ours is None or theirs is None:
        one = ours or theirs
        assert one is not None
        return (name, "only in b" if ours is None else "only in a", one.dtype, _shape(one), *nothing)
    if ours.shape != theirs.shape:
        return (name, "other shape", ours.dtype, f"{_shape(ours)} and {_shape(theirs)}", *nothing)
    if ours.dtype != theirs.dtype:
        return (name, "other dtype", f"{ours.dtype} and {theirs.dtype}", _shape(ours), *nothing)
    found = ulp_difference(ours.words(), theirs.words(), ours.dtype)
    if not found.differing:
        return (name, "equal", ours.dtype, _shape(ours), 0, 0, 0.0, 0.0)
    apart = size = largest = 0.0
    for before, after in zip(ours.chunks(), theirs.chunks(), strict=True):
        with np.errstate(invalid="ignore"):
            moved, length = np.abs(after - before), np.abs(before)
        apart, size = apart + float(np.dot(moved, moved)), size + float(np.dot(length, length))
        largest = max(largest, float(moved.max(initial=0.0)))
    relative = math.sqrt(apart / size) if size else float("nan")
    ulp = float("nan") if found.max_ulp is None else found.max_ulp
    return (name, "differs", ours.dtype, _shape(ours), found.differing, ulp, largest, relative)


def _shape(tensor: Tensor) -> str:
    return "×".join(map(str, tensor.shape)) or "scalar"


def _same_stem(stem: str, weight: str) -> bool:
    """Whether a moment's path is a weight's: programs put "model." and "optimizer." before them, or nothing."""
    return stem == weight or stem.partition(".")[2] in (weight, weight.partition(".")[2])


def _prefix(left: Iterable[str], right: Iterable[str]) -> tuple[str, str] | None:
    """Which file's names are longer by a prefix, and that; None if most names are the same, or there is none."""
    ours, theirs = set(left), set(right)
    if not ours or not theirs or ours & theirs:
        return None
    for longer, many, few in (("b", theirs, ours), ("a", ours, theirs)):
        first = min(few)
        cuts = {name.removesuffix(first) for name in many if name.endswith(f".{first}")}
        for cut in sorted(cuts):
            if sum(cut + name in many for name in few) * 2 > len(few) and all(name.startswith(cut) for name in many):
                return longer, cut
    return None
