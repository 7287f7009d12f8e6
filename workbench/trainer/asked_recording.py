"""How options ask to record: the further arguments of a recorder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ExperimentError
from ..manifest import Manifest
from ..recovery import Recovery
from ..spikes import SpikeSettings
from .options import complete, present


def recording_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Of a new run; empty, if nothing is to be recorded.

    Args:
        given: every option; None: it was not given.

    Raises:
        ExperimentError: an option contradicts another.
        WorkbenchError: one is out of range.
    """
    if given["no_record"]:
        return {}
    spikes: SpikeSettings | None = None
    if not given["no_spike_detect"]:
        spikes = SpikeSettings(**present({"factor": given["spike_factor"], "window": given["spike_window"]}))
    return {
        "save_every": 100 if given["save_every"] is None else given["save_every"],
        "keep_last": given["keep_last"],
        "keep_every": given["keep_every"],
        **present({"black_box": given["black_box"]}),
        **_recovery(given),
        "spikes": spikes,
        "copy_telemetry_to": given["log_jsonl"],
    }


def recording_as(manifest: Manifest, given: Mapping[str, Any]) -> dict[str, Any]:
    """As a run is recorded, unless it was given otherwise."""
    recording = recording_of(complete(given))
    for name in ("save_every", "keep_last", "keep_every"):
        recording[name] = getattr(manifest, name) if given.get(name) is None else given[name]
    recording["spikes"] = None if manifest.spikes is None else SpikeSettings(**manifest.spikes)
    if "auto_rollback" not in recording and manifest.recovery is not None:
        recording["auto_rollback"] = Recovery(**manifest.recovery)
    return recording


def _recovery(given: Mapping[str, Any]) -> dict[str, Any]:
    """What to do about unstable steps; empty if nothing was given."""
    mode, skip = given["auto_rollback"], bool(given["rollback_skip_batch"])
    if skip and mode not in (None, "on"):
        raise ExperimentError(f"--rollback-skip-batch goes with --auto-rollback on; found --auto-rollback {mode}")
    return {"auto_rollback": Recovery("on" if skip else mode, skip_batch=skip)} if mode or skip else {}
