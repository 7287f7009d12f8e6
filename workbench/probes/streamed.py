"""Tensors of an unevaluated pass, measured one portion after the other, while the next is being computed.

What was measured is let go, so that of a pass no more stands in memory at a time than computing it takes, and the host
reads while the step's own arithmetic goes on. Which portion is asked for first moves no bit: an array's value does not
depend on when it is evaluated. Knows arrays; nothing of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from .measure import AT_ONCE, measure, on_its_device
from .measured import Row

PORTION = 1 << 18  # elements on the host: about one layer's output, so that little more than that is held


@dataclass
class Portion:
    """Tensors of one kind that are computed one after the other.

    Attributes:
        tensors: what is measured, by path, and then let go.
        beside: what is computed with them; others keep it.
    """

    kind: str
    tensors: dict[str, mx.array] = field(default_factory=dict)
    beside: list[mx.array] = field(default_factory=list)


def portions(
    kind: str, tensors: dict[str, mx.array], beside: Mapping[str, Sequence[mx.array]] | None = None
) -> list[Portion]:
    """Cuts tensors, in the order in which they are computed, and empties their dict: only the portions hold them then.

    Args:
        beside: what is computed with some of them, by path.
    """
    found, size = [Portion(kind)], 0
    enough = AT_ONCE if on_its_device() else PORTION
    for path in list(tensors):
        if size >= enough:
            found.append(Portion(kind))
            size = 0
        found[-1].tensors[path] = tensors.pop(path)
        found[-1].beside += (beside or {}).get(path, ())
        size += found[-1].tensors[path].size
    return found


def streamed(waiting: list[Portion], meanwhile: Callable[[], None] = lambda: None) -> list[Row]:
    """Measures portions, in order; the list is empty afterwards.

    Args:
        meanwhile: what the host has to do anyway: called once, while the first portion is being computed.
    """
    rows: list[Row] = []
    if waiting:
        _begin(waiting[0])
    meanwhile()
    while waiting:
        portion = waiting.pop(0)
        if waiting:
            _begin(waiting[0])
        rows += measure(portion.kind, portion.tensors)
        mx.eval(portion.beside)
    return rows


def _begin(portion: Portion) -> None:
    mx.async_eval(portion.tensors, portion.beside)
