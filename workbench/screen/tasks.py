"""What a panel can be asked to do with a step that takes time: which call of `Run` does it, and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .controls import CAUSE, STEP
from .results import Found


@dataclass(frozen=True)
class Task:
    """A kind of slow work.

    Attributes:
        method: of `Run`. All take `segment`, `factory`, `other_environment` and `progress`.
        keep: puts the result where it belongs.
        done: what has happened to the step then.
        view: where the result is seen.
    """

    method: str
    keep: Callable[[Found, Any], None]
    done: str
    view: str


def _keep_trace(found: Found, trace: Any) -> None:
    found.trace = trace


def _keep_context(found: Found, context: Any) -> None:
    found.context, found.trace, found.onset = context, context.trace, ""


def _keep_verdict(found: Found, verdict: Any) -> None:
    found.verdict = verdict


REPLAY = Task("replay", _keep_trace, "replayed", STEP)
CONTEXT = Task("context", _keep_context, "replayed with the steps before it", CAUSE)
AUTOPSY = Task("autopsy", _keep_verdict, "examined", CAUSE)
WHATIF = Task("whatif", Found.add, "replayed with a change", CAUSE)
