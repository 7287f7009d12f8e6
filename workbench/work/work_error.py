"""An error of another process. Knows nothing else."""

from __future__ import annotations


class WorkError(Exception):
    """An error in the process that did the work, which is none of the workbench's own.

    Attributes:
        name: of its class there.
        details: its traceback there.
    """

    def __init__(self, message: str, name: str, details: str) -> None:
        super().__init__(message)
        self.name, self.details = name, details
