"""Is it the moments of one update, which did the damage though its learning rate and batch were usual?

The clues: its gradient outran the second moment, or it is out of line with the updates before. The proof: the same
update with fresh or raised moments does no damage. Knows an inquiry.
"""

from __future__ import annotations

import math
from dataclasses import replace

import mlx.core as mx
import numpy as np

from ..bits import bits_float
from ..interventions.attempt import Attempt, put
from ..number_text import number
from ..observe import moment_paths
from ..probes.measure import parameter_updates
from ..probes.quantities import clip_scale
from ..snapshot import State
from ..spikes import LOG_GRAD_NORM_SIGMA_FLOOR, SMALLEST_WINDOW, SpikeSettings
from ..step import StepResult
from .adam import settings
from .inquiry import Conclusion, Inquiry, setting, skipping
from .optimizer_cause import own_steps
from .precision_cause import broken_state

STALE = 2.3  # Wortsman et al. 2023 (arXiv:2304.13013) count a rise of RMS_t to this as one that sets off a loss spike
USUAL_EPS = 1e-8  # Kingma & Ba's, and MLX's default
# Of an update's norm beside its neighbours': what spike detection asks of a gradient norm beside a calm window, 1.8.
OUT_OF_LINE = math.exp(SpikeSettings().z * LOG_GRAD_NORM_SIGMA_FLOOR)


def one_update(inquiry: Inquiry, step: int) -> Conclusion | None:
    """The conclusion where one update's moments are to blame: it is out of line, as a whole or in a parameter whose
    gradient outran v, and with fresh or raised moments it does no damage."""
    cost = 1 + inquiry.distance(step - 1) + inquiry.distance(step)
    if not inquiry.affords(cost, f"the moments of update {step}"):
        return None
    scene, result = inquiry.scene, performed(inquiry, step)
    before, after = scene.state(step - 1), scene.state(step)
    updates = parameter_updates(scene.stepper.experiment, before, after, result)
    stale = max(
        (one for one in updates if one.staleness_rms is not None),
        key=lambda one: one.staleness_rms or 0.0,
        default=None,
    )
    ratio, path, each = _beside_neighbours(inquiry, step)
    broken = broken_state(inquiry)
    if broken is not None and broken[0] == step:
        ratio, path = math.inf, broken[1]
    what = f"update {step} over its learning rate is {number(ratio, 3)} times its neighbours'"
    staleness = None if stale is None else stale.staleness_rms
    if stale is not None and staleness is not None:
        what += f", and the gradient {number(staleness, 3)} times √v (RMS, at most, in {stale.path})"
    # A gradient that outran v does harm by an update that is out of line for its parameter, or by none.
    outran = stale is not None and (staleness or 0.0) > STALE and not each.get(stale.path, math.inf) <= OUT_OF_LINE
    if not (ratio > OUT_OF_LINE or outran):
        inquiry.refute("optimizer", f"{what}: the update is in line")
        return None
    worst = stale.path if stale is not None and outran else path
    inquiry.found("moments", f"The norm of {what}.", "optimizer", update=ratio, staleness_rms=staleness)
    higher = raised(before, result, scene.stepper.experiment.options.clip)
    ways: list[tuple[str | None, str, State | None]] = [
        ("reset=m,v", "m and v reset", None),
        (None, "v raised to at least g²", higher),
    ]
    if any(one.eps < USUAL_EPS for one in settings(inquiry.run.manifest.optimizer, before).values()):
        ways.append((f"eps={USUAL_EPS}", f"epsilon at {USUAL_EPS}", None))
    for change, words, state in ways:
        redone = inquiry.tried(f"{words} before update {step}", step, change, state=state)
        if redone is None:
            continue
        sentence = f"With {words} before update {step}, step {inquiry.step} has {inquiry.comparison(redone[-1])}"
        if not inquiry.gone(redone[-1]):
            inquiry.refute("optimizer", f"{sentence}: the rise stays")
            continue
        inquiry.found(words, f"{sentence}: the rise is gone.", "optimizer", redone=inquiry.value(redone[-1]))
        return Conclusion(
            "optimizer",
            f"The moments in update {step} did it: {worst} was moved out of line with its gradient.",
            {"step": step, "layer": worst.rpartition(".")[0], "parameter": worst}
            | ({"option": "eps"} if change and change.startswith("eps") else {}),
            f"the same rise at step {inquiry.step} with {words} before update {step}",
            [*([setting(change, step)] if change else []), setting("lr=0.1x", step), skipping(step)],
        )
    return None


def performed(inquiry: Inquiry, step: int) -> StepResult:
    """A step of the scene once more, for its gradients."""
    scene = inquiry.scene
    state, moment = scene.state(step - 1), scene.moment(step)
    with scene.at_rest():
        attempt = Attempt(scene, state, moment, scene.stepper)
        put(attempt.stepper.experiment, attempt.state)
        return attempt.perform(attempt.moment)


def raised(state: State, result: StepResult, clip: float | None) -> State:
    """The state with v <- max(v, g²), g as it enters v: clipped."""
    scale, found = clip_scale(float(result.grad_norm), clip), {}
    for parameter, path in moment_paths(state.optimizer, "v", result.gradients).items():
        v = state.optimizer[path]
        found[path] = mx.maximum(v, mx.square(result.gradients[parameter] * scale).astype(v.dtype))
    return replace(state, optimizer=state.optimizer | found)


def _beside_neighbours(inquiry: Inquiry, step: int) -> tuple[float, str, dict[str, float]]:
    """The norm of an update over its learning rate, beside the median of those from state N-9 to it; the parameter in
    which it is farthest out; and the same of each parameter. NaN, "" and {} where they are fewer than 4."""
    scene, norms = inquiry.scene, dict[str, list[float]]()
    if not scene.holds_all:
        return math.nan, "", {}
    for other in [one for one in own_steps(inquiry) if inquiry.earliest < one <= step]:
        bits = scene.moment(other).rates[0]
        rate = 1.0 if bits is None else float(bits_float(bits))
        before, after = scene.state(other - 1).weights, scene.state(other).weights
        squares = {
            path: mx.sum(mx.square(after[path].astype(mx.float32) - before[path].astype(mx.float32)))
            for path in scene.result.gradients
        }
        mx.eval(squares)
        for path, square in squares.items():
            norms.setdefault(path, []).append(math.sqrt(square.item()) / rate if rate else math.nan)  # type: ignore[arg-type]
    table = np.array(list(norms.values()))
    if table.size == 0 or table.shape[1] <= SMALLEST_WINDOW:
        return math.nan, "", {}
    with np.errstate(divide="ignore", invalid="ignore"):
        beside = table[:, -1] / np.median(table[:, :-1], axis=1)
        whole = np.sqrt(np.sum(np.square(table), axis=0))
        ratio = float(whole[-1] / np.median(whole[:-1]))
    farthest = list(norms)[int(np.argmax(np.nan_to_num(beside, nan=-np.inf)))]
    return ratio, farthest, dict(zip(norms, beside.tolist(), strict=True))
