"""Why a replay is not exact, as far as that is known: what the recorder suspected, what the step reads that is
otherwise here, and whether it goes by the hashes of texts.

Knows what a replay works on; performs nothing.
"""

from __future__ import annotations

from ..own_scripts.script_place import ended
from .hash_order import by_hash
from .preparation import Prepared, other_files
from .suspicion import suspicion


def reasons(ready: Prepared, segment: int, step: int) -> list[str]:
    """
    Args:
        step: at which the replay departed from the run.
    """
    others = bool(other_files(ready.run, segment, step))
    found = [suspicion(ready.run, segment, step, others=others), ready.others, of_hashes(ready, segment, step)]
    return [one for one in (*found, ended(ready.experiment)) if one is not None]


def of_hashes(ready: Prepared, segment: int, step: int) -> str | None:
    """A sentence, if the step goes by the hashes of texts and these were others when it was recorded, or are in each
    process."""
    manifest = ready.run.manifest
    then = manifest.segments[manifest.lineage(segment, step)].environment.get("hash_seed")
    now = ready.here.get("hash_seed")
    if then == now and now != "random":
        return None
    if (how := by_hash(ready.experiment)) is None:
        return None
    return (
        f"The step {how}, and Python hashes texts in another way in each process, unless PYTHONHASHSEED is set: the "
        "order of a set of texts, or a hash, may be another one here, and that is a possible reason. Sort the set, or "
        "record and replay with PYTHONHASHSEED=0."
    )
