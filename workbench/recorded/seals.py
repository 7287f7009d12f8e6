"""Whether a run's lines are those that its writers wrote, and its manifest the one that they knew.

Each line has a seal of itself and of what was before it (`lines.seal`), each meta line the digest of the manifest as it
was then (`manifest.digest`), and the manifest the seal of the line that says that the run was done (`manifest.End`).
Runs recorded before there were any have none, and nothing is said of them. Imports no MLX.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from ..enumeration import some
from ..lines.seal import Chain
from ..manifest import NAME, End, digest
from ..manifest import read as read_manifest
from ..untrusted import open_regular, read_file
from ..verification import Check
from .layout import TELEMETRY

if TYPE_CHECKING:
    from .recorded_run import RecordedRun

SEALS = "seals"  # the check of the lines; a line that was changed keeps no step from being proven
_STEP = b'{"type":"step"'  # as each line of a step begins; of all others it is looked at what they are


class _Head(msgspec.Struct):
    type: str
    segment: int = 0
    step: int = -1
    manifest: str | None = None


@dataclass
class Seals:
    """What the lines of a file say of themselves.

    Attributes:
        lines: how many have a seal.
        first: a phrase on the first that does not agree with it, or has lost it; None: all agree.
        broken: how many do not.
        manifest: digest of it in the last meta line; None: that has none, or there is none.
        segment: the highest that a meta line names.
        done: step and seal of the last line, if that says that the run was done.
        after: something that is no line comes after the last one.
        ends: what the manifest said of it before the lines were read, and after; a process may be just ending.
    """

    lines: int = 0
    first: str | None = None
    broken: int = 0
    manifest: str | None = None
    segment: int = -1
    done: tuple[int, str] | None = None
    after: bool = False
    ends: tuple[End | msgspec.UnsetType, ...] = ()
    _decoder: msgspec.json.Decoder[_Head] = field(default_factory=lambda: msgspec.json.Decoder(_Head), repr=False)

    def look(self, raw: bytes, seal: str | None) -> None:
        """Takes a line that is not a step's."""
        self.done = None
        head = self.head(raw)
        if head is not None and head.type == "meta":
            self.manifest, self.segment = head.manifest, max(self.segment, head.segment)
        elif head is not None and head.type == "done":
            self.done = (head.step, seal or "")

    def head(self, raw: bytes) -> _Head | None:
        try:
            return self._decoder.decode(raw)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return None

    def complain(self, number: int, raw: bytes, why: str) -> None:
        self.broken += 1
        if self.first is None:
            head = self.head(raw)
            what = "" if head is None else f" ({head.type}" + (f" {head.step})" if head.step >= 0 else ")")
            self.first = f"line {number}{what} {why}"


def read_seals(run: RecordedRun) -> Seals:
    """Reads a telemetry file that `telemetry.read` has accepted.

    Raises:
        OSError: it can't be read any more.
        RunError: so it is with the manifest.
    """
    found, chain, required = Seals(), Chain(), run.manifest.sealed
    before = read_manifest(run.path).end
    with open_regular(run.path / TELEMETRY) as file:
        for number, raw in enumerate(file, 1):
            good = chain.follow(raw)
            if good is None:
                head = found.head(raw)
                if head is None:  # what a crash has left; the next seal covers it
                    found.after = True
                    if not raw.strip() and (required or chain.last is not None):
                        found.complain(number, raw, "is blank, and was not when it was written")
                    continue
                found.after = False
                if required or chain.last is not None and head.type != "meta":
                    found.complain(number, raw, "does not end with its seal")
                elif chain.last is not None:  # a workbench that knows no seals went on
                    chain = Chain()
                found.look(raw, None)
                continue
            found.lines, found.after = found.lines + 1, False
            if not good:
                found.complain(number, raw, "or what comes before it was changed, moved or removed since")
            if raw.startswith(_STEP):
                found.done = None
            else:
                found.look(raw, None if chain.last is None else chain.last.decode())
    found.ends = before, read_manifest(run.path).end
    return found


def sealed(run: RecordedRun, found: Seals) -> Iterator[Check]:
    """A check of the lines, and one of the manifest; none for a run without seals."""
    if not (run.manifest.sealed or found.lines):
        return
    if found.first is not None:
        more = f", and {found.broken - 1} more" if found.broken > 1 else ""
        detail = f"{TELEMETRY} is not what was written: {found.first}{more}"
        yield Check("telemetry", SEALS, "mismatch", detail)
    else:
        yield Check("telemetry", SEALS, "exact", f"{found.lines} lines have the digest of themselves and those before")
    if found.manifest is None:
        if found.segment >= 0:
            told = "no line of the last process says what it was then"
            yield Check("manifest", NAME, "unverified", told)
        return
    try:
        content = read_file(run.path / NAME)
        known = range(max(found.segment + 1, 1), len(run.manifest.segments) + 1)
        # A crash may have come between a new segment in the manifest and its first line.
        same = any(digest(content, count) == found.manifest for count in reversed(known))
    except (OSError, ValueError) as error:
        yield Check("manifest", NAME, "mismatch", f"it can't be read any more ({error})")
        return
    if same:
        yield Check("manifest", NAME, "exact", "it says what it said when the last process began with it")
    else:
        told = f"{NAME} was changed since the process that wrote the last lines began, which logged its SHA-256"
        yield Check("manifest", NAME, "mismatch", told)


def remembered_end(run: RecordedRun, found: Seals) -> Check | None:
    """What is to be said of the run's end where manifest and last line do not agree on it; None: they do."""
    before, end = found.ends
    if before != end:
        told = f"{NAME} was told of it, or that it is not, while the lines were read: the run is just being recorded"
        return Check("telemetry", "end", "unverified", told)
    if isinstance(end, msgspec.UnsetType):
        if found.done is None or not run.manifest.sealed:
            return None
        return Check(
            "telemetry",
            "end",
            "unverified",
            f"its last line says that it was done, and {NAME} does not: a process had begun to go on with it, or that "
            "could not be written, of which the recorder warned. Whether lines came after that one can't be told",
        )
    if found.done == (end.step, end.seal) and not found.after:
        return None
    return Check(
        "telemetry",
        "end",
        "mismatch",
        f"{NAME} says that the run was done at step {end.step}, and the last line is not the one that said so: the end "
        f"of {TELEMETRY} was cut off, or one of the two was changed",
    )


def remembered_checkpoints(found: Seals, committed: Sequence[tuple[int, int]]) -> Iterator[Check]:
    """One check, where the checkpoints are not those that there were when the run was done; else none."""
    before, end = found.ends
    if before != end or isinstance(end, msgspec.UnsetType):
        return
    listed, there = set(end.checkpoints), set(committed)
    if listed == there and end.checkpoints != sorted(there):
        yield Check("checkpoint", "at the end", "mismatch", f"{NAME} lists them in another order than it is written in")
    for keys, is_, what in (
        (listed - there, "missing", f"says that the run had {len(listed)} when it was done"),
        (there - listed, "there", "says that the run did not have that when it was done"),
    ):
        if keys:
            names = [f"{step}" + (f" of segment {segment}" if segment else "") for step, segment in sorted(keys)]
            which = f"checkpoint {names[0]} is" if len(names) == 1 else f"checkpoints {some(names)} are"
            yield Check("checkpoint", "at the end", "mismatch", f"{which} {is_}, and {NAME} {what}")
