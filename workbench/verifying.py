"""Is a run whole, and is it what it says? Every digest, the telemetry's continuity and its end, the chain of
fingerprints from segment to segment and checkpoint to checkpoint, what must be there and is not, and a sample of its
steps proven by replay.

Of a telemetry line a replay compares, bit by bit: `batch_hash`, `loss`, `grad_norm` (before clipping; the norm after it
is not logged), `lr` (of a MultiOptimizer the first one's; `state.other` has the others), the four per-layer arrays, and
the fingerprints in `state`. `before` is done again, so that a wrong one moves those bits (except for a rate that a
schedule overwrites). `segment` and `step` are counted. `ma`, `spike` and `spike_rule` are derived again from the
losses. Nothing can be compared with `t`, `elapsed_s`, `step_per_s`, `peak_rss_mb`, `unstable` and what rollback and
validation lines say. There is no chain of digests over the lines and no signature: files that were all written anew so
that they agree pass, unless the steps are replayed, and a run that was trained anew passes then, too.

Knows run folders and replays; writes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from . import trace, verdict
from .batches.batch_files import check_batches
from .checkpoints import checkpoint_reader
from .checkpoints.commit import files_of, read_commit, stem
from .errors import CheckpointError, DataError, WorkbenchError
from .fingerprint import known_method
from .interventions import whatif
from .proving import Progress, not_replayed, replayed
from .ranks.attendance import setup_of
from .ranks.own_line import complaint
from .rebuild import find, locate
from .recorded.checkpoint_sizes import CheckpointSize, checkpoint_sizes
from .recorded.completeness import checkpoints_there, ending, fields, premises
from .recorded.layout import TELEMETRY
from .recorded.spike_marks import marks
from .recorded.stretches import stretches
from .replaying.preparation import undisturbed
from .run import CHECKPOINTS, TRACES, Run
from .snapshot import State
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
    began, notices = time.perf_counter(), list[str]()
    checks: list[Check] = []
    for check in _on_disk(run, notices, progress):
        checks.append(check)
    steps, on_the_way = 0, 0
    if not any(check.kind == "telemetry" and check.verdict == "mismatch" for check in checks):
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
        yield from _ranks(run)
        yield from _missing(run, committed)
        yield from check_batches(run, lambda ahead, all_: progress(ahead, all_, "stored batches"))
    for done, (step, segment) in enumerate(committed):
        progress(total - len(committed) + done, total, f"checkpoint {step}")
        found = _checkpoint(run, step, segment, readable)
        if found.verdict == "mismatch" and (step, segment) not in run.checkpoints:
            notices.append(f"checkpoint {found.what} was thinned meanwhile, and is not looked at")
        else:
            yield found
    yield from _traces(run)
    notices += _strays(run)


def _continuity(run: Run) -> Iterator[Check]:
    """Whether each segment has the line of every step after its start exactly once."""
    try:
        columns = [run.telemetry.column(name) for name in ("segment", "step")]
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
        expected = np.arange(entry.start + 1, int(own[-1]) + 1)
        if own[0] <= entry.start or len(own) > len(expected):
            yield Check("telemetry", name, "mismatch", f"it has step {own[0]}, and starts after step {entry.start}")
        elif len(missing := np.setdiff1d(expected, own)):
            some = ", ".join(map(str, missing[:5])) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            yield Check("telemetry", name, "mismatch", f"the lines of steps {some} are missing")
        else:
            yield Check("telemetry", name, "exact", f"each of the steps {entry.start + 1} to {own[-1]} once")


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
            else:
                yield Check("segment", name, "mismatch", f"{differ}, and it has no checkpoint of its own")
        else:
            first = "the state that its checkpoint holds" if entry.parent is None else "the state that was left"
            yield Check("segment", name, "exact", f"it started from {first}")


def _ranks(run: Run) -> Iterator[Check]:
    """Whether the lines of a data-parallel run have an entry of each rank, and their losses make the line's."""
    if (setup := setup_of(run.manifest)) is None:
        return
    columns = [run.telemetry.column(name) for name in ("segment", "step")]
    places = zip(*(np.zeros(0, np.int64) if one is None else one for one in columns), strict=True)
    for segment, step in places:
        line = run.telemetry.at(int(step), int(segment))
        if line is not None and (wrong := complaint(line, setup.size)) is not None:
            yield Check(
                "telemetry", "ranks", "mismatch", f"the line of step {step} does not agree with itself: {wrong}"
            )
            return
    yield Check("telemetry", "ranks", "exact", f"each line has {setup.size} ranks, and the mean of their losses")


def _missing(run: Run, committed: list[tuple[int, int]]) -> Iterator[Check]:
    """What must be there, and is not."""
    try:
        wrote = stretches(run.path / TELEMETRY)
    except OSError as error:
        yield Check("telemetry", TELEMETRY, "mismatch", f"it can't be read any more ({error.strerror})")
        return
    yield ending(wrote)
    yield from fields(wrote)
    yield from marks(run, wrote)
    yield from premises(run)
    yield from checkpoints_there(run, wrote, committed)


def _checkpoint(run: Run, step: int, segment: int, readable: bool) -> Check:
    """Its digests, and whether it is the state that the telemetry recorded and has the manifest's parameters."""
    name = stem(step, segment)
    try:
        record = read_commit(run.path / CHECKPOINTS, step, segment)
        state = checkpoint_reader.read(run.path / CHECKPOINTS, step, segment, run.manifest.run)
        lanes = state.lanes(known_method(run.manifest.fingerprint, run.path))
    except WorkbenchError as error:
        return Check("checkpoint", name, "mismatch", str(error))
    if unlike := [lane for lane, value in record.state.items() if lanes.get(lane) != value]:
        return Check("checkpoint", name, "mismatch", f"its commit record has other fingerprints of {', '.join(unlike)}")
    if (sentence := _other_parameters(run, state)) is not None:
        return Check("checkpoint", name, "mismatch", sentence)
    if not readable or segment >= len(run.manifest.segments):
        return Check("checkpoint", name, "unverified", "its digests agree; there is no telemetry to compare it with")
    begun, ended = run.manifest.segments[segment].start, run.telemetry.last_step(segment)
    if step > max(begun, ended):
        told = f"the telemetry of segment {segment} ends at step {ended}, before this checkpoint"
        return Check("checkpoint", name, "mismatch", f"{told}: its last lines are gone")
    logged = {
        lane.removeprefix("state."): value
        for lane, value in run.state_evidence(step, segment).items()
        if lane.startswith("state.")
    }
    if not logged:
        return Check(
            "checkpoint", name, "unverified", "its digests agree; the telemetry has no fingerprint of this state"
        )
    if unlike := [lane for lane, value in logged.items() if lanes.get(lane) != value]:
        return Check(
            "checkpoint", name, "mismatch", f"it is not the state that the run logged: {', '.join(unlike)} differ"
        )
    return Check("checkpoint", name, "exact", "its digests agree, and it is the state that the run logged")


def _other_parameters(run: Run, state: State) -> str | None:
    listed = {one.path: (tuple(one.shape), one.dtype) for one in run.manifest.parameters}
    held = {path: (array.shape, str(array.dtype).removeprefix("mlx.core.")) for path, array in state.weights.items()}
    for path in sorted(listed.keys() | held.keys()):
        if path not in listed or path not in held:
            return f"{path} stands only in the {'checkpoint' if path in held else 'manifest'}"
        if listed[path][0] != held[path][0]:
            return f"{path} has the shape {held[path][0]}, in the manifest {listed[path][0]}"
        if listed[path][1] != held[path][1]:
            return f"{path} has the dtype {held[path][1]}, in the manifest {listed[path][1]}"
    return None


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
    committed, listed = {stem(*key) for key in run.checkpoints}, set[str]()
    for key in run.checkpoints:
        try:
            listed |= files_of(read_commit(folder, *key))
        except CheckpointError:
            continue
    stray = [name for name in names if name.lstrip(".").partition(".")[0] and _stem(name) not in committed]
    stray = [name for name in stray if name not in listed]
    return (
        [f"checkpoints/ holds files that no commit record lists, as a crash leaves them: {', '.join(stray[:5])}"]
        if stray
        else []
    )


def _stem(name: str) -> str:
    parts = name.split(".")
    return ".".join(parts[:2]) if len(parts) > 2 and parts[1].startswith("s") and parts[1][1:].isdecimal() else parts[0]
