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
from typing import Any, NamedTuple

from .bare_objects import is_number
from .contents import Held
from .deep_snapshot import DeepSnapshot, Opaque
from .errors import CheckpointError, ExperimentError
from .experiment import Batch, put_arrays, put_kept, random_key
from .files_read import ReadFile, described, of_file, reads
from .fingerprint import fingerprint
from .ignored import UnknownName, ignored, refuse_unknown, remarks, way_to_ignore
from .objections import (
    of_moved_on,
    of_numbers,
    of_unclear,
    reason_of,
    refuse_draws,
    refuse_other_dtypes,
    refuse_other_extras,
    tell,
)
from .observe import edit, observe
from .outside_state import everything_outside, known_below_model, named, of_sampler, outside
from .plain_batches import PlainBatches
from .ranks.world import world
from .reachable import Surroundings
from .rebinding import Handed
from .redrawing import Generators, draw_again, refuse_other_cursor
from .snapshot import State, capture, restore
from .standins import Touched, other_threads, some, without_counting
from .step import Stepper, StepResult
from .telemetry import Edits
from .watched_numbers import Watch, uses_of


class Outcome(NamedTuple):
    """Of performing a step again: the items that were others, and why it could not be tried; None: it was."""

    unlike: list[str]
    doubt: str | None = None


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
        outside: what the first step changed beside its state: a replay of a later one begins without that.
        remarks: what could not be ruled out, a sentence each: the likely reason of a replay that is not exact.
        files: those that the step reads by itself.
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
        self._stepper, self._start, self._edits, self._anywhere = stepper, start, edits, anywhere
        self._ignore = ignore
        self._values = Surroundings(lambda: outside(self._stepper.experiment))
        self._before, self._generators = everything_outside(stepper.experiment), Generators()
        self._key = random_key()
        self._handed = [Handed(stepper.experiment), *([] if handed is None else [handed])]
        caches = [one.value for one in self._before.opaque.values() if one.what == "cache"]
        self._misses = {id(one): one.cache_info().misses for one in caches}
        self.outside: list[str] = []
        self.remarks: list[str] = []
        self.files: list[ReadFile] = []

    def first(self, batch: Batch, result: StepResult, cursor: dict[str, Any], method: str) -> None:
        """After the first step. Leaves the experiment as that left it, bit for bit, with all around it that the step
        can reach, and warns of what may break later.

        Raises:
            ExperimentError: a replay would not give the same bits. The experiment is at its start again then.
        """
        experiment = self._stepper.experiment
        moved, values, others = self._generators.moved(), self._values.changed(), self._before.changed()
        changed = [*values, *named(others, values)]
        seen = _evidence(self._stepper, batch, result, cursor, method)
        try:
            self._refuse_unknown(changed)
            for one in self._handed:
                one.refuse_replaced()
            refuse_draws(moved, others, compiled=experiment.options.compile)
            refuse_other_extras(self._start, experiment)
            refuse_other_dtypes(self._start, experiment)
            around = everything_outside(experiment)
            doubt = _doubt(around, others, moved)
            if self._anywhere(doubt is not None) and doubt is None:
                doubt = "in another of the processes that train together it could not be"
            outcome = Outcome([], doubt) if doubt else self._again(around, seen, batch, cursor, method)
            if outcome.unlike and experiment.options.deterministic:
                raise ExperimentError(reason_of(outcome.unlike, moved, changed))
            unclear: dict[str, str] = {}
            numbers = [name for name, pair in values.items() if is_number(pair[1])]
            numbers = [name for name in numbers if not ignored(name, self._ignore)]
            if numbers and not experiment.options.compile:
                uses = None if outcome.doubt else self._uses(numbers, around, seen, batch, cursor, method)
                if uses is None or uses.used:
                    used = {} if uses is None else uses.used
                    asked = [name for name in numbers if name in used] or numbers
                    raise ExperimentError(f"{of_numbers(numbers, values, used)}. {way_to_ignore(asked)}")
                unclear = uses.unclear
        except ExperimentError as error:
            put_arrays(experiment.model, self._start.weights)  # first: where a dtype changed `restore` would refuse
            with contextlib.suppress(CheckpointError):  # extra arrays that are no longer as many can't be put back
                put_kept(experiment, self._start.optimizer)
                self._restore()
            self._before.put_back()
            self._generators.put_back()
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

    def _again(
        self, around: DeepSnapshot, seen: dict[str, Any], batch: Batch, cursor: dict[str, Any], method: str
    ) -> Outcome:
        """Performs the first step again, and leaves all as it was.

        Raises:
            ExperimentError: it moves on what no checkpoint holds, or its batch is not drawn again.
        """
        experiment, found = self._stepper.experiment, around.opaque.values()
        needed = not experiment.options.deterministic or around.large or any(one.what != "cache" for one in found)
        left = capture(experiment, self._start.step + 1, cursor) if needed else None

        outcome = _tried(around, seen, lambda: self._performed(batch, cursor, method))
        if left is not None and (outcome.doubt or outcome.unlike):
            restore(experiment, left)
        return outcome

    def _performed(self, batch: Batch, cursor: dict[str, Any], method: str) -> dict[str, Any]:
        again = Stepper(self._stepper.experiment, self._stepper.layers)
        drawn = self._drawn_again(batch, cursor)
        with reads() as files:
            result = again(drawn)
        self.files = described(files)
        return _evidence(again, drawn, result, cursor, method)

    def _uses(
        self,
        numbers: list[str],
        around: DeepSnapshot,
        seen: dict[str, Any],
        batch: Batch,
        cursor: dict[str, Any],
        method: str,
    ) -> Watch | None:
        """How the step uses numbers that it changes; None: it can't be performed to see that. Leaves all as it was."""
        places, values = self._values.places(), self._values.changed()
        if world().size > 1 or other_threads() or any(name not in places for name in numbers):
            return None
        left = capture(self._stepper.experiment, self._start.step + 1, cursor)
        watched = {name: (places[name], values[name][1]) for name in numbers}
        uses = uses_of(watched, around, lambda: self._performed(batch, cursor, method), seen)
        put_arrays(self._stepper.experiment.model, left.weights)  # first: where a dtype changed `restore` would refuse
        put_kept(self._stepper.experiment, left.optimizer)
        restore(self._stepper.experiment, left)
        return uses

    def _restore(self) -> None:
        restore(self._stepper.experiment, self._start)
        if self._edits is not None:
            edit(self._stepper.experiment, self._edits)

    def _drawn_again(self, batch: Batch, cursor: dict[str, Any]) -> Batch:
        """At the start again: the batch as a replay would have it."""
        sampler = self._stepper.experiment.sampler
        if isinstance(sampler, PlainBatches):  # which the recorder stores
            self._restore()
            sampler.consumed()
            return batch
        around = of_sampler(self._stepper.experiment)
        self._restore()
        drawn = draw_again(sampler, batch, self._start.cursor, 1, self._start.cursor)
        refuse_other_cursor(sampler, cursor)
        if around is not None and not other_threads():
            around.put_back()
        return drawn

    def second(self, start: State, batch: Batch, result: StepResult, cursor: dict[str, Any], method: str) -> None:
        """After the step that followed the first, if that changed something outside: performs it again without that.

        Args:
            start: the state that it started from, with the cursor after its batch.

        Raises:
            ExperimentError: it depends on that, so a replay from a checkpoint would not give the same bits.
        """
        experiment = self._stepper.experiment
        around, generators = everything_outside(experiment), Generators()
        if other_threads() or _doubt(around, [], []):
            return
        seen = _evidence(self._stepper, batch, result, cursor, method)
        left = capture(experiment, start.step + 1, cursor)

        def begin() -> None:
            self._before.put_back()
            self._generators.put_back()

        def perform() -> dict[str, Any]:
            restore(experiment, start)
            return _evidence(self._stepper, batch, self._stepper(batch), cursor, method)

        outcome = _tried(around, seen, perform, begin)
        generators.put_back()
        restore(experiment, left)
        if outcome.unlike and experiment.options.deterministic:
            raise ExperimentError(
                f"step {start.step + 1} can't be replayed: it depends on what step {start.step} changed beside its "
                f"state, and no checkpoint holds that: {some(self.outside)}. Performed again without it, it gave other "
                f"bits ({some(outcome.unlike)}). Hand what holds it to the recorder as `extra`: arrays in a dict, or "
                "an object with state_dict and load_state_dict. (self_check=False records it all the same)"
            )


def _tried(
    around: DeepSnapshot,
    seen: dict[str, Any],
    perform: Callable[[], dict[str, Any]],
    begin: Callable[[], object] = lambda: None,
) -> Outcome:
    """Performs a step that is not to count; see `standins.without_counting`, also for the arguments.

    Raises:
        ExperimentError: it moves on what no checkpoint holds, or raised an error that the first did not.
    """
    touched: list[Opaque] = []
    now = seen
    try:
        with without_counting(around, around.opaque.values(), keep=bool(other_threads()), begin=begin) as touched:
            now = perform()
    except Touched:
        pass
    except ExperimentError:
        if not touched:
            raise
    except Exception as error:
        if around.large and "read-only" in str(error):
            return Outcome([], f"it changes {some(around.large)}, too large to be copied and put back")
        if not touched:
            said = f"performed again from the same state it raised {type(error).__name__}: {error}"
            raise ExperimentError(said) from error
    if moving := [one for one in touched if one.what != "unknown"]:
        raise ExperimentError(of_moved_on(moving))
    if touched:
        return Outcome([], f"it uses {some(map(str, touched))}, which can't be looked into, nor put back")
    return Outcome([name for name in seen if now[name] != seen[name]])


def _doubt(around: DeepSnapshot, others: list[Held], moved: list[str]) -> str | None:
    """Why the step must not be performed twice; None: it may be."""
    if around.left_out:
        return f"there is more in {some(around.left_out)} than can be looked through"
    if fixed := [str(one) for one in around.opaque.values() if (one.fixed if one.what != "cache" else not one.places)]:
        return f"it can reach {some(fixed)}, which can't be looked into, nor put back"
    if sets := [one.path for one in others if one.kind.name == "set"]:
        return f"it changes {some(sets)}, a set, whose order can't be put back"
    if (others or moved) and (threads := other_threads()):
        return f"what it can reach changed meanwhile, by itself or by another thread ({some(threads)})"
    return None


def _evidence(
    stepper: Stepper, batch: Batch, result: StepResult, cursor: dict[str, Any], method: str
) -> dict[str, Any]:
    found = observe(stepper, batch, result, cursor, method).evidence()
    return found | {"gradients": fingerprint(result.gradients, method)}
