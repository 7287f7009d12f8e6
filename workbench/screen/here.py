"""What is known of this machine: its numeric environment, and what the doctor found. Knows records only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..work import child

if TYPE_CHECKING:
    from ..examination.diagnosis import Report
    from ..run import Run


@dataclass
class Here:
    """For as long as a panel lives, and while no environment variable changes that can move a bit.

    Attributes:
        report: the doctor's last one, and when it was made (seconds since 1970).
    """

    report: tuple[Report, float] | None = None
    _known: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)

    def environment(self, run: Run) -> dict[str, Any] | None:
        """As `environment.numeric_environment` on the device that recorded the run; None: not known yet."""
        return self._known.get((child.surroundings(), _backend(run)))

    def learn(self, run: Run, environment: dict[str, Any]) -> bool:
        """Whether it is news."""
        key = child.surroundings(), _backend(run)
        news = self._known.get(key) != environment
        self._known[key] = environment
        return news


def _backend(run: Run) -> str:
    return str(run.manifest.segments[-1].environment.get("backend", "cpu"))
