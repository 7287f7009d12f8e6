"""The trace of a replayed step, assembled of what the replay found and what the run says of itself."""

from __future__ import annotations

import mlx.core as mx
import msgspec
import numpy as np
from mlx.utils import tree_flatten

from ..batches.batch_files import as_numpy
from ..batches.row_targets import row_targets
from ..bits import float_bits, json_float
from ..experiment import Experiment
from ..probes.untrained import untrained
from ..recorded.plan import Plan
from ..replay import Outcome
from ..run import Run
from ..trace import TraceRecord


def assembled(
    run: Run, plan: Plan, outcome: Outcome, experiment: Experiment, here: dict, unlike: list[str], seconds: float
) -> TraceRecord:
    """The record of a trace, of the step that `outcome` replayed; `seconds` is what that took."""
    row_loss, token_loss = _token_losses(outcome)
    targets = _targets(run, outcome)
    forward = None if outcome.probe is None else outcome.probe.forward
    unmade = "" if outcome.probe is None else outcome.probe.unmade
    parameters: dict[str, mx.array] = dict(tree_flatten(experiment.model.parameters()))
    frozen = untrained(list(parameters), run.manifest.owned)
    return msgspec.convert(
        {"grad_norm_bits": float_bits(outcome.observation.grad_norm)}  # NaN where it is undefined
        | outcome.observation.fields()
        | {
            "run": run.manifest.run,
            "step": outcome.step,
            "segment": run.manifest.lineage(plan.segment, outcome.step),
            "exact": outcome.exact,
            "first_difference": outcome.first_difference,
            "gates": outcome.gates,
            "certified_probe": None if outcome.probe is None or unmade else outcome.probe.certified,
            "items": outcome.items,
            "layers": run.manifest.layers,
            "owned": run.manifest.owned,
            "rows": outcome.rows,
            "row_loss": row_loss,
            "token_loss": token_loss,
            "row_targets": _row_targets(run, outcome, experiment, targets),
            "targets": targets,
            "updates": outcome.updates,
            "attention": None if forward is None else forward.attention,
            "logits": None if forward is None else forward.logits,
            "certified_forward": None if outcome.probe is None else outcome.probe.certified_forward,
            "first_nonfinite": outcome.first_nonfinite,
            "checkpoint": plan.checkpoint[0],
            "rolled": outcome.step - 1 - plan.checkpoint[0],
            "environment": here,
            "environment_differences": unlike,
            "options": msgspec.to_builtins(experiment.options),
            "wall_s": round(seconds, 3),
        }
        | ({"probe_unmade": unmade} if unmade else {})
        | ({"untrained": frozen} if frozen else {}),
        type=TraceRecord,
    )


def _token_losses(outcome: Outcome) -> tuple[list[float | None] | None, list[list[float | None]] | None]:
    tokens = outcome.result.token_loss
    if tokens is None:
        return None, None
    table = np.array(tokens.astype(mx.float32))
    table = table.reshape(table.shape[0], -1)
    rows = [json_float(np.float32(row.sum(dtype=np.float64))) for row in table]
    return rows, [[json_float(value) for value in row] for row in table]


def _row_targets(run: Run, outcome: Outcome, experiment: Experiment, total: int | None) -> list[int | None] | None:
    tokens = outcome.result.token_loss
    if tokens is None:
        return None
    losses = np.array(tokens.astype(mx.float32)).astype(np.float64)
    counts = row_targets(
        losses.reshape(losses.shape[0], -1),
        as_numpy(outcome.batch),
        kind=run.manifest.rebuild.get("kind"),
        total=total,
        mean=float(outcome.result.loss) if experiment.options.accumulate == 1 else None,
    )
    return [None if count != count else int(count) for count in counts.tolist()]


def _targets(run: Run, outcome: Outcome) -> int | None:
    """As the loss function's extras or weights say; of the built-in trainer, the targets that are a token."""
    if run.manifest.rebuild.get("kind") == "trainer":
        return int(np.count_nonzero(np.asarray(outcome.batch[1]) >= 0))
    forward = None if outcome.probe is None else outcome.probe.forward
    return None if forward is None else forward.targets
