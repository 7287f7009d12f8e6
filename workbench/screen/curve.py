"""A curve, and what curves there are. Knows numbers only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

LOSS, VALIDATION, GRAD_NORM, RATE, SPEED = "loss", "val_loss", "grad_norm", "lr", "step_per_s"
LABELS = {
    LOSS: "loss",
    VALIDATION: "validation loss",
    GRAD_NORM: "gradient norm (L2)",
    RATE: "learning rate",
    SPEED: "steps per second",
}
NOISY = (LOSS, GRAD_NORM, SPEED)  # what is smoothed: a learning rate is what it is
MARKS = ("segment", "onset", "step", "rule", "quantity", "value")  # columns of the spikes that are marked


@dataclass(frozen=True)
class Curve:
    """A quantity in a segment: the steps at which it is finite (int64, rising) and its values there (float64); and the
    steps at which it was logged and not finite."""

    segment: int
    steps: np.ndarray
    values: np.ndarray
    broken: np.ndarray
