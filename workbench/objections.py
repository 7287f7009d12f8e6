"""What a self-check says: why a step can't be replayed, or what may break a replay later.

Knows experiments and what was found; performs nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from . import extras
from .contents import RANDOM, Held
from .deep_snapshot import Opaque
from .enumeration import some
from .errors import ExperimentError
from .experiment import Experiment, kept_arrays, state_arrays
from .reachable import unseen
from .snapshot import State


def refuse_draws(moved: list[str], others: list[Held], *, compiled: bool) -> None:
    if moved and compiled:
        raise ExperimentError(
            f"it draws from {' and '.join(moved)} (or another thread did meanwhile), and a compiled step does so once, "
            "when it is traced; draw from mx.random, or in the sampler from a generator that its cursor describes"
        )
    if own := [one.path for one in others if one.kind.name == RANDOM]:
        raise ExperimentError(
            f"it draws random numbers from {some(own)}, whose state no checkpoint holds; draw from mx.random, or hand "
            "it to the recorder in `extra`, in an object with state_dict and load_state_dict"
        )


def refuse_other_dtypes(start: State, experiment: Experiment) -> None:
    """A state that changes its form at the first step fits no model that is built anew."""
    if said := other_dtypes(start, experiment):
        raise ExperimentError(said)


def other_dtypes(start: State, experiment: Experiment) -> str | None:
    """A sentence, if weights or optimizer state have another dtype or shape than before the step."""
    trained: dict[str, Any] = dict(tree_flatten(experiment.model.trainable_parameters()))
    weights = {path: array for path, array in state_arrays(experiment.model).items() if path in trained}
    kept = {path: array for path, array in kept_arrays(experiment).items() if not extras.of_object(path)}
    others = [
        f"{path} (from {_form(then[path])} to {_form(array)})"
        for now, then in ((weights, start.weights), (kept, start.optimizer))
        for path, array in now.items()
        if path in then and (then[path].dtype, then[path].shape) != (array.dtype, array.shape)
    ]
    if not others:
        return None
    return (
        f"it changed the dtype or shape of {some(others)}, so its checkpoints fit no model and optimizer that are "
        "built anew. Gradients in float32 make weights and moments float32: cast them to each parameter's dtype before "
        "optimizer.update, or start as it goes on, by model.set_dtype(mx.float32) before the optimizer and the recorder"
    )


def _form(array: mx.array) -> str:
    return f"{array.dtype}{array.shape}".removeprefix("mlx.core.")


def of_unclear(unclear: Mapping[str, str], numbers: list[str]) -> list[str]:
    """
    Args:
        unclear: by the name of each number of which it is not known what becomes of it ("": one of `numbers`), why.
    """
    each = [f"{name or some(numbers)}: the step {why}" for name, why in unclear.items()]
    return [f"whether a step depends on a number that no checkpoint holds is unverified ({some(each)})"] if each else []


def tell(
    model: nn.Module,
    unlike: list[str],
    doubt: str | None,
    step: int,
    changed: list[str],
    more: Sequence[str] = (),
    *,
    drew: bool,
    known: Collection[int] = (),
) -> None:
    """
    Args:
        known: ids of what hangs on the model, and is in a checkpoint as a whole.
        more: further sentences, without their full stop.
    """
    for one in more:
        _warn(one)
    if doubt:
        _warn(
            f"the self-check is unverified: step {step} was not performed twice, for {doubt}. Whether the run "
            f"can be replayed is not known before `workbench replay` has tried"
        )
    if unlike:
        _warn(
            f"step {step} gave other bits when it was performed again ({some(unlike)}), as stock operations "
            "may on this device: no step of this run can be expected to replay exactly. Leave deterministic=False out"
        )
    if changed:
        _warn(
            f"the step changes what no checkpoint holds: {some(changed)}. The first step does not depend on it; "
            "if a later one does, it will not replay: then hand it to the recorder as `extra`"
        )
    if (drawing := _drawing(model)) and not drew:
        _warn(
            f"the model has layers that draw random numbers ({some(drawing)}), and the step drew none: they are "
            "not used, or stand in a function compiled before without mx.random.state among its inputs and "
            "outputs. Then every step has the same mask, and another process another one"
        )
    if hidden := unseen(model, known):
        _warn(
            f"{len(hidden)} {'array is' if len(hidden) == 1 else 'arrays are'} reachable from the model but not in "
            f"parameters(): {some(hidden)}. MLX looks into modules, dicts and lists only: these are not "
            "trained, and in no checkpoint. Keep layers in a list, and constants under a name that starts with _"
        )


def refuse_other_extras(start: State, experiment: Experiment) -> None:
    """
    Raises:
        ExperimentError: the step changed how many arrays an extra state holds, or put something else into it.
    """
    extras.check(experiment.extra, experiment.options.compile)
    before, now = (
        {path for path in paths if extras.owns(path) and not extras.of_object(path)}
        for paths in (start.optimizer, extras.arrays(experiment.extra))
    )
    if other := sorted(before ^ now):
        name = other[0].partition("@")[2]
        raise ExperimentError(
            f"the step changes how many arrays extra {name!r} holds ({'gone' if other[0] in before else 'new'}: "
            f"{other[0].partition('@')[0]}); a checkpoint is put back into as many. Keep one array of fixed length "
            "and a count, or an object with state_dict and load_state_dict"
        )


def of_moved_on(moving: list[Opaque]) -> str:
    return (
        f"it takes something from {some(map(str, moving))}, which stands elsewhere afterwards, and no checkpoint holds "
        "where. Compute what you need from a number that is in the state (optimizer.step, say), keep it in an object "
        "with state_dict and load_state_dict and hand that to the recorder as `extra`, or do it in the loop and pass "
        "the value in the batch"
    )


def of_numbers(names: list[str], changed: dict[str, tuple[Any, Any]], used: Mapping[str, str] | None = None) -> str:
    """
    Args:
        names: of those that the step changes.
        used: by some of these names, or by none of them (""), how the step was seen to use it; None: it was not tried.
    """
    used = used or {}
    shown = [name for name in names if name in used] or names
    each = [f"{name} (from {changed[name][0]} to {changed[name][1]})" for name in shown]
    how = f"{next(iter(used.values()))}, and so" if used else "and"
    return (
        f"the step changes a number that no checkpoint holds, {some(each)}, {how} a later step may depend on it. Hand "
        "what holds it to the recorder as `extra` (an object with state_dict and load_state_dict), or count in the "
        "loop, outside of the step"
    )


def of_side_effects(did: list[str]) -> str | None:
    """Why a step must not be performed twice that did these things (`side_effects`); None: it may be."""
    return f"{some(did)}: outside of Python's memory nothing can be put back" if did else None


def reason_of(unlike: list[str], moved: list[str], changed: list[str]) -> str:
    said = f"performed again from the same state, on the same batch, it gave other bits ({some(unlike)})"
    if moved:
        return f"{said}: it draws from {' and '.join(moved)}, which no checkpoint holds; draw from mx.random"
    if changed:
        return (
            f"{said}, and it changes state that no checkpoint holds: {some(changed)}. Hand that to the recorder "
            "as `extra`, a dict of arrays that stay as many (extra={'history': {'norms': mx.zeros(50)}}), or keep it "
            "in the model or the optimizer"
        )
    if "state.rng" in unlike:
        return (
            f"{said}: it does not draw as many random numbers each time. A function compiled inside it draws only "
            "when it is traced, unless mx.random.state is among its inputs and outputs; do not compile it: the step is "
            "compiled as a whole"
        )
    return (
        f"{said}, and nothing was found that changed: it depends on the time, on another thread, or on an operation "
        "that varies from run to run (`workbench doctor` tries each)"
    )


def _drawing(model: nn.Module) -> list[str]:
    """Paths of the layers that draw random numbers in training."""
    kinds = (nn.Dropout, nn.Dropout2d, nn.Dropout3d)
    return [
        path
        for path, module in model.named_modules()
        if isinstance(module, kinds) and module.training and getattr(module, "_p_1", 0) < 1
    ]


def _warn(sentence: str) -> None:
    warnings.warn(sentence, stacklevel=5)
