"""Rows of the benchmark suite: from the shell, and in a live kernel, to the exact trace of a step."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..interpreter import python_command
from ..run import Run
from .child_output import output_of
from .peer import Peers
from .problem import Problem, plain_step
from .suite_table import Measured

STEPS, SAVE_EVERY = 10, 1  # of the run that is replayed
STEP = 2  # which one: with the checkpoint just before it

_IMPORTS = "import time; began = time.perf_counter(); import workbench.session, workbench.commands.printed_trace"
_PHASES = f"""
import json, sys, time
from pathlib import Path
began = time.perf_counter()
from workbench import open_run
import workbench.session
times = [("imports", began)]
run = open_run(sys.argv[1])
times.append(("reading the run, rebuilding the experiment", time.perf_counter()))
def noted(done, total, what):
    times.append((what, time.perf_counter()))
run.replay({STEP}, trace_dir=Path(sys.argv[2]), progress=noted)
times.append(("", time.perf_counter()))
print(json.dumps([(name, after - at) for (name, at), (_, after) in zip(times, times[1:])]))
"""


def cold(problem: Problem, peers: Peers, say: Callable[[str], None]) -> list[Measured]:
    """`workbench replay` as a whole process, with the checkpoint at N-1, whole and `--quick`."""
    say("recording the run that is replayed")
    run = problem.recorded(STEPS, SAVE_EVERY)
    looks, hindsight, failed = _looks(problem, peers), dict[str, float](), dict[str, str]()
    replay = python_command("workbench", "replay", str(run), "--step", str(STEP))
    traces = problem.scratch / "traces"
    commands = {
        "whole": [*replay, "--trace-dir", str(traces)],
        "quick": [*replay, "--trace-dir", str(traces), "--quick"],
        "imports": [sys.executable, "-c", _IMPORTS],
        "nothing": [sys.executable, "-c", ""],
    }
    commands |= {} if looks is None else {"torch": looks}
    taken: dict[str, list[float]] = {name: [] for name in commands}
    for turn in range(problem.rounds + 1):
        say(f"cold replays, {turn + 1} of {problem.rounds + 1}")
        for name, command in commands.items():
            taken[name].append(_seconds(command))
    middle = {name: statistics.median(values[1:]) for name, values in taken.items()}  # the first fills caches
    if (flor := peers.get("flor", "serve", str(problem.for_peers()))) is not None:
        say("FlorDB's hindsight replay")
        answer = flor.ask("hindsight")
        peers.stop("flor")
        if "error" in answer:
            failed["FlorDB"] = answer["error"]
        else:
            hindsight["FlorDB replay of step 13 of 15"] = answer["seconds"]
    beside = hindsight | ({"torch by hand, nothing verified": middle["torch"]} if looks else {})
    parts = {"Python alone": middle["nothing"], "with imports": middle["imports"]}
    goal = 1.5 if problem.size == "small" else None
    return [
        Measured(
            "replay-cold",
            f"shell → exact trace of step {STEP}: workbench replay (the step twice, probed, 20 planted changes)",
            "s",
            middle["whole"],
            goal,
            peers=beside,
            failed=failed,
            parts=parts | _phases(problem, run),
            parts_unit="s",
        ),
        Measured(
            "replay-cold",
            "shell → exact trace: workbench replay --quick (the step once, compared)",
            "s",
            middle["quick"],
            goal,
            peers=beside,
            failed=failed,
            parts=parts,
            parts_unit="s",
        ),
        _empty_cache(problem, commands["quick"]),
    ]


def _looks(problem: Problem, peers: Peers) -> list[str] | None:
    """The command of a cold look by torch, its checkpoint written."""
    running = peers.get("torch", "serve", str(problem.for_peers()))
    if running is None:
        return None
    path = problem.scratch / "look.pt"
    running.ask("prepare", names=["plain"])
    running.ask("checkpoint", path=str(path))
    return peers.command("torch", "look", str(problem.for_peers()), str(path))


def _seconds(command: Sequence[str], **variables: str) -> float:
    # A peer's process has no use for the BLAS that is put before MLX's.
    ours = command[0] == sys.executable
    kept = {key: value for key, value in os.environ.items() if ours or key != "LD_PRELOAD"} | variables
    began = time.perf_counter()
    output_of(command, " ".join(command[-6:]), kept)
    return time.perf_counter() - began


def _phases(problem: Problem, run: Path) -> dict[str, float]:
    """Seconds of each phase of a cold replay, by its own reports; the median of three processes."""
    import json

    command = [sys.executable, "-c", _PHASES, str(run), str(problem.scratch / "traces")]
    found: dict[str, list[float]] = {}
    for _ in range(3):
        said, _ = output_of(command, "a replay whose phases are timed")
        for name, seconds in json.loads(said):
            found.setdefault(name, []).append(seconds)
    return {name: statistics.median(values) for name, values in found.items()}


def _empty_cache(problem: Problem, command: Sequence[str]) -> Measured:
    """Once, with no kernel compiled yet: MLX keeps them in the folder for temporary files."""
    import tempfile

    with tempfile.TemporaryDirectory(dir=problem.scratch) as empty:
        began = time.perf_counter()
        what = "a replay with an empty cache of compiled kernels"
        _, said = output_of(command, what, os.environ | {"TMPDIR": empty})
        taken = time.perf_counter() - began
    told = [line.strip() for line in said.splitlines() if "compil" in line.lower()]
    return Measured(
        "replay-cold",
        "the same with an empty cache of compiled kernels, once",
        "s",
        taken,
        remark=f"it says: {told[0][:120]}" if told else "it does not say that it compiles",
    )


def live(problem: Problem, peers: Peers, say: Callable[[str], None]) -> list[Measured]:
    """`Run.replay` in a process that has replayed before, in turn with a plain step and torch's look."""
    say("replays in a live kernel")
    run = Run(problem.recorded(STEPS, SAVE_EVERY))
    traces = problem.scratch / "traces"
    step = plain_step(problem.build())
    running = peers.get("torch", "serve", str(problem.for_peers()))
    path = str(problem.scratch / "look.pt")
    if running is not None:
        running.ask("prepare", names=["plain"])
        running.ask("checkpoint", path=path)
    works: dict[str, Callable[[], Any]] = {
        "step": step,
        "quick": lambda: run.replay(STEP, with_probe=False, repeat=False, trace_dir=traces),
        "whole": lambda: run.replay(STEP, trace_dir=traces),
    }
    taken: dict[str, list[float]] = {name: [] for name in works}
    looks, failed = list[float](), dict[str, str]()
    for turn in range(problem.rounds + 1):
        say(f"live replays, {turn + 1} of {problem.rounds + 1}")
        for name, work in works.items():
            began = time.perf_counter()
            work()
            taken[name].append(time.perf_counter() - began)
        if running is not None:
            answer = running.ask("look", path=path)
            if "error" in answer:
                failed["torch"], running = answer["error"], None
            else:
                looks.append(answer["seconds"])
    middle = {name: statistics.median(values[1:]) for name, values in taken.items()}
    beside = {"torch by hand, nothing verified": statistics.median(looks[1:])} if looks[1:] else {}
    parts = {"a plain step": middle["step"]}
    goal = middle["step"] + 0.05
    shared: dict[str, Any] = {"limit": middle["step"], "peers": beside, "failed": failed, "parts": parts}
    return [
        Measured(
            "replay-live",
            "live kernel → exact trace, the step once",
            "s",
            middle["quick"],
            goal,
            **shared,
            parts_unit="s",
        ),
        Measured(
            "replay-live",
            "live kernel → exact trace, whole (the step twice, probed, 20 planted changes)",
            "s",
            middle["whole"],
            goal,
            **shared,
            parts_unit="s",
        ),
    ]
