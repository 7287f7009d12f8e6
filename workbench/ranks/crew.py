"""A recorder's link to those of the other ranks: what each tells the others at each step, and what must be equal.

Every rank sends what its step was, and where its data and random state stand then; rank 0 writes it down for all. So
nothing that one rank does waits on a file of another, and a checkpoint of rank 0 is one of all ranks. Knows
observations, states and the world; writes nothing.
"""

from __future__ import annotations

import logging
import math
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ..bits import bits_float
from ..errors import ExperimentError
from ..experiment import Experiment, kept_arrays, state_arrays
from ..fingerprint import fingerprint
from ..observe import Observation
from ..snapshot import State
from .own_line import differing, mean_loss
from .rank_parts import RankPart
from .rank_setup import RankSetup
from .told_apart import told_apart
from .world import World, barrier, exchange_json, world

PATIENCE = 20  # seconds that a rank waits for the others without a word
WAITING = (
    "rank %d has waited %d s for the others before its first step: every rank makes the same recorder, not only one"
)
log = logging.getLogger("workbench")
SHARED = ("weights", "adam_m", "adam_v", "other")  # lanes that are equal in all ranks; see `lines.line.LANES`


class RanksDiverged(ExperimentError):
    """The ranks no longer train one model."""


@dataclass(frozen=True)
class Shared(Observation):
    """A step of all ranks, as telemetry sees it on rank 0: `loss` is the mean over ranks, all else this rank's.

    Attributes:
        ranks: what each rank has otherwise than rank 0.
    """

    ranks: list[dict[str, Any]] = field(default_factory=list)

    def fields(self) -> dict[str, Any]:
        return super().fields() | {"ranks": self.ranks}


def setup_here() -> RankSetup | msgspec.UnsetType:
    """Who trains here, as a manifest says it. All ranks ask together."""
    here = world()
    if here.size == 1:
        return msgspec.UNSET
    hosts = exchange_json(socket.gethostname())
    return RankSetup(size=here.size, backend=str(here.backend), connections=here.connections, hosts=hosts)


def crew_here(experiment: Experiment, path: Path, recovers: bool) -> Crew | None:
    """The link to the other ranks; None: this process trains alone.

    Args:
        path: the run's folder.
        recovers: unstable steps are to be taken back.

    Raises:
        ExperimentError: that is asked for, and there are other ranks.
    """
    if world().size == 1:
        return None
    if recovers:
        raise ExperimentError(
            f'auto_rollback is "on", and {world().size} ranks train together: going back is not made for several. Use '
            '"warn", which keeps the state before an unstable step, and resume from that'
        )
    return Crew(experiment, path, world())


class Crew:
    """
    Attributes:
        leads: this is rank 0, which writes.
        meta: of the state that a segment starts from: what each rank has otherwise than rank 0, for the meta line.
    """

    def __init__(self, experiment: Experiment, path: Path, here: World) -> None:
        self._experiment, self._path, self._here = experiment, path, here
        self.leads = here.rank == 0
        self.meta: list[dict[str, Any]] = []
        self._parts: tuple[RankPart, ...] = ()
        self._told: list[dict[str, str]] = []  # lanes by rank, of the last exchange

    def begin(self, state: State, lanes: Mapping[str, str], facts: Mapping[str, Any]) -> State:
        """Before the first step: whether all ranks are to do the same, from the same state.

        Args:
            state: from which this rank starts.
            lanes: its fingerprints.
            facts: what has to be equal beside it, each under the words that name it; JSON.

        Returns:
            The state, with the parts of all ranks.

        Raises:
            ExperimentError: something differs, which it names.
        """
        waiting = threading.Timer(PATIENCE, log.warning, (WAITING, self._here.rank, PATIENCE))
        waiting.daemon = True
        waiting.start()
        given = {"the run's folder": str(self._path.absolute()), "the step": state.step} | dict(facts)
        try:
            told = exchange_json(given | {"rng": state.rng, "cursor": state.cursor, "lanes": dict(lanes)})
        finally:
            waiting.cancel()
        for name, value in told[0].items():
            if name in ("rng", "cursor", "lanes"):
                continue
            for rank, one in enumerate(told):
                if one[name] != value:
                    theirs, first = told_apart(one[name], value)
                    raise ExperimentError(
                        f"the ranks do not train the same run: {name} is {theirs} on rank {rank}, and {first} on rank "
                        "0; start all of them with the same program and arguments"
                    )
        self._told = [one["lanes"] for one in told]
        self._refuse(
            "rank {rank} starts with other {lanes} than rank 0, first {tensor}: each rank made its own. Seed all ranks "
            "alike before the model is made (mx.random.seed), or load the same weights in each"
        )
        self._take(told)
        return self.whole(state)

    def compare(self, lanes: Mapping[str, str]) -> None:
        """After the first step, before anything is written.

        Raises:
            RanksDiverged: its update was another one in some rank.
        """
        self._told = exchange_json(dict(lanes))
        self._refuse(
            "rank {rank} diverged at the first step: {lanes} differ from rank 0's, first {tensor}, and were equal "
            "before it. Its gradients were not averaged over the ranks: call nn.average_gradients(gradients) before "
            "optimizer.update"
        )

    def share(self, seen: Observation, cursor: dict[str, Any], rng: tuple[int, int], more: Mapping[str, Any]) -> Shared:
        """Tells the other ranks of a step, and learns of theirs.

        Args:
            seen: this rank's step.
            cursor, rng: of the state that it left.
            more: further fields of its telemetry line.
        """
        fields = msgspec.to_builtins(seen.fields() | dict(more))
        told = exchange_json({"fields": fields, "rng": rng, "cursor": cursor})
        self._take(told)
        self._told = [one["fields"]["state"] for one in told]
        mean = mean_loss([float(bits_float(one["fields"]["loss_bits"])) for one in told])
        first = told[0]["fields"]
        own = [
            {"rank": rank, "loss": one["fields"]["loss"], "loss_bits": one["fields"]["loss_bits"]}
            | differing(one["fields"], first)
            for rank, one in enumerate(told)
        ]
        common = {name: getattr(seen, name) for name in seen.__dataclass_fields__}
        # Of what every rank judges by, all have the same, or one would save or stop where another goes on.
        norm = bits_float(first["grad_norm_bits"]) if "grad_norm_bits" in first else math.nan  # of no gradients
        common |= {"loss": mean, "grad_norm": np.float32(norm)}
        return Shared(**common, ranks=own)

    def stored(self, trouble: str | None, step: int) -> str | None:
        """Whether the batches of all ranks are on the disk, before the checkpoint of a step says that they are.

        Args:
            trouble: a sentence, where those of this rank are not.

        Returns:
            A sentence, where those of any rank are not.
        """
        told = exchange_json(trouble)
        rank = next((rank for rank, one in enumerate(told) if one), None)
        return None if rank is None else trouble or f"checkpoint {step} was not saved: rank {rank} says: {told[rank]}"

    def refuse_diverged(self, step: int) -> None:
        """After the step was logged.

        Raises:
            RanksDiverged: the state that it left is another one in some rank.
        """
        self._refuse(
            f"rank {{rank}} diverged at step {step}: {{lanes}} differ from rank 0's, first {{tensor}}, and were equal "
            f"until step {step - 1}. Something in that rank's update was its own: an operation that gives other bits "
            "there, a fault of the memory, or a change that the loop made on one rank only. Resume from a checkpoint "
            "before it"
        )

    def moved(self, state: State, lanes: Mapping[str, str]) -> State:
        """A state that the loop has changed between two steps, with the parts of all ranks.

        Raises:
            RanksDiverged: it was changed in another way in some rank.
        """
        told = exchange_json({"rng": state.rng, "cursor": state.cursor, "lanes": dict(lanes)})
        self._told = [one["lanes"] for one in told]
        self._refuse(
            f"rank {{rank}} changed the state after step {state.step} in another way than rank 0: {{lanes}} differ, "
            "first {tensor}; change it alike on all ranks"
        )
        self._take(told)
        return self.whole(state)

    def end(self) -> None:
        """After a signal, by which all ranks end after the same step: waits for rank 0, which may still be saving the
        last state. The launcher ends all ranks when the first has ended otherwise than with success."""
        barrier()

    def whole(self, state: State) -> State:
        """This rank's state, with the parts of all ranks as they were told last."""
        return replace(state, ranks=self._parts)

    def _take(self, told: list[dict[str, Any]]) -> None:
        self._parts = tuple(RankPart(tuple(one["rng"]), one["cursor"]) for one in told)
        if "lanes" in told[0]:
            first = told[0]["lanes"]
            self.meta = [
                {"rank": rank} | differing({"state": one["lanes"]}, {"state": first}) for rank, one in enumerate(told)
            ]

    def _refuse(self, sentence: str) -> None:
        """All ranks know all lanes, so that all of them come to the same end."""
        for rank, lanes in enumerate(self._told):
            unlike = [lane for lane in SHARED if lanes.get(lane) != self._told[0].get(lane)]
            if unlike:
                named = ", ".join(unlike)
                raise RanksDiverged(sentence.format(rank=rank, lanes=named, tensor=self._first_tensor(rank)))

    def _first_tensor(self, rank: int) -> str:
        """The first tensor of the state in which a rank differs from rank 0."""
        arrays = state_arrays(self._experiment.model) | {
            f"optimizer {path}": array for path, array in kept_arrays(self._experiment).items()
        }
        told = exchange_json({path: fingerprint({path: array}) for path, array in arrays.items()})
        return next((path for path in told[0] if told[rank].get(path) != told[0][path]), "one that was changed since")
