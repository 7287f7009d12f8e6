"""Why did the loss spike at this step? The walk from an exact replay to a cause, or to "unknown".

The order is that of `autopsy`: is the step flagged at all; is the replay the run's; did a resume break the state; does
the batch carry the spike or the state; and if the state does, which earlier update did it, and what of it. Each answer
but the first is an experiment on the run's own states, and every cause that is named was taken away once, to see the
spike go. Stops as soon as it is decided. The modules it calls hold the clues, the thresholds and their sources.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec

from .cause import (
    batch_cause,
    contradiction,
    curvature_cause,
    logits_cause,
    moments_cause,
    optimizer_cause,
    precision_cause,
    rates,
    remedies,
    resume_cause,
)
from .cause.alarm import Alarm, alarms
from .cause.batch_cause import Square
from .cause.contradiction import masked
from .cause.counterfactual import Trials
from .cause.inquiry import Conclusion, Inquiry, setting, skipping
from .cause.outliers import outliers
from .cause.unruled import standing
from .cause.walk import broken, walk
from .checkpoints import checkpoint_reader
from .errors import ReplayError, WorkbenchError
from .interventions.scene import CONTEXT, MEMORY_SHARE, Scene
from .memory import memory
from .number_text import number
from .recorded.layout import CHECKPOINTS
from .replay import Progress
from .run import Run
from .traces import put
from .verdict import Verdict, write

SAVED = 64  # steps of roll-forward for which it is worth trying to decide without neighbours: about an autopsy's own
HELD = 48  # states before N-1 that are worth holding: older ones are too far for an experiment to start from


def autopsy(
    run: Run,
    step: int,
    *,
    segment: int | None = None,
    trace_dir: Path | None = None,
    examine: bool = False,
    progress: Progress = lambda done, total, what: None,
    **options: Any,
) -> Verdict:
    """See `Run.autopsy`; `options` are `experiment`, `factory`, `checkpoint`, `other_environment`, `memory_budget`."""
    began = time.perf_counter()
    chosen, notices = run.segment_of(step, segment)
    flagged, asked = alarms(run, step, chosen)
    place = run.manifest.lineage(chosen, asked.began)
    alarm = flagged.get(asked.began, asked)
    if alarm.step != step:
        notices.append(f"step {step} stands in the spike that began at step {alarm.step}: that one is looked at")
    rises = alarm.rule is not None
    if not rises and (examine or not alarm.judged):
        alarm, rises = standing(run, alarm, place)
    opening = {name: options[name] for name in ("experiment", "factory") if options.get(name) is not None}
    taken = 0.0
    for start in _starts(run, alarm, place, options.pop("checkpoint", None)):
        scene = _scene(run, alarm.step, place, start, progress, options)
        hidden = masked(scene)
        if hidden is not None:
            alarm, notice = _unmasked(alarm, hidden)
            rises = True
            notices.append(notice)
        inquiry = Inquiry(run, scene, Trials(scene), alarm, flagged, opening, progress, masked=hidden is not None)
        with scene.at_rest():
            conclusion = _conclusion(inquiry, rises, options)
        if conclusion.verdict != "unknown":
            break
        taken += inquiry.spent
    else:
        taken -= inquiry.spent
    inquiry.settle(conclusion.verdict)
    scene = inquiry.scene  # of an earlier step, where the way there already departed
    with scene.at_rest():
        tried, odd = remedies.tried(inquiry, conclusion), outliers(inquiry)
    found = [*notices, *scene.notices, *inquiry.notices]
    verdict = Verdict(
        run=run.manifest.run,
        name=run.name,
        step=step,
        segment=run.manifest.lineage(chosen, step),
        began=alarm.step,
        flagged=alarm.rule,
        exact=inquiry.exact,
        first_difference=None if inquiry.masked else scene.first_difference,
        verdict=conclusion.verdict,
        reason=conclusion.reason,
        culprit=conclusion.culprit,
        would_refute=conclusion.would_refute,
        evidence=inquiry.evidence,
        refuted=inquiry.refuted,
        unchecked=inquiry.unchecked,
        outliers=odd,
        remedies=tried,
        seconds=round(time.perf_counter() - began, 3),
        step_times=float(taken + inquiry.spent),
        checkpoint=scene.checkpoint,
        rolled=scene.rolled,
        environment=scene.environment,
        environment_differences=scene.unlike,
        notices=found,
    )

    def written(folder: Path, where: list[str]) -> Path:
        nonlocal verdict
        verdict = msgspec.structs.replace(verdict, notices=list(dict.fromkeys([*found, *where])))
        return write(verdict, folder)

    put(run, trace_dir, written)
    return verdict


def _unmasked(alarm: Alarm, logged: float) -> tuple[Alarm, str]:
    """The alarm that telemetry should have raised, and what to say of it."""
    words = f"the loss is not finite, and telemetry masks it: it has {number(logged, 6)} in its place"
    changed = replace(
        alarm, rule="non_finite", metric="loss", value=math.nan, usual=alarm.usual_loss, explanation=words
    )
    return changed, f"{words[0].upper()}{words[1:]}; all else that could be compared agrees."


def _starts(run: Run, alarm: Alarm, segment: int, given: int | None) -> list[int]:
    """Checkpoints to start from, in turn, until something is decided: the nearest, if the one that leaves room for the
    neighbours is far, and that. What half precision can't hold shows in the step itself, which needs no neighbours."""
    step, halves = alarm.step, any(one.dtype in ("float16", "bfloat16") for one in run.manifest.parameters)
    if given is not None:
        key = run.plan(step, segment, checkpoint=given).checkpoint
        if (path := unsound(run, key)) is not None:
            raise ReplayError(
                f"{path} is not finite in checkpoint {key[0]}: no state to start from; take an earlier one"
            )
        return [key[0]]
    keys = run.checkpoints_before(step, run.plan(step, segment).segment)
    before = [key[0] for key in keys]
    if alarm.rule == "non_finite":  # a run goes on with NaN, and so do its checkpoints
        sound = [key[0] for key in keys if unsound(run, key) is None]
        before = sound or before[:1]
    roomy = [number for number in before if number < step - CONTEXT]
    far, near = roomy[-1] if roomy else before[0], before[-1]
    least = CONTEXT if halves and alarm.rule == "non_finite" else SAVED
    return [near, far] if near - far > least else [far]


def unsound(run: Run, key: tuple[int, int]) -> str | None:
    """The first weight of a checkpoint that is not finite; None where all are, or where it can't be read."""
    try:
        weights = checkpoint_reader.read(run.path / CHECKPOINTS, *key, run.manifest.run).weights
    except WorkbenchError:
        return None  # what opens it says why
    sound = {path: mx.all(mx.isfinite(array)) for path, array in weights.items()}
    mx.eval(sound)
    return next((path for path, good in sound.items() if not good.item()), None)


def _scene(run: Run, step: int, segment: int, start: int, progress: Progress, options: dict[str, Any]) -> Scene:
    """A scene that holds every state on the way from a checkpoint to N-1, as far as memory allows."""
    budget = options.get("memory_budget") or memory() // MEMORY_SHARE
    held = budget // _state_bytes(run) - 2
    context = min(step - 1 - start, max(CONTEXT, min(HELD, held)))
    return Scene.open(
        *(run, step),
        segment=segment,
        checkpoint=start,
        context=context,
        next_steps=remedies.NEXT,
        progress=progress,
        **options,
    )


def _state_bytes(run: Run) -> int:
    """About what a state takes: three arrays of each parameter."""
    sizes = {"float32": 4, "float16": 2, "bfloat16": 2}
    return 3 * sum(math.prod(one.shape) * sizes.get(one.dtype, 4) for one in run.manifest.parameters) + 1


def _conclusion(inquiry: Inquiry, rises: bool, options: dict[str, Any]) -> Conclusion:
    """
    Args:
        rises: whether the step stands out at all, by a rule or by itself.
    """
    alarm = inquiry.alarm
    if alarm.judged and not rises:
        return _nothing(inquiry)
    sentence = f"{alarm.explanation[0].upper()}{alarm.explanation[1:]} ({alarm.rule or _no_rule(alarm)})."
    inquiry.found("alarm", sentence, "unknown", value=alarm.value, usual=alarm.usual)
    if not inquiry.exact:
        return _not_exact(inquiry, options)
    if not rises:
        reason = (
            f"Not judged: {_no_rule(alarm)}. It does not rise above the steps before it, either: {alarm.explanation}."
        )
        return Conclusion("unknown", reason, {}, "enough steps before it for a rule to judge it")
    for look in (resume_cause.examine, precision_cause.not_finite, optimizer_cause.without_bound):
        if (found := look(inquiry)) is not None:
            return found
    square = batch_cause.square(inquiry)
    if square is not None and square.carrier == "batch":
        if (found := batch_cause.examine(inquiry, square)) is not None:
            return found
    if (found := rates.examine(inquiry)) is not None:
        return found
    return _earlier(inquiry, square)


def _earlier(inquiry: Inquiry, square: Square | None) -> Conclusion:
    """What of an earlier update did it."""
    back = broken(inquiry)
    if back is None and square is not None:
        # What only batch N shows has to be sought with batch N.
        back = walk(inquiry, square.batch if square.carrier == "state" else inquiry.step)
    logits = None if square is None else logits_cause.Look(inquiry, square.batch)
    if inquiry.scene.stepper.experiment.loss_fn is None:  # of a step of the user's own
        inquiry.skip("attention logits", "the experiment has no loss function (loss_fn), which it would run")
        logits = None
    if back is None:
        if logits is not None and (found := logits.ran_away() or logits.out_of_line()) is not None:
            return found
        return _unknown(inquiry, "There were too few healthy steps before it, or too little time, to experiment with.")
    looks: list[Callable[[], Conclusion | None]] = []
    usual = None if square is None else square.batch
    if back.single and square is not None:
        looks.append(partial(batch_cause.earlier, inquiry, back.update, square.batch, plain=True))
    if logits is not None:
        looks += [logits.ran_away, logits.out_of_line]
    if back.single:
        looks.append(partial(moments_cause.one_update, inquiry, back.update))
    looks += [partial(precision_cause.over_steps, inquiry), partial(curvature_cause.examine, inquiry, back, usual)]
    if back.single and square is not None:
        looks.append(partial(batch_cause.earlier, inquiry, back.update, square.batch, plain=False))
    for look in looks:
        if (found := look()) is not None:
            return found
    if back.single:
        return _unknown(inquiry, f"Update {back.update} did the damage, and nothing that was tried says what of it.")
    return _unknown(inquiry, "It rose over several updates, and nothing that was tried took the rise away.")


def _nothing(inquiry: Inquiry) -> Conclusion:
    alarm = inquiry.alarm
    said = [f"No rule of spike detection names step {alarm.step}."]
    if alarm.told is not None:
        said.append(
            "The recorder called it unstable when it logged it, by a rule of its own that spike detection does not "
            f"have (see `Recorder(auto_rollback=…)`): {alarm.told}."
        )
    if alarm.explanation:
        said.append(f"It does not rise above the usual scatter of the steps before it, either: {alarm.explanation}.")
    elif alarm.told is not None:
        said.append("`--examine` (examine=True) looks into it all the same.")
    return Conclusion("no-spike", " ".join(said), {}, "a rule that names it")


def _no_rule(alarm: Alarm) -> str:
    """Why no rule is behind an alarm."""
    return "no rule names it" if alarm.judged else "no rule could judge it: too few steps before it were logged"


def _not_exact(inquiry: Inquiry, options: dict[str, Any]) -> Conclusion:
    scene = inquiry.scene
    difference = scene.first_difference
    if difference is None and scene.exact:
        return _no_claim("The checker missed a planted one-bit change, so that its agreement says nothing.")
    if difference is None:
        return _no_claim("The replay is unverified: the run logged too little to tell whether it is this very step.")
    if difference.where != "restored state":
        if difference.step < scene.step:
            segment = inquiry.run.manifest.lineage(scene.segment, difference.step)
            earlier = Scene.open(inquiry.run, difference.step, segment=segment, context=0, next_steps=0, **options)
            inquiry.notices.append(f"the replay departs from the run at step {difference.step}: that step is looked at")
            inquiry.scene, inquiry.trials = earlier, Trials(earlier)
        if (found := contradiction.examine(inquiry)) is not None:
            return found
    return _no_claim(
        f"Not reproduced: the replay differs from the run at step {difference.step}, first in {difference.item} "
        f"({difference.where}), so it is another step than the run's."
    )


def _no_claim(reason: str) -> Conclusion:
    return Conclusion("unknown", reason, {}, "a replay that has the run's bits: then causes can be tried")


def _unknown(inquiry: Inquiry, reason: str) -> Conclusion:
    step = inquiry.step
    remedies = [skipping(step), setting("lr=0.5x", step), setting("clip=0.1", step)]
    return Conclusion(
        "unknown", reason, {}, "a change that takes the rise away, and says by that what made it", remedies
    )
