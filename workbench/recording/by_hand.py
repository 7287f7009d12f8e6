"""What a loop changed in the state between two steps, by hand: weights, optimizer state, what `extra` holds.

A replay performs steps, and would not make the change. Arrays are compared by what their handles stand for, and bits
only where that is another array: a swap and back, or a load of the same weights, is no change. Learning rates are
left out: telemetry logs those that a loop sets (`remembered`). Knows experiments; nothing of folders or telemetry.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import copy
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from .. import cuda, extras
from ..experiment import Experiment, kept_arrays, state_arrays
from ..fingerprint import digests
from ..host import raw_views
from ..observe import logged, rate_paths
from ..step import optimizer_states
from ..trees import layout
from .array_identity import identities
from .layers import Layers
from .tree_children import TreeChildren

MOST = 20  # checkpoints that a recorder saves by itself for changes: a segment starts from each, so that all stay
EACH = 100  # steps between two of them, where no checkpoints are asked for
TOLD = 5  # warnings
_RUNNING = ("running_mean", "running_var")

Arrays = dict[str, mx.array]


class Change(NamedTuple):
    """
    Attributes:
        name: what was changed, in words.
        kept: whether a checkpoint of the changed state can be put back. Not so where a layer is another one, or an
            array has come, gone, or another shape or dtype: the experiment that a replay builds is not so.
    """

    name: str
    kept: bool = True


class ByHand:
    """The state that the last step left, between two steps: during one it holds no array, whose room the step may use.

    Args:
        save_every: as of a recorder.
    """

    def __init__(self, save_every: int) -> None:
        self.spacing = save_every or EACH
        self._left: tuple[Arrays, Arrays] | None = None
        self._children, self._arrays = TreeChildren(), list[mx.array]()
        self._layers, self._walks = Layers(), 0  # the layers are of that walk
        self._identities: list[int] | None = None
        self._saved: list[int] = []  # steps before whose successor a change was saved
        self._told = 0

    def keep(self, experiment: Experiment, arrays: tuple[Arrays, Arrays] | None = None) -> None:
        """Remembers the state, as the step left it.

        Args:
            arrays: new handles of its arrays, weights and optimizer, where somebody has found them just now.
        """
        self._left = arrays or (_handles(state_arrays(experiment.model)), _handles(kept_arrays(experiment)))
        self._arrays = self._children.look(_roots(experiment))
        self._identities = identities(self._arrays)
        if self._walks != self._children.walks or not self._layers.same():
            self._layers.note(_modules(experiment))
            self._walks = self._children.walks

    def holds(self, container: Any) -> int:
        """How many references to a container of the state this keeps."""
        return self._children.holds(container) + self._layers.holds(container)

    def forget(self) -> None:
        """Before a step."""
        self._left, self._arrays = None, []
        self._children.forget()

    def changed(self, experiment: Experiment) -> Change | None:
        """What is not as the last step left it; None: nothing. What no checkpoint can give back comes first."""
        left = self._left
        if left is None or self._untouched(experiment):
            return None
        if not experiment.options.compile and (layer := self._layers.changed(_modules(experiment))) is not None:
            return Change(layer, kept=False)
        found = list(self._changed_arrays(experiment, left))
        return next((one for one in found if not one.kept), found[0] if found else None)

    def _changed_arrays(self, experiment: Experiment, left: tuple[Arrays, Arrays]) -> Iterator[Change]:
        rates = rate_paths(experiment)
        for then, now in zip(left, (state_arrays(experiment.model), kept_arrays(experiment)), strict=True):
            beside = then is left[1]
            if then.keys() != now.keys():
                path = min(then.keys() ^ now.keys(), key=lambda path: (_free(path), path))
                yield Change(f"{named(path, beside)} (which is {'new' if path in now else 'gone'})", _free(path))
                continue
            forms = [path for path in then if _form(then[path]) != _form(now[path])]
            left_out = {path for path in rates if beside and path in now and logged(now[path])}
            for path in forms:
                if path not in left_out:
                    form = f"from {_form(then[path])} to {_form(now[path])}"
                    fits = _free(path) if beside else _fits(experiment, path, then[path], now[path])
                    yield Change(f"{named(path, beside)} ({form})", fits)
            before, after = identities(then.values()), identities(now[path] for path in then)
            suspects = [
                path
                for place, path in enumerate(then)
                if (before is None or after is None or before[place] != after[place])
                and path not in left_out
                and path not in forms
            ]
            if (first := next(_unequal(then, now, suspects), None)) is not None:
                yield Change(named(first, beside))

    def _untouched(self, experiment: Experiment) -> bool:
        """Whether every place holds the object that it held, and each of these the same array: then all is as it was.
        What objects in `extra` hold has no such place, nor may what a model gives as `parameters` of its own."""
        return (
            self._identities is not None
            and self._layers.same()
            and type(experiment.model).parameters is nn.Module.parameters
            and self._children.same(_roots(experiment))
            and identities(self._arrays) == self._identities
            and len(extras.trees(experiment.extra)) == len(experiment.extra)
        )

    def save_due(self, step: int, *, cut_off: bool = False) -> bool:
        """Whether a change after `step` is to be saved as a checkpoint: not too many, and not too close together.

        Args:
            cut_off: a step that was interrupted made it, which is no habit of a loop: it may be close to another.
        """
        apart = cut_off or not self._saved or step - self._saved[-1] >= self.spacing
        return len(self._saved) < MOST and apart

    def saved(self, name: str, step: int, segment: int) -> str | None:
        """After a change was saved. A sentence, unless the user has heard enough."""
        self._saved.append(step)
        return self._tell(
            f"{name} was changed between steps {step} and {step + 1}, outside of the step. The changed state was saved "
            f"as a checkpoint from which segment {segment} starts, so that the steps that follow replay exactly. Do it "
            f"inside step_fn, or call recorder.open_segment() after the change{_hint(name)}"
        )

    def not_saved(self, name: str, step: int) -> str | None:
        """After a change that is in no checkpoint. A sentence, unless the user has heard enough."""
        return self._tell(
            f"{name} was changed between steps {step} and {step + 1}, outside of the step, and no checkpoint holds "
            f"the changed state (by itself a recorder saves one each {self.spacing} steps at most, and {MOST} in all): "
            f"from step {step + 1} to the next checkpoint no step can be replayed, and a replay will say so. Do it "
            f"inside step_fn, which costs nothing, or call recorder.open_segment() after the change{_hint(name)}"
        )

    def lost(self, name: str, step: int) -> str | None:
        """After a change that no checkpoint can hold. A sentence, unless the user has heard enough."""
        return self._tell(
            f"{name} was changed between steps {step} and {step + 1}, outside of the step, and no checkpoint can hold "
            f"that: a replay has what its script or factory builds. From step {step + 1} on no step can be expected to "
            "replay. Build it so before the recorder is made, and begin another run or a fork there "
            "(workbench.fork_point)"
        )

    def refusal(self, change: Change, step: int) -> str:
        """Of a change while nothing is lost yet."""
        name = change.name
        if not change.kept:
            return (
                f"{name} was changed between steps {step} and {step + 1}, outside of the step, and no checkpoint can "
                "hold that: a replay has what its script or factory builds, so that no step after it would replay. "
                "Build it so before the recorder is made. (self_check=False goes on all the same)"
            )
        return (
            f"{name} was changed between steps {step} and {step + 1}, outside of the step. A replay performs steps, "
            "and would not make that change, so that no step after it would replay. Do it inside step_fn, which the "
            "recorder performs; or, where it happens seldom, call recorder.open_segment() after the change, which "
            f"saves the changed state as a checkpoint{_hint(name)}. (self_check=False goes on all the same: with such "
            f"a checkpoint each {self.spacing} steps at most)"
        )

    def _tell(self, sentence: str) -> str | None:
        self._told += 1
        if self._told > TOLD:
            return None
        return sentence + ("; further changes are noted in the telemetry only" if self._told == TOLD else "")


def _modules(experiment: Experiment) -> dict[str, nn.Module]:
    return {"": experiment.model} | {
        f"extra {name!r}": one for name, one in experiment.extra.items() if isinstance(one, nn.Module)
    }


def _form(array: mx.array) -> str:
    return f"{array.dtype}{array.shape}".removeprefix("mlx.core.")


def _free(path: str) -> bool:
    """Whether it may have another form in another checkpoint: of an object in `extra`."""
    return extras.of_object(path)


def _fits(experiment: Experiment, path: str, then: mx.array, now: mx.array) -> bool:
    """Whether a checkpoint gives back a weight of another form: it does, of the dtype of what is not trained."""
    trained: dict[str, Any] = dict(tree_flatten(experiment.model.trainable_parameters()))
    return then.shape == now.shape and path not in trained


def _roots(experiment: Experiment) -> list[Any]:
    return [experiment.model, *optimizer_states(experiment.optimizer), *extras.trees(experiment.extra)]


def _handles(arrays: Mapping[str, mx.array]) -> Arrays:
    return {path: copy(array) for path, array in arrays.items()}


def _unequal(then: Arrays, now: Arrays, paths: Sequence[str]) -> Iterator[str]:
    """Those of the paths under which the arrays have other bits, in order."""
    if cuda.available():
        pairs = zip(digests([then[path] for path in paths]), digests([now[path] for path in paths]), strict=True)
        alike: Collection[str] = {path for path, (one, other) in zip(paths, pairs, strict=True) if (one == other).all()}
    else:
        alike = ()
    for path in paths:
        one, other = then[path], now[path]
        if cuda.available():
            if path not in alike:
                yield path
        else:
            views = raw_views([one, other])
            # Another order in memory is another state, too: MLX's matmul picks its kernel by it.
            if views[0].tobytes() != views[1].tobytes() or layout(one) != layout(other):
                yield path


def named(path: str, beside: bool) -> str:
    """
    Args:
        beside: it is no weight.
    """
    if not beside:
        return path
    if not extras.owns(path):
        return f"{path} of the optimizer's state"
    return f"{path.partition('@')[0]} of extra {path.rpartition('@')[2]!r}"


def _hint(name: str) -> str:
    if name.rpartition(".")[2] not in _RUNNING:
        return ""
    return ". (A forward pass in training mode changes it: validate between model.eval() and model.train())"
