"""From a manifest back to an experiment. Only this module decides what code a run may name.

A run of the built-in trainer is rebuilt from its config by this package's own code. Any other run names a factory,
and it is imported only when the user passes that very name.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import math
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import DataError, ExperimentError, WorkbenchError
from .manifest import DataFile, Manifest
from .trainer.corpus import Corpus

if TYPE_CHECKING:
    from .experiment import Experiment


def rebuild(manifest: Manifest, folder: Path, factory: str | None = None) -> Experiment:
    """Builds the experiment that the manifest describes, for a state to be restored to.

    Args:
        folder: the run's folder.
        factory: "module:function", the user's consent to import it; must be the one that the manifest names. Where that
            names none: a function, or "script.py", which is run up to its Recorder.

    Raises:
        ExperimentError: the manifest names no way to rebuild it, or another factory.
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

        experiment = _from_factory({"factory": factory} | manifest.rebuild, factory)
        if not manifest.stored_batches:
            return experiment
        return with_stored_batches(Run(folder), experiment, len(manifest.segments) - 1)
    raise ExperimentError(
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
    return [*(["step_fn=step"] if manifest.own_step else []), *(["extra=extra"] if manifest.extra else [])]


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


def _from_factory(description: dict[str, Any], consent: str | None) -> Experiment:
    name = description.get("factory")
    if consent is not None and consent.endswith(".py") and name == consent:
        from .script import experiment_of  # imports MLX

        return experiment_of(Path(consent), description.get("argv", ()))
    if consent is None:
        raise ExperimentError(
            f"this run is rebuilt by the factory {name!r}, and code is imported only with your consent; "
            f"pass factory={name!r} (--factory {name}) if you trust it. It will be called with "
            f"{description.get('arguments') or 'no arguments'}"
        )
    if consent != name:
        raise ExperimentError(f"this run names the factory {name!r}, not {consent!r}")
    from .experiment import Experiment  # imports MLX
    from .script import Handed, handing_over

    module, _, function = str(name).partition(":")
    arguments = description.get("arguments", {})
    here = os.getcwd()  # a module beside the user, as `python -m` finds it
    added = here not in sys.path
    if added:
        sys.path.insert(0, here)
    try:
        with handing_over():  # a recorder there would begin a run, or go on with one
            build = getattr(importlib.import_module(module), function)
    except Handed:
        raise ExperimentError(
            f"the factory {name!r} can't be imported here: the module makes a Recorder as it is imported; put what "
            "trains under `if __name__ == '__main__':`, or name the script itself"
        ) from None
    except Exception as error:  # a module of the user's, which may fail in any way
        raise ExperimentError(f"the factory {name!r} can't be imported here: {error}") from error
    finally:
        if added:
            sys.path.remove(here)
    try:
        with handing_over():
            experiment = build(**arguments)
    except Handed as handed:
        experiment = handed.experiment
    except WorkbenchError:
        raise
    except Exception as error:  # the user's code again
        raise ExperimentError(
            f"the factory {name!r} failed with the arguments {arguments}: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(experiment, Experiment):
        raise ExperimentError(f"the factory {name!r} returned a {type(experiment).__name__}; expected an Experiment")
    return experiment
