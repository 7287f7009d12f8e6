"""Whose code a frame is, and a sentence on an exception that rose in code of the user's.

Knows Python's frames and where packages are installed; nothing of runs.
"""

from __future__ import annotations

import functools
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

from ..errors import ReplayError, WorkbenchError

BARE = "_workbench_bare"  # attribute of what runs a function or sampler of the user's in its place: that one
HINT = "_workbench_hint"  # attribute of an exception: a sentence on how it came about, where that is known


@functools.cache
def _installed() -> tuple[Path, ...]:
    paths = sysconfig.get_paths()
    return tuple(Path(paths[name]).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def is_users(path: Path) -> bool:
    """Whether a file of code, resolved, belongs to no installed package and is none of ours."""
    ours = Path(__file__).resolve().parent.parent
    return not any(path.is_relative_to(folder) for folder in (*_installed(), ours))


@functools.lru_cache(maxsize=1024)
def is_users_file(name: str) -> bool:
    """`is_users` of what a frame's code says it is from; `<string>` and frozen modules are nobody's."""
    return not name.startswith("<") and name.endswith(".py") and is_users(Path(name).resolve())


def bare(given: Any) -> Any:
    """The user's own function or sampler, if what is given runs that in its place (see `script_place`)."""
    stands_in = type(given) is FunctionType or BARE in vars(type(given))
    return vars(given).get(BARE, given) if stands_in else given


def line_of_the_user() -> tuple[str, int] | None:
    """The innermost line of the user's that this thread is executing, as file and number; None: there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_users_file(frame.f_code.co_filename):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return None


def raised_at(error: BaseException) -> tuple[str, int] | None:
    """The innermost line of the user's through which an exception came, as file and number; None: it came through
    none, and is ours."""
    found = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        if is_users_file(frame.f_code.co_filename):
            found = frame.f_code.co_filename, line
    return found


def described(error: BaseException) -> str | None:
    """A phrase on an exception of the user's code: its kind, its text, and where it rose. None: it is not of his."""
    where = raised_at(error)
    if where is None and hasattr(error, HINT):  # it came through a function of an installed package, which is run here
        *_, (frame, line) = traceback.walk_tb(error.__traceback__)
        where = frame.f_code.co_filename, line
    if where is None:
        return None
    kind = type(error).__name__
    said = str(error).strip()
    hint = getattr(error, HINT, "")
    return f"{kind}{f': {said}' if said else ''} ({where[0]}, line {where[1]}){f'. {hint}' if hint else ''}"


@contextmanager
def performing(step: int) -> Iterator[None]:
    """Within, code of the user's performs a step of a replay, or draws its batch.

    Raises:
        ReplayError: it raised an exception, which is named with its file and line. One that came through no line of the
            user's is left as it is.
    """
    try:
        yield
    except (WorkbenchError, StopIteration):
        raise
    except Exception as error:
        said = described(error)
        if said is None:
            raise
        raise ReplayError(f"step {step} could not be replayed: the code of the run's own raised {said}") from error
