"""A recorded run: its folder read, its steps found, and replays of them asked for.

Opening a run executes nothing from it and imports no MLX; only what computes steps does, such as `replay`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import manifest as manifests
from .recorded.plan import asked_step, asked_steps
from .recorded.recorded_run import RecordedRun

if TYPE_CHECKING:
    from concurrent.futures import Executor

    import pandas as pd

    from .experiment import Experiment
    from .trace import Trace
    from .verdict import Verdict
    from .verification import Verification


def open_run(
    path: str | os.PathLike[str],
    format: str | None = None,
    columns: Mapping[str, str | None] | None = None,
    previous: bool = False,
) -> Run:
    """Opens the run in exactly this folder; or a log that another program wrote, as a run of which only that is there.

    Args:
        format: of a log: a key of `foreign.recognise.FORMATS`. None: its content decides, and `telemetry.notices` says
            as what it was recognised.
        columns: of a log: what it calls "step", "loss", "val_loss", "lr", "grad_norm", "step_per_s"; None for a name:
            it has no such thing. What is not given is proposed from the usual names, and shown.
        previous: of a log of the posttrainllm trainer: read `<path>.prev` before it.

    Raises:
        RunError: it is neither.
        TelemetryError: it is a log that can't be read, or is of no known kind.
    """
    place = Path(path)
    if (place / manifests.NAME).exists() or not place.exists():
        return Run(place)
    from .foreign.logged_run import LoggedRun

    return LoggedRun(place, format, columns, previous)


class Run(RecordedRun):
    """A recorded run, and what can be asked of it. Each question is answered by a module of its own.

    Attributes:
        path: the folder.
        manifest: what `run.json` says.
    """

    def replay(
        self,
        steps: int | range,
        *,
        segment: int | None = None,
        experiment: Experiment | None = None,
        factory: str | None = None,
        other_environment: bool = False,
        with_probe: bool = True,
        repeat: bool = True,
        fresh_process: bool | None = None,
        checkpoint: int | None = None,
        trace_dir: str | os.PathLike[str] | None = None,
        progress: Callable[[int, int, str], None] | None = None,
    ) -> Any:
        """Replays a step (or each step of a range) and compares it with what the run recorded.

        Args:
            steps: a step number, counted from 1; or a range of them.
            segment: where the step stands in several segments that disagree.
            experiment: for a run of your own loop: the experiment, built as for recording; also of the very model and
                optimizer that are being trained. Meanwhile it is in states of the run; at the end, also after an error,
                it has the state again that it had (weights, optimizer, `extra`, the sampler's cursor, the random
                state), to the bit, and the training goes on as if nothing had been. Both states take memory until
                then. Python state that no checkpoint holds is not put back; nor is anything else that a step does,
                such as printing.
            factory: instead of it, the "module:function" that the manifest names: passing it is consent to import it.
            other_environment: go on although this machine computes differently; the result is then informational.
            with_probe: make the probe pass (activation gradients, updates, per-parameter rows).
            repeat: perform each step twice, for the repeatable badge, which is otherwise unverified.
            fresh_process: also replay in a new process. None: only when the first replay was not exact, or the
                recording was made by this very process, so that it is no independent witness.
            checkpoint: start from the checkpoint of this step instead of the nearest one (which may be damaged).
            trace_dir: where traces go instead of the run's own `traces` folder.
            progress: called as `progress(done, total, what)`; an exception that it raises cancels the replay.

        Returns:
            A `Trace`, or for a range a list of them.

        Raises:
            ReplayError, CheckpointError, DataError, ExperimentError: it can't be done; nothing on disk was changed.
            EnvironmentMismatch: this machine differs from the run's and `other_environment` is not set.
        """
        from .session import replay_run  # imports MLX

        traces = replay_run(
            self,
            steps,
            segment=segment,
            experiment=experiment,
            factory=factory,
            other_environment=other_environment,
            with_probe=with_probe,
            repeat=repeat,
            fresh_process=fresh_process,
            checkpoint=checkpoint,
            trace_dir=None if trace_dir is None else Path(trace_dir),
            progress=progress or _unseen,
        )
        return traces if isinstance(steps, Sequence) else traces[0]

    def context(
        self,
        step: int,
        before: int = 8,
        *,
        segment: int | None = None,
        experiment: Experiment | None = None,
        factory: str | None = None,
        other_environment: bool = False,
        fresh_process: bool | None = None,
        checkpoint: int | None = None,
        trace_dir: str | os.PathLike[str] | None = None,
        progress: Callable[[int, int, str], None] | None = None,
    ) -> Any:
        """Replays a step and the steps before it in one roll-forward, all with a probe pass, so that each number of the
        step stands beside those of the run's own healthy steps.

        Only the step itself is repeated and has its trace written; the others' repeatable badge is unverified.

        Args:
            step: counted from 1.
            before: how many steps before it; where fewer can be replayed, these are used, and a notice says so.
            segment, experiment, factory, other_environment, fresh_process, checkpoint, trace_dir, progress: as for
                `replay`.

        Returns:
            A `workbench.probes.neighbours.Context`: `frame`, `scores`, `onset()`, `traces`.

        Raises:
            ReplayError, CheckpointError, DataError, ExperimentError, EnvironmentMismatch: as for `replay`.
        """
        from .probes.context import replay_context  # imports MLX

        return replay_context(
            self,
            asked_step(step, "neighbours"),
            before,
            segment=segment,
            experiment=experiment,
            factory=factory,
            other_environment=other_environment,
            fresh_process=fresh_process,
            checkpoint=checkpoint,
            trace_dir=None if trace_dir is None else Path(trace_dir),
            progress=progress or _unseen,
        )

    def diverge(
        self,
        step: int,
        *,
        segment: int | None = None,
        experiment: Experiment | None = None,
        factory: str | None = None,
        other_environment: bool = False,
        checkpoint: int | None = None,
        rungs: Sequence[str] | None = None,
        variables: Mapping[str, str] | None = None,
        bisect: bool = False,
        progress: Callable[[int, int, str], None] | None = None,
    ) -> Any:
        """Performs a step in other and other ways, and compares each with the recorded way of performing it here.

        Repetitions must be equal: the same process, another thread, a fresh process. Interventions, each with one thing
        changed, may move bits: compiled or eager, deterministic operations or stock ones (only on a GPU is there a
        difference), the other device. A rung that is not equal names the first tensor that differs, in order of
        execution: activations, loss, gradients from the last layer to the first, Adam's m and v, weights; and by how
        many ULP. Nothing is written: an intervention is no replay.

        Args:
            step: counted from 1.
            segment, experiment, factory, other_environment, checkpoint, progress: as for `replay`.
            rungs: some of `workbench.diverge.RUNGS` instead of all.
            variables: for each a further rung: a fresh process with this environment variable, as in
                `{"OPENBLAS_NUM_THREADS": "1"}`.
            bisect: for each intervention also find the first step at which rolling forward from the checkpoint departs.

        Returns:
            A `workbench.divergence.ladder.Ladder`.

        Raises:
            ReplayError, CheckpointError, DataError, ExperimentError, EnvironmentMismatch: as for `replay`.
        """
        from .diverge import diverge_run  # imports MLX

        return diverge_run(
            self,
            asked_step(step, "a ladder"),
            segment=segment,
            experiment=experiment,
            factory=factory,
            other_environment=other_environment,
            checkpoint=checkpoint,
            rungs=rungs,
            variables=variables or {},
            bisect=bisect,
            progress=progress or _unseen,
        )

    def resumption(
        self,
        checkpoint: int,
        *,
        steps: int = 8,
        segment: int | None = None,
        experiment: Experiment | None = None,
        factory: str | None = None,
        other_environment: bool = False,
        progress: Callable[[int, int, str], None] | None = None,
    ) -> Any:
        """Restores a checkpoint and goes on from it, beside what this very run did past it. Writes nothing.

        The restored state and the steps from it on are judged apart: the first says whether saving and restoring are
        whole, the second whether a step depends on anything beside the state.

        Args:
            checkpoint: its step.
            steps: after it, at most; fewer where the run ends, or departs.
            segment: whose steps are compared, where several go on from the checkpoint and differ.
            experiment, factory, other_environment, progress: as for `replay`.

        Returns:
            A `workbench.resumption.Resumption`.

        Raises:
            ReplayError: there is no such checkpoint, or no step after it.
            CheckpointError, DataError, ExperimentError, EnvironmentMismatch: as for `replay`.
        """
        from .resumption import resumption_of  # imports MLX

        return resumption_of(
            self,
            asked_step(checkpoint, "a resumption"),
            steps,
            segment=segment,
            experiment=experiment,
            factory=factory,
            other_environment=other_environment,
            progress=progress or _unseen,
        )

    def batch_facts(
        self,
        step: int,
        trace: Trace | None = None,
        *,
        segment: int | None = None,
        experiment: Experiment | None = None,
        factory: str | None = None,
    ) -> pd.DataFrame:
        """Which data was in a step: the rows of its batch and of the one before, with what is odd in them.

        Args, columns and errors: see `batchfacts.batch_facts`. Needs no replay; a trace adds the losses of the rows.
        """
        from .batches.batchfacts import batch_facts

        asked = asked_step(step, "a batch")
        return batch_facts(self, asked, trace, segment=segment, experiment=experiment, factory=factory)

    def whatif(
        self,
        step: int,
        changes: str | Sequence[str],
        *,
        next_steps: int = 8,
        once: bool = False,
        segment: int | None = None,
        experiment: Experiment | None = None,
        factory: str | None = None,
        checkpoint: int | None = None,
        other_environment: bool = False,
        memory_budget: int | None = None,
        trace_dir: str | os.PathLike[str] | None = None,
        progress: Callable[[int, int, str], None] | None = None,
    ) -> pd.DataFrame:
        """Experiments on a step: replays with exactly one change each, beside the untouched one.

        Args:
            changes: each its own experiment, such as "lr=0.5x" or "drop-row=3": see `changes.parse_change`.
            next_steps: steps after this one, on the same batches, to see where it leads.
            once: a changed setting holds for this step only. Otherwise it holds from here on, as in a fork.
            segment, experiment, factory, checkpoint, other_environment, progress: as `replay`.
            memory_budget: bytes that states may take; None: a quarter of the machine's memory.
            trace_dir: where the experiments' files go instead of the run's own `traces` folder.

        Returns:
            One row an experiment, the untouched step first: change, loss, loss_untouched, grad_norm, update_norm,
            worst, worst_ratio, next_mean, next_max, steps, compiled, notes (see `whatif.table`).

        Raises:
            ExperimentError: a change is malformed, does not fit this run, or changes nothing in it.
            ReplayError, CheckpointError, DataError, EnvironmentMismatch: as `replay`.
        """
        from .interventions import whatif

        records, files, notices = whatif.experiments(
            self,
            asked_step(step, "experiments"),
            [changes] if isinstance(changes, str) else changes,
            next_steps=next_steps,
            once=once,
            segment=segment,
            experiment=experiment,
            factory=factory,
            checkpoint=checkpoint,
            other_environment=other_environment,
            memory_budget=memory_budget,
            trace_dir=None if trace_dir is None else Path(trace_dir),
            progress=progress or _unseen,
        )
        frame = whatif.table(records)
        frame.attrs |= {"notices": notices, "files": [str(path) for path in files]}
        return frame

    def autopsy(
        self,
        step: int,
        *,
        segment: int | None = None,
        experiment: Experiment | None = None,
        factory: str | None = None,
        checkpoint: int | None = None,
        other_environment: bool = False,
        memory_budget: int | None = None,
        trace_dir: str | os.PathLike[str] | None = None,
        examine: bool = False,
        progress: Callable[[int, int, str], None] | None = None,
    ) -> Verdict:
        """Why did the loss spike at this step? A cause that experiments on the run's own states bear out, or "unknown".

        Args:
            step: counted from 1. Where it stands in a spike that began earlier, the beginning is what is looked at.
            segment, experiment, factory, checkpoint, other_environment, progress: as `replay`.
            memory_budget: as `whatif`.
            trace_dir: where the verdict's file goes instead of the run's own `traces` folder.
            examine: look into a step that no rule of spike detection names, too: its rise above the steps before it is
                what is explained, if it has one. A step that no rule could judge, for lack of steps before it, is
                always looked into, and "no-spike" is not said of it.

        Returns:
            A `workbench.verdict.Verdict`: `verdict`, `reason`, `culprit`, `evidence`, `refuted`, `unchecked`,
            `remedies`; `sentence()`, `evidence_table`, `remedy_table`, `to_json()`.

        Raises:
            ReplayError, CheckpointError, DataError, ExperimentError, EnvironmentMismatch: as `replay`.
        """
        from .autopsy import autopsy  # imports MLX

        return autopsy(
            self,
            asked_step(step, "a verdict"),
            segment=segment,
            experiment=experiment,
            factory=factory,
            checkpoint=checkpoint,
            other_environment=other_environment,
            memory_budget=memory_budget,
            trace_dir=None if trace_dir is None else Path(trace_dir),
            examine=examine,
            progress=progress or _unseen,
        )

    def replay_many(
        self,
        steps: int | Sequence[int],
        *,
        workers: int | None = None,
        executor: Executor | None = None,
        segment: int | None = None,
        factory: str | None = None,
        other_environment: bool = False,
        progress: Callable[[int, int, str], None] | None = None,
    ) -> pd.DataFrame:
        """Replays many steps, spread over processes: a verdict each, and nothing written.

        Args, columns and errors: see `many.replay_many`.
        """
        from .many import replay_many

        return replay_many(
            [(self, step) for step in asked_steps(steps)],
            workers=workers,
            executor=executor,
            segment=segment,
            factory=factory,
            other_environment=other_environment,
            progress=progress,
        )

    def verify(
        self,
        *,
        replay: int = 0,
        seed: int = 0,
        workers: int | None = None,
        experiment: Experiment | None = None,
        factory: str | None = None,
        other_environment: bool = False,
        progress: Callable[[int, int, str], None] | None = None,
    ) -> Verification:
        """Is the run whole, and is it what it says? Checks every digest, the continuity of the telemetry, and the chain
        of fingerprints; and proves a sample of steps by replay. Writes nothing.

        Args:
            replay: how many steps to prove, spread over the run; 0: none.
            seed: of the sample.
            workers: processes to prove them in, as for `many.replay_many`; None: this one.
            experiment, factory, other_environment, progress: as `replay`.

        Returns:
            A `workbench.verification.Verification`: `exact`, `sentence()`, `summary`, `frame` (one row a check),
            `to_json()`.

        Raises:
            ReplayError: `replay` is negative. That steps can't be proven, for something of the run is damaged, or it
                can't be rebuilt (without its experiment or factory, or on this machine), is a check that says so, and
                so is it that the telemetry is damaged, or is changed meanwhile.
        """
        from .verifying import verify_run  # imports MLX

        return verify_run(
            self,
            replay=replay,
            seed=seed,
            workers=workers,
            experiment=experiment,
            factory=factory,
            other_environment=other_environment,
            progress=progress or _unseen,
        )


def _unseen(done: int, total: int, what: str) -> None:
    """Progress that nobody asked to see."""
