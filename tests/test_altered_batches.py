"""A loop that trains on another batch than its sampler gave, and batches of dtypes that a file has no name for."""

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from helpers import Numbered

from workbench import Experiment, Recorder, open_run
from workbench.experiment import as_batch, batch_hash
from workbench.stored_batches import BatchStore


class Rows(Numbered):
    def batch(self, number):
        return mx.random.normal((6, 4), key=mx.random.key(number)), mx.ones((6, 2))


def job(sampler=None):
    mx.random.seed(0)
    model, optimizer = nn.Linear(4, 2), optim.SGD(0.1)

    def step(x, y, scale=1):
        loss, gradients = nn.value_and_grad(model, lambda model, x: mx.mean(mx.square(model(x) - y)))(model, x)
        optimizer.update(model, gradients)
        return loss

    return Experiment(model, optimizer, None, sampler, step_fn=step)


def recorded(path, sampler, change, steps=4):
    one = job(sampler)
    with Recorder(path, one.model, one.optimizer, None, sampler, step_fn=one.step_fn) as recorder:
        for number, batch in zip(range(1, steps + 1), recorder.batches(steps), strict=False):
            recorder.step(change(number, batch))


def doubled_at(at):
    return lambda number, batch: (batch[0] * 2, batch[1]) if number == at else batch


def test_a_batch_that_the_loop_changed_late_is_told_and_named_by_the_replay(tmp_path):
    with pytest.warns(UserWarning, match="step 3 can't be replayed: it was given another batch than the sampler gave"):
        recorded(tmp_path / "run", Rows(), doubled_at(3))
    run = open_run(tmp_path / "run")
    trace = run.replay(3, experiment=job(Rows()))
    assert not trace.exact and any("given another batch than the sampler gave" in one for one in trace.notices)
    assert run.replay(2, experiment=job(Rows())).exact


@pytest.mark.parametrize(
    "change",
    [
        lambda number, batch: batch,
        lambda number, batch: list(batch),
        lambda number, batch: (mx.array(batch[0]), batch[1]),
        lambda number, batch: (mx.array(batch[0]), batch[1]) if number == 3 else batch,
    ],
    ids=["itself", "a list", "converted", "converted late"],
)
def test_the_same_content_is_no_other_batch(tmp_path, change):
    recorded(tmp_path / "run", Rows(), change)
    assert open_run(tmp_path / "run").replay(4, experiment=job(Rows())).exact


def test_batches_that_are_stored_may_be_changed(tmp_path):
    recorded(tmp_path / "run", [Rows().batch(number) for number in range(1, 5)], doubled_at(3))
    assert open_run(tmp_path / "run").replay(3, experiment=job()).exact


def test_an_array_of_float64_is_stored_bit_for_bit(tmp_path):
    values = np.random.default_rng(3).normal(size=(3, 2))
    with mx.stream(mx.cpu):
        batch = as_batch((mx.ones((2, 3)), mx.array(values, mx.float64), 0.5))
        store = BatchStore(tmp_path)
        store.put(batch_hash(batch), batch)
        found = store.get(batch_hash(batch))
        assert found[1].dtype == mx.float64 and np.array(found[1]).tobytes() == values.tobytes()


def test_a_run_with_an_array_of_float64_replays(tmp_path):
    one = job()
    with Recorder(tmp_path / "run", one.model, one.optimizer, step_fn=one.step_fn) as recorder:
        for number in range(2):
            recorder.step((*Rows().batch(number), mx.array(0.1, mx.float64)))
    assert open_run(tmp_path / "run").replay(2, experiment=job()).exact
