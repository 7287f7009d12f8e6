"""Which rows of a batch are to blame: those that are wrong, those that are odd, those whose loss is high."""

import numpy as np
import pytest

from workbench.batches import rowfacts
from workbench.cause.suspects import NOTHING_COUNTS, high_losses, odd_rows, suspects

LENGTH = 48


def batch(seed, rows=8):
    """Rows of words of a small language, and their successors."""
    draw = np.random.default_rng(seed)
    words = ["the ", "quick ", "brown ", "fox ", "jumps ", "over ", "a ", "lazy ", "dog "]
    text = [list("".join(words[i] for i in draw.integers(0, 9, 30))[: LENGTH + 1].encode()) for _ in range(rows)]
    table = np.array(text, np.int32)
    return [table[:, :-1].copy(), table[:, 1:].copy()]


PAST = [batch(seed) for seed in range(8)]


def damaged(change, *rows):
    found = batch(99)
    for row in rows:
        change(found, row)
    return found


def garbage(found, row):
    tokens = np.random.default_rng(row).integers(0, 256, LENGTH + 1)
    found[0][row], found[1][row] = tokens[:-1], tokens[1:]


def shifted(found, row):
    found[1][row] = np.roll(found[1][row], -3)


def ignored(found, row):
    found[1][row] = -1


def repeated(found, row):
    found[0][row] = found[1][row] = 7


def test_an_ordinary_batch_has_no_odd_row():
    assert odd_rows(batch(50), PAST) == {}


@pytest.mark.parametrize(
    ("change", "phrase", "wrong"),
    [
        (garbage, "rare tokens", False),
        (shifted, "of the targets follow the inputs", True),
        (ignored, NOTHING_COUNTS, True),
        (repeated, f"one token repeated {LENGTH} times", True),
    ],
)
def test_what_is_odd_is_named(change, phrase, wrong):
    found = odd_rows(damaged(change, 2, 5), PAST)
    assert sorted(found) == [2, 5]
    assert all(one.wrong == wrong and any(phrase in why for why in one.why) for one in found.values())


def test_a_short_row_of_one_token_is_wrong_too():
    short = [[array[:, :10] for array in one] for one in PAST]
    found = [array[:, :10].copy() for array in batch(99)]
    found[0][3] = 7
    assert odd_rows(found, short)[3].why[0] == "one token throughout"


PAD = 0


def padded(found, row, end, token=PAD):
    found[0][row, end:], found[1][row, end - 1 :] = token, -1


def by_lengths(one, ends):
    """As mlx-lm has it: tokens, and where in each row what counts begins and ends."""
    tokens = one[0].copy()
    for row, end in enumerate(ends):
        tokens[row, end:] = PAD
    return [tokens, np.array([[3, end] for end in ends], np.int32)]


ENDS = [LENGTH, 12, LENGTH, 10, LENGTH, 14, LENGTH, 11]


def test_padding_is_no_repetition():
    """Where targets below 0 or lengths say which positions do not count, as long as what stands there is one token."""
    found = batch(99)
    for row in (1, 3):
        padded(found, row, 12)
    repeated_rows = [row for row, one in odd_rows(found, PAST).items() if any("repeated" in why for why in one.why)]
    assert repeated_rows == []
    past = [by_lengths(one, ENDS) for one in PAST]
    assert not any(
        "token" in why and "repeated" in why
        for one in odd_rows(by_lengths(found, ENDS), past).values()
        for why in one.why
    )
    empty = np.zeros((8, 0, 16), np.int32)  # the widths of micro-batches
    lengths = [*by_lengths(found, ENDS), empty]
    assert not any("repeated" in why for one in odd_rows(lengths, past).values() for why in one.why)


def test_repetition_that_counts_is_named_beside_padding():
    found = batch(99)
    found[0][1, :40] = found[1][1, :40] = 7
    padded(found, 1, 40)
    assert "one token repeated 40 times" in odd_rows(found, PAST)[1].why
    lengths = by_lengths(batch(99), ENDS)
    lengths[0][2, :40] = 7
    past = [by_lengths(one, ENDS) for one in PAST]
    assert "one token repeated 37 times" in odd_rows(lengths, past)[2].why  # what counts begins at 3
    lengths[1][2] = [45, 48]  # 40 of the prompt do not count: one token at the beginning
    assert not any("repeated" in why for why in getattr(odd_rows(lengths, past).get(2), "why", []))


def test_without_a_word_on_what_counts_every_position_does():
    found = batch(99)
    found[0][1, 12:] = PAD
    assert f"one token repeated {LENGTH - 12} times" in odd_rows(found[:1], [one[:1] for one in PAST])[1].why
    pairs = np.array([[60, 10]] * 8, np.int32)  # no beginning and end of 48 tokens
    assert f"one token repeated {LENGTH - 12} times" in odd_rows([found[0], pairs], PAST)[1].why


def losses(*high, of=8):
    found = 2.7 + 0.1 * np.random.default_rng(3).uniform(-1, 1, of)
    found[list(high)] += 3.0
    return found


def test_wrong_rows_come_before_odd_ones_and_odd_ones_before_high_losses():
    found = damaged(garbage, 1)
    shifted(found, 6)
    sets = suspects(found, PAST, losses(1, 4, 6), losses(of=24))
    assert [sorted(one.row for one in some) for some in sets] == [[6], [1, 6], [1, 4, 6]]
    assert [one.row for one in sets[2]] == sorted([1, 4, 6], key=lambda row: -losses(1, 4, 6)[row])


def test_a_row_that_is_odd_by_nature_does_not_stand_beside_garbage():
    found = damaged(garbage, 1, 2)
    rare = np.append(found[0][7], found[1][7][-1:])
    rare[:6] = range(200, 206)
    found[0][7], found[1][7] = rare[:-1], rare[1:]
    seen = losses(1, 2)
    seen[7] += 0.7
    assert 7 in odd_rows(found, PAST)
    assert [sorted(one.row for one in some) for some in suspects(found, PAST, seen, losses(of=24))] == [
        [1, 2],
        [1, 2, 7],
    ]
    by_contents = suspects(found, PAST, seen, losses(of=24), by_loss=False)
    assert sorted(one.row for one in by_contents[0]) == [1, 2]


def test_without_tokens_only_the_losses_speak():
    numbers = [np.ones((8, 3), np.float32)]
    (some,) = suspects(numbers, [numbers], losses(4, 0), losses(of=24))
    assert {one.row for one in some} == {0, 4} and all(one.why == [] and one.z > 3 for one in some)
    assert suspects(numbers, [numbers], None, None) == []


def test_losses_are_measured_in_robust_deviations_of_usual_rows():
    usual = np.array([1.0, 1.1, 0.9, 1.0, 1.05, 0.95, 1.0, 1.0, 1.1, 0.9])
    spread = 1.4826 * np.median(np.abs(usual - 1.0))
    assert high_losses(np.array([1.0, 1.0 + 5 * spread]), usual) == pytest.approx([0, 5])
    assert np.isnan(high_losses(np.array([5.0]), usual[:5])).all()  # too few to tell
    assert high_losses(np.array([np.inf]), usual) == [np.inf]
    assert np.isnan(high_losses(np.array([np.nan]), usual)).all()  # of a row whose targets are not known


def test_a_row_whose_mean_is_not_known_is_no_suspect_by_its_loss():
    numbers = [np.ones((8, 3), np.float32)]
    seen = losses(4, 0)
    seen[2] = np.nan
    (some,) = suspects(numbers, [numbers], seen, losses(of=24))
    assert {one.row for one in some} == {0, 4}
    seen[2] = np.inf
    alone, some = suspects(numbers, [numbers], seen, losses(of=24))
    assert [one.row for one in alone] == [2]  # by far the highest
    assert [one.row for one in some][0] == 2 and {one.row for one in some} == {0, 2, 4}


def test_an_odd_row_beside_padding_has_the_facts_of_its_own_tokens():
    """Short rows, padded, are like the same rows on their own: what `rowfacts` says of them is the reference."""
    found = batch(99)
    garbage(found, 5)
    for row, end in enumerate(ENDS):
        padded(found, row, end)
    past = [[array.copy() for array in one] for one in PAST]
    for one in past:
        for row, end in enumerate(ENDS):
            padded(one, row, end)
    cut = [[row[:end] for row, end in zip(one[0], ENDS, strict=True)] for one in (found, *past)]
    counts = np.bincount(np.concatenate([row for one in cut[1:] for row in one]), minlength=256)
    facts = rowfacts.unlike(cut[0], cut[1:], counts)
    wanted = {row for row in range(8) if facts["outlier"][row] >= 6}
    odd = odd_rows(found, past)
    assert set(odd) == wanted == {5}
    assert odd[5].oddness == pytest.approx(facts["outlier"][5], rel=1e-9)


def test_rows_with_numbers_that_are_not_finite():
    """Unless earlier batches held the like: a mask of -inf, or NaN for what is not known."""

    def weighted(seed, *bad):
        weights = np.ones((8, LENGTH), np.float32)
        weights[:, 0] = -np.inf
        for row, value in bad:
            weights[row, 5] = value
        return [*batch(seed), weights]

    past = [weighted(seed) for seed in range(8)]
    found = suspects(weighted(99, (3, np.nan), (6, np.inf)), past, losses(3, 6), losses(of=24))
    assert [(one.row, one.why, one.wrong) for one in sorted(found[0], key=lambda one: one.row)] == [
        (3, ["NaN in array 2 of the batch"], True),
        (6, ["inf in array 2 of the batch"], True),
    ]
    (some,) = suspects(weighted(99, (3, np.nan))[2:], [one[2:] for one in past], None, None)
    assert [one.row for one in some] == [3]
    assert suspects(weighted(99, (3, np.nan))[2:], [weighted(0, (1, np.nan))[2:]], None, None) == []
