"""A process whose output a benchmark reads. Knows processes; nothing of what they do."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence

from ..errors import WorkbenchError


def output_of(command: Sequence[str], what: str, variables: Mapping[str, str] | None = None) -> tuple[str, str]:
    """Runs it to its end.

    Args:
        what: it does, for the sentence if it fails.
        variables: its environment; None: this process's.

    Returns:
        What it wrote on standard output, and on standard error.

    Raises:
        WorkbenchError: it ended with another code than 0.
    """
    done = subprocess.run(command, capture_output=True, text=True, env=variables)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "it said nothing").splitlines()[-1]
        raise WorkbenchError(f"{what} failed: its process ended with code {done.returncode}: {said}")
    return done.stdout, done.stderr
