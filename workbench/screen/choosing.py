"""Choosing a run in a panel: its folder, the runs in it, and one of them opened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from .. import manifest as manifests
from ..errors import RunError
from .boundary import Boundary
from .controls import UNCHOSEN, Controls, show
from .markup import count, paragraph
from .opened import Opened


class Chooser:
    """Args:
        chosen: called when another run, or none, is opened, with the step to begin with if one is wished.

    Attributes:
        opened: the chosen run, or None.
    """

    def __init__(self, controls: Controls, boundary: Boundary, chosen: Callable[[int | None], None]) -> None:
        self.opened: Opened | None = None
        self._controls, self._boundary, self._chosen = controls, boundary, chosen
        boundary.on_change(controls.folder, self._on_folder)
        boundary.on_change(controls.run, self._on_run)
        boundary.on_press(controls.refresh, self._on_refresh)

    def start(self, folder: Path, run: str | None) -> None:
        """Lists the runs of a folder, and opens the named one.

        Raises:
            RunError: the folder can't be read, or has no such run.
        """
        with self._boundary.by_itself():
            self._controls.folder.value = str(folder)
        try:
            self._list(run)
        except RunError as error:
            if run is None or folder.is_dir():
                raise
            raise RunError(f"{error} A run elsewhere is given by its path: Panel(run='path/to/{run}').") from error

    def _on_folder(self) -> None:
        """The path of a run itself, or of a log, chooses that."""
        place = Path(self._controls.folder.value).expanduser()
        if (place / manifests.NAME).exists() or place.is_file():
            self.start(place.parent, place.name)
        else:
            self._list(None)

    def _on_refresh(self) -> None:
        """Reads folder and run again: runs appear, and a running job writes on."""
        name, step = self._controls.run.value, self._controls.step.value
        self._list(None if name == UNCHOSEN else name, step if self.opened else None)

    def _on_run(self) -> None:
        self._close()
        if self._controls.run.value != UNCHOSEN:
            self._open(Path(self._controls.folder.value).expanduser() / self._controls.run.value)

    def _list(self, wanted: str | None, step: int | None = None) -> None:
        """Offers the runs of the folder, and opens the wanted one. None is chosen in its place."""
        folder = Path(self._controls.folder.value).expanduser()
        self._close()
        self._offer([], "choose a run")
        names = run_names(folder)
        if wanted is not None and wanted not in names and (folder / wanted).is_file():
            names = [*names, wanted]  # a log of another program, that was named
        self._offer(names, "choose a run" if names else "no runs in this folder", wanted)
        if wanted in names:
            self._open(folder / wanted, step)
        elif wanted is not None:
            raise RunError(f"{wanted} is not a run in {folder}; it has {', '.join(names) or 'no runs'}")
        else:
            then = "choose one" if names else "type another folder"
            self._controls.facts.value = paragraph(f"{count(len(names), 'run')} in {folder}: {then}.")

    def _offer(self, names: list[str], otherwise: str, chosen: str | None = None) -> None:
        with self._boundary.by_itself():
            self._controls.run.options = [(otherwise, UNCHOSEN), *((name, name) for name in names)]
            self._controls.run.value = chosen if chosen in names else UNCHOSEN

    def _close(self) -> None:
        self.opened, self._controls.facts.value = None, ""
        self._boundary.clear()
        with self._boundary.by_itself():
            self._controls.anyway.value = False
        show(self._controls.anyway, False)
        self._chosen(None)

    def _open(self, path: Path, step: int | None = None) -> None:
        self._controls.facts.value = paragraph(f"Reading {path.name} …")
        try:
            self.opened = Opened(path)
        except BaseException:
            self._controls.facts.value = ""
            raise
        self._controls.facts.value = self.opened.facts
        self._chosen(step)


def run_names(folder: Path) -> list[str]:
    """The runs directly in a folder, by name.

    Raises:
        RunError: it can't be read.
    """
    try:
        return sorted(entry.name for entry in folder.iterdir() if (entry / manifests.NAME).exists())
    except OSError as error:
        raise RunError(
            f"{folder} can't be read ({error.strerror}); expected a folder that holds runs. "
            "Type another one into the field Folder."
        ) from error
