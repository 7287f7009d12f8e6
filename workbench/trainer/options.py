"""The options of training, by name: which there are, which were given, and which a run has decided already."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ..errors import ExperimentError

# Every option, as `workbench train` names them; one that is not given is None (flags: False).
OPTIONS = (
    *("corpus", "steps", "out", "resume", "fork", "from_", "skip_batch", "set_"),
    *("preset", "depth", "batch", "ctx", "accum", "dropout", "tied", "dtype"),
    *("grad_clip", "beta1", "beta2", "eps", "weight_decay", "bias_correction"),
    *("lr_schedule", "warmup", "max_lr", "min_lr", "decay_steps", "decay_shape"),
    *("seed", "val_split", "val_every", "sample_every", "prefetch", "device", "compile_", "deterministic", "faults"),
    *(
        "save_every",
        "keep_last",
        "keep_every",
        "black_box",
        "auto_rollback",
        "rollback_skip_batch",
        "spike_factor",
        "spike_window",
        "no_spike_detect",
        "log_jsonl",
    ),
    *("no_record", "print_fingerprint"),
)
FRESH = OPTIONS[8:]  # those that `train_run` takes beside its arguments
_FLAGS = ("no_spike_detect", "rollback_skip_batch", "no_record", "print_fingerprint")  # False: not given
_SPELLED = {
    "faults": "fault",
    "from_": "from",
    "set_": "set",
    "compile_": "compile/--no-compile",
    "tied": "tied/--untied",
    "bias_correction": "bias-correction/--no-bias-correction",
    "deterministic": "deterministic/--no-deterministic",
}
# What may be given with --resume; anything else is in the manifest.
RESUMABLE = {
    "out",
    "resume",
    "steps",
    "print_fingerprint",
    "prefetch",
    "log_jsonl",
    "save_every",
    "keep_last",
    "keep_every",
    "black_box",
    "auto_rollback",
    "rollback_skip_batch",
}


def refuse_decided(given: Mapping[str, Any], allowed: Collection[str], where: str) -> None:
    """An option that would be ignored is refused.

    Raises:
        ExperimentError: one was given that the manifest of `where` decides.
    """
    if refused := [name for name, value in given.items() if _is_given(name, value) and name not in allowed]:
        option = _SPELLED.get(refused[0], refused[0].replace("_", "-"))
        raise ExperimentError(f"--{option} is decided by the manifest of {where}; leave it out")


def _is_given(name: str, value: Any) -> bool:
    return value is not None and value != () and not (value is False and name in _FLAGS)


def complete(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: given.get(name) for name in OPTIONS}


def present(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those that were given."""
    return {key: value for key, value in options.items() if value is not None}
