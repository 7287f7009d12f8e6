"""What a step changes beside its state, and the user says that no step depends on; and what a self-check leaves open.

One step performed twice can't show that a counter never matters: it may be asked at step 1000 only. So a number that
the step changes is refused, unless it is named here; and a replay that is not exact recalls what was taken on trust.
Knows names and sentences; performs nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from .enumeration import some
from .errors import ExperimentError


def ignored(path: str, names: Collection[str]) -> bool:
    """Whether a path, such as "step_fn.self.gstep" or "log[2] (a list)", or what it is a part of, has one of the names.

    Args:
        names: one part of a path each, or several in a row: "gstep", "self.gstep".
    """
    parts = _parts(path.partition(" (")[0])
    return any(_parts(name) in parts for name in names)


def _parts(path: str) -> str:
    return f".{path.replace('[', '.').replace(']', '')}."


class UnknownName(ExperimentError):
    """`ignore` has a name of nothing."""


def refuse_unknown(names: Collection[str], changed: Sequence[str], paths: Sequence[str], shown: Sequence[str]) -> None:
    """
    Args:
        changed: what the step changes beside its state.
        paths: what else it can reach.
        shown: those of these that are named in the sentence, after what it changes.

    Raises:
        UnknownName: a name is of nothing there.
    """
    unknown = [name for name in names if not any(ignored(path, [name]) for path in (*changed, *paths))]
    if not unknown:
        return
    own = list(dict.fromkeys(changed))
    others = [path for path in dict.fromkeys(shown) if path not in own]
    have = f"what it changes beside its state is {some(own)}" if own else "it changes nothing beside its state"
    have += f"; numbers that it can reach and does not change: {some(others)}" if others else ""
    raise UnknownName(
        f"ignore names {unknown[0]!r}, and the step can reach nothing of that name: {have}. Give the name as it stands "
        "there, or its last part, or leave it out"
    )


def way_to_ignore(paths: Sequence[str]) -> str:
    names = list(dict.fromkeys(path.rpartition(".")[2].partition("[")[0] for path in paths))
    given = ", ".join(map(repr, names[:6])) + ("," if len(names) == 1 else "")
    return (
        f"If no step ever depends on {'it' if len(names) == 1 else 'them'} (it is only printed or logged), say so: "
        f"Recorder(..., ignore=({given})); a replay that is not exact will recall it"
    )


def remarks(step: int, unlike: list[str], doubt: str | None, changed: list[str], left_out: list[str]) -> list[str]:
    """What a self-check of a step can't rule out, a sentence each without its full stop.

    Args:
        unlike: items that were others when the step was performed again.
        doubt: why it was not.
        changed: what no checkpoint holds, and the step changes.
        left_out: likewise, which the recorder was told to ignore.
    """
    said = []
    if doubt:
        said.append(f"its self-check was left out (unverified), for {doubt}")
    if unlike:
        said.append(f"step {step} gave other bits when it was performed again ({some(unlike)})")
    if changed:
        said.append(f"the step changes what no checkpoint holds: {some(changed)}")
    if left_out:
        said.append(f"the step changes {some(left_out)}, which no checkpoint holds and the recorder was told to ignore")
    return said
