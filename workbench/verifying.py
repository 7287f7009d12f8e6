"""Is a run whole, and is it what it says? Every digest, the telemetry's continuity and its end, the chain of
fingerprints from segment to segment and checkpoint to checkpoint, what must be there and is not, and a sample of its
steps proven by replay.

Of a telemetry line a replay compares, bit by bit: `batch_hash`, `loss`, `grad_norm` (before clipping; the norm after it
is not logged), `lr` (of a MultiOptimizer the first one's; `state.other` has the others), the four per-layer arrays, and
the fingerprints in `state`. `before` is done again, so that a wrong one moves those bits (except for a rate that a
schedule overwrites). `segment` and `step` are counted. `ma`, `spike` and `spike_rule` are derived again from the
losses. No replay can compare `t`, `elapsed_s`, `step_per_s`, `peak_rss_mb`, `unstable` and what rollback and validation
lines say; an edit of these, too, contradicts the seals of the lines, where the run has them. There is no signature:
files that were all written anew so that they agree pass, unless the steps are replayed, and a run that was trained anew
passes then, too.

Knows run folders and replays; writes nothing.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from . import trace, verdict
from .batches.batch_files import check_batches
from .checkpoint_checks import check_checkpoint, check_shared, first_seal, records
from .checkpoints.commit import files_of, stem
from .enumeration import SHOWN, some
from .errors import CheckpointError, DataError, ReplayError, TelemetryError, WorkbenchError
from .interventions import whatif
from .proving import Progress, not_replayed, replayed
from .ranks.rank_checks import check_ranks
from .rebuild import find, locate
from .recorded.checkpoint_sizes import CheckpointSize, checkpoint_sizes
from .recorded.completeness import checkpoints_there, ending, fields, fingerprints, premises
from .recorded.layout import CHECKPOINTS, TELEMETRY, TRACES
from .recorded.seals import SEALS, read_seals, remembered_checkpoints, remembered_end, sealed
from .recorded.spike_marks import marks
from .recorded.stretches import stretches
from .replaying.preparation import undisturbed
from .run import Run
from .verification import Check, Verification

if TYPE_CHECKING:
    from .experiment import Experiment


def verify_run(
    run: Run,
    *,
    replay: int = 0,
    seed: int = 0,
    workers: int | None = None,
    experiment: Experiment | None = None,
    factory: str | None = None,
    other_environment: bool = False,
    progress: Progress = lambda done, total, what: None,
) -> Verification:
    """See `Run.verify`."""
    if operator.index(replay) < 0:
        raise ReplayError(f"{replay} steps can't be proven; expected replay to be 0 (none) or a number of steps")
    began, notices = time.perf_counter(), list[str]()
    checks: list[Check] = []
    try:
        for check in _on_disk(run, notices, progress):
            checks.append(check)
    except TelemetryError as error:  # it was whole when this began
        checks.append(Check("telemetry", TELEMETRY, "mismatch", f"it was changed while it was looked at: {error}"))
    steps, on_the_way = 0, 0
    if not any(check.kind == "telemetry" and check.verdict == "mismatch" and check.what != SEALS for check in checks):
        steps = len(run.telemetry)
        if replay:
            lost = any(check.kind == "data" and check.verdict == "unverified" for check in checks)
            with undisturbed():
                proven, on_the_way = replayed(
                    run, replay, seed, notices, progress, experiment=experiment, factory=factory,
                    other_environment=other_environment, lost=lost, workers=workers,
                )  # fmt: skip
            checks += proven
    elif replay:
        checks.append(not_replayed(f"{replay} to sample", "what to compare them with, the telemetry, is damaged"))
    seconds = round(time.perf_counter() - began, 3)
    return Verification(
        run=run.manifest.run,
        name=run.name,
        checks=checks,
        steps=steps,
        on_the_way=on_the_way,
        seed=seed,
        seconds=seconds,
        notices=list(dict.fromkeys(notices)),
        sizes=_sizes(run),
    )


def _sizes(run: Run) -> list[CheckpointSize]:
    try:
        return checkpoint_sizes(run)
    except CheckpointError:  # a check says which one, and why
        return []


# ---- what is on disk


def _on_disk(run: Run, notices: list[str], progress: Progress) -> Iterator[Check]:
    committed = run.checkpoints  # before the telemetry: a run that is being recorded goes on meanwhile
    total = len(run.manifest.data) + 1 + len(committed)
    for done, entry in enumerate(run.manifest.data):
        progress(done, total, f"data {Path(entry.path).name}")
        try:
            find(entry, run.path)
        except DataError as error:
            yield Check("data", entry.path, "unverified", str(error))
            continue
        try:
            locate(entry, run.path)
        except DataError as error:
            yield Check("data", entry.path, "mismatch", str(error))
        else:
            yield Check("data", entry.path, "exact", f"{entry.bytes} bytes with the recorded SHA-256")
    progress(len(run.manifest.data), total, "telemetry")
    readable = True
    for check in _continuity(run):
        readable = readable and (check.kind, check.verdict) != ("telemetry", "mismatch")
        yield check
    if readable:
        notices += run.telemetry.notices
        yield from _chain(run)
        yield from check_ranks(run)
        yield from _missing(run, committed)
        yield from check_batches(run, lambda ahead, all_: progress(ahead, all_, "stored batches"))
    since = first_seal(run, committed)
    for done, (step, segment) in enumerate(committed):
        progress(total - len(committed) + done, total, f"checkpoint {step}")
        found = check_checkpoint(run, step, segment, readable, since)
        if found.verdict == "mismatch" and (step, segment) not in run.checkpoints:
            notices.append(f"checkpoint {found.what} was thinned meanwhile, and is not looked at")
        else:
            yield found
    yield from check_shared(run, committed)
    yield from _traces(run)
    notices += _strays(run)


def _continuity(run: Run) -> Iterator[Check]:
    """Whether each segment has the line of every step after its start exactly once."""
    try:
        telemetry = run.telemetry  # once: it is read again when the run has gone on
        columns = [telemetry.column(name) for name in ("segment", "step")]
    except WorkbenchError as error:
        yield Check("telemetry", "telemetry.jsonl", "mismatch", str(error))
        return
    segment, step = (np.zeros(0, np.int64) if one is None else one for one in columns)
    known = {entry.segment for entry in run.manifest.segments}
    if strange := sorted(set(np.unique(segment).tolist()) - known):
        yield Check(
            "telemetry",
            "telemetry.jsonl",
            "mismatch",
            f"it has lines of segment {strange[0]}, which the manifest lacks",
        )
        return
    for entry in run.manifest.segments:
        own = np.sort(step[segment == entry.segment])
        name = f"segment {entry.segment}"
        if not len(own):
            yield Check("telemetry", name, "unverified", "no step of it was logged")
            continue
        if own[0] <= entry.start:
            yield Check("telemetry", name, "mismatch", f"it has step {own[0]}, and starts after step {entry.start}")
        elif (count := int(own[-1]) - entry.start - len(own)) > 0:
            missing = some(islice(_absent(entry.start, own), SHOWN), total=count)
            yield Check("telemetry", name, "mismatch", f"the lines of steps {missing} are missing")
        else:
            yield Check("telemetry", name, "exact", f"each of the steps {entry.start + 1} to {own[-1]} once")


def _absent(start: int, own: np.ndarray) -> Iterator[int]:
    """The steps after `start` that are not among `own`, which is sorted; one by one, for a line may name any number."""
    before = np.concatenate(([start], own[:-1]))
    for place in np.flatnonzero(own - before > 1):
        yield from range(int(before[place]) + 1, int(own[place]))


def _chain(run: Run) -> Iterator[Check]:
    """Whether each segment started from the state that was left."""
    committed = run.checkpoints
    for entry in run.manifest.segments:
        name, meta = f"{entry.segment}, from step {entry.start}", run.telemetry.meta(entry.segment)
        if meta is None:
            yield Check("segment", name, "unverified", "no line says from which state it started")
        elif lanes := run.seam(entry.segment):
            differ = f"{', '.join(lanes)} differ{'s' if len(lanes) == 1 else ''} from what was left"
            if (entry.start, entry.segment) in committed:
                yield Check("segment", name, "exact", f"{differ}; it started from a state that it committed")
            elif (edits := run.edits(entry.start + 1, entry.segment)) is not None and edits.by_hand is not None:
                told = (
                    f"{differ}: the loop changed {edits.by_hand}, and no checkpoint holds that, as its first step says"
                )
                yield Check("segment", name, "unverified", told)
            else:
                yield Check("segment", name, "mismatch", f"{differ}, and it has no checkpoint of its own")
        else:
            first = "the state that its checkpoint holds" if entry.parent is None else "the state that was left"
            yield Check("segment", name, "exact", f"it started from {first}")


def _missing(run: Run, committed: list[tuple[int, int]]) -> Iterator[Check]:
    """What must be there, and is not. Of a run that is being recorded, too: what is thinned while this looks was there
    when it began, `committed`."""
    try:
        wrote = stretches(run.path / TELEMETRY)
    except OSError as error:
        yield Check("telemetry", TELEMETRY, "mismatch", f"it can't be read any more ({error.strerror})")
        return
    try:
        found = read_seals(run)
    except (OSError, WorkbenchError) as error:
        yield Check("telemetry", TELEMETRY, "mismatch", f"it can't be read any more ({error})")
        return
    # A run that is being recorded may have opened a segment since the manifest was read, or ended: what follows
    # compares the lines with what the folder says now.
    _, now = run.telemetry, run.checkpoints
    yield from sealed(run, found)
    named = {stretch.segment for stretch in wrote if stretch.segment is not None}
    if strange := sorted(named - {entry.segment for entry in run.manifest.segments}):
        told = f"a line says that segment {strange[0]} starts, which the manifest lacks"
        yield Check("telemetry", TELEMETRY, "mismatch", told)
        return
    end = ending(wrote)
    yield end if end.verdict == "mismatch" else remembered_end(run, found) or end
    yield from fields(wrote)
    yield from fingerprints(run, wrote)
    yield from marks(run, wrote)
    yield from premises(run)
    yield from checkpoints_there(run, wrote, sorted({*committed, *now}))
    yield from remembered_checkpoints(found, now)


def _traces(run: Run) -> Iterator[Check]:
    """Whether the files of replays and experiments can be read, and are of this run."""
    folder = run.path / TRACES
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        try:
            if path.name.endswith(".autopsy.json"):
                owner = verdict.read(path).run
            elif ".whatif-" in path.name:
                owner = whatif.read(path).run
            else:
                owner = trace.read(path).record.run
        except WorkbenchError as error:
            yield Check("trace", path.name, "mismatch", str(error))
            continue
        if owner != run.manifest.run:
            yield Check("trace", path.name, "mismatch", f"it is of run {owner}")
        else:
            yield Check("trace", path.name, "exact", "it follows its schema, and is of this run")


def _strays(run: Run) -> list[str]:
    folder = run.path / CHECKPOINTS
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    committed = {stem(*key) for key in run.checkpoints}
    listed = {name for one in records(run, run.checkpoints) for name in files_of(one)}
    stray = [name for name in names if name.lstrip(".").partition(".")[0] and _stem(name) not in committed]
    stray = [name for name in stray if name not in listed]
    return (
        [f"checkpoints/ holds files that no commit record lists, as a crash leaves them: {some(stray)}"]
        if stray
        else []
    )


def _stem(name: str) -> str:
    parts = name.split(".")
    return ".".join(parts[:2]) if len(parts) > 2 and parts[1].startswith("s") and parts[1][1:].isdecimal() else parts[0]
