"""Since when a norm is out of its usual range, told from the scatter of norms that are not.

Knows tables of robust z (see `neighbours.scored`); nothing of runs or traces, and imports no MLX.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pandas as pd

MAD_EFFICIENCY = 0.37  # of the MAD for normal noise: Rousseeuw and Croux, J. Am. Stat. Assoc. 88 (1993) 1273-1283
FALSE_ALARM = 0.01  # of one or more among all numbers that are looked at together
EVENT = 3  # layers, and half of all: what happens to so many in one step is no scatter of any
STAYS = 3  # steps in a row, up to the last, are no scatter
FEWEST = 8  # steps of a yardstick whose length a table does not tell
REMEMBER = ("adam_m", "adam_v")


def freedom(healthy: float) -> float:
    """Degrees of freedom of a sigma from the MAD of so many values. A standard deviation of ν + 1 values varies by
    1/√(2ν) of itself, and one from the MAD as much as that of 37 % as many."""
    return max(1.0, MAD_EFFICIENCY * healthy)


def beyond_chance(numbers: int, healthy: float) -> float:
    """The |z| that the largest of so many healthy numbers passes in 1 % of all cases.

    Bonferroni's correction of Student's t with `freedom` degrees of freedom, by the approximation of D. L. Wallace,
    Ann. Math. Stat. 30 (1959) 1121: normal z ≈ (8ν+1)/(8ν+3) √(ν ln(1 + t²/ν)).
    """
    nu = freedom(healthy)
    normal = NormalDist().inv_cdf(1 - FALSE_ALARM / (2 * max(1, numbers)))
    return math.sqrt(nu * math.expm1((normal * (8 * nu + 3) / (8 * nu + 1)) ** 2 / nu))


def onsets(scores: pd.DataFrame, step: int, threshold: float) -> pd.DataFrame:
    """Where each layer's norm of each kind left its usual range, so far as step N has to do with it.

    That is where the stretch of steps beyond the threshold begins that reaches to N, if it is three steps or more, or
    if one of its steps before N is beyond what chance brings about among so many norms (`beyond_chance`); else that is
    N itself.
    A norm that came back is usual scatter, unless it was not finite, or at least half of the layers left at once, as a
    learning rate of one step makes their updates. Of 72 norms over nine steps, against the healthy ones of these, one
    or more passed 6 in 50 of 135 windows of healthy training (preset `tiny`); this rule named one before N in 7, all of
    them second moments.

    Moments hold what a gradient was, a second moment for 1/(1 - β2) steps: that they stay says nothing, unless the
    gradient of their layer stays off as well, or they are beyond chance. A second moment that is off at the first step
    already says when a gradient was large, which the gradient says itself.

    Args:
        scores: rows step, layer, kind, z, of one statistic, and, if known, `healthy`: steps in the yardstick.
        step: N, the last one.
        threshold: of |z|.

    Returns:
        step, layer, kind, z; one row a layer and kind, in the order in which they first appear.
    """
    keys = ["layer", "kind"]
    own = scores if "healthy" in scores else scores.assign(healthy=FEWEST)
    rows = own[keys].drop_duplicates().reset_index(drop=True)
    if not len(rows):
        return pd.DataFrame(columns=["step", *keys, "z"])
    z, healthy = (_table(own, rows, name) for name in ("z", "healthy"))
    steps = np.sort(own["step"].unique())
    far = np.abs(z) > threshold
    sure = np.abs(z) > np.maximum(threshold, _limits(z, healthy))
    whole = {kind: _events(far[(rows["kind"] == kind).to_numpy()]) for kind in rows["kind"].unique()}
    began: dict[tuple[str, str], int] = {}  # the column of each
    named: list[tuple[str, str]] = list(rows.itertuples(index=False, name=None))
    for row in sorted(range(len(named)), key=lambda row: named[row][1] in REMEMBER):
        layer, kind = named[row]
        gradient = began.get((layer, "gradient"), len(steps))
        for first, end in _stretches(far[row]):
            event = bool(whole[kind][first:end].any())
            if steps[end - 1] != step and not event and not np.isinf(z[row, first:end]).any():
                continue  # it came back
            if kind == "adam_v" and first == 0 and gradient > 0:
                continue
            lasting = end - first >= STAYS and (kind not in REMEMBER or gradient < end - 1)
            if not lasting and not event and not sure[row, first : end - 1].any():
                first = end - 1  # of what was before N nothing says that it is no scatter
            began[layer, kind] = first
            break
    found = [(int(steps[began[key]]), *key, float(z[row, began[key]])) for row, key in enumerate(named) if key in began]
    return pd.DataFrame(found, columns=["step", *keys, "z"])


def _table(own: pd.DataFrame, rows: pd.DataFrame, name: str) -> np.ndarray:
    """(rows, steps), NaN where there is none."""
    table = own.pivot(index=["layer", "kind"], columns="step", values=name).sort_index(axis=1)
    return table.reindex(pd.MultiIndex.from_frame(rows)).to_numpy(float)


def _limits(z: np.ndarray, healthy: np.ndarray) -> np.ndarray:
    """`beyond_chance` of each number, among all that are scored."""
    counts, place = np.unique(np.nan_to_num(healthy).astype(int), return_inverse=True)
    numbers = int(np.isfinite(z).sum())
    return np.array([beyond_chance(numbers, count) for count in counts])[place].reshape(z.shape)


def _events(far: np.ndarray) -> np.ndarray:
    """(steps,): where half of the layers or more are far off at once."""
    off = far.sum(axis=0)
    return (off >= EVENT) & (2 * off >= len(far))


def _stretches(far: np.ndarray) -> list[tuple[int, int]]:
    """(first, end) of each run of True, the end not included."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], far.astype(int), [0]))))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
