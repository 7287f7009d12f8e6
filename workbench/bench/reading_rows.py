"""Rows of the benchmark suite: opening the telemetry of a million steps, and drawing a curve of as many."""

from __future__ import annotations

import io
import json
import statistics
import sys
from collections.abc import Callable

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ..figures import png
from ..screen.curve import LOSS, Curve
from ..screen.curves_figure import Drawn, overlay
from . import telemetry_load
from .child_output import output_of
from .peer import Peers
from .problem import Problem, median_seconds
from .suite_table import Measured

LINES = {"tiny": 10**5, "small": 10**6}
# In a small process: on Linux the peak memory of one that is started counts from that of the one that starts it.
_LOAD = """
import sys
from workbench.bench.telemetry_load import telemetry_load
print(telemetry_load(int(sys.argv[1]), 1).to_json(orient="records"))
"""
SIZE = (9, 3.9)  # inches, of every figure


def telemetry(problem: Problem, peers: Peers, say: Callable[[str], None]) -> list[Measured]:
    """All columns of a telemetry file: the first time, and with the cache; seconds and memory. Each in a process of its
    own."""
    lines, judged = LINES[problem.size], problem.size == "small"
    path = problem.scratch / "lines.jsonl"
    found, failed = dict[str, list[dict[str, float]]](), dict[str, str]()
    running = peers.get("tables", "serve")
    if running is not None:
        telemetry_load._write(path, lines)
    ours: dict[str, list[tuple[float, float]]] = {}
    for turn in range(max(problem.rounds // 2, 2)):
        say(f"opening {lines:,} lines, {turn + 1} of {max(problem.rounds // 2, 2)}")
        said, _ = output_of([sys.executable, "-c", _LOAD, str(lines)], f"opening {lines:,} lines")
        for entry in json.loads(said):
            ours.setdefault(entry["way"], []).append((entry["seconds"], entry["peak_mb"]))
        if running is None:
            continue
        for name, answer in running.ask("read", path=str(path)).items():
            if name == "error" or "error" in answer:
                failed[name] = str(answer if name == "error" else answer["error"])
            else:
                found.setdefault(name, []).append(answer)
    peers.stop("tables")
    path.unlink(missing_ok=True)
    middle = {way: statistics.median(seconds for seconds, _ in values) for way, values in ours.items()}
    peak = {way: statistics.median(megabytes for _, megabytes in values) for way, values in ours.items()}
    seconds = {name: statistics.median(one["seconds"] for one in taken) for name, taken in found.items()}
    memory = {name: statistics.median(one["peak_mb"] for one in taken) for name, taken in found.items()}
    parts = {"reading the bytes alone": middle["bytes"]}
    return [
        Measured(
            "telemetry",
            f"{lines:,} lines, all columns, the first time",
            "s",
            middle["first time"],
            1.0 if judged else None,
            middle["bytes"],
            peers=seconds,
            failed=failed,
            parts=parts,
            parts_unit="s",
            remark="it also checks every line's place and writes the cache",
        ),
        Measured(
            "telemetry",
            f"{lines:,} lines, all columns, after that",
            "s",
            middle["with cache"],
            0.1 if judged else None,
            0.024 if judged else None,
            peers=seconds,
            parts=parts,
            parts_unit="s",
        ),
        Measured(
            "telemetry",
            "peak memory of that, the first time",
            "MB",
            peak["first time"],
            200.0 if judged else None,
            peers=memory,
        ),
    ]


def curve(problem: Problem, peers: Peers, say: Callable[[str], None]) -> list[Measured]:
    """A curve of a million steps as a PNG, beside matplotlib given every point, and beside empty axes."""
    count = LINES[problem.size]
    say(f"a curve of {count:,} steps")
    steps, values = np.arange(1, count + 1), np.random.default_rng(0).lognormal(size=count)
    drawn, bare = (
        [Drawn("run", 0, {LOSS: [Curve(0, steps[chosen], values[chosen], steps[:0])]})]
        for chosen in (slice(None), np.sort([values.argmin(), values.argmax()]))
    )
    works: dict[str, Callable[[], object]] = {
        "ours": lambda: png(overlay(drawn, [LOSS], 1, count)),
        "bare": lambda: png(overlay(bare, [LOSS], 1, count)),
        "raw": lambda: _plain(steps, values),
        "empty": lambda: _plain(steps[:0], values[:0]),
    }
    taken: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(problem.rounds):
        for name, work in works.items():
            taken[name].append(median_seconds(work, 1) * 1e3)
    middle = {name: statistics.median(values) for name, values in taken.items()}
    return [
        Measured(
            "curve",
            f"a curve of {count:,} steps drawn, as a PNG",
            "ms",
            middle["ours"],
            35.0 if problem.size == "small" else None,
            middle["empty"],
            peers={"matplotlib, every point": middle["raw"]},
            parts={"empty axes of the same size": middle["empty"], "the figure with two points": middle["bare"]},
        )
    ]


def _plain(steps: np.ndarray, values: np.ndarray) -> bytes:
    figure = Figure(figsize=SIZE, dpi=100)
    FigureCanvasAgg(figure)
    figure.subplots().plot(steps, values)
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()
