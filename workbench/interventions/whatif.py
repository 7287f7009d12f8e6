"""What if: experiments on a step of a run, each with exactly one change, as a table beside the untouched replay.

Each is written to a file of its own, `SSSSSSSS.whatif-CHANGE.json` among the traces, and never as a replay.
Knows the format and a run; performing is left to `intervene`, so reading needs no MLX.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
import pandas as pd

from ..bits import bits_float, float_bits, json_float
from ..errors import ExperimentError, ReplayError, WorkbenchError
from ..files import pretty_json, write_atomic
from ..trace import Difference
from ..traces import put
from ..untrusted import decode, read_file
from .changes import Change, parse_change

if TYPE_CHECKING:
    from ..run import Run
    from .effect import Effect
    from .scene import Scene

VERSION = 1
COLUMNS = (
    *("change", "loss", "loss_untouched", "grad_norm", "update_norm", "worst", "worst_ratio"),
    *("next_mean", "next_max", "steps", "compiled", "notes"),
)


class Measured(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """An `Effect` as JSON. A number that is not finite is null, and its bits say what it is."""

    loss: float | None
    loss_bits: str | None  # null: the step was skipped
    grad_norm: float | None  # before clipping
    grad_norm_bits: str | None
    update_norm: float | None
    update_norm_bits: str | None
    updates: dict[str, float | None]  # L2 norm of each parameter's update
    ratios: dict[str, float | None]  # the same over the norm of the parameter before the step; null where that is 0
    worst: str | None  # the parameter with the largest ratio
    next_losses: list[float | None]
    next_losses_bits: list[str]


class WhatIfRecord(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One experiment: the JSON form."""

    whatif_version: Literal[1] = 1
    run: str
    step: int
    segment: int
    provenance: Literal["intervention"] = "intervention"
    change: str  # as `parse_change` reads it
    once: bool  # a changed setting held for this step only
    exact: bool  # the untouched replay had the run's bits
    first_difference: Difference | None  # of the untouched replay from the run
    untouched: Measured
    changed: Measured
    next_steps: list[int]  # what `next_losses` are of
    steps: int  # computed for the changed one
    compiled: bool
    notes: list[str]
    checkpoint: int  # step of the checkpoint that was restored
    rolled: int
    environment: dict[str, Any]
    environment_differences: list[str]
    options: dict[str, Any]  # the run's own
    wall_s: float
    refused: str | msgspec.UnsetType = msgspec.UNSET  # why the change could not be made: nothing was measured, no file


def schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of the file of an experiment."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **msgspec.json.schema(WhatIfRecord)}


_NOTHING = Measured(
    loss=None,
    loss_bits=None,
    grad_norm=None,
    grad_norm_bits=None,
    update_norm=None,
    update_norm_bits=None,
    updates={},
    ratios={},
    worst=None,
    next_losses=[],
    next_losses_bits=[],
)


def measured(effect: Effect) -> Measured:
    scalars = {"loss": effect.loss, "grad_norm": effect.grad_norm, "update_norm": effect.update_norm}
    fields: dict[str, Any] = {
        "updates": {path: json_float(value) for path, value in effect.updates.items()},
        "ratios": {path: json_float(value) for path, value in effect.ratios.items()},
        "worst": None if effect.worst is None else effect.worst[0],
        "next_losses": [json_float(value) for value in effect.next_losses],
        "next_losses_bits": [float_bits(value) for value in effect.next_losses],
    }
    for name, value in scalars.items():
        fields |= {
            name: None if value is None else json_float(value),
            f"{name}_bits": None if value is None else float_bits(value),
        }
    return Measured(**fields)


# ---- doing it


def experiments(
    run: Run,
    step: int,
    changes: Sequence[str | Change],
    *,
    next_steps: int = 8,
    once: bool = False,
    scene: Scene | None = None,
    trace_dir: Path | None = None,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
    **opening: Any,
) -> tuple[list[WhatIfRecord], list[Path], list[str]]:
    """See `Run.whatif`; returns the records, the files of those that were performed, and notices.

    A change that can't be made in this run stands among the records with its reason, unless none can.
    """
    from .intervene import intervene  # imports MLX
    from .scene import Scene

    parsed = list(dict.fromkeys(parse_change(change) if isinstance(change, str) else change for change in changes))
    if not parsed:
        raise WorkbenchError("no change was given; expected at least one, as in --set lr=0.5x (changes=['lr=0.5x'])")
    if next_steps < 0:
        raise WorkbenchError(f"{next_steps} steps after the changed one were asked for; expected 0 or more")
    if scene is None:
        earliest = min([change.value for change in parsed if change.name == "state"], default=step - 1)
        context = max(0, step - 1 - earliest)
        scene = Scene.open(run, step, context=context, next_steps=next_steps, progress=progress, **opening)
    untouched, records, files, notices = measured(scene.untouched(next_steps)), [], [], list(scene.notices)
    for number, change in enumerate(parsed):
        progress(number, len(parsed), f"step {step} with {change}")
        began = time.perf_counter()
        effect: Effect | None = None
        refused: str | msgspec.UnsetType = msgspec.UNSET
        try:
            effect = intervene(scene, change, next_steps, once=once)
        except (ExperimentError, ReplayError) as error:
            if len(parsed) == 1:
                raise
            refused = str(error)
        record = WhatIfRecord(
            run=run.manifest.run,
            step=scene.step,
            segment=run.manifest.lineage(scene.segment, scene.step),
            change=str(change),
            once=once and change.lasts,
            exact=scene.exact,
            first_difference=scene.first_difference,
            untouched=untouched,
            changed=_NOTHING if effect is None else measured(effect),
            next_steps=[scene.step + 1 + place for place in range(len(effect.next_losses) if effect else 0)],
            steps=effect.steps if effect else 0,
            compiled=effect.compiled if effect else False,
            notes=effect.notes if effect else [f"not performed: {refused}"],
            checkpoint=scene.checkpoint,
            rolled=scene.rolled,
            environment=scene.environment,
            environment_differences=scene.unlike,
            options=run.manifest.options,
            wall_s=round(time.perf_counter() - began, 3),
            refused=refused,
        )
        records.append(record)
        if effect is not None:
            path, where = put(run, trace_dir, partial(_put, record))
            files.append(path)
            notices += [notice for notice in (*where, *scene.notices) if notice not in notices]
    if not files:
        raise ExperimentError("; ".join(f"{record.change}: {record.refused}" for record in records))
    return records, files, notices


# ---- as a table


def table(records: Sequence[WhatIfRecord]) -> pd.DataFrame:
    """One row an experiment of one step, the untouched replay first: the columns are `COLUMNS`.

    `loss` and `grad_norm` are step N's (NaN where it was skipped), `update_norm` is the L2 norm of its update,
    `worst_ratio` that of `worst`, the parameter that moved most for its size; `next_mean` and `next_max` are of the
    losses of the steps after it; `steps` is how many were computed: 0 where a change could not be made, and then
    `notes` says why. `attrs` has the sentence about the replay.
    """
    first = records[0]
    following = max((record.next_steps for record in records), key=len)
    rows = [_row("untouched", first.untouched, first)]
    rows[0] |= {"steps": 1 + len(following), "compiled": first.options.get("compile") is True, "notes": ""}
    rows += [_row(record.change + (" (once)" if record.once else ""), record.changed, record) for record in records]
    frame = pd.DataFrame(rows, columns=list(COLUMNS))
    frame.attrs["sentence"] = sentence(first)
    return frame


def _row(name: str, one: Measured, record: WhatIfRecord) -> dict[str, Any]:
    following = np.array([float(bits_float(bits)) for bits in one.next_losses_bits])
    ratio = None if one.worst is None else one.ratios[one.worst]
    return {
        "change": name,
        "loss": _number(one.loss_bits),
        "loss_untouched": _number(record.untouched.loss_bits),
        "grad_norm": _number(one.grad_norm_bits),
        "update_norm": _number(one.update_norm_bits),
        "worst": one.worst or "",
        "worst_ratio": float("nan") if ratio is None else ratio,
        "next_mean": float(following.mean()) if following.size else float("nan"),
        "next_max": float(following.max()) if following.size else float("nan"),
        "steps": record.steps,
        "compiled": record.compiled,
        "notes": "; ".join(record.notes),
    }


def _number(bits: str | None) -> float:
    return float("nan") if bits is None else float(bits_float(bits))


def sentence(record: WhatIfRecord) -> str:
    """What the untouched replay, with which everything is compared, is worth."""
    unlike = " (informational: this machine differs from the run's)" if record.environment_differences else ""
    if record.exact:
        return f"The untouched replay of step {record.step} has the run's bits{unlike}."
    if record.first_difference is None:
        return f"The untouched replay of step {record.step} is unverified: the run logged too little of it{unlike}."
    difference = record.first_difference
    return (
        f"The untouched replay of step {record.step} is not exact (first difference: {difference.item} at step "
        f"{difference.step}), so these experiments are on another step than the run's{unlike}."
    )


# ---- files


def _put(record: WhatIfRecord, folder: Path, notices: list[str]) -> Path:
    return write(record, folder)


def write(record: WhatIfRecord, folder: Path) -> Path:
    """Writes ``SSSSSSSS.whatif-CHANGE.json`` (``SSSSSSSS.sK.…`` in segment K), validated; returns its path.

    Raises:
        OSError: the folder can't be written.
    """
    data = pretty_json(record)
    msgspec.json.decode(data, type=WhatIfRecord)  # what we publish must be what we read
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{record.step:08d}{f'.s{record.segment}' if record.segment else ''}"
    path = folder / f"{stem}.whatif-{record.change}{'-once' if record.once else ''}.json"
    write_atomic(path, data)
    return path


def read(path: Path) -> WhatIfRecord:
    """Reads the file of an experiment.

    Raises:
        WorkbenchError: it is missing, damaged, or of another version.
    """
    try:
        return decode(read_file(Path(path)), WhatIfRecord)
    except OSError as error:
        raise WorkbenchError(f"{path} can't be read ({error.strerror}); expected an experiment's file") from error
    except ValueError as error:
        raise WorkbenchError(f"{path} is not an experiment of version {VERSION}: {error}. Make it again.") from error


def document(records: Sequence[WhatIfRecord], files: Sequence[Path], notices: Sequence[str]) -> Mapping[str, Any]:
    """The JSON answer of the command line."""
    paths = iter(files)
    return {
        "sentence": sentence(records[0]),
        "notices": list(notices),
        "experiments": [
            msgspec.to_builtins(record) | {"file": None if record.refused else str(next(paths))} for record in records
        ],
    }
