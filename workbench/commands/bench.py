"""`workbench bench`: the measurements, each a command of its own."""

from __future__ import annotations

import click

from .bench_checkpoint import bench_checkpoint
from .bench_record import bench_record
from .bench_spikes import bench_spikes
from .bench_suite import bench_suite
from .bench_telemetry import bench_telemetry


@click.group(short_help="Measure what the workbench costs, and how often it is right.")
def bench() -> None:
    """Measure what the workbench costs, and whether its verdicts are right."""


bench.add_command(bench_checkpoint)
bench.add_command(bench_record)
bench.add_command(bench_spikes)
bench.add_command(bench_suite)
bench.add_command(bench_telemetry)
