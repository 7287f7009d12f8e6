"""Departures from the ordinary data stream: exactly where they were asked for, and the cursor stays what it is."""

import numpy as np
import pytest

from workbench.errors import DataError
from workbench.sabotage.alterations import IGNORED, Relabelling, Repetition, Substitution
from workbench.trainer.corpus import Corpus
from workbench.trainer.data import WindowSampler

BATCH, CTX, STEPS = 3, 8, 14


@pytest.fixture
def corpus(tmp_path):
    """Every token differs from its neighbours, so that a shift shows."""
    path = tmp_path / "corpus.bin"
    path.write_bytes(np.arange(400, dtype="<u2").tobytes())
    return Corpus.open(path)


@pytest.fixture
def stream(corpus):
    return lambda **altered: WindowSampler([corpus], BATCH, CTX, 42, **altered)


def drawn(sampler, steps=STEPS):
    return [sampler.batch_at(step) for step in range(1, steps + 1)]


def same(left, right):
    return all(np.array_equal(one, other) for one, other in zip(left, right, strict=True))


# ------------------------------------------------------------------------------------------------------------- targets


def test_shifted_targets_are_those_of_later_positions_and_inputs_stay(stream):
    plain = stream().batch_at(5)
    inputs, targets = stream(relabellings=[Relabelling(5, (1,), "shift", 3)]).batch_at(5)
    assert np.array_equal(inputs, plain[0])
    assert targets[1].tolist() == plain[1][1].tolist()[3:] + plain[1][1].tolist()[:3]
    assert np.array_equal(targets[[0, 2]], plain[1][[0, 2]])
    assert targets.dtype == np.int32


def test_shuffled_targets_are_the_same_ones_in_another_order_given_by_the_seed(stream):
    plain = stream().batch_at(5)[1]

    def shuffled(seed):
        return stream(relabellings=[Relabelling(5, (0, 2), "shuffle", seed)]).batch_at(5)[1]

    once = shuffled(7)
    assert np.array_equal(once, shuffled(7)) and not np.array_equal(once, shuffled(8))
    for row in (0, 2):
        assert sorted(once[row]) == sorted(plain[row]) and once[row].tolist() != plain[row].tolist()
    assert np.array_equal(once[1], plain[1])
    assert np.argsort(once[0]).tolist() != np.argsort(once[2]).tolist()  # each row has an order of its own


def test_the_order_of_shuffled_targets_stays_the_same_in_every_version(stream):
    """Written down, since a replay years later must draw it again."""
    plain, once = stream().batch_at(5)[1][0], stream(relabellings=[Relabelling(5, (0,), "shuffle", 7)]).batch_at(5)[1]
    assert [plain.tolist().index(token) for token in once[0]] == GOLDEN_ORDER


GOLDEN_ORDER = [4, 1, 6, 3, 2, 7, 5, 0]


def test_ignored_targets_do_not_count(stream):
    targets = stream(relabellings=[Relabelling(2, (0,), "ignore")]).batch_at(2)[1]
    assert targets[0].tolist() == [IGNORED] * CTX and IGNORED == -1
    assert targets[1].min() >= 0


def test_only_the_batch_that_was_named_is_changed(stream):
    plain, changed = drawn(stream()), drawn(stream(relabellings=[Relabelling(4, (0, 1, 2), "shift", 1)]))
    assert [step for step in range(1, STEPS + 1) if not same(plain[step - 1], changed[step - 1])] == [4]


# ------------------------------------------------------------------------------------------------------------- batches


def test_a_repeated_batch_is_the_other_one_and_the_stream_goes_on(stream):
    plain, altered = drawn(stream()), stream(repetitions=[Repetition(6, 2)])
    assert same(altered.batch_at(6), plain[1])
    assert all(same(altered.batch_at(step), plain[step - 1]) for step in range(1, STEPS) if step != 6)
    rows, own, source = altered.provenance(6), stream().provenance(6), stream().provenance(2)
    assert [row.offset for row in rows] == [row.offset for row in source]
    assert [(row.epoch, row.index) for row in rows] == [(row.epoch, row.index) for row in own]  # what it consumes


def test_a_repeated_batch_has_what_the_other_one_had(stream):
    altered = stream(
        substitutions=[Substitution(2, (0,), 0, (5,)), Substitution(6, (2,), 0, (9,))],
        relabellings=[Relabelling(2, (1,), "ignore")],
        repetitions=[Repetition(6, 2)],
    )
    (first, targets), (again, targets_again) = altered.batch_at(2), altered.batch_at(6)
    assert first[0].tolist() == again[0].tolist() == list(range(5, 5 + CTX))
    assert np.array_equal(targets[:2], targets_again[:2]) and targets_again[1].max() == IGNORED
    assert again[2].tolist() == list(range(9, 9 + CTX))  # and its own besides


def test_a_skipped_batch_is_consumed_by_no_step(stream):
    plain, altered = drawn(stream()), stream(skipped=[3, 7])
    numbers = [1, 2, 4, 5, 6, 8, 9, 10, 11]
    assert [altered.number(step) for step in range(1, 10)] == numbers
    for step, number in enumerate(numbers, start=1):
        assert altered.step == step
        assert same(next(altered), plain[number - 1])
        assert same(altered.batch_at(step), plain[number - 1])


def test_the_cursor_says_the_sample_whatever_was_skipped(stream):
    """So that a fork can skip a batch from the parent's cursor on."""
    plain, altered = stream(), stream(skipped=[3, 4])
    for _ in range(2):
        next(plain), next(altered)
    assert altered.state_dict() == plain.state_dict()
    next(altered)
    for _ in range(3):
        next(plain)
    assert altered.state_dict() == plain.state_dict()  # step 3 has consumed batch 5


def test_a_stream_that_skips_goes_on_from_every_cursor(stream):
    altered = stream(skipped=[1, 3, 4, 9])
    for step in range(1, STEPS):
        resumed, sought = stream(skipped=[9, 4, 3, 1, 3]), stream(skipped=[1, 3, 4, 9])
        resumed.load_state_dict(altered.state_dict())
        sought.seek(step)
        assert resumed.step == sought.step == altered.step == step
        assert resumed.state_dict() == sought.state_dict() == altered.state_dict()
        expected = next(altered)
        assert same(next(resumed), expected) and same(next(sought), expected)


def test_an_alteration_stays_with_its_batch_when_one_before_is_skipped(stream):
    altered = stream(skipped=[2], relabellings=[Relabelling(5, (0,), "ignore")], repetitions=[Repetition(8, 6)])
    plain = drawn(stream())
    assert altered.batch_at(4)[1][0].tolist() == [IGNORED] * CTX  # batch 5
    assert same(altered.batch_at(7), plain[5])  # batch 8, which is batch 6 again


def test_a_skipped_batch_takes_its_alterations_with_it(stream):
    assert same(stream(skipped=[4], relabellings=[Relabelling(4, (0,), "ignore")]).batch_at(4), drawn(stream())[4])


# -------------------------------------------------------------------------------------------------------------- checks


@pytest.mark.parametrize(
    ("altered", "words"),
    [
        ({"relabellings": [Relabelling(0, (0,), "shift", 1)]}, ("relabellings[0].step is 0",)),
        ({"relabellings": [Relabelling(1, (BATCH,), "shift", 1)]}, ("relabellings[0]", "is 3; expected")),
        ({"relabellings": [Relabelling(1, (0,), "shift", 0)]}, ("amount is 0", "from 1 to 7")),
        ({"relabellings": [Relabelling(1, (0,), "shift", CTX)]}, ("amount is 8", "from 1 to 7")),
        ({"relabellings": [Relabelling(1, (0,), "shuffle", -1)]}, ("amount is -1",)),
        ({"relabellings": [Relabelling(1, (0,), "reverse")]}, ("how is 'reverse'", "shift, shuffle, ignore")),
        ({"relabellings": [Relabelling(1, (0, 0), "ignore")]}, ("row 0 of step 1 a second time",)),
        ({"relabellings": [Relabelling(1, (0,), "ignore")] * 2}, ("relabellings[1]", "a second time")),
        ({"repetitions": [Repetition(0, 1)]}, ("repetitions[0].step is 0",)),
        ({"repetitions": [Repetition(1, 0)]}, ("repetitions[0].of is 0",)),
        ({"repetitions": [Repetition(1, 1)]}, ("repeats batch 1", "the same")),
        ({"repetitions": [Repetition(3, 2), Repetition(2, 1)]}, ("repeats batch 2", "itself a repetition")),
        ({"repetitions": [Repetition(3, 2), Repetition(3, 1)]}, ("batch of step 3 a second time",)),
        ({"skipped": [0]}, ("skipped[0] is 0",)),
        ({"skipped": [2, True]}, ("skipped[1] is True",)),
    ],
)
def test_what_can_not_be_is_refused_by_name(stream, altered, words):
    with pytest.raises(DataError) as caught:
        stream(**altered)
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)
