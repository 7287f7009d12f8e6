"""What the next line of telemetry says beside its numbers: sentences that the user is warned of, or will be.

Knows sentences; nothing of lines or folders.
"""

from __future__ import annotations

from typing import Any


class Remarks:
    """
    Attributes:
        pending: since the last step's line: each sentence, and the last step before what it says. Whoever has written
            that line empties it.
    """

    def __init__(self) -> None:
        self.pending: list[tuple[str, int]] = []

    def add(self, sentence: str, since: int) -> None:
        """Has the next line say what the user is warned of now."""
        self.pending.append((sentence.rstrip("."), since))

    def fields(self) -> dict[str, Any]:
        """Those of the line; none if there is nothing to be said."""
        if not self.pending:
            return {}
        return {"remarks": [one for one, _ in self.pending], "since": min(since for _, since in self.pending)}
