"""What a run is recorded with: what its manifest says, and the experiment does not."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np

from .. import script
from ..errors import ExperimentError, RunError
from ..files import pretty_json
from ..manifest import NAME, DataFile, Manifest, Parent, Segment, parsed
from ..plain_json import plain_json
from ..plain_numbers import real, truth, whole
from ..recovery import Recovery
from ..spikes import SpikeSettings


@dataclass(frozen=True)
class Terms:
    """Arguments of a Recorder, which says what each is.

    Attributes:
        rebuild: as the manifest's field.
        keep: `keep_last` and `keep_every`.
        parent: of a fork; None: the run is none.

    Raises:
        ExperimentError: one of them can't be, or the manifest with them could not be read.
    """

    rebuild: dict[str, Any]
    data: Sequence[DataFile]
    save_every: int
    keep: tuple[int | None, int | None]
    spikes: SpikeSettings | None
    recovery: Recovery
    parent: Parent | None
    ignore: tuple[str, ...] = ()

    @property
    def of_users(self) -> bool:
        """Whether the step is the user's code, which may read whatever there is."""
        return self.rebuild.get("kind") not in ("trainer", "mlx-lm")

    def __post_init__(self) -> None:
        object.__setattr__(self, "save_every", _whole("save_every", self.save_every, 0))
        keep = zip(("keep_last", "keep_every"), self.keep, strict=True)
        object.__setattr__(self, "keep", tuple(None if one is None else _whole(name, one, 1) for name, one in keep))
        if self.spikes is not None and not isinstance(self.spikes, SpikeSettings):
            raise ExperimentError(
                f"spikes is {_kind(self.spikes)}; expected SpikeSettings(...), or none to switch detection off"
            )
        for number, one in enumerate(self.data):
            if not isinstance(one, DataFile):
                raise ExperimentError(
                    f"data[{number}] is {_kind(one)}; expected a DataFile(path, bytes, sha256) for each data file"
                )
        self._refuse_unreadable()

    def _refuse_unreadable(self) -> None:
        """What is refused only once a step is performed costs that step; and a run without a manifest can't be read."""
        given: dict[str, Any] = {
            "rebuild": self.rebuild,
            "data": list(self.data),
            "save_every": self.save_every,
            "keep_last": self.keep[0],
            "keep_every": self.keep[1],
            "spikes": None if self.spikes is None else asdict(self.spikes),
            "recovery": asdict(self.recovery),
            "parent": self.parent,
            "ignore": list(self.ignore),
        }
        for name, value in given.items():
            try:
                msgspec.json.encode(value)
            except (TypeError, ValueError, OverflowError, RecursionError) as error:
                raise ExperimentError(f"{name} can't be kept in the manifest, which is JSON: {error}") from error
        try:
            parsed(pretty_json(Manifest(**_OF_NO_RUN, **given)), Path(NAME))
        except RunError as error:
            raise ExperimentError(f"the manifest of this run could not be read again: {error}") from error


_OF_NO_RUN: dict[str, Any] = {
    **dict.fromkeys(("run", "workbench", "fingerprint"), ""),
    **dict.fromkeys(("options", "optimizer", "owned"), {}),
    **dict.fromkeys(("layers", "parameters"), []),
    "created": 0.0,
    "segments": [Segment(segment=0, start=0, parent=None, t=0.0, environment={})],
}


def _kind(value: Any) -> str:
    return f"of type {type(value).__name__}"


def _whole(name: str, value: Any, least: int, otherwise: str = "") -> int:
    found = whole(value)
    if found is None or not least <= found < 2**63:
        raise ExperimentError(f"{name} is {value!r}; expected a whole number, {least} or more{otherwise}")
    return found


def refuse_out_of_range(
    save_every: int, black_box: int, keep_last: int | None, keep_every: int | None, batch_budget: int = 0
) -> None:
    """
    Raises:
        ExperimentError: one of them is no whole number, or less than it can be.
    """
    for name, value in (("save_every", save_every), ("black_box", black_box)):
        _whole(name, value, 0, " (0: never)")
    for name, thinned in (("keep_last", keep_last), ("keep_every", keep_every)):
        if thinned is not None:
            _whole(name, thinned, 1, ", or none to keep every checkpoint")
    _whole("batch_budget", batch_budget, 0, ", of bytes")


def files(data: Any) -> list[DataFile]:
    """The data files of a run.

    Raises:
        ExperimentError: they are no list.
    """
    if not isinstance(data, (list, tuple)):
        raise ExperimentError(f"data is {_kind(data)}; expected a list of DataFile, empty if there are none")
    return list(data)


def refuse_other_fork(fork: Any) -> None:
    """Raises ExperimentError: it is neither a point of a run nor none."""
    if fork is not None and not hasattr(fork, "parent"):
        raise ExperimentError(
            f"fork is {fork!r}; expected what workbench.fork_point(run, step) returns, or none to begin anew"
        )


def way_to_rebuild(factory: str | None, arguments: dict[str, Any] | None) -> dict[str, Any]:
    """The manifest's `rebuild` for a factory and its arguments, or (None) for the script that is running.

    Raises:
        ExperimentError: the factory is no text, or the arguments are no dict of JSON values.
    """
    if factory is not None and not isinstance(factory, str):
        raise ExperimentError(f'factory is {factory!r}; expected text, "module:function", or none')
    if arguments is not None and not isinstance(arguments, dict):
        raise ExperimentError(f"arguments is {_kind(arguments)}; expected a dict of what the factory is called with")
    if factory:
        held = plain_json(_of_numpy(arguments or {}), "arguments", "the call of the recorder")
        return {"kind": "factory", "factory": factory, "arguments": held}
    return {"kind": "none"} | script.description()


def _of_numpy(value: Any) -> Any:
    """With Python's numbers in place of numpy's, all the way down."""
    if isinstance(value, dict):
        return {key: _of_numpy(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_of_numpy(item) for item in value]
    if isinstance(value, np.generic):
        return next((one for one in (truth(value), real(value)) if one is not None), value)
    return value


def validation_loss(loss: Any) -> float:
    """A loss that is to be logged, as Python's own number.

    Args:
        loss: a number of Python or numpy, or an array of one.

    Raises:
        ExperimentError: it is none.
    """
    value = loss.item() if isinstance(loss, (mx.array, np.ndarray)) and loss.size == 1 else loss
    if (found := real(value)) is None:
        what = f"an array of shape {tuple(loss.shape)}" if isinstance(loss, (mx.array, np.ndarray)) else repr(loss)
        raise ExperimentError(f"the validation loss is {what}; expected one number, such as a mean over the batches")
    return float(found)


def copy_file(given: str | os.PathLike[str] | None) -> Path | None:
    """The file that receives each telemetry line, too; None: none does.

    Raises:
        ExperimentError: it is no path of a file.
    """
    if given is None:
        return None
    if not isinstance(given, (str, os.PathLike)):
        raise ExperimentError(f"copy_telemetry_to is {given!r}; expected the path of a file, or none")
    path = Path(given)
    if path.is_dir():
        raise ExperimentError(f"copy_telemetry_to is {path}, a folder; expected the path of a file in it")
    return path


def names_of(ignore: Sequence[str] | str) -> tuple[str, ...]:
    """
    Raises:
        ExperimentError: they are no names.
    """
    if not isinstance(ignore, Iterable):
        raise ExperimentError(f"ignore is {ignore!r}; expected names of what the step changes, such as ('gstep',)")
    names = (ignore,) if isinstance(ignore, str) else tuple(ignore)
    if odd := [name for name in names if not isinstance(name, str) or not name.strip(".")]:
        raise ExperimentError(f"ignore has {odd[0]!r}; expected names of what the step changes, such as ('gstep',)")
    return names


def goes_on(resume: bool | int | str, path: Path) -> bool | int:
    """What `resume` asks for: "auto" goes on with the run that the folder holds, if it holds one.

    Raises:
        ExperimentError: it is something else.
    """
    if isinstance(resume, str) and resume == "auto":
        return (path / NAME).exists()
    found = whole(resume) if truth(resume) is None else truth(resume)
    if found is None:
        a_number = f" as a number, resume={int(resume)}" if isinstance(resume, str) and resume.isdecimal() else ""
        raise ExperimentError(
            f'resume is {resume!r}; expected True, False, "auto", or the step of a checkpoint{a_number}'
        )
    return found
