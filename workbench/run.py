"""A recorded run: its folder read, its steps found, and replays of them asked for.

Opening a run executes nothing from it and imports no MLX; only `replay` does.
"""

from __future__ import annotations

import html
import operator
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from msgspec import UNSET

from . import manifest as manifests
from . import seams
from . import telemetry as telemetries
from .bits import bits_float
from .errors import ReplayError, RunError, TelemetryError, WorkbenchError
from .manifest import Manifest
from .spikes import SpikeSettings, find_spikes
from .telemetry import Edits, Line, Restart, Telemetry

if TYPE_CHECKING:
    from .experiment import Experiment
    from .trace import Trace
    from .verdict import Verdict

TELEMETRY, CHECKPOINTS, TRACES = "telemetry.jsonl", "checkpoints", "traces"


def open_run(path: str | os.PathLike[str]) -> Run:
    """Opens the run in exactly this folder.

    Raises:
        RunError: it is not a run's folder.
    """
    return Run(Path(path))


def refuse_existing(path: Path) -> None:
    """A run is never written over, nor mixed with what is left of one.

    Raises:
        RunError: the folder holds a run, or a part of one.
    """
    if path.exists() and not path.is_dir():
        raise RunError(f"{path} is a file; expected a folder for the run, new or empty")
    for name in (manifests.NAME, TELEMETRY, CHECKPOINTS):
        if (path / name).exists():
            raise RunError(
                f"{path} already holds a run ({name}); choose another folder, or go on with it: --out {path} --resume "
                "(a Recorder: resume=True)"
            )


def list_runs(folder: str | os.PathLike[str] = "runs") -> pd.DataFrame:
    """One row a run directly under `folder`: run (folder name), steps, last_loss, spikes, created, problem.

    Raises:
        RunError: the folder does not exist.
    """
    root = Path(folder)
    if not root.is_dir():
        raise RunError(f"{root} does not exist; expected a folder that holds runs (workbench runs FOLDER)")
    if (root / manifests.NAME).exists():
        raise RunError(f"{root} is itself a run; expected the folder that holds it: {root.resolve().parent}")
    rows = []
    for path in sorted(entry for entry in root.iterdir() if (entry / manifests.NAME).exists()):
        try:
            run = Run(path)
            steps = run.steps
            last = float(steps["loss"].iloc[-1]) if len(steps) else float("nan")
            rows.append((path.name, run.last_step, last, len(run.spikes()), _when(run.manifest.created), ""))
        except WorkbenchError as error:
            rows.append((path.name, 0, float("nan"), 0, "", str(error)))
    return pd.DataFrame(rows, columns=["run", "steps", "last_loss", "spikes", "created", "problem"])


def _when(t: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(t))
    except (OverflowError, ValueError, OSError):  # a time that no calendar has
        return ""


@dataclass(frozen=True)
class Plan:
    """How a replay would be done.

    Attributes:
        steps: the asked ones, ascending.
        segment: the segment they stand in.
        checkpoint: step and segment of the checkpoint to restore.
        rolled: steps to roll forward before the first asked one.
        seconds: estimate from the run's own step times; None if it logged none.
        notices: what the user should know.
    """

    steps: Sequence[int]
    segment: int
    checkpoint: tuple[int, int]
    rolled: int
    seconds: float | None
    notices: list[str] = field(default_factory=list)

    def sentence(self) -> str:
        """Such as "17 steps to roll forward from checkpoint 4200, about 4 s"."""
        cost = "" if self.seconds is None else f", about {_duration(self.seconds)}"
        steps = f"{self.rolled} step{'' if self.rolled == 1 else 's'} to roll forward"
        return f"{steps} from checkpoint {self.checkpoint[0]}{cost}"


def _duration(seconds: float) -> str:
    if seconds < 1:
        return "1 s"
    return (
        f"{seconds:.0f} s"
        if seconds < 90
        else f"{seconds / 60:.0f} min"
        if seconds < 5400
        else f"{seconds / 3600:.1f} h"
    )


class Run:
    """A run's folder.

    Attributes:
        path: the folder.
        manifest: what `run.json` says.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.manifest: Manifest = manifests.read(self.path)
        self._telemetry: tuple[tuple[int, int], Telemetry] | None = None
        self._steps: tuple[Telemetry, pd.DataFrame] | None = None

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def telemetry(self) -> Telemetry:
        """The telemetry, read again when the file has grown.

        Raises:
            TelemetryError: the file is missing or damaged, or belongs to another run.
        """
        path = self.path / TELEMETRY
        try:
            status = path.stat()
        except OSError as error:
            raise TelemetryError(f"{path} can't be read ({error.strerror}); expected the run's telemetry") from error
        key = (status.st_size, status.st_mtime_ns)
        if self._telemetry is None or self._telemetry[0] != key:
            found = telemetries.read(path)
            for line in found.lines:
                if line.type == "meta" and line.run != self.manifest.run:
                    raise TelemetryError(
                        f"{path} belongs to run {line.run or 'unknown'}; the manifest beside it is of run "
                        f"{self.manifest.run}. Put back the telemetry that was recorded with this manifest."
                    )
            if self._telemetry is not None:
                self.manifest = manifests.read(self.path)  # a resume may have added a segment
            self._telemetry = (key, found)
        return self._telemetry[1]

    @property
    def steps(self) -> pd.DataFrame:
        """One row a telemetry step: segment, step, loss, grad_norm, lr, ma, step_per_s, spike, spike_rule, val_loss."""
        telemetry = self.telemetry
        if self._steps is None or self._steps[0] is not telemetry:
            self._steps = (telemetry, telemetry.frame())
        return self._steps[1].copy()

    @property
    def last_step(self) -> int:
        return self.telemetry.last_step()

    def spikes(self) -> pd.DataFrame:
        """Where a rule of spike detection fires: step, segment, rule, value, threshold, moving_average, explanation.

        A segment is judged with the steps that led to it as its past, as the trainer did.
        """
        given = self.manifest.spikes
        settings = SpikeSettings() if given is None else SpikeSettings(**given)
        frame = self.steps
        found = []
        for entry in self.manifest.segments:
            own = frame[frame["segment"] == entry.segment]
            past = self.history(entry.segment, entry.start, 6 * settings.window)
            spikes = find_spikes(pd.concat([past, own]).assign(segment=entry.segment), settings)
            found.append(spikes[spikes["step"] > entry.start])
        return pd.concat(found, ignore_index=True)

    def history(self, segment: int, step: int, count: int) -> pd.DataFrame:
        """The rows of `steps` on the way that leads to state `step` of a segment, at most the last `count`."""
        frame = self.steps
        own = frame["segment"] == segment
        ways = [
            (frame["segment"] == other) & (frame["step"] > low) & (frame["step"] <= min(high, step))
            for other, low, high in self.manifest.ways(segment)
        ]
        return frame[np.logical_or.reduce(ways) if ways else own].sort_values("step").tail(count)

    @property
    def checkpoints(self) -> list[tuple[int, int]]:
        """(step, segment) of every committed checkpoint, by step."""
        folder = self.path / CHECKPOINTS
        found = []
        for path in folder.glob("*.json") if folder.is_dir() else ():
            number, _, segment = path.stem.partition(".s")
            if number.isdecimal() and (segment.isdecimal() or not segment):
                found.append((int(number), int(segment or 0)))
        return sorted(found)

    def checkpoints_before(self, step: int, segment: int) -> list[tuple[int, int]]:
        """(step, segment) of the checkpoints before a step on the way that leads to it in a segment, by step."""
        committed = self.checkpoints
        return [
            (number, other)
            for number, other in committed
            if number < step and seams.state_segment(self.manifest, committed, number, segment) == other
        ]

    def norms(self, step: int, segment: int | None = None, around: int = 3) -> pd.DataFrame:
        """Logged per-layer norms of the steps around `step` (itself included): step, layer, kind, recorded."""
        segment = self.segment_of(step, segment)[0]
        kinds = dict(zip(telemetries.ARRAYS, ("activation", "gradient", "adam_m", "adam_v"), strict=True))
        rows = []
        for other in range(step - around, step + around + 1):
            line = self.line(other, segment)
            evidence = {} if line is None else line.evidence()
            for name, kind in kinds.items():
                for layer, bits in zip(self.manifest.layers, evidence.get(name, []), strict=False):
                    rows.append((other, layer, kind, float("nan") if bits is None else float(bits_float(bits))))
        return pd.DataFrame(rows, columns=["step", "layer", "kind", "recorded"])

    def line(self, step: int, segment: int) -> Line | None:
        """The telemetry line of a step on the way that leads to `segment`, or None."""
        return self.telemetry.at(step, self.manifest.lineage(segment, step))

    def evidence(self, step: int, segment: int) -> dict[str, Any]:
        """What the run logged at a step, as bits. For the state a segment started from: the lanes of its meta line."""
        line = self.line(step, segment)
        if line is None and step == self.manifest.segments[0].start:
            line = self.telemetry.meta(0)
        return {} if line is None else line.evidence()

    def state_evidence(self, step: int, segment: int) -> dict[str, Any]:
        """What the run logged, as bits, of the state that checkpoint `step` of a segment holds."""
        return seams.state_evidence(self, step, segment)

    def seam(self, segment: int) -> list[str]:
        """The lanes in which the state that a segment started from is not the one that was left; see `seams`."""
        return seams.seam(self, segment)

    def edits(self, step: int, segment: int) -> Edits | None:
        """What the training loop itself changed in the state before a step; None if nothing that was noticed."""
        line = self.line(step, segment)
        found = None if line is None or line.before is UNSET else line.before
        restarted = seams.restarted(self, step, segment)
        if restarted is None:
            return found
        changed: dict[str, Any] = {} if found is None else {"rng": found.rng, "learning_rate": found.learning_rate}
        folder = str(self.path.resolve() / CHECKPOINTS)
        return Restart(folder=folder, step=step - 1, segment=restarted, run=self.manifest.run, **changed)

    def segment_of(self, step: int, segment: int | None = None) -> tuple[int, list[str]]:
        """The segment in which a step is to be looked at, and notices.

        Raises:
            ReplayError: no segment has the step; or several have it and they disagree, and none was chosen.
        """
        telemetry = self.telemetry
        having = telemetry.segments_with(step)
        if not having:
            last = telemetry.last_step()
            raise ReplayError(
                f"step {step} is not in the telemetry of {self.path}; "
                + (f"it has steps {self.manifest.segments[0].start + 1} to {last}" if last else "it has no steps yet")
            )
        if segment is not None:
            if segment not in having:
                raise ReplayError(f"step {step} is not in segment {segment} of {self.path}; it stands in {having}")
            return segment, []
        if len(having) == 1:
            return having[0], []
        lines = [telemetry.at(step, other) for other in having]
        if any(line.evidence() != lines[0].evidence() for line in lines[1:] if line and lines[0]):
            raise ReplayError(
                f"step {step} stands in segments {having} of {self.path}, and their records differ; "
                "choose one with --segment"
            )
        return having[-1], [f"step {step} stands in segments {having} with the same bits; the last is used"]

    def plan(
        self, steps: int | range, segment: int | None = None, passes: int = 3, checkpoint: int | None = None
    ) -> Plan:
        """Finds the nearest checkpoint at or before the state that the first step starts from.

        Args:
            steps: a step, or a range of them.
            passes: how many times each asked step is computed.
            checkpoint: start from the checkpoint of this step instead of the nearest.

        Raises:
            ReplayError: a step is not in the telemetry, or no checkpoint comes before it.
        """
        asked = _steps(steps)
        if not len(asked):
            raise ReplayError(f"{steps} is an empty range of steps; expected first..last with first <= last")
        chosen, notices = self.segment_of(asked[-1], segment)
        wanted = list(asked)
        for step in wanted:
            if self.line(step, chosen) is None:
                self.segment_of(step)  # says which steps there are
                raise ReplayError(f"step {step} is not on the way to segment {chosen}; replay it on its own")
        before = self.checkpoints_before(wanted[0], chosen)
        if not before:
            raise ReplayError(
                f"no checkpoint of {self.path} comes before step {wanted[0]}; the run has {self.checkpoints}"
            )
        wished = [key for key in before if checkpoint in (None, key[0])]
        if not wished:
            raise ReplayError(f"{self.path} has no checkpoint {checkpoint} before step {wanted[0]}; it has {before}")
        start = wished[-1]
        notices += seams.notices(self, chosen, start[0], wanted[-1])
        rolled = wanted[0] - 1 - start[0]
        speeds = [line.step_per_s for line in self.telemetry.lines if isinstance(line.step_per_s, float)]
        speed = statistics.median(speeds) if speeds else 0.0
        count = rolled + (wanted[-1] - wanted[0] + 1 - len(wanted)) + passes * len(wanted)
        return Plan(wanted, chosen, start, rolled, count / speed if speed > 0 else None, notices)

    def replay(
        self,
        steps: int | range,
        *,
        segment: int | None = None,
        experiment: Experiment | None = None,
        factory: str | None = None,
        other_environment: bool = False,
        with_probe: bool = True,
        fresh_process: bool | None = None,
        checkpoint: int | None = None,
        trace_dir: str | os.PathLike[str] | None = None,
        progress: Callable[[int, int, str], None] | None = None,
    ) -> Any:
        """Replays a step (or each step of a range) and compares it with what the run recorded.

        Args:
            steps: a step number, counted from 1; or a range of them.
            segment: where the step stands in several segments that disagree.
            experiment: for a run of your own loop: the experiment, built as for recording. Its state is overwritten.
            factory: instead of it, the "module:function" that the manifest names: passing it is consent to import it.
            other_environment: go on although this machine computes differently; the result is then informational.
            with_probe: make the probe pass (activation gradients, updates, per-parameter rows).
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
            fresh_process=fresh_process,
            checkpoint=checkpoint,
            trace_dir=None if trace_dir is None else Path(trace_dir),
            progress=progress or (lambda done, total, what: None),
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

        asked = _steps(step)
        if len(asked) != 1:
            raise ReplayError(f"{step!r} is no single step; expected one, for each has neighbours of its own")
        return replay_context(
            self,
            asked[0],
            before,
            segment=segment,
            experiment=experiment,
            factory=factory,
            other_environment=other_environment,
            fresh_process=fresh_process,
            checkpoint=checkpoint,
            trace_dir=None if trace_dir is None else Path(trace_dir),
            progress=progress or (lambda done, total, what: None),
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

        asked = _steps(step)
        if len(asked) != 1:
            raise ReplayError(f"{step!r} is no single step; expected one, for each has a ladder of its own")
        return diverge_run(
            self,
            asked[0],
            segment=segment,
            experiment=experiment,
            factory=factory,
            other_environment=other_environment,
            checkpoint=checkpoint,
            rungs=rungs,
            variables=variables or {},
            bisect=bisect,
            progress=progress or (lambda done, total, what: None),
        )

    def batch_facts(self, step: int, trace: Trace | None = None, *, segment: int | None = None) -> pd.DataFrame:
        """Which data was in a step: the rows of its batch and of the one before, with what is odd in them.

        Args, columns and errors: see `batchfacts.batch_facts`. Needs no replay; a trace adds the losses of the rows.
        """
        from .batches.batchfacts import batch_facts

        return batch_facts(self, _steps(step)[0], trace, segment=segment)

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
            _steps(step)[0],
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
            progress=progress or (lambda done, total, what: None),
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
        progress: Callable[[int, int, str], None] | None = None,
    ) -> Verdict:
        """Why did the loss spike at this step? A cause that experiments on the run's own states bear out, or "unknown".

        Args:
            step: counted from 1. Where it stands in a spike that began earlier, the beginning is what is looked at.
            segment, experiment, factory, checkpoint, other_environment, progress: as `replay`.
            memory_budget: as `whatif`.
            trace_dir: where the verdict's file goes instead of the run's own `traces` folder.

        Returns:
            A `workbench.verdict.Verdict`: `verdict`, `reason`, `culprit`, `evidence`, `refuted`, `unchecked`,
            `remedies`; `sentence()`, `evidence_table`, `remedy_table`, `to_json()`.

        Raises:
            ReplayError, CheckpointError, DataError, ExperimentError, EnvironmentMismatch: as `replay`.
        """
        from .autopsy import autopsy  # imports MLX

        asked = _steps(step)
        if len(asked) != 1:
            raise ReplayError(f"{step!r} is no single step; expected one, for each has a verdict of its own")
        return autopsy(
            self,
            asked[0],
            segment=segment,
            experiment=experiment,
            factory=factory,
            checkpoint=checkpoint,
            other_environment=other_environment,
            memory_budget=memory_budget,
            trace_dir=None if trace_dir is None else Path(trace_dir),
            progress=progress or (lambda done, total, what: None),
        )

    def verdict(self, step: int, segment: int | None = None) -> Verdict | None:
        """What an autopsy of this step said, from the run's `traces` folder; None if none was made.

        Raises:
            ReplayError: as `segment_of`.
            WorkbenchError: the file is damaged.
        """
        from . import verdict

        chosen = self.manifest.lineage(self.segment_of(step, segment)[0], step)
        path = self.path / TRACES / verdict.file_name(step, chosen)
        return verdict.read(path) if path.exists() else None

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, steps={self.last_step})"

    def _repr_html_(self) -> str:
        facts = {
            "run": self.name,
            "steps": self.last_step,
            "segments": len(self.manifest.segments),
            "checkpoints": len(self.checkpoints),
            "spikes": ", ".join(f"{step}" for step in self.spikes()["step"][:12]) or "none",
            "parameters": f"{sum(_count(p.shape) for p in self.manifest.parameters):,}",
            "recorded with": f"mlx {self.manifest.segments[0].environment.get('mlx')}, "
            f"{self.manifest.segments[0].environment.get('backend')}, compile {self.manifest.options.get('compile')}",
        }
        if (parent := self.manifest.parent) is not None:
            facts["forked from"] = " ".join([f"step {parent.step} of {parent.path}", *parent.changes])
        cells = "".join(
            f"<tr><th style='text-align:left'>{key}</th><td style='text-align:left'>{html.escape(str(value))}</td></tr>"
            for key, value in facts.items()
        )
        return f"<table>{cells}</table>"


def _steps(steps: Any) -> Sequence[int]:
    """A step or a range of them as a sequence; numpy's integers, as a DataFrame holds them, are steps too."""
    if isinstance(steps, range):
        return steps
    try:
        return [operator.index(step) for step in (steps if isinstance(steps, Sequence) else [steps])]
    except TypeError:
        raise ReplayError(f"{steps!r} is no step; expected a whole number from 1, or a range of them") from None


def _count(shape: Sequence[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
