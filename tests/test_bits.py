"""Bits and back: nothing of a float32 is lost on the way through JSON, and nothing malformed is believed."""

import json
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.bits import array_bits, bits_float, flip_bit, float_bits, json_float, json_floats, ulp_distance

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
