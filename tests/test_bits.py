"""Bits and back: nothing of a float32 is lost on the way through JSON, and nothing malformed is believed."""

import json
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench import bits
from workbench.bits import (
    UlpDifference,
    array_bits,
    bits_float,
    flip_bit,
    float_bits,
    json_float,
    json_floats,
    ulp_difference,
    ulp_distance,
)

WORDS = st.integers(0, 2**32 - 1)
SPECIAL = [0x00000000, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFFC12345, 0x00000001, 0x7F7FFFFF]


def single(word):
    return np.array([word], np.uint32).view(np.float32)[0]


@given(WORDS)
def test_bits_of_a_float_are_struct_s(word):
    value = single(word)
    assert float_bits(value) == f"0x{struct.unpack('<I', np.float32(value).tobytes())[0]:08x}"


@pytest.mark.parametrize("word", SPECIAL)
def test_bits_round_trip_with_nan_payloads_and_signed_zero(word):
    assert float_bits(bits_float(f"0x{word:08x}")) == f"0x{word:08x}"


@given(WORDS)
def test_json_number_gives_the_same_float32_again(word):
    number = json_float(single(word))
    if np.isfinite(single(word)):
        assert float_bits(json.loads(json.dumps(number))) == f"0x{word:08x}"
    else:
        assert number is None


def test_json_number_has_the_fewest_digits():
    assert repr(json_float(np.float32(0.1))) == "0.1"
    assert repr(json_float(np.float32(-0.0))) == "-0.0"


@pytest.mark.parametrize("text", ["", "0x", "0x1234567", "0x123456789", "0X12345678", "0x1234567G", "0xABCDEF01", "12"])
def test_malformed_bits_are_refused_by_name(text):
    with pytest.raises(ValueError, match="float32 bits") as error:
        bits_float(text)
    assert repr(text) in str(error.value)


@given(st.lists(st.one_of(st.none(), WORDS), max_size=6))
def test_arrays_round_trip_through_strict_json(words):
    values = [None if word is None else single(word) for word in words]
    numbers, bits = json.loads(json.dumps(json_floats(values), allow_nan=False))
    assert array_bits(numbers, bits) == [None if word is None else f"0x{word:08x}" for word in words]


def test_bits_stand_beside_an_array_only_when_numbers_do_not_say_all():
    assert json_floats([np.float32(1.0), None]) == ([1.0, None], None)
    numbers, bits = json_floats([np.float32("nan"), None, np.float32("inf")])
    assert numbers == [None, None, None]
    assert bits == ["0x7fc00000", None, "0x7f800000"]  # NaN, undefined and inf stay apart


def test_arrays_of_unequal_length_are_refused():
    with pytest.raises(ValueError, match="2 numbers but 1 bit patterns"):
        array_bits([1.0, 2.0], ["0x3f800000"])


@pytest.mark.parametrize(
    ("numbers", "bits"),
    [
        ([1.0], ["0x3f800001"]),  # another number
        ([1.0], [None]),  # a number, but undefined
        ([None], ["0x3f800000"]),  # null, but finite
        ([None], ["nan"]),  # malformed
    ],
)
def test_arrays_whose_bits_contradict_their_numbers_are_refused(numbers, bits):
    with pytest.raises(ValueError):
        array_bits(numbers, bits)


def test_ulp_distance_counts_representable_values():
    one = float_bits(1.0)
    assert ulp_distance(one, one) == 0
    assert ulp_distance(one, float_bits(np.nextafter(np.float32(1), np.float32(2)))) == 1
    assert ulp_distance(float_bits(-1e-45), float_bits(1e-45)) == 2  # across zero
    assert ulp_distance("0x00000000", "0x80000000") == 0  # the two zeros are one number (and differ in bits)
    assert ulp_distance(one, "0x7fc00000") is None
    assert ulp_distance("0x7f800000", one) is None


@given(WORDS, st.integers(0, 31))
def test_flip_bit_changes_exactly_that_bit(word, position):
    assert int(flip_bit(f"0x{word:08x}", position), 16) ^ word == 1 << position


# --------------------------------------------------------------------------------------------------- arrays, in ULP

NAN, INF = float("nan"), float("inf")


def words_of(values, dtype):
    """Raw words of float64 values that the format holds exactly."""
    if dtype == "bfloat16":
        return (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return np.asarray(values, dtype).view(np.uint32 if dtype == "float32" else np.uint16)


def every_value(dtype):
    """The words of all finite values of a 16-bit format, and the values."""
    words = np.arange(2**16, dtype=np.uint16)
    values = (words.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else words.view(np.float16)
    return words[np.isfinite(values)], values[np.isfinite(values)]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_ulp_is_the_place_in_the_list_of_all_values(dtype):
    """Against the slow way: all values of the format, sorted, both zeros as one, and counted."""
    words, values = every_value(dtype)
    places = np.searchsorted(np.unique(values), values)
    for seed in range(200):
        one, other = np.random.default_rng(seed).integers(0, len(words), (2, 7))
        found = ulp_difference(words[one], words[other], dtype)
        assert found.max_ulp == np.abs(places[one] - places[other]).max()
        assert (found.size, found.differing, found.nonfinite) == (7, np.count_nonzero(one != other), 0)
    everything = ulp_difference(words, np.full_like(words, words[0]), dtype)
    assert everything.max_ulp == np.abs(places - places[0]).max() and everything.differing == len(words) - 1


@given(WORDS, WORDS)
def test_ulp_of_float32_arrays_is_that_of_bit_patterns(left, right):
    found = ulp_difference(np.array([left], np.uint32), np.array([right], np.uint32), "float32")
    expected = ulp_distance(f"0x{left:08x}", f"0x{right:08x}")
    assert found.differing == (left != right)
    assert found.max_ulp == (None if left == right else expected)
    assert found.nonfinite == (left != right and expected is None)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_zeros_nan_and_infinities(dtype):
    tiny = {"float32": 2.0**-149, "float16": 2.0**-24, "bfloat16": 2.0**-133}[dtype]

    def of(left, right):
        return ulp_difference(words_of([left], dtype), words_of([right], dtype), dtype)

    assert of(0.0, -0.0) == UlpDifference(1, 1, 0, 0, 0.0)  # other bits, the same number
    assert of(-tiny, tiny) == UlpDifference(1, 1, 0, 2, 2 * tiny)
    assert of(-0.0, tiny) == UlpDifference(1, 1, 0, 1, tiny)
    assert of(NAN, NAN) == of(INF, INF) == of(1.0, 1.0) == UlpDifference(1, 0)
    assert of(NAN, 1.0) == of(1.0, INF) == of(INF, -INF) == UlpDifference(1, 1, 1)  # no distance is made up


def test_nan_with_another_payload_differs_in_bits():
    pair = [np.array([word, 0x3F800000], np.uint32) for word in (0x7FC00000, 0x7FC00001)]
    assert ulp_difference(*pair, "float32") == UlpDifference(2, 1, 1)


def test_the_largest_among_several_and_their_count():
    left = np.array([[1.0, 2.0], [3.0, NAN]], np.float32)
    right = left.copy()
    right[0, 1] = np.nextafter(np.float32(2), np.float32(3))
    right[1, 0] = np.nextafter(np.nextafter(np.float32(3), np.float32(0)), np.float32(0))
    right[1, 1] = 4.0
    assert ulp_difference(left, right, "float32") == UlpDifference(4, 3, 1, 2, 2 * 2.0**-22)


def test_layouts_and_chunks_do_not_matter(monkeypatch):
    left = np.arange(24, dtype=np.float32).reshape(4, 6)
    right = left * np.float32(1.5)
    expected = ulp_difference(left, right, "float32")
    assert ulp_difference(left.T, np.asfortranarray(right).T, "float32") == expected
    monkeypatch.setattr(bits, "_CHUNK", 5)
    assert ulp_difference(left, right, "float32") == expected


def test_other_dtypes_are_compared_bit_by_bit_without_a_distance():
    assert ulp_difference(np.array([1, 2, 3]), np.array([1, 5, 4]), "int64") == UlpDifference(3, 2)
    assert ulp_difference(np.array([1j]), np.array([-1j]), "complex128") == UlpDifference(1, 1)
    assert ulp_difference(np.array([0.0]), np.array([-0.0]), "float64") == UlpDifference(1, 1)
    assert ulp_difference(np.zeros(0, np.float32), np.zeros(0, np.float32), "float32") == UlpDifference(0, 0)
    assert ulp_difference(np.array(True), np.array(False), "bool") == UlpDifference(1, 1)


@pytest.mark.parametrize(("left", "right"), [(np.zeros(2), np.zeros(3)), (np.zeros(1), np.zeros(1, np.float32))])
def test_arrays_that_do_not_match_are_refused(left, right):
    with pytest.raises(ValueError, match="can't be compared bit by bit"):
        ulp_difference(left, right, "float32")
