"""What a replay measured of one step, as records: tensors, updates, attention, logits, the first non-finite tensor.

Parts of a trace's JSON form. A number that is not finite, or a quantity that is undefined, is null.
"""

from __future__ import annotations

import msgspec

from ..bits import bits_float


class Row(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One measured tensor. Norms are float32 as JSON numbers, null if not finite (then `l2_bits` has the bits)."""

    path: str  # of a parameter, or of a layer for activations (`path#k`: its call number k)
    kind: str
    dtype: str
    size: int  # elements
    l2: float | None
    rms: float | None
    max_abs: float | None  # over finite elements; null if there are none
    nonfinite: int  # NaN or inf elements
    l2_bits: str | None = None
    mean: float | None = None  # null if an element is not finite, or not measured
    zero_fraction: float | None = None  # elements that are exactly 0; null: of an empty tensor, or not measured

    def norm(self) -> float:
        """L2 as a number that may be NaN or inf."""
        return float(bits_float(self.l2_bits)) if self.l2_bits else float("nan") if self.l2 is None else self.l2


class Update(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How a parameter was updated; `workbench.probes.quantities` has the formulas and their sources."""

    path: str
    dtype: str  # of the weight
    ratio: float | None  # ‖update‖ / ‖weight before‖; null for a weight of zeros
    cosine: float | None  # of update and −gradient; null if one of them is all zeros
    staleness_rms: float | None  # √mean(g²/max(v̂, ε²)), g clipped, v̂ of state N; null without a second moment
    eps_fraction: float | None  # elements with √v̂ < ε; null without a second moment
    stuck_fraction: float | None  # of the weights asked to move, those that rounding kept; null if none was asked


class Attention(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One attention call of a step, over all micro-batches; one entry a query head in each list.

    Logits are scale·q·kᵀ plus an additive mask, recomputed in float32. Unbounded growth of their maximum: Dehghani et
    al. 2023, arXiv:2302.05442, section 2. Entropy collapse: Zhai et al. 2023, arXiv:2303.06296.
    """

    path: str  # of the module in whose call it happened
    call: int  # its number among the attention calls of that module in one forward pass, from 0
    source: str  # the function that was seen: `mx.fast.scaled_dot_product_attention`, or `mx.softmax` of 4 axes
    logit_max: list[float | None]  # over positions that are not hidden
    entropy: list[float | None]  # nats, mean over queries; a sink counts as one more outcome
    hidden_queries: int  # queries all of whose positions are hidden, of all heads; they are in neither number
    queries: int  # of all heads, rows and micro-batches


class Logits(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The logits that entered the cross entropy, over all tokens of a step, in float32.

    log Z is the log-sum-exp over the vocabulary: its drift from 0 is what z-loss holds down (Chowdhery et al. 2022,
    arXiv:2204.02311, section 5), and it precedes divergence (Wortsman et al. 2023, arXiv:2309.14322, section 3.1.2).
    """

    source: str  # `nn.losses.cross_entropy`, or the loss function's extras
    tokens: int
    vocabulary: int
    max: float | None
    mean_max: float | None  # mean over tokens of each token's largest logit
    log_z_max: float | None
    log_z_mean: float | None


class NonFinite(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The first tensor of a step that held a NaN or infinity although all before it were finite."""

    path: str
    kind: str
    call: int  # number of the call of that path in its forward pass, from 0
    micro_batch: int
    count: int  # non-finite elements
    sentence: str
