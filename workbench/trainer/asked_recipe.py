"""The recipe that options ask for: corpora, model, optimizer, schedule. What was not given has its usual value."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx

from ..environment import no_gpu
from ..errors import ExperimentError
from .corpus import Corpus
from .model import PRESETS, ModelConfig, depth_config
from .options import present
from .recipe import AdamWConfig, Share, TrainConfig
from .schedule import ScheduleConfig


def mixed(given: Any) -> tuple[list[Corpus], tuple[Share, ...]]:
    """The corpora of a run, and the share of each where there are several.

    Args:
        given: a path; or several, each with its weight, as in `plays.txt=0.7`.

    Raises:
        ExperimentError: one of several has no weight.
        DataError: a file can't be read.
    """
    texts = [str(one) for one in (given if isinstance(given, (list, tuple)) else [given])]
    corpora, shares = [], []
    for text in texts:
        path, equals, weight = text.rpartition("=")
        if len(texts) == 1 and (not equals or Path(text).exists()):
            return [Corpus.open(Path(text).absolute())], ()
        try:
            share = Share(weight=float(weight)) if path else None
        except ValueError:
            share = None
        if share is None:
            raise ExperimentError(
                f"--corpus is {text!r} among {len(texts)}; expected each with its weight, as in plays.txt=0.7"
            )
        corpora.append(Corpus.open(Path(path).absolute()))
        shares.append(share)
    return corpora, tuple(shares)


def recipe_of(given: Mapping[str, Any], corpus: Corpus, shares: tuple[Share, ...]) -> TrainConfig:
    """
    Args:
        given: every option; None: it was not given.
        corpus: that with the largest vocabulary.
        shares: of each corpus, where there are several.

    Raises:
        ExperimentError: an option is out of range, or contradicts another.
    """
    if given["preset"] is not None and given["depth"] is not None:
        raise ExperimentError("--preset and --depth both say how large the model is; expected one of them")
    if given["preset"] not in (None, *PRESETS):
        raise ExperimentError(f"--preset is {given['preset']!r}; expected one of {', '.join(PRESETS)}")
    own = {key: given[key] for key in ("ctx", "dropout", "tied", "dtype") if given[key] is not None}
    if given["depth"] is not None:
        model, batch = depth_config(given["depth"], vocabulary=corpus.vocabulary, **own), 8
    else:
        preset = PRESETS[given["preset"] or "tiny"]
        settings = preset["model"] | own
        settings["vocabulary"] = max(settings["vocabulary"], corpus.vocabulary)
        model, batch = ModelConfig(**settings), preset["batch"]
    steps = given["steps"]
    schedule = {
        "kind": given["lr_schedule"],
        "warmup": min(max(1, steps // 20), steps - 1) if given["warmup"] is None else given["warmup"],
        **{key: given[key] for key in ("max_lr", "min_lr", "decay_steps", "decay_shape")},
    }
    adamw = {key: given[key] for key in ("beta1", "beta2", "eps", "weight_decay", "bias_correction")}
    if adamw["eps"] is None and model.dtype == "float16":
        adamw["eps"] = 1e-4  # 1e-8 is below float16's smallest number, and 0/0 makes NaN where a gradient is 0
    clip = 1.0 if given["grad_clip"] is None else given["grad_clip"] or None
    settings = {
        "batch": batch if given["batch"] is None else given["batch"],
        "accumulate": given["accum"],
        "compile": given["compile_"],
        "deterministic": given["deterministic"],
        **{key: given[key] for key in ("seed", "val_split", "val_every", "sample_every", "prefetch")},
    }
    return TrainConfig(
        model=model,
        schedule=ScheduleConfig(steps=steps, **present(schedule)),
        adamw=AdamWConfig(**present(adamw)),
        clip=clip,
        mixture=shares,
        steps=steps,
        device=_device(given["device"] or os.environ.get("WORKBENCH_DEVICE")),
        **present(settings),
    )


def _device(asked: str | None) -> Literal["cpu", "gpu"]:
    if asked not in (None, "", "cpu", "gpu"):
        raise ExperimentError(f"the device is {asked!r}; expected cpu or gpu")
    if asked == "gpu" and not mx.is_available(mx.Device(mx.DeviceType.gpu)):
        raise ExperimentError(f"--device is gpu, and {no_gpu()}; expected cpu")
    on_gpu = asked == "gpu" or (not asked and mx.default_device().type == mx.DeviceType.gpu)
    return "gpu" if on_gpu else "cpu"
