"""From settings and pinned files to the experiment that `mlx_lm.lora` would train, with nothing of mlx-lm changed for
good.

Knows mlx-lm and the core; nothing of recording or runs.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import importlib.metadata
import io
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
import msgspec
from mlx.utils import tree_flatten

from ..errors import ExperimentError, WorkbenchError
from ..experiment import Experiment, StepOptions
from .examples import Batches, Examples, ExampleSampler
from .pinned import ADAPTER, DATA, MODEL, linked
from .settings import PACKAGES, complete, mlx_lm
from .shuffles import Evaluations, Shuffles
from .tuning_loss import tuning_loss

_OPTIMIZERS = {  # by mlx-lm's names
    "adam": optim.Adam,
    "adamw": optim.AdamW,
    "muon": optim.Muon,
    "sgd": optim.SGD,
    "adafactor": optim.Adafactor,
}


@dataclass(frozen=True)
class Tuning:
    """A fine-tuning job, ready for its first step.

    Attributes:
        settings: mlx-lm's, complete.
        experiment: its sampler is an `ExampleSampler`.
        validation: batches of the validation set; None: there is nothing to evaluate.
        test: mlx-lm's test set, if the settings ask for it.
        dated: whether the tokens depend on the date, for the model's chat template prints it.
    """

    settings: dict[str, Any]
    experiment: Experiment
    validation: Batches | None
    test: Examples | None
    dated: bool

    @property
    def sampler(self) -> ExampleSampler:
        assert isinstance(self.experiment.sampler, ExampleSampler)
        return self.experiment.sampler

    def validation_loss(self, iteration: int) -> float | None:
        """The loss of the evaluation that mlx-lm makes before micro-batch `iteration`, by its own function and in its
        order; None where it makes none. Neither state nor random numbers are touched."""
        shuffles = self.sampler.shuffles
        if self.validation is None or not shuffles.evaluations.before(iteration):
            return None
        batches = self.validation.in_order([int(number) for number in shuffles.validation(iteration)])
        return self._evaluated(self.validation, self.settings["val_batches"], iterate_batches=lambda **_: batches)

    def test_loss(self) -> float:
        """The loss on the test set, by mlx-lm's own function. Its batches come unshuffled: numpy's random state, which
        decides their order in mlx-lm and with it the last bits of the sum, is not this job's."""
        batches = Batches(self.test, self.settings["batch_size"], self.settings["max_seq_length"])
        stream = batches.in_order(range(len(batches)))
        return self._evaluated(batches, self.settings["test_batches"], iterate_batches=lambda **_: stream)

    def _evaluated(self, dataset: Any, count: int, **more: Any) -> float:
        settings, model = self.settings, self.experiment.model
        sizes = {"batch_size": settings["batch_size"], "max_seq_length": settings["max_seq_length"]}
        try:
            return float(
                mlx_lm("tuner.trainer").evaluate(model=model, dataset=dataset, num_batches=count, **sizes, **more)
            )
        finally:
            model.train()


def description(
    settings: Mapping[str, Any], names: Sequence[str], began: str | None, options: Mapping[str, bool]
) -> dict[str, Any]:
    """What a manifest says of such a run, under `rebuild`.

    Args:
        names: places of the data files, in the manifest's order; see `pinned.pin`.
        began: when it was recorded, local time in ISO form, if the tokens depend on it; see `Tuning.dated`.
        options: compile and deterministic, of `StepOptions`.
    """
    versions = {package: importlib.metadata.version(package) for package in PACKAGES}
    return {"kind": "mlx-lm", "config": dict(settings), "files": list(names), "began": began} | {
        "versions": versions,
        "options": dict(options),
    }


class _Options(msgspec.Struct, forbid_unknown_fields=True):
    compile: bool
    deterministic: bool


class _Description(msgspec.Struct):
    config: dict[str, Any]
    files: list[str]
    began: datetime.datetime | None
    options: _Options


def rebuilt(rebuild: Mapping[str, Any], files: Sequence[Path]) -> Tuning:
    """The job that a manifest describes, at its start.

    Args:
        rebuild: the `description` in the manifest.
        files: its data files, verified, in the manifest's order.

    Raises:
        ExperimentError: the description is damaged, mlx-lm is missing, or it refuses the job.
        DataError: files and places do not go together.
    """
    known = _described(rebuild)
    settings = complete(known.config)
    with linked(known.files, files) as folder, _refusals_named(), contextlib.redirect_stdout(io.StringIO()):
        return _tuning(settings, folder, known.began, StepOptions(**msgspec.to_builtins(known.options)))


def stream(rebuild: Mapping[str, Any], files: Sequence[Path]) -> tuple[ExampleSampler, Any]:
    """The batches of the job that a manifest describes, and its tokenizer; no weights are read.

    Args, errors: as `rebuilt`. The files are not verified here: the hash of a batch proves what was read.
    """
    known = _described(rebuild)
    settings, kept = complete(known.config), list[tuple[str, Path]]()
    if len(known.files) == len(files):
        kept = [pair for pair in zip(known.files, files, strict=True) if pair[1].suffix != ".safetensors"]
    names, places = zip(*kept, strict=True) if kept else (known.files, files)
    with linked(names, places) as folder, _refusals_named(), contextlib.redirect_stdout(io.StringIO()):
        utils, model = mlx_lm("utils"), folder / MODEL
        ends = utils.load_config(model).get("eos_token_id", None)
        tokenizer = _Dated(utils.load_tokenizer(model, {"trust_remote_code": False}, eos_token_ids=ends), known.began)
        return _sampler(settings, _sets(settings, folder, tokenizer))[0], tokenizer


def _described(rebuild: Mapping[str, Any]) -> _Description:
    try:
        return msgspec.convert({key: rebuild.get(key) for key in _Description.__struct_fields__}, _Description)
    except msgspec.ValidationError as error:
        raise ExperimentError(
            f"the manifest is damaged: {error}; expected the description of a run of mlx-lm"
        ) from error


def _sets(settings: Mapping[str, Any], folder: Path, tokenizer: Any) -> list[Examples | None]:
    """mlx-lm's training, validation and test set; None: it is empty."""
    arguments = types.SimpleNamespace(**{**settings, "data": str(folder / DATA)})
    sets = mlx_lm("tuner.datasets").load_dataset(arguments, tokenizer)
    return [mlx_lm("tuner.datasets").CacheDataset(one) if len(one) else None for one in sets]


def _sampler(settings: Mapping[str, Any], sets: Sequence[Examples | None]) -> tuple[ExampleSampler, Batches | None]:
    """The stream of the training set, and the batches of the validation set if it is evaluated."""
    training, validating, _ = sets
    cut = partial(Batches, size=settings["batch_size"], longest=settings["max_seq_length"])
    batches = cut(training)
    validation = cut(validating) if validating is not None and settings["val_batches"] else None
    evaluations = Evaluations(len(validation or ()), settings["steps_per_eval"], settings["iters"])
    shuffles = Shuffles(settings["seed"], len(batches), evaluations)
    return ExampleSampler(batches, shuffles, settings["grad_accumulation_steps"]), validation


@contextlib.contextmanager
def _refusals_named() -> Iterator[None]:
    """What mlx-lm, the model's config or a tokenizer raise is of any kind, and all of it is about the settings."""
    try:
        yield
    except WorkbenchError:
        raise
    except Exception as error:
        said = " ".join(str(error).split())
        raise ExperimentError(f"mlx-lm refuses this job: {type(error).__name__}: {said}") from error


def _tuning(settings: dict[str, Any], folder: Path, date: datetime.datetime | None, options: StepOptions) -> Tuning:
    model, tokenizer = mlx_lm("utils").load(str(folder / MODEL), tokenizer_config={"trust_remote_code": False})
    tokenizer = _Dated(tokenizer, date)
    sets = _sets(settings, folder, tokenizer)
    mx.random.seed(settings["seed"])
    _make_trainable(model, settings)
    if settings["resume_adapter_file"] is not None:
        weights: Any = mx.load(str(folder / ADAPTER), format="safetensors")
        model.load_weights(list(weights.items()), strict=False)
    if settings["grad_checkpoint"]:
        _checkpoint_gradients(model)
    model.train()
    mx.eval(model.parameters())  # read from the linked files, which are gone soon
    if not dict(tree_flatten(model.trainable_parameters())):
        raise ExperimentError("no parameter of this model is trained; expected other num_layers or lora_parameters")
    sampler, validation = _sampler(settings, sets)
    experiment = Experiment(model, _optimizer(settings), tuning_loss, sampler, options)
    return Tuning(settings, experiment, validation, sets[2], tokenizer.dated)


def _make_trainable(model: Any, settings: dict[str, Any]) -> None:
    """As mlx-lm's `train_model`: freezes the model but for its last layers, or gives them adapters."""
    model.freeze()
    if settings["num_layers"] > len(model.layers):
        raise ExperimentError(
            f"num_layers is {settings['num_layers']}, and the model has {len(model.layers)} layers; "
            "expected at most as many (-1: all)"
        )
    if settings["fine_tune_type"] == "full":
        for layer in model.layers[-max(settings["num_layers"], 0) :]:
            layer.unfreeze()
    else:
        use_dora = settings["fine_tune_type"] == "dora"
        convert = mlx_lm("tuner.utils").linear_to_lora_layers
        convert(model, settings["num_layers"], settings["lora_parameters"], use_dora=use_dora)


def _checkpoint_gradients(model: Any) -> None:
    """mlx-lm's `grad_checkpoint` changes the class of a layer, for every model of this process and for good. So the
    layers get a class of their own first, which is what it changes then."""
    kind: type = type(model.layers[0])
    own = type(kind.__name__, (kind,), {})
    for module in model.modules():
        if type(module) is kind:
            module.__class__ = own
    mlx_lm("tuner.trainer").grad_checkpoint(model.layers[0])


def _optimizer(settings: Mapping[str, Any]) -> optim.Optimizer:
    name = str(settings["optimizer"]).lower()
    if name not in _OPTIMIZERS:
        raise ExperimentError(f"optimizer is {name!r}; expected one of {', '.join(_OPTIMIZERS)}")
    schedule = settings["lr_schedule"]
    rate = mlx_lm("tuner.utils").build_schedule(schedule) if schedule else settings["learning_rate"]
    return _OPTIMIZERS[name](learning_rate=rate, **settings["optimizer_config"].get(name, {}))


class _Dated:
    """A tokenizer whose chat template prints the day of the recording as today: some templates print today's date,
    and a replay on another day would have other tokens.

    Raises:
        ExperimentError: the template prints the date, and transformers has no place where it could be pinned.
    """

    def __init__(self, tokenizer: Any, date: datetime.datetime | None) -> None:
        self._tokenizer, self._clock = tokenizer, types.SimpleNamespace(now=lambda: date)
        self.dated = "strftime_now" in str(tokenizer.chat_template)
        self._home: Any = importlib.import_module("transformers.utils.chat_template_utils")
        if self.dated and date is None:
            raise ExperimentError("the manifest is damaged: it has no date (began), which the chat template prints")
        if self.dated and not hasattr(self._home, "datetime"):
            raise ExperimentError(
                "the model's chat template prints today's date, and this version of transformers leaves no way to pin "
                "it; expected a template with a date of its own"
            )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
        if not self.dated:
            return self._tokenizer.apply_chat_template(*args, **kwargs)
        clock = self._home.datetime  # templates see plain values only, so the function itself can't be handed to them
        self._home.datetime = self._clock
        try:
            return self._tokenizer.apply_chat_template(*args, **kwargs)
        finally:
            self._home.datetime = clock
