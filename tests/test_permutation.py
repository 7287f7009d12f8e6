"""The order of windows in an epoch: a bijection, equal to its slow twin."""

import numpy as np
import pytest

from workbench.trainer.permutation import mix, permute


def test_mixer_is_splitmix64():
    # The first outputs of the published generator for seed 1234567.
    states = np.array([(1234567 + i * 0x9E3779B97F4A7C15) % 2**64 for i in (1, 2, 3)], np.uint64)
    assert mix(states).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def order(size, epoch=0, seed=42):
    return permute(np.arange(size, dtype=np.uint64), np.full(size, epoch, np.uint64), seed, size).tolist()


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 16, 17, 63, 64, 65, 1000, 4097])
def test_permutation_is_a_bijection(size):
    for seed, epoch in [(0, 0), (42, 1), (2**64 - 1, 2**40)]:
        assert sorted(order(size, epoch, seed)) == list(range(size))


def permute_one(index, epoch, seed, size):
    """A slow twin, in Python's own integers."""
    wrap, golden = 2**64, 0x9E3779B97F4A7C15

    def mix(x):
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % wrap
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % wrap
        return x ^ (x >> 31)

    key = mix((mix(seed) + (epoch + 1) * golden) % wrap)
    half = 1
    while 4**half < size:
        half += 1
    while True:
        left, right = divmod(index, 2**half)
        for number in range(1, 9):
            left, right = right, left ^ mix((key + number * golden) % wrap ^ right) % 2**half
        index = left * 2**half + right
        if index < size:
            return index


def test_permutation_equals_its_slow_twin():
    for size, epoch, seed in [(5, 0, 0), (1000, 3, 42), (1025, 2**33, 2**64 - 1)]:
        assert order(size, epoch, seed) == [permute_one(i, epoch, seed, size) for i in range(size)]
    huge = 2**61 + 12345
    index = np.array([0, 1, huge - 1], np.uint64)
    found = permute(index, np.full(3, 9, np.uint64), 7, huge).tolist()
    assert found == [permute_one(int(i), 9, 7, huge) for i in index]


def test_orders_differ_by_seed_and_epoch_and_look_random():
    size = 1000
    orders = [order(size), order(size, epoch=1), order(size, seed=43), list(range(size))]
    for i, a in enumerate(orders):
        for b in orders[:i]:
            assert sum(x == y for x, y in zip(a, b, strict=True)) < 10  # expected: 1
            assert abs(np.corrcoef(a, b)[0, 1]) < 0.15  # more than four standard deviations
    # Each of the 6 orders of 3 windows comes about equally often.
    counts = {}
    for epoch in range(600):
        found = tuple(order(3, epoch))
        counts[found] = counts.get(found, 0) + 1
    assert len(counts) == 6 and 60 < min(counts.values()) and max(counts.values()) < 140
