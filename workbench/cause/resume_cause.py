"""Is it the resume? A seam in the record, and the steps after it from the state that was left, without the rise.

Knows an inquiry.
"""

from __future__ import annotations

from typing import Any

from ..number_text import number
from .adam import fresh, settings
from .damage import Damage, listed
from .inquiry import Conclusion, Inquiry, Tried
from .remedies import NEXT
from .resumed import Resumed, Seam, redone, seams


def examine(inquiry: Inquiry) -> Conclusion | None:
    """The conclusion where a seam before the step explains it."""
    step = inquiry.step
    found = list(seams(inquiry.run, inquiry.scene.segment, step))
    if not found:
        one = len(inquiry.run.manifest.segments) == 1
        what = "the run is of one piece" if one else "no segment in the last steps started from a state of its own"
        inquiry.refute("resume", f"{what}: no state was exchanged outside of a step")
    for seam in found:
        inquiry.found(
            "seam",
            f"Segment {seam.segment} went on after step {seam.start} from another state than the one logged "
            f"({', '.join(seam.lanes)}).",
            "resume",
            **{"steps before": step - seam.start - 1},
        )
        what = f"the steps after state {seam.start} as it was left"
        if not inquiry.affords(step - seam.start + NEXT, what, kept=0):
            continue
        again = redone(inquiry.trials, seam, beyond=NEXT, **inquiry.opening)
        if again.left is None or step - seam.start > len(again.shots):
            inquiry.skip(what, again.why or "the data stream ends before them")
        elif (conclusion := _judged(inquiry, again)) is not None:
            return conclusion
    return None


def _judged(inquiry: Inquiry, again: Resumed) -> Conclusion | None:
    step, seam = inquiry.step, again.seam
    shot = again.shots[step - seam.start - 1]
    place = f"state {seam.start} as segment {seam.parent} left it"
    sentence = f"Performed again from {place}, step {step} has {inquiry.comparison(shot)}"
    if not inquiry.gone(shot):
        inquiry.refute("resume", f"{sentence}: the rise stays")
        return None
    what = listed(again.damages)
    inquiry.found("state as it was left", f"{sentence}: the rise is gone.", "resume", redone=inquiry.value(shot))
    inquiry.found("damage", f"What differs: {what}.", "resume", tensors=len(again.damages))
    _signature(inquiry, again)
    return Conclusion(
        "resume",
        f"Segment {seam.segment} did not go on from the state that step {seam.start} had left: {what}.",
        culprit(seam, again.damages),
        f"the same rise at step {step} when the steps are performed from {place}",
        [Tried("", seam.start + 1, "", words=f"from {place}")],
        redone=again.shots,
        fork_from=f"{seam.start}.s{seam.parent}",
    )


def _signature(inquiry: Inquiry, again: Resumed) -> None:
    """Moments that were lost make the updates after it larger by a factor that is known, unless they are corrected."""
    left, start = again.left, again.seam.start
    lost = {one.lane for one in again.damages if one.lane in ("adam_m", "adam_v") and one.how == "zeroed"}
    if lost != {"adam_m", "adam_v"} or left is None:
        return
    known = [one for one in settings(inquiry.run.manifest.optimizer, left).values() if not one.bias_correction]
    if not known:
        return
    one = known[0]
    steps = inquiry.step - start - 1  # updates from the seam to state N-1
    factors = [fresh(one.beta1, one.beta2, number) for number in range(1, max(2, steps + 1))]
    steady, noise = (max(pair[which] for pair in factors) for which in (0, 1))
    inquiry.found(
        "moments lost",
        f"m and v are zeros, and this optimizer corrects no bias: an update after it is up to "
        f"{number(steady, 3)} times as large as usual where gradients agree, and {number(noise, 3)} times where "
        "they are noise.",
        "resume",
        steady=steady,
        noise=noise,
    )


def culprit(seam: Seam, damages: list[Damage]) -> dict[str, Any]:
    """Step, segment, lanes and tensors; layer, parameter, index, bit and factor where it is one tensor."""
    named: dict[str, Any] = {"step": seam.start + 1, "segment": seam.segment, "lanes": seam.lanes}
    named["tensors"] = [
        {"lane": one.lane, "path": one.path, "how": one.how, "detail": one.detail} | one.numbers for one in damages
    ]
    if len(damages) == 1 and damages[0].lane in ("weights", "adam_m", "adam_v"):
        (one,) = damages
        named |= {"layer": one.path.rpartition(".")[0], "parameter": one.path, "how": one.how}
        named |= {key: one.numbers[key] for key in ("index", "bit", "factor") if key in one.numbers}
    return named
