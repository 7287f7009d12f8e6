"""Rows of the benchmark suite: what a checkpoint takes, and what loading one into the live state takes."""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import digests, snapshot
from ..checkpoints import checkpoint_reader, checkpoint_writer
from ..experiment import Experiment, as_batch, read_cursor
from ..files import sha256, sync_folder
from ..recorded.layout import CHECKPOINTS
from ..run import Run
from ..snapshot import State
from ..step import Stepper
from .checkpoint_cost import checkpoint_cost
from .peer import Peers
from .problem import Problem, median_seconds
from .suite_table import Measured

EVERY = 10  # steps from checkpoint to checkpoint


def checkpoint(problem: Problem, peers: Peers, say: Callable[[str], None]) -> list[Measured]:
    """How long a checkpoint blocks the loop, what one at every tenth step costs in all, and a write to the disk."""
    say(f"checkpoints at {problem.size}, while training")
    cost = checkpoint_cost(problem.config, problem.files, rounds=max(problem.rounds // 2, 2), every=EVERY)
    saved = _durable(problem, peers, say)
    noise = abs(cost.control - 1)
    return [
        Measured(
            "checkpoint",
            f"loop blocked by a durable checkpoint of {cost.bytes / 1e6:.1f} MB",
            "× step",
            cost.blocked_s / cost.step_s,
            0.002,
            0.001 if problem.size == "small" else None,
            peers=saved["blocked"],
            failed=saved["failed"],
            parts={"blocked": cost.blocked_s * 1e3, "a step": cost.step_s * 1e3},
        ),
        Measured(
            "checkpoint",
            f"{EVERY} steps with a checkpoint against {EVERY} without (A/A {cost.control:.3f})",
            "×",
            cost.ratio,
            1.01,
            1.0,
            noise,
            parts={"until durable, while training": cost.durable_s * 1e3, "a step": cost.step_s * 1e3},
        ),
        saved["row"],
    ]


def _durable(problem: Problem, peers: Peers, say: Callable[[str], None]) -> dict[str, Any]:
    """A write with nothing else going on, in turn with a raw one of as many bytes and the peers'."""
    experiment, state = _performed(problem)
    folder = problem.scratch / "durable"
    running = peers.get("torch", "serve", str(problem.for_peers()))
    if running is not None:
        running.ask("prepare", names=["plain"])
        running.ask("steps", rounds=1, burst=1)
    ours, raw, asked = [], [], list[dict[str, Any]]()
    failed: dict[str, str] = {}
    for turn in range(problem.rounds + 1):
        say(f"durable writes, {turn + 1} of {problem.rounds + 1}")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        lanes = state.lanes()
        began = time.perf_counter()
        checkpoint_writer.write(state, folder / CHECKPOINTS, run="0" * 32, segment=0, t=0.0, lanes=lanes)
        ours.append(time.perf_counter() - began)
        size = sum(path.stat().st_size for path in (folder / CHECKPOINTS).iterdir())
        raw.append(_raw(folder, size))
        if running is not None:
            answer = running.ask("save")
            if "error" in answer:
                failed["torch"], running = answer["error"], None
            else:
                asked.append(answer)
    # The first of each opens files and fills caches.
    value, floor = statistics.median(ours[1:]), statistics.median(raw[1:])
    content = os.urandom(1 << 20) * (size // (1 << 20) + 1)
    digest = median_seconds(lambda: sha256(content), 3) * size / len(content)
    blocked: dict[str, float] = {}
    peers_durable: dict[str, float] = {}
    if asked[1:]:
        step = statistics.median(one["plain"] for one in asked[1:])
        blocked = {"torch DCP async_save": statistics.median(one["blocked"] for one in asked[1:]) / step}
        for way in asked[0]["durable"]:
            taken = statistics.median(one["durable"][way] for one in asked[1:])
            blocked[f"{way} + fsync"] = taken / step
            peers_durable[f"{way} + fsync"] = taken / floor
    del experiment
    parts = {"ours": value * 1e3, "raw write and fsync": floor * 1e3, "its SHA-256, in one thread": digest * 1e3}
    row = Measured(
        "checkpoint",
        f"durable write of {size / 1e6:.1f} MB (digests, atomic renames, commit record)",
        "× raw write + fsync",
        value / floor,
        1.1,
        1.0,
        abs(statistics.median(raw[1::2]) / floor - 1),
        peers_durable,
        failed,
        parts,
        remark="a thread a file takes the digests beside the writing, as far as a core is free; the peers have none",
    )
    return {"row": row, "blocked": blocked, "failed": failed}


def load(problem: Problem, peers: Peers, say: Callable[[str], None]) -> list[Measured]:
    """From the page cache into a live model and optimizer, every byte verified by the XXH3-128 of its file."""
    say("loading checkpoints")
    run = Run(problem.recorded(3, 1))
    experiment, _ = _performed(problem)
    folder, (step, segment) = run.path / CHECKPOINTS, run.checkpoints[1]
    files = sorted(folder.glob(f"{step:08d}*"))
    running = peers.get("torch", "serve", str(problem.for_peers()))
    if running is not None:
        running.ask("prepare", names=["plain"])

    def ours() -> None:
        snapshot.restore(experiment, checkpoint_reader.read(folder, step, segment, run.manifest.run))

    memory = memoryview(bytearray(max(path.stat().st_size for path in files)))

    def reading() -> None:
        for path in files:
            with open(path, "rb", buffering=0) as file:
                while file.readinto(memory):
                    pass

    content = [path.read_bytes() for path in files]
    taken: dict[str, list[float]] = {"ours": [], "bytes": [], "digests": []}
    asked, failed = list[dict[str, float]](), dict[str, str]()
    for _ in range(problem.rounds):
        works: dict[str, Callable[[], object]] = {"ours": ours, "bytes": reading}
        for name, work in (works | {"digests": lambda: [digests.of(one, (digests.XXH3,)) for one in content]}).items():
            taken[name].append(median_seconds(work, 1))
        if running is not None:
            answer = running.ask("load")
            if "error" in answer:
                failed["torch"], running = answer["error"], None
            else:
                asked.append(answer)
    middle = {name: statistics.median(values) * 1e3 for name, values in taken.items()}
    found = {way: statistics.median(one[way] for one in asked) * 1e3 for way in (asked[0] if asked else ())}
    return [
        Measured(
            "load",
            f"load {sum(map(len, content)) / 1e6:.1f} MB into the live state",
            "ms",
            middle["ours"],
            25.0 if problem.size == "small" else None,
            middle["bytes"],
            peers=found,
            failed=failed,
            parts={
                "reading the bytes into memory in use": middle["bytes"],
                "XXH3-128 of them in one thread": middle["digests"],
            },
            remark="the peers verify no digest",
        )
    ]


def _performed(problem: Problem) -> tuple[Experiment, State]:
    """An experiment after a step, which has made all its state, and that state."""
    experiment = problem.build()
    Stepper(experiment)(as_batch(next(experiment.sampler)))
    return experiment, snapshot.capture(experiment, 1, read_cursor(experiment.sampler))


def _raw(folder: Path, size: int) -> float:
    """Seconds of one write of so many bytes, made durable with its name."""
    content = memoryview(os.urandom(1 << 20) * (size // (1 << 20) + 1))[:size]
    began = time.perf_counter()
    with open(folder / "raw", "wb", buffering=0) as file:
        while content:
            content = content[file.write(content) :]
        os.fsync(file.fileno())
    sync_folder(folder)
    return time.perf_counter() - began
