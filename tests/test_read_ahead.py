"""Files read once, or by threads ahead of their use: the very bytes, their digests, and nothing of a changed file."""

import hashlib

import mlx.core as mx
import numpy as np
import pytest
import xxhash

from workbench import read_ahead, tensor_file
from workbench.digests import BOTH, SHA256, XXH3
from workbench.hashed_file import HashedFile

LARGE = 700_001  # float32: some of the file's memory is let go before the end of the tensor after it


@pytest.fixture(params=[12, LARGE])
def file(tmp_path, request):
    path = tmp_path / "a.safetensors"
    numbers = mx.arange(request.param)
    mx.save_safetensors(
        str(path), {"one": numbers.reshape(-1, 1), "none": mx.zeros((0, 3)), "two": mx.array(2.5), "z": numbers + 1}
    )
    return path


def both(content):
    return {SHA256: hashlib.sha256(content).hexdigest(), XXH3: xxhash.xxh3_128_hexdigest(content)}


def sources(path, kinds=BOTH):
    size = path.stat().st_size
    return [read_ahead.read(path, size, kinds), read_ahead.content(path, size, kinds)]


def test_what_is_taken_is_the_file(file):
    expected = file.read_bytes()
    for kinds in (BOTH, (SHA256,), (XXH3,)):
        for content in sources(file, kinds):
            with content:
                assert content.size == len(expected)
                parts = [bytes(content.taken(start, end)) for start, end in ((0, 8), (8, 30), (30, 30))]
                assert b"".join(parts) == expected[:30]
                assert content.found() == {kind: both(expected)[kind] for kind in kinds}


def test_the_arrays_are_those_of_the_file(file):
    expected = mx.load(str(file))
    for content in sources(file):
        with content:
            found = tensor_file.arrays_of(content)
            assert content.found() == both(file.read_bytes())
        assert {name: (array.dtype, array.tolist()) for name, array in found.items()} == {
            name: (array.dtype, array.tolist()) for name, array in expected.items()
        }


def test_what_was_taken_is_let_go(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(bytes(range(256)) * (3 << 12))
    with read_ahead.read(path, 3 << 20, BOTH) as content:
        assert bytes(content.taken(0, 5)) == bytes(range(5))
        assert bytes(content.taken(3 << 19, 3 << 20)) == path.read_bytes()[3 << 19 :]
        assert bytes(content.taken(5 << 19, 3 << 20)) == path.read_bytes()[5 << 19 :]
        with pytest.raises(ValueError, match="bytes 0 to 5 are not among those from 2097152 to 3145728"):
            content.taken(0, 5)
    with pytest.raises(ValueError):
        assert bytes(content.taken(0, 3 << 20)) != b""


def test_a_file_that_is_no_longer_of_the_size_is_not_read(file):
    size = file.stat().st_size + 1
    assert read_ahead.read(file, size, BOTH) is None
    read_ahead.begin({file: (size, BOTH)})
    assert read_ahead.content(file, size, BOTH) is None


def test_a_file_that_ends_while_it_is_read(file):
    size = file.stat().st_size
    with HashedFile(file, size, BOTH) as content:
        content.taken(0, 8)
        file.write_bytes(file.read_bytes()[: size - 4])
        with pytest.raises(ValueError, match=f"it ends at byte {size - 4} of {size}"):
            content.taken(8, size)
        assert content.found() == both(file.read_bytes())


def test_pieces_are_taken_in_their_order(file):
    with HashedFile(file, file.stat().st_size, BOTH) as content:
        with pytest.raises(ValueError, match="are not those that follow byte 0"):
            content.taken(8, 9)
        assert content.found() == both(file.read_bytes())


def test_what_was_begun_is_handed_out_once(file):
    size = file.stat().st_size
    read_ahead.begin({file: (size, (XXH3,))})
    before = file.read_bytes()
    first = read_ahead.content(file, size, (XXH3,))
    changed = bytearray(before)
    changed[-1] ^= 1
    file.write_bytes(changed)
    assert bytes(first.taken(0, size)) == before
    with read_ahead.content(file, size, (XXH3,)) as second:
        assert bytes(second.taken(0, size)) == changed and second.found() != first.found()


def test_what_was_begun_without_a_digest_is_read_again_for_it(file):
    size = file.stat().st_size
    read_ahead.begin({file: (size, (XXH3,))})
    with read_ahead.content(file, size, BOTH) as content:
        assert content.found() == both(file.read_bytes())


def test_an_error_ahead_is_one_when_it_is_read(tmp_path):
    read_ahead.begin({tmp_path / "gone": (3, BOTH)})
    with pytest.raises(FileNotFoundError):
        read_ahead.content(tmp_path / "gone", 3, BOTH)


def test_only_names_beside_the_record_are_begun(tmp_path, monkeypatch):
    begun = []
    monkeypatch.setattr(read_ahead, "begin", lambda files: begun.append(dict(files)))
    (tmp_path / "00000004.json").write_text(
        '{"files": {"a": {"bytes": 1}, "../b": {"bytes": 2}, "/c": {"bytes": 3}, "d": {"bytes": 4, "xxh3": "5"}}}'
    )
    read_ahead.begin_checkpoint(tmp_path, 4, 0)
    assert begun == [{tmp_path / "a": (1, (SHA256,)), tmp_path / "d": (4, (XXH3,))}]
    for damaged in ("", "{", '{"files": 3}'):
        (tmp_path / "00000004.s1.json").write_text(damaged)
        read_ahead.begin_checkpoint(tmp_path, 4, 1)
    read_ahead.begin_checkpoint(tmp_path, 5, 0)
    assert len(begun) == 1


@pytest.mark.parametrize("header", [b"", b"{}", b'{"a": 3}', b"[" * 40])
def test_a_damaged_file_is_read_to_its_end(tmp_path, header):
    path = tmp_path / "b.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + np.arange(5, dtype=np.float32).tobytes())
    for content in sources(path):
        with content:
            with pytest.raises(ValueError):
                tensor_file.arrays_of(content)
            assert content.found() == both(path.read_bytes())


def test_a_large_file_that_is_longer_than_its_tensors_is_not_held(tmp_path, file):
    path = tmp_path / "sparse.safetensors"
    path.write_bytes(file.read_bytes())
    with path.open("r+b") as sparse:
        sparse.truncate(1 << 40)
    assert read_ahead.read(path, 1 << 40, BOTH) is None
    path.write_bytes(b"\xff" * 8)
    with path.open("r+b") as sparse:
        sparse.truncate(1 << 40)
    assert read_ahead.read(path, 1 << 40, BOTH) is None
