"""What a run is recorded with: what its manifest says, and the experiment does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import script
from ..errors import ExperimentError
from ..manifest import NAME, DataFile, Parent
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
    ignore: tuple[str, ...] = ()


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


def names_of(ignore: Sequence[str] | str) -> tuple[str, ...]:
    """
    Raises:
        ExperimentError: they are no names.
    """
    names = (ignore,) if isinstance(ignore, str) else tuple(ignore)
    if odd := [name for name in names if not isinstance(name, str) or not name.strip(".")]:
        raise ExperimentError(f"ignore has {odd[0]!r}; expected names of what the step changes, such as ('gstep',)")
    return names


def goes_on(resume: bool | int | str, path: Path) -> bool | int:
    """What `resume` asks for: "auto" goes on with the run that the folder holds, if it holds one.

    Raises:
        ExperimentError: it is another text.
    """
    if resume == "auto":
        return (path / NAME).exists()
    if isinstance(resume, str):
        raise ExperimentError(f'resume is {resume!r}; expected True, False, "auto", or the step of a checkpoint')
    return resume
