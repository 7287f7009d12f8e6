"""The rows of a batch that are to blame, by name: their number, their loss, where they came from, what is odd in them.

Knows an inquiry.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..batches.batch import sampler_of, verified_batch
from ..enumeration import some
from ..errors import WorkbenchError
from ..number_text import number
from .inquiry import Inquiry
from .suspects import Suspect

NAMED = 8  # rows in a sentence


def named(
    inquiry: Inquiry, step: int, rows: Sequence[Suspect], whole: int, *, judged: bool, losses: bool
) -> tuple[dict[str, Any], str]:
    """The culprit, and its description; the evidence is noted.

    Args:
        whole: rows in the batch.
        judged: whether there was anything to tell rows apart by; losses: whether that was the loss of each.
    """
    culprit: dict[str, Any] = {"step": step}
    if not rows and not judged and inquiry.run.manifest.own_step:
        return culprit, (
            "which of its rows is not known, for they hold no tokens, and an experiment on a step of your own sees the "
            'loss of each only where loss_fn returns (loss, {"token_loss": …}) with the very loss of the step '
            "(`workbench batch` shows what each row holds)"
        )
    if not rows and not judged:
        return culprit, (
            "which of its rows is not known, for the loss function gives no loss for each, and they hold no tokens "
            '(let it return (loss, {"token_loss": …}); `workbench batch` shows what each row holds)'
        )
    if not rows and not losses and inquiry.run.manifest.own_step:
        return culprit, (
            "no row stands out from the others by its tokens, and an experiment on a step of your own sees the loss of "
            'each only where loss_fn returns (loss, {"token_loss": …}) with the very loss of the step'
        )
    if not rows:
        return culprit, "no row stands out from the others"
    places = _places(inquiry, step)
    culprit["rows"] = [
        {"row": one.row} | places.get(one.row, {}) | ({} if one.loss is None else {"loss": _plain(one.loss)})
        for one in sorted(rows, key=lambda one: one.row)
    ]
    which = f"all {whole} rows" if len(rows) == whole else numbered(sorted(one.row for one in rows))
    why = "; ".join(dict.fromkeys(phrase for one in rows for phrase in one.why)) or "high loss"
    first = culprit["rows"][0]
    where = f", the first from offset {first['offset']} of {first['source']}" if "source" in first else ""
    known = [one.loss for one in rows if one.loss is not None]
    mean = f"; {'its' if len(rows) == 1 else 'their mean'} loss is {number(np.mean(known))}" if known else ""
    numbers = {"rows": len(rows)} | ({"loss": float(np.mean(known))} if known else {})
    inquiry.found("rows", f"Odd in batch {step}: {which} ({why}){where}{mean}.", "data", **numbers)
    return culprit, f"{which} ({why})"


def numbered(rows: Sequence[int]) -> str:
    """Such as "rows 3, 4"."""
    return f"row{'' if len(rows) == 1 else 's'} {some(rows, NAMED)}"


def _plain(loss: float) -> float | None:
    return loss if np.isfinite(loss) else None


def _places(inquiry: Inquiry, step: int) -> dict[int, dict[str, Any]]:
    """Source and offset of each row, where the run's data is known."""
    run = inquiry.run
    if run.manifest.rebuild.get("kind") != "trainer":
        inquiry.skip("source and offset of rows", "only the run's own loop knows its data")
        return {}
    segment = run.manifest.lineage(inquiry.scene.segment, step)
    try:
        sampler = sampler_of(run, verify="batch_hash" not in run.evidence(step, segment))
        verified_batch(run, sampler, step, segment)
    except WorkbenchError as error:
        inquiry.skip("source and offset of rows", str(error))
        return {}
    files = [Path(entry.path).name for entry in run.manifest.data]
    places = sampler.provenance(step)
    return {row: {"source": files[one.source], "offset": one.offset} for row, one in enumerate(places)}
