"""TensorBoard's event files, read with the tensorboard library: its scalars by step."""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import UNSET

from ..errors import TelemetryError
from .entries import Entries
from .naming import mapped
from .numbers_of import numbers_of

PATTERN = "events.out.tfevents.*"


def is_event_file(start: bytes) -> bool:
    """Whether a file begins as one: with a record that says so. Its length and checksum come first, 12 bytes."""
    return b"brain.Event:" in start[12:64]


def read_event_files(path: Path, files: Sequence[Path], columns: Mapping[str, str | None] | None) -> Entries:
    """Args:
        path: what was opened: one of the files, or their folder.
        files: in the order in which they were written.

    Raises:
        TelemetryError: the tensorboard library is not installed, or the tags can't be mapped.
    """
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # it tells of TensorFlow, which it does without
            loader = importlib.import_module("tensorboard.backend.event_processing.event_file_loader")
            tensors = importlib.import_module("tensorboard.util.tensor_util")
    except ImportError as error:
        raise TelemetryError(
            f"{path} is a log of TensorBoard, and the tensorboard library reads it: "
            "pip install 'spike-workbench[logs]'; or download the scalars as CSV"
        ) from error
    rows: list[tuple[int, dict[str, Any]]] = []
    for file in files:
        for event in loader.EventFileLoader(str(file)).Load():
            for value in event.summary.value:
                kind = value.WhichOneof("value")
                number: Any = UNSET
                if kind == "simple_value":
                    number = float(value.simple_value)
                elif kind == "tensor":
                    array = tensors.make_ndarray(value.tensor)
                    number = float(array) if array.size == 1 and array.dtype.kind == "f" else UNSET
                if number is not UNSET:
                    rows.append((int(event.step), {value.tag: number}))
    keys = list(dict.fromkeys(key for _, row in rows for key in row))
    mapping = mapped(path, keys, {"step": None} | dict(columns or {}))
    values, present = {}, {}
    for name, key in mapping.items():
        values[name], present[name], _ = numbers_of(path, key, [row.get(key, UNSET) for _, row in rows])
    notices = ["TensorBoard keeps float32, and of a resumed run the steps of each process: see the segments."]
    step = np.array([step for step, _ in rows], np.int64)
    return Entries(step, values, present, mapping={"step": "step"} | mapping, keys=keys, notices=notices)
