"""The recipe of a run of the built-in trainer: everything that determines it, and the experiment that it makes.

Knows models, data and schedules; nothing of recording, telemetry or runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
import msgspec
import numpy as np
from mlx.utils import tree_flatten

from ..errors import ExperimentError
from ..experiment import Experiment, StepOptions, set_random_key
from ..ranks.world import world
from ..sabotage.alterations import Relabelling, Repetition, Substitution
from .corpus import Corpus
from .data import WindowSampler, training_windows
from .model import ModelConfig, build_model, loss, masked_loss
from .prefetch import Prefetcher
from .schedule import ScheduleConfig, make_schedule
from .scheduled import AdamChange, Drift, adamw
from .shard import Shard


class AdamWConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Stated in full: MLX's own defaults (no bias correction) are not what most people expect of AdamW."""

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    bias_correction: bool = True

    def __post_init__(self) -> None:
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ExperimentError(f"{name} is {getattr(self, name)}; expected a number from 0 to below 1")
        for name in ("eps", "weight_decay"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ExperimentError(f"{name} is {getattr(self, name)}; expected a finite number from 0")


class Share(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How often rows come from a corpus of a mixture, beside the others."""

    weight: float


class TrainConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that determines a run of the built-in trainer, beside the numeric environment."""

    model: ModelConfig
    schedule: ScheduleConfig
    adamw: AdamWConfig = AdamWConfig()
    batch: int  # rows a micro-batch
    accumulate: int = 1
    clip: float | None = 1.0
    compile: bool = True
    deterministic: bool = True
    seed: int = 0
    steps: int
    val_split: float = 0.05
    val_every: int = 0
    sample_every: int = 0
    prefetch: int = 0
    mixture: tuple[Share, ...] = ()  # one a corpus; none: all rows come from the first
    device: Literal["cpu", "gpu"]
    # Where the data departs from the ordinary stream; see `alterations`.
    substitutions: tuple[Substitution, ...] = ()
    relabellings: tuple[Relabelling, ...] = ()
    repetitions: tuple[Repetition, ...] = ()
    skipped: tuple[int, ...] = ()
    freeze: tuple[str, ...] = ()  # paths of modules whose parameters are not trained
    # Where AdamW's settings change on the way; see `scheduled`.
    adam_changes: tuple[AdamChange, ...] = ()
    drifts: tuple[Drift, ...] = ()

    def __post_init__(self) -> None:
        least = {"batch": 1, "accumulate": 1, "steps": 1, "seed": 0, "val_every": 0, "sample_every": 0, "prefetch": 0}
        for name, lowest in least.items():
            if not lowest <= getattr(self, name) < 2**63:
                raise ExperimentError(f"{name} is {getattr(self, name)}; expected a whole number from {lowest}")
        if self.val_every and not self.val_split:
            raise ExperimentError("val_every needs a part of the corpus held out, and val_split is 0; expected more")


def config_from(value: Any) -> TrainConfig:
    """The config as a manifest holds it.

    Raises:
        ExperimentError: it is not a trainer's config.
    """
    try:
        return msgspec.convert(value, TrainConfig)
    except msgspec.ValidationError as error:
        raise ExperimentError(f"the trainer config of this run is damaged: {error}") from error


def build(config: TrainConfig, files: Sequence[Path], *, prefetch: int = 0, initial: bool = True) -> Experiment:
    """The experiment of a config, at its initial state.

    Args:
        files: the corpora, then further sources that substitutions draw from.
        prefetch: batches drawn ahead by a thread; no effect on what they are.
        initial: False: without initial weights, for an experiment that a state will be restored to.

    Raises:
        DataError: a corpus can't be read or is too short, or an alteration of the data is impossible.
        ExperimentError: there is no corpus, or nothing to freeze, or nothing left to train.
    """
    if not files:
        raise ExperimentError("this run names no data file; expected its corpus")
    here = world()
    sampler: WindowSampler | Shard = stream(config, [Corpus.open(path) for path in files], here.size)
    if here.size > 1:
        sampler = Shard(sampler, here.rank, config.batch * config.accumulate)
    model = build_model(config.model, config.seed, initial)
    _freeze(model, config.freeze)
    mx.random.seed(config.seed)
    if here.size > 1:  # a mask of its own for each rank
        set_random_key(np.array(mx.random.split(mx.random.key(config.seed), here.size)[here.rank]).tolist())
    settings = {
        "betas": [config.adamw.beta1, config.adamw.beta2],
        "eps": config.adamw.eps,
        "weight_decay": config.adamw.weight_decay,
        "bias_correction": config.adamw.bias_correction,
    }
    optimizer = adamw(make_schedule(config.schedule), settings, config.adam_changes, config.drifts)
    return Experiment(
        model,
        optimizer,
        masked_loss if any(entry.how == "ignore" for entry in config.relabellings) else loss,
        Prefetcher(sampler, prefetch) if prefetch else sampler,
        StepOptions(
            clip=config.clip,
            accumulate=config.accumulate,
            compile=config.compile,
            deterministic=config.deterministic,
        ),
    )


def stream(config: TrainConfig, corpora: Sequence[Corpus], ranks: int = 1) -> WindowSampler:
    """The data stream of a config, for all ranks together. Raises DataError."""
    return training_windows(
        corpora,
        batch=config.batch * config.accumulate * ranks,
        ctx=config.model.ctx,
        seed=config.seed,
        val_split=config.val_split,
        weights=[share.weight for share in config.mixture],
        substitutions=config.substitutions,
        relabellings=config.relabellings,
        repetitions=config.repetitions,
        skipped=config.skipped,
    )


def _freeze(model: nn.Module, paths: Sequence[str]) -> None:
    modules = {path: module for path, module in model.named_modules() if path and module.parameters()}
    for path in paths:
        if path not in modules:
            raise ExperimentError(f"freeze names {path!r}; expected a part of the model: {', '.join(sorted(modules))}")
        modules[path].freeze()
    if paths and not tree_flatten(model.trainable_parameters()):
        raise ExperimentError(f"freeze is {', '.join(paths)}, which leaves nothing to train; expected less")
