"""A step function of the user's own, seen from outside: the gradients that its optimizer gets, and each layer's output.

Nothing in it is replaced: what it passes to the optimizer's `apply_gradients` and to `mlx.optimizers.clip_grad_norm` is
noted in passing, as arrays of the trace being built.
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.optimizers as optim
from mlx.utils import tree_map

from .capture import Capture, function_calls
from .errors import ExperimentError
from .numbered_batch import arguments

if TYPE_CHECKING:
    from .experiment import Batch, Experiment


class NotCompilable(ExperimentError):
    """A step function that was compiled, and asks an array for its value.

    Attributes:
        reason: what it does where, in a phrase.
    """

    def __init__(self, line: int) -> None:
        done = f"step_fn evaluates an array (item(), float(), print, an `if` on it, mx.eval) on line {line}"
        self.reason = f"{done}, so it can't be compiled"
        super().__init__(
            f"{done}, and this step is compiled, so no array in it has a value yet; leave compile=True out, or do that "
            "after recorder.step, which returns the loss"
        )


@contextmanager
def explained(experiment: Experiment) -> Iterator[None]:
    """Says in the user's words what MLX says of arrays of a trace: evaluated within it, or leaked from it.

    Raises:
        ExperimentError: the step function is compiled and evaluates an array, or calls a function that is compiled.
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if experiment.step_fn is None or "[eval] Attempting to eval an array" not in str(error):
            raise
        if experiment.options.compile and (line := _raised_in(error, experiment.step_fn)):
            raise NotCompilable(line) from error
        raise ExperimentError(
            "step_fn calls a function that is compiled by itself, so the layers inside it can't be seen; take "
            "mx.compile off it: the step is compiled as a whole, with all of the state, if compile=True"
        ) from error


def _raised_in(error: BaseException, function: Callable[..., Any]) -> int | None:
    """The line of a function's code that was running when an error was raised, or None if that was not running."""
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    for frame, line in traceback.walk_tb(error.__traceback__):
        if frame.f_code is (perform.__code__ if code is None else code):
            return line
    return None


def perform(
    experiment: Experiment, batch: Batch, layers: Sequence[str], operations: AbstractContextManager[None]
) -> tuple[mx.array, Any, Capture]:
    """Performs `experiment.step_fn` on a batch.

    Returns:
        Its loss; the gradients, a tree: those that it clipped by `mlx.optimizers.clip_grad_norm`, before that, or else
        those that the optimizer got; and the layers' outputs.

    Raises:
        ExperimentError: it did not update the experiment's optimizer exactly once, or returned no loss.
    """
    assert experiment.step_fn is not None
    optimizer, model = experiment.optimizer, experiment.model
    applied: list[Any] = []
    unclipped: list[Any] = []

    def noting(seen: list[Any], perform: Any, gradients: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(tree_map(copy.copy, gradients))  # whose handles the step may go on changing
        return perform(gradients, *args, **kwargs)

    def clip(perform: Any, gradients: Any, *args: Any, **kwargs: Any) -> Any:
        return noting(unclipped, perform, gradients, *args, **kwargs)

    ordinary = optimizer.apply_gradients
    watched: Any = optimizer
    watched.apply_gradients = lambda *args, **kwargs: noting(applied, ordinary, *args, **kwargs)
    try:
        with operations, Capture(model, layers) as capture, function_calls(optim, "clip_grad_norm", clip):
            returned = experiment.step_fn(*arguments(batch, compiled=experiment.options.compile))
    finally:
        del watched.apply_gradients  # the method of the class again
    if len(applied) != 1:
        raise ExperimentError(
            f"step_fn updated the experiment's optimizer {len(applied)} times; expected exactly once: that is what a "
            "step is (accumulate gradients inside it, and use the optimizer and the model that you passed)"
        )
    loss = returned[0] if isinstance(returned, (tuple, list)) and returned else returned
    if not isinstance(loss, mx.array) or loss.size != 1:
        raise ExperimentError(
            f"step_fn returned a {type(returned).__name__}; expected the loss, an MLX array of one element, alone or "
            "first in a tuple"
        )
    return loss, unclipped[0] if len(unclipped) == 1 else applied[0], capture
