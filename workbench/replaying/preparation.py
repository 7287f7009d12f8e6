"""What a replay works on: environment compared, checkpoint read, experiment rebuilt and compared with the run's.

Knows run folders and the core; performs no step.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET

from ..checkpoints import checkpoint_reader
from ..checkpoints.checkpoint_comparison import difference
from ..environment import numeric_environment, on_device
from ..errors import ChangedByHand, CheckpointError, EnvironmentMismatch, ExperimentError
from ..experiment import Experiment, random_key, set_random_key
from ..files_read import differences as differences_of_files
from ..fingerprint import known_method
from ..lines.line import ARRAYS, Edits
from ..norms import method_here
from ..own_scripts.named_script import named
from ..process_settings import as_before
from ..ranks.attendance import other_wiring, refuse_ranks
from ..ranks.rank_run import RankRun
from ..rebuild import rebuild, software_differences, unlike_run
from ..recorded.layout import CHECKPOINTS
from ..recorded.plan import Plan
from ..recording.start_values import other_values, start_values
from ..replay import Comparison
from ..run import Run
from ..snapshot import State
from ..sources import beside_the_step, changed, code_of, running_script
from ..stored_batches import with_stored_batches
from ..surroundings import differences, other_hashes, set_too_late, shell_line
from .as_found import left_as_found


@contextmanager
def undisturbed() -> Iterator[None]:
    """Leaves this thread's random state as it was: a training that goes on here must not notice."""
    key = random_key()
    try:
        yield
    finally:
        set_random_key(key)


@dataclass
class Prepared:
    """What a replay works on.

    Attributes:
        start: the state that the plan's checkpoint holds.
        method: of the run's fingerprints.
        backend: the device that recorded.
        here: the numeric environment.
        unlike: in what it differs from the run's.
        notices: what the user should know.
        own: whether nobody but this package has the experiment.
        given: whether it was handed in, so that its state is put back as it was found.
        others: a sentence on what the step reads beside its state that is otherwise than recorded; None: nothing is.
        damaged: steps whose checkpoint can't be read.
    """

    run: Run
    plan: Plan
    experiment: Experiment
    start: State
    method: str
    backend: str
    here: dict[str, Any]
    unlike: list[str]
    notices: list[str]
    own: bool = False
    given: bool = False
    others: str | None = None
    damaged: set[int] = field(default_factory=set)

    def end(self) -> None:
        """When the replay is over, of an experiment that this package's own code built: lets go of its arrays.

        A compiled step and what performs it hold each other, and so does what `Optimizer.init` of MLX leaves behind
        hold the optimizer: with their arrays, such circles would stand until Python looks for them, and the next replay
        here would have to be given memory by the system: 35,000 page faults of a GPT of 10.7M parameters (measured).
        """
        if self.own:
            for tree in (self.experiment.model, self.experiment.optimizer.state):
                _empty(tree)
            _left.discard(id(self))

    def begin(self) -> State:
        """`start`, which is let go of here: a roll-forward leaves it behind, and it takes as much memory as any."""
        start = self.start
        del self.start
        return start

    def evidence(self, step: int) -> dict[str, Any]:
        """What the run logged at a step, without the norms if they were measured in another way than ours."""
        run, segment = self.run, self.plan.segment
        at_start = step == self.plan.checkpoint[0]
        found = run.state_evidence(*self.plan.checkpoint) if at_start else run.evidence(step, segment)
        alike = run.manifest.norms_of(run.manifest.lineage(segment, step)) == method_here()
        return found if alike else {name: found[name] for name in found if name not in ARRAYS}

    def committed(self, step: int) -> Comparison | None:
        """What compares the run's own checkpoint of a step; None: there is none. If it can't be read, a notice says so
        then, and it is among the `damaged`."""
        key = (step, self.run.manifest.lineage(self.plan.segment, step))
        folder = (self.run.path / CHECKPOINTS).absolute()  # a step of the user's may be elsewhere when it is read
        return partial(self._difference, folder, key) if key in self.run.checkpoints else None

    def _difference(self, folder: Path, key: tuple[int, int], state: State) -> str | None:
        try:
            return difference(folder, *key, state, self.run.manifest.run) or ""
        except CheckpointError as error:
            self.notices.append(f"checkpoint {key[0]} was not compared: {error}")
            self.damaged.add(key[0])
            return None

    def edits(self, step: int) -> Edits | None:
        """What the run's loop changed in the state before a step, and what its rollbacks made of learning rates."""
        found, segments = self.run.edits(step, self.plan.segment), self.run.manifest.segments
        if all(entry.rate_factor == 1 for entry in segments):
            return found
        factor = segments[self.run.manifest.lineage(self.plan.segment, step)].rate_factor
        return msgspec.structs.replace(found or Edits(), rate_factor=factor)


_left: set[int] = set()  # of `Prepared`: what was worked on before may still stand, in circles


def _let_go() -> None:
    """Of what earlier work here left behind and nothing ended: experiments of other work than replays, and of factories
    and scripts, whose names and functions hold each other. Python counts objects, not bytes, and looks for circles so
    seldom that 14 states were seen to stand after 50 replays."""
    if _left:
        _left.clear()
        gc.collect()


@contextmanager
def prepared(
    run: Run,
    plan: Plan,
    *,
    experiment: Experiment | None,
    factory: str | None,
    other_environment: bool,
    whole: Plan | None = None,
) -> Iterator[Prepared]:
    """On the device that recorded: environment compared, checkpoint read, experiment rebuilt and compared. One that was
    handed in has the state again at the end that it had: see `left_as_found`.

    Args:
        whole: of which `plan` is a leg: what would refuse a later leg refuses the first.

    Raises:
        EnvironmentMismatch: this machine differs from the run's and `other_environment` is not set.
        CheckpointError, DataError, ExperimentError: the state or the experiment can't be had.
        ChangedByHand: on the way the run's loop changed the state, and no checkpoint holds the change.
    """
    if not isinstance(run, RankRun):
        refuse_ranks(run.manifest, run.path, "this (an autopsy, a what-if, a sweep, a resumption, a ladder of reruns)")
    refuse_changed_by_hand(run, plan)
    performed = _performed(run, plan)
    all_ = performed if whole is None else _performed(run, whole)
    method = known_method(run.manifest.fingerprint, run.path)
    backend = run.manifest.segments[performed[-1]].environment.get("backend", "cpu")
    with on_device(backend), ExitStack() as within:
        started = here = numeric_environment()
        rest = software_differences(run.manifest) if experiment is None else []
        rest += other_wiring(run.manifest)
        runs_code = experiment is None and (factory is not None or run.manifest.rebuild.get("kind") == "factory")
        if not other_environment:
            _refuse_unlike(run, _differences(run, all_, here, settable=not runs_code) + rest, all_, started)
        _let_go()
        try:
            start = stored_state(run, *plan.checkpoint)
        except CheckpointError as error:
            raise CheckpointError(f"{error}. Start from an earlier one: --checkpoint STEP (checkpoint=STEP)") from error
        given = experiment is not None
        own = not given and run.manifest.rebuild.get("kind") == "trainer"
        notices: list[str] = []  # to which more may come while steps are performed
        if experiment is None:
            within.enter_context(as_before())
            experiment = rebuild(run.manifest, run.path, factory, notices)
        if runs_code:  # which may have set some of it
            here = numeric_environment()
            rest += set_too_late(started, here)
            if not other_environment:
                _refuse_unlike(run, _differences(run, all_, here) + rest, all_, started)
        experiment = with_stored_batches(run, experiment, plan.segment)
        refuse_another(run, experiment)
        found = code_of(experiment, run.manifest.rebuild, _script(run, factory))
        code, edited = _changed_code(run, all_, found)
        if code and not other_environment:
            raise EnvironmentMismatch(
                f"the code that performs the steps of {run.name} is not the one that recorded it: {'; '.join(code)} "
                "(comments and docstrings do not count). Put back what it was, or go on with --other-environment "
                "(other_environment=True): the result is then informational only."
            )
        code, edited = _changed_code(run, performed, found)
        unlike = _differences(run, performed, here) + rest + code
        notices[:0] = [*plan.notices, *([] if code else edited)]
        notices += other_files(run, plan.segment, plan.steps[-1]) + _other_hashes(run, performed, here)
        between = range(plan.checkpoint[0] + 1, plan.steps[-1])
        if missing := [step for step in between if run.line(step, plan.segment) is None]:
            notices.append(f"not checked on the way, as the telemetry lacks their lines: steps {missing}")
        if other := {run.manifest.norms_of(segment) for segment in performed} - {method_here()}:
            notices.append(
                f"the run's norms were added in another way ({', '.join(sorted(other))}): they are not compared"
            )
        ready = Prepared(run, plan, experiment, start, method, backend, here, unlike, notices, own, given)
        if (values := run.manifest.segments[performed[-1]].values) is not UNSET and values:
            ready.others = other_values(values, start_values(experiment, run.manifest.ignore or ()))
        del start  # here, too
        _left.add(id(ready))
        with left_as_found(experiment if given else None):
            yield ready


def _empty(container: Any) -> None:
    """Empties a tree of dicts and lists, such as a model or an optimizer's state."""
    for node in container.values() if isinstance(container, dict) else container:
        if isinstance(node, (dict, list)):
            _empty(node)
    container.clear()


def _performed(run: Run, plan: Plan) -> list[int]:
    """The segments whose steps are performed."""
    steps = range(plan.checkpoint[0] + 1, plan.steps[-1] + 1)
    return sorted({run.manifest.lineage(plan.segment, step) for step in steps})


def _differences(run: Run, segments: Sequence[int], here: dict[str, Any], *, settable: bool = True) -> list[str]:
    recorded = [run.manifest.segments[segment].environment for segment in segments]
    return list(dict.fromkeys(phrase for one in recorded for phrase in differences(one, here, settable=settable)))


def _other_hashes(run: Run, segments: Sequence[int], here: dict[str, Any]) -> list[str]:
    found = [other_hashes(run.manifest.segments[segment].environment, here) for segment in segments]
    return list(dict.fromkeys(one for one in found if one is not None))


def _refuse_unlike(run: Run, unlike: list[str], segments: Sequence[int], started: dict[str, Any]) -> None:
    """
    Args:
        started: the environment before any code of the user's was run here.

    Raises:
        EnvironmentMismatch: there are differences.
    """
    if not unlike:
        return
    line = shell_line(run.manifest.segments[segments[-1]].environment, started)
    where = "" if line is None else f", with its variables set in the shell that starts Python ({line})"
    raise EnvironmentMismatch(
        f"this machine computes differently from the one that recorded {run.name}: {'; '.join(unlike)}. Replay where "
        f"it was recorded{where}, or go on with --other-environment (other_environment=True): the result is then "
        "informational only."
    )


def _changed_code(run: Run, segments: Sequence[int], here: dict[str, str]) -> tuple[list[str], list[str]]:
    """A phrase for each part of the steps that is other code now; and a sentence, if their script is another beside."""
    recorded = [run.manifest.segments[segment].code for segment in segments]
    then, edited = beside_the_step(recorded, here, run.manifest.rebuild)
    return changed(then, here), edited


def _script(run: Run, factory: str | None) -> Path | None:
    """Which builds the experiment; None: none does, or a notebook or another script than the one that recorded."""
    if factory is not None:
        script = named(factory, run.manifest.rebuild)
        return None if script is None else script.path
    recorded = run.manifest.rebuild.get("script")
    return running if (running := running_script()) is not None and str(running) == recorded else None


def refuse_changed_by_hand(run: Run, plan: Plan) -> None:
    """
    Raises:
        ChangedByHand: on the plan's way the run's loop changed the state, and no checkpoint holds the change.
    """

    def changed(step: int) -> str | None:
        edits = run.edits(step, plan.segment)
        return None if edits is None else edits.by_hand

    first = plan.checkpoint[0] + 1
    step = next((step for step in range(first, plan.steps[-1] + 1) if changed(step)), None)
    if step is None:
        return
    asked = f"step {step}" if plan.steps[-1] == step else f"steps {step} to {plan.steps[-1]}"
    there = (other for other, _ in run.checkpoints_before(2**62, plan.segment) if other >= step)
    later = [other for other in there if run.line(other + 1, plan.segment) and not changed(other + 1)]
    able = [f"step {first}" if step == first + 1 else f"steps {first} to {step - 1}"] * (step > first)
    able += [f"those after checkpoint {other}" for other in later[:1]]
    rest = f" ({' and '.join(able)} can be)" if able else ""
    if (edits := run.edits(step, plan.segment)) is not None and edits.unkept:
        rest = f" ({able[0]} can be)" if step > first else ""
        raise ChangedByHand(
            f"{asked} of {run.name} can't be replayed: before step {step} the loop changed {edits.by_hand}, outside of "
            f"any step, and no checkpoint can hold that: a replay has what its script or factory builds{rest}",
            step,
        )
    raise ChangedByHand(
        f"{asked} of {run.name} can't be replayed: before step {step} the loop changed {changed(step)}, outside of any "
        f"step, and no checkpoint holds the changed state{rest}. Where the loop calls recorder.open_segment() after "
        "such a change, or makes it inside step_fn, every step can be",
        step,
    )


def other_files(run: Run, segment: int, step: int) -> list[str]:
    """A sentence on each file that the run's step read by itself, as far as its self-check saw, and that is another
    now: on the way to a step of a segment. Of a run of the built-in trainer, whose code opens none, no file is looked
    at, whatever its telemetry names."""
    if not run.manifest.own_step and run.manifest.rebuild["kind"] == "trainer":
        return []
    ways = {number for number, _, _ in run.manifest.ways(segment)}
    files = {
        one.path: one
        for line in run.telemetry.metas
        if line.reads is not UNSET and line.segment in ways and (line.step is UNSET or line.step < step)
        for one in line.reads
    }
    return differences_of_files(files.values())


def stored_state(run: Run, step: int, segment: int) -> State:
    """The state that a checkpoint of the run holds. Raises CheckpointError: it is missing or damaged."""
    return checkpoint_reader.read(run.path / CHECKPOINTS, step, segment, run.manifest.run)


def refuse_another(run: Run, experiment: Experiment) -> None:
    """Options and hyperparameters come from the run, never from defaults."""
    if found := unlike_run(run.manifest, experiment):
        raise ExperimentError(f"this is not the experiment that {run.name} recorded: {'; '.join(found)}")
