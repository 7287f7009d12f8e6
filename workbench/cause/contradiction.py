"""A telemetry that contradicts a replay whose every premise is verified: a transient fault, in the step or in the log.

What is claimed needs five proofs: the environment is the run's, the state before the step and its batch have the bits
that were logged, the step gives the same bits again, here and in a fresh process, and nothing speaks for a value that
the loop set beside the state (`aftermath`). Then one of two witnesses is wrong, and it is the one that can't be asked
again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..bits import bits_float
from ..compare import ITEMS, Item, mismatches
from ..divergence.fresh_process import perform
from ..divergence.tensors import Tensors, step_tensors
from ..errors import WorkbenchError
from ..experiment import read_cursor, set_random_key
from ..fingerprint import known_method
from ..interventions.attempt import put
from ..interventions.scene import Scene
from ..number_text import number
from ..observe import observe
from ..seams import state_segment
from ..snapshot import State, capture
from ..verdict import Cause
from .aftermath import objection
from .inquiry import Conclusion, Inquiry, Tried

LANES = tuple(name for name in ITEMS if name.startswith("state."))


@dataclass(frozen=True)
class Culprit:
    """The first item that differs, in order of execution, and where.

    Attributes:
        layer: None where the item is of the whole step.
        recorded, replayed: as bits.
    """

    item: str
    layer: str | None
    recorded: str | None
    replayed: str | None

    @property
    def flipped(self) -> int | None:
        """The one bit in which they differ; None if it is not one."""
        if self.recorded is None or self.replayed is None or not _is_float(self.recorded):
            return None
        difference = int(self.recorded, 16) ^ int(self.replayed, 16)
        return difference.bit_length() - 1 if difference.bit_count() == 1 else None

    def sentence(self) -> str:
        where = f" of {self.layer or 'the model'}" if self.layer is not None else ""
        both = ""
        if self.recorded and self.replayed and _is_float(self.recorded):
            both = f": {number(bits_float(self.recorded), 6)} logged, {number(bits_float(self.replayed), 6)} replayed"
        return f"{_WORDS.get(self.item, self.item)}{where}{both}"


def _is_float(bits: str) -> bool:
    """Whether they are those of a number, not a digest."""
    return bits.startswith("0x")


_WORDS = {
    "per_layer_act_norms": "activation norm",
    "per_layer_grad_norms": "gradient norm",
    "adam_m_norms": "norm of Adam's m",
    "adam_v_norms": "norm of Adam's v",
    "grad_norm": "global gradient norm",
}


def first_culprit(items: dict[str, Item], layers: list[str]) -> Culprit:
    """The first item that differs; of a per-layer one the first layer, for gradients the last one, which is computed
    first."""
    name = mismatches(items)[0]
    item = items[name]
    if not isinstance(item.recorded, list) or not isinstance(item.replayed, list):
        return Culprit(name, None, _text(item.recorded), _text(item.replayed))
    unlike = [i for i, pair in enumerate(zip(item.recorded, item.replayed, strict=False)) if pair[0] != pair[1]]
    if not unlike:
        return Culprit(name, None, None, None)
    place = unlike[-1] if name == "per_layer_grad_norms" else unlike[0]
    layer = layers[place] if place < len(layers) else None
    return Culprit(name, layer, item.recorded[place], item.replayed[place])


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def masked(scene: Scene) -> float | None:
    """What telemetry has in the place of a loss that is not finite, where all else that it logged of the step agrees:
    some trainers log a running mean instead. None where nothing is masked."""
    logged = scene.items["loss"].recorded
    if not isinstance(logged, str) or math.isfinite(float(scene.result.loss)):
        return None
    value, departed = float(bits_float(logged)), scene.first_difference
    alone = set(mismatches(scene.items)) <= {"loss", "grad_norm"} and departed is not None and departed.where == "step"
    return value if alone and math.isfinite(value) else None


def examine(inquiry: Inquiry) -> Conclusion | None:
    """The conclusion where the scene's first difference is at its own step N; None where a proof fails, which is then
    noted."""
    scene, step = inquiry.scene, inquiry.step
    verified, why = _unproven(inquiry)
    if why:
        inquiry.refute("transient-fault", f"it can't be told from a replay that is not the run's: {why}")
        return None
    culprit = first_culprit(scene.items, scene.layers)
    after = [name.removeprefix("state.") for name in LANES if scene.items[name].verdict == "mismatch"]
    kept = not after and scene.items["state.weights"].verdict == "exact"
    against = objection(inquiry, kept=kept, one_bit=culprit.flipped is not None)
    supports: Cause = "unknown" if against else "transient-fault"
    pair = {"logged": culprit.recorded, "replayed": culprit.replayed}
    numbers = {name: float(bits_float(bits)) for name, bits in pair.items() if bits is not None and _is_float(bits)}
    inquiry.found(
        "contradiction",
        f"State {step - 1} has the logged bits ({', '.join(verified)}), batch {step} has the logged hash, and the step "
        f"gives the same bits again; yet the log differs, first in the {culprit.sentence()}.",
        supports,
        **numbers,
    )
    if against:
        return Conclusion(
            "unknown",
            f"The log of step {step} contradicts its replay, and why is not known. {against}",
            {},
            "a replay that has the run's bits: then causes can be tried",
        )
    if after:
        what = f"The state that the step left differs too ({', '.join(after)}): the step itself went wrong."
        reason = f"Something went wrong while step {step} was computed, and no replay repeats it"
    elif not kept:
        what = "The state that the step left was not logged."
        reason = f"Something went wrong while step {step} was computed or logged, and no replay repeats it"
    else:
        what = "The state that the step left has the logged bits: the step went right, and only its log line is wrong."
        reason = f"The log of step {step} is wrong, and the step itself went right"
    inquiry.found("state after the step", what, "transient-fault", lanes=len(after))
    bit = "" if culprit.flipped is None else f" (one bit, number {culprit.flipped})"
    return Conclusion(
        "transient-fault",
        f"{reason}: the first difference is the {culprit.sentence()}{bit}.",
        _named(inquiry, culprit),
        f"a repetition of step {step} that gives the logged bits, or a change that the loop itself made to the state "
        f"after step {step - 1}, unseen by the recorder",
        [Tried("", step, "", words="the same step again", note="nothing is changed, and the fork will not repeat it")],
    )


def _named(inquiry: Inquiry, culprit: Culprit) -> dict[str, Any]:
    named: dict[str, Any] = {"step": inquiry.step, "item": culprit.item}
    if culprit.layer is not None:
        named["layer"] = culprit.layer
        owned = inquiry.scene.stepper.owned.get(culprit.layer, [])
        named |= {"parameter": owned[0]} if len(owned) == 1 else {}
    return named if culprit.flipped is None else named | {"bit": culprit.flipped}


def _unproven(inquiry: Inquiry) -> tuple[list[str], str]:
    """The lanes of state N-1 that are verified; and which proof fails, "" if none does."""
    scene, run = inquiry.scene, inquiry.run
    if scene.unlike:
        return [], f"this machine differs from the run's ({'; '.join(scene.unlike)})"
    verified, unlike = _verified(inquiry)
    if unlike or "weights" not in verified:
        return [], f"state {inquiry.last} is not verified ({', '.join(unlike) or 'the run did not log its weights'})"
    if scene.items["batch_hash"].verdict != "exact":
        return [], "the batch is not verified"
    environment = run.manifest.segments[run.manifest.lineage(scene.segment, scene.step)].environment
    backend = environment.get("backend", "cpu")
    if backend != "cpu" and not run.manifest.options.get("deterministic", False):
        return [], "it was recorded with kernels that need not repeat their own bits"
    tensors, same = _again(scene)
    if not same:
        return [], "the step gave other bits when it was repeated in this process"
    return verified, _elsewhere(inquiry, tensors, backend)


def _verified(inquiry: Inquiry) -> tuple[list[str], list[str]]:
    """The lanes of state N-1 that have the logged bits, and those that do not. What the loop itself changed in the
    state, and logged so, is in neither."""
    run, scene = inquiry.run, inquiry.scene
    held = scene.state(inquiry.last).lanes(known_method(run.manifest.fingerprint, run.path))
    holder = state_segment(run.manifest, run.checkpoints, inquiry.last, scene.segment)
    recorded = run.state_evidence(inquiry.last, holder)
    edited = run.edits(inquiry.step, scene.segment)
    own = ("rng", "other") if edited is not None else ()
    known = {lane: value for lane, value in held.items() if f"state.{lane}" in recorded and lane not in own}
    verified = [lane for lane, value in known.items() if recorded[f"state.{lane}"] == value]
    return verified, [lane for lane in known if lane not in verified]


def _again(scene: Scene) -> tuple[Tensors, bool]:
    """The step once more: its tensors, and whether all that telemetry logs has the same bits again."""
    experiment = scene.stepper.experiment
    before, moment = scene.before()
    with scene.at_rest():
        put(experiment, before)
        next(experiment.sampler)
        cursor = read_cursor(experiment.sampler)
        set_random_key(moment.key)
        result = scene.stepper(moment.batch)
        scene.computed += 1
        assert moment.seen is not None
        seen = observe(scene.stepper, moment.batch, result, cursor, moment.seen.method)
        after: State = capture(experiment, scene.step, cursor)
        found = step_tensors(scene.layers, scene.stepper.owned, moment.batch, result, after)
        mx.eval(list(found.values()))
    return found, seen.evidence() == moment.seen.evidence()


def _elsewhere(inquiry: Inquiry, tensors: Tensors, backend: str) -> str:
    """Why a fresh process does not confirm it; "" if it does, or can't be asked, which is noted."""
    scene, run = inquiry.scene, inquiry.run
    factory = inquiry.opening.get("factory")
    if run.manifest.rebuild.get("kind") != "trainer" and factory is None:
        inquiry.skip("repetition in a fresh process", "this experiment exists only here; pass factory= to have it")
        return ""
    try:
        first, count = perform(
            run, scene.state(scene.step - 1), tensors, backend=backend, factory=factory, variables={}
        )
    except WorkbenchError as error:
        inquiry.skip("repetition in a fresh process", str(error))
        return ""
    inquiry.extra += 1
    return "" if not count else f"a fresh process gave other bits, first in the {first}"
