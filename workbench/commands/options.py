"""Arguments and options that several commands have, in the same words."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

RUN = click.argument("run", type=click.Path(path_type=Path))
STEP = click.option("--step", required=True, type=click.IntRange(1), help="The step.")
SEGMENT = click.option("--segment", type=int, help="Where the step stands in several segments that differ.")
FACTORY = click.option(
    "--factory",
    metavar="F",
    help="module:function that rebuilds the run, or the script that records it; naming it is consent to run it.",
)
CHECKPOINT = click.option(
    "--checkpoint", type=int, help="Start from the checkpoint of this step. [default: the nearest]"
)
OTHER_ENVIRONMENT = click.option(
    "--other-environment", is_flag=True, help="Go on where this machine computes differently."
)


class OutFile(click.Path):
    """A file that the command is to write. Whether it can is found before anything else is done: a command that has
    measured for minutes must not fail at its last line."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = super().convert(value, param, ctx)
        assert isinstance(path, Path)
        folder = path.absolute().parent
        if not folder.is_dir():
            self.fail(f"{path} can't be written: there is no folder {folder}; expected one that is there.", param, ctx)
        if not os.access(folder, os.W_OK | os.X_OK):
            self.fail(f"{path} can't be written: {folder} can't be written to; expected a folder that can.", param, ctx)
        return path


def together(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Several options as one decorator; in the help they stand in this order."""

    def decorate(function: Any) -> Any:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate
