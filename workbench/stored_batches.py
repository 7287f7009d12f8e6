"""Batches kept in a run's folder by their content, for runs whose data can't be drawn again.

Each is a safetensors file `batches/<hash>.safetensors`, named by the hash that telemetry logs (SHA-256 over dtype,
shape and raw bytes of each array), so equal batches are stored once and telemetry says which step used which. A step
costs writing its batch; the budget bounds what a run may take.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec

from . import numpy_parts
from .errors import CheckpointError, DataError, ExperimentError, ReplayError
from .experiment import Batch, Experiment, as_batch, batch_hash
from .files import canonical_json, sync_file, sync_folder, temporary_beside, write_atomic
from .lines.line import LIMIT
from .numbered_batch import Number, NumberedBatch, numbers_of, numpy_of, read, spelled
from .numpy_parts import NumpyPart, beside, raw_bytes
from .plain_batches import PlainBatches
from .recorded.layout import BATCHES
from .run import Run
from .sampler_forms import OfNumpy, WithoutNumbers
from .tensor_file import arrays_of
from .tensor_places import ends_at
from .untrusted import decode, read_file

_NUMBERS = "numbers"  # key of a file's metadata: the numbers among the arrays, as `numbered_batch` spells them
_NUMPY = "numpy"  # likewise: what its arrays of numpy were, as `numpy_parts` spells it
_FLOAT64 = "float64"  # likewise: the places of arrays of that dtype, of which the file has the bits
_HEADER = 128  # bytes of a safetensors header, and as many for each array, at most
_AHEAD = 100  # batches that are looked at for one that the loop trained on later than it was drawn
BUDGET = 4 << 30  # bytes a run: a day of small batches, and no full disk by surprise


class BatchStore:
    """The batches of one run.

    Args:
        folder: of the run.
        budget: bytes that its batches may take in all.
    """

    def __init__(self, folder: Path, budget: int = BUDGET) -> None:
        self.folder, self.budget = folder / BATCHES, budget
        self.bytes = sum(map(_size, self.folder.glob("*.safetensors")))
        self._unsynced: list[Path] = []
        self._doubtful: set[Path] = set()  # of these, that could not be made durable: see `lines.writer`
        self._warned = False

    def refuse_beyond(self, batch: Batch, hashed: Callable[[Batch], str] = batch_hash) -> None:
        """Before a step: whether its batch can be kept. At four fifths of the budget a warning says so, once.

        Raises:
            ExperimentError: it would exceed the budget.
        """
        size = sum(array.nbytes + _HEADER for array in batch) + _HEADER
        size += sum(values.nbytes + 2 * _HEADER for values in raw_bytes(numpy_of(batch)).values())
        if self.bytes + size > self.budget and not self._path(hashed(batch)).exists():
            raise ExperimentError(
                f"the batches stored in {self.folder} take {self.bytes} bytes, and one more of {size} exceeds the "
                f"budget of {self.budget}: the step was not performed, for it could not be replayed. Go on with "
                "resume=True and a larger batch_budget, or with a sampler that has state_dict() and "
                "load_state_dict(cursor)"
            )
        if self.bytes + size > 0.8 * self.budget and not self._warned:
            self._warned = True
            warnings.warn(
                f"the batches stored in {self.folder} take {self.bytes} of {self.budget} bytes; when the budget is "
                "used up the recorder refuses further steps (batch_budget=BYTES)",
                stacklevel=4,
            )

    def put(self, name: str, batch: Batch) -> None:
        """Stores a batch under its hash, unless it is there.

        Raises:
            ExperimentError: one of the same content is, with arrays of MLX where this one has numpy's, or the reverse.
            OSError: it can't be written.
        """
        path = self._path(name)
        if path.exists():
            self._refuse_other_form(path, batch)
            return
        self.folder.mkdir(exist_ok=True)
        temporary = temporary_beside(path)
        try:
            arrays = {
                str(number): array.view(mx.uint64) if array.dtype == mx.float64 else array
                for number, array in enumerate(batch)
            }
            numpy = numpy_of(batch)
            arrays |= {beside(place): mx.array(values) for place, values in raw_bytes(numpy).items()}
            mx.save_safetensors(str(temporary), arrays, _metadata(batch))
            temporary.replace(path)
        except RuntimeError as error:
            reason = str(error).rstrip(".")
            raise OSError(f"{self.folder.name}/{path.name[:12]}… can't be written: {reason}") from error
        finally:
            temporary.unlink(missing_ok=True)
        self.bytes += path.stat().st_size
        self._unsynced.append(path)

    def _refuse_other_form(self, path: Path, batch: Batch) -> None:
        try:
            there = _text(_whole(path)).get(_NUMPY)
        except (OSError, ValueError):
            return  # a replay says so
        if there != (_metadata(batch) or {}).get(_NUMPY):
            raise ExperimentError(
                "an earlier batch of the same content is stored, whose arrays were of numpy where this one's are of "
                "MLX, or the reverse, or lay in memory otherwise, and a replay gets those; hand over mx.array(x) in "
                "each step, or x itself in each"
            )

    def sync(self) -> None:
        """Before a checkpoint: what was stored outlives a power failure."""
        for path in self._unsynced:
            try:
                if path in self._doubtful:
                    write_atomic(path, path.read_bytes())  # whether these are right, the hash that is its name says
                else:
                    sync_file(path)
            except OSError:  # the system may have dropped what it holds, and say of a second attempt that all is well
                self._doubtful.add(path)
                raise
        if self._unsynced:
            sync_folder(self.folder)
        self._unsynced.clear()
        self._doubtful.clear()

    def get(self, name: str) -> Batch:
        """The batch with this hash, verified by it.

        Raises:
            DataError: it is missing or was changed.
        """
        if not re.fullmatch("[0-9a-f]{64}", name):
            raise DataError(f"the telemetry names a batch {name!r}; expected 64 hexadecimal digits")
        path = self._path(name)
        try:
            content = _whole(path)
            found = arrays_of(content)
            for place in map(str, decode(_text(content).get(_FLOAT64, "[]").encode(), list[int])):
                found[place] = found[place].view(mx.float64)
            numbers, numpy = _numbers(content), _numpy(content, found)
            batch: Batch = tuple(found[str(number)] for number in range(len(found) - len(raw_bytes(numpy))))
            if numbers or numpy:
                batch = NumberedBatch(batch, numbers, numpy)
        except (OSError, ValueError, KeyError) as error:
            raise DataError(
                f"the stored batch {path} can't be read ({error}); put it back: nothing else has it"
            ) from error
        if (other := batch_hash(batch)) != name:
            raise DataError(f"the stored batch {path} was changed: its hash is {other}")
        return batch

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # the temporary file of a batch that was being written has its own name by now
        return 0


def _whole(path: Path) -> bytes:
    """A file's bytes; none of one that is longer than its header says, and may be so at no cost on the disk.

    Raises:
        OSError: it can't be read, or is no regular file.
        ValueError: its header does not say its size.
    """
    ends = ends_at(path)
    content = read_file(path, ends)
    if len(content) != ends:
        raise ValueError(f"it has {len(content)} bytes, and its tensors end at byte {ends}")
    return content


def _metadata(batch: Batch) -> dict[str, str] | None:
    numbers, numpy = numbers_of(batch), numpy_of(batch)
    found = {_NUMBERS: canonical_json(spelled(numbers)).decode()} if numbers else {}
    if numpy:
        found[_NUMPY] = canonical_json(numpy_parts.spelled(numpy)).decode()
    if places := [place for place, array in enumerate(batch) if array.dtype == mx.float64]:
        found[_FLOAT64] = canonical_json(places).decode()
    return found or None


def _text(content: bytes) -> dict[str, str]:
    """The metadata of a batch's file, whose header is sound."""
    header = content[8 : 8 + int.from_bytes(content[:8], "little")]
    raw = bytes(decode(header, dict[str, msgspec.Raw]).get("__metadata__", b"null"))
    return {} if raw == b"null" else decode(raw, dict[str, str])  # MLX writes null where there is none


def _numbers(content: bytes) -> dict[int, Number]:
    text = _text(content).get(_NUMBERS)
    return {} if text is None else read(decode(text.encode(), dict[str, tuple[str, str]]))


def _numpy(content: bytes, arrays: dict[str, mx.array]) -> dict[int, NumpyPart]:
    text = _text(content).get(_NUMPY)
    if text is None:
        return {}
    return numpy_parts.read(decode(text.encode(), dict[str, numpy_parts.Form]), arrays)


class StoredBatches:
    """A sampler over the batches that a run stored: those of its steps on the way that leads to a segment."""

    def __init__(self, run: Run, segment: int) -> None:
        self._run, self._segment, self._store, self._step = run, segment, BatchStore(run.path), 0

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        line = self._run.line(self._step + 1, self._segment)
        if line is None and self._step < self._run.telemetry.last_step(self._segment):
            raise ReplayError(
                f"the telemetry of {self._run.path} has no line of step {self._step + 1}, though it has later ones: "
                "which batch that step used is not known any more. Put the file back from a copy; `workbench verify` "
                "says what else is missing"
            )
        if line is None:
            raise StopIteration
        if not isinstance(line.batch_hash, str):
            raise ReplayError(
                f"the telemetry of {self._run.path} does not say which batch step {self._step + 1} used, so it can't "
                "be found among the stored ones"
            )
        batch = self._store.get(line.batch_hash)
        self._step += 1
        return batch

    def state_dict(self) -> dict[str, int]:
        return {"step": self._step}

    def load_state_dict(self, cursor: dict[str, Any]) -> None:
        step = cursor.get("step")
        if type(step) is not int or not 0 <= step < LIMIT:
            raise CheckpointError(
                f'the cursor of a checkpoint of {self._run.path} is {str(cursor)[:80]}; expected {{"step": N}}, the '
                "number of the step whose batch was drawn last: it was changed, or is another run's"
            )
        self._step = step


def with_stored_batches(run: Run, experiment: Experiment, segment: int) -> Experiment:
    """The experiment, drawing the run's stored batches if the run has them; otherwise as it is."""
    if not run.manifest.stored_batches:
        if isinstance(experiment.sampler, PlainBatches):
            raise ExperimentError(
                f"{run.name} was recorded with a sampler that has a cursor, and the experiment has none; pass that "
                "sampler"
            )
        if run.manifest.numpy:
            return replace(experiment, sampler=OfNumpy(experiment.sampler))
        if run.manifest.numbers or run.manifest.rebuild.get("kind") not in ("factory", "none"):
            return experiment
        return replace(experiment, sampler=WithoutNumbers(experiment.sampler))
    return replace(experiment, sampler=StoredBatches(run, segment))


def verifier(run: Run, segment: int) -> Callable[[int, Any, Iterator[Any]], None]:
    """For a resume that passes over batches which the run has used: raises ExperimentError if one is another. To say
    why, some of those that follow are drawn; nothing is gone on with then."""

    def verify(step: int, batch: Any, following: Iterator[Any]) -> None:
        line = run.line(step, segment)
        recorded = None if line is None else line.batch_hash
        if not isinstance(recorded, str) or batch_hash(as_batch(batch, numpy=run.manifest.numpy)) == recorded:
            return
        what = f"the iterator's batch {step} is not the one that step {step} of {run.path} used"
        for left_out, other in enumerate(islice(following, _AHEAD), 1):
            if batch_hash(as_batch(other, numpy=run.manifest.numpy)) == recorded:
                which = f"batch {step}" if left_out == 1 else f"batches {step} to {step + left_out - 1}"
                raise ExperimentError(
                    f"{what}; its batch {step + left_out} is. The loop drew {which} and did not train on it, which no "
                    "checkpoint of an iterator without a cursor says. For this run pass no sampler, and hand each "
                    "batch to recorder.step(batch); for the next one leave such batches out inside the iterator"
                )
        raise ExperimentError(
            f"{what}, nor is one of the next {_AHEAD}: it gives other batches each time. Seed it; or pass no sampler "
            "and hand each batch to recorder.step(batch)"
        )

    return verify
