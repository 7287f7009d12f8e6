"""Two runs beside each other: where they part, and whether one changed setting alone explains it.

An experiment has a cause only if its twin, with nothing changed, gives the same bits. So a difference is put down to a
setting only where environment and all other settings are the same, no step varies by itself, and both runs have the
same bits up to where that setting can act. Reads manifests and telemetry; computes no step and needs no MLX.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from .. import seams
from ..bits import bits_float, ulp_distance
from ..enumeration import listed
from ..errors import ReplayError, RunError
from ..run import Run, open_run
from .command_lines import fork_changes
from .comparison import Comparison, Parting, conclude
from .knobs import BATCH, START, Setting, differing_settings
from .logged import Logged, Pair

# Lanes compared in the state that both start from. `other` holds the learning rate, and the cursor may hold the shape
# of the batch: there a setting would be seen before it does anything.
_START_LANES = ("state.weights", "state.adam_m", "state.adam_v", "state.rng")


def _recorded(run: Run) -> Run:
    if (only := run.unverifiable()) is not None:
        raise RunError(f"{only}; its curves can be laid over others, but it can't be compared bit by bit")
    return run


def compare_runs(
    a: Run | str | os.PathLike[str],
    b: Run | str | os.PathLike[str],
    *,
    segment_a: int | None = None,
    segment_b: int | None = None,
) -> Comparison:
    """Compares what two runs logged, step by step and bit by bit, and what their manifests say of them.

    Args:
        a, b: runs, or their folders.
        segment_a, segment_b: the segment that a run's steps lead to, where steps stand in several that disagree.

    Returns:
        A `Comparison`: a sentence, the paired table, the settings that differ, and where the runs part.

    Raises:
        RunError, TelemetryError: a folder is no run, or is damaged.
        ReplayError: the runs have no step in common, or a segment must be chosen.
    """
    left, right = (
        Logged.of(_recorded(run if isinstance(run, Run) else open_run(run)), segment)
        for run, segment in ((a, segment_a), (b, segment_b))
    )
    pair = Pair(left, right)
    steps = pair.steps
    if not steps:
        raise ReplayError(
            f"the runs have no step in common: {left.run.path} has {left.span}, {right.run.path} has {right.span}"
        )
    firsts = [pair.first_difference(step) for step in steps]
    table = pd.DataFrame([_row(pair, step, *first) for step, first in zip(steps, firsts, strict=True)])
    parting = _at_start(pair) or next(
        (pair.parting(step, item) for step, (item, _) in zip(steps, firsts, strict=True) if item is not None), None
    )
    folders = [one.run.path.resolve().name for one in (left, right)]
    settings = differing_settings(left.run.manifest, right.run.manifest, pair.environments(), folders)
    settings += _learning_rate(pair, settings)
    knobs = [one for one in settings if one.kind == "knob"]
    names = _names(left.run.path, right.run.path)
    attribution, sentence = conclude(
        names=names,
        steps=steps,
        settings=settings,
        parting=parting,
        verdicts=table["verdict"],
        acts={one.name: _first_step(one, pair) for one in knobs},
        varies=_varies(pair, parting),
        own_loop=any(one.run.manifest.rebuild.get("kind") != "trainer" for one in (left, right)),
        batches=[
            step
            for step, (item, _) in zip(steps, firsts, strict=True)
            if item == BATCH and not any(_decides_batch(one, step, pair) for one in knobs)
        ],
        silent=[] if parting is None else _silent(pair, parting, table),
        edits=[step for step in steps if pair.edits_differ(step)],
    )
    return Comparison(
        a=names[0],
        b=names[1],
        table=table.astype({"ulp": "Int64", "first": "string"}),
        settings=settings,
        parting=parting,
        layer=None if parting is None else next(filter(None, map(pair.layer, steps)), None),
        attribution=attribution,
        sentence=sentence,
        notices=[*left.notices, *right.notices, *pair.notices(), *_seams(pair), *_origin(left.run, right.run)],
    )


def _row(pair: Pair, step: int, first: str | None, verdict: str) -> dict[str, Any]:
    bits = [side.bits(step, "loss") for side in (pair.a, pair.b)]
    loss_a, loss_b = (np.nan if one is None else float(bits_float(one)) for one in bits)
    return {
        "step": step,
        "loss_a": loss_a,
        "loss_b": loss_b,
        "difference": loss_b - loss_a,
        "ulp": None if None in bits else ulp_distance(*bits),  # type: ignore[arg-type]
        "verdict": verdict,
        "first": first,
    }


def _at_start(pair: Pair) -> Parting | None:
    """Whether they part in the state that both start from."""
    left, right = pair.evidence(pair.start)
    for name in _START_LANES:
        if name in left and name in right and left[name] != right[name]:
            return Parting(step=pair.start, item=name, layer=None, a=left[name], b=right[name], ulp=None, start=True)
    return None


def _names(a: Path, b: Path) -> tuple[str, str]:
    """The folders' names, or as much of their paths as tells them apart."""
    left, right = a.resolve().name, b.resolve().name
    return (left, right) if left != right or a.resolve() == b.resolve() else (str(a), str(b))


def _origin(a: Run, b: Run) -> list[str]:
    if a.manifest.run == b.manifest.run:
        return ["Both are the same run."]
    return [
        f"{child.name} is a fork of {other.name}, from its state {child.manifest.parent.step}"
        f"{_with(fork_changes(child.manifest, other.manifest))}."
        for child, other in ((a, b), (b, a))
        if child.manifest.parent is not None and child.manifest.parent.run == other.manifest.run
    ]


def _with(changes: Sequence[str]) -> str:
    return f", with {listed(changes)}" if changes else ""


def _seams(pair: Pair) -> list[str]:
    """What happened to a run's state outside of any step, which no setting explains."""
    if pair.a.run.manifest.run == pair.b.run.manifest.run:
        return []
    return [
        f"In {side.run.name} {sentence}."
        for side in (pair.a, pair.b)
        for sentence in seams.notices(side.run, side.segment, pair.start, pair.steps[-1])
    ]


def _learning_rate(pair: Pair, settings: Sequence[Setting]) -> list[Setting]:
    """An optimizer keeps a constant learning rate in its state, so a manifest may not have it; telemetry does."""
    for step in pair.steps:
        rates = pair.a.lr(step), pair.b.lr(step)
        if None not in rates and rates[0] != rates[1]:
            sources = ("config.", "arguments.", "rebuild.", "argv", "optimizer.schedules")
            noted = fork_changes(pair.a.run.manifest, pair.b.run.manifest)
            own_loop = any(one.run.manifest.rebuild.get("kind") != "trainer" for one in (pair.a, pair.b))
            if own_loop and any(change.startswith("lr=") for change in noted):
                return [Setting("lr", "knob", *rates)]
            derived = any(one.kind == "knob" and one.name.startswith(sources) for one in settings)
            return [Setting("lr", "consequence" if derived else "knob", *rates)]
    return []


def _first_step(setting: Setting, pair: Pair) -> int:
    """The first step in which a knob can act, as far as the record tells; of one that reaches the start, that state."""
    steps, never = pair.steps, pair.steps[-1] + 1
    if setting.reach == START:
        return pair.start
    if setting.name == "lr" or setting.name.startswith("config.schedule."):
        rates = [(step, pair.a.lr(step), pair.b.lr(step)) for step in steps]
        if all(None not in (left, right) for _, left, right in rates):
            return next((step for step, left, right in rates if left != right), never)
    clips = all(isinstance(clip, int | float) for clip in (setting.a, setting.b))
    if setting.name in ("config.clip", "options.clip") and clips:
        limit = min(setting.a, setting.b)
        norms = [(step, pair.a.bits(step, "grad_norm")) for step in steps]
        if all(bits is not None for _, bits in norms):
            # Not above the lower limit, neither of the two scales anything (`step.clipped`); NaN counts as above.
            over = (step for step, bits in norms if bits and not float(bits_float(bits)) + 1e-5 <= limit)
            return next(over, never)
    if setting.name == "config.substitutions":
        return min(_substituted(setting), default=steps[0])
    return steps[0]


def _substituted(setting: Setting) -> set[int]:
    """The steps in whose batches only one run had rows substituted, or both had others."""
    sides = [[one for one in side or [] if isinstance(one, Mapping)] for side in (setting.a, setting.b)]
    return {one.get("step", 0) for one in (*sides[0], *sides[1]) if (one in sides[0]) != (one in sides[1])}


def _decides_batch(knob: Setting, step: int, pair: Pair) -> bool:
    """Whether a knob can make the batch of a step another one."""
    if knob.name == "config.substitutions":
        return step in _substituted(knob)
    return knob.moves_data and _first_step(knob, pair) <= step


def _silent(pair: Pair, parting: Parting, table: pd.DataFrame) -> list[int]:
    """Steps, up to where the runs part, of which too little was logged to say that they are alike until then."""
    found = table.loc[(table["step"] < parting.step) & (table["verdict"] != "exact"), "step"].to_list()
    if not parting.start and parting.step - 1 not in (pair.start, *pair.steps):
        found.append(parting.step - 1)
    if not parting.start and not all(BATCH in side for side in pair.evidence(parting.step)):
        found.append(parting.step)
    return found


def _varies(pair: Pair, parting: Parting | None) -> str | None:
    """Why the same step may give other bits when it is performed again, if that is not ruled out."""
    backends = {str(one.get("backend")) for one in pair.environments()} - {"cpu"}
    if not backends:
        return None
    where = ", ".join(sorted(backends))
    if not all(side.run.manifest.options.get("deterministic") for side in (pair.a, pair.b)):
        return f"on {where} with stock operations a step varies by itself"
    if parting is None or (not parting.start and parting.step > pair.steps[0]):
        return None  # two executions of the steps before gave the same bits: they do not vary there
    return (
        f"no step that both performed alike shows that steps repeat on {where}: let workbench doctor RUN prove it there"
    )
