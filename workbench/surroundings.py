"""Numeric environments side by side: in what two differ, as phrases and as a table.

Knows the JSON objects that `environment` makes; asks this machine only where a run is to be compared with it.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .errors import RunError

if TYPE_CHECKING:
    import pandas as pd

    from .run import Run


# What is not known of older runs is no difference.
_LATER = ("libc", "hash_seed")
# Moves bits only where a step goes through a set of texts, or hashes one: named, but no reason to refuse.
_NOTED = ("hash_seed",)
# What the script that trains may set while it runs, so that it is known only when the experiment is built.
_SETTABLE = ("compile_disabled", "flush_to_zero", "tf32", "blas.num_threads", "variables.")
# Variables that set what is an entry of its own, so that it is seen there whether they came in time.
_SEEN = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "OPENBLAS_CORETYPE")


def differences(recorded: Mapping[str, Any], here: Mapping[str, Any], *, settable: bool = True) -> list[str]:
    """A phrase for each entry that differs, such as ``mlx: recorded 0.32.4, here 0.33.0``.

    Args:
        settable: with what the script that trains may set while it runs.
    """
    return [
        f"{name}: recorded {ours}, here {theirs}"
        for name, ours, theirs, same in _rows(recorded, here)
        if not same and name not in _NOTED and (settable or not name.startswith(_SETTABLE))
    ]


def other_hashes(recorded: Mapping[str, Any], here: Mapping[str, Any]) -> str | None:
    """A sentence, if Python hashes texts otherwise than it did; None: it does not, or that is not known."""
    ours, theirs = recorded.get("hash_seed"), here.get("hash_seed")
    if ours is None or theirs is None or ours == theirs:
        return None
    then = "unset" if ours == "random" else ours
    return (
        f"PYTHONHASHSEED was {then} when this was recorded, and is {'unset' if theirs == 'random' else theirs} here: a "
        "step that goes through a set of texts, or hashes one, may do it otherwise"
    )


def set_too_late(before: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """A phrase for each variable that was set between two moments of one process and may have had no effect, for the
    libraries read theirs once. On the CPU MLX reads only the one that disables compilation, which is seen to.

    Args:
        before, here: the environments of the two moments.
    """
    then, now = before.get("variables", {}), here.get("variables", {})
    seen = (*_SEEN, "MLX_") if here.get("backend") == "cpu" else ()
    return [
        f"variables.{name}: set to {_shown(now.get(name))} by the script, when the library may have read it already"
        for name in sorted(then.keys() | now.keys())
        if then.get(name) != now.get(name) and not name.startswith(tuple(seen))
    ]


def shell_line(recorded: Mapping[str, Any], started: Mapping[str, Any]) -> str | None:
    """What to type before a process is started, for it to have a run's variables; None: nothing is to be done.

    Args:
        started: the environment with which this process began.
    """
    then, now = recorded.get("variables") or {}, started.get("variables") or {}
    names = [name for name in sorted(then.keys() | now.keys()) if then.get(name) != now.get(name)]
    lines = [f"unset {name}" if name not in then else f"export {name}={shlex.quote(str(then[name]))}" for name in names]
    return "; ".join(line for name, line in zip(names, lines, strict=True) if name.isidentifier()) or None


def compared(recorded: Mapping[str, Any], here: Mapping[str, Any]) -> pd.DataFrame:
    """One row an entry, those that differ first: item, recorded and here (as text; "nothing" for none), same."""
    import pandas as pd

    rows = _rows(recorded, here)
    ordered = sorted(rows, key=lambda row: row[3])
    return pd.DataFrame(ordered, columns=["item", "recorded", "here", "same"])


def environment_table(run: Run, here: Mapping[str, Any] | None = None, *, segment: int | None = None) -> pd.DataFrame:
    """What a run was recorded with, against this machine: everything outside the code that can move a bit.

    Args:
        here: another environment than this process's, such as that of a trace.
        segment: of the run; None: its last.

    Returns:
        As `compared`: item, recorded, here, same; the differences first.

    Raises:
        RunError: the run has no such segment.
        ReplayError: this machine has no device such as recorded the run.
    """
    known = {one.segment: one.environment for one in run.manifest.segments}
    chosen = max(known) if segment is None else segment
    if chosen not in known:
        raise RunError(f"{run.path} has no segment {chosen}; it has {sorted(known)}")
    return compared(known[chosen], _here(known[chosen]) if here is None else here)


def _here(recorded: Mapping[str, Any]) -> dict[str, Any]:
    from .environment import numeric_environment, on_device  # imports MLX

    with on_device(recorded.get("backend", "cpu")):
        return numeric_environment()


def _rows(recorded: Mapping[str, Any], here: Mapping[str, Any]) -> list[tuple[str, str, str, bool]]:
    theirs, ours = _flat(recorded), _flat(here)
    return [
        (
            name,
            _shown(theirs.get(name)),
            _shown(ours.get(name)),
            theirs.get(name) == ours.get(name) or (name in _LATER and name not in recorded),
        )
        for name in sorted(ours.keys() | theirs.keys())
    ]


def _flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= {f"{key}.{name}": item for name, item in value.items()}
        else:
            flat[key] = value
    return {key: value for key, value in flat.items() if value is not None}


def _shown(value: Any) -> str:
    return "nothing" if value is None else str(value)
