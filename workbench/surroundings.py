"""Numeric environments side by side: in what two differ, as phrases and as a table.

Knows the JSON objects that `environment` makes; asks this machine only where a run is to be compared with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .errors import RunError

if TYPE_CHECKING:
    import pandas as pd

    from .run import Run


def differences(recorded: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """A phrase for each entry that differs, such as ``mlx: recorded 0.32.4, here 0.33.0``."""
    return [f"{name}: recorded {ours}, here {theirs}" for name, ours, theirs, same in _rows(recorded, here) if not same]


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
        (name, _shown(theirs.get(name)), _shown(ours.get(name)), theirs.get(name) == ours.get(name))
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
