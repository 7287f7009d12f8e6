"""A step whose state is not finite to begin with: it is replayed, and the notice says where to look instead."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import runs
from helpers import Points, experiment, parts

from workbench.record import Recorder
from workbench.recorded.first_sign import first_sign
from workbench.run import open_run


class Poisoned(Points):
    """The fifth batch holds a NaN."""

    def __next__(self):
        number = self.number
        x, y = super().__next__()
        return (x * np.float32("nan"), y) if number == 4 else (x, y)


def poisoned():
    job = experiment()
    job.sampler = Poisoned()
    return job


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("broken") / "own"
    with Recorder(path, *parts(poisoned()), compile=False, save_every=3, black_box=0) as recorder:
        for batch in recorder.batches(9):
            recorder.step(batch)
    return open_run(path)


def notices(run, step, make=poisoned, **options):
    trace = run.replay(step, experiment=make(), **options)
    assert trace.exact
    return [one for one in trace.notices if "not finite" in one]


@pytest.mark.parametrize("with_probe", [False, True])
def test_a_later_step_names_the_tensors_and_the_first_step_that_shows_it(run, with_probe):
    (said,) = notices(run, 8, with_probe=with_probe)
    assert said.startswith("The state before step 8 already held values that are not finite: weight layers.0.")
    assert " NaN of " in said and "more tensors" in said
    assert "first shows it at step 5 (per_layer_act_norms of layers.0)" in said
    assert "--step 5 (1 step to roll forward from checkpoint 3" in said


def test_the_step_that_broke_it_and_those_before_have_a_finite_state(run):
    assert notices(run, 5) == notices(run, 4) == notices(run, 1) == []


def test_a_state_that_no_line_gives_away(tmp_path):
    """A weight that is not used is no part of any number that is logged."""

    def make():
        job = experiment()
        job.model.unused = nn.Linear(2, 2)
        return job

    with Recorder(tmp_path / "own", *parts(make()), compile=False, save_every=3) as recorder:
        for batch in recorder.batches(7):
            recorder.step(batch)
            if recorder.step_number == 4:
                recorder.experiment.model.unused.weight = mx.full((2, 2), float("inf"))
                recorder.open_segment()
    (said,) = notices(open_run(tmp_path / "own"), 6, make)
    assert "weight unused.weight (4 infinite of 4)" in said
    assert "No line up to step 5 shows it" in said and "--step 5" in said


def test_a_run_that_began_with_it(tmp_path):
    def make():
        job = experiment()
        weight = job.model.layers[0].weight
        job.model.layers[0].weight = mx.where(mx.arange(weight.size).reshape(weight.shape) == 0, mx.inf, weight)
        mx.eval(job.model.parameters())
        return job

    with Recorder(tmp_path / "own", *parts(make()), compile=False, save_every=3) as recorder:
        for batch in recorder.batches(2):
            recorder.step(batch)
    (said,) = notices(open_run(tmp_path / "own"), 1, make)
    assert "weight layers.0.weight (1 infinite of 32)" in said and said.endswith("The run began with it.")


def test_a_mask_that_no_step_trains_is_not_broken(tmp_path):
    def make():
        job = experiment()
        job.model.mask = mx.array([0.0, float("-inf")])
        job.model.freeze(keys=["mask"], recurse=False)
        return job

    with Recorder(tmp_path / "own", *parts(make()), compile=False, save_every=3) as recorder:
        for batch in recorder.batches(2):
            recorder.step(batch)
    assert notices(open_run(tmp_path / "own"), 2, make) == []


def test_the_first_sign_against_every_line_read_one_by_one(run):
    def slow(last):
        for line in run.telemetry.lines:
            if line.type == "step" and line.step <= last:
                text = str(line.evidence())
                if any(f"0x{bits}" in text for bits in ("7fc00000", "ffc00000", "7f800000", "ff800000")):
                    return line.step
        return None

    for last in range(10):
        found = first_sign(run, 0, last)
        assert (None if found is None else found[0]) == slow(last)


def test_the_command_says_it(run, monkeypatch):
    monkeypatch.syspath_prepend(".")
    said = runs.here("replay", run.path, "--step", "8", "--factory", "test_broken_state:poisoned", "--no-fresh-process")
    assert said.code == 0 and "The state before step 8 already held values" in said.out
