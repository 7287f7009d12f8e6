"""What planted faults come to: a changed recipe, data files of the run's own, acts while recording, and labels.

A fault of the data, the schedule or an option is compiled into what any run may have, so a replay rebuilds it without
knowing that it was planted. The labels go to `planted.json`, which no replay and no diagnosis opens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ExperimentError
from ..faults import Fault
from ..files import pretty_json, write_atomic
from ..trainer.corpus import Corpus
from ..trainer.data import WindowSampler
from ..trainer.recipe import TrainConfig, stream
from .planters import PLANTERS, Mark, Plot
from .saboteur import Acts

LABELS = "planted.json"


@dataclass(frozen=True)
class Planted:
    """What the faults come to.

    Attributes:
        config: the recipe with the faults in it.
        files: data files in the run's folder, after the corpora.
        acts: what no recipe can hold.
        labels: one a fault; see `plant`.
    """

    config: TrainConfig
    files: list[Path]
    acts: Acts
    labels: list[dict[str, Any]]


def plant(faults: Sequence[Fault], config: TrainConfig, corpora: Sequence[Corpus], out: Path) -> Planted:
    """Writes data files and labels of the faults into the run's folder.

    A label has fault, step, keys (as given), applied, replay ("exact" or "never"), shows (the first step whose loss or
    gradient norm can show it, null for an option), expected_verdict, and culprit: the step, and what there is to name
    of rows (with source and offset), layer, parameter, lanes of the state, or option.

    Raises:
        ExperimentError: a key is out of range, or the fault would do nothing in this run.
        DataError: two faults want the same row of a batch. Nothing is written then.
    """
    _refuse_moved_data(faults)
    plot = Plot(config, corpora)
    marks: dict[int, Mark] = {}
    options_first = sorted(range(len(faults)), key=lambda number: faults[number].kind.applied != "option")
    for number in options_first:  # a frozen parameter has no moments for others to damage
        if faults[number].step > config.steps:
            raise ExperimentError(f"fault {faults[number]} comes after the last step, {config.steps}")
        marks[number] = PLANTERS[faults[number].name](plot, faults[number])
    sampler = stream(plot.config, [*corpora, *plot.sources])  # before anything is written: it checks the alterations
    files = []
    for source in plot.sources:
        path = out / source.path
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, source.tokens.tobytes())
        files.append(path)
    labels = [_label(fault, marks[number], sampler) for number, fault in enumerate(faults)]
    if labels:
        out.mkdir(parents=True, exist_ok=True)
        write_atomic(out / LABELS, pretty_json(labels))
    return Planted(plot.config, files, plot.acts, labels)


def _refuse_moved_data(faults: Sequence[Fault]) -> None:
    """A stream that starts anew would bring the altered batches of before again, and not reach those of after."""
    data = [fault for fault in faults if fault.kind.applied == "data"]
    moved = [fault for fault in faults if fault.name == "lost-cursor"]
    if data and moved:
        raise ExperimentError(f"fault {moved[0]} starts the data anew, so {data[0]} can't be planted in the same run")


def _label(fault: Fault, mark: Mark, sampler: WindowSampler) -> dict[str, Any]:
    culprit = {"step": fault.step} | mark.culprit
    if mark.rows:
        places = sampler.provenance(fault.step)
        culprit["rows"] = [
            {"row": row, "source": sampler.sources[places[row].source].path.name, "offset": places[row].offset}
            for row in mark.rows
        ]
    return {
        "fault": fault.name,
        "step": fault.step,
        "keys": fault.keys,
        "applied": fault.kind.applied,
        "replay": fault.kind.replay,
        "shows": mark.shows,
        "expected_verdict": mark.verdict or fault.kind.verdict,
        "culprit": culprit,
    }
