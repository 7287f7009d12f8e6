"""One planter a fault: what it adds to a recipe, to the run's data files, or to what a recorder does on the way.

Knows recipes, alterations of the data and edits of the state; nothing of runs, and writes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from .. import state_edits
from ..errors import ExperimentError
from ..faults import Fault
from ..recorded.planted import SOURCES as SOURCES
from ..trainer.corpus import Corpus
from ..trainer.model import parameter_shapes
from ..trainer.recipe import TrainConfig
from ..trainer.schedule import RateChange
from ..trainer.scheduled import AdamChange, Drift
from .alterations import How, Relabelling, Repetition, Substitution
from .saboteur import Acts, Edit, GradientFlip


@dataclass(frozen=True)
class Mark:
    """What a planter knows for the label."""

    culprit: dict[str, Any]
    shows: int | None
    rows: tuple[int, ...] = ()
    verdict: str | None = None  # None: as the table has it


class Plot:
    """What has been planted so far.

    Attributes:
        config: the recipe, with what was planted so far.
        corpora: the run's own.
        sources: data files to write, their paths relative to the run's folder.
        acts: what to do while recording.
    """

    def __init__(self, config: TrainConfig, corpora: Sequence[Corpus]) -> None:
        self.config, self.corpora = config, corpora
        self.sources: list[Corpus] = []
        self.edits: dict[int, list[Edit]] = {}
        self.gradients: dict[int, list[GradientFlip]] = {}
        self.losses: dict[int, list[int]] = {}
        self.acts = Acts(self.edits, self.gradients, self.losses)

    @property
    def vocabulary(self) -> int:
        return min(self.config.model.vocabulary, max(corpus.vocabulary for corpus in self.corpora))

    def change(self, **fields: Any) -> None:
        self.config = msgspec.structs.replace(self.config, **fields)

    def rows(self, fault: Fault) -> tuple[int, ...]:
        """A few bad rows stand in the middle of the batch, as they would among shuffled data."""
        batch = self.config.batch * self.config.accumulate
        count = batch if fault.text("rows") == "all" else fault.whole("rows", 1, batch)
        first = (batch - count) // 2
        return tuple(range(first, first + count))

    def middle(self, fault: Fault, key: str) -> str:
        return fault.text(key).replace("MIDDLE", f"blocks.{self.config.model.depth // 2}")

    def parameter(self, fault: Fault, path: str) -> tuple[int, ...]:
        """The shape of a trained parameter.

        Raises:
            ExperimentError: there is none of this path.
        """
        frozen = tuple(f"{layer}." for layer in self.config.freeze)
        shapes = {p: shape for p, shape in parameter_shapes(self.config.model).items() if not p.startswith(frozen)}
        if path not in shapes:
            raise ExperimentError(f"fault {fault} names {path}; expected a parameter: {', '.join(shapes)}")
        return shapes[path]

    def element(self, fault: Fault) -> tuple[str, int, int]:
        """Path, index and bit of the keys; the bits of 16-bit numbers are counted as those of float32 by default."""
        path = self.middle(fault, "path")
        index = fault.whole("index", 0, math.prod(self.parameter(fault, path)) - 1)
        width = 32 if self.config.model.dtype == "float32" else 16
        return path, index, fault.whole("bit", 0, width - 1, default=int(fault.kind.keys["bit"]) - 32 + width)


# ---- data


def _substitute(plot: Plot, fault: Fault, tokens: np.ndarray) -> Mark:
    """Rows from a source made for them; tokens are (rows, ctx + 1)."""
    kind, rows, number = plot.corpora[0].kind, plot.rows(fault), len(plot.sources) + 1
    name = f"{number}{'.bin' if kind == 'uint16' else '.bytes'}"
    written = tokens.ravel().astype("<u2" if kind == "uint16" else np.uint8)
    plot.sources.append(Corpus(Path(SOURCES, name), written, kind))
    offsets = tuple(i * tokens.shape[1] for i in range(len(rows)))
    added = Substitution(fault.step, rows, len(plot.corpora) - 1 + number, offsets)
    plot.change(substitutions=(*plot.config.substitutions, added))
    return Mark({}, fault.step, rows)


def _garbage(plot: Plot, fault: Fault) -> Mark:
    shape = (len(plot.rows(fault)), plot.config.model.ctx + 1)
    words = np.random.Philox(key=[plot.config.seed, fault.step]).random_raw(math.prod(shape))
    return _substitute(plot, fault, (words % np.uint64(plot.vocabulary)).reshape(shape))


def _repeated_token(plot: Plot, fault: Fault) -> Mark:
    token = fault.whole("token", 0, plot.vocabulary - 1)
    return _substitute(plot, fault, np.full((len(plot.rows(fault)), plot.config.model.ctx + 1), token))


def _relabel(how: How, plot: Plot, fault: Fault) -> Mark:
    rows = plot.rows(fault)
    amount = {"shift": lambda: fault.whole("by", 1, plot.config.model.ctx - 1), "shuffle": lambda: plot.config.seed}
    added = Relabelling(fault.step, rows, how, amount.get(how, lambda: 0)())
    plot.change(relabellings=(*plot.config.relabellings, added))
    return Mark({}, fault.step, rows)


def _repeated_batch(plot: Plot, fault: Fault) -> Mark:
    of = fault.whole("of", 1, plot.config.steps, default=fault.step - 1)
    added = Repetition(fault.step, of)
    plot.change(repetitions=(*plot.config.repetitions, added))
    return Mark({"of": of}, fault.step)


# ---- schedule and options


def _lr(plot: Plot, fault: Fault) -> Mark:
    until = None if fault.text("until") == "end" else fault.whole("until", fault.step, 2**53 - 1, default=fault.step)
    added = RateChange(step=fault.step, until=until, factor=fault.number("factor"))
    schedule = plot.config.schedule
    plot.change(schedule=msgspec.structs.replace(schedule, changes=(*schedule.changes, added)))
    return Mark({}, fault.step + 1)


def _no_clip(plot: Plot, fault: Fault) -> Mark:
    plot.change(clip=None)
    return Mark({"option": "clip"}, None)


def _until(fault: Fault) -> int | None:
    """The last step that an option holds for; None: all."""
    return None if fault.text("for") == "end" else fault.step + fault.whole("for", 1, 2**53 - 1) - 1


def _adam(option: Literal["beta2", "eps"], below: float, plot: Plot, fault: Fault) -> Mark:
    value, until = fault.number("value", below), _until(fault)
    if fault.step == 1 and until is None:
        plot.change(adamw=msgspec.structs.replace(plot.config.adamw, **{option: value}))
    else:
        added = AdamChange(step=fault.step, until=until, option=option, value=value)
        plot.change(adam_changes=(*plot.config.adam_changes, added))
    small = option == "eps" and plot.config.model.dtype == "float16"  # v underflows, and updates of m / eps overflow
    return Mark({"option": option}, None, verdict="precision" if small else None)


def _attention_growth(plot: Plot, fault: Fault) -> Mark:
    layer, growth = plot.middle(fault, "layer"), fault.number("growth", 10.0)
    if growth <= 1:
        raise ExperimentError(f"fault {fault} has growth={fault.text('growth')}; expected a factor above 1")
    paths = f"{layer}.query.weight", f"{layer}.key.weight"
    for path in paths:
        plot.parameter(fault, path)
    added = Drift(step=fault.step, until=_until(fault), growth=growth, parameters=paths)
    plot.change(drifts=(*plot.config.drifts, added))
    return Mark({"layer": layer}, None)


def _unstable_rate(plot: Plot, fault: Fault) -> Mark:
    schedule = msgspec.structs.replace(plot.config.schedule, kind="constant", max_lr=fault.number("rate"))
    plot.change(schedule=schedule)
    return Mark({}, None)


def _frozen(plot: Plot, fault: Fault) -> Mark:
    layer = plot.middle(fault, "layer")
    if not any(path.startswith(f"{layer}.") for path in parameter_shapes(plot.config.model)):
        raise ExperimentError(f"fault {fault} names the layer {layer}, which the model does not have")
    plot.change(freeze=(*plot.config.freeze, layer))
    return Mark({"layer": layer}, None)


# ---- edits of the state


def _edit(plot: Plot, fault: Fault, edit: Edit, lanes: Sequence[str], *, shows_at_once: bool, **culprit: Any) -> Mark:
    """Edited moments show in the loss only after the update that used them."""
    plot.edits.setdefault(fault.step, []).append(edit)
    return Mark({"lanes": list(lanes)} | culprit, fault.step + (not shows_at_once))


def _moments_zeroed(plot: Plot, fault: Fault) -> Mark:
    of = fault.choice("of", ["m", "v", "both"])
    leaves = ("m", "v") if of == "both" else (of,)
    lanes = [f"adam_{leaf}" for leaf in leaves]
    return _edit(plot, fault, lambda state, first: state_edits.zeroed(state, leaves), lanes, shows_at_once=False)


def _moments_swapped(plot: Plot, fault: Fault) -> Mark:
    lanes = ["adam_m", "adam_v"]
    return _edit(plot, fault, lambda state, first: state_edits.swapped(state), lanes, shows_at_once=False)


def _v_scaled(plot: Plot, fault: Fault) -> Mark:
    factor = fault.number("factor")
    change: Edit = lambda state, first: state_edits.scaled_moment(state, "v", factor)  # noqa: E731
    return _edit(plot, fault, change, ["adam_v"], shows_at_once=False)


def _lost(part: str, lanes: Sequence[str], plot: Plot, fault: Fault) -> Mark:
    if part == "rng" and not plot.config.model.dropout:
        raise ExperimentError(f"fault {fault} does nothing without dropout, which alone draws random numbers")
    change: Edit = lambda state, first: replace(state, **{part: getattr(first, part)})  # noqa: E731
    return _edit(plot, fault, change, lanes, shows_at_once=part != "optimizer")


def _scaled(path: str, plot: Plot, fault: Fault) -> Mark:
    plot.parameter(fault, path)
    factor = fault.number("factor")
    change: Edit = lambda state, first: state_edits.scaled_weight(state, path, factor)  # noqa: E731
    return _edit(plot, fault, change, ["weights"], shows_at_once=True, **_where(path))


def _weight_scaled(plot: Plot, fault: Fault) -> Mark:
    return _scaled(plot.middle(fault, "path"), plot, fault)


def _attention_scaled(plot: Plot, fault: Fault) -> Mark:
    return _scaled(f"{plot.middle(fault, 'layer')}.query.weight", plot, fault)


def _bit(leaf: str, plot: Plot, fault: Fault) -> Mark:
    path, index, bit = plot.element(fault)
    change: Edit = lambda state, first: state_edits.flipped(state, leaf, path, index, bit)  # noqa: E731
    lane = {"weight": "weights"}.get(leaf, f"adam_{leaf}")
    place = _where(path) | {"index": index, "bit": bit}
    mark = _edit(plot, fault, change, [lane], shows_at_once=leaf == "weight", **place)
    exponent = {"float32": 23, "float16": 10, "bfloat16": 7}[plot.config.model.dtype]  # its lowest bit
    return mark if bit >= exponent else replace(mark, verdict="no-spike")


def _where(path: str) -> dict[str, str]:
    return {"layer": path.rpartition(".")[0], "parameter": path}


# ---- transient


def _gradient_bit(plot: Plot, fault: Fault) -> Mark:
    path, index, bit = plot.element(fault)
    plot.gradients.setdefault(fault.step, []).append(GradientFlip(path, index, bit))
    return Mark(_where(path) | {"index": index, "bit": bit}, fault.step)


def _log_bit(plot: Plot, fault: Fault) -> Mark:
    bit = fault.whole("bit", 0, 31)
    plot.losses.setdefault(fault.step, []).append(bit)
    return Mark({"item": "loss", "bit": bit}, fault.step)


PLANTERS: dict[str, Callable[[Plot, Fault], Mark]] = {
    "garbage": _garbage,
    "repeated-token": _repeated_token,
    "targets-shifted": partial(_relabel, "shift"),
    "targets-shuffled": partial(_relabel, "shuffle"),
    "targets-ignored": partial(_relabel, "ignore"),
    "repeated-batch": _repeated_batch,
    "lr": _lr,
    "no-clip": _no_clip,
    "beta2": partial(_adam, "beta2", 1.0),
    "eps": partial(_adam, "eps", math.inf),
    "attention-growth": _attention_growth,
    "unstable-rate": _unstable_rate,
    "frozen": _frozen,
    "moments-zeroed": _moments_zeroed,
    "moments-swapped": _moments_swapped,
    "v-scaled": _v_scaled,
    "lost-optimizer": partial(_lost, "optimizer", ("adam_m", "adam_v", "other")),
    "lost-cursor": partial(_lost, "cursor", ("cursor",)),
    "lost-rng": partial(_lost, "rng", ("rng",)),
    "attention-scaled": _attention_scaled,
    "weight-scaled": _weight_scaled,
    "weight-bit": partial(_bit, "weight"),
    "m-bit": partial(_bit, "m"),
    "v-bit": partial(_bit, "v"),
    "gradient-bit": _gradient_bit,
    "log-bit": _log_bit,
}
