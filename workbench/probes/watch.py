"""What passes by during a forward pass besides layers' outputs: attention calls, the logits, the count of targets.

While a `Watch` is open and its loss function runs, the functions of MLX are replaced where callers look them up, for
this thread; nothing stays. What is kept are arrays of the trace being built (or reductions of them, in its graph), so
watching moves no bit of an uncompiled pass. Under `mx.vmap` a function sees placeholders, which are not kept.
Knows `nn.Module` and loss functions; nothing of steps, gradients or files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..bits import json_float
from ..capture import ModuleCalls, function_calls, is_floating
from ..deterministic import attention_calls
from ..experiment import LossFunction
from .attention import HeadStatistics, attention_statistics, softmax_statistics
from .measured import Attention, Logits

FUSED, SOFTMAX = "mx.fast.scaled_dot_product_attention", "mx.softmax of 4 axes"
CROSS_ENTROPY, EXTRAS = "nn.losses.cross_entropy", 'extras["logits"]'


@dataclass
class _Seen:
    """One thing that passed by. `arrays` are outputs of the pass; the rest was known while it was traced."""

    source: str
    path: str = ""
    call: int = 0
    scale: float = 1.0
    mask: str | None = None
    vocabulary: int = 0
    count: int | None = None
    arrays: dict[str, mx.array] = field(default_factory=dict)


@dataclass(frozen=True)
class Forward:
    """What was seen, as a trace has it."""

    attention: list[Attention]
    logits: Logits | None
    targets: int | None


class Watch:
    """Within a `with`, notes what passes while `loss_fn` runs.

    Args:
        model: whose modules' calls give attention calls their paths.
        loss_fn: of the experiment.

    Attributes:
        seen: in the order of execution.
    """

    def __init__(self, model: nn.Module, loss_fn: LossFunction) -> None:
        self._loss_fn = loss_fn
        self._modules = ModuleCalls.of_all(model, lambda path, perform, args, kwargs: perform(*args, **kwargs))
        self._running = False
        self._calls: dict[str, int] = {}
        self.seen: list[_Seen] = []

    def loss_fn(self, model: nn.Module, *batch: mx.array) -> Any:
        """The experiment's loss function. A backward pass that computes a module again is not watched."""
        self._calls, self._running = {}, True
        try:
            returned = self._loss_fn(model, *batch)
        finally:
            self._running = False
        if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], dict):
            self._extras(returned[1])
        return returned

    def __enter__(self) -> Watch:
        with ExitStack() as stack:
            stack.enter_context(self._modules)
            stack.enter_context(attention_calls(self._attention))
            stack.enter_context(function_calls(nn.losses, "cross_entropy", self._cross_entropy))
            stack.enter_context(function_calls(mx, "softmax", self._softmax))
            self._open = stack.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._open.close()

    def _note(self, source: str, **what: Any) -> None:
        path = self._modules.path
        call = self._calls.get(path, 0)
        self._calls[path] = call + 1
        self.seen.append(_Seen(source, path, call, **what))

    def _attention(self, perform: Callable[..., mx.array], q: Any, k: Any, v: Any, **options: Any) -> mx.array:
        if self._running:
            arrays = {"q": q, "k": k}
            arrays |= {name: options[name] for name in ("mask", "sinks") if isinstance(options.get(name), mx.array)}
            mask = options.get("mask")
            self._note(FUSED, scale=options["scale"], mask=mask if isinstance(mask, str) else None, arrays=arrays)
        return perform(q, k, v, **options)

    def _softmax(self, perform: Callable[..., mx.array], a: Any, *args: Any, **kwargs: Any) -> mx.array:
        if self._running and is_attention_softmax(a, *args, **kwargs):
            self._note(SOFTMAX, arrays={"scores": a})
        return perform(a, *args, **kwargs)

    def _cross_entropy(
        self, perform: Callable[..., mx.array], logits: Any, targets: Any, *args: Any, **kwargs: Any
    ) -> mx.array:
        if self._running and is_floating(logits) and logits.ndim:
            weights, axis = (*args, *(kwargs.get(name) for name in ("weights", "axis")[len(args) :]))[:2]
            self._logits(CROSS_ENTROPY, logits, -1 if axis is None else axis)
            if isinstance(weights, mx.array):
                self.seen.append(_Seen("weights", arrays={"count": mx.sum(weights != 0)}))
        return perform(logits, targets, *args, **kwargs)

    def _logits(self, source: str, logits: mx.array, axis: int) -> None:
        values = logits.astype(mx.float32)
        arrays = {"max": mx.max(values, axis=axis), "log_z": mx.logsumexp(values, axis=axis)}
        self.seen.append(_Seen(source, vocabulary=logits.shape[axis], arrays=arrays))

    def _extras(self, extras: dict[str, Any]) -> None:
        if is_floating(extras.get("logits")) and not any(one.source == CROSS_ENTROPY for one in self.seen):
            self._logits(EXTRAS, extras["logits"], -1)
        for name in ("targets", "mask"):
            value = extras.get(name)
            if isinstance(value, mx.array):
                self.seen.append(_Seen("extras", arrays={"count": _count(value, mask=name == "mask")}))
            elif isinstance(value, (int, float)):
                self.seen.append(_Seen("extras", count=int(value)))
            else:
                continue
            break

    def forward(self, outputs: Sequence[dict[str, mx.array]]) -> Forward:
        """What was seen, from the evaluated arrays of `seen` (in a compiled pass: its outputs in their place)."""
        pairs = [(one, arrays) for one, arrays in zip(self.seen, outputs, strict=True) if _evaluated(arrays)]
        return Forward(_attention(pairs), _logit_summary(pairs), _targets(pairs))


def _count(value: mx.array, *, mask: bool) -> mx.array:
    """How many targets a loss function's extras tell of, int32: a number as it is, a mask's entries that are not 0.

    Args:
        mask: that it is one is said by its name; else zeros and ones tell, and of anything else, token ids say, nothing
            is known: -1.
    """
    if value.ndim == 0:
        return value.astype(mx.int32)
    count = mx.sum(value != 0)
    return (count if mask else mx.where(mx.all((value == 0) | (value == 1)), count, -1)).astype(mx.int32)


def is_attention_softmax(a: Any, axis: Any = None, *args: Any, **kwargs: Any) -> bool:
    """Over the last of four axes: with three, scores of attention and logits of tokens look alike."""
    last = axis in (-1, 3) or (isinstance(axis, (list, tuple)) and list(axis) in ([-1], [3]))
    return last and is_floating(a) and a.ndim == 4


_Pairs = list[tuple[_Seen, dict[str, mx.array]]]


def _evaluated(arrays: dict[str, mx.array]) -> bool:
    try:
        mx.eval(arrays)
    except RuntimeError:  # placeholders of a transformation that has ended
        return False
    return True


def _attention(pairs: _Pairs) -> list[Attention]:
    found: dict[tuple[str, int, str], HeadStatistics] = {}
    for seen, arrays in pairs:
        if seen.source == FUSED:
            mask = arrays.get("mask", seen.mask)
            part = attention_statistics(
                arrays["q"], arrays["k"], scale=seen.scale, mask=mask, sinks=arrays.get("sinks")
            )
        elif seen.source == SOFTMAX:
            part = softmax_statistics(arrays["scores"])
        else:
            continue
        key = seen.path, seen.call, seen.source
        found[key] = found[key] + part if key in found else part
    return [_entry(*key, one) for key, one in found.items()]


def _entry(path: str, call: int, source: str, heads: HeadStatistics) -> Attention:
    with np.errstate(invalid="ignore", divide="ignore"):
        entropy = heads.entropy / heads.visible
    return Attention(
        path=path,
        call=call,
        source=source,
        logit_max=[json_float(np.float32(value)) for value in heads.logit_max],
        entropy=[json_float(np.float32(value)) for value in entropy],
        hidden_queries=int((heads.queries - heads.visible).sum()),
        queries=int(heads.queries.sum()),
    )


def _logit_summary(pairs: _Pairs) -> Logits | None:
    seen = [(one, arrays) for one, arrays in pairs if "log_z" in arrays]
    if not seen or len({one.vocabulary for one, _ in seen}) > 1:  # several vocabularies: no one number for all
        return None
    peaks, log_z = (
        np.concatenate([np.array(arrays[name]).reshape(-1) for _, arrays in seen]) for name in ("max", "log_z")
    )
    if not peaks.size:
        return None
    with np.errstate(invalid="ignore", over="ignore"):
        values = (peaks.max(), peaks.mean(dtype=np.float64), log_z.max(), log_z.mean(dtype=np.float64))
    names = ("max", "mean_max", "log_z_max", "log_z_mean")
    return Logits(
        source=seen[0][0].source,
        tokens=peaks.size,
        vocabulary=seen[0][0].vocabulary,
        **{name: json_float(np.float32(value)) for name, value in zip(names, values, strict=True)},
    )


def _targets(pairs: _Pairs) -> int | None:
    """As the extras say; else the weights of cross entropy that are not 0; else unknown: a mask may come later."""
    for source in ("extras", "weights"):
        counts = [
            int(np.asarray(arrays["count"])) if one.count is None else one.count
            for one, arrays in pairs
            if one.source == source
        ]
        if counts and min(counts) >= 0:
            return sum(counts)
    return None
