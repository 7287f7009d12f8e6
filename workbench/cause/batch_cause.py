"""Does the batch carry the spike, and which of its rows?

The 2×2 of {state N-1, an earlier one} × {batch N, a usual one} says whether the batch does; what rows hold, and the
loss that they carry, says which; and the batch with those rows exchanged for usual ones proves it. Knows an inquiry.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import mlx.core as mx
import numpy as np

from ..checkpoints import checkpoint_reader
from ..errors import WorkbenchError
from ..experiment import Batch
from ..interventions.attempt import Attempt, put
from ..interventions.scene import CONTEXT
from ..number_text import number
from ..recorded.layout import CHECKPOINTS
from ..verdict import Cause
from .alarm import LEFT
from .counterfactual import Shot, shot
from .culprit_rows import named, numbered
from .inquiry import Conclusion, Inquiry, Tried, setting, skipping
from .suspects import Suspect, is_tokens, suspects

Carrier = Literal["batch", "state", "both"]
KEPT = 0.5  # of a rise: what its carrier keeps of it when the other factor is exchanged
LONG = 8  # steps before state N-9 from which a state is one of long ago
USUAL = 3  # usual batches whose rows are the yardstick of a row's loss
OF_STATE: tuple[Cause, ...] = ("optimizer", "schedule", "curvature", "attention-logits")


@dataclass(frozen=True)
class Square:
    """The 2×2, in what is out of the ordinary at the step.

    Attributes:
        state, batch: the earlier state, and the step whose batch is the usual one.
        spike, usual_batch, earlier_state, calm: (N-1, N), (N-1, usual), (earlier, N) and (earlier, usual).
        carrier: see `square`.
    """

    state: int
    batch: int
    spike: float
    usual_batch: float
    earlier_state: float
    calm: float
    carrier: Carrier


def square(inquiry: Inquiry) -> Square | None:
    """Computes the 2×2: three steps. None where there is no earlier state or usual batch, which is noted.

    Where no earlier state is held, that of the last checkpoint before takes its place, however old. Without one only
    the batch is exchanged: the batch carries a rise that goes with it.

    The batch carries a rise that is gone without it, and of which it keeps at least half on the earlier state; the
    state one that is gone without it, and of which it keeps at least half on the usual batch. Otherwise, as where only
    the two together make it, the carrier is "both". (`intervene.two_by_two` averages the two ways to exchange a factor;
    here each has to say the same.)
    """
    state, last, neutral = inquiry.earliest, inquiry.last, inquiry.neutral()
    if neutral is None:
        inquiry.skip("state or batch", f"step {inquiry.step} has too few healthy steps before it to exchange them with")
        return None
    if not inquiry.affords(3 + inquiry.distance(state), "state or batch"):
        return None
    if state == last:
        older = _older(inquiry)
        # A state of long ago, whose loss on a usual batch is as high as the spike, had not learnt enough to compare.
        if older is None or not inquiry.gone(inquiry.trials.shot(older, neutral)):
            return _batch_alone(inquiry, neutral)
        state = older
    pairs = ((last, inquiry.step), (last, neutral), (state, inquiry.step), (state, neutral))
    spike, usual_batch, earlier_state, calm = (inquiry.value(inquiry.trials.shot(*pair)) for pair in pairs)
    learnt = inquiry.alarm.rise(calm) if state in inquiry.trials.borrowed and math.isfinite(calm) else 0.0
    carrier = _carrier(inquiry, usual_batch, earlier_state, max(0.0, learnt))
    found = Square(state, neutral, spike, usual_batch, earlier_state, calm, carrier)
    _say(inquiry, found)
    return found


def _batch_alone(inquiry: Inquiry, neutral: int) -> Square:
    """Without an earlier state: what the exchange of the batch alone says."""
    last, spike, one = inquiry.last, inquiry.own(), inquiry.trials.shot(inquiry.last, neutral)
    value, gone = inquiry.value(one), inquiry.gone(one)
    sentence = f"On the batch of step {neutral} state {last} has {inquiry.comparison(one)}: "
    sentence += "the rise goes with the batch." if gone else "the state is bad on a usual batch already."
    inquiry.found("another batch", sentence, "data" if gone else "unknown", **{"usual batch": value})
    inquiry.skip("an earlier state", f"none is held: the replay started from state {last}")
    return Square(last, neutral, spike, value, math.nan, math.nan, "batch" if gone else "state")


def _older(inquiry: Inquiry) -> int | None:
    """The last checkpoint before the scene's first state, read from disk; None: there is none."""
    run, scene = inquiry.run, inquiry.scene
    for step, segment in reversed(run.checkpoints_before(scene.first, scene.segment)):
        try:
            state = checkpoint_reader.read(run.path / CHECKPOINTS, step, segment, run.manifest.run)
        except WorkbenchError:
            continue
        inquiry.trials.borrowed[step] = state
        inquiry.skip("the states between", f"none is held: the replay started from state {inquiry.last}")
        return step
    return None


def _carrier(inquiry: Inquiry, usual_batch: float, earlier_state: float, learnt: float) -> Carrier:
    """
    Args:
        learnt: of the rise, what any batch has on an old state, for the run had learnt less then.
    """
    without_batch, without_state = inquiry.alarm.rise(usual_batch), inquiry.alarm.rise(earlier_state) - learnt
    if without_batch <= LEFT and without_state >= KEPT:
        return "batch"
    return "state" if without_state <= LEFT and without_batch >= KEPT else "both"


def _say(inquiry: Inquiry, found: Square) -> None:
    step, phrase = inquiry.step, inquiry.alarm.phrase
    numbers = {"spike": found.spike, "usual batch": found.usual_batch, "earlier state": found.earlier_state}
    sentence = (
        f"State {step - 1} has {phrase} {number(found.spike)} on batch {step} and {number(found.usual_batch)} on that "
        f"of step {found.batch}; state {found.state} has {number(found.earlier_state)} and {number(found.calm)}: "
    )
    words = {"batch": "the batch carries it.", "state": "the state carries it.", "both": "neither carries it alone."}
    supports: Cause = "data" if found.carrier == "batch" else "unknown"
    inquiry.found("two by two", sentence + words[found.carrier], supports, **numbers, calm=found.calm)
    if found.carrier == "state":
        harmless = f"batch {step} is harmless: on state {found.state} it has {phrase} {number(found.earlier_state)}"
        inquiry.refute("data", harmless)


def examine(inquiry: Inquiry, found: Square) -> Conclusion | None:
    """The conclusion where the batch carries the spike: its rows are odd, or it keeps two thirds on the earlier state.
    A batch that does neither is a hard one for a state that is near a spike."""
    step = inquiry.step
    whole, own = _count(inquiry, step), inquiry.trials.with_rows(inquiry.trials.own(), inquiry.last)
    rows = _proven(inquiry, found, rows_of(inquiry, step, own), whole)
    kept = inquiry.alarm.rise(found.earlier_state)
    if not any(one.why for one in rows) and not kept >= 1 - LEFT:
        less = f"it keeps {kept:.0%} of the rise on state {found.state}" if kept == kept else "no earlier state is held"
        inquiry.refute("data", f"nothing in batch {step} is unlike the run's other data, and {less}")
        return None
    if not any(one.wrong for one in rows) and not _bad_long_ago(inquiry, found):
        return None
    for cause in OF_STATE:
        healthy = f"state {step - 1} is healthy: on the batch of step {found.batch} it has {inquiry.alarm.phrase}"
        inquiry.refute(cause, f"{healthy} {number(found.usual_batch)}")
    culprit, sentence = named(inquiry, step, rows, whole, judged=_judged(inquiry, step, own), losses=_told(own))
    remedies = [skipping(step)]
    if len(rows) == 1 < whole:
        remedies.append(Tried(f"drop-row={rows[0].row}", step, note="a fork can leave out the batch, not one row"))
    return Conclusion(
        "data",
        f"The batch of step {step} carries it: {sentence}.",
        culprit,
        f"batch {step} on an earlier state without the rise, or the batch of another step on state {step - 1} with it",
        [*remedies, setting("lr=0.1x", step)],
    )


def _bad_long_ago(inquiry: Inquiry, found: Square) -> bool:
    """Whether batch N was as bad for the earliest held state: data that is bad is so for any state, and a batch of rare
    tokens only once an update has spoilt what the model knows of them."""
    state = inquiry.scene.first
    if state >= found.state - LONG or not inquiry.affords(
        2 + 2 * inquiry.distance(state), f"batch {inquiry.step} long ago"
    ):
        return True
    there, calm = (inquiry.trials.shot(state, batch) for batch in (inquiry.step, found.batch))
    values = tuple(map(inquiry.value, (there, calm)))
    kept = inquiry.alarm.rise(values[0])
    if math.isfinite(values[1]):
        kept -= max(0.0, inquiry.alarm.rise(values[1]))  # what any batch has there: the run had learnt less
    sentence = (
        f"on state {state} batch {inquiry.step} has {inquiry.alarm.phrase} {number(values[0])}, and that of step "
    )
    sentence += f"{found.batch} {number(values[1])}"
    if kept >= KEPT:
        inquiry.found("long ago", f"{sentence[0].upper()}{sentence[1:]}: it was bad then too.", "data", kept=kept)
        return True
    inquiry.refute("data", f"{sentence}: it was harmless then, and an update since has spoilt the state for it")
    return False


def earlier(inquiry: Inquiry, update: int, usual: int, *, plain: bool) -> Conclusion | None:
    """The conclusion where the batch of an earlier update is odd, and with a usual one in its place the rise is gone.

    Args:
        update: the step; usual: the step whose batch is the usual one.
        plain: look only for what is plainly wrong: rows that are, or a step that a rule flags. Otherwise for what is
            left: rows that are merely unusual. Near an instability any batch may tip the balance, and another one in
            its place takes the rise away; so these rows have to do it, and the others not.
    """
    step, loss = inquiry.step, float(inquiry.scene.moment(update).loss)
    own = inquiry.tried(f"the rows of step {update}", update, None)
    first = None if own is None else inquiry.trials.with_rows(own[0], update - 1)
    sets = [] if first is None else rows_of(inquiry, update, first)
    wrong = update in inquiry.flagged or any(one.wrong for one in (sets[0] if sets else []))
    if wrong != plain or update == usual:
        return None
    if not wrong and not sets:
        inquiry.refute("data", f"the batch of step {update} is usual: loss {number(loss)}, no row stands out")
        return None
    redone = inquiry.tried(f"another batch in step {update}", update, f"batch={usual}")
    if redone is None:
        return None
    sentence = f"With the batch of step {usual} in step {update}, step {step} has {inquiry.comparison(redone[-1])}"
    if not inquiry.gone(redone[-1]):
        inquiry.refute("data", f"{sentence}: the rise stays")
        return None
    if not wrong and not _these_rows(inquiry, update, usual, sets[0]):
        return None
    inquiry.found("another batch", f"{sentence}: the rise is gone.", "data", redone=inquiry.value(redone[-1]))
    judged, told = (first is not None and one(first) for one in (partial(_judged, inquiry, update), _told))
    suspected = sets[0] if sets else []
    culprit, rows = named(inquiry, update, suspected, _count(inquiry, update), judged=judged, losses=told)
    return Conclusion(
        "data",
        f"The batch of step {update} did it, by the update that it made: {rows}.",
        culprit,
        f"the same rise at step {step} with another batch in step {update}",
        [skipping(update), setting("lr=0.1x", update)],
    )


def _these_rows(inquiry: Inquiry, update: int, usual: int, rows: Sequence[Suspect]) -> bool:
    """Whether the rise goes with some rows of an earlier batch, and stays with all others."""
    whole, numbers = _count(inquiry, update), sorted(one.row for one in rows)
    shapes = [[array.shape for array in inquiry.batch(one)] for one in (update, usual)]
    if len(numbers) in (0, whole) or shapes[0] != shapes[1]:
        return False
    others = [row for row in range(whole) if row not in numbers]
    for some, gone in ((numbers, True), (others, False)):
        batch = _mixed(inquiry, update, usual, some)
        redone = inquiry.tried(f"{numbered(some)} exchanged in step {update}", update, None, batch=batch)
        if redone is None:
            return False
        sentence = f"with {numbered(some)} of step {update} exchanged, step {inquiry.step} has "
        sentence += inquiry.comparison(redone[-1])
        if inquiry.gone(redone[-1]) != gone:
            inquiry.refute("data", f"{sentence}: {'the rise stays' if gone else 'other rows do as well'}")
            return False
        inquiry.found(
            "rows exchanged", f"{sentence[0].upper()}{sentence[1:]}.", "data", redone=inquiry.value(redone[-1])
        )
    return True


# ---- rows


def _count(inquiry: Inquiry, step: int) -> int:
    """Rows of a batch; 0 where its arrays have no leading axis in common."""
    sizes = {len(array) if array.ndim else 0 for array in inquiry.batch(step)}
    return sizes.pop() if len(sizes) == 1 else 0


def _judged(inquiry: Inquiry, step: int, own: Shot) -> bool:
    """Whether rows of the batch can be told apart: by their losses, or as tokens."""
    return _told(own) or is_tokens(inquiry.batch(step))


def _told(own: Shot) -> bool:
    """Whether the loss of a row is known."""
    return own.row_losses is not None and not np.isnan(own.row_losses).all()


def rows_of(inquiry: Inquiry, step: int, own: Shot) -> list[list[Suspect]]:
    """Sets of rows of the batch of a step that may be to blame, the likeliest first.

    Args:
        own: the step, performed.
    """
    trials, neutral = inquiry.trials, inquiry.neutral()
    if not _count(inquiry, step):
        inquiry.skip("rows", f"the arrays of batch {step} have no leading axis in common")
        return []
    past = [other for other in range(max(1, step - CONTEXT), step) if other not in inquiry.flagged]
    past = [other for other in past if inquiry.drawn(other)]
    usual = None
    if own.row_losses is not None and neutral is not None and inquiry.affords(USUAL, "losses of usual rows", kept=0):
        others = list(dict.fromkeys([neutral, *past]))[:USUAL]
        state = inquiry.last if step == inquiry.step else inquiry.earliest
        shots = [trials.with_rows(trials.shot(state, other), state) for other in others]
        usual = np.concatenate([one.row_losses for one in shots if one.row_losses is not None] or [np.empty(0)])
    batches = [inquiry.batch(other) for other in past]
    by_loss = inquiry.alarm.metric == "loss"
    return suspects(inquiry.batch(step), batches, own.row_losses, usual, by_loss=by_loss)


def _proven(inquiry: Inquiry, found: Square, sets: list[list[Suspect]], whole: int) -> list[Suspect]:
    """The first set of rows whose exchange for usual ones takes the rise away; of all rows the 2×2 has shown it."""
    step = inquiry.step
    shapes = [[array.shape for array in inquiry.batch(one)] for one in (step, found.batch)]
    for rows in sets:
        if len(rows) == whole:
            return rows
        if shapes[0] != shapes[1]:
            inquiry.skip("rows exchanged", f"batches {step} and {found.batch} are of other shapes")
            return rows
        numbers = sorted(one.row for one in rows)
        one = _exchanged(inquiry, found.batch, numbers)
        gone, single = inquiry.gone(one), len(numbers) == 1
        they, carry, do = ("it", "carries", "does") if single else ("they", "carry", "do")
        carried = f"{they} {carry} it" if gone else f"{they} {do} not carry it alone"
        inquiry.found(
            "rows exchanged",
            f"With {numbered(numbers)} exchanged for {'that' if single else 'those'} of batch {found.batch}, step "
            f"{step} has {inquiry.comparison(one)}: {carried}.",
            "data",
            exchanged=inquiry.value(one),
        )
        if gone:
            return rows
    return []


def _exchanged(inquiry: Inquiry, other: int, rows: Sequence[int]) -> Shot:
    """Step N on its batch, with some rows from the same places of another step's batch."""
    scene, step = inquiry.scene, inquiry.step
    state, moment = scene.before()
    batch = _mixed(inquiry, step, other, rows)
    with scene.at_rest():
        attempt = Attempt(scene, state, replace(moment, batch=batch), scene.stepper)
        put(attempt.stepper.experiment, attempt.state)
        return shot(step, attempt.perform(attempt.moment))


def _mixed(inquiry: Inquiry, step: int, other: int, rows: Sequence[int]) -> Batch:
    """The batch of a step, with some rows from the same places of another step's batch."""
    mask = np.zeros(_count(inquiry, step), bool)
    mask[list(rows)] = True
    chosen = mx.array(mask)
    return tuple(
        mx.where(chosen.reshape(-1, *[1] * (one.ndim - 1)), two, one) if one.ndim else one
        for one, two in zip(inquiry.scene.batch(step), inquiry.scene.batch(other), strict=True)
    )
