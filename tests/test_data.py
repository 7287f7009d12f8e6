"""Batches of windows: which windows, when, and where the cursor stands."""

import hashlib
import json

import numpy as np
import pytest
from windows import BATCH, CTX, LENGTH, WINDOWS, equal, sampler

from workbench.errors import DataError
from workbench.trainer import data
from workbench.trainer.corpus import Corpus
from workbench.trainer.data import Substitution, WindowSampler, split_point, validation_batches

pytest_plugins = ["window_fixtures"]


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
