"""What was computed of steps, for as long as a panel lives. Knows records and tables; nothing of runs or widgets."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

if TYPE_CHECKING:
    from ..probes.neighbours import Context
    from ..trace import Trace
    from ..verdict import Verdict

KEPT = 32  # steps, so that coming back to one shows what was found again

# Run (its identity, not its folder), step, segment, and a digest of what may change a bit in this notebook: a result of
# another environment is not shown as one of this.
Key = tuple[str, int, int, str]


@dataclass
class Made:
    """When and where something was computed.

    Attributes:
        when: seconds since 1970.
        seconds: that it took; None: not known.
        file: where it was read from; None: it was computed in this notebook.
        fresh: a person has not looked elsewhere since.
    """

    when: float
    seconds: float | None = None
    file: Path | None = None
    fresh: bool = False

    def sentence(self, done: str) -> str:
        """Such as "From the cache: replayed at 21:40:03 in 0.6 s, in this notebook."; nothing where it is fresh."""
        if self.fresh:
            return ""
        if self.file is not None:
            return f"From the run's own files ({self.file.name}): {done} on {_clock('%Y-%m-%d %H:%M', self.when)}."
        took = "" if self.seconds is None else f" in {self.seconds:.1f} s"
        return f"From the cache: {done} at {_clock('%H:%M:%S', self.when)}{took}, in this notebook."


def _clock(form: str, when: float) -> str:
    return time.strftime(form, time.localtime(when))


@dataclass
class Found:
    """What is known of a step.

    Attributes:
        trace: its replay.
        context: it and the steps before it; onset: their map as HTML, once it was drawn.
        verdict: on what made its loss spike.
        experiments: as `Run.whatif`, all that were made; the untouched step is the first row.
        made: when each of these was computed, by its name here.
        notices: what is to be known of the run's own files.
        forgotten: what was read from files was taken out, and they are to be read again.
    """

    trace: Trace | None = None
    context: Context | None = None
    onset: str = ""
    verdict: Verdict | None = None
    experiments: pd.DataFrame | None = None
    made: dict[str, Made] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)
    forgotten: bool = field(default=False, compare=False)

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

    def origin(self, name: str, done: str) -> str:
        """Where something shown comes from, if not from work that has just been done."""
        return self.made[name].sentence(done) if name in self.made else ""

    @property
    def here(self) -> bool:
        """Whether the replay, if there is one, was made in this notebook."""
        return "trace" in self.made and self.made["trace"].file is None


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

    def look_up(self, key: Key, read: Callable[[], Found]) -> Found:
        """What is known of a step; where nothing is, or files are to be read again, also what `read` finds, which is
        then known."""
        known = self._found.get(key)
        if known is not None and not known.forgotten:
            return known
        found = read()
        if known is not None:
            for name in known.made:
                setattr(found, name, getattr(known, name))
            found.made |= known.made
        if found.made:
            self.change(key)
            self._found[key] = found
        return found

    def forget_files(self) -> None:
        """Files are read again: it has become known which machine this is, and they may be of another."""
        for key, found in list(self._found.items()):
            for name in [name for name, made in found.made.items() if made.file is not None]:
                setattr(found, name, None)
                del found.made[name]
                found.forgotten = True
            if not found.made:
                del self._found[key]
