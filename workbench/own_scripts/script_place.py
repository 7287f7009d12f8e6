"""Where code of the user's runs for a replay: as in the process that recorded, for as long as its functions are called.

A step may import a module beside its script, read a file by a relative path, or ask `__main__` for a class: so the
search path, the arguments, the working folder and `__main__` that the script left are in place whenever one of its
functions runs, and this process' own at any other time. Knows nothing of runs.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..errors import ReplayError
from .guard import Guard, Refused
from .stopped import Stopped
from .users_code import BARE, HINT

if TYPE_CHECKING:
    from ..experiment import Experiment


_PLACE = "_workbench_place"  # attribute of a function that runs one of a script's: where


@dataclass
class ScriptPlace:
    """
    Args:
        guard: of the files that it may write to.
        argv: `sys.argv`.
        folders: that come first in `sys.path`.
        main: the script's module; None: it is no script that is run, and `__main__` is as it is.
        stopped: where the script was stopped, once it is.
    """

    guard: Guard
    argv: Sequence[str]
    folders: Sequence[str] = ()
    main: ModuleType | None = None
    stopped: Stopped | None = None
    _path: list[str] | None = field(default=None, init=False)
    _cwd: str | None = field(default=None, init=False)
    _inside: bool = field(default=False, init=False)

    @contextlib.contextmanager
    def within(self) -> Iterator[None]:
        """Within: as the script left it. Afterwards as before."""
        if self._inside:  # a function of the script's calls another
            yield
            return
        here = os.getcwd()
        main, argv, path = sys.modules["__main__"], sys.argv, list(sys.path)
        sys.path[:] = [*self.folders, *path] if self._path is None else self._path
        sys.argv = list(self.argv)
        if self.main is not None:
            sys.modules["__main__"] = self.main
        if self._cwd not in (None, here):
            with contextlib.suppress(OSError):  # gone since
                os.chdir(str(self._cwd))
        self._inside = True
        try:
            with self.guard.on():
                yield
        finally:
            self._inside = False
            self._path, self.argv = list(sys.path), sys.argv
            with contextlib.suppress(OSError):
                self._cwd = os.getcwd()
            if self._cwd != here:
                os.chdir(here)
            sys.modules["__main__"], sys.argv, sys.path[:] = main, argv, path

    def around(self, experiment: Experiment) -> Experiment:
        """The experiment, whose functions and sampler run within."""
        from ..plain_batches import PlainBatches  # imports MLX

        for name in ("loss_fn", "step_fn"):
            if (function := getattr(experiment, name)) is not None:
                setattr(experiment, name, self._around(function))
        if not isinstance(experiment.sampler, PlainBatches):
            experiment.sampler = _Sampler(experiment.sampler, self)
        return experiment

    def _around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function, updated=())
        def within(*args: Any, **kwargs: Any) -> Any:
            with self.calling():
                return function(*args, **kwargs)

        setattr(within, BARE, function)
        setattr(within, _PLACE, self)
        return within

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """`within`, for a call of one of its functions: an exception is marked as the user's.

        Raises:
            ReplayError: it would have destroyed something.
        """
        with self.within():
            try:
                yield
            except Refused as refused:
                raise ReplayError(str(refused)) from None
            except Exception as error:
                with contextlib.suppress(AttributeError, TypeError):
                    setattr(error, HINT, "" if self.stopped is None else self.stopped.on(error))
                raise


def ended(experiment: Experiment) -> str | None:
    """A sentence, if what is around the recorder has ended where a replay stops the script; None: nothing has."""
    place = getattr(experiment.step_fn or experiment.loss_fn, _PLACE, None)
    said = "" if place is None or place.stopped is None else place.stopped.around()
    return f"{said}." if said else None


class _Sampler:
    """A sampler that draws within a script's place; anything else is as it is."""

    _workbench_bare: Any = None

    def __init__(self, sampler: Any, place: ScriptPlace) -> None:
        self._workbench_bare, self._place = sampler, place

    def __iter__(self) -> _Sampler:
        return self

    def __next__(self) -> Any:
        with self._place.calling():
            return next(self._workbench_bare)

    def state_dict(self) -> Any:
        with self._place.calling():
            return self._workbench_bare.state_dict()

    def load_state_dict(self, state: Any) -> None:
        with self._place.calling():
            self._workbench_bare.load_state_dict(state)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._workbench_bare, name)
