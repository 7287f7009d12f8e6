"""Show the code: a line for each view that, pasted in a cell, gives the data that the view shows.

Pure functions from names to text; they know nothing of widgets, files or MLX.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..run import Run


class Code:
    """Lines for one step of a run.

    Args:
        run: its folder.
        step, segment: what is looked at; segment None where the run has only one.
        factory: "module:function" or a script, where the run needs it.
        replayed: a trace of the step is among the run's own files.
        examined: so is a verdict.
    """

    def __init__(
        self, run: Path, step: int, segment: int | None, factory: str | None, replayed: bool, examined: bool
    ) -> None:
        self._open = f"import workbench as wb; run = wb.open_run({str(run)!r}); "
        self._place = f"{step}" if segment is None else f"{step}, segment={segment}"
        self._how = "" if factory is None else f", factory={factory!r}"
        self._replayed, self._examined = replayed, examined

    def timeline(self) -> str:
        return f"{self._open}spikes = run.spikes(); run.steps"

    def step(self, known: bool) -> str:
        """`known`: a replay of the step is shown."""
        return f"{self._open}{self._trace()}.layers" if known else f"{self._open}run.norms({self._place})"

    def batch(self, known: bool) -> str:
        if not known:
            return f"{self._open}wb.batch_table(run, {self._place})"
        return f"{self._open}trace = {self._trace()}; wb.batch_table(run, trace.step, trace)"

    def cause(self, changes: Sequence[str]) -> str:
        """`changes`: of the experiments that are shown."""
        if changes:
            step, _, segment = self._place.partition(", ")
            arguments = ", ".join(part for part in (step, repr(list(changes)), segment) if part)
            return f"{self._open}run.whatif({arguments}{self._how})"
        verdict = f"run.verdict({self._place})" if self._examined else f"run.autopsy({self._place}{self._how})"
        return f"{self._open}{verdict}"

    def environment(self) -> str:
        return f"{self._open}wb.environment_table(run)"

    def _trace(self) -> str:
        return f"run.trace({self._place})" if self._replayed else f"run.replay({self._place}{self._how})"


def naming(run: Run) -> str:
    """The line that opens a panel on a run of the user's own loop, with the factory or the script named that its
    manifest has: code to read before it is run. Of a loop in a notebook, with the experiment."""
    rebuild = run.manifest.rebuild
    named = rebuild.get("factory") or rebuild.get("script")
    how = "experiment=experiment" if named is None else f"factory={str(named)!r}"
    return f"wb.Panel(run={str(run.path.resolve())!r}, {how})"
