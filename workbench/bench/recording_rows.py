"""Rows of the benchmark suite: what a train step takes, and what recording it adds, beside the peers'.

Each is a ratio to the plain step of its own framework, measured in turn with it in the same process; and blocks of ours
and of each peer take turns too.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

from ..experiment import as_batch, batch_hash, read_cursor
from ..observe import measure_alongside, observe
from ..snapshot import capture
from ..step import Stepper
from .peer import Peers
from .problem import Problem, median_seconds, threads
from .recording_cost import Cost, recording_cost
from .suite_table import Measured

BLOCKS = 3
GOALS = {"small": 1.01, "tiny": 1.05}
LIMIT = 1.005  # one read of gradients, weights, m and v, at memory speed
# Peers' processes and what each is asked for; all measure beside a plain step of their own.
ASKED = {
    "torch": ("batched hooks", "a hook each", "deterministic algorithms"),
    "loggers": ("trainscope", "wandb.watch", "TensorBoard histograms"),
    "flor": ("FlorDB",),
    "cockpit": ("Cockpit, on an MLP",),
}
SLOW = {"loggers": 4, "flor": 4, "cockpit": 40}  # one round a block, with a burst so many times shorter than others
NAMES = {
    "batched hooks": "torch, batched hooks",
    "a hook each": "torch, a hook each",
    "deterministic algorithms": "torch, use_deterministic_algorithms",
    "wandb.watch": "wandb.watch, every step",
    "FlorDB": "FlorDB, a log a parameter",
}
WEAKER = ("torch, use_deterministic_algorithms",)  # records nothing: named beside, and lost to by nobody


@dataclass
class _Taken:
    """What the peers answered: seconds a step by process and variant, and what failed."""

    times: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def median(self, process: str, variant: str) -> float | None:
        values = self.times.get(process, {}).get(variant)
        return statistics.median(values) if values else None

    def ratios(self, variants: Callable[[str], bool]) -> dict[str, float]:
        """To the plain step of the same process."""
        found = {}
        for process, by_variant in self.times.items():
            for variant in filter(variants, by_variant):
                one, plain = self.median(process, variant), self.median(process, "plain")
                if one and plain:
                    name = f"{process}, control" if variant == "control" else NAMES.get(variant, variant)
                    found[name] = one / plain
        return found


def recording(problem: Problem, peers: Peers, say: Callable[[str], None]) -> list[Measured]:
    """Norms of every layer with batch hash and fingerprint each step; a bare step; and the A/A control."""
    taken = _prepared(problem, peers, say)
    costs: list[Cost] = []
    for block in range(BLOCKS):
        say(f"recording at {problem.size}, block {block + 1} of {BLOCKS}")
        costs.append(recording_cost(problem.config, problem.files, rounds=problem.rounds, burst=problem.burst))
        _block(problem, peers, block, taken)
    for name in SLOW:
        peers.stop(name)
    ratios = taken.ratios(lambda variant: variant not in ("plain", "control"))
    controls = taken.ratios(lambda variant: variant == "control")
    middle = {
        name: statistics.median(getattr(cost, name) for cost in costs)
        for name in ("bare_ms", "recorded", "unrecorded", "control")
    }
    noise = max(
        abs(one - 1) for one in (middle["control"], *(ratio for name, ratio in controls.items() if "torch" in name))
    )
    bare, plain, other = middle["bare_ms"], taken.median("torch", "plain"), _another_model(problem, peers)
    weaker = {name: ratios.pop(name) for name in WEAKER if name in ratios}
    parts = {"recording adds": (middle["recorded"] - 1) * bare, **_parts(problem), "a bare step": bare}
    return [
        Measured(
            "recording",
            f"{problem.size}: recorded step (all norms, batch hash, fingerprint)",
            "× plain step",
            middle["recorded"],
            GOALS[problem.size],
            LIMIT,
            noise,
            ratios,
            taken.failed | ({"torch": other} if other else {}),
            parts,
            remark="no peer hashes the batch or fingerprints the state",
        ),
        Measured(
            "recording",
            f"{problem.size}: A/A control",
            "× plain step",
            middle["control"],
            noise=1.0,
            peers=controls | weaker,
        ),
        Measured(
            "recording",
            f"{problem.size}: the bare compiled step (BLAS threads: {threads()})",
            "ms",
            bare,
            noise=noise,
            peers={} if plain is None else {"torch": plain * 1e3},
            remark="MLX's own step without the workbench, so no recorder can win it back",
        ),
    ]


def _prepared(problem: Problem, peers: Peers, say: Callable[[str], None]) -> _Taken:
    """Starts the peers that are there; each performs a step of every variant."""
    taken = _Taken()
    for process, variants in ASKED.items():
        if (running := peers.get(process, "serve", str(problem.for_peers()))) is None:
            continue
        say(f"preparing {process} at {problem.size}")
        answer = running.ask("prepare", names=["plain", "control", *variants])
        if "error" in answer:
            taken.failed[process] = answer["error"]
        else:
            taken.times[process] = {}
            taken.failed |= {NAMES.get(name, name): reason for name, reason in answer["failed"].items()}
    return taken


def _block(problem: Problem, peers: Peers, block: int, taken: _Taken) -> None:
    for process in list(taken.times):
        running = peers.get(process)
        assert running is not None
        rounds, burst = problem.rounds, problem.burst
        if process in SLOW:  # what they add is far above the noise
            rounds, burst = 1, max(problem.burst // SLOW[process], 1)
        answer = running.ask("steps", rounds=rounds, burst=burst, first=block * rounds)
        if "error" in answer:
            taken.failed[process] = answer["error"]
            del taken.times[process]
            continue
        for variant, seconds in answer["times"].items():
            taken.times[process].setdefault(variant, []).extend(seconds)


def _another_model(problem: Problem, peers: Peers) -> str:
    """Why torch's model is not ours: the same weights and batch must give the same loss. Empty if it is, or is not
    here."""
    if (running := peers.get("torch")) is None:
        return ""
    answer = running.ask("first_loss")
    experiment = problem.build()
    ours = float(experiment.loss_fn(experiment.model, *as_batch(next(experiment.sampler)))[0].item())
    if "error" in answer:
        return str(answer["error"])
    same = abs(answer["loss"] - ours) < 1e-4 * ours  # float32 sums in another order
    return "" if same else f"measured on another model: its first loss is {answer['loss']:.6f}, ours {ours:.6f}"


def _parts(problem: Problem) -> dict[str, float]:
    """Milliseconds that parts of recording take by themselves, outside a loop."""
    experiment = problem.build()
    stepper, batch = measure_alongside(Stepper(experiment)), as_batch(next(experiment.sampler))
    result, cursor = stepper(batch), read_cursor(experiment.sampler)
    state = capture(experiment, 1, cursor)
    works: dict[str, Callable[[], object]] = {
        "norms, hash and fingerprints": lambda: observe(stepper, batch, result, cursor),
        "fingerprints alone": state.lanes,
        "batch hash alone": lambda: batch_hash(batch),
    }
    return {name: median_seconds(work) * 1e3 for name, work in works.items()}
