"""The file that receives a second copy of each telemetry line."""

from __future__ import annotations

from pathlib import Path

from ..errors import RunError
from ..lines.writer import Writer
from ..recorded.layout import TELEMETRY


def open_copy(path: Path, folder: Path, run: str | None) -> Writer:
    """
    Args:
        path: the copy.
        folder: of the run, whose own telemetry it must not be.
        run: identity of the run, if the copy may hold lines of it already.

    Raises:
        RunError: the file is the run's own, or holds something else, or can't be written.
    """
    if path.resolve() == (folder / TELEMETRY).resolve():
        raise RunError(f"{path} is the run's own telemetry; expected another file for the copy")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size:
            with path.open("rb") as file:
                first = file.readline(65536)
            if run is None or run.encode() not in first:
                raise RunError(f"{path} is not empty and not a copy of this run's telemetry; expected a new file")
        return Writer(path)
    except OSError as error:
        raise RunError(
            f"telemetry can't be copied to {path} ({error.strerror or error}); expected a file that can be written, or "
            "leave copy_telemetry_to out"
        ) from error
