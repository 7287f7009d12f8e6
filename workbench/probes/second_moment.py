"""The second moment by which an optimizer divides, as its own settings make it. Knows MLX's optimizers."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np

from ..hyperparameters import describe_optimizer
from ..observe import moment_paths
from .quantities import bias_correction


@dataclass(frozen=True)
class SecondMoment:
    """Of one parameter.

    Attributes:
        array: v, as the state holds it.
        eps: what the optimizer adds to √v̂.
        correction: v̂ = correction · v; 1 where the optimizer was told not to correct.
    """

    array: mx.array
    eps: float
    correction: float


def second_moments(
    optimizer: optim.Optimizer, state: Mapping[str, mx.array], parameters: Container[str]
) -> dict[str, SecondMoment]:
    """The second moments in an optimizer's state, by parameter.

    Adam, AdamW and RMSprop have one. What other optimizers keep under the name `v` is something else (SGD's and Muon's
    momentum, Adamax's maximum, a sum in Adagrad), and what a subclass with a rule of its own keeps is unknown: none.

    Args:
        optimizer: its settings are read, never assumed.
        state: every array of its state by dotted path, after the update.
        parameters: paths of the trained parameters.
    """
    found = {}
    for parameter, path in moment_paths(state, "v", parameters).items():
        member, prefix = optimizer, ""
        if isinstance(optimizer, optim.MultiOptimizer):
            prefix = ".".join(path.split(".")[:2]) + "."  # states.K.
            member = optimizer.optimizers[int(path.split(".")[1])]
        settings = describe_optimizer(member)
        if _has_rule_of(member, optim.Adam, optim.AdamW):
            step = int(np.asarray(state[f"{prefix}step"]))
            correction = bias_correction(settings["betas"][1], step) if settings["bias_correction"] else 1.0
        elif _has_rule_of(member, optim.RMSprop):
            correction = 1.0
        else:
            continue
        found[parameter] = SecondMoment(state[path], float(settings["eps"]), correction)
    return found


def _has_rule_of(optimizer: Any, *classes: Any) -> bool:
    return any(isinstance(optimizer, cls) and type(optimizer).apply_single is cls.apply_single for cls in classes)
