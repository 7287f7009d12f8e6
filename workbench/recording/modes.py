"""Which parameters are trained, and whether the layers are in training mode, looked at after every step.

`model.eval()` for a validation and no `model.train()` after it, or a layer frozen on the way: no checkpoint holds
either, and a replay begins as the script does. Knows models; nothing of folders or telemetry.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.nn as nn
from mlx.utils import tree_flatten

from ..bare_objects import attributes
from ..enumeration import some
from ..experiment import Experiment


class Modes:
    """Those of an experiment as it is handed over."""

    def __init__(self, experiment: Experiment) -> None:
        self._model, self._compiled = experiment.model, experiment.options.compile
        self._told: set[str] = set()
        self._step = 0
        self._made = self._trainable()
        self._note()

    def begin(self, step: int) -> str | None:
        """Before the first step, which comes after `step`. A sentence if other parameters are trainable than when the
        recorder was made."""
        moved, self._step = some(sorted(self._trainable() ^ self._made)), step
        self._note()
        if not moved:
            return None
        return (
            f"other parameters are trainable at the first step than when the recorder was made ({moved}). A script "
            "that is replayed is run up to its recorder: freeze and unfreeze before that line"
        )

    def changed(self, step: int) -> Iterator[tuple[str, int]]:
        """After a step: a sentence on what is otherwise than at the first, once; and the last step before that."""
        before, self._step = self._step, step
        frozen, training = self._frozen, self._training
        self._look()
        if self._frozen != frozen and "frozen" not in self._told and (moved := self._moved()):
            self._told.add("frozen")
            yield self._of_trained(moved, before), before
        if self._training != training and "mode" not in self._told and (off := self._switched()):
            self._told.add("mode")
            yield self._of_mode(off, before), before

    def _note(self) -> None:
        """What there is now is what there was at the start."""
        self._modules = [(path, own, attributes(own) or {}) for path, own in self._model.named_modules()]
        self._look()
        self._trained, self._started = self._trainable(), self._training

    def _look(self) -> None:
        """A frozen parameter's name is added to a set of its module, or taken out."""
        self._frozen = [frozenset(held.get("_no_grad", ())) for _, _, held in self._modules]
        self._training = [held.get("_training") for _, _, held in self._modules]

    def _trainable(self) -> set[str]:
        trained: dict[str, Any] = dict(tree_flatten(self._model.trainable_parameters()))
        return set(trained)

    def _moved(self) -> str:
        """Names of the parameters that are trainable only now, or no longer."""
        return some(sorted(self._trainable() ^ self._trained))

    def _switched(self) -> list[tuple[str, nn.Module, bool]]:
        """The layers that are in another mode than at the start: path, layer, and whether that is training."""
        now = zip(self._modules, self._started, self._training, strict=True)
        return [(path, own, bool(mode)) for (path, own, _), then, mode in now if mode != then]

    def _of_mode(self, switched: list[tuple[str, nn.Module, bool]], before: int) -> str:
        training = switched[0][2]
        whole = len(switched) == len(self._modules)
        what = "the model" if whole else f"of the model {some(sorted({path or 'itself' for path, *_ in switched}))}"
        mode, other = ("training", "evaluation") if training else ("evaluation", "training")
        call = "model.eval()" if training else "model.train()"
        if self._compiled:
            return (
                f"{what} is in {mode} mode since step {before}, but the compiled step was traced in {other} mode, and "
                f"goes on with that: it is not what your loop would do uncompiled. Call {call} before the next step"
            )
        why = "" if training else ": model.eval() was called, and model.train() not after it"
        return (
            f"{what} is in {mode} mode since step {before}{why}. Dropout and batch normalisation do otherwise there, "
            f"and no checkpoint holds the mode: steps after {before} may not replay exactly. Call {call} before the "
            "next step (a step that sets the mode itself, before it computes, replays all the same)"
        )

    def _of_trained(self, shown: str, before: int) -> str:
        if self._compiled:
            return (
                f"other parameters are trainable now than at the start ({shown}), but the compiled step was traced "
                "with those of the start, and goes on with them: it is not what your loop would do uncompiled. Pass "
                "compile=False, or go on in a fork (workbench.fork_point)"
            )
        return (
            f"other parameters are trainable now than at the start ({shown}), and no checkpoint holds which: steps "
            f"after {before} will not replay exactly. Go on in a fork, with a script that freezes the same ones before "
            "its recorder (workbench.fork_point)"
        )
