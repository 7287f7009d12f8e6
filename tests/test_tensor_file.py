"""Our safetensors files: what MLX reads back from them, bit for bit, and that the same arrays give the same bytes."""

import mlx.core as mx
import numpy as np
import pytest
import xxhash
from helpers import tensor_bytes

from workbench import tensor_file
from workbench.errors import ExperimentError
from workbench.files import sha256, write_flushed


def some():
    bits = mx.array(np.array([0x7FC00001, 0xFFC12345, 0x80000000, 0x00000001], np.uint32))
    return {
        "b.float32": bits.view(mx.float32),
        "a.bfloat16": mx.array([[1.5, -0.0], [float("nan"), 3e38]], mx.bfloat16),
        "c.float16": mx.array([65504.0, 6e-8], mx.float16),
        "d.bool": mx.array([True, False, True]),
        "e.complex": mx.array([1 + 2j], mx.complex64),
        "f.uint64": mx.array(np.array([2**63 + 1], np.uint64)),
        "g.int8": mx.array([-128, 127], mx.int8),
        "h.scalar": mx.array(2.5),
        "i.none": mx.zeros((0, 3)),
        "j.turned": mx.arange(6).reshape(2, 3).T,
        "k.long": mx.arange(600_000),  # several stretches
    }


def write(path, arrays):
    return write_flushed(path, tensor_file.chunks(path.name, arrays))


def test_mlx_reads_the_same_bits(tmp_path):
    path, arrays = tmp_path / "a.safetensors", some()
    written = write(path, arrays)
    content = path.read_bytes()
    assert written == (len(content), sha256(content), xxhash.xxh3_128_hexdigest(content))
    assert tensor_file.chunks(path.name, arrays).size == len(content)
    assert int.from_bytes(content[:8], "little") % 8 == 0
    back = mx.load(str(path))
    assert {name: (array.dtype, array.shape) for name, array in back.items()} == {
        name: (array.dtype, array.shape) for name, array in arrays.items()
    }
    assert tensor_bytes(back) == tensor_bytes(arrays)


def test_the_same_arrays_give_the_same_bytes(tmp_path):
    arrays = some()
    turned = dict(reversed(arrays.items()))
    assert write(tmp_path / "a", arrays) == write(tmp_path / "b", turned)
    other = arrays | {"h.scalar": mx.array(2.5000002)}
    assert write(tmp_path / "c", other) != write(tmp_path / "a", arrays)


def test_nothing_at_all_is_a_file_too(tmp_path):
    write(tmp_path / "a.safetensors", {})
    assert mx.load(str(tmp_path / "a.safetensors")) == {}


def test_every_type_of_mlx_can_be_held_or_is_refused_by_name():
    kinds = {value for value in vars(mx).values() if isinstance(value, mx.Dtype)}
    assert kinds - {mx.float64} == set(tensor_file.TYPES)
    with pytest.raises(ExperimentError, match=r"w.safetensors can't hold this state: w is of type mlx.core.float64"):
        list(tensor_file.chunks("w.safetensors", {"w": mx.array([1.0], mx.float64)}))
