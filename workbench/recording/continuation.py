"""What a recorder that goes on with a run finds in it: the state to start from, and the segment to go on in.

Reads the run, and changes nothing in it. Of the experiment only `take_up` changes anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec import UNSET

from .. import norms, snapshot
from ..bits import bits_float
from ..environment import numeric_environment
from ..errors import CheckpointError, ExperimentError
from ..experiment import Experiment
from ..hyperparameters import describe_optimizer, other_optimizer, other_options, other_parts
from ..lines.line import SCALARS
from ..manifest import Manifest, Segment
from ..observe import measure_alongside
from ..plain_batches import PlainBatches
from ..recovery import Row
from ..run import Run
from ..seams import state_segment
from ..snapshot import State
from ..sources import beside_the_step, changed, code_of
from ..step import Stepper
from ..stored_batches import verifier
from ..surroundings import differences, other_hashes
from .saved_state import saved_state


class Origin(NamedTuple):
    """The checkpoint that a resume starts from."""

    step: int
    segment: int


@dataclass(frozen=True)
class Continuation:
    """
    Attributes:
        manifest: the run's, with the segment to go on in.
        segment: that segment: the run's last one, or a new one.
        rate_factor: what the learning rate is multiplied by in it.
        rate_factor_before: what that of the checkpoint was.
        boxed: the checkpoints that were committed for the sake of the spike after them.
        finite: whether loss and gradient norm of the step that led to the state were.
        row: of rollbacks.
        left_out: steps whose batch is to be left out when it comes.
        other_code: a phrase for each piece of code that performs the steps and is another than before.
    """

    manifest: Manifest
    segment: int
    rate_factor: float
    rate_factor_before: float
    boxed: frozenset[tuple[int, int]]
    finite: bool
    row: Row
    left_out: frozenset[int]
    other_code: list[str]


def take_up(run: Run, start: Origin, experiment: Experiment) -> tuple[Stepper, State]:
    """Puts an experiment into the state of a checkpoint. Returns what performs its steps, and that state.

    Raises:
        ExperimentError: it is not the experiment that the run recorded.
        CheckpointError: the checkpoint is damaged, or not the state that telemetry recorded.
    """
    stepper = measure_alongside(Stepper(experiment, run.manifest.layers), hold=True)  # prepares it
    _refuse_another(experiment, run)
    if isinstance(experiment.sampler, PlainBatches):
        experiment.sampler.verify = verifier(run, run.manifest.segments[-1].segment)
    try:
        state = saved_state(run, *start)
    except CheckpointError as error:
        earlier = [step for step, _ in run.checkpoints if step < start.step]
        way = f"resume={earlier[-1]} (--resume {earlier[-1]})" if earlier else "begin a new run"
        raise CheckpointError(f"{str(error).rstrip('.')}. Go on from an earlier checkpoint: {way}") from None
    snapshot.restore(experiment, state)
    return stepper, state


def origin(run: Run, resume: bool | int) -> Origin:
    """The last checkpoint on the way to the run's end, or the one of a step.

    Args:
        resume: as a Recorder's; not False.

    Raises:
        CheckpointError: there is none.
    """
    there, newest = run.checkpoints, run.manifest.segments[-1].segment
    ways = [(step, s) for step, s in there if state_segment(run.manifest, there, step, newest) == s]
    wanted = [key for key in ways if resume is True or key[0] == resume]
    if not wanted:
        raise CheckpointError(
            f"{run.path} has no checkpoint {'at all' if resume is True else f'of step {resume}'}; "
            f"it has {[step for step, _ in ways]}"
        )
    return Origin(*wanted[-1])


def _refuse_another(experiment: Experiment, run: Run) -> None:
    manifest = run.manifest
    unlike = [
        *other_optimizer(describe_optimizer(experiment.optimizer), manifest.optimizer),
        *other_options(msgspec.to_builtins(experiment.options), manifest.options),
        *other_parts(experiment, manifest),
        *_other_batches(experiment, manifest),
    ]
    if unlike:
        raise ExperimentError(
            f"this is not the experiment that {run.path} recorded: {'; '.join(unlike)}. Go on with what it recorded; "
            "or begin a run of its own from its state (fork=workbench.fork_point(path, step))"
        )


def _other_batches(experiment: Experiment, manifest: Manifest) -> list[str]:
    kinds = {True: "without a cursor (its batches are stored)", False: "with a cursor"}
    have, want = isinstance(experiment.sampler, PlainBatches), manifest.stored_batches
    return [] if have == want else [f"the sampler is one {kinds[have]}, recorded one {kinds[want]}"]


def continuation(run: Run, start: Origin, experiment: Experiment, began: float) -> Continuation:
    """What going on from a checkpoint is.

    Args:
        experiment: with which the run goes on; its code is compared with the one recorded.
        began: Unix time in seconds, of a new segment.
    """
    known = run.manifest.segments
    last = known[-1]
    environment, code = numeric_environment(), code_of(experiment, run.manifest.rebuild)
    newest = max(run.telemetry.last_step(last.segment), last.start)
    elsewhere = differences(last.environment, environment) or other_hashes(last.environment, environment)
    moved = bool(elsewhere or changed([last.code], code))
    # Where nothing was performed yet in the last segment, what it is to start with holds: a rollback's rates, say.
    base = last if start.step == newest else known[start.segment]
    manifest, segment = run.manifest, last.segment
    if start.step != newest or moved or manifest.norms_of(last.segment) != norms.method_here():
        segment = len(known)
        entry = Segment(
            segment=segment,
            start=start.step,
            parent=start.segment,
            t=began,
            environment=environment,
            norms=norms.method_here(),
            code=code,
            rate_factor=base.rate_factor,
        )
        manifest = msgspec.structs.replace(manifest, segments=[*known, entry])
    logged = run.evidence(*start)
    row, left_out = _rollbacks(run, manifest, segment, start.step)
    return Continuation(
        manifest=manifest,
        segment=segment,
        rate_factor=base.rate_factor,
        rate_factor_before=known[start.segment].rate_factor,
        boxed=frozenset(
            (before, s)
            for before, s in run.checkpoints
            if (line := run.line(before + 1, s)) is not None and line.spike is True
        ),
        finite=all(bool(np.isfinite(bits_float(logged[name]))) for name in SCALARS if name in logged),
        row=row,
        left_out=left_out,
        other_code=changed(beside_the_step([last.code], code, run.manifest.rebuild)[0], code),
    )


def _rollbacks(run: Run, manifest: Manifest, segment: int, step: int) -> tuple[Row, frozenset[int]]:
    """What the rollbacks on the way to a step of a segment have left: the row, and the batches that are to come."""
    row, left_out = Row(), set()
    for line in run.telemetry.rollbacks:
        if line.step is UNSET or manifest.lineage(segment, line.step + 1) != line.segment:
            continue  # of another branch
        if isinstance(line.unstable_step, int):
            row = Row(line.in_a_row or 0, line.unstable_step)
            if line.skip_batch is True and line.unstable_step > step:
                left_out.add(line.unstable_step)
    return row, frozenset(left_out)
