"""Bars on standard error while something runs; where that is no terminal, a plain line now and then."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

from ..printed import echo, terminal

EACH = 30.0  # seconds between two lines; what is done sooner says nothing


class Lines:
    """Says now and then how far something is, where nobody sees a bar: in a log file, or over a pipe.

    Nothing is said where the output is asked for as JSON, or in a notebook's process, whose cells keep what was said.

    Args:
        seen: a bar is shown.
    """

    def __init__(self, seen: bool) -> None:
        context = click.get_current_context(silent=True)
        given = {} if context is None else context.params
        self._silent = seen or any(given.get(name) for name in ("as_json", "quiet")) or "JPY_PARENT_PID" in os.environ
        self._last = time.monotonic()

    def say(self, done: int, total: int | None, what: str) -> None:
        now = time.monotonic()
        if self._silent or now - self._last < EACH:
            return
        self._last = now
        echo(f"{what} ({done} of {total})" if total else what, err=True)


class TrainingProgress:
    """A progress bar with loss and steps/s; spikes, validation losses and samples above it."""

    def __init__(self, steps: int) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(),
            TextColumn("{task.fields[said]}"),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=terminal(stderr=True))
        self._task = self._bar.add_task("", total=steps, said="")
        self._total, self._lines = steps, Lines(self._bar.console.is_terminal)
        self.spikes = self.steps = 0

    def __enter__(self) -> TrainingProgress:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.steps:
            self._bar.stop()
        else:
            self._bar.live.transient = True  # nothing was done: above the sentence that says why stands no bar
            self._bar.live.stop()

    def on_step(self, step: int, loss: float, reading: Any) -> None:
        self.steps += 1
        speed = self._bar.tasks[0].speed or 0.0
        self._bar.update(self._task, completed=step, said=f"loss {loss:.4f}  {speed:.1f} steps/s")
        self._lines.say(step, self._total, f"loss {loss:.4f}, {speed:.1f} steps/s")
        if reading is not None and reading.rule is not None:
            self.spikes += 1
            self.say(f"step {step}: spike ({reading.rule}): {reading.explanation}")

    def on_validation(self, step: int, loss: float) -> None:
        self.say(f"step {step}: validation loss {loss:.4f}")

    def on_sample(self, step: int, text: str) -> None:
        self.say(f"step {step}: {text}")

    def say(self, text: str) -> None:
        """Prints a line above the bar; what came from a run is text, and no markup."""
        self._bar.console.print(text, markup=False, highlight=False)


def follows() -> bool:
    """Whether this is one of several ranks that a launcher started, and not the first, which speaks for all."""
    from ..ranks.signs import backend_here

    if backend_here() is None:
        return False  # and MLX need not be loaded to know it
    from ..ranks.world import world

    return world().rank > 0


@contextmanager
def aside() -> Iterator[None]:
    """Within: what the user's code prints goes to standard error, that of other processes started here too. Standard
    output is the command's: its answer, or JSON and nothing else."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError, ValueError):  # closed, or none of the system's: as in a test
            sys.stdout.flush()
            kept = os.dup(1)
            stack.callback(os.close, kept)
            os.dup2(2, 1)
            stack.callback(os.dup2, kept, 1)
            stack.callback(_flush)
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        yield


def _flush() -> None:
    """What was written past `sys.stdout`, while it still goes elsewhere."""
    with contextlib.suppress(OSError, ValueError):
        if sys.__stdout__ is not None:
            sys.__stdout__.flush()


@contextmanager
def doing(first: str, counted: bool = False) -> Iterator[Callable[[int, int, str], None]]:
    """A bar that is gone afterwards. Yields what is to be called as `progress(done, total, what)`. What is printed
    within, by a step or a factory, goes to standard error.

    Args:
        first: what is being done until the first call.
        counted: also show how many of how many are done.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    count = (MofNCompleteColumn(),) if counted else ()
    columns = (TextColumn("{task.description}"), BarColumn(), *count, TimeElapsedColumn())
    console = terminal(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar, aside():
        task, lines = bar.add_task(first, total=None), Lines(bar.console.is_terminal)

        def progress(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)
            lines.say(done, total, what)

        yield progress
