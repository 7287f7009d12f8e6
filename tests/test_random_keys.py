"""The random state that a step left is found among the keys that follow the one it began with; each is made once."""

import mlx.core as mx
import pytest

from workbench.experiment import random_key
from workbench.fingerprint import fingerprint_json
from workbench.recording import random_keys
from workbench.recording.random_keys import DRAWS, FollowingKeys


def drawn(seed, draws):
    """The state after so many draws, by drawing."""
    mx.random.seed(seed)
    for _ in range(draws):
        mx.random.uniform()
    return random_key()


def named(key):
    return fingerprint_json(list(key))


@pytest.fixture
def tried(monkeypatch):
    found = []
    monkeypatch.setattr(random_keys, "fingerprint_json", lambda key: found.append(1) or fingerprint_json(key))
    return found


def test_every_state_on_the_way_is_found():
    keys, key = FollowingKeys(), drawn(3, 0)
    for draws in (0, 1, 5, 70, 200):
        key = after = drawn(3, draws)
        assert keys.left_by(drawn(3, 0), named(after)) == after
    assert keys.left_by(drawn(3, 70), named(key)) == key
    assert keys.left_by(drawn(4, 0), named(drawn(4, 2))) == drawn(4, 2)


def test_a_state_before_is_not_after(tried):
    keys = FollowingKeys()
    assert keys.left_by(drawn(3, 0), named(drawn(3, 9))) == drawn(3, 9)
    assert keys.left_by(drawn(3, 5), named(drawn(3, 4))) is None


def test_what_a_step_that_seeds_anew_leaves_is_searched_once(tried):
    keys, began = FollowingKeys(), drawn(3, 0)
    assert [keys.left_by(began, named(drawn(seed, 1))) for seed in range(10, 15)] == [None] * 5
    assert len(tried) == DRAWS + 1
    assert keys.left_by(drawn(3, 4), named(drawn(9, 0))) is None  # the loop has drawn between
    assert len(tried) == DRAWS + 5


def test_a_long_run_keeps_no_more_keys_than_it_needs(tried, monkeypatch):
    monkeypatch.setattr(random_keys, "DRAWS", 200)
    keys, key = FollowingKeys(), drawn(3, 0)
    mx.random.seed(3)
    for _ in range(30):
        for _ in range(50):
            mx.random.uniform()
        after = random_key()
        key = keys.left_by(key, named(after))
        assert key == after
    assert len(keys._at) <= 2 * 200 + 64 + 200 and len(tried) < 2 * 30 * 50
