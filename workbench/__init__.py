"""Replay the training step where the loss spiked, bit for bit, and see what happened.

Names resolve on first use, so importing the package imports no MLX:

    import workbench as wb

    run = wb.open_run("runs/shakespeare-42")
    run.spikes()
    trace = run.replay(4218)
    trace.layers
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .batches.batch import batch_table as batch_table
    from .dashboard import Dashboard as Dashboard
    from .detection.detecting import detect_spikes as detect_spikes
    from .detection.detecting import first_departures as first_departures
    from .detection.rules import DetectionSettings as DetectionSettings
    from .detection.shared_spikes import compare_spikes as compare_spikes
    from .detection.spike_table import find_spikes as find_spikes
    from .errors import WorkbenchError as WorkbenchError
    from .experiment import Experiment as Experiment
    from .experiment import StepOptions as StepOptions
    from .finetune.finetuning import fine_tune as fine_tune
    from .foreign.loose_checkpoint import compare_checkpoints as compare_checkpoints
    from .foreign.loose_checkpoint import open_checkpoint as open_checkpoint
    from .forking import fork as fork
    from .forks import fork_point as fork_point
    from .interventions.intervene import two_by_two as two_by_two
    from .interventions.scene import Scene as Scene
    from .manifest import DataFile as DataFile
    from .many import replay_many as replay_many
    from .pairs.paired import compare_runs as compare_runs
    from .panel import Panel as Panel
    from .ranks.carrier import rank_table as rank_table
    from .record import Recorder as Recorder
    from .recorded.listing import list_runs as list_runs
    from .recovery import Recovery as Recovery
    from .run import Run as Run
    from .run import open_run as open_run
    from .samplers import IndexedSampler as IndexedSampler
    from .screen.heatmap import onset_map as onset_map
    from .screen.tokens import token_table as token_table
    from .script import rebuilding as rebuilding
    from .spikes import SpikeSettings as SpikeSettings
    from .step_report import report_html as report_html
    from .step_report import write_report as write_report
    from .surroundings import environment_table as environment_table
    from .trace import Trace as Trace
    from .trainer.training import train_run as train_run
    from .verdict import Verdict as Verdict

__version__ = "0.1.0"

_HOMES = {
    "batch_table": "batches.batch",
    "environment_table": "surroundings",
    "onset_map": "screen.heatmap",
    "token_table": "screen.tokens",
    "two_by_two": "interventions.intervene",
    "Dashboard": "dashboard",
    "detect_spikes": "detection.detecting",
    "first_departures": "detection.detecting",
    "DetectionSettings": "detection.rules",
    "compare_spikes": "detection.shared_spikes",
    "find_spikes": "detection.spike_table",
    "WorkbenchError": "errors",
    "Experiment": "experiment",
    "StepOptions": "experiment",
    "fine_tune": "finetune.finetuning",
    "compare_checkpoints": "foreign.loose_checkpoint",
    "open_checkpoint": "foreign.loose_checkpoint",
    "fork": "forking",
    "fork_point": "forks",
    "DataFile": "manifest",
    "replay_many": "many",
    "compare_runs": "pairs.paired",
    "Panel": "panel",
    "rank_table": "ranks.carrier",
    "Recorder": "record",
    "rebuilding": "script",
    "report_html": "step_report",
    "write_report": "step_report",
    "list_runs": "recorded.listing",
    "Recovery": "recovery",
    "Run": "run",
    "open_run": "run",
    "IndexedSampler": "samplers",
    "Scene": "interventions.scene",
    "SpikeSettings": "spikes",
    "Trace": "trace",
    "train_run": "trainer.training",
    "Verdict": "verdict",
}
__all__ = ["__version__", *_HOMES]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'workbench' has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
