"""A step among its own neighbours: steps N-k … N measured alike, and how far each number stands from the healthy ones.

Knows traces and tables; replays nothing itself and imports no MLX. (`nearby` compares logged norms only.)

A number's robust z at a step is (x − median) / max(σ, floor), σ from the MAD, over the healthy steps before it in the
window: those that no rule of spike detection flags, and at which this number itself was not far off. So numbers that
went off some steps before N do not become their own yardstick, as in `spikes.SpikeDetector`, whose constants these are.
Norms that were logged have the 24 steps before N-k as well: they cost no replay, and what grew over all k steps is
still seen.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import pandas as pd

from ..detection.window import NORMAL_SIGMA_PER_MAD
from ..spikes import LOG_GRAD_NORM_SIGMA_FLOOR, LOSS_SIGMA_FLOOR, SMALLEST_WINDOW, SpikeSettings
from ..trace import Trace
from .onsets import onsets
from .trace_tables import KINDS

BEFORE = 8  # steps; a spike follows what sets it off by 1 to 8 (Wortsman et al. 2023, arXiv:2304.13013)
THRESHOLD = SpikeSettings().z
STEP = "step"  # the kind of what belongs to the whole step

# Positive quantities that vary by factors are compared by their logarithm, for the reason given in `spikes`.
LOGARITHMIC = ("l2", "max_abs", "ratio", "staleness_rms", "loss", "grad_norm")  # RMS would only say L2 again
# The floor of sigma, absolute. Eight steps can look calmer than they are, so it is near what healthy steps of preset
# `tiny` vary by from one to the next: gradients and moments by 0.1 to 0.3 (z = 6 asks for a factor of 1.8 or more),
# activations by 0.02 to 0.05 (1.35), weights by less than 0.01 (1.13).
LOG_FLOORS = {"activation": 0.05, "weight": 0.02, "loss": LOSS_SIGMA_FLOOR}  # by kind, or by statistic of the step
LOG_FLOOR = LOG_GRAD_NORM_SIGMA_FLOOR
# The others are fractions, cosines, entropies and logits: of order 1, or larger with a spread in proportion.
LINEAR = (
    *("cosine", "eps_fraction", "stuck_fraction", "zero_fraction"),
    *("entropy", "logit_max", "logits_max", "log_z_mean", "log_z_max"),
)
LINEAR_FLOOR = 0.05  # times the median where that is above 1: z = 6 asks for a rise of 0.3, or of 30 %
# The MAD of few values is too small on average, by these factors for 4 to 9 of them, n / (n - 0.8) for more: C. Croux
# and P. Rousseeuw, Time-Efficient Algorithms for Two Highly Robust Estimators of Scale, Computational Statistics 1992.
FEW = {4: 1.363, 5: 1.206, 6: 1.200, 7: 1.140, 8: 1.129, 9: 1.107}
LOG_OF_ZERO = -800.0  # below the logarithm of every float64: a norm that becomes 0, or ceases to be, is far off

COLUMNS = ("step", "layer", "path", "kind", "statistic", "value")


@dataclass(frozen=True)
class Context:
    """Step N and the steps before it, replayed in one roll-forward and measured alike.

    Attributes:
        step: N.
        traces: of N and its neighbours, by step.
        flagged: steps before N, of the neighbours or of `logged`, that a rule of spike detection flags: no yardstick.
        notices: what the user should know.
        logged: norms that the run logged at the steps before the neighbours, as `logged_norms`: a yardstick only.
    """

    step: int
    traces: list[Trace]
    flagged: list[int] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    logged: pd.DataFrame | None = None

    @property
    def steps(self) -> list[int]:
        return [trace.step for trace in self.traces]

    @property
    def trace(self) -> Trace:
        """Of step N."""
        return self.traces[-1]

    @cached_property
    def frame(self) -> pd.DataFrame:
        """One row a number: step, layer, path, kind, statistic, value, healthy (steps before that are its yardstick),
        z (NaN: not scored, or too few of them)."""
        parts = [numbers(trace) for trace in self.traces]
        before = [] if self.logged is None or not len(self.logged) else [self.logged]
        return scored(pd.concat([*before, *parts], ignore_index=True), self.flagged, self.traces[0].step)

    @property
    def scores(self) -> pd.DataFrame:
        """Step N against its healthy neighbours, the farthest off first: layer, path, kind, statistic, value, median
        (of all neighbours that are not flagged), z."""
        frame = self.frame
        own = frame[(frame["step"] == self.step) & frame["z"].notna()]
        before = frame[(frame["step"] < self.step) & ~frame["step"].isin(self.flagged)]
        keys = ["layer", "path", "kind", "statistic"]
        medians = before.groupby(keys, sort=False)["value"].median().rename("median").reset_index()
        table = own.merge(medians, on=keys, how="left")[[*keys, "value", "median", "z"]]
        order = table["z"].abs().sort_values(ascending=False, kind="stable").index
        return table.loc[order].reset_index(drop=True)

    def onset(self, threshold: float = THRESHOLD) -> pd.DataFrame:
        """Where it began: the step from which on the L2 norm of a layer was far off, for each kind; see `onsets`, which
        says why a norm that was far off at some step and came back is left out.

        Args:
            threshold: of |z|; 6, as in `spikes`.

        Returns:
            step, layer, kind, z; by step, and within a step by kind, and by layer as they are computed: gradients from
            the last layer to the first.
        """
        first = onsets(self.frame[self.frame["statistic"] == "l2"], self.step, threshold)
        kinds = first["kind"].map({kind: place for place, kind in enumerate(KINDS)})
        layers = first["layer"].map({layer: place for place, layer in enumerate(self.trace.record.layers)})
        places = layers.to_numpy(float)
        backward = first["kind"].isin(("activation_gradient", "gradient"))
        order = np.lexsort((np.where(backward, -places, places), kinds, first["step"]))
        return first.iloc[order][["step", "layer", "kind", "z"]].reset_index(drop=True)

    def sentence(self) -> str:
        """The answer in one sentence."""
        scores, onset = self.scores, self.onset()
        if not len(scores):
            return (
                f"Step {self.step} can't be compared: it has fewer than {SMALLEST_WINDOW} healthy neighbours before it."
            )
        far = int((scores["z"].abs() > THRESHOLD).sum())
        where = "no layer's norm left its usual range"
        if len(onset):
            row = onset.iloc[0]
            kind = row["kind"].replace("_", " ")
            where = f"the first norm to leave its usual range was the {kind} of {row['layer'] or 'the model'} at step "
            where += f"{row['step']}{or_before(row['step'], self.steps[0])}"
        far_off = f"{far} of {len(scores)} numbers stand beyond {THRESHOLD:g} robust deviations"
        return f"At step {self.step}, {far_off}; {where}."

    def __repr__(self) -> str:
        return f"Context(step={self.step}, before={len(self.traces) - 1})"


def numbers(trace: Trace) -> pd.DataFrame:
    """Everything that a trace measured, tidy: step, layer, path, kind, statistic, value.

    Norms are of layers (`path` is the layer), quantities of the update of parameters, attention of heads (`path` is
    ``module[head]``, ``module#k[head]`` in call k), and kind `step` of the whole step.
    """
    record, parts = trace.record, []
    layers = trace.layers.drop(columns="recorded").assign(path=lambda frame: frame["layer"])
    parts.append(layers.melt(id_vars=["layer", "path", "kind"], var_name="statistic"))
    owner = {path: layer for layer, paths in record.owned.items() for path in paths}
    updates = trace.updates.drop(columns="dtype").assign(kind="update", layer=lambda frame: frame["path"].map(owner))
    parts.append(updates.melt(id_vars=["layer", "path", "kind"], var_name="statistic"))
    heads = trace.attention.drop(columns="source").rename(columns={"path": "layer"})
    names = zip(heads["layer"], heads["call"], heads["head"], strict=True)
    heads["path"] = [f"{layer}#{call}[{head}]" if call else f"{layer}[{head}]" for layer, call, head in names]
    heads = heads.drop(columns=["call", "head"]).assign(kind="attention")
    parts.append(heads.melt(id_vars=["layer", "path", "kind"], var_name="statistic"))
    whole: dict[str, float | None] = {"loss": trace.loss, "grad_norm": trace.grad_norm, "lr": record.lr}
    if record.logits is not None:
        logits = record.logits
        whole |= {"logits_max": logits.max, "log_z_mean": logits.log_z_mean, "log_z_max": logits.log_z_max}
    rows = [("", "", STEP, name, np.nan if value is None else value) for name, value in whole.items()]
    parts.append(pd.DataFrame(rows, columns=list(COLUMNS[1:])))
    kept = [part.astype({"value": "float64"}) for part in parts if len(part)]
    return pd.concat(kept, ignore_index=True).assign(step=record.step)[list(COLUMNS)]


def or_before(step: int, first: int) -> str:
    """What is off at the first step that is shown may have been so before."""
    return " or before" if step == first > 1 else ""


def scored(frame: pd.DataFrame, flagged: Collection[int] = (), first: int = 0) -> pd.DataFrame:
    """Adds the robust z of each number against the healthy steps before it.

    Args:
        frame: step, layer, path, kind, statistic, value, as `numbers`, of consecutive steps.
        flagged: steps that are no yardstick.
        first: rows of earlier steps are a yardstick only, and are left out of what is returned. Where there are such,
            z is the larger in size of two: with them, for what grows over all steps from `first` on, and without, for
            early in training they vary more than those that are near.

    Returns:
        The frame with two columns: `healthy`, the steps before that are the yardstick; and z: NaN where a statistic is
        not compared, is undefined, or has fewer than 4 healthy steps before it; inf for a norm, loss or gradient norm
        that is not finite.
    """
    keys = list(COLUMNS[1:-1])
    table = frame.pivot(index=keys, columns="step", values="value")
    kinds, statistics = (table.index.get_level_values(name) for name in ("kind", "statistic"))
    logarithmic, compared = np.isin(statistics, LOGARITHMIC), np.isin(statistics, LOGARITHMIC + LINEAR)
    floors = [
        LOG_FLOORS.get(statistic if kind == STEP else kind, LOG_FLOOR)
        for kind, statistic in zip(kinds, statistics, strict=True)
    ]
    floor = np.where(logarithmic, floors, np.nan)
    values = table.to_numpy(float)
    with np.errstate(divide="ignore", invalid="ignore"):
        x = np.where(logarithmic[:, None], np.where(values == 0, LOG_OF_ZERO, np.log(values)), values)
    broken = compared[:, None] & np.isinf(values)
    broken |= np.isnan(values) & np.isin(statistics, ("l2", "loss", "grad_norm"))[:, None]  # else NaN is "undefined"
    x = np.where(compared[:, None] & np.isfinite(x), x, np.nan)
    steps = table.columns.to_numpy()
    usable = np.isfinite(x) & ~np.isin(steps, list(flagged))
    healthy, z = _through(x, usable, broken, floor)
    if (steps < first).any():
        near_healthy, near = _through(x, usable & (steps >= first), broken, floor)
        nearer = np.nan_to_num(np.abs(near), nan=-1.0) > np.nan_to_num(np.abs(z), nan=-1.0)
        healthy, z = np.where(nearer, near_healthy, healthy), np.where(nearer, near, z)
    found = {
        name: pd.DataFrame(array, index=table.index, columns=table.columns).stack(future_stack=True)
        for name, array in (("healthy", healthy), ("z", z))
    }
    shown = frame[frame["step"] >= first]
    return shown.merge(pd.DataFrame(found).reset_index(), on=[*keys, "step"], how="left")


def _through(x: np.ndarray, usable: np.ndarray, broken: np.ndarray, floor: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How many healthy steps are before each number, and its robust z against these.

    Args:
        x: numbers, (numbers, steps).
        usable: where they may be a yardstick, if they are not far off themselves.
        broken: where they are not finite, and should be.
    """
    z, healthy, counts = np.full(x.shape, np.nan), np.zeros(x.shape, dtype=bool), np.zeros(x.shape, dtype=int)
    for place in range(x.shape[1]):
        counts[:, place] = healthy[:, :place].sum(axis=1)
        z[:, place] = _against(x[:, :place], healthy[:, :place], x[:, place], floor)
        z[broken[:, place], place] = np.inf
        near = ~(np.abs(z[:, place]) > THRESHOLD)  # also where there were too few steps to tell
        healthy[:, place] = near & usable[:, place]
    return counts, z


def _against(past: np.ndarray, healthy: np.ndarray, now: np.ndarray, floor: np.ndarray) -> np.ndarray:
    """Robust z of `now` (numbers,) against the healthy columns of `past` (numbers, steps).

    Args:
        floor: of sigma, (numbers,); NaN where it is `LINEAR_FLOOR`.
    """
    z = np.full(len(now), np.nan)
    counts = healthy.sum(axis=1)
    enough = counts >= SMALLEST_WINDOW
    if not enough.any():
        return z
    known = np.where(healthy, past, np.nan)[enough]
    median = np.nanmedian(known, axis=1)
    few = np.array([FEW.get(count, count / (count - 0.8)) for count in counts[enough].tolist()])
    spread = few * NORMAL_SIGMA_PER_MAD * np.nanmedian(np.abs(known - median[:, None]), axis=1)
    least = np.where(np.isnan(floor[enough]), LINEAR_FLOOR * np.maximum(1, np.abs(median)), floor[enough])
    z[enough] = (now[enough] - median) / np.maximum(spread, least)
    return z


def neighbours_notice(step: int, before: int, found: Sequence[int], flagged: Sequence[int]) -> list[str]:
    """What to say of the neighbours that there are."""
    notices = []
    if len(found) < before:
        notices.append(f"step {step} has {len(found)} steps before it on this way, not {before}: these were used")
    if flagged:
        notices.append(f"spikes among the neighbours were measured, and are no yardstick: {list(flagged)}")
    if len(found) - len(flagged) < SMALLEST_WINDOW:
        notices.append(
            f"no finite number was scored: that takes {SMALLEST_WINDOW} healthy steps before step {step}, and there "
            f"are {len(found) - len(flagged)}"
        )
    return notices
