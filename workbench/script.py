"""An experiment from the code that recorded it: a script, run again up to its Recorder, or a function that is called.

So a loop needs no factory. The recorder of the run hands over what it was given instead of recording, however deep: a
script may ask for a fork of a run that another script rebuilds. What the code would delete or write over stays as it
is (`own_scripts.guard`), and its functions run where it ran (`own_scripts.script_place`). Knows no run but its folder.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import ExperimentError, WorkbenchError
from .own_scripts import guard as guards
from .own_scripts.guard import Guard, Refused
from .own_scripts.named_script import Script, module_of
from .own_scripts.script_place import ScriptPlace
from .own_scripts.stopped import Stopped
from .own_scripts.users_code import described
from .own_scripts.wanted import Wanted
from .recording.passed_over import PassedOver, Reached

if TYPE_CHECKING:
    from .experiment import Experiment

_made = 0  # recorders that this process made to record


class Handed(BaseException):
    """No `Exception`: a script's own `except` must let it pass."""


class _Rebuild:
    """One that is under way.

    Attributes:
        handed: what the recorder was given, once it is made.
        stopped: where.
    """

    def __init__(self, wanted: Wanted | None) -> None:
        self.wanted = wanted
        self.handed: Experiment | None = None
        self.stopped: Stopped | None = None

    def offered(self, experiment: Experiment, path: Path) -> bool:
        if self.wanted is not None and not self.wanted.is_it(experiment, path):
            return True
        self.handed, self.stopped = experiment, Stopped(sys._getframe(2), __file__)
        raise Handed


_rebuilds: list[_Rebuild] = []  # one within the other


def offer(recorder: Any) -> bool:
    """What a recorder calls with itself, having its `experiment`, before it touches its folder.

    Returns:
        Whether it is to stand aside: a script is run here, and this is a recorder of another run.

    Raises:
        Handed: a script is run here, and this is its recorder.
    """
    global _made
    if not _rebuilds:
        _made += 1
        return False
    aside = _rebuilds[-1].offered(recorder.experiment, recorder.path)
    if aside:
        recorder.__class__ = PassedOver
    return aside


def rebuilding() -> bool:
    """Whether code of yours is being run for a replay: up to its Recorder, or a step of it.

    For what a script does before its Recorder and a replay must not do again:

        if not wb.rebuilding():
            shutil.rmtree(out)
    """
    return bool(_rebuilds) or guards.active()


def description() -> dict[str, Any]:
    """The script that this process runs, its arguments, and which recorder of it this is, from 1; also the module's
    name if it was run by `python -m`. Empty in a notebook or a prompt."""
    main = sys.modules.get("__main__")
    path = getattr(main, "__file__", None)
    if not path or not path.endswith(".py"):
        return {}
    spec = getattr(main, "__spec__", None)
    module = {} if spec is None else {"module": spec.name}
    return {"script": str(Path(path).resolve()), "argv": sys.argv[1:], "recorder": _made} | module


def experiment_of(script: Script, argv: Sequence[str], wanted: Wanted, notices: list[str]) -> Experiment:
    """The experiment of a script's recorder. What the script prints goes to stderr.

    Args:
        wanted: which of its recorders.
        notices: gets a sentence on each file that it would have written over.

    Raises:
        ExperimentError: there is no such script, it fails, it would destroy something, or it ends without the recorder.
    """
    path = script.path
    try:
        code = compile(path.read_bytes(), str(path), "exec")
    except (OSError, SyntaxError, ValueError) as error:
        raise ExperimentError(f"the script {path} can't be run here: {error}") from error
    main = types.ModuleType("__main__")
    main.__file__ = str(path)
    if script.module:
        main.__package__ = script.module.rpartition(".")[0]
        main.__spec__ = importlib.util.spec_from_file_location(script.module, path)
    place = _place(f"the script {path}", wanted, notices, [str(path), *argv], [str(script.root)], main)
    given = f"(arguments {list(argv)})"

    def failed(error: BaseException) -> str:
        said = f"the script {path} failed with the arguments {list(argv)} before it made a Recorder: {_said(error)}"
        name = "" if script.module else module_of(path)
        if name and isinstance(error, ImportError) and "relative import" in str(error):
            root = path.resolve().parents[name.count(".")]
            said += f". It lies in a package: name it as `python -m` does, from {root}: --factory {name} (factory=)"
        return said

    found = _run(lambda: exec(code, main.__dict__), place, wanted, f"the script {path}", failed)
    if isinstance(found, _Rebuild):
        assert found.handed is not None
        return place.around(found.handed)
    if (only := wanted.only()) is not None:  # whoever compares it says in what it is unlike
        return place.around(only)
    if wanted.made:
        raise ExperimentError(wanted.sentence(f"the script {path}"))
    raise ExperimentError(f"the script {path} ended without making a Recorder {given}")


def experiment_by(
    name: str, arguments: Mapping[str, Any], argv: Sequence[str], wanted: Wanted, notices: list[str]
) -> Experiment:
    """What a function of a module returns, or hands to a Recorder; a module beside the user is found, as `python -m`
    finds it.

    Args:
        name: "module:function".
        arguments: that it is called with.
        argv: `sys.argv[1:]` meanwhile.
        wanted, notices: as for a script.

    Raises:
        ExperimentError: it can't be imported, fails, would destroy something, or returns something else.
    """
    from .experiment import Experiment  # imports MLX

    module, _, function = name.partition(":")
    who = f"the factory {name!r}"
    here = os.getcwd()
    place = _place(who, wanted, notices, [module, *argv], [] if here in sys.path else [here], None)

    def build() -> Any:
        return getattr(importlib.import_module(module), function)

    found = _run(build, place, None, who, lambda error: f"{who} can't be imported here: {_text(error)}")
    if isinstance(found, _Rebuild):
        raise ExperimentError(
            f"the factory {name!r} can't be imported here: the module makes a Recorder as it is imported; put what "
            "trains under `if __name__ == '__main__':`, or name the script itself"
        )

    def failed(error: BaseException) -> str:
        return f"{who} failed with the arguments {arguments}: {_said(error)}"

    experiment = _run(lambda: found(**arguments), place, wanted, who, failed)
    if isinstance(experiment, _Rebuild):
        experiment = experiment.handed
    elif experiment is None and wanted.made:
        if (experiment := wanted.only()) is None:
            raise ExperimentError(wanted.sentence(who))
    if not isinstance(experiment, Experiment):
        raise ExperimentError(f"the factory {name!r} returned a {type(experiment).__name__}; expected an Experiment")
    return place.around(experiment)


def _place(
    who: str,
    wanted: Wanted,
    notices: list[str],
    argv: Sequence[str],
    folders: Sequence[str],
    main: types.ModuleType | None,
) -> ScriptPlace:
    guard = Guard(wanted.run, who)
    guard.notices = notices
    return ScriptPlace(guard, argv, folders, main)


def _run(
    call: Callable[[], Any],
    place: ScriptPlace,
    wanted: Wanted | None,
    who: str,
    failed: Callable[[BaseException], str],
) -> Any:
    """What a call of the user's code returns, or the rebuild whose recorder it reached."""
    with _under_way(wanted) as rebuild:
        try:
            with place.within(), contextlib.redirect_stdout(sys.stderr):
                returned = call()
        except (Handed, Refused):
            returned = None
        except Reached as reached:
            assert wanted is not None  # else the first would have handed over
            if (only := wanted.only()) is None:
                raise ExperimentError(wanted.sentence(who, reached.path)) from None
            returned, rebuild.handed = None, only
        except (Exception, SystemExit) as error:  # which may fail in any way
            if rebuild.handed is None and not place.guard.refused:  # else it swallowed what stopped it
                if isinstance(error, WorkbenchError):
                    raise
                raise ExperimentError(failed(error)) from error
            returned = None
    if place.guard.refused:
        raise ExperimentError(place.guard.refused)
    if rebuild.handed is None:
        return returned
    place.stopped = rebuild.stopped
    return rebuild


@contextlib.contextmanager
def _under_way(wanted: Wanted | None) -> Iterator[_Rebuild]:
    """Within: a recorder that is made records nothing.

    Args:
        wanted: whose hands over what it was given, while the others stand aside; None: any does.
    """
    _rebuilds.append(_Rebuild(wanted))
    try:
        yield _rebuilds[-1]
    finally:
        _rebuilds.pop()


def _said(error: BaseException) -> str:
    return described(error) or f"{type(error).__name__}: {error}"


def _text(error: BaseException) -> str:
    return f"it ended with SystemExit: {error}" if isinstance(error, SystemExit) else str(error)
