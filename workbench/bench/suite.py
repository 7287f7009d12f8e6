"""The benchmark suite: every row of how fast the workbench is to be, on this machine, beside its peers in one run."""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import pandas as pd

from .. import __version__
from ..environment import numeric_environment, on_device
from ..errors import WorkbenchError
from . import checkpoint_rows, reading_rows, recording_rows, replay_rows, rolling_rows
from .peer import INSTALL, Peers
from .problem import SIZES, Problem, threads
from .suite_table import Measured, printed, table

Row = Callable[[Problem, Peers, Callable[[str], None]], list[Measured]]
ROWS: dict[str, Row] = {
    "recording": recording_rows.recording,  # at `tiny`, too
    "checkpoint": checkpoint_rows.checkpoint,
    "load": checkpoint_rows.load,
    "replay-cold": replay_rows.cold,
    "replay-live": replay_rows.live,
    "roll-forward": rolling_rows.rolling,  # and the probe pass
    "telemetry": reading_rows.telemetry,
    "curve": reading_rows.curve,
}
ROUNDS = 5
NOT_HERE = "124M parameters cold on a GPU (≤ 5 s) is not measured here: this suite compares on the CPU"


@dataclass(frozen=True)
class SuiteResult:
    """
    Attributes:
        rows: in the order of `ROWS`.
        machine: what it was measured on: device, versions, BLAS, threads, load average before and after, peers.
        notices: what is not in the rows, and why.
    """

    rows: list[Measured]
    machine: dict[str, Any]
    notices: list[str]

    @property
    def table(self) -> pd.DataFrame:
        """One line a contender of each row; see `suite_table.table`."""
        return table(self.rows)

    @property
    def lines(self) -> list[tuple[str, ...]]:
        """The printed table; see `suite_table.printed`."""
        return printed(self.rows)

    @property
    def explanations(self) -> list[str]:
        """One line for each row that misses its goal or is lost to a peer."""
        return [f"{one.row} ({one.what}): {one.why}" for one in self.rows if one.why]


def benchmark_suite(
    size: str = "small",
    *,
    only: Sequence[str] = (),
    rounds: int = ROUNDS,
    peers: str | os.PathLike[str] | None = None,
    say: Callable[[str], None] = lambda what: None,
) -> SuiteResult:
    """Measures every row here, on the CPU: ratios of medians of what takes turns in one run.

    Args:
        size: of the GPT: "small" (10.7M parameters; some 12 minutes with OpenBLAS and all peers), or "tiny".
        only: some of `ROWS`; none: all.
        rounds: turns of each variant in a block, and repetitions of each command.
        peers: the folder that `tests/peers/install.py` filled; None: without peers.
        say: told what is being done.

    Raises:
        WorkbenchError: a row or a size is unknown, or the folder holds no peers.
    """
    if unknown := [name for name in only if name not in ROWS]:
        raise WorkbenchError(f"{unknown[0]!r} is no row of the suite; expected some of {', '.join(ROWS)}")
    if size not in SIZES:
        raise WorkbenchError(f"{size!r} is no size of the suite; expected one of {', '.join(SIZES)}")
    if rounds < 2:
        raise WorkbenchError(f"rounds is {rounds}; expected 2 or more, as a median needs")
    with tempfile.TemporaryDirectory(prefix="workbench-bench-") as folder, on_device("cpu"):
        scratch, load = Path(folder).resolve(), _load_average()
        rows = list[Measured]()
        installed = Peers(None if peers is None else Path(peers), scratch)
        for name, row in ROWS.items():
            if only and name not in only:
                continue
            for one in ("tiny", size) if name == "recording" and size != "tiny" else (size,):
                # A process of a peer is made for one problem.
                own = Peers(None if peers is None else Path(peers), scratch)
                try:
                    rows += row(Problem(one, scratch / one, rounds), own, say)
                finally:
                    own.close()
                mx.clear_cache()
        machine = _machine(installed) | {"load average before": load, "load average after": _load_average()}
    notices = [NOT_HERE]
    if installed.missing:
        notices.insert(
            0, f"not installed, and so not compared with: {', '.join(installed.missing)}. To install: {INSTALL}"
        )
    return SuiteResult(rows, machine | {"size": size, "rounds": rounds}, notices)


def _load_average() -> float:
    """Of the last minute: how many processes ran or waited for a processor."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else float("nan")


def _machine(peers: Peers) -> dict[str, Any]:
    here = numeric_environment()
    named = (
        "torch",
        "wandb",
        "tensorboard",
        "trainscope",
        "flordb",
        "cockpit-for-pytorch",
        "duckdb",
        "polars",
        "pandas",
    )
    versions = {
        package: one.versions[package]
        for one in peers.installed.values()
        for package in named
        if package in one.versions
    }
    return {
        "device": here["device"],
        "cores": os.cpu_count(),
        "system": f"{here['system']} {here['machine']}",
        "python": platform.python_version(),
        "workbench": __version__,
        "mlx": here["mlx"],
        "numpy": here["numpy"],
        "blas": here["blas"],
        "threads": threads(),
        "jit_compiler": here["jit_compiler"],
        "peers": versions,
    }
