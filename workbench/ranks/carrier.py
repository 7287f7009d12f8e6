"""Which rank's batch carried the loss of a step: each rank's loss, set against those of the steps before.

The ranks of a data-parallel run hold the same weights, so their losses differ by their batches alone. Imports no MLX.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from msgspec import UNSET

from ..bits import bits_float
from ..errors import ReplayError, TelemetryError
from ..number_text import number

if TYPE_CHECKING:
    import pandas as pd

    from ..lines.line import Line
    from ..recorded.recorded_run import RecordedRun

PAST = 50  # steps, as many as the window of spike detection has by default
LEAST = 8  # losses before it, of all ranks together; of fewer no usual spread is known
# Robust standard deviations (the median's, by 1.4826 MAD) above which a loss stands out: as of `spikes`' rule `loss_z`.
FAR = 6.0


@dataclass(frozen=True)
class Carried:
    """
    Attributes:
        losses: float32, one a rank.
        excess: each in robust standard deviations above the median of the past; NaN: no past is known.
    """

    losses: np.ndarray
    excess: np.ndarray

    @property
    def ranks(self) -> list[int]:
        """The ranks whose loss stands out, or is not finite."""
        return [rank for rank, loss in enumerate(self.losses) if not np.isfinite(loss) or self.excess[rank] > FAR]

    def sentence(self, step: int) -> str:
        """Such as "Rank 1's batch carried step 12: its loss is 9.81, and 0.44 on rank 0"."""
        found, rest = self.ranks, [rank for rank in range(len(self.losses)) if rank not in self.ranks]
        if not found:
            spread = f"from {number(self.losses.min())} to {number(self.losses.max())}"
            unknown = "; too few steps come before it to say which are unusual" if np.isnan(self.excess).all() else ""
            return f"No rank's batch stands out in step {step}: losses {spread}{unknown}."
        if not rest:
            return f"Step {step} is alike on all {len(self.losses)} ranks: every rank's loss stands out."
        names = f"Rank {found[0]}'s batch" if len(found) == 1 else f"The batches of ranks {_listed(found)}"
        values = ", ".join(f"{number(self.losses[rank])}" for rank in found)
        others = self.losses[rest]
        usual = f"{number(others[0])}" if len(rest) == 1 else f"{number(others.min())} to {number(others.max())}"
        return (
            f"{names} carried step {step}: loss {values}, against {usual} on "
            f"{'rank' if len(rest) == 1 else 'ranks'} {_listed(rest)}."
        )


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(str(rank) for rank in ranks)


def carried(losses: Sequence[float], past: Sequence[float]) -> Carried:
    """
    Args:
        losses: of a step, one a rank.
        past: of the steps before, of all ranks.
    """
    values, before = np.array(losses, np.float32), np.array(past, np.float64)
    before = before[np.isfinite(before)]
    excess = np.full(len(values), np.nan)
    if len(before) >= LEAST:
        middle = np.median(before)
        spread = 1.4826 * np.median(np.abs(before - middle))
        if spread > 0:
            with np.errstate(invalid="ignore"):
                excess = (values.astype(np.float64) - middle) / spread
    return Carried(values, excess)


def losses_of(line: Line | None) -> list[float]:
    """The loss of each rank, as a telemetry line has it; empty where it has none.

    Raises:
        TelemetryError: what it has are no bits.
    """
    if line is None or line.ranks is UNSET:
        return []
    try:
        return [float(bits_float(one["loss_bits"])) for one in line.ranks if isinstance(one.get("loss_bits"), str)]
    except ValueError as error:
        raise TelemetryError(f"what the line of step {line.step} says of its ranks is damaged: {error}") from error


def carried_in(run: RecordedRun, step: int, segment: int, losses: Sequence[float] | None = None) -> Carried | None:
    """As `carried`, of a step of a run; None: it is none of several ranks.

    Args:
        losses: of the step; None: those that the run logged.
    """
    telemetry = getattr(run.telemetry, "shared", run.telemetry)  # of all ranks, also where the run is seen by one
    lines = {one: telemetry.at(one, run.manifest.lineage(segment, one)) for one in range(max(1, step - PAST), step + 1)}
    given = losses_of(lines.pop(step)) if losses is None else losses
    lines.pop(step, None)
    return carried(given, [loss for line in lines.values() for loss in losses_of(line)]) if given else None


def rank_table(run: RecordedRun, step: int, segment: int | None = None) -> pd.DataFrame:
    """What the ranks of a data-parallel run logged of a step: rank, host, loss, excess (robust standard deviations
    above the ranks' losses of the 50 steps before), stands_out, batch_hash (None: not recorded). `attrs["sentence"]`
    says which carried it.

    Raises:
        ReplayError: the step is not in the telemetry, or the run is of one process.
        TelemetryError: its line does not agree with itself, or is of another number of ranks than the run.
    """
    import pandas as pd

    from .own_line import complaint, own_line

    setup = run.manifest.ranks
    chosen = run.segment_of(step, segment)[0]
    line = run.line(step, chosen)
    if setup is UNSET or line is None:
        raise ReplayError(f"{run.path} was recorded by one process; expected a run of several ranks")
    if (wrong := complaint(line, setup.size)) is not None:
        raise TelemetryError(f"the line of step {step} does not agree with itself: {wrong}")
    if (found := carried_in(run, step, chosen)) is None:
        raise ReplayError(f"the ranks of {run.path} logged no loss at step {step}; expected one of each")
    hashes = [own_line(line, rank).batch_hash for rank in range(setup.size)]
    table = pd.DataFrame(
        {
            "rank": range(len(found.losses)),
            "host": setup.hosts,
            "loss": found.losses,
            "excess": found.excess,
            "stands_out": [rank in found.ranks for rank in range(len(found.losses))],
            "batch_hash": [None if one is UNSET else one for one in hashes],
        }
    )
    table.attrs["sentence"] = found.sentence(step)
    return table
