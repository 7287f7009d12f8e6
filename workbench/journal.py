"""The open telemetry of a run: lines appended in order, and a second copy of them where that was asked for.

Knows lines and files; nothing of steps or MLX. After a line that could not be written nothing more is: a gap or half a
line must stay the last thing in the file.
"""

from __future__ import annotations

from pathlib import Path

from .telemetry import Line, Writer


class Journal:
    """The open telemetry of a run.

    Args:
        path: the run's telemetry file.
        copy: a second writer that receives each line too.

    Attributes:
        torn_bytes: length of an unfinished last line that a crash left; 0 if there is none.
    """

    def __init__(self, path: Path, copy: Writer | None = None) -> None:
        self._writers = [Writer(path), *([copy] if copy else [])]
        self.torn_bytes = self._writers[0].torn_bytes
        self._failure: OSError | None = None

    def put(self, line: Line) -> None:
        """Appends a line.

        Raises:
            OSError: this line, or one before it, could not be written.
        """
        self._refuse_after_failure()
        try:
            for writer in self._writers:
                writer.append(line)
        except OSError as error:
            self._failure = error
            raise

    def sync(self) -> None:
        """Makes everything put so far durable.

        Raises:
            OSError: a line could not be written.
        """
        self._refuse_after_failure()
        for writer in self._writers:
            writer.sync()

    def close(self) -> None:
        for writer in self._writers:
            writer.close()

    def _refuse_after_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
