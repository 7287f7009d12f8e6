"""One line of telemetry: its fields and their types, and what it says about its step as bits.

The format is a superset of the posttrainllm trainer's. Knows single lines; nothing of files.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from ..bits import array_bits, bits_float, float_bits, json_float, json_floats
from ..files_read import ReadFile

Number = float | None | UnsetType  # null and missing are different answers
Numbers = list[float | None] | UnsetType
Bits = str | UnsetType
ArrayBits = list[str | None] | UnsetType

SCALARS = ("loss", "grad_norm")
ARRAYS = ("per_layer_act_norms", "per_layer_grad_norms", "adam_m_norms", "adam_v_norms")
LANES = ("weights", "adam_m", "adam_v", "other", "rng", "cursor")
FIRST = {"step": 1, "val": 0}  # a validation is of a state, and state 0 is the initialisation
LIMIT = 2**63  # a column of steps holds integers of 64 bits


class Edits(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What the training loop itself changed between the step before and this one; a replay changes it too."""

    rng: tuple[int, int] | None = None  # the random state that it left
    learning_rate: list[str | None] | None = None  # bits; one an optimizer
    # The same where it is no float32 scalar, as `optimizer.learning_rate = 0` makes it: type, shape, bytes.
    rate_arrays: list[tuple[str, list[int], str] | None] | None = None
    skip: int = 0  # batches that it drew and left out
    by_hand: str | None = None  # a tensor that it changed otherwise, and no checkpoint has: no replay can follow there
    unkept: bool = False  # that, and no checkpoint could have it: another layer, or an array of another form
    rate_factor: float | None = None  # of schedules; never in a line: a reader has it from the segment's manifest


class Restart(Edits):
    """The same, and before it the loop went on from a state other than the one that the step before had left.

    Never in a line: a reader makes it of a segment that committed the state from which it started.
    """

    folder: str  # of the checkpoints
    step: int
    segment: int
    run: str


class Line(msgspec.Struct, kw_only=True):
    """One line. A field that the line lacks is `UNSET`; a JSON null is None. What a writer adds as the last field, the
    seal, is of the bytes of a file and not looked at here; see `lines.seal`.
    """

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
    manifest: str | UnsetType = UNSET  # meta lines: digest of the manifest as it is then, see `manifest.digest`
    remarks: list[str] | UnsetType = UNSET  # meta lines: what the recorder's self-check could not rule out; others: …
    since: int | UnsetType = UNSET  # … what it noticed meanwhile, which matters to no step up to this one
    reads: list[ReadFile] | UnsetType = UNSET  # meta lines: files that the step was seen to read by itself
    torn_bytes: int | UnsetType = UNSET  # meta lines after a crash: length of the unfinished line before this one
    unstable: str | UnsetType = UNSET  # step lines: why the step is unstable, if it is; see `recovery`
    unstable_step: int | UnsetType = UNSET  # rollback lines: the step that was taken back, its segment, and why …
    left: int | UnsetType = UNSET
    reason: str | UnsetType = UNSET
    rate_factor: Number = UNSET  # … what learning rates are multiplied by from here on, all rollbacks together …
    skip_batch: bool | UnsetType = UNSET  # … whether the batch of that step is left out when it comes again …
    in_a_row: int | UnsetType = UNSET  # … and the how-manieth in a row it is
    ranks: list[dict[str, Any]] | UnsetType = UNSET  # of a data-parallel run, by rank: see `ranks.own_line`

    def check(self) -> None:
        """What the types alone can't say.

        Raises:
            ValueError: a step line without its step, or bits that are malformed or contradict the number beside them.
        """
        first = FIRST.get(self.type)
        if first is not None and (self.step is UNSET or self.step < first):
            found = "no step" if self.step is UNSET else f"step {self.step}"
            raise ValueError(f"a line of type {self.type!r} has {found}; expected an integer 'step' from {first}")
        for name in ("step", "segment"):
            if (number := getattr(self, name)) is not UNSET and not -LIMIT <= number < LIMIT:
                raise ValueError(f"{name} is {number}; expected an integer of 64 bits")
        for name in SCALARS:
            scalar_bits(name, getattr(self, name), getattr(self, f"{name}_bits"))
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
            bits = scalar_bits(name, getattr(self, name), getattr(self, f"{name}_bits"))
            if bits is not None:
                found[name] = bits
        if self.lr is not UNSET:
            found["lr"] = rate_bits(self.lr)
        for name in ARRAYS:
            numbers, bits = getattr(self, name), getattr(self, f"{name}_bits")
            if numbers is not UNSET:
                found[name] = array_bits(numbers, None if bits is UNSET else bits)
        if self.state is not UNSET:
            found |= {f"state.{lane}": value for lane, value in self.state.items()}
        return found


def scalar_bits(name: str, number: Number, bits: Bits) -> str | None:
    """The bits of a scalar: those that stand beside it, or the number's own; None if it was not recorded.

    Raises:
        ValueError: the bits are malformed, or contradict the number.
    """
    if bits is UNSET:
        return None if number is None or number is UNSET else float_bits(number)
    value = bits_float(bits)
    if number is not UNSET and (None if not np.isfinite(value) else float_bits(value)) != (
        None if number is None else float_bits(number)
    ):
        raise ValueError(f"{name} is {number} but its bits {bits} mean {value}")
    return bits


def rate_bits(rate: float | None) -> str:
    """The bits of a learning rate as float32, in which every optimizer of MLX keeps it.

    A line has null both for an optimizer without a rate and for a rate that is not finite, so that these share bits.
    """
    return float_bits(float("nan") if rate is None or not np.isfinite(rate) else rate)


def scalar_fields(name: str, value: np.float32) -> dict[str, Any]:
    """The fields of a scalar: its number (None if not finite) and its bits."""
    return {name: json_float(value), f"{name}_bits": float_bits(value)}


def array_fields(name: str, values: list[np.float32 | None]) -> dict[str, Any]:
    """The fields of a per-layer array: its numbers and, if one is not finite, the bits of all."""
    numbers, bits = json_floats(values)
    return {name: numbers} | ({} if bits is None else {f"{name}_bits": bits})
