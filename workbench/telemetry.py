"""The run's JSONL stream: one line a step, appended while training, read as evidence and never rewritten.

Knows the line format (a superset of the posttrainllm trainer's); nothing of checkpoints, replay or MLX.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import pandas as pd
from msgspec import UNSET, UnsetType

from .bits import array_bits, bits_float, float_bits, json_float, json_floats
from .errors import TelemetryError

Number = float | None | UnsetType  # null and missing are different answers
Numbers = list[float | None] | UnsetType
Bits = str | UnsetType
ArrayBits = list[str | None] | UnsetType

SCALARS = ("loss", "grad_norm")
ARRAYS = ("per_layer_act_norms", "per_layer_grad_norms", "adam_m_norms", "adam_v_norms")
LANES = ("weights", "adam_m", "adam_v", "other", "rng", "cursor")


class Edits(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What the training loop itself changed between the step before and this one; a replay changes it too."""

    rng: tuple[int, int] | None = None  # the random state that it left
    learning_rate: list[str | None] | None = None  # bits; one an optimizer


class Restart(Edits):
    """The same, and before it the loop went on from a state other than the one that the step before had left.

    Never in a line: a reader makes it of a segment that committed the state from which it started.
    """

    folder: str  # of the checkpoints
    step: int
    segment: int
    run: str


class Line(msgspec.Struct, kw_only=True):
    """One line. A field that the line lacks is `UNSET`; a JSON null is None."""

    type: Literal["meta", "step", "val", "done", "rollback"]
    t: Number = UNSET  # seconds since 1970
    elapsed_s: Number = UNSET
    segment: int = 0
    step: int | UnsetType = UNSET
    loss: Number = UNSET
    loss_bits: Bits = UNSET
    lr: Number = UNSET  # the one used in update `step`
    grad_norm: Number = UNSET  # before clipping
    grad_norm_bits: Bits = UNSET
    per_layer_act_norms: Numbers = UNSET
    per_layer_act_norms_bits: ArrayBits = UNSET
    per_layer_grad_norms: Numbers = UNSET
    per_layer_grad_norms_bits: ArrayBits = UNSET
    adam_m_norms: Numbers = UNSET
    adam_m_norms_bits: ArrayBits = UNSET
    adam_v_norms: Numbers = UNSET
    adam_v_norms_bits: ArrayBits = UNSET
    batch_hash: str | UnsetType = UNSET
    state: dict[str, str] | UnsetType = UNSET  # fingerprint of each lane of state `step`
    step_per_s: Number = UNSET
    peak_rss_mb: Number = UNSET
    ma: Number = UNSET  # moving average of the loss
    spike: bool | UnsetType = UNSET
    spike_rule: str | None | UnsetType = UNSET
    val_loss: Number = UNSET
    before: Edits | UnsetType = UNSET
    run: str | UnsetType = UNSET  # meta lines: identity of the run, of the process, and what the file looked like
    process: str | UnsetType = UNSET
    torn_bytes: int | UnsetType = UNSET  # meta lines after a crash: length of the unfinished line before this one

    def check(self) -> None:
        """What the types alone can't say.

        Raises:
            ValueError: a step line without its step, or bits that are malformed or contradict the number beside them.
        """
        if self.type in ("step", "val") and (self.step is UNSET or self.step < 1):
            found = "no step" if self.step is UNSET else f"step {self.step}"
            raise ValueError(f"a line of type {self.type!r} has {found}; expected an integer 'step' from 1")
        for name in SCALARS:
            _scalar_bits(name, getattr(self, name), getattr(self, f"{name}_bits"))
        for name in ARRAYS:
            numbers, bits = getattr(self, name), getattr(self, f"{name}_bits")
            if bits is not UNSET:  # without them nothing can contradict, and computing all bits would be slow
                array_bits([] if numbers is UNSET else numbers, bits)

    def evidence(self) -> dict[str, Any]:
        """What this line says about its step, as bits: a string or a list of strings an item; absent if not recorded.

        Raises:
            ValueError: bits that are malformed, or that contradict the number beside them.
        """
        found: dict[str, Any] = {}
        if self.batch_hash is not UNSET:
            found["batch_hash"] = self.batch_hash
        for name in SCALARS:
            bits = _scalar_bits(name, getattr(self, name), getattr(self, f"{name}_bits"))
            if bits is not None:
                found[name] = bits
        for name in ARRAYS:
            numbers, bits = getattr(self, name), getattr(self, f"{name}_bits")
            if numbers is not UNSET:
                found[name] = array_bits(numbers, None if bits is UNSET else bits)
        if self.state is not UNSET:
            found |= {f"state.{lane}": value for lane, value in self.state.items()}
        return found


def _scalar_bits(name: str, number: Number, bits: Bits) -> str | None:
    if bits is UNSET:
        return None if number is None or number is UNSET else float_bits(number)
    value = bits_float(bits)
    if number is not UNSET and (None if not np.isfinite(value) else float_bits(value)) != (
        None if number is None else float_bits(number)
    ):
        raise ValueError(f"{name} is {number} but its bits {bits} mean {value}")
    return bits


def scalar_fields(name: str, value: np.float32) -> dict[str, Any]:
    """The fields of a scalar: its number (None if not finite) and its bits."""
    return {name: json_float(value), f"{name}_bits": float_bits(value)}


def array_fields(name: str, values: list[np.float32 | None]) -> dict[str, Any]:
    """The fields of a per-layer array: its numbers and, if one is not finite, the bits of all."""
    numbers, bits = json_floats(values)
    return {name: numbers} | ({} if bits is None else {f"{name}_bits": bits})


@dataclass
class Telemetry:
    """All lines of one file, in file order, and what the reader had to tolerate."""

    path: Path
    lines: list[Line]
    notices: list[str] = field(default_factory=list)

    def at(self, step: int, segment: int) -> Line | None:
        """The step line of `step` in `segment`, or None."""
        return self._index.get((segment, step))

    @property
    def _index(self) -> dict[tuple[int, int], Line]:
        if not hasattr(self, "_steps"):
            self._steps = {(line.segment, line.step): line for line in self.lines if line.type == "step"}
        return self._steps  # type: ignore[return-value]

    def segments_with(self, step: int) -> list[int]:
        """Every segment that has a line for this step, in order."""
        return sorted(segment for segment, other in self._index if other == step)

    def last_step(self) -> int:
        """The highest step that any segment reached; 0 before the first."""
        return max((step for _, step in self._index), default=0)

    def meta(self, segment: int) -> Line | None:
        """The line that opened the segment: of the process that performed its first step; or None.

        A process that ended before that may have left one too, with a state from which nothing went on.
        """
        found = None
        for line in self.lines:
            if line.segment == segment and line.type == "meta":
                found = line
            elif line.segment == segment and line.type == "step" and found is not None:
                break
        return found

    def meta_before(self, step: int, segment: int) -> Line | None:
        """The meta line of the process that performed the step: a segment may be written by several in turn."""
        mine = [line for line in self.lines if line.type == "meta" and line.segment == segment]
        return next((line for line in reversed(mine) if line.step is not UNSET and line.step < step), None)

    def frame(self) -> pd.DataFrame:
        """One row a step line: segment, step, loss, grad_norm, lr, ma, spike, spike_rule, step_per_s, val_loss.

        A non-finite value is NaN or inf as its bits say; a value that was not recorded is NaN, and its column
        `<name>_recorded` is False.
        """
        validation = {(line.segment, line.step): line.val_loss for line in self.lines if line.type == "val"}
        rows = []
        for (segment, step), line in self._index.items():
            row: dict[str, Any] = {"segment": segment, "step": step}
            for name in SCALARS:
                bits = _scalar_bits(name, getattr(line, name), getattr(line, f"{name}_bits"))
                row[name] = float("nan") if bits is None else float(bits_float(bits))
                row[f"{name}_recorded"] = bits is not None
            for name in ("lr", "ma", "step_per_s"):
                value = getattr(line, name)
                row[name] = float("nan") if value is None or value is UNSET else value
            row["spike"] = line.spike is True
            row["spike_rule"] = line.spike_rule if isinstance(line.spike_rule, str) else None
            value = validation.get((segment, step), UNSET)
            row["val_loss"] = float("nan") if value is None or value is UNSET else value
            rows.append(row)
        columns = ["segment", "step", "loss", "loss_recorded", "grad_norm", "grad_norm_recorded", "lr", "ma"]
        return pd.DataFrame(rows, columns=[*columns, "step_per_s", "spike", "spike_rule", "val_loss"])


def read(path: Path) -> Telemetry:
    """Reads a telemetry file.

    A torn last line (a crash while writing) is tolerated with a notice, and so is one that a later segment's meta
    line declares; any other damaged line is an error.

    Raises:
        TelemetryError: the file is missing or not UTF-8, or a line is damaged; the message has the line's number.
    """
    _refuse_other_encodings(path)
    lines: list[Line] = []
    notices: list[str] = []
    damaged: _Damaged | None = None  # the line before this one, if it could not be read
    for number, raw in _numbered(path):
        if not raw.strip():
            continue
        try:
            line = _DECODER.decode(raw.rstrip(b"\r\n"))
            line.check()
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            if damaged is not None:
                raise damaged.error(path) from error
            damaged = _Damaged(number, raw, str(error))
            continue
        if damaged is not None:
            if line.torn_bytes != len(damaged.raw.rstrip(b"\n")):
                raise damaged.error(path)
            notices.append(damaged.notice(path))
            damaged = None
        lines.append(line)
    if damaged is not None:
        if not damaged.unfinished:  # a whole line that is wrong is not an unfinished one
            raise damaged.error(path)
        notices.append(damaged.notice(path))
    _refuse_duplicates(path, lines)
    return Telemetry(path, lines, notices)


_DECODER = msgspec.json.Decoder(Line)


class _Damaged(NamedTuple):
    number: int
    raw: bytes
    reason: str

    @property
    def unfinished(self) -> bool:
        """Whether it is the beginning of an object, and the parser found fault with nothing but its end."""
        text = self.raw.rstrip(b"\r\n")
        return text.startswith(b"{") and ("truncated" in self.reason or self.reason.endswith(f"(byte {len(text)})"))

    def error(self, path: Path) -> TelemetryError:
        return TelemetryError(
            f"{path}, line {self.number}: not a telemetry line ({self.reason}); expected one JSON object such as "
            '{"type": "step", "step": 5, "loss": 2.1}. Repair or remove that line by hand.'
        )

    def notice(self, path: Path) -> str:
        return f"{path.name}, line {self.number}: unfinished ({len(self.raw)} bytes), as a crash leaves it; not read"


def _refuse_other_encodings(path: Path) -> None:
    start = next(_numbered(path), (0, b""))[1]
    for mark, encoding in _MARKS.items():
        if start.startswith(mark):
            raise TelemetryError(
                f"{path} is in {encoding}; expected UTF-8 without a byte-order mark, as it was written. An editor or a "
                "shell may have saved it anew: put the original back, or convert it."
            )


_MARKS = {
    b"\xef\xbb\xbf": "UTF-8 with a byte-order mark",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
    b"{\0": "UTF-16",
    b"\0{": "UTF-16",
}


def _numbered(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with open(path, "rb") as file:
            yield from enumerate(file, start=1)
    except OSError as error:
        raise TelemetryError(f"{path} can't be read ({error.strerror}); expected the run's telemetry.jsonl") from error


def _refuse_duplicates(path: Path, lines: list[Line]) -> None:
    seen: set[tuple[int, int]] = set()
    for line in lines:
        if line.type != "step":
            continue
        key = (line.segment, line.step)
        if key in seen:
            raise TelemetryError(
                f"{path}: step {line.step} stands twice in segment {line.segment}; expected once. "
                "Two processes may have written to this file; keep the lines of one."
            )
        seen.add(key)  # type: ignore[arg-type]


class Writer:
    """Appends lines. Each line is one `write` call, so a reader never sees half of one unless the machine fails."""

    def __init__(self, path: Path) -> None:
        self.torn_bytes = _torn_tail(path)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if self.torn_bytes:
            self._write(b"\n")  # the unfinished line stays as it is; ours starts on a new one

    def append(self, line: Line) -> None:
        """Writes one line.

        Raises:
            OSError: the disk is full or the file is gone.
        """
        self._write(msgspec.json.encode(line) + b"\n")

    def _write(self, content: bytes) -> None:
        while content:
            content = content[os.write(self._descriptor, content) :]

    def sync(self) -> None:
        """Makes everything written so far durable."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


def _torn_tail(path: Path) -> int:
    """Length in bytes of an unfinished last line; 0 if there is none."""
    if not path.exists():
        return 0
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        tail = b""
        while size and b"\n" not in tail:
            start = max(0, size - 65536)
            file.seek(start)
            tail = file.read(size - start) + tail
            size = start
    return len(tail) - (tail.rfind(b"\n") + 1)
