"""Planted faults: contrived spikes of known cause, compiled into the run's ordinary description.

A fault is turned into what any run may have (here: rows drawn from another source), so a replay rebuilds it without
knowing that it was planted. Its label goes to `planted.json`, which replay never opens.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .data import Substitution
from .errors import ExperimentError
from .files import pretty_json, write_atomic

LABELS = "planted.json"
SOURCES = "sources"  # folder in the run for data files that were made for it


@dataclass(frozen=True)
class Fault:
    """A parsed `NAME@STEP[:key=value,…]`."""

    name: str
    step: int
    keys: dict[str, str]


def parse(text: str) -> Fault:
    """Parses `garbage@40` or `garbage@40:rows=1`.

    Raises:
        ExperimentError: the text is malformed, or names an unknown fault or key.
    """
    match = re.fullmatch(r"([a-z-]+)@(\d+)(?::(.+))?", text)
    if not match:
        raise ExperimentError(
            f"fault {text!r} is malformed; expected NAME@STEP or NAME@STEP:key=value, as in garbage@40"
        )
    name, step, rest = match.groups()
    keys = dict(part.partition("=")[::2] for part in rest.split(",")) if rest else {}
    if name not in _KEYS:
        raise ExperimentError(f"fault {name!r} is unknown; expected one of {', '.join(_KEYS)}")
    if unknown := sorted(keys.keys() - _KEYS[name]):
        raise ExperimentError(f"fault {name} has no key {unknown[0]!r}; expected {', '.join(sorted(_KEYS[name]))}")
    if int(step) < 1:
        raise ExperimentError(f"fault {text!r} is at step {step}; steps are counted from 1")
    return Fault(name, int(step), keys)


_KEYS = {"garbage": {"rows"}}


@dataclass(frozen=True)
class PlantedData:
    """What the faults add to a run's data description: files inside the run's folder, and the rows drawn from them."""

    files: list[Path]
    substitutions: list[Substitution]


def plant(
    faults: list[Fault], out: Path, *, batch: int, ctx: int, vocabulary: int, suffix: str, seed: int
) -> PlantedData:
    """Writes the data files of the faults and the labels into the run's folder.

    Args:
        batch: rows a step.
        vocabulary: random tokens are drawn below it.
        suffix: ".bin" for uint16 tokens, anything else for bytes; as the corpus has it.

    Raises:
        ExperimentError: `rows` is out of range.
    """
    files, substitutions = [], []
    for number, fault in enumerate(faults, start=1):
        rows = int(fault.keys.get("rows", batch)) if fault.keys.get("rows", "1").isdecimal() else 0
        if not 1 <= rows <= batch:
            raise ExperimentError(
                f"fault {fault.name}@{fault.step} has rows={fault.keys['rows']}; expected 1 to {batch}"
            )
        words = np.random.Philox(key=[seed, fault.step]).random_raw(rows * (ctx + 1))
        tokens = words % np.uint64(vocabulary)
        path = out / SOURCES / f"{number}{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, tokens.astype("<u2" if suffix == ".bin" else np.uint8).tobytes())
        files.append(path)
        # A few bad rows stand in the middle of the batch, as they would among shuffled data.
        first = (batch - rows) // 2
        offsets = tuple(row * (ctx + 1) for row in range(rows))
        substitutions.append(Substitution(fault.step, tuple(range(first, first + rows)), number, offsets))
    labels: list[dict[str, Any]] = [
        {"fault": fault.name, "step": fault.step, "rows": list(s.rows), "expected_verdict": "data"}
        for fault, s in zip(faults, substitutions, strict=True)
    ]
    if labels:
        write_atomic(out / LABELS, pretty_json(labels))
    return PlantedData(files, substitutions)
