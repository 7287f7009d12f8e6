"""What a step reads and no checkpoint holds, Python values and the layers' modes, looked at around each step.

Knows experiments; nothing of folders or states.
"""

from __future__ import annotations

from collections.abc import Collection

from ..experiment import Experiment
from .modes import Modes
from .python_values import PythonValues
from .remarks import Remarks
from .start_values import start_values
from .users_line import warn


class Unkept:
    """That of an experiment as it is handed over.

    Args:
        ignore: names of values that no step depends on; see `workbench.ignored`.
        remarks: those of the next line, which has what is said here, too.
    """

    def __init__(self, experiment: Experiment, ignore: Collection[str], remarks: Remarks) -> None:
        self._values, self._modes = PythonValues(experiment, ignore), Modes(experiment)
        self._remarks, self._experiment, self._ignore = remarks, experiment, ignore

    def begin(self, step: int) -> None:
        """Before the first step, which comes after `step`: warns of what is otherwise than when the recorder was
        made."""
        trained = self._modes.begin(step)
        for sentence in [*([] if trained is None else [trained]), *self._values.at_first_step(step)]:
            self._remarks.add(sentence, step)
            warn(sentence)

    def start_values(self) -> dict[str, str]:
        """What the step reads beside its state, as it is now; see `start_values`."""
        return start_values(self._experiment, self._ignore)

    def leave_out_changed(self) -> None:
        """After the first step: says nothing of the values that it changed itself."""
        self._values.leave_out_changed()

    def notice(self, step: int, *, due: bool) -> list[str]:
        """After a step: sentences on what is another one now, for the user.

        Args:
            due: look at all of it, not only at what is cheap to look at.
        """
        said = [*self._modes.changed(step)]
        if due:
            said += self._values.changed(step)
        for sentence, since in said:
            self._remarks.add(sentence, since)
        return [sentence for sentence, _ in said]
