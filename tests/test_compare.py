"""The checker: equal bits are exact, all else is named; and it can go red on every item."""

import pytest

from workbench import compare
from workbench.bits import flip_bit, float_bits
from workbench.compare import (
    ESSENTIAL,
    ITEMS,
    Item,
    compare_evidence,
    mismatches,
    missed_flips,
    overall,
    with_one_bit_flipped,
)

ONE, TWO, NAN, INF = (float_bits(value) for value in (1.0, 2.0, float("nan"), float("inf")))


def evidence():
    """One value of every item, with NaN, an infinity and undefined entries among the arrays."""
    return {
        "batch_hash": "ab" * 32,
        "per_layer_act_norms": [ONE, None, TWO],
        "loss": ONE,
        "per_layer_grad_norms": [NAN, ONE, TWO],
        "grad_norm": INF,
        "lr": TWO,
        "adam_m_norms": [ONE, TWO, ONE],
        "adam_v_norms": [None, INF, ONE],
        **{f"state.{lane}": f"{number}{'0' * 31}" for number, lane in enumerate(("adam_m", "adam_v", "weights"))},
        **{f"state.{lane}": f"{number}{'0' * 31}" for number, lane in enumerate(("other", "rng", "cursor"))},
        "checkpoint": "equal",
    }


def verdicts(items):
    return {name: item.verdict for name, item in items.items()}


def test_items_are_in_execution_order_and_complete():
    assert sorted(evidence()) == sorted(ITEMS)
    items = compare_evidence(evidence(), evidence())
    assert tuple(items) == ITEMS
    assert set(verdicts(items).values()) == {"exact"} and overall(items) == "exact" and mismatches(items) == []


@pytest.mark.parametrize("name", ITEMS)
def test_each_item_goes_red_alone(name):
    changed = evidence()
    if name == "checkpoint":
        changed[name] = "differs at weights w"
    else:
        changed[name] = with_one_bit_flipped(changed[name], entry=1)
    items = compare_evidence(evidence(), changed)
    assert mismatches(items) == [name] and overall(items) == "mismatch"
    assert {verdict for other, verdict in verdicts(items).items() if other != name} == {"exact"}
    assert items[name].detail


@pytest.mark.parametrize("name", [name for name in ITEMS if isinstance(evidence()[name], list)])
@pytest.mark.parametrize("entry", [0, 1])
def test_each_defined_entry_of_an_array_counts(name, entry):
    changed = evidence() | {name: with_one_bit_flipped(evidence()[name], entry)}
    assert mismatches(compare_evidence(evidence(), changed)) == [name]
    assert sum(a != b for a, b in zip(evidence()[name], changed[name], strict=True)) == 1


def test_nan_inf_null_and_the_zeros_are_kept_apart():
    quiet, other = "0x7fc00000", "0x7fc00001"
    values = [quiet, other, "0xffc00000", INF, "0xff800000", "0x00000000", "0x80000000", ONE]
    for left in values:
        for right in values:
            expected = "exact" if left == right else "mismatch"
            assert verdicts(compare_evidence({"loss": left}, {"loss": right}))["loss"] == expected
            arrays = compare_evidence({"adam_m_norms": [left]}, {"adam_m_norms": [right]})
            assert arrays["adam_m_norms"].verdict == expected
        undefined = compare_evidence({"adam_m_norms": [left]}, {"adam_m_norms": [None]})["adam_m_norms"]
        assert undefined.verdict == "mismatch" and "undefined" in undefined.detail
    assert compare_evidence({"adam_m_norms": [None]}, {"adam_m_norms": [None]})["adam_m_norms"].verdict == "exact"


def test_one_ulp_is_no_match_and_the_detail_says_how_far():
    item = compare_evidence({"loss": ONE}, {"loss": flip_bit(ONE)})["loss"]
    assert item.verdict == "mismatch"
    assert "1.0 (0x3f800000)" in item.detail and "(0x3f800001)" in item.detail and "1 ULP apart" in item.detail
    assert "ULP" not in compare_evidence({"loss": ONE}, {"loss": NAN})["loss"].detail


def test_the_first_differing_layer_is_named_in_order_of_computation():
    layers = ["a", "b", "c"]
    forward = compare_evidence(
        {"per_layer_act_norms": [ONE, ONE, ONE]}, {"per_layer_act_norms": [ONE, TWO, TWO]}, layers
    )["per_layer_act_norms"]
    assert "2 of 3 layers, first b" in forward.detail
    backward = compare_evidence(
        {"per_layer_grad_norms": [ONE, ONE, ONE]}, {"per_layer_grad_norms": [TWO, TWO, ONE]}, layers
    )["per_layer_grad_norms"]
    assert "2 of 3 layers, first b" in backward.detail  # the gradient of b was computed before that of a


def test_arrays_of_unequal_length_differ():
    item = compare_evidence({"adam_m_norms": [ONE]}, {"adam_m_norms": [ONE, ONE]})["adam_m_norms"]
    assert item.verdict == "mismatch" and item.detail == "1 entries recorded, 2 replayed"
    assert compare_evidence({"adam_m_norms": []}, {"adam_m_norms": []})["adam_m_norms"].verdict == "exact"


def test_what_one_side_lacks_is_unverified_never_exact():
    items = compare_evidence({"loss": ONE}, {"grad_norm": ONE})
    assert set(verdicts(items).values()) == {"unverified"} and overall(items) == "unverified"
    assert (items["loss"].detail, items["grad_norm"].detail) == ("not measured", "not recorded")
    assert overall({}) == "unverified"


def test_overall_is_the_worst_that_was_compared():
    def of(*found):
        names = (*ESSENTIAL, "grad_norm", "state.rng")
        return overall({name: Item(1, 1, verdict) for name, verdict in zip(names, found, strict=False)})

    assert of("exact", "exact", "exact", "mismatch", "within tolerance") == "mismatch"
    assert of("exact", "exact", "exact", "within tolerance") == "within tolerance"  # "close" is never "exact"
    assert of("exact", "exact", "exact", "unverified") == "exact"
    assert of("exact", "exact", "unverified", "exact") == "unverified"
    assert of("exact", "exact") == "unverified"
    assert of("unverified") == "unverified"


def test_a_flip_changes_one_bit():
    assert int(with_one_bit_flipped("0x3f800000"), 16) ^ 0x3F800000 == 1
    assert with_one_bit_flipped("abc0") == "abc1" and with_one_bit_flipped("abcf") == "abce"
    assert with_one_bit_flipped([None, ONE, None]) == [None, flip_bit(ONE), None]
    assert with_one_bit_flipped([ONE, TWO], entry=3) == [ONE, flip_bit(TWO)]


def test_the_checker_misses_no_flip():
    whole = evidence()
    del whole["checkpoint"]  # a verdict on files, not a number; the gate plants its flips in the tensors
    assert missed_flips(whole) == []
    assert missed_flips({"adam_m_norms": [None], "loss": None}) == []


@pytest.mark.parametrize("name", [name for name in ITEMS if name != "checkpoint"])
def test_a_checker_that_ignores_an_item_is_found_out(monkeypatch, name):
    real = compare._compare

    def blind(item, recorded, replayed, layers):
        return real(item, recorded, recorded if item == name else replayed, layers)

    monkeypatch.setattr(compare, "_compare", blind)
    whole = evidence()
    del whole["checkpoint"]
    assert missed_flips(whole) == [name]


def test_a_checker_that_is_always_red_or_compares_roughly_is_found_out(monkeypatch):
    whole = evidence()
    del whole["checkpoint"]
    with monkeypatch.context() as patch:
        patch.setattr(compare, "_compare", lambda name, a, b, layers: Item(a, b, "mismatch", "x"))
        assert missed_flips(whole) == list(whole)
    real = compare._compare

    def rough(name, recorded, replayed, layers):
        if name == "loss":
            recorded, replayed = recorded[:8], replayed[:8]
        return real(name, recorded, replayed, layers)

    monkeypatch.setattr(compare, "_compare", rough)
    assert missed_flips(whole) == ["loss"]


def test_a_learning_rate_that_a_line_has_as_null_is_said_to_be_none():
    found = compare_evidence({"lr": NAN}, {"lr": ONE})["lr"]
    assert (found.verdict, found.detail) == ("mismatch", "recorded no finite rate, replayed 1.0")
    assert compare_evidence({"lr": NAN}, {"lr": NAN})["lr"].verdict == "exact"
