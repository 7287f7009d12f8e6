"""A corpus: the tokens of a file, its digest, and what is refused."""

import hashlib
import json
import pickle
import warnings
from pathlib import Path

import numpy as np
import pytest

from workbench.errors import DataError
from workbench.trainer.corpus import Corpus

pytest_plugins = ["window_fixtures"]


def test_bytes_bin_and_npy_hold_the_same_tokens(tmp_path):
    tokens = np.array([104, 105, 10, 0, 200], "<u2")
    tokens.tofile(tmp_path / "a.bin")
    np.save(tmp_path / "a.npy", tokens)
    (tmp_path / "a.txt").write_bytes(tokens.astype(np.uint8).tobytes())
    for name, kind, dtype, vocabulary in [
        ("a.bin", "uint16", np.uint16, 201),
        ("a.npy", "uint16", np.uint16, 201),
        ("a.txt", "bytes", np.uint8, 256),
    ]:
        corpus = Corpus.open(tmp_path / name)
        assert corpus.tokens.tolist() == tokens.tolist(), name
        assert (corpus.kind, corpus.tokens.dtype, corpus.vocabulary, len(corpus)) == (kind, dtype, vocabulary, 5), name
        assert isinstance(corpus.tokens.base, np.memmap), name
        with pytest.raises(ValueError, match="read-only"):
            corpus.tokens[0] = 1


def test_decode_shows_control_characters_and_ids(tmp_path, corpus):
    (tmp_path / "a.txt").write_bytes(b"x")
    text = Corpus.open(tmp_path / "a.txt")
    assert text.decode(np.frombuffer("hé\n\t\x00\x7f".encode(), np.uint8).astype(np.int32)) == "hé␊␉␀␡"
    assert text.decode([0xC3, 0x61]) == "\ufffda"  # half a character
    assert text.decode(list("a\u202eb\x85".encode())) == "a⟨U+202E⟩b⟨U+0085⟩"
    assert text.decode([]) == ""
    assert corpus.decode([17, 403]) == "⟨17⟩⟨403⟩"
    for wrong, found in [([-1], "-1"), ([256], "256"), ([1.5], "float64")]:
        with pytest.raises(DataError, match=found):
            text.decode(wrong)


def test_describe_and_verify(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"to be or not to be")
    corpus = Corpus.open(path)
    digest = hashlib.sha256(b"to be or not to be").hexdigest()
    description = corpus.describe()
    assert description == {"path": str(path), "bytes": 18, "sha256": digest}
    corpus.verify(json.loads(json.dumps(description)) | {"path": "moved/elsewhere.txt"})

    changed = b"to be or not to bE"  # the same size
    path.write_bytes(changed)
    with pytest.raises(DataError) as error:
        corpus.verify(description)
    for part in (str(path), digest, hashlib.sha256(changed).hexdigest(), "18 bytes"):
        assert part in str(error.value)

    path.unlink()
    with pytest.raises(DataError) as error:
        corpus.verify(description)
    assert str(path) in str(error.value) and digest in str(error.value) and "18 bytes" in str(error.value)

    with pytest.raises(DataError, match="sha256"):
        corpus.verify({"path": str(path), "bytes": 18})


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("empty.txt", b"", "empty"),
        ("odd.bin", b"abc", "3 bytes"),
        ("text.npy", b"to be or not to be", "magic"),
        ("damaged.npy", b"\x93NUMPY\x01\x00\x10\x00{'descr': (((((\n", "readable .npy"),
    ],
)
def test_unusable_files_are_refused(tmp_path, name, content, found):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=found) as error:
        Corpus.open(tmp_path / name)
    assert name in str(error.value)


@pytest.mark.parametrize(
    ("array", "found"),
    [
        (np.arange(4, dtype=np.int64), "<i8"),
        (np.arange(4, dtype=">u2"), ">u2"),
        (np.zeros((2, 2), np.uint16), r"\(2, 2\)"),
        (np.zeros(0, np.uint16), r"\(0,\)"),
    ],
)
def test_npy_of_another_type_or_shape_is_refused(tmp_path, array, found):
    np.save(tmp_path / "a.npy", array)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(DataError, match=found):
            Corpus.open(tmp_path / "a.npy")


def test_missing_file_and_folder_are_refused(tmp_path):
    with pytest.raises(DataError, match="nowhere.txt"):
        Corpus.open(tmp_path / "nowhere.txt")
    with pytest.raises(DataError, match="no file"):
        Corpus.open(tmp_path)


class Bomb:
    """Creates a file when unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def test_pickled_content_is_refused_without_unpickling(tmp_path):
    exploded = tmp_path / "exploded"
    bomb = np.array([Bomb(exploded)], dtype=object)
    np.save(tmp_path / "object.npy", bomb, allow_pickle=True)
    (tmp_path / "raw.npy").write_bytes(pickle.dumps(Bomb(exploded)))
    with open(tmp_path / "archive.npy", "wb") as file:
        np.savez(file, bomb)
    for name in ("object.npy", "raw.npy", "archive.npy"):
        with pytest.raises(DataError, match=name):
            Corpus.open(tmp_path / name)
    assert not exploded.exists()
    np.load(tmp_path / "object.npy", allow_pickle=True)  # the bomb is live
    assert exploded.exists()


def test_the_shipped_corpus_is_the_documented_one():
    folder = Path(__file__).parents[1] / "data"
    corpus = Corpus.open(folder / "shakespeare.txt")
    described = corpus.describe()
    readme = (folder / "README.md").read_text(encoding="utf-8")
    assert described["sha256"] in readme and f"{described['bytes']:,} bytes" in readme
    assert corpus.tokens.max() < 128 and 13 not in corpus.tokens  # ASCII, LF line ends
    assert corpus.decode(corpus.tokens[:25]) == "HAMLET, PRINCE OF DENMARK"
