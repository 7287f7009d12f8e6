"""Data files that a run made for itself: the bytes that `train --fault` plants, such as "1.bytes".

Knows names; opens nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePosixPath

from ..manifest import Manifest

SOURCES = "sources"  # folder in the run


def explained(manifest: Manifest, shown: Iterable[object]) -> str | None:
    """A sentence on those of the sources shown that are no file of the user's; None: there is none.

    Args:
        shown: names of sources, as a table of rows or a culprit has them.
    """
    own = [PurePosixPath(entry.path) for entry in manifest.data]
    made = {path.name for path in own if path.parts[:1] == (SOURCES,)}
    if not (named := sorted(made & {str(name) for name in shown})):
        return None
    return (
        f"{', '.join(named)}: no file of yours, but what --fault planted; the run keeps it in its folder {SOURCES}/, "
        "so that the batch can be drawn again."
    )
