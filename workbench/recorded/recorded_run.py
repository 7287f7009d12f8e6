"""A run's folder, read: its steps, spikes, checkpoints, what was logged of a step, and what was found out about one.

Executes nothing from the folder, computes no step and imports no MLX.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from msgspec import UNSET

from .. import manifest as manifests
from .. import seams
from .. import telemetry as telemetries
from ..bits import bits_float
from ..checkpoints.checkpoint_names import committed
from ..enumeration import some
from ..errors import ReplayError, TelemetryError, WorkbenchError
from ..lines.line import ARRAYS, Edits, Line, Restart
from ..manifest import Manifest
from ..telemetry import Telemetry
from . import judged, told
from .layout import CHECKPOINTS, TELEMETRY, refuse_links_out
from .plan import Plan, plan_replay

if TYPE_CHECKING:
    import pandas as pd

    from ..trace import Trace
    from ..verdict import Verdict


class RecordedRun:
    """A run's folder.

    Attributes:
        path: the folder.
        manifest: what `run.json` says.
    """

    _spikes: tuple[Telemetry, pd.DataFrame] | None = None  # what was found, and in what

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        refuse_links_out(self.path)
        self.manifest: Manifest = manifests.read(self.path)
        self._telemetry: tuple[tuple[int, ...], Telemetry] | None = None
        self._steps: tuple[Telemetry, pd.DataFrame] | None = None

    @property
    def name(self) -> str:
        return self.path.resolve().name

    def unverifiable(self) -> str | None:
        """Why no step of it can be replayed or verified; None: it was recorded for that. See `foreign.logged_run`."""
        return None

    @property
    def telemetry(self) -> Telemetry:
        """The telemetry, read again when the file has grown or was changed anywhere: when its inode, size, or a time of
        it is another. What keeps all of these (a write within the same tick of the file system's clock) is not seen.

        So two calls may give two, of which the later has more steps: who compares columns takes it once.

        Raises:
            TelemetryError: the file is missing or damaged, or belongs to another run.
        """
        path = self.path / TELEMETRY
        try:
            status = path.stat()
        except OSError as error:
            raise TelemetryError(f"{path} can't be read ({error.strerror}); expected the run's telemetry") from error
        key = (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        if self._telemetry is None or self._telemetry[0] != key:
            found = telemetries.read(path, since=self._telemetry[1] if self._telemetry else None)
            for line in found.metas:
                if line.run != self.manifest.run:
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

    def validations(self) -> pd.DataFrame:
        """One row a validation, in the order of the log: segment, step (0: before the first step), val_loss. `steps`
        has those of steps that were performed in the same segment; here are all."""
        return self.telemetry.validations()

    @property
    def last_step(self) -> int:
        return self.telemetry.last_step()

    def spikes(self, window: int | None = None) -> pd.DataFrame:
        """Where a rule of spike detection fires: step, segment, rule, value, threshold, moving_average, explanation.

        A segment is judged with the steps that led to it as its past, as the trainer did.

        Args:
            window: healthy steps that a step is compared with, 4 or more: fewer for a short run or few logged losses;
                None: as many as the run was recorded with.

        Raises:
            WorkbenchError: the window is out of range.
        """
        telemetry = self.telemetry
        if window is not None:
            return judged.spikes_of(self, window)
        if self._spikes is None or self._spikes[0] is not telemetry:
            self._spikes = (telemetry, judged.spikes_of(self))
        return self._spikes[1].copy()

    def unjudged(self, window: int | None = None) -> str:
        """A sentence on the steps at the start that no rule of `spikes` could judge, but `non_finite`; "" if there are
        none. A rule needs a full window of finite losses before a step (see `spikes.SpikeDetector`)."""
        return judged.unjudged(self, window)

    def unstable(self) -> pd.DataFrame:
        """Steps that the recorder called unstable when it logged them, by rules of its own that are not those of
        `spikes` (see `recovery`): step, segment, explanation."""
        return told.unstable_of(self)

    def judged_after(self) -> float:
        """The last step of the first segment that `unjudged` is about; infinite, if no step was judged."""
        return judged.judged_after(self)

    def rollbacks(self) -> pd.DataFrame:
        """Where training was taken back (see `recovery`): unstable_step, left (its segment), reason, step (the state
        gone back to), segment (in which it went on), rate_factor, skip_batch, in_a_row."""
        import pandas as pd

        names = ["unstable_step", "left", "reason", "step", "segment", "rate_factor", "skip_batch", "in_a_row"]
        rows = [[getattr(line, name) for name in names] for line in self.telemetry.rollbacks]
        return pd.DataFrame([[None if value is UNSET else value for value in row] for row in rows], columns=names)

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
        return committed(self.path / CHECKPOINTS)

    def checkpoints_before(self, step: int, segment: int) -> list[tuple[int, int]]:
        """(step, segment) of the checkpoints before a step on the way that leads to it in a segment, by step."""
        there = self.checkpoints
        return [
            (number, other)
            for number, other in there
            if number < step and seams.state_segment(self.manifest, there, number, segment) == other
        ]

    def checkpoint_sizes(self) -> pd.DataFrame:
        """What each committed checkpoint takes on the disk, and the least that its state could take: step, segment,
        bytes, new_bytes, limit_bytes, shared_bytes, ratio; see `CheckpointSize`.

        Raises:
            CheckpointError: a commit record or a tensor file can't be read.
        """
        from .checkpoint_sizes import checkpoint_sizes, size_frame

        return size_frame(checkpoint_sizes(self))

    def norms(self, step: int, segment: int | None = None, around: int = 3) -> pd.DataFrame:
        """Logged per-layer norms of the steps around `step` (itself included): step, layer, kind, recorded."""
        import pandas as pd

        segment = self.segment_of(step, segment)[0]
        kinds = dict(zip(ARRAYS, ("activation", "gradient", "adam_m", "adam_v"), strict=True))
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
        changed: dict[str, Any] = {} if found is None else msgspec.structs.asdict(found)
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
        self, steps: int | Sequence[int], segment: int | None = None, passes: int = 3, checkpoint: int | None = None
    ) -> Plan:
        """Finds the nearest checkpoint at or before the state that the first step starts from.

        Args:
            steps: a step, or several, ascending.
            passes: how many times each asked step is computed.
            checkpoint: start from the checkpoint of this step instead of the nearest.

        Raises:
            ReplayError: a step is not in the telemetry, or no checkpoint comes before it.
        """
        return plan_replay(self, steps, segment, passes, checkpoint)

    def verdict(self, step: int, segment: int | None = None) -> Verdict | None:
        """What an autopsy of this step said, from the run's traces; None if none was made.

        Raises:
            ReplayError: as `segment_of`.
            WorkbenchError: the file is damaged.
        """
        from .. import traces, verdict

        chosen = self.manifest.lineage(self.segment_of(step, segment)[0], step)
        path = traces.find(self, verdict.file_name(step, chosen))
        return None if path is None else verdict.read(path)

    def trace(self, step: int, segment: int | None = None) -> Trace | None:
        """What the last replay of this step measured, from the run's traces; None if none was made. (Those of a
        read-only run are in the user's cache folder.)

        Raises:
            ReplayError: as `segment_of`.
            WorkbenchError: the file is damaged, or of another run or batch.
        """
        from .. import traces

        chosen, notices = self.segment_of(step, segment)[0], list[str]()
        found = traces.of_step(self, step, chosen, None, notices)
        if found is None and notices:
            raise WorkbenchError(f"{notices[0]}. Replay the step again.")
        return found

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, steps={self.last_step})"

    def _repr_html_(self) -> str:
        cells = "".join(
            f"<tr><th style='text-align:left'>{key}</th><td style='text-align:left'>{html.escape(str(value))}</td></tr>"
            for key, value in self._facts().items()
        )
        return f"<table>{cells}</table>"

    def _facts(self) -> dict[str, Any]:
        """What the table of facts says."""
        facts = {
            "run": self.name,
            "steps": self.last_step,
            "segments": len(self.manifest.segments),
            "checkpoints": len(self.checkpoints),
            "spikes": some(self.spikes()["step"], 12) or "none",
            "parameters": f"{sum(math.prod(p.shape) for p in self.manifest.parameters):,}",
            "recorded with": f"mlx {self.manifest.segments[0].environment.get('mlx')}, "
            f"{self.manifest.segments[0].environment.get('backend')}, compile {self.manifest.options.get('compile')}",
        }
        if (parent := self.manifest.parent) is not None:
            facts["forked from"] = " ".join([f"step {parent.step} of {parent.path}", *parent.changes])
        return facts
