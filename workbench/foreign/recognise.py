"""What kind of log a file is: by its content, never by its name; and its entries."""

from __future__ import annotations

import codecs
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ..errors import RunError, TelemetryError
from ..lines.strict import refuse_other_encodings
from ..untrusted import DOCUMENT, open_regular, read_file
from . import delimited, event_files, objects, printed_log, trainer_state, wandb_file
from .entries import Entries

FORMATS = {
    "posttrainllm": "the JSON lines of the posttrainllm trainer",
    "trainer_state": "trainer_state.json of Hugging Face's Trainer",
    "mlx-lm": "what mlx_lm.lora printed",
    "jsonl": "JSON lines",
    "csv": "CSV",
    "wandb": "an offline run of W&B",
    "tensorboard": "event files of TensorBoard",
}
_START = 1 << 20  # bytes that are looked at
_NAMES = ("trainer_state.json", "telemetry.jsonl", "run-*.wandb", event_files.PATTERN)  # in a folder


def log_of(path: Path) -> Path:
    """The log that a path names: a file itself, or the one log in a folder.

    Raises:
        RunError: the folder has none, or several.
    """
    if not path.is_dir():
        return path
    found = [file for pattern in _NAMES for file in sorted(path.glob(pattern))]
    if found and all(file.match(event_files.PATTERN) for file in found):
        return path
    if len(found) != 1:
        several = f", and has several logs: {', '.join(file.name for file in found)}; name one of them"
        nothing = "; expected the folder that a run was recorded in, or a log"
        raise RunError(f"{path} is not a run folder (no run.json in it){several if found else nothing}")
    return found[0]


def recognised(path: Path) -> str:
    """Which of `FORMATS` a log has.

    Raises:
        TelemetryError: none of them, or it can't be read.
    """
    if path.is_dir():
        return "tensorboard"
    start = _start(path)
    if start.startswith(wandb_file.MAGIC):
        return "wandb"
    if event_files.is_event_file(start):
        return "tensorboard"
    if start.startswith(codecs.BOM_UTF8) and delimited.delimiter_of(start.decode("utf-8-sig", "replace")) is not None:
        return "csv"  # spreadsheets write a byte-order mark
    refuse_other_encodings(path, start)
    if trainer_state.is_trainer_state(_document(path, start)):
        return "trainer_state"
    lines = start.split(b"\n") if len(start) < _START else start.split(b"\n")[:-1]
    if objects.is_posttrain(lines):
        return "posttrainllm"
    if objects.is_objects(lines):
        return "jsonl"
    text = start.decode(errors="replace")
    if printed_log.is_printed(text):
        return "mlx-lm"
    if delimited.delimiter_of(text) is not None:
        return "csv"
    if not start.strip():
        raise TelemetryError(f"{path} is empty; expected a log")
    begins = start[:40].decode(errors="replace")
    raise TelemetryError(
        f"{path} is no log that is known here: it begins with {begins!r}. Expected {'; '.join(FORMATS.values())}. "
        "Set its format if you know better: --format F, format='F'; one of "
        f"{', '.join(FORMATS)}"
    )


def entries_of(path: Path, kind: str, columns: Mapping[str, str | None] | None, previous: bool) -> Entries:
    """The entries of a log of a known format.

    Raises:
        TelemetryError: it can't be read as that.
    """
    if kind not in FORMATS:
        raise TelemetryError(f"format is {kind!r}; expected one of {', '.join(FORMATS)}")
    if columns and kind in ("posttrainllm", "trainer_state", "mlx-lm"):
        raise TelemetryError(f"{path}: columns= goes with logs whose names vary; those of {FORMATS[kind]} do not")
    if previous and kind != "posttrainllm":
        raise TelemetryError(f"{path}: previous=True goes with the posttrainllm trainer, which puts its last log aside")
    if kind == "posttrainllm":
        return objects.read_posttrain(path, previous)
    if kind == "jsonl":
        return objects.read_objects(path, columns)
    if kind == "wandb":
        return wandb_file.read_wandb(path, columns)
    if kind == "tensorboard":
        files = sorted(path.glob(event_files.PATTERN)) if path.is_dir() else [path]
        return event_files.read_event_files(path, files, columns)
    if kind == "trainer_state":
        document = _document(path, _start(path))
        if not trainer_state.is_trainer_state(document):
            raise TelemetryError(f"{path} has no list log_history; expected {FORMATS[kind]}")
        return trainer_state.read_trainer_state(path, document)
    text = _text(path)
    if kind == "mlx-lm":
        return printed_log.read_printed(path, text)
    sign = delimited.delimiter_of(text[:_START])
    if sign is None:
        raise TelemetryError(f"{path} is no CSV: expected a line of names, and lines with as many values")
    return delimited.read_delimited(path, sign, columns)


def _start(path: Path) -> bytes:
    try:
        with open_regular(path) as file:
            return file.read(_START)
    except OSError as error:
        raise TelemetryError(f"{path} can't be read ({error.strerror}); expected a run's folder or a log") from error


def _text(path: Path) -> str:
    try:
        return read_file(path).decode("utf-8-sig", "replace")
    except OSError as error:
        raise TelemetryError(f"{path} can't be read ({error.strerror}); expected a log") from error


def _document(path: Path, start: bytes) -> Any:
    """A whole JSON document, if the file is one object; NaN in it is let pass, as Python writes it."""
    if not start.lstrip().startswith(b"{"):
        return None
    try:
        if b'"log_history"' not in start and len(start) == _START and b"\n" in start:
            return None
        content = read_file(path, DOCUMENT)
        try:
            return msgspec.json.decode(content)
        except msgspec.DecodeError:
            return json.loads(content)
    except (OSError, ValueError, RecursionError):
        return None
