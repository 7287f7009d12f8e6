"""One tensor in which two performances of a step differ, as a record. Knows names and numbers only."""

from __future__ import annotations

import msgspec

# Kinds of tensors in words; the path follows.
_WORDS = {
    "batch": "batch array",
    "activation": "activation of",
    "token_loss": "token loss",
    "loss": "loss",
    "gradient": "gradient of",
    "grad_norm": "gradient norm",
    "adam_m": "Adam m of",
    "adam_v": "Adam v of",
    "weight": "weight",
    "other": "optimizer state",
    "rng": "random state",
    "cursor": "data cursor",
}


class TensorDifference(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor in which two performances of a step differ.

    Attributes:
        kind: batch, activation, token_loss, loss, gradient, grad_norm, adam_m, adam_v, weight, other, rng, cursor.
        path: of the layer or parameter; "" where the kind says all.
        dtype, shape: of the recorded way's.
        size, differing, nonfinite, max_ulp, max_abs: see `bits.UlpDifference`.
        detail: why elements can't be compared, if they can't; the five numbers above are then null.
    """

    kind: str
    path: str
    dtype: str
    shape: list[int]
    size: int | None = None
    differing: int | None = None
    nonfinite: int | None = None
    max_ulp: int | None = None
    max_abs: float | None = None
    detail: str = ""

    @property
    def name(self) -> str:
        """Such as `activation of blocks.0.mlp.up`."""
        path = self.path or ("(model)" if self.kind == "activation" else "")
        return f"{_WORDS.get(self.kind, self.kind)} {path}".strip()

    @property
    def extent(self) -> str:
        """How large the difference is, in words."""
        if self.detail:
            return self.detail
        words = [f"{self.differing:,} of {self.size:,} elements" if self.size != 1 else "its one element"]
        if self.max_ulp is not None:
            words.append(f"at most {self.max_ulp:,} ULP ({self.max_abs:.3g})")
        if self.nonfinite:
            words.append(f"{self.nonfinite:,} NaN or infinite on a side")
        return ", ".join(words)

    def __str__(self) -> str:
        return f"{self.name} ({self.dtype}{self.shape}): {self.extent}"
