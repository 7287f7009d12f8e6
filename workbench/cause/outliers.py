"""What stands out in a step, whether or not it spiked: rows, layers, gradients that are exactly 0, weights that did not
move, a log that contradicts the replay. Knows an inquiry; judges no cause.
"""

from __future__ import annotations

from collections.abc import Iterator

import mlx.nn as nn
import numpy as np
import pandas as pd

from ..compare import mismatches
from ..enumeration import some
from ..interventions.scene import CONTEXT
from ..kind_names import moment_names
from ..lines.line import ARRAYS
from ..number_text import number
from ..probes import measure, untrained
from ..probes.neighbours import THRESHOLD, scored
from ..probes.onsets import onsets
from ..verdict import Numbers, Outlier
from . import batch_cause
from .contradiction import first_culprit
from .inquiry import Inquiry
from .resumed import seams
from .suspects import is_tokens

DROPOUT = (nn.Dropout, nn.Dropout2d, nn.Dropout3d)
MOST = 0.5  # of a tensor's elements
WINDOW = 24  # steps before, as far as they are held, that are the yardstick
NAMED = 5  # layers or tensors named in a sentence
KINDS = dict(zip(ARRAYS, ("activation", "gradient", "adam_m", "adam_v"), strict=True))


def outliers(inquiry: Inquiry) -> list[Outlier]:
    """One a thing that stands out, in the order of execution."""
    found = [*_log(inquiry), *_seams(inquiry), *_rows(inquiry), *_layers(inquiry)]
    return [*found, *_frozen_mask(inquiry), *_zero_gradients(inquiry), *_updates(inquiry)]


def _log(inquiry: Inquiry) -> Iterator[Outlier]:
    scene = inquiry.scene
    if scene.first_difference is not None and mismatches(scene.items):
        culprit = first_culprit(scene.items, scene.layers)
        what = f"The replay of step {scene.step} differs from its log, first in the {culprit.sentence()}."
        yield Outlier(name="not reproduced", sentence=what)
    hashes = {step: seen.batch_hash for step in _near(inquiry) if (seen := scene.moment(step).seen) is not None}
    own = hashes.pop(scene.step, None)
    if again := [step for step, value in hashes.items() if value == own]:
        yield Outlier(name="repeated batch", sentence=f"Batch {scene.step} is that of step {again[-1]} again.")


def _near(inquiry: Inquiry) -> range:
    return range(inquiry.earliest + 1, inquiry.step + 1)


def _seams(inquiry: Inquiry) -> Iterator[Outlier]:
    if inquiry.alarm.rule is not None:
        return
    for seam in seams(inquiry.run, inquiry.scene.segment, inquiry.step):
        yield Outlier(
            name="seam",
            sentence=f"Segment {seam.segment} went on after step {seam.start} from another state than the one logged "
            f"({', '.join(seam.lanes)}).",
            numbers=Numbers.of({"steps before": inquiry.step - seam.start - 1}),
        )


def _rows(inquiry: Inquiry) -> Iterator[Outlier]:
    """Rows are sought on a step that no rule flags; on one that spiked it is for a cause to say."""
    step = inquiry.step
    batch = inquiry.batch(step)
    if inquiry.alarm.rule is not None or not is_tokens(batch):
        return
    own = inquiry.trials.own()
    sets = batch_cause.rows_of(inquiry, step, own)
    for one in sets[0] if sets else []:
        if not one.wrong and (one.z or 0.0) <= THRESHOLD:
            continue
        what = "; ".join(one.why) or "high loss"
        loss = "" if one.loss is None else f", loss {number(one.loss)} a token"
        z = "" if one.z is None or not np.isfinite(one.z) else f", {one.z:.1f} robust deviations above usual rows"
        yield Outlier(
            name="row",
            sentence=f"Row {one.row} of the batch: {what}{loss}{z}.",
            numbers=Numbers.of({"row": one.row, "loss": one.loss, "z": one.z}),
        )


def _layers(inquiry: Inquiry) -> Iterator[Outlier]:
    """Layers whose logged norms stand far from those of the healthy steps before; and where that began."""
    scene = inquiry.scene
    first = max(scene.first, inquiry.last - WINDOW) + 1
    scores = _scores(inquiry, range(first, scene.step + 1))
    far = scores[scores["z"].abs() > THRESHOLD]
    own, names = far[far["step"] == scene.step], moment_names(inquiry.run.manifest.optimizer)
    for row in own.reindex(own["z"].abs().sort_values(ascending=False, kind="stable").index).head(NAMED).itertuples():
        kind = names.get(row.kind, row.kind)
        yield Outlier(
            name="layer",
            sentence=f"The {kind} norm of {row.layer or 'the model'} is {number(row.value)}, {row.z:+.1f} robust "
            "deviations from the steps before.",
            numbers=Numbers.of({"value": row.value, "z": row.z}),
        )
    if inquiry.alarm.rule is None:
        return
    began = onsets(scores[scores["step"] >= scene.step - CONTEXT], scene.step, THRESHOLD)
    earlier = began[began["step"] < scene.step].sort_values("step", kind="stable")
    if len(earlier):
        row = earlier.iloc[0]
        kind = names.get(row["kind"], row["kind"])
        yield Outlier(
            name="onset",
            sentence=f"The first norm that left its usual range, from {CONTEXT} steps before on, is the {kind} norm "
            f"of {row['layer'] or 'the model'} at step {row['step']} ({row['z']:+.1f} robust deviations).",
            numbers=Numbers.of({"step": row["step"], "z": row["z"]}),
        )


def _scores(inquiry: Inquiry, steps: range) -> pd.DataFrame:
    """The logged norms of layers in steps, by step and in order of execution, each with its robust z."""
    scene, rows = inquiry.scene, []
    for step in steps:
        seen = scene.moment(step).seen
        for name, kind in KINDS.items():
            for layer, norm in zip(scene.layers, seen.norms[name] if seen else (), strict=False):
                rows.append((step, layer, layer, kind, "l2", np.nan if norm is None else float(norm)))
    frame = pd.DataFrame(rows, columns=["step", "layer", "path", "kind", "statistic", "value"])
    undefined = frame.groupby(["layer", "kind"])["value"].transform(lambda values: values.isna().all())
    flagged = [step for step in inquiry.flagged if step != scene.step]
    return scored(frame[~undefined.astype(bool)], flagged) if len(frame) else frame.assign(z=[])


def _frozen_mask(inquiry: Inquiry) -> Iterator[Outlier]:
    """Dropout without a draw: the mask is a constant of a compiled function that did not capture the random state."""
    modules = inquiry.scene.stepper.experiment.model.named_modules()
    active = [path or "(model)" for path, one in modules if isinstance(one, DROPOUT) and one.training and one._p_1 < 1]
    if active and not inquiry.scene.draws:
        yield Outlier(
            name="frozen mask",
            sentence=f"Dropout is active in {len(active)} module{'' if len(active) == 1 else 's'} "
            f"({some(sorted(active))}), and the step draws no random numbers: every step has the same mask. A "
            "compiled function has to capture mx.random.state.",
            numbers=Numbers.of({"modules": len(active)}),
        )


def _zero_gradients(inquiry: Inquiry) -> Iterator[Outlier]:
    scene = inquiry.scene
    seen = scene.moment(scene.step).seen
    if seen is None:
        return
    norms = seen.norms["per_layer_grad_norms"]
    zero = [layer for layer, norm in zip(scene.layers, norms, strict=True) if norm is not None and norm == 0]
    if zero:
        yield Outlier(
            name="zero gradient",
            sentence=f"The gradient is exactly 0 in {len(zero)} of {len(scene.layers)} layers: "
            f"{some(layer or '(model)' for layer in zero)}.",
            numbers=Numbers.of({"layers": len(zero)}),
        )
    if frozen := untrained.untrained(scene.state(scene.step).weights, scene.stepper.owned):
        yield Outlier(
            name="not trained",
            sentence=untrained.sentence(frozen, scene.stepper.owned),
            numbers=Numbers.of({"parameters": len(frozen)}),
        )


def _updates(inquiry: Inquiry) -> Iterator[Outlier]:
    """Tensors that rounding kept where they were, and those in which epsilon sets the size of the update."""
    scene = inquiry.scene
    experiment = scene.stepper.experiment
    before, after = scene.state(scene.step - 1), scene.state(scene.step)
    updates = measure.parameter_updates(experiment, before, after, scene.result)
    still = [one for one in updates if one.stuck_fraction == 1]
    if still:
        dtypes = ", ".join(dict.fromkeys(one.dtype for one in still))
        names = some(one.path for one in still)
        yield Outlier(
            name="stuck",
            sentence=f"{len(still)} of {len(updates)} tensors did not move: each change was under half a unit in the "
            f"last place of its weight ({dtypes}): {names}.",
            numbers=Numbers.of({"tensors": len(still)}),
        )
    if small := [one.path for one in updates if (one.eps_fraction or 0.0) > MOST]:
        yield Outlier(
            name="epsilon",
            sentence=f"√v is below epsilon in most elements of {len(small)} of {len(updates)} tensors: {some(small)}.",
            numbers=Numbers.of({"tensors": len(small)}),
        )
