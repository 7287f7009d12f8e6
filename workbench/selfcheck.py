"""What a recorder finds out at its first two steps: whether they can be replayed, and if not, what stands in the way.

The first step is performed once more, as a replay would do it: the state restored, its batch drawn again, the step
traced anew. Every bit of its loss, gradients and state must be the same; the training then goes on from that state,
which has the bits of the first. At the second step the batch is drawn again. The cost is one step and one more
compilation, and two batches. Knows experiments and steps; nothing of folders or recorders.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import mlx.nn as nn

from .errors import ExperimentError
from .experiment import Batch, Experiment, random_key, state_arrays
from .fingerprint import fingerprint
from .observe import edit, observe
from .plain_batches import PlainBatches
from .reachable import Found, Surroundings, unseen, visit
from .redrawing import Generators, draw_again, refuse_other_cursor
from .snapshot import State, capture, restore
from .step import Stepper, StepResult
from .telemetry import Edits

_SHOWN = 6  # names in a sentence


class SelfCheck:
    """Made before the first step is performed.

    Args:
        stepper: will perform it.
        start: the state that it starts from, with cursor and random state as before its batch was drawn.
        edits: what the loop changed in that state since it was left, which a replay changes too.
    """

    def __init__(self, stepper: Stepper, start: State, edits: Edits | None) -> None:
        self._stepper, self._start, self._edits = stepper, start, edits
        self._around = self._surroundings()
        self._generators = Generators()

    def _surroundings(self) -> Surroundings:
        return Surroundings(lambda: outside(self._stepper.experiment))

    def first(self, batch: Batch, result: StepResult, cursor: dict[str, Any], method: str) -> None:
        """After the first step. Leaves the experiment as that left it, bit for bit, with the Python values and arrays
        around it, and warns of what may break later.

        Raises:
            ExperimentError: a replay would not give the same bits. The experiment is at its start again then.
        """
        experiment = self._stepper.experiment
        moved = self._generators.moved()
        varying = not experiment.options.deterministic
        left = capture(experiment, self._start.step + 1, cursor) if varying else None
        seen = _evidence(self._stepper, batch, result, cursor, method)
        changed, after = self._around.changed(), self._surroundings()
        try:
            if moved and experiment.options.compile:
                raise ExperimentError(
                    f"it draws from {' and '.join(moved)} (or another thread did meanwhile), and a compiled step "
                    "does so once, when it is traced; draw from mx.random, or in the sampler from a generator that "
                    "its cursor describes"
                )
            again = Stepper(experiment, self._stepper.layers)
            drawn = self._drawn_again(batch, cursor)
            key = random_key()
            found = _evidence(again, drawn, again(drawn), cursor, method)
            unlike = [name for name in seen if found[name] != seen[name]]
            if unlike and not varying:
                raise ExperimentError(_reason(unlike, moved, list(changed)))
            numbers = [name for name, values in changed.items() if type(values[1]) in (int, float)]
            if numbers and not experiment.options.compile:
                raise ExperimentError(_of_numbers(numbers, changed))
        except ExperimentError as error:
            self._restore()
            self._around.put_back()
            raise ExperimentError(
                f"step {self._start.step + 1} can't be replayed: {error}. (self_check=False records it all the same)"
            ) from error
        after.put_back()  # performed once, the step would have left these
        if unlike:
            assert left is not None
            restore(experiment, left)
            _warn(
                f"step {left.step} gave other bits when it was performed again ({_some(unlike)}), as stock "
                "operations may on this device: no step of this run can be expected to replay exactly. Leave "
                "deterministic=False out"
            )
        if changed:
            _warn(
                f"the step changes what no checkpoint holds: {_some(changed)}. The first step does not depend on it; "
                "if a later one does, it will not replay: then hand it to the recorder as `extra`"
            )
        if (drawing := _drawing(experiment.model)) and random_key() == key:
            _warn(
                f"the model has layers that draw random numbers ({_some(drawing)}), and the step drew none: they are "
                "not used, or stand in a function compiled before without mx.random.state among its inputs and "
                "outputs. Then every step has the same mask, and another process another one"
            )
        if hidden := unseen(experiment.model):
            _warn(
                f"{len(hidden)} {'array is' if len(hidden) == 1 else 'arrays are'} reachable from the model but not in "
                f"parameters(): {_some(hidden)}. MLX looks into modules, dicts and lists only: these are not "
                "trained, and in no checkpoint. Keep layers in a list, and constants under a name that starts with _"
            )

    def _restore(self) -> None:
        restore(self._stepper.experiment, self._start)
        if self._edits is not None:
            edit(self._stepper.experiment, self._edits)

    def _drawn_again(self, batch: Batch, cursor: dict[str, Any]) -> Batch:
        """At the start again: the batch as a replay would have it."""
        sampler = self._stepper.experiment.sampler
        self._restore()
        if isinstance(sampler, PlainBatches):  # which the recorder stores
            sampler.consumed()
            return batch
        drawn = draw_again(sampler, batch, self._start.cursor, 1, self._start.cursor)
        refuse_other_cursor(sampler, cursor)
        return drawn


def outside(experiment: Experiment) -> Iterator[Found]:
    """Arrays and plain values that a step can reach beside its state, each with path and place, and once."""
    trained = {id(array) for array in state_arrays(experiment.model).values()}
    seen = set()
    for path, value, place in _reached(experiment):
        at = (path,) if place is None else (id(place[0]), place[1])
        if id(value) not in trained and at not in seen:
            seen.add(at)
            yield path, value, place


def _reached(experiment: Experiment) -> Iterator[Found]:
    yield from visit(experiment.model, "model")
    members = getattr(experiment.optimizer, "optimizers", None)
    for number, optimizer in enumerate(members or [experiment.optimizer]):
        path = f"optimizer.optimizers[{number}]" if members else "optimizer"
        yield from visit(vars(optimizer), path, {id(optimizer.state)})
    own = [experiment.model, experiment.optimizer, experiment.optimizer.state, experiment.sampler]
    known = {id(one) for one in (*own, experiment.extra, *experiment.extra.values())}
    for name, function in (("loss_fn", experiment.loss_fn), ("step_fn", experiment.step_fn)):
        yield from visit(function, name, known)


def _of_numbers(names: list[str], changed: dict[str, tuple[Any, Any]]) -> str:
    each = [f"{name} (from {changed[name][0]} to {changed[name][1]})" for name in names]
    return (
        f"the step changes a number that no checkpoint holds, {_some(each)}, and a later step may depend on it. Hand "
        "what holds it to the recorder as `extra` (an object with state_dict and load_state_dict), or count in the "
        "loop, outside of the step"
    )


def _evidence(
    stepper: Stepper, batch: Batch, result: StepResult, cursor: dict[str, Any], method: str
) -> dict[str, Any]:
    found = observe(stepper, batch, result, cursor, method).evidence()
    return found | {"gradients": fingerprint(result.gradients)}


def _reason(unlike: list[str], moved: list[str], changed: list[str]) -> str:
    said = f"performed again from the same state, on the same batch, it gave other bits ({_some(unlike)})"
    if moved:
        return f"{said}: it draws from {' and '.join(moved)}, which no checkpoint holds; draw from mx.random"
    if changed:
        return (
            f"{said}, and it changes state that no checkpoint holds: {_some(changed)}. Hand that to the recorder "
            "as `extra`, arrays in a dict, or keep it in the model or the optimizer"
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


def _some(names: Iterable[str]) -> str:
    found = list(names)
    return ", ".join(found[:_SHOWN]) + (f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else "")


def _warn(sentence: str) -> None:
    warnings.warn(sentence, stacklevel=4)
