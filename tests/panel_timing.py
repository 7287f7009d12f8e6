"""How fast the panel answers, on this machine: no test, for a busy machine is no failure.

    python tests/panel_timing.py [RUN]

Without RUN a small run is recorded (120 steps, preset tiny), and one of 100,000 lines of telemetry is made from it.
Each figure is wall time, with the processor time beside it: on a busy machine only that says something. What the
browser adds (some 40 ms from the kernel's answer to the painted page) is not in it.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import runs

STEPS, LINES = 120, 100_000


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Milliseconds of wall and processor time."""
    wall, own = time.perf_counter(), time.process_time()
    work()
    return 1e3 * (time.perf_counter() - wall), 1e3 * (time.process_time() - own)


def tell(what: str, times: list[tuple[float, float]]) -> None:
    wall, own = (statistics.median(column) for column in zip(*times, strict=True))
    print(f"{what:58} {wall:8.0f} ms  (processor {own:.0f} ms; median of {len(times)})", flush=True)


def record(out: Path) -> Path:
    command = ["train", "--corpus", str(Path(__file__).parent.parent / "data" / "shakespeare.txt"), "--out", str(out)]
    command += ["--steps", str(STEPS), "--fault", "garbage@100:rows=3", "--max-lr", "3e-3", "--save-every", "40"]
    said = runs.workbench(*command, "--device", "cpu", "--spike-window", "30")
    assert said.code == 0, said.err
    return out


def lengthened(run: Path, out: Path) -> Path:
    """The same run with 100,000 lines, a spike now and then."""
    shutil.copytree(run, out)
    lines = [json.loads(line) for line in (run / "telemetry.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["type"] == "step"]
    with open(out / "telemetry.jsonl", "w") as file:
        file.write(json.dumps(lines[0]) + "\n")
        for step in range(1, LINES + 1):
            chosen = steps[60 + step % 30] if step % 9973 else steps[99]
            file.write(json.dumps(chosen | {"step": step}) + "\n")
    return out


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="workbench-timing-"))
    try:
        run = Path(sys.argv[1]) if sys.argv[1:] else record(folder / "run")
        long = lengthened(run, folder / "long")
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", "from workbench.panel import Panel"], check=True)
        print(f"{'import of the panel in a fresh process':58} {1e3 * (time.perf_counter() - began):8.0f} ms")
        from workbench.panel import Panel
        from workbench.work import child

        tell(f"first view of {LINES:,} steps, read for the first time", [timed(lambda: Panel(run=long))])
        tell("the same again", [timed(lambda: Panel(run=long)) for _ in range(3)])
        panel = Panel(run=run)
        for name in panel.view.options:
            panel.view.value = name
            panel.wait(60)
            moves = [timed(lambda step=step: setattr(panel.slider, "value", step)) for step in range(60, 95)]
            tell(f"slider to new content of {name}", moves)
        panel.view.value = "Step"
        tell("replay, first in this notebook", [timed(lambda: panel.replay(100))])
        tell("replay, again (a step three times)", [timed(lambda: panel.replay(100)) for _ in range(5)])
        tell("experiment, first of a step", [timed(lambda: panel.whatif(100, "lr=0.5x", next_steps=0))])
        tell("experiment, again", [timed(lambda: panel.whatif(100, "lr=0.3x", next_steps=0)) for _ in range(5)])
        panel.cause_button.click()
        while "rolling" not in panel.status.value and panel._performer.running:
            time.sleep(0.01)
        cancelled = timed(lambda: (panel.cancel_button.click(), panel.wait(60)))
        assert "cancelled" in panel.status.value, panel.status.value
        tell("Cancel to “cancelled”", [cancelled])
        child.end()
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
