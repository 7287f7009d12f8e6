"""The steps that a recorder called unstable when it logged them: their lines say so.

Knows telemetry; judges nothing.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET

from ..lines.strict import decode
from ..untrusted import LINE, open_regular

if TYPE_CHECKING:
    import pandas as pd

    from .recorded_run import RecordedRun


def unstable_of(run: RecordedRun) -> pd.DataFrame:
    """As `RecordedRun.unstable`. Only the lines that may be of such a step are read: few, of perhaps a million."""
    import pandas as pd

    rows = []
    with open_regular(run.telemetry.path) as file:
        for raw in iter(lambda: file.readline(LINE + 1), b""):
            if b'"unstable":' in raw and raw.endswith(b"\n"):
                with contextlib.suppress(msgspec.MsgspecError, ValueError, RecursionError):
                    line = decode(raw)
                    if line.type == "step" and line.unstable is not UNSET and line.step is not UNSET:
                        rows.append((line.step, line.segment, line.unstable))
    frame = pd.DataFrame(rows, columns=["step", "segment", "explanation"])
    return frame.astype({"step": "int64", "segment": "int64"})
