"""What a step reads beside its state as it is before the first step, as short texts that a run keeps: a replay that is
not exact tells by them which of it is otherwise.

A rate from an environment variable, a table of random numbers without a seed: no checkpoint holds it, and it does not
change while training goes on. Knows experiments; nothing of folders.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from hashlib import sha256
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..bare_objects import all_plain, is_a, is_plain, items_of, plain_numpy
from ..enumeration import some
from ..experiment import Experiment
from ..host import raw_views
from ..ignored import ignored
from ..library_functions import LIBRARY
from ..outside_state import outside
from .held_marks import BUFFER, Marks
from .name_uses import NameUses
from .python_values import BY_MLX, OF_MODULE

MOST = 300  # values of a run, those of the user's functions before those of the model
_ARRAYS = 1 << 24  # bytes of all arrays that are looked at
_SHORT = 20  # characters of a text that is kept as it is: longer ones may be keys of services
_NAMED = 6
_SECRET = ("key", "token", "secret", "password", "credential")
_FIRST = ("step_fn", "loss_fn", "optimizer", "model")


def start_values(experiment: Experiment, ignore: Collection[str] = ()) -> dict[str, str]:
    """By path, a text for each plain value, array and function that the step may read; but for the `ignore`d ones (see
    `workbench.ignored`). Arrays of more than a megabyte are left out, and of long texts there is a digest only."""
    uses, left = NameUses(experiment), _ARRAYS
    found: dict[str, str] = {}
    for path, value, place in outside(experiment, (object,)):
        if is_a(value, nn.Module) or path.endswith((*BY_MLX, *OF_MODULE)) or ignored(path, ignore):
            continue
        if place is not None and place.kind == LIBRARY or not uses.reads(path, place):
            continue
        if is_a(value, (mx.array, np.ndarray)):
            size = value.nbytes if is_a(value, mx.array) else plain_numpy(value).nbytes
            if size > min(BUFFER, left):
                continue
            left -= size
        if path not in found and (text := _text(path, value, named=place is not None)) is not None:
            found[path] = text
    ordered = sorted(found, key=lambda path: _FIRST.index(path.partition(".")[0]))
    return {path: found[path] for path in ordered[:MOST]}


def other_values(recorded: Mapping[str, str], here: Mapping[str, str]) -> str | None:
    """A sentence on those that are otherwise here than when they were recorded; None: none is."""
    others = [
        f"{path} ({_beside(then, here[path])})" for path, then in recorded.items() if here.get(path, then) != then
    ]
    if not others:
        return None
    return f"The step reads what is otherwise here than when it was recorded: {some(others, _NAMED)}."


def _beside(then: str, here: str) -> str:
    what, _, digest = then.partition(", sha256 ")
    if digest and what == here.partition(", sha256 ")[0]:  # digests say nothing to a reader
        return f"{what}, which has another content here"
    return f"it was {then}, and is {here} here"


def _text(path: str, value: Any, *, named: bool) -> str | None:
    if is_a(value, mx.array):
        try:
            (content,) = raw_views([value])
        except (RuntimeError, ValueError):  # of a trace that is over
            return None
        kind = f"an array of shape {value.shape} and dtype {str(value.dtype).removeprefix('mlx.core.')}"
        return f"{kind}, sha256 {_digest(content.tobytes())}"
    if is_a(value, np.ndarray):
        array = plain_numpy(value)
        if array.dtype.hasobject:
            return None
        kind = f"a numpy array of shape {array.shape} and dtype {array.dtype}"
        return f"{kind}, sha256 {_digest(np.ascontiguousarray(array).tobytes())}"
    if is_a(value, (str, bytes)):
        text = str.__str__(value) if is_a(value, str) else bytes(value).hex()
        secret = any(one in path.rpartition(".")[2].lower() for one in _SECRET)
        if len(text) <= _SHORT and not secret:
            return repr(text)
        return f"a text of {len(text)} characters, sha256 {_digest(text.encode(errors='surrogatepass'))}"
    if is_a(value, (set, frozenset)):
        items = items_of(value)
        if not all_plain(items) or len(items) > MOST:
            return None
        return f"a set of {len(items)} items, sha256 {_digest(repr(sorted(map(repr, items))).encode())}"
    mark = Marks().of(value)
    if mark is None or (mark.said or "").startswith("a dict of "):
        return None
    listed = is_a(value, list)
    function = named and (mark.said or "").startswith("the ")
    return mark.text if is_plain(value) or is_a(value, np.generic) or listed or function else None


def _digest(content: bytes) -> str:
    return sha256(content).hexdigest()[:16]
