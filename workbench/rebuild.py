"""From a manifest back to an experiment. Only this module decides what code a run may name.

A run of the built-in trainer is rebuilt from its config by this package's own code. Any other run names a factory,
and it is imported only when the user passes that very name.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import math
import re
import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from .errors import DataError, ExperimentError, FactoryNeeded
from .manifest import DataFile, Manifest
from .own_scripts.named_script import named
from .own_scripts.wanted import Wanted
from .trainer.corpus import Corpus

if TYPE_CHECKING:
    from .experiment import Experiment

log = logging.getLogger("workbench")


def rebuild(
    manifest: Manifest, folder: Path, factory: str | None = None, notices: list[str] | None = None
) -> Experiment:
    """Builds the experiment that the manifest describes, for a state to be restored to.

    Args:
        folder: the run's folder.
        factory: "module:function", the user's consent to import it; must be the one that the manifest names. Where that
            names none: a function, or "script.py" (or "package.module"), which is run up to its Recorder.
        notices: gets a sentence on each file that the user's code would have written over, as it is found; None: they
            are logged.

    Raises:
        FactoryNeeded: the code of the user's that rebuilds it is not named.
        ExperimentError: the manifest names another factory, or what is named rebuilds nothing.
        DataError: a data file is missing or has changed.
    """
    files = [locate(entry, folder) for entry in manifest.data]
    kind = manifest.rebuild.get("kind")
    if kind == "trainer" and factory is not None:
        raise ExperimentError("this run was recorded by `workbench train` and is rebuilt by it; leave the factory out")
    if kind == "trainer":
        from .trainer.recipe import build, config_from  # imports MLX

        config = config_from(manifest.rebuild.get("config"))
        _refuse_other_size(config.model, manifest)
        return build(config, files, initial=False)
    if kind == "mlx-lm" and factory is not None:
        raise ExperimentError("this run was recorded by `workbench mlx-lm` and is rebuilt by it; leave the factory out")
    if kind == "mlx-lm":
        from .finetune.tuned import rebuilt  # imports MLX, and mlx-lm when it is called

        return rebuilt(manifest.rebuild, files).experiment
    if kind == "factory" or factory is not None:  # named by the run, or by the user for a run that names none
        from .run import Run
        from .stored_batches import with_stored_batches  # imports MLX

        said: list[str] = [] if notices is None else notices
        experiment = _from_factory({"factory": factory} | manifest.rebuild, factory, manifest, folder, said)
        for notice in said if notices is None else ():
            log.warning(notice)
        if not manifest.stored_batches:
            return experiment
        return with_stored_batches(Run(folder), experiment, len(manifest.segments) - 1)
    raise FactoryNeeded(
        "this run was recorded from a loop of your own that named no factory; pass the experiment, built as for "
        f"recording: run.replay(step, experiment={experiment_call(manifest)}); or name a function that builds it, or "
        f"the script that recorded it: --factory module:function or --factory {script_of(manifest)}"
    )


def script_of(manifest: Manifest) -> str:
    """The script that recorded a run, as one would name it from here: it is run only if it is named."""
    recorded = manifest.rebuild.get("script")
    if not isinstance(recorded, str) or not recorded.endswith(".py"):
        return "script.py"
    with contextlib.suppress(OSError, ValueError):
        recorded = str(Path(recorded).relative_to(Path.cwd()))
    return shlex.quote(recorded)


def experiment_call(manifest: Manifest) -> str:
    """How an `Experiment` of this run is written down in the loop that recorded it: such as
    ``wb.Experiment(model, optimizer, loss_fn, step_fn=step)``. The names are those of the documentation."""
    arguments = [*parts_of(manifest), *own_parts(manifest)]
    if other_options(manifest):
        arguments.append(f"options=wb.StepOptions({', '.join(_unlike(manifest, _OPTIONS))})")
    return f"wb.Experiment({', '.join(arguments)})"


def parts_of(manifest: Manifest) -> list[str]:
    """What a recorder of this run is given by place. Where batches were stored the loop hands them over itself, or
    can."""
    return ["model", "optimizer", "loss_fn", *([] if manifest.stored_batches else ["sampler"])]


def own_parts(manifest: Manifest) -> list[str]:
    """A step function and state of the loop's own, as arguments by name."""
    names = {name: re.sub("[^0-9A-Za-z_]", "_", name) for name in manifest.extra}
    kept = ", ".join(f"{name!r}: {own}" for name, own in names.items())
    return [*(["step_fn=step"] if manifest.own_step else []), *([f"extra={{{kept}}}"] if kept else [])]


def other_options(manifest: Manifest) -> list[str]:
    """The options of a step that are not what a recorder takes by default, as arguments by name."""
    return _unlike(manifest, _OPTIONS | {"compile": not manifest.own_step})


_OPTIONS = {"clip": None, "accumulate": 1, "compile": True, "deterministic": True}  # as `StepOptions` has them


def _unlike(manifest: Manifest, usual: dict[str, Any]) -> list[str]:
    found = {name: manifest.options.get(name, usual[name]) for name in usual}
    return [f"{name}={value!r}" for name, value in found.items() if value != usual[name]]


def software_differences(manifest: Manifest) -> list[str]:
    """A phrase where the package that a run is rebuilt by has another version here, such as ``mlx-lm: recorded 0.32.2,
    here 0.33.0``: its model and loss would be other code. Tokenizers need no phrase, for the batch's hash proves the
    tokens; and a package that is missing altogether is `rebuild`'s to name."""
    versions = manifest.rebuild.get("versions")
    recorded = versions.get("mlx-lm") if isinstance(versions, dict) else None
    try:
        here = importlib.metadata.version("mlx-lm")
    except importlib.metadata.PackageNotFoundError:
        return []
    return [] if recorded in (None, here) else [f"mlx-lm: recorded {recorded}, here {here}"]


def _refuse_other_size(config: Any, manifest: Manifest) -> None:
    """Before anything is allocated: a damaged size may be any number."""
    from .trainer.model import parameter_count

    described = parameter_count(config)
    listed = sum(math.prod(one.shape) for one in manifest.parameters)
    if described != listed:
        raise ExperimentError(
            f"the trainer config of this run is damaged: it describes a model of {described} parameters; expected "
            f"{listed}, as the manifest lists"
        )


def locate(entry: DataFile, folder: Path) -> Path:
    """The data file that the manifest describes, found as by `find` and verified by size and SHA-256.

    Raises:
        DataError: it is missing, or what is there has changed.
    """
    place = find(entry, folder)
    Corpus.open(place).verify({"bytes": entry.bytes, "sha256": entry.sha256})
    return place


def find(entry: DataFile, folder: Path) -> Path:
    """Where the data file that the manifest describes is, not verified.

    A file with an absolute path is looked for where it was; if nothing is there any more, under its name in the run's
    folder and beside it. A relative path starts in the run's folder; a mere name is looked for beside it, too.

    Raises:
        DataError: it is nowhere, or a relative path leads out of the run.
    """
    recorded = Path(entry.path)
    if ".." in recorded.parts and not recorded.is_absolute():
        raise DataError(f"the manifest of {folder} names the data file {entry.path}, outside of the run; expected none")
    places = [folder / recorded]  # an absolute path stays as it is
    if recorded.is_absolute():
        places.append(folder / recorded.name)
    if recorded.is_absolute() or len(recorded.parts) == 1:
        places.append(folder.resolve().parent / recorded.name)
    for place in places:
        if place.exists():
            return place
    others = [place for place in places if place.absolute() != places[0].absolute()]
    raise DataError(
        f"the data file {entry.path} of {folder} is missing ({entry.bytes} bytes, sha256 {entry.sha256}); "
        f"put it back{f', or copy it to {others[-1]}' if others else ''}"
    )


def _from_factory(
    description: dict[str, Any], consent: str | None, manifest: Manifest, folder: Path, notices: list[str]
) -> Experiment:
    name = description.get("factory")
    if consent is None:
        raise FactoryNeeded(
            f"this run is rebuilt by the factory {name!r}, and code is imported only with your consent; "
            f"pass factory={name!r} (--factory {name}) if you trust it. It will be called with "
            f"{description.get('arguments') or 'no arguments'}"
        )
    if consent != name:
        raise ExperimentError(f"this run names the factory {name!r}, not {consent!r}")
    from .script import experiment_by, experiment_of  # imports MLX

    script = named(consent, manifest.rebuild)
    argv = description.get("argv", ())
    recorded = Path(str(manifest.rebuild.get("script", ""))).name
    number = manifest.rebuild.get("recorder") if script is not None and script.path.name == recorded else None
    wanted = Wanted(folder, manifest.run, number if isinstance(number, int) else None, partial(unlike_run, manifest))
    if script is not None:
        return experiment_of(script, argv, wanted, notices)
    return experiment_by(consent, description.get("arguments", {}), argv, wanted, notices)


def unlike_run(manifest: Manifest, experiment: Experiment) -> list[str]:
    """In what an experiment is not the one that a run recorded, in phrases: options, hyperparameters and parts."""
    from .capture import layers_of  # imports MLX
    from .hyperparameters import describe_optimizer, other_optimizer, other_options, other_parts

    found = other_options(msgspec.to_builtins(experiment.options), manifest.options)
    found += other_optimizer(describe_optimizer(experiment.optimizer), manifest.optimizer)
    owned = layers_of(experiment.model)
    if owned.keys() == manifest.owned.keys() and owned != manifest.owned:  # other layers: `Stepper` names them
        found.append("the model's layers own other parameters than recorded")
    return found + other_parts(experiment, manifest)
