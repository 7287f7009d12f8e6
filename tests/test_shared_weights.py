"""Weights that something beside the model holds, too."""

import warnings

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from helpers import Points
from mlx.utils import tree_flatten

import workbench as wb


def averaged_lazily(model, kept):
    for name, value in tree_flatten(model.parameters()):
        kept[name] = value if name not in kept else 0.9 * kept[name] + 0.1 * value


def first_ones(model, kept):
    kept.setdefault("all", [value for _, value in tree_flatten(model.parameters())])


def squares(model, x, y):
    return mx.mean((model(x) - y) ** 2)


@pytest.mark.parametrize("keep", [averaged_lazily, first_ones])
@pytest.mark.parametrize("in_place", [False, True])
def test_weights_that_stand_elsewhere_are_those_of_the_plain_loop(tmp_path, keep, in_place):
    def trained(record):
        mx.random.seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))  # the recorder replaces weights (1, n)
        mx.eval(model.parameters())
        optimizer, kept, sampler, found = optim.Adam(1e-2), {}, Points(), []
        passes = nn.value_and_grad(model, squares)

        def step(x, y):
            for _, value in tree_flatten(model.parameters()) if in_place else ():
                value *= 1 - 1e-3  # the object itself, wherever it stands
            loss, gradients = passes(model, x, y)
            optimizer.update(model, gradients)
            keep(model, kept)
            return loss

        def note():
            found.append([np.array(value).tobytes() for _, value in tree_flatten([kept, model.parameters()])])

        if not record:
            for _ in range(4):
                step(*map(mx.array, next(sampler)))
                note()
            return found
        with wb.Recorder(tmp_path / "run", model, optimizer, squares, sampler, step_fn=step, spikes=None) as recorder:
            for batch in recorder.batches(4):
                recorder.step(batch)
                note()
        return found

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert trained(True) == trained(False)
