"""Arguments and options that several commands have, in the same words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

RUN = click.argument("run", type=click.Path(path_type=Path))
STEP = click.option("--step", required=True, type=click.IntRange(1), help="The step.")
SEGMENT = click.option("--segment", type=int, help="Where the step stands in several segments that differ.")
FACTORY = click.option("--factory", help="module:function that rebuilds the run; naming it is consent to import it.")
CHECKPOINT = click.option(
    "--checkpoint", type=int, help="Start from the checkpoint of this step. [default: the nearest]"
)
OTHER_ENVIRONMENT = click.option(
    "--other-environment", is_flag=True, help="Go on where this machine computes differently."
)


def together(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Several options as one decorator; in the help they stand in this order."""

    def decorate(function: Any) -> Any:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate
