"""What a loop changed in the state between two steps, by hand: weights, optimizer state, what `extra` holds.

A replay performs steps, and would not make the change. Arrays are compared by what their handles stand for, and bits
only where that is another array: a swap and back, or a load of the same weights, is no change. Learning rates are
left out: telemetry logs those that a loop sets (`remembered`). Knows experiments; nothing of folders or telemetry.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import copy
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .. import cuda, extras
from ..experiment import Experiment, kept_arrays, state_arrays
from ..fingerprint import digests
from ..host import raw_views
from ..observe import rate_paths
from ..step import optimizer_states
from ..trees import layout
from .array_identity import identities
from .tree_children import TreeChildren

MOST = 20  # checkpoints that a recorder saves by itself for changes: a segment starts from each, so that all stay
EACH = 100  # steps between two of them, where no checkpoints are asked for
TOLD = 5  # warnings
_RUNNING = ("running_mean", "running_var")

Arrays = dict[str, mx.array]


class ByHand:
    """The state that the last step left, between two steps: during one it holds no array, whose room the step may use.

    Args:
        save_every: as of a recorder.
    """

    def __init__(self, save_every: int) -> None:
        self.spacing = save_every or EACH
        self._left: tuple[Arrays, Arrays] | None = None
        self._children, self._arrays = TreeChildren(), list[mx.array]()
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

    def forget(self) -> None:
        """Before a step."""
        self._left, self._arrays = None, []
        self._children.forget()

    def changed(self, experiment: Experiment) -> str | None:
        """The first tensor that has other bits than the last step left, in words; None: none."""
        left = self._left
        if left is None or self._untouched(experiment):
            return None
        rates = rate_paths(experiment)
        for then, now in zip(left, (state_arrays(experiment.model), kept_arrays(experiment)), strict=True):
            beside = then is left[1]
            if then.keys() != now.keys():
                path = min(then.keys() ^ now.keys())
                return f"{_named(path, beside)} (which is {'new' if path in now else 'gone'})"
            before, after = identities(then.values()), identities(now[path] for path in then)
            suspects = [
                path
                for place, path in enumerate(then)
                if (before is None or after is None or before[place] != after[place]) and not (beside and path in rates)
            ]
            if (first := next(_unequal(then, now, suspects), None)) is not None:
                return _named(first, beside)
        return None

    def _untouched(self, experiment: Experiment) -> bool:
        """Whether every place holds the object that it held, and each of these the same array: then all is as it was.
        What objects in `extra` hold has no such place, nor may what a model gives as `parameters` of its own."""
        return (
            self._identities is not None
            and type(experiment.model).parameters is nn.Module.parameters
            and self._children.same(_roots(experiment))
            and identities(self._arrays) == self._identities
            and len(extras.trees(experiment.extra)) == len(experiment.extra)
        )

    def save_due(self, step: int) -> bool:
        """Whether a change after `step` is to be saved as a checkpoint: not too many, and not too close together."""
        return len(self._saved) < MOST and (not self._saved or step - self._saved[-1] >= self.spacing)

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

    def refusal(self, name: str, step: int) -> str:
        """Of a change while nothing is lost yet."""
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
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            yield path
        elif cuda.available():
            if path not in alike:
                yield path
        else:
            views = raw_views([one, other])
            # Another order in memory is another state, too: MLX's matmul picks its kernel by it.
            if views[0].tobytes() != views[1].tobytes() or layout(one) != layout(other):
                yield path


def _named(path: str, beside: bool) -> str:
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
