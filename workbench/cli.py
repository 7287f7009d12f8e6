"""The command line. It parses, calls, and prints; every answer is also one call away in Python.

Exit codes: 0 the question was answered, whatever the answer; 1 `replay` or `verify` found something not exact; 2 bad
input; 130 or 143 stopped by Ctrl-C or SIGTERM. Each command is a module in `commands`; here are what they have in
common, their errors, and the list of them.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any, NoReturn

import click

from . import __version__
from .commands.autopsy import autopsy
from .commands.batch import batch
from .commands.bench import bench
from .commands.checkpoint import checkpoint
from .commands.compare import compare
from .commands.demo import demo
from .commands.diverge import diverge
from .commands.doctor import doctor
from .commands.faults import faults
from .commands.lab import lab
from .commands.mlx_lm import mlx_lm
from .commands.ranks import ranks
from .commands.replay import replay
from .commands.report import report
from .commands.resumption import resumption
from .commands.runs import runs
from .commands.spike_list import spikes
from .commands.sweep import sweep
from .commands.train import train
from .commands.verify import verify
from .commands.whatif import whatif
from .errors import WorkbenchError
from .own_scripts.users_code import HINT, described
from .printed import echo, printing


class _Group(click.Group):
    """Turns every error of ours into one sentence and exit code 2; a traceback reaches nobody."""

    def main(self, *args: Any, **settings: Any) -> Any:
        with printing():
            return super().main(*args, **settings)

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(context, args)
        except click.exceptions.NoArgsIsHelpError:
            raise
        except click.UsageError as error:
            _usage(error, context)

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except click.UsageError as error:
            _usage(error, context)
        except WorkbenchError as error:
            echo(f"workbench: {error}", err=True)
            context.exit(2)
        except BrokenPipeError:
            # The reader went away, as `head` does. What is still buffered goes nowhere, so no complaint at exit either.
            for stream in (sys.stdout, sys.stderr):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            context.exit(128 + signal.SIGPIPE)  # as any command: neither "exact" nor "not exact"
        except Exception as error:
            if hasattr(error, HINT):  # it came through a function of the run's own
                echo(f"workbench: the code of the run's own raised {described(error)}", err=True)
            elif isinstance(error, OSError):
                echo(f"workbench: {error.filename or 'a file'}: {error.strerror or error}", err=True)
            else:
                raise
            context.exit(2)
        except KeyboardInterrupt as error:
            echo(f"workbench: {error}" if str(error) else "workbench: interrupted", err=True)
            context.exit(128 + getattr(error, "number", signal.SIGINT))


def _usage(error: click.UsageError, context: click.Context) -> NoReturn:
    command = (error.ctx or context).command_path
    said = error.format_message()
    echo(f"workbench: {said if said.endswith('.') else f'{said}.'} See {command} --help.", err=True)
    context.exit(2)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="workbench")
def main() -> None:
    """Replay the training step where the loss spiked, bit for bit, and see what happened."""


main.add_command(autopsy)
main.add_command(batch)
main.add_command(bench)
main.add_command(checkpoint)
main.add_command(compare)
main.add_command(demo)
main.add_command(diverge)
main.add_command(doctor)
main.add_command(faults)
main.add_command(lab)
main.add_command(mlx_lm)
main.add_command(ranks)
main.add_command(replay)
main.add_command(report)
main.add_command(resumption)
main.add_command(runs)
main.add_command(spikes)
main.add_command(sweep)
main.add_command(train)
main.add_command(verify)
main.add_command(whatif)
