"""Files are whole or absent, whatever fails on the way."""

import hashlib
import json
import os

import pytest

from workbench import files


def test_sha256_of_bytes_and_of_chunks_is_hashlib_s():
    expected = hashlib.sha256(b"abcdef").hexdigest()
    assert files.sha256(b"abcdef") == expected
    assert files.sha256([b"abc", memoryview(b"def"), b""]) == expected
    assert files.sha256([b"abc", b"deg"]) != expected


def test_write_atomic_replaces_the_content(tmp_path):
    path = tmp_path / "a.json"
    for content in (b"one", b"two", b""):
        files.write_atomic(path, content)
        assert path.read_bytes() == content
    assert os.listdir(tmp_path) == ["a.json"]


def test_what_comes_first_finds_the_content_without_its_name(tmp_path):
    path = tmp_path / "a.json"
    files.write_atomic(path, b"old")
    found = []
    files.write_atomic(path, b"new", first=lambda: found.extend(one.read_bytes() for one in tmp_path.iterdir()))
    assert sorted(found) == [b"new", b"old"] and path.read_bytes() == b"new"
    with pytest.raises(ZeroDivisionError):
        files.write_atomic(path, b"newer", first=lambda: 1 / 0)
    assert [one.read_bytes() for one in tmp_path.iterdir()] == [b"new"]


@pytest.mark.parametrize("failing", ["replace", "fsync"])
def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch, failing):
    path = tmp_path / "a.json"
    files.write_atomic(path, b"old")

    def fail(*arguments):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, failing, fail)
        with pytest.raises(OSError, match="No space"):
            files.write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.json"]


def test_an_interrupt_leaves_no_temporary_file(tmp_path, monkeypatch):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            files.write_atomic(tmp_path / "a.json", b"new")
    assert os.listdir(tmp_path) == []


def test_content_is_flushed_before_it_gets_its_name(tmp_path, monkeypatch):
    done = []

    def noted(name):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *arguments: (done.append(name), real(*arguments))[1])

    noted("fsync")
    noted("replace")
    files.write_atomic(tmp_path / "a", b"x")
    assert done == ["fsync", "replace", "fsync"]  # the content, the rename, the folder


def test_a_failed_write_names_the_file_that_was_asked_for(tmp_path):
    for path in (tmp_path / "none" / "a.json", tmp_path):
        with pytest.raises(OSError) as caught:
            files.write_atomic(path, b"new")
        assert caught.value.filename == str(path) and ".tmp" not in str(caught.value)


def test_temporary_names_are_hidden_beside_the_file_and_keep_its_suffix(tmp_path):
    temporary = files.temporary_beside(tmp_path / "00000004.optimizer.safetensors")
    assert temporary.parent == tmp_path
    assert temporary.name.startswith(".") and temporary.suffix == ".safetensors"


def test_canonical_json_depends_on_the_value_alone():
    assert files.canonical_json({"b": 1, "a": {"d": 2**70, "c": -0.0}}) == files.canonical_json(
        {"a": {"c": -0.0, "d": 2**70}, "b": 1}
    )
    assert files.canonical_json({"b": 1, "a": 0}) == b'{"a":0,"b":1}'
    assert files.canonical_json(1) != files.canonical_json(1.0)
    assert files.canonical_json(0.0) != files.canonical_json(-0.0)


def test_pretty_json_is_strict_and_readable():
    text = files.pretty_json({"a": float("nan"), "b": [float("inf"), 2**64 - 1]})
    value = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert value == {"a": None, "b": [None, 2**64 - 1]}
    assert text.endswith(b"}\n") and b"\n" in text[:-1]
