"""Training or evaluation mode of the modules that are not in the model: a teacher in `extra`, or one that the step has.

`modes` tells of those of the model. Knows modules; nothing of steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import mlx.nn as nn

from ..bare_objects import attributes, is_a

MODE = "._training"  # ends the path of a module's mode


def modes_of(extra: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    """Of each module in `extra`, by path, whether it is in training mode."""
    for name, held in extra.items():
        for path, module in held.named_modules() if is_a(held, nn.Module) else ():
            training = (attributes(module) or {}).get("_training")
            if type(training) is bool:
                yield f"extra.{name}{'.' if path else ''}{path}{MODE}", training


def outermost(names: list[str]) -> list[str]:
    """Without the paths of modules within one that is named, too."""
    modules = [name.removesuffix(MODE) for name in names if name.endswith(MODE)]
    return [
        name
        for name in names
        if not name.endswith(MODE)
        or not any(name.startswith((f"{one}.", f"{one}[")) and name != one + MODE for one in modules)
    ]


def at_first_step(name: str, training: bool) -> str:
    """A sentence on a module that is in another mode than when the recorder was made."""
    mode, other, call = _words(name, training)
    return (
        f"{name.removesuffix(MODE)} is in {mode} mode at the first step, and was in {other} mode when the recorder was "
        f"made. A script that is replayed is run up to its recorder, so it will have the latter: put it into {mode} "
        "mode before that line"
    )


def changed(name: str, training: bool, known: int, *, compiled: bool) -> str:
    """A sentence on a module that is in another mode than at the start.

    Args:
        known: the last step after which it was not.
    """
    mode, other, call = _words(name, training)
    if compiled:
        return (
            f"{name.removesuffix(MODE)} is in {mode} mode now, but the compiled step was traced in {other} mode, and "
            f"goes on with that: it is not what your loop would do uncompiled. Call {call} before the next step"
        )
    return (
        f"{name.removesuffix(MODE)} is in {mode} mode now, and was in {other} mode at the start. Dropout and batch "
        f"normalisation do otherwise there, and no checkpoint holds the mode: steps after {known} may not replay "
        f"exactly. Call {call} before the next step"
    )


def _words(name: str, training: bool) -> tuple[str, str, str]:
    mode, other = ("training", "evaluation") if training else ("evaluation", "training")
    return mode, other, f"{name.removesuffix(MODE).rpartition('.')[2]}.{'eval' if training else 'train'}()"
