"""Whether the marks of spikes in telemetry follow from the losses and gradient norms beside them.

`ma`, `spike` and `spike_rule` are no measurements: a recorder derives them, in order, from what it logs. The same
detection over the same numbers has them again, to the last digit. Imports no MLX.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..bits import json_float
from ..enumeration import some
from ..spikes import SpikeDetector, SpikeSettings
from ..verification import Check
from .stretches import Stretch

if TYPE_CHECKING:
    from .recorded_run import RecordedRun


def marks(run: RecordedRun, wrote: Sequence[Stretch]) -> Iterator[Check]:
    """One check; none where no line has such a mark.

    Marks that differ are unverified, no mismatch: another version of the rules, and a resume with settings of its own,
    make them as well as an edit does.
    """
    frame = run.steps
    if run.manifest.spikes is None or not (frame["spike"].any() or frame["ma"].notna().any()):
        return
    settings = SpikeSettings(**run.manifest.spikes)
    rows = {(row["segment"], row["step"]): row for row in frame.to_dict("records")}
    detector, unlike = SpikeDetector(settings), list[int]()
    for number, stretch in enumerate(wrote):
        if number and not _goes_on(wrote[number - 1], stretch):
            detector.reset()  # and warm it up, as the recorder did
            for row in run.history(stretch.segment or 0, stretch.start, 6 * settings.window).to_dict("records"):
                _judge(detector, row)
        for key in stretch.steps:
            row = rows.get(key)
            if row is not None and _judge(detector, row) != _logged(row):
                unlike.append(key[1])
    if unlike:
        yield Check(
            "telemetry",
            "spike marks",
            "unverified",
            f"ma, spike or spike_rule of step{'' if len(unlike) == 1 else 's'} {some(unlike)} do not follow from the "
            "logged losses: they were edited, or made with other settings or by another version of the rules",
        )
    else:
        yield Check("telemetry", "spike marks", "exact", "they follow from the losses and gradient norms")


def _goes_on(before: Stretch, stretch: Stretch) -> bool:
    """Whether the recorder that wrote the one went on with the other, which knows of a segment that the loop opened.
    A resume in the same process is by another recorder."""
    same = stretch.process == before.process and stretch.rolled_back is None
    return same and before.done is None and stretch.start == before.last


def _judge(detector: SpikeDetector, row: dict[Any, Any]) -> tuple[float | None, str | None]:
    found = detector.update(
        row["step"],
        row["loss"] if row["loss_recorded"] else None,
        row["grad_norm"] if row["grad_norm_recorded"] else None,
    )
    return None if found.moving_average is None else json_float(found.moving_average), found.rule


def _logged(row: dict[Any, Any]) -> tuple[float | None, str | None]:
    average, rule = row["ma"], row["spike_rule"]
    marked = rule if isinstance(rule, str) else None
    if bool(row["spike"]) != (marked is not None):
        return float("nan"), marked  # equal to nothing
    return None if average != average else float(average), marked
