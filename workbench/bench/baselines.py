"""What one would say of a spike without the workbench: the baselines that SpikeBench prints beside the autopsy.

Knows what a run logged; runs nothing and imports no MLX.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

if TYPE_CHECKING:
    from ..run import Run

FACTOR, WINDOW = 3.0, 50  # the rule of thumb; the window is that of spike detection


def above_average(steps: pd.DataFrame) -> list[int]:
    """Steps whose loss is above 3 times the plain mean of the 50 losses before it, or not finite.

    No debouncing, and no care for what is in the mean: a loss of NaN makes it NaN, and the rule is then silent.

    Args:
        steps: `Run.steps`: step, segment and loss in file order. Of a step that stands twice the later one counts.
    """
    losses = steps.drop_duplicates("step", keep="last").sort_values("step").set_index("step")["loss"].astype(float)
    average = losses.shift(1).rolling(WINDOW).mean()
    return [int(step) for step in losses.index[(losses > FACTOR * average) | ~np.isfinite(losses)]]


def loudest_layer(run: Run, step: int) -> str | None:
    """The layer with the largest logged gradient norm at a step; the first one whose norm is not finite, if any.

    None where gradient norms were not recorded.
    """
    norms = run.norms(step, around=0)
    norms = norms[norms["kind"] == "gradient"]
    if norms.empty:
        return None
    values = [math.inf if not math.isfinite(value) else value for value in norms["recorded"].tolist()]
    return str(norms["layer"].tolist()[values.index(max(values))])


def leave_one_out(signs: Sequence[Hashable], truths: Sequence[str]) -> list[str | None]:
    """For each case the commonest truth among the *other* cases with the same sign, the first of equals.

    None where no other case has it, or where the sign itself is None.

    What a sign can say of the cause at best: it is told how causes are distributed in the very cases that it guesses.
    """
    guesses: list[str | None] = []
    for index, sign in enumerate(signs):
        others = [truth for at, truth in enumerate(truths) if at != index and signs[at] == sign and sign is not None]
        guesses.append(Counter(others).most_common(1)[0][0] if others else None)
    return guesses
