"""The way out, tried: what a change would have done to the spike and to the steps after it, and the command for it.

Knows an inquiry and a conclusion.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..bits import bits_float
from ..interventions.changes import parse_change
from ..rebuild import experiment_call, other_options, own_parts, parts_of
from ..recovery import Recovery
from ..seams import state_segment
from ..spikes import SpikeSettings
from ..verdict import Numbers, Remedy
from .counterfactual import Shot
from .inquiry import Conclusion, Inquiry, Tried

if TYPE_CHECKING:
    from ..manifest import Manifest

NEXT = 5  # steps after N whose losses say whether it lasts


def tried(inquiry: Inquiry, conclusion: Conclusion) -> list[Remedy]:
    """Each remedy of a conclusion that there is time for, with its effect beside the untouched steps."""
    scene, step = inquiry.scene, inquiry.step
    if not conclusion.remedies or not inquiry.affords(NEXT, "remedies", kept=0):
        return []
    after = [Shot(step + number, float(moment.loss), math.nan) for number, moment in enumerate(scene.after(NEXT), 1)]
    performed = [inquiry.trials.own(), *after]
    untouched = _logged(inquiry) if conclusion.verdict == "transient-fault" else performed
    found = []
    for one in conclusion.remedies:
        shots = conclusion.redone or performed
        if one.change:
            steps = range(one.first, step + 1 + NEXT) if parse_change(one.change).lasts else None
            what = f"the remedy {one.words or one.change}"
            redone = inquiry.tried(what, one.first, one.change, steps=steps, beyond=NEXT, kept=0)
            if redone is None:
                continue
            shots = redone
        found.append(_remedy(inquiry, conclusion, one, shots, untouched))
    return found


def _logged(inquiry: Inquiry) -> list[Shot]:
    """Step N and those after it as the run logged them, where no replay repeats them."""
    found = []
    for step in range(inquiry.step, inquiry.step + 1 + NEXT):
        evidence = inquiry.run.evidence(step, inquiry.scene.segment)
        loss, grad_norm = (evidence.get(name) for name in ("loss", "grad_norm"))
        numbers = [math.nan if bits is None else float(bits_float(bits)) for bits in (loss, grad_norm)]
        found.append(Shot(step, numbers[0], numbers[1]))
    return found


def _remedy(
    inquiry: Inquiry, conclusion: Conclusion, one: Tried, shots: Sequence[Shot], untouched: Sequence[Shot]
) -> Remedy:
    at = next((number for number, shot in enumerate(shots) if shot.step == inquiry.step), 0)
    own, following = shots[at], [shot.loss for shot in shots[at + 1 :]]
    before = [shot.loss for shot in untouched[1:]][: len(following)]
    skipped = one.change == "batch=skip" and one.first == inquiry.step
    numbers = {
        "loss": None if skipped else own.loss,
        "loss_untouched": untouched[0].loss,
        "grad_norm": None if skipped else own.grad_norm,
        "grad_norm_untouched": untouched[0].grad_norm,
    }
    for name, function in (("mean", np.mean), ("max", np.max)):
        numbers[f"next_{name}"] = float(function(following)) if following else None
        numbers[f"next_{name}_untouched"] = float(function(before)) if before else None
    return Remedy(
        change=one.words or one.change,
        state=one.first - 1,
        numbers=Numbers.of(numbers),
        steps=[shot.step for shot in shots[at + 1 :]],
        helps=bool((skipped or inquiry.gone(own)) and inquiry.healthy(following)),
        command=command(inquiry, one, conclusion.fork_from),
        note=one.note,
    )


def command(inquiry: Inquiry, one: Tried, place: str | None = None) -> str:
    """What forks the run with a remedy: a command line for the built-in trainer's runs, Python for others; "" where no
    fork can have it."""
    if one.fork is None:
        return ""
    run, state = inquiry.run, one.first - 1
    segment = state_segment(run.manifest, run.checkpoints, state, inquiry.scene.segment)
    place = place or (f"{state}.s{segment}" if len(run.manifest.segments) > 1 else f"{state}")
    out = f"{run.path}-from-{state}"
    if run.manifest.rebuild.get("kind") == "trainer":
        words = ["workbench", "train", "--fork", str(run.path), "--from", place]
        words += ["--skip-batch", str(one.skip)] if one.skip is not None else []
        words += ["--set", one.fork] if one.fork else []
        return shlex.join([*words, "--out", out])
    number, _, of = place.partition(".s")
    return _python(inquiry, one, int(number), int(of) if of else segment, out)


def _python(inquiry: Inquiry, one: Tried, state: int, segment: int, out: str) -> str:
    """Lines of Python for the loop that recorded the run, in the names of the documentation."""
    run, manifest = inquiry.run, inquiry.run.manifest
    change = parse_change(one.fork) if one.fork else None
    handed = manifest.stored_batches  # the loop hands over its batches, and leaves one out itself
    changes = (["batch=skip"] if one.skip is not None and not handed else []) + ([one.fork] if one.fork else [])
    point = [repr(str(run.path)), str(state), *([f"changes={changes!r}"] if changes else [])]
    point += [f"segment={segment}"] if len(manifest.segments) > 1 else []
    point += [] if (state, segment) in run.checkpoints else _way_to_rebuild(inquiry)
    tuning = manifest.rebuild.get("kind") == "mlx-lm"  # no loop of the user's has these names
    lines, made = [], []
    parts = [*parts_of(manifest), *own_parts(manifest)]
    if tuning:
        lines += ["from workbench.rebuild import rebuild", f"run = wb.open_run({str(run.path)!r})"]
        lines += ["tuned = rebuild(run.manifest, run.path)"]
        parts = [f"tuned.{name}" for name in parts]
        made += ["data=run.manifest.data", "rebuild=run.manifest.rebuild"]
    if manifest.rebuild.get("kind") == "factory":
        made += [f"factory={manifest.rebuild.get('factory')!r}"]
        made += [f"arguments={found!r}"] if (found := manifest.rebuild.get("arguments")) else []
    clips = change is not None and change.name == "clip" and not manifest.own_step
    options = [text for text in other_options(manifest) if not (clips and text.startswith("clip="))]
    options += [f"clip={change.value!r}"] if clips and change is not None else []
    options += [f"ignore={manifest.ignore!r}"] if manifest.ignore else []
    options += _recording(manifest)
    lines.append(f"point = wb.fork_point({', '.join(point)})")
    lines.append(f"recorder = wb.Recorder({', '.join([repr(out), *parts, *options, 'fork=point', *made])})")
    if change is not None and change.name not in ("reset", "rng") and not clips:
        lines.append(f"# {change} is for your loop to make, from its first step on: the fork only notes it")
    if tuning:
        lines += [f"for batch in recorder.batches({run.telemetry.last_step()}):", "    recorder.step(batch)"]
        lines += ["recorder.close()"]
    if handed and one.skip is not None:
        lines.append(
            f"# the fork starts at state {state}: leave out the batch of step {one.skip}, and hand over those of steps "
            f"{one.skip + 1}, {one.skip + 2}, … by recorder.step(batch)"
        )
    elif handed:
        lines.append(
            f"# the fork starts at state {state}: hand over the batches of steps {state + 1}, {state + 2}, … by "
            "recorder.step(batch)"
        )
    return "\n".join(lines)


def _recording(manifest: Manifest) -> list[str]:
    """How a run was recorded, where that is not what a recorder does by default, as arguments by name."""
    usual = {"save_every": 100, "keep_last": None, "keep_every": None}  # as `Recorder` has them
    found = [f"{name}={getattr(manifest, name)!r}" for name in usual if getattr(manifest, name) != usual[name]]
    if manifest.spikes is None:
        found.append("spikes=None")
    elif unlike := _unlike(manifest.spikes, asdict(SpikeSettings())):
        found.append(f"spikes=wb.SpikeSettings({unlike})")
    if manifest.recovery is not None and (unlike := _unlike(manifest.recovery, asdict(Recovery()))):
        mode = manifest.recovery["mode"]
        alone = unlike == f"mode={mode!r}"
        found.append(f"auto_rollback={mode!r}" if alone else f"auto_rollback=wb.Recovery({unlike})")
    if manifest.data and manifest.rebuild.get("kind") != "mlx-lm":
        files = (f"wb.DataFile({one.path!r}, {one.bytes}, {one.sha256!r})" for one in manifest.data)
        found.append(f"data=[{', '.join(files)}]")
    return found


def _unlike(given: Mapping[str, Any], usual: Mapping[str, Any]) -> str:
    """Settings that are not the usual ones, as arguments by name."""
    return ", ".join(f"{name}={value!r}" for name, value in given.items() if usual.get(name, value) != value)


def _way_to_rebuild(inquiry: Inquiry) -> list[str]:
    """For a state that has to be rolled forward to: what is to perform the steps, as an argument."""
    rebuild = inquiry.run.manifest.rebuild
    if rebuild.get("kind") == "mlx-lm":
        return []
    script = rebuild.get("script")
    script = script if isinstance(script, str) and Path(script).is_file() else None
    factory = inquiry.opening.get("factory") or rebuild.get("factory") or script
    return [f"factory={factory!r}" if factory else f"experiment={experiment_call(inquiry.run.manifest)}"]
