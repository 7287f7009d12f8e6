"""A configuration of `mlx_lm.lora`, read and checked as far as a record needs it. The keys and defaults are mlx-lm's.

Knows mlx-lm's command line; nothing of models, batches or runs.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ..errors import ExperimentError

EXTRA = "spike-workbench[mlx-lm]"
PACKAGES = ("mlx-lm", "transformers", "tokenizers")  # what turns the pinned files into a model and tokens

# A count that is not one would fail late, or mean something else: true is 1 to Python.
_LEAST = {
    "iters": 1,
    "batch_size": 1,
    "grad_accumulation_steps": 1,
    "max_seq_length": 2,
    "steps_per_eval": 1,
    "save_every": 1,
    "val_batches": -1,
    "num_layers": -1,
    "seed": 0,
}


def mlx_lm(module: str) -> types.ModuleType:
    """A module of mlx-lm, by its name below `mlx_lm`.

    Raises:
        ExperimentError: mlx-lm is not installed; the sentence names the extra.
    """
    try:
        return importlib.import_module(f"mlx_lm.{module}")
    except ModuleNotFoundError as error:
        raise ExperimentError(
            f"fine-tuning with mlx-lm needs the package {error.name}, which is not installed here; "
            f"pip install '{EXTRA}'"
        ) from None


def read_settings(path: str | Path) -> dict[str, Any]:
    """The settings that a file for `mlx_lm.lora --config` makes: its entries over mlx-lm's defaults.

    Raises:
        ExperimentError: it is no such file, or it asks for something that a replay could not rebuild.
    """
    lora = mlx_lm("lora")
    import yaml  # of mlx-lm's own requirements

    path = Path(path)
    try:
        given = yaml.load(path.read_text(), lora.yaml_loader)  # derives from yaml.SafeLoader
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        said = " ".join(str(error).split())  # a parser's message has several lines
        raise ExperimentError(f"{path} can't be read as a configuration of mlx_lm.lora: {said}") from error
    if not isinstance(given, dict):
        raise ExperimentError(
            f"{path} holds a {type(given).__name__}; expected the keys of mlx_lm.lora's configuration"
        )
    return complete(given)


def complete(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, with mlx-lm's default for each that is missing or null.

    Raises:
        ExperimentError: one asks for something that a replay could not rebuild, or is out of range.
    """
    settings = dict(given)
    if settings.get("train") is False:
        raise ExperimentError("train is false; what is recorded is training, so expected true, or no such entry")
    for key, default in mlx_lm("lora").CONFIG_DEFAULTS.items():
        if settings.get(key) is None:
            settings[key] = default if key != "adapter_path" else None  # without one, they go to the run's folder
    settings["train"] = True  # what this command is for
    try:
        settings = msgspec.json.decode(msgspec.json.encode(settings))  # a copy, of what a manifest can hold
    except (TypeError, msgspec.MsgspecError) as error:
        raise ExperimentError(f"the configuration holds what JSON can't: {error}; expected text and numbers") from error
    if settings["trust_remote_code"]:
        raise ExperimentError(
            "trust_remote_code is set, so a replay would execute code that lies beside the model; expected false: "
            "only architectures that mlx-lm has itself are recorded"
        )
    if settings.get("hf_dataset"):
        raise ExperimentError(
            "hf_dataset names data that may change on its server; save it as train.jsonl and valid.jsonl in a folder, "
            "and name that as data"
        )
    for key, least in _LEAST.items():
        value = settings[key]
        if type(value) is not int or value < least:
            raise ExperimentError(f"{key} is {value!r}; expected a whole number, at least {least}")
    if settings["fine_tune_type"] not in ("lora", "dora", "full"):
        raise ExperimentError(f"fine_tune_type is {settings['fine_tune_type']!r}; expected lora, dora or full")
    if settings["iters"] < settings["grad_accumulation_steps"]:
        raise ExperimentError(
            f"iters is {settings['iters']} and grad_accumulation_steps is {settings['grad_accumulation_steps']}: no "
            "optimizer update would be made; expected at least as many iters"
        )
    return settings


def updates(settings: Mapping[str, Any]) -> int:
    """Steps of the job, counted in optimizer updates: mlx-lm's `iters` counts micro-batches."""
    return settings["iters"] // settings["grad_accumulation_steps"]
