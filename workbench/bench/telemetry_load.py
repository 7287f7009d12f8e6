"""What opening a long telemetry file costs: all columns, the first time and with the cache, each in its own process."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd

from .child_output import output_of

LAYERS = 20
_BLOCK = 10_000  # lines

_CHILD = """
import json, resource, sys, time
from pathlib import Path
import numpy, pandas
from workbench import telemetry
from workbench.lines import column_cache, scan
unit = 1 if sys.platform == "darwin" else 1024
def peak():
    try:  # on Linux, ru_maxrss of a new process begins with what its parent had when it was forked
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
path, way, cache = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
column_cache.folder = lambda: cache
before, start, spent = peak(), time.perf_counter(), time.process_time()
if way == "bytes":
    with open(path, "rb") as file:
        while file.read(1 << 20):
            pass
elif way == "strict reader":
    with open(path, "rb") as file:
        scan.Scan.strictly(path).read(file)
else:
    found = telemetry.read(path)
    for name in ("step", "loss", "grad_norm", "lr", "step_per_s", "per_layer_act_norms"):
        found.column(name)
print(json.dumps([time.perf_counter() - start, time.process_time() - spent, (peak() - before) / 1e6]))
"""


def telemetry_load(lines: int = 10**6, repeats: int = 5, strict: bool = False) -> pd.DataFrame:
    """Writes a telemetry file of 5 numbers and 20 norms a line (some 290 bytes), and times reading it.

    Args:
        lines: how many.
        repeats: of each way, in turns; a fresh process each.
        strict: also time the strict reader, which takes half a minute for a million lines.

    Returns:
        One row a way: way, seconds (median), fastest, cpu_s (median), peak_mb (median; above that of the imports).
    """
    ways = ["bytes", "first time", "with cache", *(["strict reader"] if strict else [])]
    taken: dict[str, list[list[float]]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as folder:
        path, cache = Path(folder) / "telemetry.jsonl", Path(folder) / "cache"
        _write(path, lines)
        for _ in range(repeats):
            for way in ways:
                if way == "first time":
                    for kept in cache.glob("*"):
                        kept.unlink()
                command = [sys.executable, "-c", _CHILD, str(path), way, str(cache)]
                taken[way].append(json.loads(output_of(command, f"reading {path}")[0]))
    rows = []
    for way, measured in taken.items():
        seconds, cpu, peak = np.array(measured).T
        rows.append((way, np.median(seconds), seconds.min(), np.median(cpu), np.median(peak)))
    return pd.DataFrame(rows, columns=["way", "seconds", "fastest", "cpu_s", "peak_mb"])


def _write(path: Path, lines: int) -> None:
    rng = np.random.default_rng(0)
    with open(path, "w") as file:
        for start in range(0, lines, _BLOCK):
            count = min(_BLOCK, lines - start)
            norms = rng.lognormal(size=(count, LAYERS))
            scalars = rng.lognormal(size=(count, 4)).astype(np.float32)
            for row in range(count):
                loss, lr, grad_norm, speed = scalars[row]
                entries = ",".join(f"{norm:.6g}" for norm in norms[row])
                file.write(
                    f'{{"type":"step","step":{start + row + 1},"loss":{loss!s},"lr":{lr!s},"grad_norm":{grad_norm!s},'
                    f'"step_per_s":{speed!s},"per_layer_act_norms":[{entries}]}}\n'
                )
