"""A step performed once more, not to count: from the state that it started from, with its batch drawn again and the
step traced anew, as a replay would do it. Afterwards all is as it was.

Knows experiments and steps; nothing of what follows from it, of folders or recorders.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .contents import Held
from .deep_snapshot import DeepSnapshot, Opaque
from .enumeration import some
from .errors import ExperimentError
from .experiment import Batch, put_arrays, put_kept
from .files_read import ReadFile, described, reads
from .fingerprint import fingerprint
from .lines.line import Edits
from .objections import of_moved_on
from .observe import edit, observe
from .outside_state import of_sampler
from .plain_batches import PlainBatches
from .ranks.world import world
from .reachable import Surroundings
from .redrawing import draw_again, refuse_other_cursor
from .snapshot import State, capture, restore
from .standins import Touched, other_threads, without_counting
from .step import Stepper, StepResult
from .watched_numbers import Watch, uses_of


class Outcome(NamedTuple):
    """Of performing a step again: the items that were others, and why it could not be tried; None: it was."""

    unlike: list[str]
    doubt: str | None = None


class Performed(NamedTuple):
    """A step that was performed: its batch, the cursor after it, and what is compared, made with a method."""

    batch: Batch
    cursor: dict[str, Any]
    method: str
    seen: dict[str, Any]


class SecondPerformance:
    """
    Args:
        stepper: performed the step.
        start: the state that it started from, with cursor and random state as before its batch was drawn.
        edits: what the loop changed in that state since it was left.

    Attributes:
        files: those that the step read by itself when it was performed again.
    """

    def __init__(self, stepper: Stepper, start: State, edits: Edits | None) -> None:
        self._stepper, self._start, self._edits = stepper, start, edits
        self.files: list[ReadFile] = []

    def compare(self, around: DeepSnapshot, first: Performed) -> Outcome:
        """Performs the step again, and leaves all as it was.

        Args:
            around: all that it can reach beside the state.

        Raises:
            ExperimentError: it moves on what no checkpoint holds, or its batch is not drawn again.
        """
        experiment, found = self._stepper.experiment, around.opaque.values()
        needed = not experiment.options.deterministic or around.large or any(one.what != "cache" for one in found)
        left = capture(experiment, self._start.step + 1, first.cursor) if needed else None

        outcome = tried(around, first.seen, lambda: self._performed(first))
        if left is not None and (outcome.doubt or outcome.unlike):
            restore(experiment, left)
        return outcome

    def _performed(self, first: Performed) -> dict[str, Any]:
        again = Stepper(self._stepper.experiment, self._stepper.layers)
        drawn = self._drawn_again(first)
        with reads() as files:
            result = again(drawn)
        self.files = described(files)
        return evidence(again, drawn, result, first.cursor, first.method)

    def uses(
        self, numbers: list[str], around: DeepSnapshot, first: Performed, surroundings: Surroundings
    ) -> Watch | None:
        """How the step uses numbers that it changes; None: it can't be performed to see that. Leaves all as it was.

        Args:
            numbers: their names in `surroundings`.
        """
        places, values = surroundings.places(), surroundings.changed()
        if world().size > 1 or other_threads() or any(name not in places for name in numbers):
            return None
        left = capture(self._stepper.experiment, self._start.step + 1, first.cursor)
        watched = {name: (places[name], values[name][1]) for name in numbers}
        uses = uses_of(watched, around, lambda: self._performed(first), first.seen)
        put_arrays(self._stepper.experiment.model, left.weights)  # first: where a dtype changed `restore` would refuse
        put_kept(self._stepper.experiment, left.optimizer)
        restore(self._stepper.experiment, left)
        return uses

    def restore(self) -> None:
        """Puts the state in place that the step started from."""
        restore(self._stepper.experiment, self._start)
        if self._edits is not None:
            edit(self._stepper.experiment, self._edits)

    def _drawn_again(self, first: Performed) -> Batch:
        """At the start again: the batch as a replay would have it."""
        sampler = self._stepper.experiment.sampler
        if isinstance(sampler, PlainBatches):  # which the recorder stores
            self.restore()
            sampler.consumed()
            return first.batch
        around = of_sampler(self._stepper.experiment)
        self.restore()
        drawn = draw_again(sampler, first.batch, self._start.cursor, 1, self._start.cursor)
        refuse_other_cursor(sampler, first.cursor)
        if around is not None and not other_threads():
            around.put_back()
        return drawn


def tried(
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


def doubt(around: DeepSnapshot, others: list[Held], moved: list[str]) -> str | None:
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


def evidence(stepper: Stepper, batch: Batch, result: StepResult, cursor: dict[str, Any], method: str) -> dict[str, Any]:
    """What is compared of two performances of a step."""
    found = observe(stepper, batch, result, cursor, method).evidence()
    return found | {"gradients": fingerprint(result.gradients, method)}
