"""The stream: exact positions, strict cursors, and a prefetcher that changes neither."""

import hashlib
import json
import pickle
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

from workbench.errors import DataError
from workbench.trainer import data
from workbench.trainer.corpus import Corpus
from workbench.trainer.data import Substitution, WindowSampler, split_point, validation_batches
from workbench.trainer.permutation import mix, permute
from workbench.trainer.prefetch import Prefetcher

CTX, BATCH = 8, 3
LENGTH = 100  # (100 - 8) // 8 = 11 windows an epoch: no multiple of 3, so batches straddle epochs
WINDOWS = 11


@pytest.fixture
def corpus(tmp_path):
    """Tokens 0, 1, 2, ... so that a token says where it was taken from."""
    path = tmp_path / "count.bin"
    np.arange(LENGTH, dtype="<u2").tofile(path)
    return Corpus.open(path)


@pytest.fixture
def other(tmp_path):
    path = tmp_path / "other.bin"
    np.arange(1000, 1050, dtype="<u2").tofile(path)
    return Corpus.open(path)


def sampler(corpus, **changed):
    return WindowSampler([corpus], **({"batch": BATCH, "ctx": CTX, "seed": 42} | changed))


def equal(a, b):
    return len(a) == len(b) and all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def in_time(function):
    """The outcome of `function`, or a failure instead of a test that hangs."""
    outcome = []

    def call():
        try:
            outcome.append(("value", function()))
        except BaseException as error:
            outcome.append(("error", error))

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(5)
    assert outcome, "still waiting after 5 s"
    kind, value = outcome[0]
    if kind == "error":
        raise value
    return value


def wait_until(condition):
    while not condition():
        time.sleep(0.001)


def prefetch_threads():
    return [thread for thread in threading.enumerate() if thread.name == "workbench-prefetch"]


# corpus


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


# permutation


def test_mixer_is_splitmix64():
    # The first outputs of the published generator for seed 1234567.
    states = np.array([(1234567 + i * 0x9E3779B97F4A7C15) % 2**64 for i in (1, 2, 3)], np.uint64)
    assert mix(states).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def order(size, epoch=0, seed=42):
    return permute(np.arange(size, dtype=np.uint64), np.full(size, epoch, np.uint64), seed, size).tolist()


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 16, 17, 63, 64, 65, 1000, 4097])
def test_permutation_is_a_bijection(size):
    for seed, epoch in [(0, 0), (42, 1), (2**64 - 1, 2**40)]:
        assert sorted(order(size, epoch, seed)) == list(range(size))


def permute_one(index, epoch, seed, size):
    """A slow twin, in Python's own integers."""
    wrap, golden = 2**64, 0x9E3779B97F4A7C15

    def mix(x):
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % wrap
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % wrap
        return x ^ (x >> 31)

    key = mix((mix(seed) + (epoch + 1) * golden) % wrap)
    half = 1
    while 4**half < size:
        half += 1
    while True:
        left, right = divmod(index, 2**half)
        for number in range(1, 9):
            left, right = right, left ^ mix((key + number * golden) % wrap ^ right) % 2**half
        index = left * 2**half + right
        if index < size:
            return index


def test_permutation_equals_its_slow_twin():
    for size, epoch, seed in [(5, 0, 0), (1000, 3, 42), (1025, 2**33, 2**64 - 1)]:
        assert order(size, epoch, seed) == [permute_one(i, epoch, seed, size) for i in range(size)]
    huge = 2**61 + 12345
    index = np.array([0, 1, huge - 1], np.uint64)
    found = permute(index, np.full(3, 9, np.uint64), 7, huge).tolist()
    assert found == [permute_one(int(i), 9, 7, huge) for i in index]


def test_orders_differ_by_seed_and_epoch_and_look_random():
    size = 1000
    orders = [order(size), order(size, epoch=1), order(size, seed=43), list(range(size))]
    for i, a in enumerate(orders):
        for b in orders[:i]:
            assert sum(x == y for x, y in zip(a, b, strict=True)) < 10  # expected: 1
            assert abs(np.corrcoef(a, b)[0, 1]) < 0.15  # more than four standard deviations
    # Each of the 6 orders of 3 windows comes about equally often.
    counts = {}
    for epoch in range(600):
        found = tuple(order(3, epoch))
        counts[found] = counts.get(found, 0) + 1
    assert len(counts) == 6 and 60 < min(counts.values()) and max(counts.values()) < 140


# sampler


def test_batch_shapes_types_and_shift(corpus):
    inputs, targets = next(sampler(corpus))
    for array in (inputs, targets):
        assert array.shape == (BATCH, CTX) and array.dtype == np.int32 and array.flags.c_contiguous
    assert np.array_equal(targets, inputs + 1)  # the corpus counts


def test_each_epoch_takes_each_window_exactly_once(corpus):
    stream = sampler(corpus, start=4, stop=99)  # 95 tokens: (95 - 8) // 8 = 10 windows
    assert stream.windows == 10
    offsets = {}
    for step in range(1, 101):  # 300 samples: 30 epochs
        for row in stream.provenance(step):
            offsets.setdefault(row.epoch, []).append((row.index, row.offset))
    assert sorted(offsets) == list(range(30))
    phases = set()
    for taken in offsets.values():
        assert [index for index, _ in taken] == list(range(10))
        found = sorted(offset for _, offset in taken)
        assert found == list(range(found[0], found[0] + 10 * CTX, CTX))
        assert 4 <= found[0] and found[-1] + CTX + 1 <= 99
        phases.add(found[0] - 4)
    assert phases == set(range(CTX))  # 30 draws of 8 values: all come up for this seed


def test_a_batch_may_straddle_epochs(corpus):
    rows = sampler(corpus).provenance(4)  # samples 9, 10, 11 of epochs of 11
    assert [(row.epoch, row.index) for row in rows] == [(0, 9), (0, 10), (1, 0)]


def test_batches_hold_the_tokens_that_provenance_names(corpus):
    stream = sampler(corpus)
    for step in range(1, 12):
        inputs, _ = next(stream)
        assert inputs[:, 0].tolist() == [row.offset for row in stream.provenance(step)]  # token = position


def test_seek_equals_iterating(corpus):
    stream = sampler(corpus)
    for step in range(1, 25):
        assert stream.step == step
        moved = sampler(corpus)
        moved.seek(step)
        assert moved.state_dict() == stream.state_dict()
        batch = next(stream)
        assert equal(batch, moved.batch_at(step))
        moved.batch_at(step + 7)
        moved.provenance(step + 8)
        assert moved.step == step  # looking elsewhere moves nothing
        assert equal(batch, next(moved)) and moved.step == step + 1


def test_far_steps_are_reached_at_once(corpus):
    stream = sampler(corpus)
    stream.seek(10**15)
    cursor = stream.state_dict()
    assert cursor["epoch"] * WINDOWS + cursor["index"] == (10**15 - 1) * BATCH
    assert not equal(next(stream), next(stream))


def test_cursor_round_trip_at_any_point(corpus):
    stream = sampler(corpus)
    for _ in range(25):
        cursor = json.loads(json.dumps(stream.state_dict()))
        restored = sampler(corpus)
        restored.load_state_dict(cursor)
        assert restored.state_dict() == cursor and restored.step == stream.step
        assert equal(restored.batch_at(restored.step), next(stream))
        assert equal(next(restored), stream.batch_at(stream.step - 1))


def test_cursor_stays_small(corpus):
    stream = sampler(corpus, seed=2**64 - 1)
    stream.seek(data.SAMPLE_LIMIT // BATCH - 1)  # the last step there is
    assert 60 < len(json.dumps(stream.state_dict())) < 200


def test_cursor_names_the_next_sample(corpus):
    stream = sampler(corpus)
    assert stream.state_dict() == {"seed": 42, "epoch": 0, "index": 0}
    for _ in range(11):  # 33 samples: exactly 3 epochs
        next(stream)
    assert stream.state_dict() == {"seed": 42, "epoch": 3, "index": 0}


GOOD = {"seed": 42, "epoch": 0, "index": 3}


@pytest.mark.parametrize(
    ("cursor", "parts"),
    [
        ({"seed": 42, "epoch": 0}, ["index", "epoch"]),
        (GOOD | {"worker": 1}, ["worker"]),
        (GOOD | {"seed": 7}, ["seed", "7", "42"]),
        (GOOD | {"seed": True}, ["seed", "True"]),
        (GOOD | {"epoch": True}, ["epoch", "True"]),
        (GOOD | {"epoch": -1}, ["epoch", "-1"]),
        (GOOD | {"epoch": "0"}, ["epoch", "'0'"]),
        (GOOD | {"epoch": 2**62}, ["epoch", str(2**62)]),
        (GOOD | {"index": 3.0}, ["index", "3.0"]),
        (GOOD | {"index": None}, ["index", "None"]),
        (GOOD | {"index": WINDOWS}, ["index", "11", "0 to 10"]),
        (GOOD | {"index": 4}, ["index 4", "row 1"]),  # inside a batch: it is of another batch size
        ([42, 0, 3], ["list"]),
    ],
)
def test_foreign_cursors_are_refused_and_move_nothing(corpus, cursor, parts):
    stream = sampler(corpus)
    stream.seek(6)
    with pytest.raises(DataError) as error:
        stream.load_state_dict(cursor)
    for part in parts:
        assert part in str(error.value)
    assert stream.step == 6
    stream.load_state_dict(GOOD)
    assert stream.step == 2


@pytest.mark.parametrize(
    ("changed", "part"),
    [
        ({"batch": 0}, "batch is 0"),
        ({"batch": True}, "batch is True"),
        ({"ctx": 2.0}, "ctx is 2.0"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**64}, f"seed is {2**64}"),
        ({"start": LENGTH}, "is 100; expected an integer from 0 to 99"),
        ({"stop": LENGTH + 1}, "is 101; expected an integer from 1 to 100"),
        ({"batch": WINDOWS + 1}, "has 100 tokens; expected at least 104"),
        ({"batch": 1, "stop": CTX}, "has 8 tokens; expected at least 9"),
    ],
)
def test_sampler_refuses_bad_arguments(corpus, changed, part):
    with pytest.raises(DataError) as error:
        sampler(corpus, **changed)
    assert part in str(error.value)


def test_sampler_takes_the_shortest_ranges_that_its_errors_name(corpus):
    assert sampler(corpus, batch=WINDOWS + 1, stop=None, ctx=7).windows == 13  # 13 * 7 = 91 tokens would do
    assert sampler(corpus, batch=1, stop=CTX + 1).provenance(5)[0].offset == 0
    assert sampler(corpus, batch=2, stop=3 * CTX).windows == 2
    with pytest.raises(DataError, match="at least one corpus"):
        WindowSampler([], BATCH, CTX, 42)


@pytest.mark.parametrize("step", [0, -1, True, 1.0, "1", 2**62])
def test_only_steps_can_be_sought(corpus, step):
    stream = sampler(corpus)
    for method in (stream.seek, stream.batch_at, stream.provenance):
        with pytest.raises(DataError, match=f"step is {step!r}"):
            method(step)
    assert stream.step == 1


def test_a_step_out_of_a_table_is_a_step(corpus):
    assert equal(sampler(corpus).batch_at(np.int64(3)), sampler(corpus).batch_at(3))


def test_order_and_offsets_are_pinned(corpus):
    """Recorded runs depend on these very numbers: a change of algorithm is a new format, never an improvement."""
    stream = sampler(corpus)
    assert [row.offset for step in (1, 2, 3, 4, 5) for row in stream.provenance(step)] == GOLDEN_OFFSETS
    stream.seek(10**12)
    inputs, targets = next(stream)
    assert hashlib.sha256(inputs.tobytes() + targets.tobytes()).hexdigest() == GOLDEN_DIGEST


GOLDEN_OFFSETS = [5, 13, 53, 69, 85, 21, 61, 77, 29, 37, 45, 77, 21, 37, 53]
GOLDEN_DIGEST = "2f482bd06f88868f8f0e5dad097dc429bcb438b169341d0287e4b0ca362352f1"


# substitutions


def test_substitutions_change_exactly_their_rows(corpus, other):
    substitutions = [Substitution(4, (0, 2), 1, (5, 20)), Substitution(6, (1,), 0, (91,))]
    plain = sampler(corpus)
    changed = WindowSampler([corpus, other], BATCH, CTX, 42, substitutions=substitutions)
    wanted = {(4, 0): 1005, (4, 2): 1020, (6, 1): 91}  # (step, row): first token
    for step in range(1, 12):
        expected = [array.copy() for array in plain.batch_at(step)]
        for row in range(BATCH):
            if (step, row) in wanted:
                expected[0][row] = np.arange(CTX) + wanted[step, row]
                expected[1][row] = np.arange(CTX) + wanted[step, row] + 1
        resumed = WindowSampler([corpus, other], BATCH, CTX, 42, substitutions=substitutions)
        resumed.load_state_dict(changed.state_dict())
        assert equal(next(resumed), expected)
        assert equal(next(changed), expected)
        next(plain)
        assert changed.state_dict() == plain.state_dict()  # the ordinary samples are consumed all the same

    ordinary, rows = plain.provenance(4), changed.provenance(4)
    assert [(row.source, row.offset) for row in rows] == [(1, 5), (0, ordinary[1].offset), (1, 20)]
    assert [(row.epoch, row.index) for row in rows] == [(row.epoch, row.index) for row in ordinary]


@pytest.mark.parametrize(
    ("substitution", "part"),
    [
        (Substitution(0, (0,), 1, (0,)), "step is 0"),
        (Substitution(1, (3,), 1, (0,)), "is 3; expected an integer from 0 to 2"),
        (Substitution(1, (0,), 2, (0,)), "source is 2; expected an integer from 0 to 1"),
        (Substitution(1, (0,), 1, (42,)), "is 42; expected an integer from 0 to 41"),  # 42 + 8 + 1 > 50
        (Substitution(1, (0,), 1, (-1,)), "is -1"),
        (Substitution(1, (0, 1), 1, (0,)), "2 rows and 1 offsets"),
        (Substitution(1, (), 1, ()), "0 rows"),
        (Substitution(1, (0, 0), 1, (0, 1)), "row 0 of step 1 a second time"),
    ],
)
def test_bad_substitutions_are_refused(corpus, other, substitution, part):
    last = Substitution(1, (2,), 1, (41,))  # the last row, and the last offset that fits
    WindowSampler([corpus, other], BATCH, CTX, 42, substitutions=[last])
    with pytest.raises(DataError) as error:
        WindowSampler([corpus, other], BATCH, CTX, 42, substitutions=[substitution])
    assert part in str(error.value) and "substitutions[0]" in str(error.value)


def test_a_source_shorter_than_a_window_cannot_be_substituted(tmp_path, corpus):
    (tmp_path / "short.txt").write_bytes(b"12345678")
    short = Corpus.open(tmp_path / "short.txt")
    with pytest.raises(DataError, match="8 tokens; expected at least 9"):
        WindowSampler([corpus, short], BATCH, CTX, 42, substitutions=[Substitution(1, (0,), 1, (0,))])


# held-out windows


def test_split_point():
    assert split_point(1000, 0.1, CTX) == 900
    assert split_point(1000, 0, CTX) == 1000
    for length, val_split, part in [
        (1000, 1, "val_split is 1;"),
        (1000, -0.1, "val_split is -0.1"),
        (1000, float("nan"), "val_split is nan"),
        (1000, True, "val_split is True"),
        (80, 0.1, "held-out tail of a corpus of 80 tokens has 8 "),
        (80, 0.95, "training part of a corpus of 80 tokens has 4 "),
        (8, 0, "training part of a corpus of 8 tokens has 8 "),
    ]:
        with pytest.raises(DataError) as error:
            split_point(length, val_split, CTX)
        assert part in str(error.value)


def test_validation_batches_are_spread_over_the_range(corpus):
    batches = validation_batches(corpus, 2, CTX, 30, None, limit=2)  # 69 // 8 = 8 windows, 4 wanted
    assert [inputs[:, 0].tolist() for inputs, _ in batches] == [[30, 46], [62, 78]]
    for inputs, targets in batches:
        assert inputs.shape == (2, CTX) and inputs.dtype == targets.dtype == np.int32
        assert np.array_equal(targets, inputs + 1)
    every = validation_batches(corpus, 3, CTX, 30, None, limit=99)  # 8 windows fill 2 batches of 3
    assert len(every) == 2 and len({token for inputs, _ in every for token in inputs.ravel().tolist()}) == 6 * CTX
    with pytest.raises(DataError, match="has 24 tokens; expected at least 25"):
        validation_batches(corpus, 3, CTX, 30, 54, limit=1)
    assert len(validation_batches(corpus, 3, CTX, 30, 55, limit=1)) == 1
    with pytest.raises(DataError, match="limit is 0"):
        validation_batches(corpus, 3, CTX, 30, None, limit=0)


# prefetcher


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_prefetching_changes_neither_batches_nor_cursors(corpus, depth):
    plain = sampler(corpus)
    with Prefetcher(sampler(corpus), depth) as stream:
        assert stream.state_dict() == plain.state_dict()
        for _ in range(30):
            assert equal(in_time(stream.__next__), next(plain))
            assert stream.state_dict() == plain.state_dict()
        assert bool(prefetch_threads()) == (depth > 0)
    assert not prefetch_threads()
    assert stream.state_dict() == plain.state_dict()


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_prefetcher_goes_where_it_is_told(corpus, depth):
    plain = sampler(corpus)
    with Prefetcher(sampler(corpus), depth) as stream:
        for target in (9, 2, 2, 40):
            plain.seek(target)
            stream.load_state_dict(plain.state_dict())
            assert stream.state_dict() == plain.state_dict()
            for _ in range(5):
                assert equal(in_time(stream.__next__), next(plain))
                assert stream.state_dict() == plain.state_dict()
        assert len(prefetch_threads()) == (depth > 0)
    assert not prefetch_threads()


@pytest.mark.parametrize("depth", [0, 4])
def test_a_refused_cursor_loses_nothing(corpus, depth):
    plain = sampler(corpus)
    with Prefetcher(sampler(corpus), depth) as stream:
        for _ in range(3):
            assert equal(in_time(stream.__next__), next(plain))
            in_time(lambda: wait_until(lambda: stream.sampler.step == plain.step + depth))  # there is something to lose
            with pytest.raises(DataError, match="seed"):
                stream.load_state_dict({"seed": 7, "epoch": 0, "index": 0})
            assert stream.state_dict() == plain.state_dict()


class Counter:
    """A sampler of 1, 2, 3, ... that reports each draw, raises at one of them, and keeps handing out one dict."""

    def __init__(self, fails_at=None, error=ValueError):
        self.cursor = {"drawn": 0}
        self.fails_at, self.error = fails_at, error
        self.reached = threading.Condition()

    def __next__(self):
        if self.cursor["drawn"] + 1 == self.fails_at:
            raise self.error("no more")
        with self.reached:
            self.cursor["drawn"] += 1
            self.reached.notify_all()
        return self.cursor["drawn"]

    def state_dict(self):
        return self.cursor

    def load_state_dict(self, state):
        self.cursor.update(state)


def test_prefetcher_draws_at_most_depth_ahead_and_hides_it():
    counter = Counter()
    with Prefetcher(counter, 3) as stream:
        assert counter.cursor["drawn"] == 0  # nothing before the first batch is asked for
        for taken in (1, 2):
            assert in_time(stream.__next__) == taken
            with counter.reached:
                assert counter.reached.wait_for(lambda taken=taken: counter.cursor["drawn"] == taken + 3, timeout=5)
                # Time enough for a thread that ignores the bound.
                assert not counter.reached.wait_for(lambda taken=taken: counter.cursor["drawn"] > taken + 3, 0.05)
            assert stream.state_dict() == {"drawn": taken}
            stream.state_dict()["drawn"] = 99  # a copy
            assert stream.state_dict() == {"drawn": taken}


@pytest.mark.parametrize("error", [ValueError, StopIteration, KeyboardInterrupt])
def test_an_error_comes_where_its_batch_would_have(error):
    with Prefetcher(Counter(fails_at=3, error=error), 4) as stream:
        assert [in_time(stream.__next__), in_time(stream.__next__)] == [1, 2]
        for _ in range(3):
            with pytest.raises(error, match="no more"):
                in_time(stream.__next__)
        assert stream.state_dict() == {"drawn": 2}
        stream.load_state_dict({"drawn": 7})  # past the fault: it goes on
        assert in_time(stream.__next__) == 8
    assert not prefetch_threads()


def test_close_is_final_and_harmless_at_any_time():
    for taken in (0, 1, 5):
        stream = Prefetcher(Counter(), 2)
        for _ in range(taken):
            in_time(stream.__next__)
        in_time(stream.close)
        in_time(stream.close)
        assert not prefetch_threads()
        assert stream.state_dict() == {"drawn": taken}
        for use in (stream.__next__, lambda stream=stream: stream.load_state_dict({"drawn": 0})):
            with pytest.raises(DataError, match="closed"):
                in_time(use)
        assert not prefetch_threads()


def test_prefetcher_depth_is_checked(corpus):
    for depth in (-1, True, 1.5):
        with pytest.raises(DataError, match=f"depth is {depth!r}"):
            Prefetcher(sampler(corpus), depth)


def test_an_unclosed_prefetcher_does_not_keep_the_process_alive():
    code = """
from workbench.trainer.prefetch import Prefetcher
class Endless:
    def __next__(self): return 1
    def state_dict(self): return {}
stream = Prefetcher(Endless(), 2)
print(next(stream))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20)
    assert (done.stdout, done.stderr, done.returncode) == ("1\n", "", 0)


# the module and the shipped corpus


def test_the_module_imports_neither_mlx_nor_pandas():
    code = "import sys, workbench.trainer.prefetch; print([m for m in ('mlx', 'pandas', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20)
    assert done.stdout.strip() == "['numpy']", done.stderr  # numpy: the list can show something


def test_the_shipped_corpus_is_the_documented_one():
    folder = Path(__file__).parents[1] / "data"
    corpus = Corpus.open(folder / "shakespeare.txt")
    described = corpus.describe()
    readme = (folder / "README.md").read_text(encoding="utf-8")
    assert described["sha256"] in readme and f"{described['bytes']:,} bytes" in readme
    assert corpus.tokens.max() < 128 and 13 not in corpus.tokens  # ASCII, LF line ends
    assert corpus.decode(corpus.tokens[:25]) == "HAMLET, PRINCE OF DENMARK"
