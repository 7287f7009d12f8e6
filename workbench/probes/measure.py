"""The tensors of a replayed step as rows: norms and counts of each, and how each parameter was updated.

Knows states and gradients; nothing of how they were computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import mlx.core as mx
import numpy as np

from .. import cuda
from ..bits import float_bits, json_float
from ..experiment import Experiment
from ..host import float_views, square_sum
from ..norms import square_sums
from ..observe import moments
from ..snapshot import State
from ..step import StepResult
from . import quantities
from .measured import Row, Update
from .on_device import Moved, moved, summaries
from .second_moment import second_moments
from .summary import Summary, summarise

AT_ONCE = 1 << 24  # elements that are evaluated together: few waits for a device, and little memory for temporaries
AT_ONCE_ON_HOST = 1 << 20  # which waits for nothing


def measure(kind: str, tensors: Mapping[str, mx.array] | Iterable[tuple[str, mx.array]]) -> list[Row]:
    """Statistics of named tensors, in order: L2 and RMS in float32 (added as telemetry's norms), max |x|, mean, the
    fraction of exact zeros, the count of non-finite elements.

    Args:
        tensors: by path, or pairs that may be made as they are asked for: no more than a portion is held then.
    """
    pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
    return [row for part in _portions(pairs) for row in _rows(kind, part)]


def _rows(kind: str, part: Mapping[str, mx.array]) -> Iterator[Row]:
    arrays = list(part.values())
    if on_its_device():
        squares = square_sums(part)
        for (path, array), found in zip(part.items(), summaries(arrays), strict=True):
            yield _row(kind, path, array, squares[path], summarise(*float_views([array])) if found is None else found)
        return
    for (path, array), view in zip(part.items(), float_views(arrays), strict=True):
        yield _row(kind, path, array, square_sum(view), summarise(view))


def on_its_device() -> bool:
    """Whether arrays are better measured where they are: the host would have to copy each."""
    return cuda.available()


def _portions(tensors: Iterable[tuple[str, mx.array]]) -> Iterator[dict[str, mx.array]]:
    part: dict[str, mx.array] = {}
    for path, array in tensors:
        part[path] = array
        if sum(one.size for one in part.values()) >= (AT_ONCE if on_its_device() else AT_ONCE_ON_HOST):
            yield part
            part = {}
    yield part


def _row(kind: str, path: str, array: mx.array, squares: float, found: Summary) -> Row:
    size = max(array.size, 1)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        l2, rms, mean = (
            np.float32(np.sqrt(squares)),
            np.float32(np.sqrt(squares / size)),
            np.float32(found.total / size),
        )
    return Row(
        path=path,
        kind=kind,
        dtype=str(array.dtype).removeprefix("mlx.core."),
        size=array.size,
        l2=json_float(l2),
        rms=json_float(rms),
        max_abs=None if found.max_abs is None else json_float(found.max_abs),
        nonfinite=found.nonfinite,
        l2_bits=None if np.isfinite(l2) else float_bits(l2),
        mean=json_float(mean) if array.size else None,
        zero_fraction=found.zeros / array.size if array.size else None,
    )


def parameter_rows(before: State, after: State, gradients: Mapping[str, mx.array]) -> list[Row]:
    """Statistics of every parameter's gradient, update, weight and moments: of state N, and of N-1 as `*_before`.

    The update is the change really applied: weight after minus weight before, in float32.
    """
    rows = measure("gradient", {path: gradients[path] for path in sorted(gradients)})
    rows += measure(
        "update",
        (
            (path, after.weights[path].astype(mx.float32) - before.weights[path].astype(mx.float32))
            for path in sorted(gradients)
        ),
    )
    for state, suffix in ((after, ""), (before, "_before")):
        rows += measure(f"weight{suffix}", {path: state.weights[path] for path in sorted(gradients)})
        for leaf in ("m", "v"):
            rows += measure(f"adam_{leaf}{suffix}", moments(state.optimizer, leaf, gradients))
    return rows


def parameter_updates(experiment: Experiment, before: State, after: State, result: StepResult) -> list[Update]:
    """How each trainable parameter was updated in a step, by path; see `quantities` for what the numbers mean.

    Args:
        experiment: whose optimizer and clipping made the update.
        before, after: states N-1 and N.
        result: of step N.
    """
    scale = quantities.clip_scale(float(result.grad_norm), experiment.options.clip)
    first = moments(after.optimizer, "m", result.gradients)
    second = second_moments(experiment.optimizer, after.optimizer, result.gradients)
    found = []
    for path in sorted(result.gradients):
        arrays = [after.weights[path], before.weights[path], result.gradients[path]]
        m, v = first.get(path), second.get(path)
        arrays += ([] if m is None else [m]) + ([] if v is None else [v.array])
        divides = {} if v is None else {"eps": v.eps, "correction": v.correction}
        one = None
        if on_its_device():
            now, then, gradient = arrays[:3]
            one = moved(now, then, gradient, m, None if v is None else v.array, scale=scale, **divides)
        if one is None:
            one = _moved(arrays, m is not None, v is not None, scale=scale, **divides)
        found.append(
            Update(
                path=path,
                dtype=str(after.weights[path].dtype).removeprefix("mlx.core."),
                ratio=_plain(one.ratio),
                cosine=None if one.cosine is None else _plain(-one.cosine),
                staleness_rms=_plain(one.staleness),
                eps_fraction=one.eps_fraction,
                stuck_fraction=one.stuck,
            )
        )
    return found


def _moved(
    arrays: Sequence[mx.array], has_m: bool, has_v: bool, *, scale: float, eps: float = 0.0, correction: float = 1.0
) -> Moved:
    """As `moved`, on the host. `arrays`: its first arguments, without those that are not there."""
    now, then, gradient, *moving = _aligned(arrays)
    with np.errstate(invalid="ignore"):  # of a weight that is infinite the update is NaN
        update = now - then
    staleness = eps_fraction = None
    if has_v:
        staleness = quantities.staleness_rms(gradient, moving[-1], eps=eps, correction=correction, scale=scale)
        eps_fraction = quantities.eps_fraction(moving[-1], eps=eps, correction=correction)
    return Moved(
        ratio=quantities.update_ratio(_l2(update), _l2(then)),
        cosine=quantities.cosine(update, gradient),
        staleness=staleness,
        eps_fraction=eps_fraction,
        stuck=quantities.stuck_fraction(update, gradient, *(moving[:1] if has_m else [])),
    )


def _aligned(arrays: Sequence[mx.array]) -> list[np.ndarray]:
    """Flat float32 views in row-major order; MLX lays a matrix's gradient out transposed, so that one is copied."""
    plain = [array if array.dtype == mx.float32 else array.astype(mx.float32) for array in arrays]
    mx.eval(plain)
    return [np.ascontiguousarray(np.asarray(array)).reshape(-1) for array in plain]


def _l2(values: np.ndarray) -> float:
    return float(np.sqrt(square_sum(values)))


def _plain(value: float | None) -> float | None:
    """To float32's digits: more would be of no use in a file."""
    return None if value is None else json_float(np.float32(value))
