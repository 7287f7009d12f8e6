"""Bytes of a state, counted by hand; and that there is some memory."""

import mlx.optimizers as optim
from helpers import experiment, mlp

from workbench.experiment import ensure_initialised
from workbench.memory import memory, state_size

NUMBERS = 4 * 8 + 8 + 8 + 1  # of the small model


def size(**options):
    job = experiment(**options)
    ensure_initialised(job.optimizer, job.model)
    return state_size(job)


def test_weights_two_moments_and_two_scalars():
    assert size() == 4 * 3 * NUMBERS + 8 + 4
    assert size(dtype="bfloat16") == 2 * 3 * NUMBERS + 8 + 4
    assert size(optimizer=optim.Lion(1e-3)) == 4 * 2 * NUMBERS + 8 + 4


def test_what_is_frozen_takes_nothing_more():
    model = mlp()
    model.layers[0].freeze()
    assert size(model=model) == 4 * 3 * (8 + 1) + 8 + 4


def test_there_is_more_memory_than_one_gigabyte():
    assert memory() > 2**30
