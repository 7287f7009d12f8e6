"""Why a replay may not be exact, as the recorder itself suspected it: what its self-check could not rule out,
and what it noticed later.

Knows run folders; performs nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import msgspec
from msgspec import UNSET

from ..lines.line import Line
from ..lines.strict import decode
from ..run import Run
from ..untrusted import LINE, open_regular

# What the recorder warned of, or was told to leave aside; see `ignored.remarks`. Other remarks are of what was found
# harmless as far as the check went: said of a replay that differs for another reason, "likely" would mislead.
_DANGEROUS = ("unverified", "told to ignore", "gave other bits", "self_check=False", "no checkpoint can hold that")


def suspicion(run: Run, segment: int, step: int, others: bool = False) -> str | None:
    """A sentence or two on what the processes that led to a step of a segment noted of themselves; None: nothing.

    Args:
        step: at which a replay departed from the run, or after that.
        others: whether a file that the step reads by itself is another now.
    """
    ways = {number: high for number, _, high in run.manifest.ways(segment)}
    noted = [
        one
        for line in run.telemetry.metas
        if line.remarks is not UNSET and line.segment in ways and (line.step is UNSET or line.step < step)
        for one in line.remarks
    ]
    noticed = [one for line in _noticed(run) if line.segment in ways and line.since < step for one in line.remarks]  # type: ignore[union-attr,operator]
    noted = [*noticed, *noted]
    likely = list(dict.fromkeys(one for one in noted if one in noticed or _likely(one, others)))
    rest = [one for one in dict.fromkeys(noted) if one not in likely]
    said = []
    if likely:
        said.append(f"What the recorder could not rule out: {'; '.join(likely)}. That is the likely reason.")
    if rest:
        besides = "Besides, it noted" if likely else "What the recorder could not rule out"
        said.append(f"{besides}: {'; '.join(rest)}.")
    return " ".join(said) or None


def _noticed(run: Run) -> Iterator[Line]:
    """The lines with which a recorder noted what it noticed while it went on: few, of perhaps a million."""
    with open_regular(run.telemetry.path) as file:
        for raw in iter(lambda: file.readline(LINE + 1), b""):
            if b'"since":' in raw and raw.endswith(b"\n"):
                with contextlib.suppress(msgspec.MsgspecError, ValueError, RecursionError):
                    line = decode(raw)
                    if line.remarks is not UNSET and line.since is not UNSET:
                        yield line


def _likely(remark: str, others: bool) -> bool:
    return any(one in remark for one in _DANGEROUS) or (others and remark.startswith("the step reads "))
