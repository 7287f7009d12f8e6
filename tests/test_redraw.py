"""Batches drawn again from a checkpoint's cursor: the logged ones, or an error."""

import json

import mlx.core as mx
import numpy as np
import pytest
from experiments import record_own
from helpers import Points, edit_line, experiment

from workbench.batches.redraw import redraw
from workbench.errors import CheckpointError, ReplayError
from workbench.experiment import batch_hash
from workbench.run import Run


@pytest.fixture
def run(tmp_path):
    return record_own(tmp_path / "own", experiment(), 12)


def test_every_step_before_and_after_any_checkpoint(run):
    notices, sampler = [], Points()
    for step in (1, 5, 6, 11, 12, 3):
        assert batch_hash(redraw(run, sampler, step, 0, notices)) == run.evidence(step, 0)["batch_hash"]
    assert notices == []


def test_a_sampler_that_draws_from_mlx_is_found_out(tmp_path):
    class Drawing(Points):
        def __next__(self):
            x, y = super().__next__()
            return x + np.array(mx.random.normal(x.shape)), y

    def build():
        job = experiment()
        job.sampler = Drawing()
        return job

    run = record_own(tmp_path / "own", build(), 12)
    with pytest.raises(ReplayError, match="drawn again from checkpoint 5, is not the one that own logged"):
        redraw(run, Drawing(), 7, 0, [])


def test_without_a_logged_hash_it_says_so(run):
    def drop(line):
        del line["batch_hash"]

    edit_line(run.path, 7, drop)
    notices = []
    redraw(Run(run.path), Points(), 7, 0, notices)
    assert notices == ["the batch of step 7 was drawn again, and the run logged no hash to verify it by"]


def test_a_stream_that_ends_and_a_run_without_checkpoints(run):
    class Ended(Points):
        def __next__(self):
            raise StopIteration

    with pytest.raises(ReplayError, match="the sampler ran out before step 7"):
        redraw(run, Ended(), 7, 0, [])
    for path in (run.path / "checkpoints").glob("*.json"):
        path.unlink()
    with pytest.raises(ReplayError, match="no checkpoint of .* comes before step 7"):
        redraw(run, Points(), 7, 0, [])


def test_a_cursor_that_was_changed_or_removed_is_refused(run):
    path = run.path / "checkpoints" / "00000005.cursor"
    path.write_text(json.dumps({"number": 4}))
    with pytest.raises(CheckpointError, match="00000005.cursor was changed since it was committed"):
        redraw(run, Points(), 7, 0, [])
    path.unlink()
    with pytest.raises(CheckpointError, match="00000005.cursor can't be read"):
        redraw(run, Points(), 7, 0, [])
