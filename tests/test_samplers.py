"""The sampler of indexed data: each item once an epoch, from any cursor again, and a run with it replays."""

import json

import mlx.optimizers as optim
import numpy as np
import pytest
from helpers import mlp, mse

import workbench as wb
from workbench.errors import DataError
from workbench.samplers import IndexedSampler


class Squares:
    """Items of a regression problem, which say their own number."""

    def __init__(self, size=10):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        assert type(index) is int and 0 <= index < self.size
        x = np.full(4, index, np.float32)
        return x, x[:1] ** 2 / 100


def items(sampler, batches):
    return [next(sampler)[0][:, 0].astype(int).tolist() for _ in range(batches)]


def test_each_epoch_has_each_item_once_and_an_order_of_its_own():
    drawn = items(IndexedSampler(Squares(12), 4, seed=3), 9)
    epochs = [sum(drawn[start : start + 3], []) for start in (0, 3, 6)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(12))] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert items(IndexedSampler(Squares(12), 4, seed=4), 9) != drawn == items(IndexedSampler(Squares(12), 4, seed=3), 9)


def test_what_fills_no_batch():
    assert [len(batch) for batch in items(IndexedSampler(Squares(10), 4, 1), 4)] == [4, 4, 4, 4]
    whole = items(IndexedSampler(Squares(10), 4, 1, drop_last=False, epochs=1), 3)
    assert [len(batch) for batch in whole] == [4, 4, 2] and sorted(sum(whole, [])) == list(range(10))


def test_in_order_and_for_so_many_epochs():
    sampler = IndexedSampler(Squares(4), 2, 0, shuffle=False, epochs=2)
    assert items(sampler, 4) == [[0, 1], [2, 3], [0, 1], [2, 3]]
    with pytest.raises(StopIteration):
        next(sampler)
    with pytest.raises(StopIteration):
        next(sampler)


@pytest.mark.parametrize("options", [{}, {"drop_last": False}, {"shuffle": False}], ids=str)
@pytest.mark.parametrize("position", range(8))
def test_any_batch_is_drawn_again_from_its_cursor(position, options):
    sampler = IndexedSampler(Squares(10), 4, 5, **options)
    items(sampler, position)
    cursor = json.loads(json.dumps(sampler.state_dict()))
    expected = items(sampler, 4)
    other = IndexedSampler(Squares(10), 4, 5, **options)
    other.load_state_dict(cursor)
    assert items(other, 4) == expected


def test_a_batch_is_what_collate_makes_of_items():
    assert next(IndexedSampler([3, 4, 5], 3, 0, shuffle=False, collate=lambda found: np.array(found))).tolist() == [
        3,
        4,
        5,
    ]
    x, y = next(IndexedSampler(Squares(4), 2, 0))
    assert x.shape == (2, 4) and y.shape == (2, 1) and x.dtype == np.float32
    (only,) = next(IndexedSampler([np.zeros(2), np.ones(2)], 2, 0))
    assert only.shape == (2, 2)


def test_another_data_set_seed_or_batch_size_is_named():
    cursor = IndexedSampler(Squares(10), 4, 5).state_dict()
    for other, words in (
        (IndexedSampler(Squares(11), 4, 5), "size is 11, and 10 in the cursor"),
        (IndexedSampler(Squares(10), 2, 5), "batch is 2, and 4"),
        (IndexedSampler(Squares(10), 4, 6), "seed is 6, and 5"),
    ):
        with pytest.raises(DataError, match=words):
            other.load_state_dict(cursor)


@pytest.mark.parametrize(("size", "batch", "seed"), [(3, 4, 0), (4, 0, 0), (4, 2, -1), (0, 1, 0)])
def test_arguments_out_of_range(size, batch, seed):
    with pytest.raises(DataError):
        IndexedSampler(Squares(size), batch, seed)


def test_a_run_with_it_replays_and_resumes(tmp_path):
    def parts():
        return mlp(0.1), optim.AdamW(1e-2), mse, IndexedSampler(Squares(10), 4, 7, drop_last=False)

    for steps in (5, 9):
        with wb.Recorder(tmp_path / "run", *parts(), save_every=4, resume=steps > 5) as recorder:
            for batch in recorder.batches(steps):
                recorder.step(batch)
    traces = wb.open_run(tmp_path / "run").replay(range(1, 10), experiment=wb.Experiment(*parts()), with_probe=False)
    assert [trace.exact for trace in traces] == [True] * 9
