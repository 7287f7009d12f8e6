"""What a script that is run again gets for a recorder of another run than the one that is replayed: it records nothing,
and to train with it is refused. Knows nothing of recordings.
"""

from __future__ import annotations

from typing import Any


class Reached(BaseException):
    """A script was about to train another run than the one that is replayed. No `Exception`, as `script.Handed`."""

    def __init__(self, recorder: Any) -> None:
        super().__init__()
        self.path = recorder.path


class PassedOver:
    """In place of a `Recorder`: has its `path` and its `experiment`, and can be closed."""

    step_number = 0

    def __enter__(self) -> PassedOver:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def close(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise Reached(self)
