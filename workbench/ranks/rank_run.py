"""A data-parallel run as one of its ranks saw it: its own batches, losses and random states.

What all ranks share (weights, moments, the curve of the mean loss) is the run's. Imports no MLX.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..lines.line import Line
from ..run import Run
from ..telemetry import Telemetry
from .own_line import own_line


class RankTelemetry:
    """The telemetry of a run, in whose lines stands what one rank recorded. Its columns are the run's."""

    def __init__(self, shared: Telemetry, rank: int) -> None:
        self.shared, self.rank = shared, rank

    def __len__(self) -> int:
        return len(self.shared)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.shared, name)

    def at(self, step: int, segment: int) -> Line | None:
        return self._own(self.shared.at(step, segment))

    def meta(self, segment: int) -> Line | None:
        return self._own(self.shared.meta(segment))

    def _own(self, line: Line | None) -> Line | None:
        return None if line is None else own_line(line, self.rank)


class RankRun(Run):
    """
    Args:
        path: the run's folder.
        rank: as which to look at it.
    """

    def __init__(self, path: Path, rank: int) -> None:
        super().__init__(path)
        self.rank = rank
        self._seen: RankTelemetry | None = None

    @property
    def telemetry(self) -> Any:
        shared = super().telemetry
        if self._seen is None or self._seen.shared is not shared:
            self._seen = RankTelemetry(shared, self.rank)
        return self._seen
