"""The file `run-<id>.wandb` of a W&B run: its history, read with the protocol definitions of the wandb library.

The file is a log in LevelDB's format (https://github.com/google/leveldb/blob/main/doc/log_format.md) behind a header of
7 bytes; each record is a message `Record` of wandb/proto/wandb_internal.proto.
"""

from __future__ import annotations

import importlib
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import UNSET

from ..errors import TelemetryError
from .entries import Entries
from .naming import left_out, mapped
from .numbers_of import numbers_of

MAGIC = b":W&B\xe1\xbe\x00"
_BLOCK = 32768
_FULL, _FIRST, _MIDDLE, _LAST = range(1, 5)


def read_wandb(path: Path, columns: Mapping[str, str | None] | None) -> Entries:
    """
    Raises:
        TelemetryError: the wandb library is not installed, the file is damaged, or its keys can't be mapped.
    """
    try:
        record = importlib.import_module("wandb.proto.wandb_internal_pb2").Record
    except ImportError as error:
        raise TelemetryError(
            f"{path} is a file of W&B, and the wandb library reads it: pip install 'spike-workbench[logs]'; or export "
            "the run's charts as CSV"
        ) from error
    notices: list[str] = []
    rows: list[dict[str, Any]] = []
    for message in _messages(path, notices):
        entry = record()
        try:
            entry.ParseFromString(message)
        except Exception as error:  # the library's DecodeError, which it moves between its versions
            raise TelemetryError(f"{path} holds a record that the wandb library can't read: {error}") from error
        if entry.WhichOneof("record_type") == "history":
            row = {"_step": entry.history.step.num}
            for item in entry.history.item:
                row[item.key or ".".join(item.nested_key)] = json.loads(item.value_json)
            rows.append(row)
    keys = dict.fromkeys(key for row in rows for key in row)
    mapping = mapped(path, [key for key in keys if key != "_step"] + ["_step"], {"step": "_step"} | dict(columns or {}))
    values, present = {}, {}
    for name, key in mapping.items():
        values[name], present[name], _ = numbers_of(path, key, [row.get(key, UNSET) for row in rows])
    step, there = values.pop("step"), present.pop("step")
    if not there.all():
        notices.append(left_out(int((~there).sum()), "entry", "entries", mapping["step"]))
    values, present = ({name: one[there] for name, one in group.items()} for group in (values, present))
    return Entries(step[there].astype(np.int64), values, present, mapping=mapping, keys=list(keys), notices=notices)


def _messages(path: Path, notices: list[str]) -> Iterator[bytes]:
    content, place, whole = path.read_bytes(), len(MAGIC), b""
    while place + 7 <= len(content):
        if _BLOCK - place % _BLOCK < 7:  # too little room for a record: it is left empty
            place += _BLOCK - place % _BLOCK
            continue
        checksum, length, kind = int.from_bytes(content[place : place + 4], "little"), *_length(content, place)
        part = content[place + 7 : place + 7 + length]
        if kind == 0 and length == 0:
            break
        if len(part) < length:
            notices.append(f"{path.name} ends within a record, as a crash leaves it; that one is not read.")
            return
        if zlib.crc32(bytes([kind]) + part) != checksum or kind not in (_FULL, _FIRST, _MIDDLE, _LAST):
            raise TelemetryError(f"{path} is damaged at byte {place}: a record does not have its checksum")
        whole = part if kind in (_FULL, _FIRST) else whole + part
        if kind in (_FULL, _LAST):
            yield whole
        place += 7 + length


def _length(content: bytes, place: int) -> tuple[int, int]:
    return int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
