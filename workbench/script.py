"""An experiment from the script that recorded it: run again up to its Recorder, which hands over what it was given.

So a loop needs no factory. The recorder raises instead of recording while code of the user's is run here, however
deep: a script may ask for a fork of a run that another script rebuilds. Knows no run.
"""

from __future__ import annotations

import contextlib
import os
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import ExperimentError, WorkbenchError

if TYPE_CHECKING:
    from .experiment import Experiment

_wanted = 0  # how many rebuilds are under way, one within the other


class Handed(BaseException):
    """No `Exception`: a script's own `except` must let it pass."""

    def __init__(self, experiment: Experiment) -> None:
        super().__init__()
        self.experiment = experiment


def offer(experiment: Experiment) -> None:
    """What a recorder calls with its experiment before it touches its folder. Returns, unless a script is run here."""
    if _wanted:
        raise Handed(experiment)


def description() -> dict[str, Any]:
    """The script that this process runs, and its arguments; empty in a notebook or a prompt."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    return {"script": str(Path(path).resolve()), "argv": sys.argv[1:]} if path and path.endswith(".py") else {}


def experiment_of(path: Path, argv: Sequence[str]) -> Experiment:
    """The experiment of the first recorder that a script makes. What the script prints goes to stderr.

    Raises:
        ExperimentError: there is no such script, it fails, or it ends without a recorder.
    """
    try:
        code = compile(path.read_bytes(), str(path), "exec")
    except (OSError, SyntaxError, ValueError) as error:
        raise ExperimentError(f"the script {path} can't be run here: {error}") from error
    module = types.ModuleType("__main__")
    module.__file__ = str(path)
    try:
        with handing_over(), _running(module, path, argv):
            exec(code, module.__dict__)
    except Handed as handed:
        return handed.experiment
    except WorkbenchError:
        raise
    except (Exception, SystemExit) as error:  # the user's code, which may fail in any way
        raise ExperimentError(
            f"the script {path} failed with the arguments {list(argv)} before it made a Recorder: "
            f"{type(error).__name__}: {error}"
        ) from error
    raise ExperimentError(f"the script {path} ended without making a Recorder (arguments {list(argv)})")


@contextlib.contextmanager
def handing_over() -> Iterator[None]:
    """Within: every recorder that is made raises `Handed`, and none records."""
    global _wanted
    _wanted += 1
    try:
        yield
    finally:
        _wanted -= 1


@contextlib.contextmanager
def _running(module: types.ModuleType, path: Path, argv: Sequence[str]) -> Iterator[None]:
    """Within: as if Python had been started with the script. Afterwards as before, in the same working folder."""
    folder = os.getcwd()
    before = sys.modules["__main__"], sys.argv, list(sys.path)
    sys.modules["__main__"], sys.argv = module, [str(path), *argv]
    sys.path.insert(0, str(path.resolve().parent))
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.chdir(folder)
        sys.modules["__main__"], sys.argv, sys.path[:] = before
