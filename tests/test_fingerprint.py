"""A fingerprint differs when any bit does, and when the same bits stand elsewhere or mean something else."""

import mlx.core as mx
import numpy as np
import pytest
import xxhash
from helpers import flipped
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.errors import RunError
from workbench.fingerprint import METHODS, fingerprint, fingerprint_json, known_method, lane_of, lanes
from workbench.host import float_views, square_sum
from workbench.lines.line import LANES
from workbench.mixing import digest

DTYPES = {"float32": 32, "bfloat16": 16, "float16": 16, "uint64": 64, "int32": 32, "uint8": 8}


def tensors(dtype="float32"):
    values = mx.array(np.random.default_rng(0).integers(0, 100, 12)).reshape(3, 4)
    return {"b.weight": values.astype(getattr(mx, dtype)), "a.weight": mx.ones(5), "c": mx.zeros(())}


def test_it_is_xxh3_of_path_dtype_shape_and_bytes_in_sorted_order():
    expected = xxhash.xxh3_128()
    for path, kind, shape, values in (
        ("a.weight", "mlx.core.float32", (5,), np.ones(5, np.float32)),
        ("c", "mlx.core.float32", (), np.zeros((), np.float32)),
    ):
        expected.update(f"{path}\0{kind}\0{shape}\0".encode() + values.tobytes())
    found = tensors()
    del found["b.weight"]
    assert fingerprint(found) == expected.hexdigest()


@settings(max_examples=250)
@given(st.sampled_from(METHODS), st.sampled_from(sorted(DTYPES)), st.integers(0, 11), st.data())
def test_every_single_bit_counts(method, dtype, element, data):
    before = tensors(dtype)
    bit = data.draw(st.integers(0, DTYPES[dtype] - 1))
    after = before | {"b.weight": flipped(before["b.weight"], bit, element)}
    assert fingerprint(after, method) != fingerprint(before, method)
    again = after | {"b.weight": flipped(after["b.weight"], bit, element)}
    assert fingerprint(again, method) == fingerprint(before, method)


@given(st.sampled_from(METHODS), st.permutations(["a.weight", "b.weight", "c"]))
def test_order_of_insertion_does_not_count(method, order):
    found = tensors()
    assert fingerprint({path: found[path] for path in order}, method) == fingerprint(found, method)


@pytest.mark.parametrize("method", METHODS)
def test_the_same_bits_elsewhere_or_of_another_kind_count(method):
    x, y = mx.arange(6, dtype=mx.float32), mx.arange(6, 12, dtype=mx.float32)
    cases = {
        "plain": {"a": x, "b": y},
        "swapped tensors": {"a": y, "b": x},
        "the same value twice": {"a": x, "b": x},
        "the other value twice": {"a": y, "b": y},
        "another path": {"a": x, "c": y},
        "another dtype": {"a": x, "b": y.view(mx.int32)},
        "another shape": {"a": x, "b": y.reshape(2, 3)},
        "elements swapped": {"a": x[::-1], "b": y},
        "one fewer": {"a": x},
        "cut elsewhere": {"a": mx.concatenate([x, y[:1]]), "b": y[1:]},
        "an empty one more": {"a": x, "b": y, "c": mx.zeros((0,))},
        "none": {},
    }
    found = {name: fingerprint(case, method) for name, case in cases.items()}
    assert len(set(found.values())) == len(cases), found


@pytest.mark.parametrize("method", METHODS)
def test_memory_layout_does_not_count(method):
    matrix = mx.arange(6, dtype=mx.float32).reshape(2, 3)
    turned = mx.contiguous(matrix.T).T  # the same values, stored by column
    assert fingerprint({"a": turned}, method) == fingerprint({"a": matrix}, method)


@pytest.mark.parametrize("method", METHODS)
def test_signed_zero_and_nan_payloads_count(method):
    words = [0x00000000, 0x80000000, 0x7FC00000, 0x7FC00001, 0xFFC00000]
    found = {fingerprint({"a": mx.array(np.array([word], np.uint32)).view(mx.float32)}, method) for word in words}
    assert len(found) == len(words)


def test_json_values_count_and_key_order_does_not():
    values = [{"a": 1}, {"a": 1.0}, {"a": True}, {"a": "1"}, {"a": None}, {}, {"a": 2**64}, {"a": 2**64 + 1}, {"b": 1}]
    assert len({fingerprint_json(value) for value in values}) == len(values)
    assert fingerprint_json({"a": 1, "b": [2]}) == fingerprint_json({"b": [2], "a": 1})


@pytest.mark.parametrize(
    ("path", "lane"),
    [
        ("layers.0.weight.m", "adam_m"),
        ("states.1.layers.0.weight.v", "adam_v"),
        ("weight.exp_avg_sq", "other"),
        ("step", "other"),
        ("learning_rate", "other"),
        ("m", "other"),
        ("v.m", "adam_m"),
    ],
)
def test_lane_of_an_optimizer_array(path, lane):
    assert lane_of(path) == lane


@pytest.mark.parametrize("method", METHODS)
def test_each_part_of_a_state_has_its_own_lane(method):
    weights = {"w": mx.ones(3)}
    optimizer = {"w.m": mx.ones(3), "w.v": mx.ones(3), "step": mx.array(4, dtype=mx.uint64)}
    rng, cursor = (1, 2), {"n": 5}
    whole = lanes(weights, optimizer, rng, cursor, method)
    assert tuple(whole) == LANES
    changes = {
        "weights": ({"w": flipped(weights["w"])}, optimizer, rng, cursor),
        "adam_m": (weights, optimizer | {"w.m": flipped(optimizer["w.m"])}, rng, cursor),
        "adam_v": (weights, optimizer | {"w.v": flipped(optimizer["w.v"])}, rng, cursor),
        "other": (weights, optimizer | {"step": flipped(optimizer["step"])}, rng, cursor),
        "rng": (weights, optimizer, (1, 3), cursor),
        "cursor": (weights, optimizer, rng, {"n": 6}),
    }
    for lane, changed in changes.items():
        found = lanes(*changed, method)
        assert [name for name in LANES if found[name] != whole[name]] == [lane]


@pytest.mark.parametrize("sizes", [[0, 0, 400_000], [400_000, 1, 0], [1] * 40 + [300_000] * 3, [90_000] * 20, [5]])
def test_a_lane_that_is_read_in_parts_is_hashed_as_one_stream(sizes):
    draw = np.random.default_rng(3)
    values = {f"{place:03}": draw.standard_normal(size, np.float32) for place, size in enumerate(sizes)}
    weights = {path: mx.array(array) for path, array in values.items()}
    other = {f"{path}.x": array for path, array in reversed(weights.items())}
    moments = {f"{path}.v": weights[path] for path in list(weights)[1:]}  # not of all, so that lanes are cut elsewhere
    found = lanes(weights, other | moments, (0, 0), {})
    assert found["weights"] == fingerprint(weights) and found["other"] == fingerprint(other)
    assert found["adam_v"] == fingerprint(moments) and found["adam_m"] == fingerprint({})
    stream = b"".join(
        f"{path}\0{mx.float32}\0{array.shape}\0".encode() + array.tobytes() for path, array in values.items()
    )
    assert found["weights"] == xxhash.xxh3_128_hexdigest(stream)


def test_a_method_of_another_workbench_is_refused_by_name():
    assert [known_method(name, "run") for name in METHODS] == list(METHODS)
    with pytest.raises(RunError, match="runs/mine was fingerprinted with crc32; this workbench has xxh3_128, "):
        known_method("crc32", "runs/mine")


def test_the_sums_of_squares_that_come_along_are_those_of_the_host_bit_for_bit():
    draw = np.random.default_rng(1)
    arrays = {str(size): mx.array(draw.standard_normal(size, np.float32)) for size in (1, 4095, 131072, 300_001)}
    turned = mx.array(draw.standard_normal((300, 7), np.float32)).T
    optimizer = {f"{name}.v": array for name, array in arrays.items()} | {"n.v": mx.ones(3, mx.bfloat16), "t.v": turned}
    squares = {}
    found = lanes({}, optimizer, (0, 0), {}, squares=squares)
    assert found == lanes({}, optimizer, (0, 0), {})
    # Not for what has another order in memory, or another dtype than it is summed in.
    assert squares == {f"{n}.v": square_sum(v) for n, v in zip(arrays, float_views(list(arrays.values())), strict=True)}


def test_the_digest_on_a_device_is_a_sum_of_mixed_words():
    """Against the definition, one word at a time in Python's integers."""
    values = np.random.default_rng(2).integers(0, 2**16, 300_000).astype(np.uint16)
    expected = [0, 0]
    pairs = values[:1001].tolist() + [0]  # two of 16 bits a word, and zeros fill up the last one
    for place, word in enumerate(low | high << 16 for low, high in zip(pairs[::2], pairs[1::2], strict=True)):
        for lane, constants in enumerate(
            ((2654435761, 2246822507, 15, 3266489909, 13), (668265263, 3266489917, 16, 374761393, 14))
        ):
            x = word ^ (place * constants[0]) % 2**32
            for factor, shift in (constants[1:3], constants[3:5]):
                x = x * factor % 2**32
                x ^= x >> shift
            expected[lane] = (expected[lane] + x) % 2**32
    assert digest(values[:1001]) == tuple(expected)
    # A sum over parts: so the stretches in which it is computed don't show.
    swapped = values.copy()
    swapped[[5, 200_000]] = swapped[[200_000, 5]]
    assert len({digest(values), digest(swapped), digest(values[:-1]), digest(values[::-1])}) == 4
    assert digest(np.zeros(0, np.float32)) == (0, 0)
