"""A long run of a tiny model, recorded with thinned checkpoints: memory, open files, size, and how fast it opens.

    python tests/long_run.py --steps 100000

Prints a line each tenth of the run, and exits with 1 if memory or the number of open files grew.
"""

import argparse
import logging
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import mlx.core as mx
import runs

from workbench.record import Recorder

SETTLED = 0.2  # of the run: until then caches fill
GROWTH = 8 << 20  # bytes: what an allocator may keep for itself


def resident():
    """Bytes of this process in memory; where that can't be asked, the most there ever were."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def open_files():
    folder = Path("/proc/self/fd" if sys.platform.startswith("linux") else "/dev/fd")
    return len(list(folder.iterdir()))


def recorded(path, steps, report=lambda *figures: None, samples=10):
    """Records so many steps; returns (step, resident bytes, open files) for each of the samples."""
    job, found = runs.build(), []
    options = {"save_every": 100, "keep_last": 3, "keep_every": max(steps // 10, 100), "compile": False}
    options |= {"factory": "runs:build"}
    with Recorder(path, *runs.parts(job), **options) as recorder:
        for batch in recorder.batches(steps):
            recorder.step(batch)
            if recorder.step_number % (steps // samples) == 0:
                found.append((recorder.step_number, resident(), open_files()))
                report(*found[-1])
    return found


def grown(found):
    """By how many bytes and files it grew after it had settled. Of files the fewest count: one may just be written."""
    settled = [one for one in found if one[0] >= SETTLED * found[-1][0]]
    half = len(settled) // 2
    early, late = (min(files for _, _, files in part) for part in (settled[:half], settled[half:]))
    return settled[-1][1] - settled[0][1], late - early


OPENED = """
import sys, time
from workbench import open_run
began, worked = time.perf_counter(), time.process_time()
run = open_run(sys.argv[1])
run.last_step, run.steps, run.plan(run.last_step), run.checkpoints
print(time.perf_counter() - began, time.process_time() - worked)
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100_000)
    given = parser.parse_args()
    mx.set_default_device(mx.cpu)
    logging.getLogger("workbench").setLevel(logging.ERROR)  # of unstable steps: a model this small has many
    with tempfile.TemporaryDirectory() as folder:
        path, began = Path(folder) / "run", time.perf_counter()

        def report(step, memory, files):
            seconds = time.perf_counter() - began
            print(f"step {step:7}: {memory / 2**20:6.1f} MB, {files} open files, {seconds:6.1f} s", flush=True)

        memory, files = grown(recorded(path, given.steps, report))
        size = (path / "telemetry.jsonl").stat().st_size
        kept = len(list((path / "checkpoints").glob("*.json")))
        print(
            f"telemetry {size / 2**20:.1f} MB, {kept} checkpoints kept; grown by {memory / 2**20:.1f} MB, {files} files"
        )
        for what in ("first", "second"):
            done = subprocess.run([sys.executable, "-c", OPENED, path], capture_output=True, text=True, check=True)
            clock, processor = map(float, done.stdout.split())
            print(
                f"opened, with steps, checkpoints and a plan, the {what} time: {clock:.2f} s ({processor:.2f} s of CPU)"
            )
        verify = [sys.executable, "-m", "workbench", "verify", path, "--replay", "20", "--factory", "runs:build"]
        done = subprocess.run(verify, capture_output=True, text=True, cwd=Path(__file__).parent)
        print(done.stdout.splitlines()[0] if done.stdout else done.stderr)
    return 1 if memory > GROWTH or files > 0 else 0


if __name__ == "__main__":
    sys.exit(main())
