"""The held updates made again as Adam with a long memory for g² would have made them, from the states alone.

Each state holds m, and two of them the gradient between, as it entered: g = (m − β1 m_before) / (1 − β1). With the
mean of g² over the held steps in the place of v, which is what a β2 near 1 comes to, an element moves by
lr · m / √(mean g²): one whose gradient fades comes to rest with its m. Knows an inquiry; performs no step.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ..bits import bits_float
from ..observe import moment_paths
from .adam import Settings, settings
from .inquiry import Inquiry

FEWEST = 8  # gradients for a mean of their squares


def beyond(inquiry: Inquiry, steps: Sequence[int]) -> dict[str, mx.array]:
    """What the updates of some held steps moved beyond those with a long memory, float32, by parameter.

    Args:
        steps: ascending; each one's update is the difference of two held states.

    Returns:
        {} where there are fewer than `FEWEST` of them.
    """
    if len(steps) < FEWEST:
        return {}
    squares: dict[str, mx.array] = {}
    for step in steps:
        for path, (_, gradient) in _moments(inquiry, step).items():
            squares[path] = squares.get(path, mx.array(0.0)) + mx.square(gradient) / len(steps)
        mx.eval(squares)
    over: dict[str, mx.array] = {}
    for step in steps:
        before, after, known = inquiry.scene.state(step - 1), inquiry.scene.state(step), _settings(inquiry, step)
        for path, (m, _) in _moments(inquiry, step).items():
            one, rate = known[path], _rate(inquiry, step, known[path].member)
            weight = before.weights[path].astype(mx.float32)
            correction = 1 - one.beta1**step if one.bias_correction else 1.0
            usual = -rate * (m / correction / (mx.sqrt(squares[path]) + one.eps) + one.decay * weight)
            moved = after.weights[path].astype(mx.float32) - weight
            excess = mx.where(mx.isfinite(moved - usual), moved - usual, 0.0)
            over[path] = over[path] + excess if path in over else excess
        mx.eval(over)
    return over


def _settings(inquiry: Inquiry, step: int) -> dict[str, Settings]:
    return settings(inquiry.run.manifest.optimizer, inquiry.scene.state(step))


def _rate(inquiry: Inquiry, step: int, member: int) -> float:
    bits = inquiry.scene.moment(step).rates[member]
    return 0.0 if bits is None else float(bits_float(bits))


def _moments(inquiry: Inquiry, step: int) -> dict[str, tuple[mx.array, mx.array]]:
    """m after a step, and the gradient that entered it, float32, by parameter."""
    scene, found = inquiry.scene, {}
    known, before, after = _settings(inquiry, step), scene.state(step - 1), scene.state(step)
    for path, place in moment_paths(after.optimizer, "m", known).items():
        m, old = (state.optimizer[place].astype(mx.float32) for state in (after, before))
        beta1 = known[path].beta1
        found[path] = m, (m - beta1 * old) / (1 - beta1)
    return found
