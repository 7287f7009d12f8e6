"""Logs of JSON objects, one a line: the posttrainllm trainer's, and any others'."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
from msgspec import UNSET

from ..errors import TelemetryError
from ..lines.further import further_damage
from ..untrusted import LINE, open_regular
from .entries import Entries
from .naming import left_out, mapped, null
from .numbers_of import numbers_of

_KINDS = {"meta", "step", "val", "done", "rollback"}
_PEEK = 1000  # lines in which keys are looked for
_BLOCK = 1 << 20  # bytes


def is_posttrain(lines: Sequence[bytes]) -> bool:
    """Whether the first lines are those of the posttrainllm trainer: objects whose "type" is one of its five."""
    found = [_object(line) for line in lines[:_PEEK] if line.strip()]
    typed = [one for one in found if one is not None]
    return bool(typed) and all(one.get("type") in _KINDS for one in typed)


def is_objects(lines: Sequence[bytes]) -> bool:
    """Whether the first lines are JSON objects."""
    first = next((line for line in lines if line.strip()), b"")
    return _object(first) is not None


def read_posttrain(path: Path, previous: bool) -> Entries:
    """The posttrainllm trainer's stream: it writes null for a loss or gradient norm that is not finite.

    Args:
        previous: read `<path>.prev` before it: the log that the trainer put aside when it began this one.

    Raises:
        TelemetryError: a line is damaged.
    """
    aside = path.with_name(f"{path.name}.prev")
    names = ("type", "step", "loss", "grad_norm", "lr", "ma", "step_per_s", "val_loss")
    columns: dict[str, list[Any]] = {name: [] for name in names}
    notices = []
    if not previous and aside.exists():
        notices.append(
            f"{aside.name} stands beside it: the log before this one. open_run(…, previous=True) reads both."
        )
    for one in (aside, path) if previous else (path,):
        values, found = _columns(one, {name: name for name in names})
        wanted = [place for place, kind in enumerate(values["type"]) if kind in ("step", "val")]
        for name in names:
            columns[name] += [values[name][place] for place in wanted]
        notices += found
    kinds = np.array(columns["type"], object)
    numbers: dict[str, np.ndarray] = {}
    present: dict[str, np.ndarray] = {}
    for name in names[2:]:
        numbers[name], there, nulls = numbers_of(path, name, columns[name])
        if name in ("loss", "grad_norm"):
            there = there | (nulls & (kinds == "step"))  # as NaN: which of NaN and inf it was, is not said
            if nulls.any():
                notices.append(f"{int(nulls.sum())} steps have null for {name}: this trainer's word for not finite.")
        present[name] = there
    if (kinds == "val").any():  # the trainer's validation lines have their loss in either field
        own = (kinds == "val") & present["loss"] & ~present["val_loss"]
        numbers["val_loss"][own], present["val_loss"] = numbers["loss"][own], present["val_loss"] | own
        present["loss"] = present["loss"] & (kinds != "val")
    step = _steps(path, columns["step"])
    mapping = {name: name for name in names[1:] if name == "step" or present[name].any()}
    return Entries(step, numbers, present, mapping=mapping, notices=notices)


def read_objects(path: Path, columns: Mapping[str, str | None] | None) -> Entries:
    """Any JSON lines.

    Raises:
        TelemetryError: a line is damaged, a value is no number, or the keys can't be mapped.
    """
    keys: dict[str, None] = {}
    with _opened(path) as file:
        for number in range(1, _PEEK + 1):
            _refuse_long(path, number, line := file.readline(LINE + 1))
            keys |= dict.fromkeys(_object(line) or ())
    mapping = mapped(path, keys, columns)
    values, notices = _columns(path, mapping)
    found, present = {}, {}
    for name in mapping:
        if name == "step":
            continue
        numbers, there, nulls = numbers_of(path, mapping[name], values[name])
        found[name], present[name] = numbers, there
        if nulls.any():
            notices.append(null(int(nulls.sum()), mapping[name]))
    count = len(next(iter(values.values())))
    if "step" not in mapping:
        notices.append("The steps are the numbers of the entries: the log names none.")
        return Entries(np.arange(1, count + 1), found, present, mapping=mapping, keys=list(keys), notices=notices)
    having = np.array([value is not UNSET and value is not None for value in values["step"]], bool)
    if not having.all():
        notices.append(left_out(int((~having).sum()), "entry", "entries", mapping["step"]))
    step = _steps(path, [value for value, there in zip(values["step"], having.tolist(), strict=True) if there])
    found, present = ({name: one[having] for name, one in group.items()} for group in (found, present))
    return Entries(step, found, present, mapping=mapping, keys=list(keys), notices=notices)


def _columns(path: Path, mapping: Mapping[str, str]) -> tuple[dict[str, list[Any]], list[str]]:
    """The values of the mapped keys of each line, and notices."""
    fields = [(name, Any, UNSET) for name in mapping]
    kind = msgspec.defstruct("Mapped", fields, rename=dict(mapping), kw_only=True, gc=False)
    decoder = msgspec.json.Decoder(kind)
    spelt = {name: _spelt(key) for name, key in mapping.items()}
    values: dict[str, list[Any]] = {name: [] for name in mapping}
    notices: list[str] = []
    number, rest = 0, b""
    with _opened(path) as file:
        while True:
            block = file.read(_BLOCK)
            text = rest + block
            cut = len(text) if not block else text.rfind(b"\n") + 1
            body, rest = text[:cut], text[cut:]
            _refuse_long(path, number + body.count(b"\n") + 1, rest)
            if not block and not body:
                return values, notices
            count = body.count(b"\n") + (not body.endswith(b"\n"))
            try:
                rows = decoder.decode_lines(body)
            except (msgspec.MsgspecError, RecursionError):
                rows = []
            own = {name: [getattr(row, name) for row in rows] for name in mapping}
            # Of a key that stands twice in an object the decoder keeps one.
            if len(rows) == count and all(body.count(spelt[name]) <= count - own[name].count(UNSET) for name in own):
                for name in mapping:
                    values[name] += own[name]
            else:
                for row in _each(path, body, number, notices, mapping.values(), partial(_ended, file, rest)):
                    for name, key in mapping.items():
                        values[name].append(row.get(key, UNSET))
            number += count
            if not block:
                return values, notices


def _ended(file: BinaryIO, rest: bytes) -> bool:
    """Whether nothing but blank lines follows in a file; reads on until it knows."""
    return not rest.strip() and not any(block.strip() for block in iter(partial(file.read, _BLOCK), b""))


def _each(
    path: Path, body: bytes, number: int, notices: list[str], keys: Iterable[str], ended: Callable[[], bool]
) -> list[dict[str, Any]]:
    """The objects of lines, one by one: NaN and Infinity are let pass, which are no JSON, but Python's.

    Args:
        keys: that no object may have twice: it would be two entries in one.
        ended: whether nothing follows these lines.
    """
    found = []
    tokens = [_spelt(key) for key in keys]

    def twice(line: bytes) -> str | None:
        return _twice(line, keys) if any(line.count(token) > 1 for token in tokens) else None

    def readable(line: bytes) -> bool:
        return _object(line) is not None and twice(line) is None

    lines = body.removesuffix(b"\n").split(b"\n")
    for place, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        row = _object(line)
        if row is None:
            torn = line.startswith(b"{") and not line.rstrip().endswith(b"}")
            if torn and not any(one.strip() for one in lines[place:]) and ended():
                notices.append(f"{path.name}, line {number + place}: unfinished; not read")
                continue
            raise TelemetryError(
                f"{path}, line {number + place}: {line[:60].decode(errors='replace')!r} is no JSON object; expected "
                "one a line. Repair or remove that line by hand." + further_damage(path, number + place, readable)
            )
        if (key := twice(line)) is not None:
            raise TelemetryError(
                f"{path}, line {number + place}: the key {key!r} stands twice in one object, which mixes two entries. "
                "Repair or remove that line by hand." + further_damage(path, number + place, readable)
            )
        found.append(row)
    return found


def _spelt(key: str) -> bytes:
    """A key as writers of JSON write it before its value."""
    return json.dumps(key, ensure_ascii=False).encode() + b":"


def _twice(line: bytes, keys: Iterable[str]) -> str | None:
    """The first of these keys that an object has twice; those of objects in it are not looked at."""
    objects: list[list[str]] = []
    try:
        json.loads(line, object_pairs_hook=lambda pairs: objects.append([key for key, _ in pairs]))
    except (ValueError, RecursionError):
        return None
    return next((key for key in keys if objects and objects[-1].count(key) > 1), None)  # the outermost comes last


def _opened(path: Path) -> BinaryIO:
    try:
        return open_regular(path)
    except OSError as error:
        raise TelemetryError(f"{path} can't be read ({error.strerror}); expected a log") from error


def _refuse_long(path: Path, number: int, line: bytes) -> None:
    if len(line) > LINE:
        raise TelemetryError(
            f"{path}, line {number}: more than {LINE} bytes long; expected one JSON object a line. Repair or remove "
            "that line by hand."
        )


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        found = msgspec.json.decode(line)
    except (msgspec.MsgspecError, RecursionError):
        try:
            found = json.loads(line)  # Python's json writes NaN and Infinity
        except (ValueError, RecursionError):
            return None
    return found if isinstance(found, dict) else None


def _steps(path: Path, values: Sequence[Any]) -> np.ndarray:
    if not all(type(value) is int or (type(value) is float and value.is_integer()) for value in values):
        place, odd = next(
            (place, value)
            for place, value in enumerate(values, start=1)
            if type(value) is not int and not (type(value) is float and value.is_integer())
        )
        raise TelemetryError(f"{path}: entry {place} has {odd!r} for the step; expected a whole number")
    try:
        return np.array([int(value) for value in values], np.int64)
    except OverflowError:
        raise TelemetryError(f"{path}: a step is beyond 64 bits; expected a number of optimizer updates") from None
