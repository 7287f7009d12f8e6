"""The manifest of a run that is being recorded: as it begins, and with one more segment.

Knows experiments and the format; writes nothing.
"""

from __future__ import annotations

import time
import uuid
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from .. import __version__, norms
from ..environment import numeric_environment
from ..experiment import Experiment, state_arrays
from ..hyperparameters import describe_optimizer, told
from ..manifest import Manifest, Parameter, Segment
from ..plain_batches import PlainBatches
from ..ranks.rank_setup import RankSetup
from ..sources import code_of
from ..step import Stepper
from .terms import Terms


def first_manifest(
    experiment: Experiment,
    stepper: Stepper,
    terms: Terms,
    *,
    began: float,
    start: int,
    rate_factor: float,
    fingerprint: str,
    optimizer: dict[str, Any],
    ranks: RankSetup | UnsetType = UNSET,
    values: dict[str, str] | UnsetType = UNSET,
) -> Manifest:
    """The manifest of a new run.

    Args:
        stepper: has performed the first step, and so found the layers' order.
        began: Unix time in seconds.
        start: step of the first state; more than 0 in a fork.
        rate_factor: what schedules of learning rates are multiplied by.
        fingerprint: method of the fingerprints.
        optimizer: its description from before the first step.
        ranks: who trains together; left out: this process alone.
        values: what the step read beside its state before it was first performed.
    """
    environment = numeric_environment()
    return Manifest(
        run=uuid.uuid4().hex,
        created=began,
        workbench=__version__,
        rebuild=terms.rebuild,
        options=msgspec.to_builtins(experiment.options),
        optimizer=told(optimizer, describe_optimizer(experiment.optimizer), terms.ignore),
        data=list(terms.data),
        layers=stepper.layers,
        owned=stepper.owned,
        parameters=[
            Parameter(path, list(array.shape), str(array.dtype).removeprefix("mlx.core."))
            for path, array in state_arrays(experiment.model).items()
        ],
        fingerprint=fingerprint,
        norms=norms.method_here(),
        save_every=terms.save_every,
        keep_last=terms.keep[0],
        keep_every=terms.keep[1],
        spikes=None if terms.spikes is None else msgspec.to_builtins(terms.spikes),
        segments=[
            Segment(
                segment=0,
                start=start,
                parent=None,
                t=began,
                environment=environment,
                code=code_of(experiment, terms.rebuild),
                rate_factor=rate_factor,
                values=values,
            )
        ],
        parent=terms.parent,
        recovery=msgspec.to_builtins(terms.recovery),
        stored_batches=isinstance(experiment.sampler, PlainBatches),
        own_step=experiment.step_fn is not None,
        numbers=True,
        loss=str(experiment.loss_form[0]).rpartition(".")[2],
        numpy=experiment.numpy is not False,
        ignore=list(terms.ignore) or UNSET,
        sealed=True,
        extra=sorted(experiment.extra),
        ranks=ranks,
    )


def with_segment(manifest: Manifest, segment: int, start: int, **changed: Any) -> Manifest:
    """The manifest with one more segment.

    Args:
        segment: the one that it goes on from.
        start: step of the state that it starts from.
        changed: fields of the new one that are others than those of `segment`.
    """
    known = manifest.segments
    settings = {"segment": len(known), "start": start, "parent": segment, "t": time.time()}
    entry = msgspec.structs.replace(known[segment], **(settings | changed))
    return msgspec.structs.replace(manifest, segments=[*known, entry])


def with_values(manifest: Manifest, segment: int, values: dict[str, str] | UnsetType) -> Manifest:
    """The manifest with other values of a segment's first step."""
    segments = list(manifest.segments)
    segments[segment] = msgspec.structs.replace(segments[segment], values=values)
    return msgspec.structs.replace(manifest, segments=segments)
