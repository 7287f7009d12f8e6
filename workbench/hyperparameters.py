"""What an optimizer was told, as JSON: MLX keeps betas, eps and the like as attributes, outside the state it saves; and
in which of its other parts an experiment differs from the recorded one."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np

from .ignored import ignored

if TYPE_CHECKING:
    from .experiment import Experiment
    from .manifest import Manifest


def describe_optimizer(optimizer: optim.Optimizer) -> dict[str, Any]:
    """Class and public attributes; the name of a schedule in place of the function; members of a MultiOptimizer."""
    if isinstance(optimizer, optim.MultiOptimizer):
        return {"class": "MultiOptimizer", "members": [describe_optimizer(member) for member in optimizer.optimizers]}
    found: dict[str, Any] = {"class": type(optimizer).__name__}
    for name, value in sorted(vars(optimizer).items()):
        if not name.startswith("_"):
            found[name] = _plain(value)
    schedules = getattr(optimizer, "_schedulers", {})
    return found | {"schedules": sorted(schedules)}


def told(
    before: dict[str, Any], after: dict[str, Any], ignore: Collection[str] = (), path: str = "optimizer"
) -> dict[str, Any]:
    """The description of an optimizer that was `before` the first step what it was told, and is `after` it: with the
    names of attributes that its own code changes, such as a count of calls, which it was not told (`changing`).

    Args:
        ignore: names that the user says no step depends on (see `ignored`): they are of those, too.
        path: of the optimizer, where these names may be of a part of it.
    """
    if "members" in before:
        pairs = enumerate(zip(before["members"], after["members"], strict=True))
        members = [told(one, other, ignore, f"{path}.optimizers[{number}]") for number, (one, other) in pairs]
        return before | {"members": members}
    names = [name for name in {**after, **before} if name not in ("class", "schedules")]
    changing = [name for name in names if ignored(f"{path}.{name}", ignore) or not _same(name, before, after)]
    return after | before | ({"changing": sorted(changing)} if changing else {})


def _same(name: str, before: dict[str, Any], after: dict[str, Any]) -> bool:
    return name in before and name in after and before[name] == after[name]


def other_parts(experiment: Experiment, manifest: Manifest) -> list[str]:
    """Phrases on a step function and extra state that one has and the other has not."""
    kinds = {True: "one of its own", False: "the built-in one"}
    have, want, found = experiment.step_fn is not None, manifest.own_step, []
    if have != want:
        found.append(f"the step is {kinds[have]}, recorded {kinds[want]}")
    if sorted(experiment.extra) != manifest.extra:
        found.append(f"extra is {sorted(experiment.extra)}, recorded {manifest.extra}")
    return found


def other_optimizer(found: dict[str, Any], expected: dict[str, Any], where: str = "") -> list[str]:
    """Phrases on what an optimizer was told, and the recorded one was not.

    Args:
        found, expected: descriptions of both.
        where: of a member, which one that is.
    """
    if found["class"] != expected.get("class"):
        return [f"{where}optimizer is {found['class']}, recorded {expected.get('class')}"]
    here, there = found.get("members", []), expected.get("members", [])
    if len(here) != len(there):
        return [f"{where}optimizer {found['class']} has {len(here)} members, recorded {len(there)}"]
    unlike, passed = [], {"class", "members", "changing", *expected.get("changing", [])}
    for name in (name for name in {**expected, **found} if name not in passed):
        have, want = found.get(name, "missing"), expected.get(name, "missing")
        if have != want and not _unrecorded(want):
            unlike.append(f"{where}optimizer {found['class']}: {name} is {have}, recorded {want}")
    for number, (one, other) in enumerate(zip(here, there, strict=True)):
        unlike += other_optimizer(one, other, f"{where}optimizers[{number}]: ")
    return unlike


def other_options(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Phrases on options of the step that are others than the recorded ones."""
    names = {**expected, **found}
    return [
        f"{name} is {found.get(name)}, recorded {expected.get(name)}"
        for name in names
        if found.get(name) != expected.get(name)
    ]


def _unrecorded(value: Any) -> bool:
    """Of a number of numpy, runs recorded before these were described have the type alone."""
    return isinstance(value, str) and value.startswith("<class 'numpy.")


def _plain(value: Any) -> Any:
    if isinstance(value, (mx.array, np.ndarray)):
        return _plain(value.tolist())
    if isinstance(value, np.generic):
        return _plain(value.item()) if isinstance(value.item(), (bool, int, float)) else str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no word for it
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 2**63:
        return str(value)  # more than JSON's readers take
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, (bool, int, float, type(None))):
        return value
    name = getattr(value, "__name__", None)
    return name if isinstance(name, str) else str(type(value))
