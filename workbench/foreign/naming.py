"""Which key of a log is the loss, the step, the learning rate: a mapping is proposed, shown, and can be set."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ..enumeration import counted, some
from ..errors import TelemetryError

KEYS = 20  # of a log, in a sentence
# What programs call them, the most usual first. Compared in lower case, with _ for every other sign.
USUAL = {
    "step": ("step", "global_step", "trainer_global_step", "iteration", "iter", "it", "update", "updates"),
    "loss": ("loss", "train_loss", "training_loss", "train_loss_step", "loss_train"),
    "val_loss": ("val_loss", "eval_loss", "validation_loss", "valid_loss", "loss_val"),
    "lr": ("lr", "learning_rate", "train_learning_rate", "train_lr"),
    "grad_norm": ("grad_norm", "gradient_norm", "train_grad_norm", "train_gradient_norm", "gnorm", "global_norm"),
    "step_per_s": ("step_per_s", "steps_per_s", "steps_per_sec", "steps_per_second", "it_sec", "it_per_sec"),
    "ma": ("ma", "moving_average"),
}


def mapped(path: Path, keys: Iterable[str], columns: Mapping[str, str | None] | None = None) -> dict[str, str]:
    """The workbench's names, and which key of the log each is.

    Args:
        keys: that the log has.
        columns: names that the user has set; None: the log has no such thing.

    Raises:
        TelemetryError: a set key is not in the log, or nothing in it could be the step or the loss, or several could.
    """
    there = list(dict.fromkeys(keys))
    set_by_user = dict(columns or {})
    unknown = [name for name in set_by_user if name not in USUAL]
    if unknown:
        raise TelemetryError(f"columns has the name {unknown[0]!r}; expected some of {', '.join(USUAL)}")
    given = [key for key in set_by_user.values() if key is not None]
    if twice := [key for key in given if given.count(key) > 1]:
        raise TelemetryError(f"columns gives {twice[0]!r} two names; expected each key once")
    found: dict[str, str] = {}
    for name, usual in USUAL.items():
        if name in set_by_user:
            key = set_by_user[name]
            if key is not None and key not in there:
                raise TelemetryError(f"{path} has no {key!r}, which columns gives for {name}; it has {quoted(there)}")
            found |= {} if key is None else {name: key}
            continue
        words = {word: [key for key in there if _word(key) == word and key not in given] for word in usual}
        first = next((same for same in words.values() if same), [])
        if len(first) > 1:
            raise TelemetryError(
                f"{path} has several things that could be {name}: {quoted(first)}; choose with "
                f"columns={{{name!r}: …}} (--columns {name}=KEY)"
            )
        found |= {name: first[0]} if first else {}
    if "step" not in found and "step" not in set_by_user:
        raise TelemetryError(
            f"{path} has no key for the step; it has {quoted(there)}. Name it with columns={{'step': …}}, or count "
            "the entries with columns={'step': None} (--columns step=KEY, or step= to count)"
        )
    if not {"loss", "val_loss", "grad_norm"} & found.keys():
        raise TelemetryError(
            f"{path} has no key for the loss; it has {quoted(there)}. Name it with columns={{'loss': …}} "
            "(--columns loss=KEY)"
        )
    return found


def _word(key: str) -> str:
    """`train/Loss` as train_loss; of an export's `run - train/loss` what follows the run's name."""
    return re.sub(r"[^a-z0-9]+", "_", key.rpartition(" - ")[2].lower()).strip("_")


def left_out(count: int, one: str, several: str, key: str) -> str:
    """The notice on entries without a step."""
    words = counted(count, f"{one} has", f"{several} have")
    return f"{words} no {key!r}; {'it is' if count == 1 else 'they are'} left out."


def null(count: int, key: str) -> str:
    """The notice on entries with null for a value."""
    return f"{counted(count, 'entry has', 'entries have')} null for {key!r}: not recorded, as far as it says."


def quoted(keys: Sequence[str]) -> str:
    """The first of them; "nothing", if there are none."""
    return some(map(repr, keys), KEYS) or "nothing"
