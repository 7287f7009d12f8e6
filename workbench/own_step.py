"""A step function of the user's own, seen from outside: the gradients that its optimizer gets, and each layer's output.

Nothing in it is replaced: what it passes to the optimizer's `apply_gradients` and to `mlx.optimizers.clip_grad_norm` is
noted in passing, as arrays of the trace being built.
"""

from __future__ import annotations

import copy
import inspect
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_map

from .capture import Capture, function_calls
from .errors import ExperimentError
from .experiment import kept_arrays
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
    """Says in the user's words what MLX says of arrays of a trace: evaluated within it, or leaked from it; and of what
    a step can't do without.

    Raises:
        ExperimentError: the step function is compiled and evaluates an array, or calls a function that is compiled; or
            the model has nothing to train; or the token losses of micro-batches have no axis to be joined along.
    """
    try:
        yield
    except (RuntimeError, ValueError, IndexError) as error:
        if "[grad] Must specify at least one argument" in str(error) and not tree_flatten(
            experiment.model.trainable_parameters()
        ):
            raise ExperimentError(
                "the model has no trainable parameter: all are frozen, or there are none; expected one at least, for "
                "that is what a step updates (model.unfreeze(), or train the layers that were added)"
            ) from error
        if experiment.options.accumulate > 1 and _joins_token_losses(error):
            raise ExperimentError(
                "token_loss of the loss function has no axis of rows, or not the same shape in each micro-batch, so "
                f"that those of the {experiment.options.accumulate} micro-batches of a step can't be put together "
                f"({error}); expected an array with a row for each row of the batch, as loss, "
                '{"token_loss": array}, or leave it out'
            ) from error
        if experiment.step_fn is None or "[eval] Attempting to eval an array" not in str(error):
            raise
        if experiment.options.compile and (line := _raised_in(error, experiment.step_fn)):
            raise NotCompilable(line) from error
        raise ExperimentError(
            "step_fn calls a function that is compiled by itself, so the layers inside it can't be seen; take "
            "mx.compile off it: the step is compiled as a whole, with all of the state, if compile=True"
        ) from error


def _joins_token_losses(error: BaseException) -> bool:
    """Whether an error is of `step.forward_backward` itself, which puts them together, and of no function of a user."""
    frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    place = Path(frames[-1].co_filename)
    return "[concatenate]" in str(error) and place == Path(__file__).with_name("step.py")


def _raised_in(error: BaseException, function: Callable[..., Any]) -> int | None:
    """The line of a function's code that was running when an error was raised, or None if that was not running."""
    function = inspect.unwrap(function)
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
        those that the optimizer got (none where it got none); and the layers' outputs.

    Raises:
        ExperimentError: it updated the experiment's optimizer more than once, or not at all where nothing says that it
            means to (`_may_skip`); or it returned no loss.
    """
    assert experiment.step_fn is not None
    optimizer, model = experiment.optimizer, experiment.model
    kept = None if experiment.options.compile or _updated(experiment) else kept_arrays(experiment)
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
    skipped = not applied and _may_skip(experiment, kept)
    if len(applied) != 1 and not skipped:
        skip = ""
        if not applied:
            skip = (
                ". A step that leaves its update out, as a dynamic loss scale does after an overflow, is recorded once "
                "there was an update, or if it changes what the recorder was given as `extra`; not with compile=True"
            )
        raise ExperimentError(
            f"step_fn updated the experiment's optimizer {len(applied)} times; expected exactly once: that is what a "
            f"step is (accumulate gradients inside it, and use the optimizer and the model that you passed){skip}"
        )
    loss = returned[0] if isinstance(returned, (tuple, list)) and returned else returned
    if not isinstance(loss, mx.array) or loss.size != 1:
        raise ExperimentError(
            f"step_fn returned a {type(returned).__name__}; expected the loss, an MLX array of one element, alone or "
            "first in a tuple"
        )
    experiment.loss_form = loss.dtype, loss.shape
    if skipped and len(unclipped) != 1:
        return loss, _Unseen(), capture
    return loss, unclipped[0] if len(unclipped) == 1 else applied[0], capture


class _Unseen(dict[str, mx.array]):
    """The gradients of a step whose update was left out: none. Their norm, the first that is asked of it, is NaN.

    `step.global_norm` needs an array, and knows nothing of such steps: its code is a part of what each run names as
    the code that performed it, and of the steps that there were before nothing is another now.
    """

    def __init__(self) -> None:
        super().__init__()
        self._asked = False

    def items(self) -> Any:
        asked, self._asked = self._asked, True
        return super().items() if asked else {"": mx.array(float("nan"))}.items()


def _updated(experiment: Experiment) -> bool:
    """Whether the optimizer has made an update before."""
    members = getattr(experiment.optimizer, "optimizers", [experiment.optimizer])
    counts = [member.state.get("step") for member in members]
    return any(isinstance(count, mx.array) and count.size == 1 and bool(count.item()) for count in counts)


def _may_skip(experiment: Experiment, kept: dict[str, mx.array] | None) -> bool:
    """Whether a step without an update is one that was left out: not so if there never was one, and nothing that is
    kept is another now, for then the optimizer may be none that this step function uses.

    Args:
        kept: what `extra` held before the step, if the optimizer had made no update; None: it had, or the step is
            compiled, in which case what it does is settled when it is traced.
    """
    if experiment.options.compile:
        return False
    if kept is None:
        return True
    now = kept_arrays(experiment)
    return now.keys() != kept.keys() or any(
        array.shape != kept[path].shape or not mx.array_equal(array, kept[path], equal_nan=True).item()
        for path, array in now.items()
    )
