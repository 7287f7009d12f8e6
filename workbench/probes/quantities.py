"""What a parameter's arrays say about its update, beyond their norms. numpy on flat arrays; knows no MLX, no steps.

All arrays are flat float32 of one order; what is stored in half precision is converted, which is exact. Each function
reads its arrays once, a stretch at a time, so that temporaries stay in the cache: products and sums are float32 over
4096 elements, float64 above, and float64 throughout where float32's range does not suffice.

A quantity that is undefined (0/0, no second moment) is None; one that is not finite is NaN or inf.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

STRETCH = 1 << 17  # elements: 512 KiB of float32
_BLOCK = 4096  # elements a BLAS dot call
_LOW, _HIGH = 1e-30, 1e30  # sums of squares between which float32 products have neither over- nor underflowed


def update_ratio(update: float, weight: float) -> float | None:
    """‖update‖ / ‖weight before the step‖ from the two L2 norms; None for a weight of zeros.

    The usual yardstick of a learning rate: about 1e-3 (A. Karpathy, CS231n notes, "Ratio of weights:updates"); You et
    al. 2017, arXiv:1708.03888 make it the same in every layer.
    """
    return None if weight == 0 else update / weight


def cosine(left: np.ndarray, right: np.ndarray) -> float | None:
    """left·right / (‖left‖ ‖right‖); None if one of them is all zeros.

    Of the update and −gradient, 1 is plain gradient descent. Adam's update follows the signs of the moments, so it is
    below 1 even where momentum and gradient agree; at or below 0 the step climbs what this batch asks to descend.
    """
    product, left_square, right_square = 0.0, 0.0, 0.0
    for a, b in zip(_stretches(left), _stretches(right), strict=True):
        product += _dot(a, b)
        left_square += _dot(a, a)
        right_square += _dot(b, b)
    if left_square == 0 or right_square == 0:
        return None
    found = product / math.sqrt(left_square) / math.sqrt(right_square)
    return max(-1.0, min(found, 1.0)) if found == found else found  # of float32 sums it may come out a little beyond


def clip_scale(grad_norm: float, clip: float | None) -> float:
    """The factor min(1, clip / (‖g‖ + 1e-6)) that global-norm clipping puts on every gradient (`step.clipped`)."""
    return 1.0 if clip is None else min(clip / (grad_norm + 1e-6), 1.0) if grad_norm == grad_norm else math.nan


def bias_correction(beta2: float, step: int) -> float:
    """1 / (1 − β2^t): the factor on v that makes v̂ (Kingma & Ba 2015, arXiv:1412.6980, algorithm 1)."""
    return 1 / (1 - beta2**step)


def staleness_rms(
    gradient: np.ndarray, v: np.ndarray, *, eps: float, correction: float = 1.0, scale: float = 1.0
) -> float | None:
    """RMS_t = √mean(g²/max(v̂, ε²)): how far the squared gradient has outrun the second moment that divides it.

    About 1 while v̂ tracks g². Wortsman et al. 2023 (arXiv:2304.13013) found loss spikes 1 to 8 steps after such a rise,
    counting 2.3 as one; AdaFactor clips its update by it (Shazeer & Stern 2018, arXiv:1804.04235, section 6). Both take
    v̂ *after* the update, which includes g² itself, and so does this: it never exceeds 1/√((1 − β2)·correction).

    Args:
        gradient: before clipping.
        v: the second moment in state N.
        eps: the optimizer's ε.
        correction: v̂ = correction · v: `bias_correction`, or 1 for an optimizer that was told not to correct.
        scale: `clip_scale`, since the gradient that enters v is the clipped one.

    Returns:
        None for an empty parameter. An element without gradient counts as 0 whatever its v.
    """
    if not gradient.size:
        return None
    total = 0.0
    for g, second in zip(_stretches(gradient), _stretches(v), strict=True):
        denominator = _root(second, correction, eps)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            ratio = np.where(g == 0, np.float32(0), g / denominator)
        total += _dot(ratio, ratio)
    return scale * math.sqrt(total / gradient.size)


def eps_fraction(v: np.ndarray, *, eps: float, correction: float = 1.0) -> float | None:
    """The fraction of elements with √v̂ < ε, where ε and no longer the second moment sets the step size.

    Wortsman et al. 2023 (arXiv:2309.14322): as gradients shrink towards ε with scale, updates shrink too, and learning
    stops in the layers concerned. Arguments as in `staleness_rms`.
    """
    if not v.size:
        return None
    below = sum(np.count_nonzero(_root(second, correction) < np.float64(eps)) for second in _stretches(v))
    return int(below) / v.size


def stuck_fraction(update: np.ndarray, *asked: np.ndarray) -> float | None:
    """The fraction of weights that were asked to move and did not: the update was rounded away.

    Rounding to nearest gives a weight back unchanged when the change is under half a unit in the last place, so this is
    seen on the weight itself, in its own dtype, whatever the optimizer. A bfloat16 weight just above 1 stands still
    under a change of 2^-8 (Zamirai et al. 2020, arXiv:2010.06192, on why training in bfloat16 alone stalls).

    Args:
        update: weight after minus weight before, as applied.
        asked: the gradient, and the first moment if the optimizer has one. A weight is asked to move where one of them
            is not 0.

    Returns:
        None if no weight was asked to move.
    """
    stuck, count = 0, 0
    for moved, *wanted in zip(*map(_stretches, (update, *asked)), strict=True):
        wants = np.logical_or.reduce([one != 0 for one in wanted])
        count += int(np.count_nonzero(wants))
        stuck += int(np.count_nonzero(wants & (moved == 0)))
    return stuck / count if count else None


def _stretches(values: np.ndarray) -> Iterator[np.ndarray]:
    return (values[start : start + STRETCH] for start in range(0, values.size, STRETCH))


def _root(v: np.ndarray, correction: float, least: float = 0.0) -> np.ndarray:
    """max(√(correction·v), least), float32; float64 where float32 can't hold `least`."""
    with np.errstate(invalid="ignore"):  # a v that was tampered with may be negative
        root = np.sqrt(v) * np.float32(math.sqrt(correction))
    if least == 0:
        return root
    if np.float32(least) < np.finfo(np.float32).tiny:
        return np.maximum(root.astype(np.float64), least)
    return np.maximum(root, np.float32(least))


def _dot(left: np.ndarray, right: np.ndarray) -> float:
    """The inner product of flat arrays of at most `STRETCH` elements."""
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        whole = left.size - left.size % _BLOCK
        blocks = (array[:whole].reshape(-1, _BLOCK) for array in (left, right))
        total = float(np.sum(np.vecdot(*blocks), dtype=np.float64)) + float(np.vecdot(left[whole:], right[whole:]))
        if left.dtype == np.float32 and not _LOW < abs(total) < _HIGH:  # over- or underflow, NaN, or exactly zero
            return _dot(left.astype(np.float64), right.astype(np.float64))
    return total
