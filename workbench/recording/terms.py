"""What a run is recorded with: what its manifest says, and the experiment does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .. import script
from ..errors import ExperimentError
from ..manifest import DataFile, Parent
from ..recovery import Recovery
from ..spikes import SpikeSettings


@dataclass(frozen=True)
class Terms:
    """Arguments of a Recorder, which says what each is.

    Attributes:
        rebuild: as the manifest's field.
        keep: `keep_last` and `keep_every`.
        parent: of a fork; None: the run is none.
    """

    rebuild: dict[str, Any]
    data: Sequence[DataFile]
    save_every: int
    keep: tuple[int | None, int | None]
    spikes: SpikeSettings | None
    recovery: Recovery
    parent: Parent | None


def refuse_out_of_range(save_every: int, black_box: int, keep_last: int | None, keep_every: int | None) -> None:
    """
    Raises:
        ExperimentError: one of them is less than it can be.
    """
    for name, least in (("save_every", save_every), ("black_box", black_box)):
        if least < 0:
            raise ExperimentError(f"{name} is {least}; expected 0 (never) or more")
    for name, value in (("keep_last", keep_last), ("keep_every", keep_every)):
        if value is not None and value < 1:
            raise ExperimentError(f"{name} is {value}; expected at least 1, or none to keep every checkpoint")


def way_to_rebuild(factory: str | None, arguments: dict[str, Any] | None) -> dict[str, Any]:
    """The manifest's `rebuild` for a factory and its arguments, or (None) for the script that is running."""
    if factory:
        return {"kind": "factory", "factory": factory, "arguments": arguments or {}}
    return {"kind": "none"} | script.description()
