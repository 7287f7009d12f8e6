"""`trainer_state.json` of Hugging Face's Trainer: its `log_history`, whose losses are means since the entry before.

The source: transformers/trainer.py, `_maybe_log_save_evaluate`, which divides the summed loss by the steps since it
last logged.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from msgspec import UNSET

from ..errors import TelemetryError
from .entries import Entries
from .naming import null
from .numbers_of import numbers_of

_KEYS = {"loss": "loss", "val_loss": "eval_loss", "lr": "learning_rate", "grad_norm": "grad_norm"}


def is_trainer_state(document: Any) -> bool:
    return isinstance(document, dict) and isinstance(document.get("log_history"), list)


def read_trainer_state(path: Path, document: dict[str, Any]) -> Entries:
    """
    Raises:
        TelemetryError: an entry is no object, or a value in it no number.
    """
    history = document["log_history"]
    for place, entry in enumerate(history):
        if not isinstance(entry, dict):
            raise TelemetryError(f"{path}: log_history[{place}] is {type(entry).__name__}; expected an object")
    notices = []
    placed = [entry for entry in history if type(entry.get("step")) is int]
    if len(placed) < len(history):
        notices.append(f"{len(history) - len(placed)} entries of log_history have no step; they are left out.")
    summaries = [entry for entry in placed if "train_runtime" in entry]
    if summaries:
        notices.append(f"Step {summaries[-1]['step']} has a summary of the training too, which is no step's.")
    rows = [entry for entry in placed if "train_runtime" not in entry]
    values, present = {}, {}
    for name, key in _KEYS.items():
        values[name], present[name], nulls = numbers_of(path, key, [entry.get(key, UNSET) for entry in rows])
        if nulls.any():
            notices.append(null(int(nulls.sum()), key))
    return Entries(
        np.array([entry["step"] for entry in rows], np.int64),
        values,
        present,
        windows=document.get("logging_steps") != 1,
        mapping={name: key for name, key in _KEYS.items() if present[name].any()},
        notices=notices,
    )
