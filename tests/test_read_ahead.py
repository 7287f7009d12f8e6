"""Files read by threads ahead of their use: the very bytes, their digest, and nothing from a file that has changed."""

import hashlib

import mlx.core as mx
import numpy as np
import pytest

from workbench import read_ahead, tensor_file


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "a.safetensors"
    mx.save_safetensors(str(path), {"one": mx.arange(12).reshape(3, 4), "none": mx.zeros((0, 3)), "two": mx.array(2.5)})
    return path


def test_the_pieces_are_the_file(file):
    bytes_of = file.read_bytes()
    content = read_ahead.read(file, len(bytes_of))
    assert (content.size, content.sha256) == (len(bytes_of), hashlib.sha256(bytes_of).hexdigest())
    assert content.whole() == bytes_of and bytes(content.taken(0, 8)) == bytes_of[:8]
    found, expected = tensor_file.arrays_of(read_ahead.read(file, len(bytes_of))), mx.load(str(file))
    assert {name: (array.dtype, array.tolist()) for name, array in found.items()} == {
        name: (array.dtype, array.tolist()) for name, array in expected.items()
    }


def test_each_piece_is_let_go_when_its_array_is_made(file):
    content = read_ahead.read(file, file.stat().st_size)
    tensor_file.arrays_of(content)
    assert content.whole() == b""


def test_a_file_that_is_no_longer_of_the_size_is_not_read(file):
    assert read_ahead.read(file, file.stat().st_size + 1) is None
    read_ahead.begin({file: file.stat().st_size + 1})
    assert read_ahead.content(file, file.stat().st_size + 1) is None


def test_what_was_begun_is_handed_out_once(file):
    size = file.stat().st_size
    read_ahead.begin({file: size})
    first = read_ahead.content(file, size)
    changed = bytearray(file.read_bytes())
    changed[-1] ^= 1
    file.write_bytes(changed)
    assert read_ahead.content(file, size).sha256 != first.sha256


def test_an_error_ahead_is_one_when_it_is_read(tmp_path):
    read_ahead.begin({tmp_path / "gone": 3})
    with pytest.raises(FileNotFoundError):
        read_ahead.content(tmp_path / "gone", 3)


def test_only_names_beside_the_record_are_begun(tmp_path, monkeypatch):
    begun = []
    monkeypatch.setattr(read_ahead, "begin", lambda files: begun.append(dict(files)))
    (tmp_path / "00000004.json").write_text('{"files": {"a": {"bytes": 1}, "../b": {"bytes": 2}, "/c": {"bytes": 3}}}')
    read_ahead.begin_checkpoint(tmp_path, 4, 0)
    assert begun == [{tmp_path / "a": 1}]
    for damaged in ("", "{", '{"files": 3}'):
        (tmp_path / "00000004.s1.json").write_text(damaged)
        read_ahead.begin_checkpoint(tmp_path, 4, 1)
    read_ahead.begin_checkpoint(tmp_path, 5, 0)
    assert len(begun) == 1


@pytest.mark.parametrize("header", [b"", b"{}", b'{"a": 3}', b"[" * 40])
def test_a_damaged_file_is_held_in_one_piece(tmp_path, header):
    path = tmp_path / "b.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + np.arange(5, dtype=np.float32).tobytes())
    content = read_ahead.read(path, path.stat().st_size)
    assert content.whole() == path.read_bytes()
    with pytest.raises(ValueError):
        tensor_file.arrays_of(content)
