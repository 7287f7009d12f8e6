"""Which of the recorders that a script makes is that of the run to be replayed.

The one whose folder is the run's. Where the run has been moved, the one that was made as the n-th, as the manifest
says; where it doesn't, the first whose experiment is like the run's and whose folder holds no other run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ..manifest import NAME

if TYPE_CHECKING:
    from ..experiment import Experiment


@dataclass
class Wanted:
    """
    Args:
        run: the folder of the run.
        identity: of the run, random, as its manifest has it.
        number: its recorder was made as the n-th of its process, from 1; None: that is not known, or says nothing.
        unlike: in what an experiment is not the run's, in phrases.

    Attributes:
        made: the folders of the recorders that were made so far.
        first: the experiment of the first of them.
    """

    run: Path
    identity: str
    number: int | None = None
    unlike: Callable[[Experiment], list[str]] = lambda experiment: []
    made: list[Path] = field(default_factory=list)
    first: Experiment | None = None

    def is_it(self, experiment: Experiment, path: Path) -> bool:
        """Whether a recorder that is being made is the one."""
        self.made.append(path)
        if self.first is None:
            self.first = experiment
        if os.path.realpath(path) == os.path.realpath(self.run):
            return True
        if self.number is not None:
            return len(self.made) == self.number
        return not self.unlike(experiment) and self._identity_at(path) in (None, self.identity)

    def _identity_at(self, path: Path) -> str | None:
        try:
            return str(json.loads((path / NAME).read_bytes())["run"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def only(self) -> Experiment | None:
        """The experiment of the one recorder that was made: whoever compares it with the run's says what is unlike."""
        alone = len(self.made) == 1 and self.number is None
        return self.first if alone and self._identity_at(self.made[0]) in (None, self.identity) else None

    def sentence(self, script: str, trained: Path | None = None) -> str:
        """Why the run's recorder was not reached.

        Args:
            trained: the run that the script was about to train before.
        """
        several = ", ".join(map(str, self.made))
        if trained is None:
            found = f"{script} ended after it made the runs {several}, of which none is {self.run}"
        else:
            found = f"{script} makes the run {trained} first, and trains it before it comes to {self.run}"
        return (
            f"{found}; a replay trains no other run. Name a function that builds the experiment of {self.run.name} "
            "alone, or makes its Recorder: --factory module:function (factory=)"
        )
