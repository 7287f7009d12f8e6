"""A line of telemetry as one rank saw it.

Rank 0 writes the telemetry of all. A line's own fields are rank 0's, but for the loss, which is the mean over ranks.
Its field `ranks` has an entry a rank, in which stands whatever of the rank's is not what the line says: its loss
always; most of the time the hash of its batch, the norms of its activations, and the lanes `rng` and `cursor`.
Knows lines; nothing of MLX, files or recorders.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import msgspec
import numpy as np
from msgspec import UNSET

from ..bits import bits_float, float_bits
from ..errors import TelemetryError
from ..lines.line import ARRAYS, SCALARS, Line

NESTED = ("state",)  # of which only the entries that differ are written
_NULLABLE = {field.name for field in msgspec.structs.fields(Line) if type(None) in get_args(field.type)}


def differing(mine: Mapping[str, Any], first: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a rank's line that are not those of rank 0's; None for one that only rank 0 has, such as the bits
    of norms that are all finite in this rank."""
    found: dict[str, Any] = {}
    for name in [*mine, *(name for name in first if name not in mine)]:
        ours, theirs = mine.get(name), first.get(name)
        if ours == theirs and (name in mine) == (name in first):
            continue
        if name in NESTED and isinstance(ours, dict) and isinstance(theirs, dict):
            ours = {key: value for key, value in ours.items() if theirs.get(key) != value}
        found[name] = ours
    return found


def mean_loss(losses: Sequence[float]) -> np.float32:
    """The loss of a step of several ranks, from the float32 loss of each: their mean, rounded once."""
    with np.errstate(all="ignore"):
        return np.float32(math.fsum(losses) / len(losses) if np.isfinite(losses).all() else np.sum(losses))


def complaint(line: Line, size: int | None = None) -> str | None:
    """What is wrong with a step's line as a whole; None: each rank has its entry, and their losses make the line's.

    Args:
        size: how many ranks there must be; None: not known here.
    """
    if line.ranks is UNSET:
        return None if size is None else "it has no `ranks`"
    numbers = [entry.get("rank") for entry in line.ranks]
    if numbers != list(range(len(numbers) if size is None else size)):
        wanted = "" if size is None else f" to {size - 1}"
        return f"its ranks are numbered {', '.join(map(str, numbers)) or 'by nothing'}; expected 0{wanted}, each once"
    logged = line.evidence().get("loss")
    if logged is None and not any("loss_bits" in entry for entry in line.ranks):
        return None  # no loss was logged at all
    try:
        losses = [float(bits_float(entry["loss_bits"])) for entry in line.ranks]
    except (KeyError, TypeError, ValueError):
        return "a rank in it has no loss"
    mean = mean_loss(losses)
    if logged != float_bits(mean):
        said = "not recorded" if logged is None else f"{bits_float(logged):.8g}"
        return f"its loss is {said}, and that of its ranks is {mean:.8g} in the mean"
    return None


def own_line(line: Line, rank: int) -> Line:
    """The line of a rank.

    Raises:
        TelemetryError: the line has no entry of that rank, or a damaged one.
    """
    if line.ranks is UNSET:
        return line
    if line.type == "step" and (wrong := complaint(line)) is not None:
        raise TelemetryError(f"the line of step {line.step} does not agree with itself: {wrong}")
    if not 0 <= rank < len(line.ranks):
        raise TelemetryError(f"the line of step {line.step} has {len(line.ranks)} ranks; expected one of rank {rank}")
    entry = line.ranks[rank]
    fields = msgspec.to_builtins(line)
    del fields["ranks"]
    for name, value in entry.items():
        if name in NESTED and isinstance(value, dict):
            fields[name] = fields.get(name, {}) | value
        elif value is None and name not in _NULLABLE:
            fields.pop(name, None)  # only rank 0 has it
        else:
            fields[name] = value
    for name in (*SCALARS, *ARRAYS):
        if name in entry and f"{name}_bits" not in entry:
            fields.pop(f"{name}_bits", None)  # of rank 0's number
    try:
        found = msgspec.convert(fields, Line)
        found.check()
    except (msgspec.ValidationError, ValueError) as error:
        raise TelemetryError(f"what the line of step {line.step} says of rank {rank} is damaged: {error}") from error
    return found
