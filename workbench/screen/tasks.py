"""What a panel can be asked to do with a step that takes time: which call of `Run` does it, and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..work import messages
from .controls import CAUSE, STEP
from .results import Found


@dataclass(frozen=True)
class Task:
    """A kind of slow work.

    Attributes:
        method: of `Run`, and the name of the request. All take `segment`, `factory`, `other_environment`, `progress`.
        keep: puts the result where it belongs.
        kept: the names of what in `Found` is then of this result.
        done: what has happened to the step then.
        view: where the result is seen.
        why: what it is done for, where it follows on something else; said before its progress.
    """

    method: str
    keep: Callable[[Found, Any], None]
    kept: tuple[str, ...]
    done: str
    view: str
    why: str = ""


def _keep_trace(found: Found, trace: Any) -> None:
    found.trace = trace


def _keep_context(found: Found, context: Any) -> None:
    found.context, found.trace, found.onset = context, context.trace, ""


def _keep_verdict(found: Found, verdict: Any) -> None:
    found.verdict = verdict


REPLAY = Task(messages.REPLAY, _keep_trace, ("trace",), "replayed", STEP)
CONTEXT = Task(
    *(messages.CONTEXT, _keep_context, ("context", "trace"), "replayed with the steps before it", CAUSE),
    why="The verdict is there. Measuring the steps before it, for “Where it began”: ",
)
AUTOPSY = Task(messages.AUTOPSY, _keep_verdict, ("verdict",), "examined", CAUSE)
WHATIF = Task(messages.WHATIF, Found.add, ("experiments",), "replayed with a change", CAUSE)
