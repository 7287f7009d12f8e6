"""A checkpoint compared while it is read: the same answer as of two states, never one of a damaged file, and a replay
that goes red on one bit of whatever it read."""

import gc
import json

import mlx.core as mx
import numpy as np
import pytest
import runs
from helpers import advance, edit_line, experiment, flip_in_safetensors, flipped, repair_commit, state_of
from test_snapshot import ODD

from workbench import open_run
from workbench.capture import layers_of
from workbench.checkpoints.checkpoint_comparison import difference
from workbench.checkpoints.checkpoint_reader import read
from workbench.checkpoints.checkpoint_writer import write
from workbench.errors import CheckpointError, ReplayError
from workbench.replay import replay_steps
from workbench.snapshot import State, first_difference, same_arrays

LARGE = 700_001  # float32: more than a stretch, and its last one is no whole number of words


def saved(state, folder):
    write(state, folder, run="r", segment=0, t=0.0)
    return folder


def state():
    weights = ODD | {"large": mx.arange(LARGE), "bf16": mx.arange(LARGE).astype(mx.bfloat16)}
    return State(
        3, weights, {"step": mx.array(7, dtype=mx.uint64), "turned.m": mx.ones((300, 200)).T}, (5, 6), {"n": 1}
    )


def changed(one, part, path, array):
    arrays = dict(getattr(one, part))
    arrays.pop(path, None)
    if array is not None:
        arrays[path] = array
    return State(
        one.step,
        *(arrays if name == part else getattr(one, name) for name in ("weights", "optimizer")),
        one.rng,
        one.cursor,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(state(), tmp_path_factory.mktemp("checkpoints"))


def agrees(folder, other, expected):
    """The comparison, the other way to the same answer, and that answer."""
    assert difference(folder, 3, 0, other, "r") == first_difference(read(folder, 3, 0), other) == expected


def test_a_state_of_every_kind_of_array_is_the_same(folder):
    agrees(folder, state(), None)


@pytest.mark.parametrize("path", sorted(path for path, array in state().weights.items() if array.size))
def test_one_bit_of_any_weight_is_seen(folder, path):
    one = state()
    array = one.weights[path]
    if array.dtype == mx.bool_:
        agrees(folder, changed(one, "weights", path, mx.logical_not(array)), f"weights {path}")
        return
    if array.dtype == mx.complex64:
        agrees(folder, changed(one, "weights", path, mx.conj(array)), f"weights {path}")
        return
    for element in {0, array.size // 2, array.size - 1}:
        agrees(folder, changed(one, "weights", path, flipped(array, 0, element)), f"weights {path}")


def test_other_arrays_random_state_and_cursor_are_seen(folder):
    one = state()
    agrees(folder, changed(one, "optimizer", "step", mx.array(8, dtype=mx.uint64)), "optimizer step")
    agrees(folder, changed(one, "optimizer", "turned.m", flipped(one.optimizer["turned.m"])), "optimizer turned.m")
    agrees(folder, changed(one, "weights", "large", None), "weights large (only in one)")
    agrees(folder, changed(one, "weights", "another", mx.ones(2)), "weights another (only in one)")
    agrees(folder, changed(one, "weights", "i8", mx.array([-128, 127], dtype=mx.int16)), "weights i8 (dtype or shape)")
    agrees(folder, changed(one, "weights", "empty", mx.zeros((3, 0))), "weights empty (dtype or shape)")
    agrees(folder, State(3, one.weights, one.optimizer, (5, 7), one.cursor), "rng")
    agrees(folder, State(3, one.weights, one.optimizer, one.rng, {"n": 2}), "cursor")


def test_the_first_in_order_is_named(folder):
    one = changed(state(), "weights", "u64", mx.array([1, 2], dtype=mx.uint64))
    agrees(folder, changed(one, "weights", "large", mx.zeros(LARGE, mx.int32)), "weights large")


def test_zeros_of_another_sign_and_other_nans_differ(folder):
    one = state()
    agrees(folder, changed(one, "weights", "scalar", mx.array(0.0)), "weights scalar")
    nans = mx.array(np.array([0x7FC00002], np.uint32)).view(mx.float32)
    agrees(folder, changed(one, "weights", "f32", mx.concatenate([nans, ODD["f32"][1:]])), "weights f32")


@pytest.mark.parametrize("part", ["", ".optimizer"])
@pytest.mark.parametrize("where", [0, 3, 0.3, 0.999999])
def test_there_is_no_verdict_on_a_changed_file(tmp_path, part, where):
    """Not even where the changed bit stands after the first tensor that differs, or is none of a tensor's."""
    saved(state(), tmp_path)
    path = tmp_path / f"00000003{part}.safetensors"
    content = bytearray(path.read_bytes())
    content[int(where * len(content)) if isinstance(where, float) else where] ^= 1
    path.write_bytes(content)
    for other in (state(), changed(state(), "weights", "large", None)):
        with pytest.raises(CheckpointError, match="was changed"):
            difference(tmp_path, 3, 0, other)


def test_what_stands_in_no_checkpoint_is_refused_as_by_a_reader(folder, tmp_path):
    with pytest.raises(CheckpointError, match="belongs to run r, expected another"):
        difference(folder, 3, 0, state(), "another")
    with pytest.raises(CheckpointError, match="does not exist"):
        difference(tmp_path, 3, 0, state())
    saved(state(), tmp_path)
    path = tmp_path / "00000003.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="cut off"):
        difference(tmp_path, 3, 0, state())


def test_what_stands_in_shared_files_is_compared_too(tmp_path):
    still = mx.arange(10_000)
    first = State(1, {"moves": mx.zeros(9000), "still": still}, {}, (0, 0), {})
    second = State(2, {"moves": mx.ones(9000), "still": still}, {}, (0, 0), {})
    saved(first, tmp_path), saved(second, tmp_path)
    assert json.loads((tmp_path / "00000002.json").read_text())["taken"]["weights"].keys() == {"still"}
    assert difference(tmp_path, 2, 0, second) is None
    other = changed(second, "weights", "still", flipped(still, 0, 9_999))
    assert difference(tmp_path, 2, 0, other) == first_difference(read(tmp_path, 2, 0), other) == "weights still"
    (shared,) = tmp_path.glob("shared-*")
    content = bytearray(shared.read_bytes())
    content[-1] ^= 1
    shared.write_bytes(content)
    with pytest.raises(CheckpointError, match="was changed"):
        difference(tmp_path, 2, 0, second)


def test_arrays_are_the_same_only_bit_by_bit_and_in_any_layout():
    a = mx.arange(6.0).reshape(2, 3)
    assert same_arrays({"a": a, "n": mx.array(mx.nan)}, {"n": mx.array(mx.nan), "a": mx.array(a.T.tolist()).T})
    for other in (flipped(a), a.astype(mx.bfloat16), a.reshape(3, 2), -a):
        assert not same_arrays({"a": a}, {"a": other})
    assert not same_arrays({"a": a}, {}) and not same_arrays({"a": a}, {"b": a})
    for dtype in (mx.bfloat16, mx.float16, mx.int8):
        assert same_arrays({"a": a.astype(dtype)}, {"a": a.astype(dtype)})
        assert not same_arrays({"a": a.astype(dtype)}, {"a": flipped(a.astype(dtype))})


# ---------------------------------------------------------------------------------- one bit of whatever a replay read

QUICK = {"with_probe": False, "repeat": False}
MODES = pytest.mark.parametrize("options", [QUICK, {"fresh_process": False}], ids=["quick", "whole"])


@pytest.fixture
def path(tmp_path):
    return runs.recorded(tmp_path)


def replayed(path, step, **options):
    return open_run(path).replay(step, **options)


@MODES
def test_a_bit_of_checkpoint_n_makes_its_item_red(path, options):
    assert replayed(path, 8, **options).record.items["checkpoint"].verdict == "exact"
    for suffix in (".safetensors", ".optimizer.safetensors"):
        file = path / "checkpoints" / f"00000008{suffix}"
        before = file.read_bytes()
        name = flip_in_safetensors(file, lambda name: name.endswith(("weight", ".v")))
        noted = replayed(path, 8, **options)
        assert noted.record.items["checkpoint"].verdict == "unverified" and noted.exact
        assert any("checkpoint 8 was not compared" in notice and "was changed" in notice for notice in noted.notices)
        repair_commit(path, "00000008")
        red = replayed(path, 8, **options)
        assert red.record.items["checkpoint"].verdict == "mismatch" and not red.exact
        assert name in red.record.items["checkpoint"].detail
        assert red.record.first_difference.item == "checkpoint"
        file.write_bytes(before)
        repair_commit(path, "00000008")


@MODES
def test_a_bit_of_the_checkpoint_before_makes_it_red(path, options):
    file = path / "checkpoints" / "00000004.optimizer.safetensors"
    flip_in_safetensors(file, lambda name: name.endswith(".m"))
    with pytest.raises(CheckpointError, match="was changed"):
        replayed(path, 5, **options)
    repair_commit(path, "00000004")
    found = replayed(path, 5, **options).record.first_difference
    assert (found.step, found.where, found.item) == (4, "restored state", "state.adam_m")


@MODES
@pytest.mark.parametrize("lane", ["weights", "adam_m", "adam_v", "other", "rng", "cursor"])
@pytest.mark.parametrize("step", [4, 5])
def test_a_bit_of_a_lane_in_the_telemetry_makes_it_red(path, options, lane, step):
    """Of the state before, and of the state after."""

    def flip(line):
        digest = line["state"][lane]
        line["state"][lane] = digest[:-1] + f"{int(digest[-1], 16) ^ 1:x}"

    edit_line(path, step, flip)
    trace = replayed(path, 5, **options)
    found = trace.record.first_difference
    where = "restored state" if step == 4 else "step"
    assert (found.step, found.where, found.item) == (step, where, f"state.{lane}") and not trace.exact


def test_a_quick_replay_says_of_a_state_that_it_was_broken(path):
    """State N-1 is looked at beside the step, and held no longer than that."""
    file = path / "checkpoints" / "00000004.safetensors"
    content = bytearray(file.read_bytes())
    content[-4:] = np.array([np.nan], np.float32).tobytes()
    file.write_bytes(content)
    repair_commit(path, "00000004")
    notices = [replayed(path, 5, **options).notices for options in (QUICK, {"fresh_process": False})]
    told = [
        [one for one in some if "state before step 5 already held values that are not finite" in one]
        for some in notices
    ]
    assert len(told[0]) == 1 and told[0] == told[1]


@pytest.mark.parametrize("hold", [True, False])
def test_the_state_before_is_held_only_for_who_needs_it(hold):
    job = prepared()
    layers, start = list(layers_of(job.model)), state_of(job)
    seen = []
    (outcome,) = replay_steps(
        *(job, start, [1], lambda step: {}),
        layers=layers,
        with_probe=False,
        repeat=lambda step: False,
        hold=hold,
        looked=seen.append,
    )
    assert first_difference(seen[0], start) is None
    if hold:
        assert first_difference(outcome.before, start) is None
    else:
        with pytest.raises(ReplayError, match="state 0 was not held; replay step 1 with hold=True"):
            outcome.before  # noqa: B018


def prepared():
    job = experiment()
    job.prepare()
    return job


def test_a_replay_leaves_no_arrays_behind(path):
    """Circles of objects would hold them until Python looks for such, and the system had to give more each time."""
    run = open_run(path)
    for options in (QUICK, {"fresh_process": False}):
        run.replay(5, **options)
        gc.collect()
        gc.disable()
        try:
            before = mx.get_active_memory()
            run.replay(5, **options)
            assert mx.get_active_memory() - before < 10_000
        finally:
            gc.enable()


def test_an_experiment_of_the_users_is_left_at_the_state_replayed(path, tmp_path):
    job = experiment()
    advance(job, 2)
    expected = state_of(job, 2)
    again = prepared()
    start = state_of(again)
    for _ in replay_steps(
        *(again, start, [1, 2], lambda step: {}),
        layers=list(layers_of(again.model)),
        with_probe=False,
        repeat=lambda step: False,
        hold=False,
    ):
        pass
    assert first_difference(state_of(again, 2), expected) is None
