"""What was computed of steps, for as long as a panel lives. Knows records and tables; nothing of runs or widgets."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pandas as pd

if TYPE_CHECKING:
    from ..probes.neighbours import Context
    from ..trace import Trace
    from ..verdict import Verdict

KEPT = 32  # steps, so that coming back to one shows what was found again

Key = tuple[str, int, int]  # run (its identity, not its folder), step, segment


@dataclass
class Found:
    """What is known of a step.

    Attributes:
        trace: its replay.
        context: it and the steps before it; onset: their map as HTML, once it was drawn.
        verdict: on what made its loss spike.
        experiments: as `Run.whatif`, all that were made; the untouched step is the first row.
    """

    trace: Trace | None = None
    context: Context | None = None
    onset: str = ""
    verdict: Verdict | None = None
    experiments: pd.DataFrame | None = None

    def add(self, made: pd.DataFrame) -> None:
        """Adds experiments; one that is made again takes the place of its first time."""
        if self.experiments is None:
            self.experiments = made
            return
        old = self.experiments
        kept = old[~old["change"].isin(made["change"])]
        joined = pd.concat([made.iloc[:1], kept, made.iloc[1:]], ignore_index=True)
        joined.attrs = {
            "sentence": made.attrs.get("sentence", ""),
            "notices": _united(old.attrs.get("notices", []), made.attrs.get("notices", [])),
            "files": _united(old.attrs.get("files", []), made.attrs.get("files", [])),
        }
        self.experiments = joined


def _united(old: Sequence[str], new: Sequence[str]) -> list[str]:
    return list(dict.fromkeys([*old, *new]))


class Results:
    """The last `KEPT` steps of which something is known."""

    def __init__(self) -> None:
        self._found: OrderedDict[Key, Found] = OrderedDict()

    def of(self, key: Key) -> Found:
        """What is known of a step; nothing of one that nothing was computed of."""
        return self._found.get(key, Found())

    def change(self, key: Key) -> Found:
        """The same, to add to."""
        found = self._found.setdefault(key, Found())
        self._found.move_to_end(key)
        while len(self._found) > KEPT:
            self._found.popitem(last=False)
        return found
