"""What a recorder says of parameters that it had to lay out in memory: the one thing in which it may move a run's bits.

Knows paths and shapes; nothing of arrays or steps.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..enumeration import some

_SHOWN = 4  # parameters in a sentence


class Relaid:
    """Tells of each parameter once."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def notice(self, relaid: Mapping[str, tuple[int, ...]]) -> str | None:
        """A sentence on those that it has not told of yet; None if there is none.

        Args:
            relaid: their shapes, by path (`Stepper.relaid`).
        """
        if len(relaid) == len(self._told):
            return None
        new = [path for path in relaid if path not in self._told]
        self._told |= relaid.keys()
        named = some((f"{path} {relaid[path]}" for path in new), _SHOWN)
        return (
            f"the layout in memory of {named} was made row-major: along an axis of length 1 MLX leaves a stride "
            "that depends on which buffers it could reuse, and a view with gaps can't be stored as one. MLX picks its "
            "matmul by such strides, so that the same loop without a recorder may give other last bits than this run, "
            "and other ones from run to run. This run replays exactly"
        )
