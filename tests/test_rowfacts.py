"""What is said of rows, against slow references written from the definitions."""

import collections
import math
import statistics
import zlib

import numpy as np
import pytest

from workbench.batches import rowfacts
from workbench.batches.rowfacts import Repetition, repetition

DRAW = np.random.Generator(np.random.Philox(key=3))


def slow_repetition(tokens):
    """Every period, every start: how often does the stretch repeat?"""
    tokens = list(tokens)
    for period in range(1, 14):
        best = None
        for start in range(len(tokens)):
            end = start + period
            while end < len(tokens) and tokens[end] == tokens[end - period]:
                end += 1
            repeats = (end - start) // period
            if repeats >= 32 and (best is None or end - start > best[1]):
                best = (Repetition(period, repeats, start), end - start)
        if best:
            return best[0]
    return None


def rows():
    noise = DRAW.integers(0, 256, 500)
    yield "noise", noise
    yield "few letters", DRAW.integers(0, 2, 500)
    yield "one token", np.full(500, 7)
    for period in (1, 2, 3, 5, 12, 13, 14):
        for repeats in (31, 32, 33):
            row = noise.copy()
            stretch = np.tile(1000 + np.arange(period), repeats)[: len(row) - 40]
            row[40 : 40 + len(stretch)] = stretch
            yield f"{repeats} × {period}", row
    yield "at the end", np.concatenate([noise[:100], np.tile([1, 2], 40)])
    yield "two stretches", np.concatenate([np.full(40, 1), noise[:9], np.full(60, 2)])
    yield "short", np.full(31, 1)
    yield "empty", np.zeros(0, int)


@pytest.mark.parametrize(("name", "tokens"), [pytest.param(name, row, id=name) for name, row in rows()])
def test_repetition_is_what_a_search_of_every_start_finds(name, tokens):
    assert repetition(tokens) == slow_repetition(tokens)


def test_periods_and_counts_at_the_limits():
    found = {name: repetition(row) for name, row in rows()}
    assert found["31 × 5"] is None and found["32 × 5"] == Repetition(5, 32, 40) and found["33 × 5"].repeats == 33
    assert found["32 × 13"] == Repetition(13, 32, 40) and found["32 × 14"] is None
    assert found["one token"] == Repetition(1, 500, 0) and found["two stretches"] == Repetition(1, 60, 49)


def test_measures_against_their_definitions():
    batch = DRAW.integers(0, 200, (5, 64))
    counts = np.bincount(DRAW.integers(0, 200, 3000), minlength=256)
    found = rowfacts.measures(batch, counts)
    assert list(found) == list(rowfacts.MEASURES)
    smoothed = {token: count + 0.5 for token, count in enumerate(counts.tolist())}
    total = sum(smoothed.values())
    for number, row in enumerate(batch.tolist()):
        assert found["distinct"][number] == len(set(row)) / 64
        assert found["compressed"][number] == len(zlib.compress(bytes(row), 9)) / 64
        mean = statistics.fmean(math.log(smoothed[token] / total) for token in row)
        assert found["log_likelihood"][number] == pytest.approx(mean, rel=1e-12)


def test_wide_tokens_take_as_many_bytes_as_their_vocabulary_needs():
    row = np.arange(300)
    assert rowfacts.compressed(row, 65536) == len(zlib.compress(row.astype("<u2").tobytes(), 9)) / 600
    assert rowfacts.compressed(row, 70000) == len(zlib.compress(row.astype("<u4").tobytes(), 9)) / 1200


def test_robust_z_against_the_definition():
    past = DRAW.normal(5.0, 2.0, 41)
    middle = statistics.median(past.tolist())
    mad = statistics.median(abs(value - middle) for value in past.tolist())
    values = np.array([5.0, 50.0, -3.0])
    expected = [(value - middle) / (1.4826 * mad) for value in values.tolist()]
    assert rowfacts.robust_z(values, past) == pytest.approx(expected, rel=1e-12)


def test_where_the_past_hardly_varies_the_floor_keeps_z_small():
    past = np.full(20, 0.5)
    assert rowfacts.robust_z(np.array([0.5, 0.51]), past) == pytest.approx([0, 2])


def test_too_little_past_gives_no_z():
    assert np.isnan(rowfacts.robust_z(np.ones(2), np.ones(7))).all()
    found = rowfacts.unlike(np.zeros((2, 4), int), [], np.ones(256))
    assert np.isnan(found["outlier"]).all() and not np.isnan(found["distinct"]).any()


def test_a_row_of_noise_and_a_row_of_one_token_stand_out_among_text():
    text = np.frombuffer(b"the quick brown fox jumps over the lazy dog and then it rests a while ", np.uint8)
    ordinary = [np.stack([np.roll(text, 7 * k + j) for k in range(6)])[:, :64].astype(int) for j in range(8)]
    counts = np.bincount(text, minlength=256)
    batch = ordinary[0].copy()
    batch[2], batch[4] = DRAW.integers(0, 256, 64), ord("e")
    found = rowfacts.unlike(batch, ordinary, counts)
    assert set(np.argsort(found["outlier"])[-2:]) == {2, 4}
    assert found["log_likelihood_z"][2] < -6 and found["distinct_z"][2] > 6
    assert found["distinct_z"][4] < -6 and found["compressed_z"][4] < -6
    others = np.delete(found["outlier"], [2, 4])
    assert others.max() < 6
    largest = np.max(np.abs([found[f"{name}_z"] for name in rowfacts.MEASURES]), axis=0)
    assert (found["outlier"] == largest).all()


def test_copies_are_rows_equal_in_every_array():
    inputs = np.array([[1, 2], [3, 4], [1, 2], [1, 2], [5, 6]])
    targets = np.array([[2, 3], [4, 5], [2, 3], [9, 9], [6, 7]])
    assert rowfacts.copies((inputs, targets)) == [2, None, 0, None, None]
    assert rowfacts.copies((inputs,)) == [2, None, 0, 0, None]
    counted = collections.Counter(rowfacts.row_keys((inputs, targets)))
    assert sorted(counted.values()) == [1, 1, 1, 2]


def test_targets_that_follow_and_targets_that_do_not():
    window = np.arange(10).reshape(1, 10)
    inputs, targets = window[:, :-1], window[:, 1:]
    assert rowfacts.follow(inputs, targets).tolist() == [1.0]
    assert rowfacts.follow(inputs, np.roll(targets, -1, axis=1)).tolist() == [0.0]
    half = targets.copy()
    half[0, :4] = -1
    assert rowfacts.follow(inputs, half).tolist() == [1.0]  # what does not count is not asked
    half[0, :4] = 99
    assert rowfacts.follow(inputs, half).tolist() == [0.5]
    assert rowfacts.follow(inputs, np.full_like(inputs, -1)).tolist() == [0.0]
    assert np.isnan(rowfacts.follow(np.zeros((1, 1)), np.zeros((1, 1)))).all()
