"""`workbench lab`: JupyterLab on the notebooks."""

from __future__ import annotations

from pathlib import Path

import click

from .options import FACTORY


@click.command(
    context_settings={"ignore_unknown_options": True}, short_help="Open JupyterLab on the notebooks, with a run chosen."
)
@click.argument("run", type=click.Path(path_type=Path), required=False)
@click.option("--dir", "folder", type=click.Path(path_type=Path), default=Path("spike-workbench"), show_default=True)
@FACTORY
@click.argument("lab_options", nargs=-1, type=click.UNPROCESSED)
def lab(run: Path | None, folder: Path, factory: str | None, lab_options: tuple[str, ...]) -> None:
    """Open JupyterLab on the notebooks; with RUN (a run, or a log of another program) on a panel of it.

    A run of your own loop needs --factory for what performs its steps: the notebook's panel names it then. Options
    after -- go to JupyterLab.
    """
    from ..lab import open_lab

    if run is not None and str(run).startswith("-"):  # an option for JupyterLab, and no run before it
        run, lab_options = None, (str(run), *lab_options)
    open_lab(run, folder, lab_options, factory)
