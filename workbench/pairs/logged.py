"""What two runs logged, side by side: the steps that both have, and the first item of a step in which they differ.

Knows runs and telemetry; nothing of settings or causes. Needs no MLX.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
from msgspec import UNSET

from ..bits import array_bits, float_bits, ulp_distance
from ..compare import ESSENTIAL, ITEMS, Verdict
from ..errors import ReplayError, RunError
from ..lines.line import ARRAYS, SCALARS, Line
from ..run import Run
from .comparison import Parting


@dataclass
class Logged:
    """One run, and the way through its segments that is looked at.

    Attributes:
        segment: the one that the way leads to.
        lines: the step lines on it, by step, in order.
        notices: what the reader had to choose.
    """

    run: Run
    segment: int
    lines: dict[int, Line]
    notices: list[str]

    @classmethod
    def of(cls, run: Run, segment: int | None = None) -> Logged:
        """The way that leads to a segment; None: the one that goes farthest, if all agree on the steps they share.

        Raises:
            RunError: there is no such segment.
            ReplayError: segments disagree, and none was chosen.
        """
        having: dict[int, list[Line]] = {}
        for line in run.telemetry.lines:
            if line.type == "step" and line.step is not UNSET:
                having.setdefault(line.step, []).append(line)
        notices = []
        if segment is None:
            twice = {step: lines for step, lines in having.items() if len(lines) > 1}
            for step, several in twice.items():
                if any(line.evidence() != several[0].evidence() for line in several[1:]):
                    raise ReplayError(
                        f"step {step} stands in segments {[line.segment for line in several]} of {run.path}, and their "
                        "records differ; choose one with --segment-a or --segment-b (segment_a=, segment_b=)"
                    )
            if twice:
                span = f"Steps {min(twice)} to {max(twice)}"
                notices.append(f"{span} of {run.name} stand in several segments with the same bits.")
            segment = having[max(having)][-1].segment if having else 0
        elif not 0 <= segment < len(run.manifest.segments):
            last = len(run.manifest.segments) - 1
            raise RunError(f"segment {segment} does not exist in {run.path}; it has segments 0 to {last}")
        found = {step: run.line(step, segment) for step in sorted(having)}
        return cls(run, segment, {step: line for step, line in found.items() if line is not None}, notices)

    @property
    def span(self) -> str:
        return f"steps {min(self.lines)} to {max(self.lines)}" if self.lines else "no steps"

    def bits(self, step: int, name: str) -> str | None:
        """Bits of a scalar."""
        number, bits = (getattr(self.lines[step], field) for field in (name, f"{name}_bits"))
        if bits is not UNSET:
            return bits
        return None if number is None or number is UNSET else float_bits(number)

    def lr(self, step: int) -> float | None:
        value = self.lines[step].lr
        return float(value) if isinstance(value, (int, float)) else None

    def edits(self, step: int) -> tuple[Any, dict[str, Any]]:
        """What the training loop changed in the state before a step: as its line says; and the lanes, as bits, with
        which its segment started, as far as they are not those that the step before had left."""
        line = self.lines[step]
        lanes = self.run.seam(line.segment) if step - 1 == self.run.manifest.segments[line.segment].start else []
        meta = self.run.telemetry.meta(line.segment) if lanes else None
        began = {} if meta is None else meta.evidence()
        return None if line.before is UNSET else line.before, {lane: began[f"state.{lane}"] for lane in lanes}

    def norms(self, step: int) -> str:
        """How the norms of a step were added."""
        return self.run.manifest.norms_of(self.lines[step].segment)


class Pair:
    """Two runs, on the steps that both have.

    Attributes:
        start: step of the state that both start from.
        steps: later ones that both logged, ascending.
    """

    def __init__(self, a: Logged, b: Logged) -> None:
        self.a, self.b = a, b
        self.start = max(side.run.manifest.segments[0].start for side in (a, b))
        self.steps = [step for step in a.lines if step in b.lines and step > self.start]
        self._same_layers = a.run.manifest.layers == b.run.manifest.layers
        self._same_method = a.run.manifest.fingerprint == b.run.manifest.fingerprint

    def notices(self) -> list[str]:
        """What can't be compared."""
        found = []
        if not self._same_layers:
            found.append("The models have other layers, so that the norms of layers are not compared.")
        elif any(self.a.norms(step) != self.b.norms(step) for step in self.steps):
            found.append("Norms were added in other ways, and where they were they are not compared.")
        if not self._same_method:
            found.append("The states were fingerprinted with other methods, so that they are not compared.")
        return found

    @cached_property
    def _environments(self) -> list[dict[str, Any]]:
        return [
            side.run.manifest.segments[segment].environment
            for side in (self.a, self.b)
            for segment in sorted({side.lines[step].segment for step in self.steps})
        ]

    def environments(self) -> list[dict[str, Any]]:
        """The numeric environments in which the steps were performed, a's first."""
        return self._environments

    def edits_differ(self, step: int) -> bool:
        """Whether the training loops changed different things in the state before a step."""
        left, right = (side.edits(step) for side in (self.a, self.b))
        return left != right

    def first_difference(self, step: int) -> tuple[str | None, Verdict]:
        """The first item in order of execution that differs, and the verdict on the step as a whole."""
        left, right, compared = self.a.lines[step], self.b.lines[step], set()
        for name in ITEMS:
            same = self._same(left, right, name, step)
            if same is False:
                return name, "mismatch"
            if same:
                compared.add(name)
        return None, "exact" if compared.issuperset(ESSENTIAL) else "unverified"

    def _same(self, left: Line, right: Line, name: str, step: int) -> bool | None:
        """Whether an item has the same bits; None: a side lacks it. Bits are made only of numbers that differ, as there
        are thousands of steps with hundreds of numbers."""
        if name in SCALARS:
            bits = [side.bits(step, name) for side in (self.a, self.b)]
            return None if None in bits else bits[0] == bits[1]
        if name in ARRAYS:
            if not self._same_layers or self.a.norms(step) != self.b.norms(step):
                return None
            sides = [(getattr(line, name), getattr(line, f"{name}_bits")) for line in (left, right)]
            if UNSET in (sides[0][0], sides[1][0]):
                return None
            return _encoded(sides[0]) == _encoded(sides[1]) or _array_bits(*sides[0]) == _array_bits(*sides[1])
        if name.startswith("state."):
            lane = name.removeprefix("state.")
            values = [None if line.state is UNSET else line.state.get(lane) for line in (left, right)]
            by_tensor = lane not in ("rng", "cursor")
            return None if None in values or (by_tensor and not self._same_method) else values[0] == values[1]
        if name != "batch_hash" or UNSET in (left.batch_hash, right.batch_hash):
            return None  # a checkpoint is no line's
        return left.batch_hash == right.batch_hash

    def evidence(self, step: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """What both logged of a step, or of the state that a run starts from, as bits; only what can be compared."""
        dropped = set[str]()
        both = step in self.a.lines and step in self.b.lines  # a fork has no line of the state that it starts from
        if not self._same_layers or (both and self.a.norms(step) != self.b.norms(step)):
            dropped |= set(ARRAYS)
        if not self._same_method:
            dropped |= {f"state.{lane}" for lane in ("weights", "adam_m", "adam_v", "other")}
        left, right = (
            {name: value for name, value in side.run.evidence(step, side.segment).items() if name not in dropped}
            for side in (self.a, self.b)
        )
        return left, right

    def parting(self, step: int, item: str) -> Parting:
        """Describes an item that differs at a step."""
        left, right = (side[item] for side in self.evidence(step))
        layer = None
        if isinstance(left, list) and len(left) != len(right):
            left, right = (f"{len(side)} entries" for side in (left, right))
        elif isinstance(left, list):
            where = [index for index, sides in enumerate(zip(left, right, strict=True)) if sides[0] != sides[1]]
            # Gradients flow backwards: the last differing layer was computed first.
            place = where[-1 if item == "per_layer_grad_norms" else 0]
            layer, left, right = self.a.run.manifest.layers[place], left[place], right[place]
        bits = all(isinstance(side, str) and side.startswith("0x") for side in (left, right))
        ulp = ulp_distance(left, right) if bits else None
        return Parting(step=step, item=item, layer=layer, a=left, b=right, ulp=ulp)

    def layer(self, step: int) -> Parting | None:
        """The first layer in which a step's norms differ, in order of execution."""
        left, right = self.a.lines[step], self.b.lines[step]
        names = (name for name in ITEMS if name in ARRAYS and self._same(left, right, name, step) is False)
        name = next(names, None)
        return None if name is None else self.parting(step, name)


def _array_bits(numbers: Any, bits: Any) -> list[str | None]:
    return array_bits(numbers, None if bits is UNSET else bits)


def _encoded(value: Any) -> bytes:
    """Equal numbers give equal bytes, and the two zeros other ones."""
    return msgspec.json.encode([None if part is UNSET else part for part in value])
