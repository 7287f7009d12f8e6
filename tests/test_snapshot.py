"""A state survives memory, disk and restoring to the bit; what is damaged or does not fit is refused by name."""

import copy
import json
import os

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from helpers import (
    Points,
    advance,
    assert_same_state,
    edit_json,
    experiment,
    flipped,
    mlp,
    python,
    repair_commit,
    state_of,
    tensor_bytes,
    tree,
)

from workbench.checkpoints.checkpoint_reader import read
from workbench.checkpoints.checkpoint_writer import delete, write
from workbench.checkpoints.commit import stem
from workbench.errors import CheckpointError, DataError, ExperimentError
from workbench.experiment import random_key, state_arrays
from workbench.snapshot import State, first_difference, restore

NAMES = ["00000004.safetensors", "00000004.optimizer.safetensors", "00000004.rng", "00000004.cursor"]


def saved(state, folder, segment=0):
    return write(state, folder, run="r", segment=segment, t=0.0)


@pytest.fixture
def checkpoint(tmp_path):
    """Checkpoint 4 of a small experiment, on disk; returns its folder and the state."""
    job = experiment(dropout=0.1)
    advance(job, 4)
    state = state_of(job, 4)
    saved(state, tmp_path)
    return tmp_path, state


def array(words, dtype, view):
    return mx.array(np.array(words, dtype)).view(view)


ODD = {
    "f32": array([0x7FC00001, 0xFFC12345, 0x7F800001, 0x80000000, 0x00000001, 0x7F800000], np.uint32, mx.float32),
    "f16": array([0x7E01, 0xFE00, 0x8000, 0x0001, 0x7C00], np.uint16, mx.float16),
    "bf16": array([0x7FC1, 0xFFC0, 0x8000, 0x0001, 0x7F80], np.uint16, mx.bfloat16),
    "scalar": mx.array(-0.0),
    "empty": mx.zeros((0, 3)),
    "empty.bf16": mx.zeros((2, 0), dtype=mx.bfloat16),
    "u64": array([2**53 + 1, 2**64 - 1], np.uint64, mx.uint64),
    "i8": mx.array([-128, 127], dtype=mx.int8),
    "bool": mx.array([True, False]),
    "complex": mx.array([1 + 2j, complex(0.0, -0.0)]),
    "turned": mx.arange(6, dtype=mx.float32).reshape(2, 3).T,
    "é ü.weight": mx.ones(1),
}


def test_every_kind_of_array_comes_back_to_the_bit(tmp_path):
    state = State(
        3, ODD, {"step": mx.array(2**53 + 1, dtype=mx.uint64)}, (2**32 - 1, 2**31), {"n": 2**64 - 1, "x": 0.1}
    )
    record = saved(state, tmp_path)
    back = read(tmp_path, 3, 0)
    assert_same_state(back, state)
    for path, value in ODD.items():
        assert (back.weights[path].dtype, back.weights[path].shape) == (value.dtype, value.shape)
    assert back.lanes() == state.lanes() == record.state


def test_an_empty_state_comes_back(tmp_path):
    state = State(0, {}, {"step": mx.array(0, dtype=mx.uint64)}, (0, 0), {})
    saved(state, tmp_path)
    assert_same_state(read(tmp_path, 0, 0), state)


def test_random_state_and_cursor_take_less_than_10_kb(checkpoint):
    folder, _ = checkpoint
    assert sum((folder / f"00000004{suffix}").stat().st_size for suffix in (".rng", ".cursor")) < 10_000


def test_files_have_the_documented_names_and_the_record_describes_them(checkpoint):
    folder, state = checkpoint
    assert sorted(os.listdir(folder)) == sorted([*NAMES, "00000004.json"])
    record = json.loads((folder / "00000004.json").read_text())
    assert {name: entry["sha256"] for name, entry in record["files"].items()} == {
        name: digest for name, digest in tree(folder).items() if name != "00000004.json"
    }
    assert record["state"] == state.lanes()
    assert stem(4, 2) == "00000004.s2"
    saved(state, folder, segment=2)
    assert_same_state(read(folder, 4, 2), state)


# ------------------------------------------------------------------------------------------------------------ in memory


def test_a_captured_state_does_not_change_with_the_experiment():
    job = experiment()
    advance(job, 1)
    state, before = state_of(job, 1), copy.deepcopy(tensor_bytes(state_of(job, 1).weights))
    weight = job.model.layers[0].weight
    weight += 1  # changes the object that the model holds
    job.optimizer.state["step"] += 1
    assert tensor_bytes(state.weights) == before and state.optimizer["step"].item() == 1


def test_capturing_copies_no_buffer():
    job = experiment(model=nn.Linear(500, 1000))
    job.prepare()
    before = mx.get_active_memory()
    state = state_of(job)
    assert mx.get_active_memory() - before < 1e5 and len(state.optimizer) == 6


def test_a_restored_state_does_not_change_with_the_experiment():
    job = experiment()
    advance(job, 1)
    state = state_of(job, 1)
    lanes = state.lanes()
    restore(job, state)
    weight = job.model.layers[0].weight
    weight += 1
    job.optimizer.state["learning_rate"] *= 2
    assert state.lanes() == lanes


def test_cursors_that_a_sampler_goes_on_changing_are_copied():
    class Live(Points):
        def __init__(self):
            super().__init__()
            self.cursor = {"at": {"number": 0}}

        def __next__(self):
            self.number = self.cursor["at"]["number"]
            self.cursor["at"]["number"] += 1
            return super().__next__()

        def state_dict(self):
            return self.cursor

        def load_state_dict(self, cursor):
            self.cursor = cursor

    job = experiment()
    job.sampler = Live()
    job.prepare()
    state = state_of(job)
    next(job.sampler)
    assert state.cursor == {"at": {"number": 0}}
    restore(job, state)
    next(job.sampler)
    assert state.cursor == {"at": {"number": 0}}


# ------------------------------------------------------------------------------------------------------------ restoring


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_traced_step_goes_on_from_a_restored_state(tmp_path, compiled):
    """A compiled step that captured the optimizer's containers would silently train on the old state."""
    job = experiment(dropout=0.2, compile=compiled)
    stepper, _ = advance(job, 2)
    saved(state_of(job, 2), tmp_path)
    _, first = advance(job, 3, stepper)
    after = state_of(job, 5)
    restore(job, read(tmp_path, 2, 0))
    _, second = advance(job, 3, stepper)
    assert [result.loss for result in second] == [result.loss for result in first]
    assert_same_state(state_of(job, 5), after)


def test_a_fresh_experiment_takes_a_restored_state_although_seeded_differently(checkpoint):
    folder, state = checkpoint
    job = experiment(model=mlp(0.1, seed=99))
    mx.random.seed(12345)
    restore(job, read(folder, 4, 0))
    assert_same_state(state_of(job, 4), state)
    assert job.optimizer.step.item() == 4


def test_the_random_state_is_restored_after_the_sampler_was_positioned():
    class Drawing(Points):
        def load_state_dict(self, cursor):
            mx.random.uniform()
            super().load_state_dict(cursor)

    job = experiment()
    job.sampler = Drawing()
    job.prepare()
    state = state_of(job)
    restore(job, state)
    assert random_key() == state.rng


def test_restored_arrays_lie_in_memory_as_they_did(checkpoint):
    _, state = checkpoint
    job = experiment(dropout=0.1)
    weight = state.weights["layers.0.weight"]
    turned = mx.contiguous(weight.T).T  # the same values, stored by column
    gaps = mx.stack([weight, weight], axis=-1)[..., 0]
    for given, strides in ((weight, (16, 4)), (turned, (4, 32)), (gaps, (16, 4))):
        restore(job, State(4, state.weights | {"layers.0.weight": given}, state.optimizer, state.rng, state.cursor))
        assert memoryview(job.model.layers[0].weight).strides == strides
        assert_same_state(state_of(job, 4), state)


CHANGES = {
    "missing": (lambda a: {p: v for p, v in a.items() if "layers.3.bias" not in p}, "missing layers.3.bias"),
    "extra": (lambda a: a | {"layers.9.weight": mx.ones(1)}, "unexpected layers.9.weight"),
    "shape": (
        lambda a: {p: v.reshape(-1) if p.startswith("layers.0.weight") else v for p, v in a.items()},
        r"layers\.0\.weight\S* is mlx.core.float32\(32,\), expected mlx.core.float32\(8, 4\)",
    ),
    "dtype": (
        lambda a: {p: v.astype(mx.float16) if p.startswith("layers.0.weight") else v for p, v in a.items()},
        r"layers\.0\.weight\S* is mlx.core.float16\(8, 4\), expected mlx.core.float32\(8, 4\)",
    ),
}


@pytest.mark.parametrize("what", ["weights", "optimizer"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_does_not_fit_is_named_with_both_values_and_nothing_is_changed(checkpoint, what, change):
    _, state = checkpoint
    job = experiment(dropout=0.1)
    advance(job, 1)
    before, number = state_of(job), job.sampler.number
    alter, named = CHANGES[change]
    bad = State(
        4,
        alter(state.weights) if what == "weights" else state.weights,
        alter(state.optimizer) if what == "optimizer" else state.optimizer,
        state.rng,
        state.cursor,
    )
    with pytest.raises(CheckpointError, match=named) as error:
        restore(job, bad)
    assert f"the {'weights' if what == 'weights' else 'optimizer state'} of the checkpoint" in str(error.value)
    assert_same_state(state_of(job), before)
    assert job.sampler.number == number


def test_moments_that_are_missing_are_never_made_up(checkpoint):
    """MLX would create them as zeros, and say nothing."""
    _, state = checkpoint
    weights_only = {path: value for path, value in state.optimizer.items() if not path.endswith((".m", ".v"))}
    with pytest.raises(CheckpointError, match=r"missing layers\.0\.bias\.m"):
        restore(experiment(dropout=0.1), State(4, state.weights, weights_only, state.rng, state.cursor))


def test_many_problems_are_counted_not_listed():
    job = experiment()
    empty = State(0, {}, {}, (0, 0), {})
    with pytest.raises(CheckpointError, match="missing layers.0.bias, layers.0.weight"):
        restore(job, empty)
    grown = {path: mx.ones((9, 9)) for path in state_arrays(job.model)} | {f"x{n}": mx.ones(1) for n in range(9)}
    with pytest.raises(CheckpointError, match="unexpected x0, x1, x2, x3, x4 and 4 more"):
        restore(job, State(0, grown, {}, (0, 0), {}))


def test_a_cursor_that_the_sampler_refuses_changes_nothing(checkpoint):
    _, state = checkpoint

    class Refusing(Points):
        def load_state_dict(self, cursor):
            raise DataError("no such place")

    job = experiment(dropout=0.1)
    job.sampler = Refusing()
    job.prepare()
    before = state_of(job)
    with pytest.raises(DataError, match="no such place"):
        restore(job, state)
    assert_same_state(state_of(job), before)


@pytest.mark.parametrize("kind", ["batch norm", "batch norm in bfloat16", "frozen", "multi"])
def test_all_that_the_next_step_depends_on_is_kept(tmp_path, kind):
    """Running statistics and frozen weights are no trainable parameters; a MultiOptimizer nests its states."""

    def make():
        model = mlp()
        optimizer = optim.AdamW(1e-2)
        if "batch norm" in kind:
            model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm(3), nn.Linear(3, 1))
        if "bfloat16" in kind:
            model.set_dtype(mx.bfloat16)  # the first forward pass turns the running statistics to float32
        if kind == "frozen":
            model.layers[0].freeze()
        if kind == "multi":
            optimizer = optim.MultiOptimizer([optim.Muon(1e-2), optimizer], [lambda path, weight: weight.ndim == 2])
        return experiment(model=model, optimizer=optimizer)

    job = make()
    advance(job, 2)
    saved(state_of(job, 2), tmp_path)
    advance(job, 2)
    other = make()
    other.model.apply(lambda weight: weight + 1)
    restore(other, read(tmp_path, 2, 0))
    advance(other, 2)
    assert_same_state(state_of(other, 4), state_of(job, 4))


# ------------------------------------------------------------------------------------------------------ damaged on disk


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(path):
    path.write_bytes(path.read_bytes() + b" ")


def edit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "cut": (cut, "was cut off or replaced"),
    "lengthened": (lengthen, "was cut off or replaced"),
    "edited": (edit, "was changed: its SHA-256"),
    "missing": (os.unlink, "can't be read"),
    "emptied": (lambda path: path.write_bytes(b""), "has 0 bytes, expected"),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_named_with_what_was_expected(checkpoint, name, damage):
    folder, _ = checkpoint
    hurt, sentence = DAMAGE[damage]
    hurt(folder / name)
    with pytest.raises(CheckpointError, match=sentence) as error:
        read(folder, 4, 0)
    assert str(folder / name) in str(error.value)


RECORDS = {
    "no JSON": (lambda path: path.write_text("{"), "is damaged"),
    "not UTF-8": (lambda path: path.write_bytes(b"\xff\xfe"), "is damaged"),
    "empty": (lambda path: path.write_bytes(b""), "is damaged"),
    "a list": (lambda path: path.write_text("[]"), "is damaged"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "is damaged"),
    "a field missing": (lambda path: edit_json(path, lambda record: record.pop("run")), "is damaged.*`run`"),
    "another type": (lambda path: edit_json(path, lambda record: record.update(step="4")), "is damaged.*step"),
    "another version": (lambda path: edit_json(path, lambda r: r.update(checkpoint_version=2)), "checkpoint_version 2"),
    "another step": (lambda path: edit_json(path, lambda record: record.update(step=5)), "describes step 5"),
    "another segment": (lambda path: edit_json(path, lambda record: record.update(segment=1)), "segment 1"),
    "a file left out": (lambda path: edit_json(path, lambda r: r["files"].pop("00000004.rng")), "00000004.rng"),
    "a file elsewhere": (
        lambda path: edit_json(path, lambda r: r["files"].update({"../x": r["files"].pop("00000004.rng")})),
        "../x",
    ),
}


@pytest.mark.parametrize("damage", RECORDS)
def test_a_damaged_commit_record_is_refused(checkpoint, damage):
    folder, _ = checkpoint
    hurt, sentence = RECORDS[damage]
    hurt(folder / "00000004.json")
    with pytest.raises(CheckpointError, match=sentence):
        read(folder, 4, 0)


def test_without_a_commit_record_there_is_no_checkpoint(checkpoint):
    folder, _ = checkpoint
    (folder / "00000004.json").unlink()
    with pytest.raises(CheckpointError, match="00000004.json does not exist, so there is no checkpoint of step 4"):
        read(folder, 4, 0)


UNDECODABLE = {
    "00000004.rng": [
        b'{"key": [1]}',
        b'{"key": [1, 2.5]}',
        b'{"key": ["1", 2]}',
        b'{"key": [-1, 2]}',
        b'{"key": [1, 4294967296]}',
        b"[]",
    ],
    "00000004.cursor": [b"[]", b"{", b"null"],
    "00000004.safetensors": [b"", b"\xff" * 8, b"\xff" * 100, b"\x02" + bytes(7) + b"{}x", b"\x02" + bytes(7) + b"[]"],
}


@pytest.mark.parametrize(("name", "content"), [(name, c) for name, several in UNDECODABLE.items() for c in several])
def test_content_that_makes_no_sense_is_refused_although_digests_agree(checkpoint, name, content):
    folder, _ = checkpoint
    (folder / name).write_bytes(content)
    (folder / "checkpoints").symlink_to(folder)
    repair_commit(folder, "00000004")
    job = experiment(dropout=0.1)
    job.prepare()
    before = state_of(job)
    with pytest.raises(CheckpointError, match="00000004.*can't be decoded|weights of the checkpoint and .* do not fit"):
        restore(job, read(folder, 4, 0))
    assert_same_state(state_of(job), before)


UNTRUE = {
    "another type": ("dtype", "F99", "layers.0.bias is of type F99; expected one of F32"),
    "another shape": ("shape", [3], "can't be decoded"),
    "beyond the end": ("data_offsets", [0, 10**9], "can't be decoded"),
    "a field of another type": ("shape", "8", "can't be decoded"),
}


@pytest.mark.parametrize("what", UNTRUE)
def test_a_header_that_is_not_true_is_refused_although_digests_agree(checkpoint, what):
    folder, _ = checkpoint
    field, value, sentence = UNTRUE[what]
    path = folder / NAMES[0]
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header["layers.0.bias"][field] = value
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])
    (folder / "checkpoints").symlink_to(folder)
    repair_commit(folder, "00000004")
    with pytest.raises(CheckpointError, match=sentence):
        read(folder, 4, 0)


EARLY_END = """
import sys
from pathlib import Path
from workbench.checkpoints import checkpoint_reader
checkpoint_reader.read(Path(sys.argv[1]), 4, 0)
sys.exit(2)
"""


def test_a_process_that_ends_right_after_reading_is_not_aborted(checkpoint):
    """`mx.load` of a Python buffer leaves a thread behind that, in one process of a few, aborts the exit."""
    done = [python("-c", EARLY_END, checkpoint[0]) for _ in range(4)]
    assert [(process.returncode, process.stderr) for process in done] == [(2, "")] * 4


def test_arrays_are_made_from_the_bytes_that_were_verified(checkpoint):
    """Arrays that MLX loads lazily would take new values when the file is overwritten."""
    folder, state = checkpoint
    back = read(folder, 4, 0)
    for name in NAMES[:2]:
        path = folder / name
        with open(path, "r+b") as file:  # in place: the same inode
            file.write(bytes(path.stat().st_size))
    assert_same_state(back, state)


def test_a_link_is_followed_and_what_it_leads_to_verified(checkpoint, tmp_path_factory):
    folder, state = checkpoint
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "weights"
    (folder / NAMES[0]).rename(elsewhere)
    (folder / NAMES[0]).symlink_to(elsewhere)
    assert_same_state(read(folder, 4, 0), state)
    cut(elsewhere)
    with pytest.raises(CheckpointError, match="was cut off"):
        read(folder, 4, 0)


# --------------------------------------------------------------------------------------------------------- half-written


class Full(OSError):
    pass


@pytest.mark.parametrize("failing", range(1, 6))
def test_a_save_that_fails_half_way_commits_nothing_and_harms_nothing(checkpoint, monkeypatch, failing):
    """The disk is full at the first, second, … of the five files."""
    folder, state = checkpoint
    before, real, renames = tree(folder), os.replace, []

    def replace(*arguments):
        renames.append(arguments)
        if len(renames) == failing:
            raise Full(28, "No space left on device")
        real(*arguments)

    later = State(8, state.weights, state.optimizer, state.rng, state.cursor)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        with pytest.raises(Full):
            saved(later, folder)
    after = tree(folder)
    assert {name: after[name] for name in before} == before
    assert not [name for name in after if "tmp" in name or name == "00000008.json"]
    with pytest.raises(CheckpointError, match="no checkpoint of step 8"):
        read(folder, 8, 0)
    saved(later, folder)
    assert_same_state(read(folder, 8, 0), later)


def test_a_folder_that_can_not_be_written_is_an_os_error(checkpoint, tmp_path):
    _, state = checkpoint
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        saved(state, tmp_path / "file")


def test_arrays_that_the_format_can_not_hold_are_an_error_with_a_name(tmp_path):
    state = State(0, {"w": mx.array([1.0], dtype=mx.float64)}, {}, (0, 0), {})
    with pytest.raises(ExperimentError, match="00000000.safetensors can't hold this state"):
        saved(state, tmp_path)
    assert os.listdir(tmp_path) == []


def test_deleting_removes_the_commit_record_first(checkpoint, monkeypatch):
    folder, _ = checkpoint
    order = []
    real = os.unlink
    monkeypatch.setattr(os, "unlink", lambda path, **k: (order.append(os.path.basename(path)), real(path, **k)))
    delete(folder, 4, 0)
    assert order[0] == "00000004.json" and sorted(order) == sorted([*NAMES, "00000004.json"])
    assert os.listdir(folder) == []
    delete(folder, 4, 0)  # nothing there: no error


# -------------------------------------------------------------------------------------------------------- comparing two


def changed(state, weights=None, optimizer=None, rng=None, cursor=None):
    return State(
        state.step,
        state.weights | (weights or {}),
        state.optimizer | (optimizer or {}),
        rng or state.rng,
        cursor or state.cursor,
    )


def test_the_first_differing_tensor_is_named(checkpoint):
    _, state = checkpoint
    same = read(checkpoint[0], 4, 0)
    assert first_difference(state, same) is None
    bias, moment = "layers.3.bias", "layers.3.weight.v"
    cases = {
        f"weights {bias}": changed(same, {bias: flipped(same.weights[bias])}),
        f"optimizer {moment}": changed(same, optimizer={moment: flipped(same.optimizer[moment], element=5)}),
        "optimizer step": changed(same, optimizer={"step": flipped(same.optimizer["step"], bit=40)}),
        "weights x (only in one)": changed(same, {"x": mx.ones(1)}),
        f"weights {bias} (dtype or shape)": changed(same, {bias: same.weights[bias].view(mx.int32)}),
        "rng": changed(same, rng=(same.rng[0], same.rng[1] ^ 1)),
        "cursor": changed(same, cursor={"number": 5}),
    }
    for name, other in cases.items():
        assert first_difference(state, other) == name and first_difference(other, state) == name


def test_nan_equals_itself_and_the_zeros_differ():
    nan = State(0, {"w": mx.array([mx.nan])}, {}, (0, 0), {})
    assert first_difference(nan, State(0, {"w": mx.array([mx.nan])}, {}, (0, 0), {})) is None
    zero, negative = (State(0, {"w": mx.array([value])}, {}, (0, 0), {}) for value in (0.0, -0.0))
    assert first_difference(zero, negative) == "weights w"


def test_the_first_difference_is_the_first_in_order_of_names():
    left = State(0, {"b": mx.ones(1), "a": mx.ones(1)}, {"c": mx.ones(1)}, (0, 0), {})
    right = State(0, {"b": mx.zeros(1), "a": mx.zeros(1)}, {"c": mx.zeros(1)}, (0, 1), {})
    assert first_difference(left, right) == "weights a"
