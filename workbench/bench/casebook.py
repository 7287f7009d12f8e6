"""SpikeBench's cases: which fault is planted how large, at which step, in which run. All of it follows from the seed.

Knows names and numbers; runs nothing. Rules of the autopsy may be derived from training seeds, those below
`FIRST_UNSEEN`, and the sizes tiny, short and shallow; figures to report come from other seeds, which also draw other
magnitudes, steps, rows and places, and from other sizes (`DEFAULT_SIZES`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ..errors import ExperimentError
from ..faults import KINDS

FIRST_UNSEEN = 1000  # seeds below are for deriving rules
DEFAULT_SEEDS = (1000, 1001)
HEALTHY = "healthy"
NATURAL = "natural"  # trained so fast that rules fire on their own: nothing is planted

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"preset": "tiny"},  # 2 blocks of width 64, 8 rows of 50 tokens
    "short": {"preset": "tiny", "ctx": 32},
    "shallow": {"depth": 1, "ctx": 32, "batch": 8},  # width 64, one head
    "long": {"preset": "tiny", "ctx": 72, "batch": 4, "tied": False},
    "wide": {"depth": 2, "ctx": 20, "batch": 6},  # width 128
}
DEFAULT_SIZES = ("tiny", "long", "wide")
QUICK_SIZES = ("shallow",)

HORIZON = 300  # updates of the schedule: a run that is stopped earlier has not decayed to a rate of 0
AFTER = 12  # steps that a run goes on after its fault: more than WITHIN
WITHIN = 10  # a fault is visible if a rule of spike detection fires at its step or so many steps later
QUIET = 60  # spike detection is silent in the first 50 steps; no healthy step is asked about before this one

Draw = Callable[[random.Random, Mapping[str, Any]], str]  # the value of a key, from the size's options too


class Case(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run to make and to ask about.

    Attributes:
        name: variant, seed and size.
        fault: as `workbench train --fault` takes it; None: a healthy run.
        steps: the last one that is trained; the schedule goes on to `HORIZON`.
        options: of `workbench train`, with underscores.
        ask: steps of a run without visible fault to ask about, the first ones that no rule flags.
        asks: how many of them.
        natural: ask about the first step that a rule flags instead, if any.
    """

    name: str
    fault: str | None
    seed: int
    size: str
    steps: int
    options: dict[str, Any]
    ask: list[int]
    asks: int
    natural: bool = False


@dataclass(frozen=True)
class Variant:
    """A fault and how large it is.

    Attributes:
        fault: its name; `HEALTHY` or `NATURAL`: none.
        keys: of the fault, fixed or drawn.
        options: of training that the fault needs to show, see `faults`.
        steps: first and last step at which it may be planted; where it holds for the whole run, or there is none, the
            length of the run.
        lasts: steps for which an option that is planted at a step holds; 0: it is planted at step 1, for good.
        asks: healthy steps to ask about.
        quick: whether it is one of the dozen of `--quick`.
    """

    name: str
    fault: str
    keys: Mapping[str, str | Draw] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    steps: tuple[int, int] = (110, 190)
    lasts: int = 0
    asks: int = 1
    quick: bool = False


def _rows(low: float, high: float) -> Draw:
    """A share of the batch's rows, at least one."""

    def draw(dice: random.Random, size: Mapping[str, Any]) -> str:
        batch = size.get("batch", 8)
        return str(max(1, min(batch, round(batch * (low + (high - low) * dice.random())))))

    return draw


def _log(low: float, high: float) -> Draw:
    """Evenly over the orders of magnitude; two digits."""
    return lambda dice, size: _rounded(math.exp(math.log(low) + math.log(high / low) * dice.random()))


def _number(low: float, high: float) -> Draw:
    return lambda dice, size: _rounded(low + (high - low) * dice.random())


def _rounded(value: float) -> str:
    return f"{float(f'{value:.2g}'):g}"  # 180, not 1.8e+02


def _whole(low: int, high: int) -> Draw:
    return lambda dice, size: str(_between(dice, low, high))


def _among(*words: str) -> Draw:
    return lambda dice, size: words[_between(dice, 0, len(words) - 1)]


def _between(dice: random.Random, low: int, high: int) -> int:
    return low + int((high - low + 1) * dice.random())  # of `random` only this method promises the same numbers forever


_PLACE = {
    "path": _among("MIDDLE.mlp.up.weight", "MIDDLE.attention.value.weight", "blocks.0.mlp.down.weight"),
    "index": _whole(0, 4095),  # the smallest of them in the smallest size has 64 · 64 elements
}
_ATTENDING: dict[str, Any] = {"max_lr": 3e-3}
_LATE = (200, 230)
_OPTION = (100, 130)

VARIANTS = (
    Variant("garbage-all", "garbage", quick=True),
    Variant("garbage-many", "garbage", {"rows": _rows(0.4, 0.8)}),
    Variant("garbage-one", "garbage", {"rows": "1"}),
    Variant("repeated-token-all", "repeated-token", {"token": _whole(0, 255)}),
    Variant("repeated-token-some", "repeated-token", {"rows": _rows(0.25, 0.5), "token": _whole(128, 255)}, quick=True),
    Variant("shifted-all", "targets-shifted", {"by": _whole(1, 9)}),
    Variant("shifted-many", "targets-shifted", {"rows": _rows(0.5, 0.8), "by": _whole(1, 9)}),
    Variant("shuffled-all", "targets-shuffled"),
    Variant("shuffled-many", "targets-shuffled", {"rows": _rows(0.5, 0.8)}, quick=True),
    Variant("ignored-all", "targets-ignored", quick=True),
    Variant("ignored-some", "targets-ignored", {"rows": _rows(0.2, 0.7)}),
    Variant("repeated-batch", "repeated-batch"),
    Variant("lr-step", "lr", {"factor": _log(60, 300)}, quick=True),
    Variant("lr-step-huge", "lr", {"factor": _log(300, 3000)}),
    Variant("lr-from", "lr", {"factor": _log(30, 100), "until": "end"}),
    Variant("no-clip", "no-clip", steps=_OPTION),
    Variant("beta2", "beta2", {"value": _number(0.4, 0.6)}, {"max_lr": 5e-3}, _OPTION),
    Variant("beta2-window", "beta2", {"value": _number(0.2, 0.4), "for": "20"}, {"max_lr": 5e-3}, (110, 150), 20),
    Variant("eps-float32", "eps", {"value": _log(1e-7, 1e-6)}, steps=_OPTION),
    Variant("eps-float16", "eps", {"value": "1e-7"}, {"dtype": "float16"}, (100, 100)),
    Variant("eps-float16-fast", "eps", {"value": "1e-7"}, {"dtype": "float16", "max_lr": 3e-3}, (40, 40)),
    Variant("eps-float16-zero", "eps", {"value": "1e-8"}, {"dtype": "float16"}, (20, 20)),  # below its smallest number
    Variant("frozen", "frozen", {"layer": _among("MIDDLE.mlp", "MIDDLE.attention")}, steps=_OPTION),
    Variant("attention-growth", "attention-growth", {"growth": _number(1.15, 1.3), "for": "40"}, {}, (110, 150), 40),
    Variant("unstable-rate", "unstable-rate", {"rate": _number(0.5, 2.0)}, {"grad_clip": 0.0}, (160, 200)),
    Variant("v-zeroed", "moments-zeroed", {"of": "v"}, quick=True),
    Variant("m-zeroed", "moments-zeroed", {"of": "m"}),
    Variant("both-zeroed", "moments-zeroed", {"of": "both"}),
    Variant("moments-swapped", "moments-swapped"),
    Variant("v-scaled", "v-scaled", {"factor": _log(1e-10, 1e-7)}),
    Variant("lost-optimizer", "lost-optimizer"),
    Variant("lost-cursor", "lost-cursor", quick=True),
    Variant("lost-rng", "lost-rng", options={"dropout": 0.1}),
    Variant("attention-scaled", "attention-scaled", {"factor": _log(80, 300)}, _ATTENDING, _LATE),
    Variant("value-scaled", "weight-scaled", {"factor": _log(15, 60)}, quick=True),
    Variant("up-scaled", "weight-scaled", {"path": "MIDDLE.mlp.up.weight", "factor": _log(15, 60)}),
    Variant("weight-bit", "weight-bit", _PLACE, quick=True),
    Variant("m-bit", "m-bit", _PLACE),
    Variant("v-bit", "v-bit", _PLACE),
    Variant("low-bit", "weight-bit", _PLACE | {"bit": _whole(0, 15)}),
    Variant("gradient-bit", "gradient-bit", _PLACE, quick=True),
    Variant("log-bit", "log-bit", {"bit": _whole(23, 25)}, quick=True),
    Variant("healthy", HEALTHY, steps=(HORIZON, HORIZON), asks=3, quick=True),
    Variant("healthy-fast", HEALTHY, options={"max_lr": 3e-3}, steps=(240, 240), asks=2),
    Variant("healthy-dropout", HEALTHY, options={"dropout": 0.1}, steps=(200, 200), asks=2),
    Variant("natural-fast", NATURAL, options={"max_lr": 1e-2, "beta2": 0.999}, steps=(160, 200)),
    Variant("natural-unclipped", NATURAL, options={"max_lr": 5e-3, "beta2": 0.999, "grad_clip": 0.0}, steps=(160, 200)),
)


def plan(
    seeds: Sequence[int] = DEFAULT_SEEDS,
    sizes: Sequence[str] | None = None,
    faults: Sequence[str] = (),
    quick: bool = False,
) -> list[Case]:
    """The cases: every variant with every seed. Sizes take turns, so that each variant meets several of them.

    Args:
        sizes: names in `SIZES`; None: `DEFAULT_SIZES`, and `QUICK_SIZES` if quick.
        faults: only these: names of faults, of variants, `HEALTHY` or `NATURAL`.
        quick: a dozen cases: the variants marked so, with the first seed only.

    Raises:
        ExperimentError: a name is unknown, a seed is out of range, or there is nothing to do.
    """
    sizes = sizes or (QUICK_SIZES if quick else DEFAULT_SIZES)
    for size in sizes:
        if size not in SIZES:
            raise ExperimentError(f"size {size!r} is unknown; expected one of {', '.join(SIZES)}")
    if odd := [seed for seed in seeds if not 0 <= seed < 2**31]:
        raise ExperimentError(f"seed {odd[0]} is out of range; expected 0 to {2**31 - 1}")
    known = {HEALTHY, NATURAL, *KINDS, *(variant.name for variant in VARIANTS)}
    if strange := [name for name in faults if name not in known]:
        raise ExperimentError(f"fault {strange[0]!r} is unknown; expected one of {', '.join(sorted(known))}")
    chosen = list(enumerate(VARIANTS))
    if quick:
        chosen, seeds = [(turn, one) for turn, one in chosen if one.quick], seeds[:1]
    if faults:
        chosen = [(turn, one) for turn, one in chosen if {one.fault, one.name} & set(faults)]
    cases = [
        draw(variant, seed, sizes[(turn + shift) % len(sizes)])
        for shift, seed in enumerate(dict.fromkeys(seeds))
        for turn, variant in chosen
    ]
    if not cases:
        raise ExperimentError("there is no case to run; expected at least one seed, and faults that --quick has")
    return cases


def draw(variant: Variant, seed: int, size: str) -> Case:
    """The case that a seed makes of a variant: always the same."""
    dice = random.Random(f"{variant.name}/{seed}/{size}")
    options = SIZES[size] | dict(variant.options)
    step = _between(dice, *variant.steps)
    keys = [f"{key}={value if isinstance(value, str) else value(dice, options)}" for key, value in variant.keys.items()]
    planted = variant.fault in KINDS
    lasting = not planted or (KINDS[variant.fault].applied == "option" and not variant.lasts)
    text = None
    if planted:
        text = f"{variant.fault}@{1 if lasting else step}" + (f":{','.join(keys)}" if keys else "")
    last = step if lasting else step + variant.lasts + AFTER
    asked = 8 * variant.asks if lasting or variant.lasts else 0
    return Case(
        name=f"{variant.name}-{seed}-{size}",
        fault=text,
        seed=seed,
        size=size,
        steps=last,
        options=options,
        ask=[_between(dice, min(QUIET, last), last) for _ in range(asked)],
        asks=variant.asks,
        natural=variant.fault == NATURAL,
    )
