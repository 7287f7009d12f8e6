"""What a recorder finds out at its first two steps: whether they can be replayed, and if not, what stands in the way.

The first step is performed once more, as a replay would do it: the state restored, its batch drawn again, the step
traced anew. Every bit of its loss, gradients and state must be the same; the training then goes on from that state,
which has the bits of the first. All that the step can reach beside the state is put back as the first performance left
it (`deep_snapshot`); where that is not possible the step is not performed twice, and the check says "unverified". Where
the first step changed something outside, the second is performed once more without it, for a replay of it would begin
without. Where it changed a number, it is performed a third time, to see what that is used for (`watched_numbers`).
At the second step the batch is drawn again. The cost is one step and one more compilation, and two batches.
Knows experiments and steps; nothing of folders or recorders.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from typing import Any

from .bare_objects import is_number
from .enumeration import some
from .errors import CheckpointError, ExperimentError
from .experiment import Batch, put_arrays, put_kept, random_key
from .files_read import ReadFile, of_file
from .ignored import UnknownName, ignored, refuse_unknown, remarks, way_to_ignore
from .lines.line import Edits
from .objections import (
    of_numbers,
    of_side_effects,
    of_unclear,
    reason_of,
    refuse_draws,
    refuse_other_dtypes,
    refuse_other_extras,
    tell,
)
from .outside_state import everything_outside, known_below_model, named, outside
from .reachable import Surroundings
from .rebinding import Handed
from .redrawing import Generators
from .second_performance import Outcome, Performed, SecondPerformance, doubt, evidence, tried
from .shared_settings import ProcessSettings
from .snapshot import State, capture, restore
from .standins import other_threads
from .step import Stepper, StepResult


class SelfCheck:
    """Made before the first step is performed.

    Args:
        stepper: will perform it.
        start: the state that it starts from, with cursor and random state as before its batch was drawn.
        edits: what the loop changed in that state since it was left, which a replay changes too.
        anywhere: whether something holds in any of the processes that perform the step together.
        ignore: names of what the step changes beside its state, and the user says that no step depends on.
        handed: what the step held of `extra` before its arrays were laid out.

    Attributes:
        did: what the step did to the world outside of Python's memory (`side_effects`), to be set after it.
        outside: what the first step changed beside its state: a replay of a later one begins without that.
        remarks: what could not be ruled out, a sentence each: the likely reason of a replay that is not exact.
    """

    def __init__(
        self,
        stepper: Stepper,
        start: State,
        edits: Edits | None,
        anywhere: Callable[[bool], bool] = bool,
        ignore: Collection[str] = (),
        handed: Handed | None = None,
    ) -> None:
        self._stepper, self._start, self._anywhere = stepper, start, anywhere
        self._again = SecondPerformance(stepper, start, edits)
        self._ignore = ignore
        self._values = Surroundings(lambda: outside(self._stepper.experiment))
        self._before, self._generators = everything_outside(stepper.experiment), Generators()
        self._settings = ProcessSettings()
        self._key = random_key()
        self._handed = [Handed(stepper.experiment), *([] if handed is None else [handed])]
        caches = [one.value for one in self._before.opaque.values() if one.what == "cache"]
        self._misses = {id(one): one.cache_info().misses for one in caches}
        self.did: list[str] = []
        self.outside: list[str] = []
        self.remarks: list[str] = []

    @property
    def files(self) -> list[ReadFile]:
        """Those that the step reads by itself."""
        return self._again.files

    def first(self, batch: Batch, result: StepResult, cursor: dict[str, Any], method: str) -> None:
        """After the first step. Leaves the experiment as that left it, bit for bit, with all around it that the step
        can reach, and warns of what may break later.

        Raises:
            ExperimentError: a replay would not give the same bits. The experiment is at its start again then.
        """
        experiment = self._stepper.experiment
        moved, values, others = self._generators.moved(), self._values.changed(), self._before.changed()
        changed = [*values, *named(others, values), *self._settings.moved()]
        performed = Performed(batch, cursor, method, evidence(self._stepper, batch, result, cursor, method))
        try:
            self._refuse_unknown(changed)
            for one in self._handed:
                one.refuse_replaced()
            refuse_draws(moved, others, compiled=experiment.options.compile)
            refuse_other_extras(self._start, experiment)
            refuse_other_dtypes(self._start, experiment)
            around = everything_outside(experiment)
            why = doubt(around, others, moved) or of_side_effects(self.did)
            if self._anywhere(why is not None) and why is None:
                why = "in another of the processes that train together it could not be"
            outcome = Outcome([], why) if why else self._again.compare(around, performed)
            if outcome.unlike and experiment.options.deterministic:
                raise ExperimentError(reason_of(outcome.unlike, moved, changed))
            unclear: dict[str, str] = {}
            numbers = [name for name, pair in values.items() if is_number(pair[1])]
            numbers = [name for name in numbers if not ignored(name, self._ignore)]
            if numbers and not experiment.options.compile:
                uses = None if outcome.doubt else self._again.uses(numbers, around, performed, self._values)
                if uses is None or uses.used:
                    used = {} if uses is None else uses.used
                    asked = [name for name in numbers if name in used] or numbers
                    raise ExperimentError(f"{of_numbers(numbers, values, used)}. {way_to_ignore(asked)}")
                unclear = uses.unclear
        except ExperimentError as error:
            put_arrays(experiment.model, self._start.weights)  # first: where a dtype changed `restore` would refuse
            with contextlib.suppress(CheckpointError):  # extra arrays that are no longer as many can't be put back
                put_kept(experiment, self._start.optimizer)
                self._again.restore()
            self.put_back()
            if isinstance(error, UnknownName):  # nothing is said of the step
                raise ExperimentError(str(error)) from None
            raise ExperimentError(
                f"step {self._start.step + 1} can't be replayed: {error}. (self_check=False records it all the same)"
            ) from error
        # A compiled step looks at no container again after it is traced, as a replay of it does.
        lasting = list(values) if experiment.options.compile else changed
        left_out = [name for name in lasting if ignored(name, self._ignore)]
        lasting = [name for name in lasting if name not in left_out]
        self.remarks = remarks(self._start.step + 1, *outcome, lasting, left_out)
        more = [*of_unclear(unclear, list(values)), *map(of_file, self.files)]
        self.remarks += more
        drew = random_key() != self._key
        known = known_below_model(experiment)
        tell(experiment.model, *outcome, self._start.step + 1, lasting, more, drew=drew, known=known)
        if not outcome.doubt and not outcome.unlike and not experiment.options.compile:
            self.outside = [*changed, *moved, *self._filled()]

    def put_back(self) -> None:
        """Before the first step is performed anew: what it can reach beside the state is as it was."""
        self._before.put_back()
        self._generators.put_back()
        self._settings.put_back()

    def _refuse_unknown(self, changed: list[str]) -> None:
        """
        Raises:
            UnknownName: `ignore` has one.
        """
        if self._ignore:
            found = list(outside(self._stepper.experiment))
            numbers = [path for path, value, _ in reversed(found) if is_number(value)]  # the user's own functions first
            refuse_unknown(self._ignore, changed, [path for path, *_ in found], numbers)

    def refuse_replaced(self) -> None:
        """Before the second step: the loop may have done between the steps what the first did not.

        Raises:
            ExperimentError: as `Handed.refuse_replaced`.
        """
        for one in self._handed:
            one.refuse_replaced("between two steps the loop put")

    def holds(self, part: Any) -> int:
        """How many references to a part of `extra` this keeps."""
        return sum(one.holds(part) for one in self._handed)

    def _filled(self) -> list[str]:
        """Caches that have entries since: a replay that starts later fills them later, from another state."""
        caches = [one for one in self._before.opaque.values() if one.what == "cache"]
        return [
            f"{one.path} (a cache)" for one in caches if one.value.cache_info().misses > self._misses[id(one.value)]
        ]

    def second(self, start: State, batch: Batch, result: StepResult, cursor: dict[str, Any], method: str) -> None:
        """After the step that followed the first, if that changed something outside: performs it again without that.

        Args:
            start: the state that it started from, with the cursor after its batch.

        Raises:
            ExperimentError: it depends on that, so a replay from a checkpoint would not give the same bits.
        """
        experiment = self._stepper.experiment
        around, generators = everything_outside(experiment), Generators()
        if other_threads() or self.did or doubt(around, [], []):
            return
        seen = evidence(self._stepper, batch, result, cursor, method)
        left = capture(experiment, start.step + 1, cursor)

        def begin() -> None:
            self.put_back()

        def perform() -> dict[str, Any]:
            restore(experiment, start)
            return evidence(self._stepper, batch, self._stepper(batch), cursor, method)

        outcome = tried(around, seen, perform, begin)
        generators.put_back()
        restore(experiment, left)
        if outcome.unlike and experiment.options.deterministic:
            raise ExperimentError(
                f"step {start.step + 1} can't be replayed: it depends on what step {start.step} changed beside its "
                f"state, and no checkpoint holds that: {some(self.outside)}. Performed again without it, it gave other "
                f"bits ({some(outcome.unlike)}). Hand what holds it to the recorder as `extra`: arrays in a dict, or "
                "an object with state_dict and load_state_dict. (self_check=False records it all the same)"
            )
