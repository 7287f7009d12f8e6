"""What a run must have that no digest misses when it is gone: an end, every field of its lines, checkpoints that were
due, and what says with which code and on which machine it was recorded.

A part that only a deletion can explain is a mismatch. What a crash or a full disk explains too is unverified: it can't
be told from the folder, and the sentence says so. Knows a run's folder; computes no step and imports no MLX.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from .. import seams
from ..enumeration import some
from ..lines.line import LANES
from ..manifest import NAME
from ..verification import Check
from .stretches import EVIDENCE, FIELDS, Stretch

if TYPE_CHECKING:
    from .recorded_run import RecordedRun

Key = tuple[int, int]  # step and segment


def ending(wrote: Sequence[Stretch]) -> Check:
    """Whether the telemetry ends as a recording ends: with a line that says so, at the last step."""
    if not wrote:
        return Check("telemetry", "end", "unverified", "it has no lines")
    last = wrote[-1]
    if last.done is None:
        return Check(
            "telemetry",
            "end",
            "unverified",
            f"the run did not end: its last line is of step {last.last}, and no line says that it was done. Whether it "
            "was stopped, is still being recorded, or its telemetry was cut can't be told",
        )
    if last.after_done or last.done != last.last:
        return Check(
            "telemetry",
            "end",
            "mismatch",
            f"a line says that it was done at step {last.done}, and the last step line is of step {last.last}",
        )
    return Check("telemetry", "end", "exact", f"a line says that it was done, at the last step, {last.done}")


def fields(wrote: Sequence[Stretch]) -> Iterator[Check]:
    """Whether the lines that one process wrote all have the same fields, and those that a replay compares at all."""
    ragged, have, lacking = dict[str, list[int]](), set[str](), dict[str, list[Stretch]]()
    for stretch in wrote:
        held = {name for has in stretch.fields for name, there in zip(FIELDS, has, strict=True) if there}
        have |= held
        for name in EVIDENCE if stretch.steps else ():
            if name not in held:
                lacking.setdefault(name, []).append(stretch)
        for has, steps in stretch.fields.items():
            for name, there in zip(FIELDS, has, strict=True):
                if name in held and not there:
                    ragged.setdefault(name, []).extend(steps)
    for name, steps in ragged.items():
        which = f"{'step' if len(steps) == 1 else 'steps'} {some(sorted(steps))}"
        yield Check("telemetry", name, "mismatch", f"it is missing from the line of {which}, and others have it")
    performed = any(stretch.steps for stretch in wrote)
    if performed and (absent := [name for name in EVIDENCE if name not in have]):
        yield Check("telemetry", "fields", "unverified", f"no line has {', '.join(absent)}: a replay can't compare it")
    elif performed and not ragged and not lacking:
        yield Check("telemetry", "fields", "exact", f"every line has all {len(have)} fields that its process wrote")
    for name, without in lacking.items():
        if name in have:
            where = some([f"{one.steps[0][1]} to {one.steps[-1][1]} of segment {one.steps[0][0]}" for one in without])
            told = (
                f"no line of steps {where} has it, and others have: their process did not log it, or it was taken out "
                "since. A replay can't compare it there"
            )
            yield Check("telemetry", name, "unverified", told)


def fingerprints(run: RecordedRun, wrote: Sequence[Stretch]) -> Iterator[Check]:
    """One check for each part of the state whose fingerprint lines lack: every recorder logs all of them, at each step
    and with each start. Nothing where none is lacking."""
    method = run.manifest.fingerprint
    for lane in LANES:
        held = [steps for stretch in wrote for lanes, steps in stretch.lanes.items() if lane not in lanes]
        if lacking := sorted(step for steps in held for step in steps):
            which = f"step{'' if len(lacking) == 1 else 's'} {some(lacking)}"
            told = f"its fingerprint is missing from the line of {which}, and {NAME} says that each has one, {method}"
            yield Check("telemetry", f"state.{lane}", "mismatch", told)
    for stretch in wrote:
        if stretch.segment is not None and (absent := [lane for lane in LANES if lane not in stretch.began]):
            told = (
                f"the line that says from which state it started, of step {stretch.start}, lacks the fingerprint of "
                f"{', '.join(absent)}, and {NAME} says that each has one, {method}"
            )
            yield Check("segment", f"{stretch.segment}, meta line", "mismatch", told)


def premises(run: RecordedRun) -> Iterator[Check]:
    """What a replay compares this machine with, where the manifest lacks it: nothing else in the folder says it."""
    for entry in run.manifest.segments:
        lacks = [
            what
            for what, held in (("the code that performed its steps", entry.code), ("its machine", entry.environment))
            if not held
        ]
        if lacks:
            yield Check(
                "segment",
                f"{entry.segment}, premises",
                "unverified",
                f"the manifest does not say {' nor '.join(lacks)}: a replay can't tell whether they are others here",
            )


def checkpoints_there(run: RecordedRun, wrote: Sequence[Stretch], committed: Sequence[Key]) -> Iterator[Check]:
    """Checkpoints that the run must have had, and has not; nothing where none is missing.

    Args:
        committed: those that it has, and had before the telemetry was read: it may be being recorded.
    """
    there = set(committed)
    performed = {segment for stretch in wrote for segment, _ in stretch.steps}
    for entry in run.manifest.segments:
        if entry.segment not in performed:
            continue
        holder = seams.state_segment(run.manifest, there, entry.start, entry.segment)
        if (entry.start, holder) not in there:
            yield _start_missing(entry.segment, entry.start, wrote)
    yield from _due(run, wrote, there, performed)
    last = wrote[-1] if wrote else None
    if last is not None and last.done is not None and last.segment is not None and last.done == last.last:
        holder = seams.state_segment(run.manifest, there, last.done, last.segment)
        if (last.done, holder) not in there:
            yield Check(
                "checkpoint",
                f"final, {last.done}",
                "unverified",
                f"the run was done at step {last.done}, and the checkpoint of its last state is missing: it was "
                "removed since, or could not be written then, of which the recorder warned",
            )


def _start_missing(segment: int, start: int, wrote: Sequence[Stretch]) -> Check:
    """The state that a segment went on from. A resume has read it, and thinning spares it."""
    number = next((i for i, one in enumerate(wrote) if one.segment == segment and one.steps), 0)
    stretch, before = wrote[number], wrote[number - 1] if number else None
    same_process = before is not None and before.process == stretch.process != ""
    if segment and same_process:  # it went on from memory; that may not have reached the disk
        return Check(
            "checkpoint",
            f"start of segment {segment}",
            "unverified",
            f"the state after step {start}, from which segment {segment} went on, is missing: it was removed since, or "
            "could not be written then, of which the recorder warned",
        )
    why = "every run has its first state before its first step" if not segment else "a resume has read it"
    return Check(
        "checkpoint",
        f"start of segment {segment}",
        "mismatch",
        f"checkpoint {start}, from which segment {segment} went on, is missing: {why}, and thinning spares it",
    )


def _due(run: RecordedRun, wrote: Sequence[Stretch], there: set[Key], performed: set[int]) -> Iterator[Check]:
    manifest = run.manifest
    every, keep_last, keep_every = manifest.save_every, manifest.keep_last, manifest.keep_every
    if every <= 0:
        return
    one_process = len({stretch.process for stretch in wrote}) == 1  # a resume may have had other settings
    taken_back = {stretch.rolled_back for stretch in wrote}
    newest = max(performed, default=0)
    for segment in sorted(performed):
        own = {step for stretch in wrote for other, step in stretch.steps if other == segment}
        due = {step for step in own if step % every == 0 and (segment, step) not in taken_back}
        if keep_last is not None or keep_every is not None:
            way = {step for step, other in there if manifest.lineage(newest, step) == other} | due
            recent = set(sorted(way)[-max(keep_last or 1, 1) :]) if segment == newest else set()
            due = {step for step in due if step in recent or (keep_every and step % keep_every == 0)}
        missing = sorted(step for step in due if (step, segment) not in there)
        later = max((step for step in due if (step, segment) in there), default=0)
        for gone, certain in (
            ([step for step in missing if step < later and one_process], True),
            ([step for step in missing if step >= later or not one_process], False),
        ):
            if gone:
                yield _due_missing(gone, segment, every, certain, one_process)


def _due_missing(gone: list[int], segment: int, every: int, certain: bool, one_process: bool) -> Check:
    what = f"checkpoint{'' if len(gone) == 1 else 's'} {some(gone)}"
    reason = "a later one is there: " if certain else ""
    killed = f", or {'the' if one_process else 'a'} process ended before it was written, by a kill or a crash"
    other = "" if certain else killed if one_process else f"{killed}, or a resume asked for others"
    return Check(
        "checkpoint",
        f"due in segment {segment}",
        "mismatch" if certain else "unverified",
        f"{what} {'is' if len(gone) == 1 else 'are'} missing, and one was due every {every} steps; {reason}removed "
        f"since, or not written then, of which the recorder warned{other}",
    )
