"""The log that `mlx_lm.lora` prints: means over a report window, and validation losses between them.

Two forms are known: up to mlx-lm 0.31 sentences, from 0.32 on a table. The source of both: mlx_lm/tuner/trainer.py, and
mlx_lm/cli_ui.py (`TrainUI`).
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from ..errors import TelemetryError
from .entries import Entries

_NUMBER = r"(-?\d[\d,]*\.?\d*(?:e[+-]?\d+)?|-?nan|-?inf)"
_SENTENCE = re.compile(
    rf"Iter (?P<step>\d+): Train loss (?P<loss>{_NUMBER})(?:, Learning Rate (?P<lr>{_NUMBER}))?"
    rf"(?:, It/sec (?P<speed>{_NUMBER}))?"
)
_SENTENCE_VAL = re.compile(rf"Iter (?P<step>\d+): Val loss (?P<loss>{_NUMBER})")
_ROW = re.compile(rf"\s+(?P<step>\d+)    (?P<loss>\s*{_NUMBER}) [▼▲]    \s*[\d,]+    \s*[\d.]+k\s*")
_ROW_VAL = re.compile(rf"\s+(?P<step>\d+)    val (?P<loss>\s*{_NUMBER})    [\d.]+s\s*")
_HEADING = re.compile(r"\s*iter   train_loss     tok/s     tokens\s*")
_BEGIN = re.compile(r"Iter \d+: (?:Train|Val) loss")
_END = re.compile(r"(?:GB|\d\.?\d*s)$")  # of a whole report: a number before it may be cut off and still be one
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def is_printed(text: str) -> bool:
    """Whether text is of such a log."""
    return any(_BEGIN.match(line) or _HEADING.fullmatch(line) for line in _lines(text))


def read_printed(path: Path, text: str) -> Entries:
    """
    Raises:
        TelemetryError: a line of a report can't be read; the message has its number. Or there is none.
    """
    rows: list[tuple[int, float, float, float, float]] = []  # step, loss, lr, step_per_s, val_loss
    trained: list[bool] = []
    notices = []
    lines = _lines(text)
    for number, line in enumerate(lines, start=1):
        if number == len(lines) and _BEGIN.match(line) and not _END.search(line):
            notices.append(f"{path.name}, line {number}: unfinished; not read")
            continue
        train = _SENTENCE.match(line) or _ROW.fullmatch(line)
        validation = _SENTENCE_VAL.match(line) or _ROW_VAL.fullmatch(line)
        if train is not None:
            found = train.groupdict()
            lr, speed = (_value(found.get(name)) for name in ("lr", "speed"))
            rows.append((int(found["step"]), _value(found["loss"]), lr, speed, np.nan))
            trained.append(True)
        elif validation is not None:
            step, loss = int(validation["step"]) - 1, _value(validation["loss"])
            if step == 0:
                notices.append(f"Validation before the first step: loss {loss:g}.")
            else:
                rows.append((step, np.nan, np.nan, np.nan, loss))
                trained.append(False)
        elif _BEGIN.match(line):
            raise TelemetryError(f"{path}, line {number}: {line.strip()!r} is no report as mlx-lm prints them")
    if not rows and not notices and not is_printed(text):
        raise TelemetryError(f"{path} has no line as mlx-lm prints them, such as 'Iter 10: Train loss 2.301, …'")
    table = np.array(rows, np.float64).reshape(-1, 5)
    trains = np.array(trained, bool)  # a loss that was printed as nan is a loss
    return Entries(
        step=table[:, 0].astype(np.int64),
        values=dict(zip(("loss", "lr", "step_per_s", "val_loss"), table[:, 1:].T, strict=True)),
        present={"loss": trains, "val_loss": ~trains},
        windows=True,
        mapping={"loss": "Train loss", "val_loss": "Val loss", "lr": "Learning Rate", "step_per_s": "It/sec"},
        notices=[
            *notices,
            "mlx-lm validates before step N: what it prints at N is here at N-1, whose state it judged.",
        ],
        decimals=3,
    )


def _lines(text: str) -> list[str]:
    """As a terminal shows them: without colours, and of a line that was drawn again and again what was drawn last."""
    return [_COLOURS.sub("", line).rstrip("\r").rpartition("\r")[2] for line in text.split("\n")]


def _value(text: str | None) -> float:
    return np.nan if text is None else float(text.replace(",", ""))
