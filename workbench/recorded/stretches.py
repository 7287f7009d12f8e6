"""The telemetry as its writers left it: a stretch for each meta line, with which fields its step lines have.

Knows which fields stand in a line, not what they say; that is `telemetry`'s, which has read the file before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ..untrusted import open_regular

# What a recorder writes in every step line, or in none that one process writes. `before` and `unstable` come and go.
FIELDS = (
    *("t", "elapsed_s", "loss", "loss_bits", "lr", "grad_norm", "grad_norm_bits", "per_layer_act_norms"),
    *("per_layer_grad_norms", "adam_m_norms", "adam_v_norms", "batch_hash", "state", "step_per_s", "peak_rss_mb"),
    *("ma", "spike", "spike_rule"),
)
EVIDENCE = (
    *("loss", "lr", "grad_norm", "per_layer_act_norms", "per_layer_grad_norms", "adam_m_norms", "adam_v_norms"),
    *("batch_hash", "state"),
)

_Line = msgspec.defstruct(
    "_Line",
    [
        ("type", str),
        ("segment", int, 0),
        ("step", int, -1),
        ("process", str, ""),
        ("left", int, -1),
        ("unstable_step", int, -1),
        ("state", dict[str, msgspec.Raw] | msgspec.UnsetType, msgspec.UNSET),
        *[(name, msgspec.Raw, msgspec.Raw()) for name in FIELDS if name != "state"],
    ],
)


@dataclass
class Stretch:
    """The step lines from one meta line to the next.

    Attributes:
        segment: that the meta line names; None: there is no meta line before these steps.
        start: the step whose state the meta line is of.
        process: that wrote it.
        rolled_back: (segment, step) that was taken back just before it; None: none was.
        steps: (segment, step) of each line, in file order.
        lanes: of which parts of the state a line has fingerprints, and the lines that have just these.
        began: the same of the meta line; empty without one.
        fields: which of `FIELDS` a line has, and the lines that have just these.
        done: the step that a line says it was done at; None: no line does.
        after_done: step lines that come after that one.
    """

    segment: int | None
    start: int = 0
    process: str = ""
    rolled_back: tuple[int, int] | None = None
    steps: list[tuple[int, int]] = field(default_factory=list)
    lanes: dict[tuple[str, ...], list[int]] = field(default_factory=dict)
    began: tuple[str, ...] = ()
    fields: dict[tuple[bool, ...], list[int]] = field(default_factory=dict)
    done: int | None = None
    after_done: int = 0

    @property
    def last(self) -> int:
        """The last step; where none was performed, that of the state it started from."""
        return self.steps[-1][1] if self.steps else self.start


def stretches(path: Path) -> list[Stretch]:
    """Reads a telemetry file that `telemetry.read` has accepted; what is unfinished or blank is passed over.

    Raises:
        OSError: it can't be read any more.
    """
    found = [Stretch(None)]
    rolled_back = None
    for line in _lines(path):
        if line.type == "rollback":
            rolled_back = (line.left, line.unstable_step)
        elif line.type == "meta":
            found.append(Stretch(line.segment, max(line.step, 0), line.process, rolled_back, began=_lanes(line)))
            rolled_back = None
        elif line.type == "done":
            found[-1].done, found[-1].after_done = line.step, 0
        elif line.type == "step":
            stretch = found[-1]
            stretch.steps.append((line.segment, line.step))
            stretch.after_done += stretch.done is not None
            stretch.lanes.setdefault(_lanes(line), []).append(line.step)
            has = tuple([_has(getattr(line, name)) for name in FIELDS])
            stretch.fields.setdefault(has, []).append(line.step)
    return found if found[0].steps or found[0].done is not None else found[1:]


def _lanes(line: Any) -> tuple[str, ...]:
    return () if line.state is msgspec.UNSET else tuple(line.state)


def _has(value: Any) -> bool:
    return bool(memoryview(value)) if isinstance(value, msgspec.Raw) else value is not msgspec.UNSET


def _lines(path: Path) -> Iterator[Any]:
    decoder = msgspec.json.Decoder(_Line)
    with open_regular(path) as file:
        for raw in file:
            try:
                yield decoder.decode(raw)
            except (msgspec.MsgspecError, ValueError, RecursionError):
                continue
