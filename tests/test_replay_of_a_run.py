"""Replays of a run's folder: what they leave of it, and each item that its files hold."""

import gc

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import psutil
import pytest
from helpers import Points, edit_json, edit_line, experiment, next_up, parts, state_of, tensor_bytes, tree

from workbench import Recorder, open_run
from workbench.compare import ITEMS, with_one_bit_flipped
from workbench.errors import ExperimentError
from workbench.lines.line import LANES

pytest_plugins = ["replay_fixtures"]


class Cancel(Exception):
    pass


def test_an_exception_in_progress_cancels_and_leaves_the_run_as_it_was(run):
    calls = []
    run.replay(8, experiment=experiment(), trace_dir=run.path.parent / "elsewhere", progress=lambda *c: calls.append(c))
    before = tree(run.path)
    for stop in range(len(calls)):

        def progress(done, total, what, left=[stop]):  # noqa: B006
            left[0] -= 1
            if left[0] < 0:
                raise Cancel

        with pytest.raises(Cancel):
            run.replay(8, experiment=experiment(), progress=progress)
        assert tree(run.path) == before
    assert run.replay(8, experiment=experiment()).exact


def test_a_replay_changes_nothing_but_traces(run):
    before = tree(run.path)
    run.replay(8, experiment=experiment())
    run.replay(range(3, 6), experiment=experiment())
    after = tree(run.path)
    assert {name for name in after if name not in before} == {f"traces/{step:08d}.json" for step in (3, 4, 5, 8)}
    assert {name: after[name] for name in before} == before
    run.replay(2, experiment=experiment(), trace_dir=run.path.parent / "elsewhere")
    assert tree(run.path) == after


def test_an_experiment_with_other_settings_is_refused_before_anything_is_done(run):
    for other, named in (
        (experiment(clip=1.0), "clip is 1.0, recorded None"),
        (experiment(compile=True), "compile is True, recorded False"),
        (experiment(optimizer=optim.AdamW(2e-2, bias_correction=True)), None),
        (experiment(optimizer=optim.AdamW(1e-2)), "bias_correction"),
        (experiment(optimizer=optim.Lion(1e-2)), "Lion"),
    ):
        if named is None:
            # The rate is a part of the state: the recorded one is restored.
            assert run.replay(7, experiment=other).exact
            continue
        with pytest.raises(ExperimentError, match=named):
            run.replay(7, experiment=other)


def test_memory_stays_flat_over_50_replays(run):
    job, process = experiment(), psutil.Process()

    def replay(times):
        for _ in range(times):
            run.replay(8, experiment=job)
        gc.collect()
        return mx.get_active_memory(), process.memory_info().rss

    active, resident = replay(10)
    active_after, resident_after = replay(50)
    state = sum(len(content) for content in tensor_bytes(state_of(job).weights).values())
    assert active_after - active < 10 * state  # a leak of one state a replay would be 150 of them
    assert resident_after - resident < 20e6


def test_one_flipped_bit_in_the_telemetry_turns_exactly_that_item_red(run):
    reference = run.replay(7, experiment=experiment())
    assert reference.exact
    original = (run.path / "telemetry.jsonl").read_bytes()

    def scalar(name):
        def change(line):
            line[name] = next_up(line[name])
            line[f"{name}_bits"] = f"0x{np.float32(line[name]).view(np.uint32):08x}"

        return change

    def array(name, entry):
        return lambda line: line[name].__setitem__(entry, next_up(line[name][entry]))

    def digest(line):
        line["batch_hash"] = with_one_bit_flipped(line["batch_hash"])

    def lane(name):
        return lambda line: line["state"].update({name: with_one_bit_flipped(line["state"][name])})

    arrays = ("per_layer_act_norms", "per_layer_grad_norms", "adam_m_norms", "adam_v_norms")
    changes = {"batch_hash": [digest], "loss": [scalar("loss")], "grad_norm": [scalar("grad_norm")]}
    changes["lr"] = [lambda line: line.update(lr=next_up(line["lr"])), lambda line: line.update(lr=None)]
    changes |= {name: [array(name, entry) for entry in (0, 1)] for name in arrays}
    changes |= {f"state.{name}": [lane(name)] for name in LANES}
    assert set(changes) == set(ITEMS) - {"checkpoint"}
    for name, several in changes.items():
        for change in several:
            edit_line(run.path, 7, change)
            trace = open_run(run.path).replay(7, experiment=experiment(), with_probe=False)
            verdicts = {item: found.verdict for item, found in trace.record.items.items()}
            assert verdicts == dict.fromkeys(ITEMS, "exact") | {name: "mismatch", "checkpoint": "unverified"}
            assert (trace.record.first_difference.item, trace.exact) == (name, False)
            (run.path / "telemetry.jsonl").write_bytes(original)


def test_a_step_with_a_loss_of_nan_replays_exactly(tmp_path):
    """From the step on whose batch holds a NaN, everything is NaN, and equal bits are equal bits."""

    def make():
        job = experiment()
        job.sampler = Poisoned()
        return job

    with Recorder(tmp_path / "run", *parts(make()), compile=False, save_every=2) as recorder:
        for batch in recorder.batches(5):
            recorder.step(batch)
    traces = open_run(tmp_path / "run").replay(range(1, 6), experiment=make())
    assert [trace.exact for trace in traces] == [True] * 5
    assert [bool(np.isnan(trace.loss)) for trace in traces] == [False, False, True, True, True]
    row = traces[2].layers.set_index(["layer", "kind"]).loc["layers.0", "gradient"]
    assert np.isnan(row["l2"]) and np.isnan(row["recorded"]) and row["nonfinite"] == 40


class Poisoned(Points):
    def __next__(self):
        x, y = super().__next__()
        if self.number == 3:
            x[0, :] = np.nan
        return x, y


def test_another_nan_is_another_bit_pattern(run):
    edit_line(run.path, 7, lambda line: line.update(loss=None, loss_bits="0x7fc00000"))
    trace = run.replay(7, experiment=experiment())
    assert trace.record.first_difference.item == "loss"
    assert "recorded NaN (0x7fc00000)" in trace.record.first_difference.detail


def test_an_item_that_was_not_logged_is_unverified(run):
    edit_line(run.path, 7, lambda line: [line.pop(name) for name in ("grad_norm", "grad_norm_bits", "adam_m_norms")])
    trace = run.replay(7, experiment=experiment())
    items = trace.record.items
    assert [name for name in items if items[name].verdict == "unverified"] == [
        "grad_norm",
        "adam_m_norms",
        "checkpoint",
    ]
    assert trace.exact
    assert "all 12 recorded items" in trace.sentence()


@pytest.mark.parametrize("optimizer", [optim.SGD, optim.Lion, optim.Adafactor])
def test_optimizers_without_moments_have_null_arrays_and_full_tables(tmp_path, optimizer):
    def make():
        return experiment(optimizer=optimizer(1e-2))

    with Recorder(tmp_path / "run", *parts(make()), compile=False) as recorder:
        for batch in recorder.batches(3):
            recorder.step(batch)
    trace = open_run(tmp_path / "run").replay(2, experiment=make())
    assert trace.exact and trace.record.items["adam_m_norms"].verdict == "exact"
    kept = {"SGD": "v", "Lion": "m", "Adafactor": ""}[optimizer.__name__]
    for leaf in "mv":
        assert (getattr(trace.record, f"adam_{leaf}_norms") == [None, None]) == (leaf not in kept)
    kinds = set(trace.layers["kind"])
    assert {"activation", "activation_gradient", "gradient", "weight", "update"} <= kinds
    assert {f"adam_{leaf}" for leaf in kept} == {kind for kind in kinds if kind.startswith("adam")}


class Idle(nn.Module):
    def __init__(self):
        super().__init__()
        mx.random.seed(3)
        self.used, self.idle = nn.Linear(4, 1), nn.Linear(2, 2)

    def __call__(self, x):
        return self.used(x)


def test_a_layer_that_is_never_called_is_null_and_exact(tmp_path):
    with Recorder(tmp_path / "run", *parts(experiment(model=Idle())), compile=False) as recorder:
        for batch in recorder.batches(3):
            recorder.step(batch)
    trace = open_run(tmp_path / "run").replay(2, experiment=experiment(model=Idle()))
    assert trace.exact and trace.record.layers == ["used", "idle"]
    assert trace.record.per_layer_act_norms[1] is None and trace.record.per_layer_grad_norms[1] == 0
    kinds = trace.layers[trace.layers["layer"] == "idle"]["kind"].tolist()
    assert kinds == ["gradient", "weight", "adam_m", "adam_v", "update"]
    edit_line(trace.path.parents[1], 2, lambda line: line["per_layer_act_norms"].__setitem__(1, 0.0))
    again = open_run(tmp_path / "run").replay(2, experiment=experiment(model=Idle()))
    assert again.record.first_difference.item == "per_layer_act_norms"
    assert "recorded 0x00000000, replayed undefined" in again.record.first_difference.detail


def test_a_checkpoint_of_the_replayed_step_is_compared_and_a_damaged_one_only_noted(run):
    trace = run.replay(10, experiment=experiment())
    assert trace.exact and trace.record.items["checkpoint"].verdict == "exact"
    path = run.path / "checkpoints" / "00000010.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    trace = run.replay(10, experiment=experiment())
    assert trace.exact and trace.record.items["checkpoint"].verdict == "unverified"
    assert any("checkpoint 10 was not compared" in notice for notice in trace.notices)


def test_a_commit_record_of_another_run_is_refused(run):
    edit_json(run.path / "checkpoints" / "00000005.json", lambda record: record.update(run="other"))
    with pytest.raises(Exception, match="belongs to run other"):
        run.replay(7, experiment=experiment())
