"""Replays of a small loop: exact, alone or in ranges, in any thread; every difference is placed where it began."""

import dataclasses
import gc
import threading

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import psutil
import pytest
from helpers import (
    Points,
    advance,
    assert_same_state,
    edit_json,
    edit_line,
    experiment,
    flipped,
    mse,
    next_up,
    parts,
    remembered,
    state_of,
    tensor_bytes,
    tree,
)

from workbench import Recorder, open_run, probe
from workbench.compare import ITEMS, with_one_bit_flipped
from workbench.errors import ExperimentError, ReplayError
from workbench.replay import replay_steps
from workbench.snapshot import State
from workbench.telemetry import LANES

STEPS = 8


def outcomes(steps, *, job=None, start=None, evidence=None, memory=None, **options):
    states, recorded, layers = memory
    evidence = recorded if evidence is None else evidence
    return list(
        replay_steps(
            job or experiment(),
            states[0] if start is None else start,
            steps,
            lambda step: evidence.get(step, {}),
            layers=layers,
            **options,
        )
    )


@pytest.fixture(scope="module")
def memory():
    """States and evidence of 8 uninterrupted steps."""
    return remembered(experiment(), STEPS)


def same_outcome(left, right):
    assert left.observation.evidence() == right.observation.evidence()
    assert left.items == right.items and left.rows == right.rows
    assert_same_state(left.after, right.after)
    assert_same_state(left.before, right.before)


# ---------------------------------------------------------------------------------------------------------------- exact


def test_every_step_has_the_state_of_the_uninterrupted_run(memory):
    states = memory[0]
    found = outcomes(range(1, STEPS + 1), memory=memory, checkpoint=lambda step: states[step])
    assert [outcome.step for outcome in found] == list(range(1, STEPS + 1))
    for outcome in found:
        assert outcome.exact and outcome.first_difference is None
        assert {item.verdict for item in outcome.items.values()} == {"exact"} and len(outcome.items) == len(ITEMS)
        assert outcome.probe.certified
        assert [gate.verdict for gate in vars_of(outcome.gates)] == ["exact"] * 3
        assert_same_state(outcome.before, states[outcome.step - 1])
        assert_same_state(outcome.after, states[outcome.step])


def vars_of(gates):
    return [gates.repeatable, gates.faithful, gates.sensitive]


@pytest.mark.parametrize("start", [0, 3, 5])
def test_a_range_equals_single_replays_from_any_state_before(memory, start):
    states = memory[0]
    steps = [start + 1, start + 3]
    together = outcomes(steps, memory=memory, start=states[start])
    for step, outcome in zip(steps, together, strict=True):
        (single,) = outcomes([step], memory=memory)
        same_outcome(outcome, single)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_probe_is_certified_on_the_cpu(dtype, compiled):
    def make():
        return experiment(dtype=dtype, dropout=0.2, clip=0.5, compile=compiled, optimizer=optim.AdamW(1e-2, eps=1e-4))

    memory = remembered(make(), 3)
    found = outcomes([2, 3], memory=memory, job=make())
    assert all(outcome.exact and outcome.probe.certified for outcome in found)


def test_a_probe_that_is_not_certified_is_tried_again_compiled_like_the_step(monkeypatch):
    """From the same state: the first try has drawn random numbers."""

    def make():
        return experiment(dropout=0.3, compile=True)

    real = probe.probe

    def eager_differs(*arguments, compiled, **options):
        found = real(*arguments, compiled=compiled, **options)
        return found if compiled else dataclasses.replace(found, certified=False)

    memory = remembered(make(), 3)
    monkeypatch.setattr(probe, "probe", eager_differs)
    (outcome,) = outcomes([3], memory=memory, job=make())
    assert outcome.exact and outcome.probe.certified and outcome.probe.compiled
    monkeypatch.setattr(
        probe, "probe", lambda *a, **options: dataclasses.replace(real(*a, compiled=False), certified=False)
    )
    (outcome,) = outcomes([3], memory=memory, job=make())
    assert outcome.exact and not outcome.probe.certified  # the probe has no say in what is exact


def test_with_and_without_a_probe_the_state_after_is_the_same(memory):
    jobs = [experiment(), experiment()]
    for job, with_probe in zip(jobs, (True, False), strict=True):
        (outcome,) = outcomes([4], memory=memory, job=job, with_probe=with_probe)
        assert (outcome.probe is not None) == with_probe == bool(outcome.rows)
        assert_same_state(state_of(job, 4), outcome.after)  # the experiment stands at N, ready to go on
        advance(job, 2)
        assert_same_state(state_of(job, 6), memory[0][6])


def test_a_step_that_is_not_repeated_is_exact_all_the_same_and_its_badge_says_so(memory):
    told = []
    found = outcomes([3, 4, 5], memory=memory, repeat=lambda step: step == 5, progress=lambda *what: told.append(what))
    assert [outcome.gates.repeatable.verdict for outcome in found] == ["unverified", "unverified", "exact"]
    assert found[0].gates.repeatable.explanation == "not repeated" and all(outcome.exact for outcome in found)
    assert [what for _, _, what in told if "again" in what] == ["step 5, again, for the repeatable badge"]
    assert [done for done, _, _ in told] == sorted(done for done, _, _ in told)
    assert {total for _, total, _ in told} == {told[-1][0]}  # each piece of work was counted
    for outcome, whole in zip(found, outcomes([3, 4, 5], memory=memory), strict=True):
        same_outcome(outcome, whole)
        assert outcome.updates == whole.updates and outcome.first_nonfinite is None


def test_without_evidence_nothing_is_called_exact(memory):
    (outcome,) = outcomes([2], memory=memory, evidence={})
    assert not outcome.exact and outcome.first_difference is None
    assert outcome.gates.faithful.verdict == "unverified"
    assert outcome.gates.repeatable.verdict == outcome.gates.sensitive.verdict == "exact"


@pytest.mark.parametrize("steps", [[], [3], [2, 3], [5, 4], [4, 4], range(5, 4)])
def test_steps_that_are_not_ascending_after_the_start_are_refused(memory, steps):
    with pytest.raises(ReplayError, match="state 3"):
        outcomes(steps, memory=memory, start=memory[0][3])


def test_a_sampler_that_runs_dry_is_named(memory):
    class Short(Points):
        def __next__(self):
            if self.number == 2:
                raise StopIteration
            return super().__next__()

    job = experiment()
    job.sampler = Short()
    with pytest.raises(ReplayError, match="the sampler ran out before step 3"):
        outcomes([4], memory=memory, job=job)


# ------------------------------------------------------------------------------------------------ evidence with one bit


def entries(evidence):
    for name, value in evidence.items():
        for entry in range(len(value)) if isinstance(value, list) else [0]:
            yield name, entry


def test_one_flipped_bit_of_any_recorded_item_turns_exactly_that_item_red(memory):
    recorded = memory[1]
    for name, entry in entries(recorded[4]):
        changed = recorded | {4: recorded[4] | {name: with_one_bit_flipped(recorded[4][name], entry)}}
        (outcome,) = outcomes([4], memory=memory, evidence=changed, with_probe=False)
        verdicts = {item: found.verdict for item, found in outcome.items.items()}
        assert verdicts == dict.fromkeys(ITEMS, "exact") | {name: "mismatch", "checkpoint": "unverified"}
        difference = outcome.first_difference
        assert (difference.step, difference.where, difference.item) == (4, "step", name)
        assert difference.consequences == []
        assert not outcome.exact and outcome.gates.faithful.verdict == "mismatch"
        assert outcome.gates.repeatable.verdict == outcome.gates.sensitive.verdict == "exact"
        if isinstance(recorded[4][name], list):
            assert f"first {memory[2][entry]}" in outcome.items[name].detail


@pytest.mark.parametrize(("steps", "where"), [([4], "roll-forward"), ([2, 4], "step"), ([3, 4], "roll-forward")])
def test_a_difference_on_the_way_is_found_at_its_own_step(memory, steps, where):
    recorded = memory[1]
    changed = recorded | {2: recorded[2] | {"loss": with_one_bit_flipped(recorded[2]["loss"])}}
    found = outcomes(steps, memory=memory, evidence=changed, with_probe=False)
    for outcome in found:
        difference = outcome.first_difference
        assert (difference.step, difference.item) == (2, "loss") and not outcome.exact
        assert difference.where == (where if outcome.step == 2 else "roll-forward")
        assert outcome.gates.faithful.verdict == "mismatch"
    last = found[-1]
    assert {item.verdict for name, item in last.items.items() if name != "checkpoint"} == {"exact"}


def test_a_step_that_logged_little_is_compared_on_that_little(memory):
    little = {4: {"loss": memory[1][4]["loss"]}}
    (outcome,) = outcomes([4], memory=memory, evidence=little)
    assert not outcome.exact and outcome.first_difference is None  # unverified: nothing is said of batch and state
    assert outcome.gates.faithful.verdict == "unverified"
    assert [name for name, item in outcome.items.items() if item.verdict == "exact"] == ["loss"]


def test_a_checkpoint_that_differs_in_one_bit_is_red_and_names_the_tensor(memory):
    state = memory[0][4]
    path = "layers.3.weight.v"
    other = State(
        4, state.weights, state.optimizer | {path: flipped(state.optimizer[path], element=7)}, state.rng, state.cursor
    )
    (outcome,) = outcomes([4], memory=memory, checkpoint=lambda step: other)
    assert outcome.first_difference.item == "checkpoint" and not outcome.exact
    assert path in outcome.items["checkpoint"].detail


# --------------------------------------------------------------------------------------------------- state with one bit


def alter(state, lane, bit=0):
    weights, optimizer, rng, cursor = state.weights, state.optimizer, state.rng, state.cursor
    path = "layers.0.weight"
    if lane == "weights":
        weights = weights | {path: flipped(weights[path], bit, element=5)}
    elif lane == "rng":
        rng = (rng[0] ^ 1, rng[1])
    elif lane == "cursor":
        cursor = {"number": cursor["number"] ^ 1}
    else:
        path = "step" if lane == "other" else f"{path}.{lane[-1]}"
        optimizer = optimizer | {path: flipped(optimizer[path], bit)}
    return State(state.step, weights, optimizer, rng, cursor)


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("step", [3, 5])
def test_one_bit_of_the_restored_state_is_the_first_difference(memory, lane, step):
    (outcome,) = outcomes([step], memory=memory, start=alter(memory[0][2], lane))
    difference = outcome.first_difference
    assert (difference.step, difference.where, difference.item) == (2, "restored state", f"state.{lane}")
    assert difference.consequences == []
    assert not outcome.exact and outcome.gates.repeatable.verdict == "exact"
    assert "restored state" in outcome.gates.faithful.explanation


CONSEQUENCES = {
    "weights": ["per_layer_act_norms", "loss"],
    "adam_m": ["adam_m_norms", "state.adam_m", "state.weights"],
    "adam_v": ["adam_v_norms", "state.adam_v", "state.weights"],
    "other": ["state.weights", "state.other"],
    "rng": ["state.rng"],
    "cursor": ["batch_hash", "per_layer_act_norms", "loss", "per_layer_grad_norms", "grad_norm", "state.cursor"],
}


@pytest.mark.parametrize("lane", LANES)
def test_where_the_run_logged_no_state_the_step_itself_shows_it(memory, lane):
    """A bit of the exponent, so that it must show in the very next step."""
    evidence = {step: logged for step, logged in memory[1].items() if step != 2}
    (outcome,) = outcomes([3], memory=memory, start=alter(memory[0][2], lane, bit=25), evidence=evidence)
    difference = outcome.first_difference
    assert (difference.step, difference.where) == (3, "step")
    red = [difference.item, *difference.consequences]
    assert red[0] == CONSEQUENCES[lane][0] and set(CONSEQUENCES[lane]) <= set(red)


# -------------------------------------------------------------------------------------------------------------- batches


class Flipping(Points):
    """One bit of one batch differs from the recorded stream."""

    def __init__(self, number):
        super().__init__()
        self.bad = number

    def __next__(self):
        x, y = super().__next__()
        if self.number == self.bad:
            x.view(np.uint32)[3, 1] ^= 1
        return x, y


@pytest.mark.parametrize(("bad", "where"), [(3, "roll-forward"), (5, "step")])
def test_one_bit_of_a_batch_is_the_first_difference(memory, bad, where):
    job = experiment()
    job.sampler = Flipping(bad)
    (outcome,) = outcomes([5], memory=memory, job=job)
    difference = outcome.first_difference
    assert (difference.step, difference.where, difference.item) == (bad, where, "batch_hash")
    assert "state.cursor" not in difference.consequences


def test_a_sampler_off_by_one_is_a_different_batch_and_cursor(memory):
    class Ahead(Points):
        def load_state_dict(self, cursor):
            self.number = cursor["number"] + 1

    job = experiment()
    job.sampler = Ahead()
    (outcome,) = outcomes([1], memory=memory, job=job, with_probe=False)
    assert outcome.first_difference.item == "batch_hash" and "state.cursor" in outcome.first_difference.consequences


# ----------------------------------------------------------------------------------------------------------- repeatable


@pytest.mark.parametrize("when", ["always", "only when repeated"])
def test_a_loss_that_depends_on_a_counter_is_not_repeatable(memory, when):
    calls = []

    def counting(model, x, y):
        calls.append(1)
        return mse(model, x, y) * (1 + 1e-6 * len(calls) if when == "always" else 1 + 1e-6 * (len(calls) > 2))

    (outcome,) = outcomes([2], memory=memory, job=experiment(loss_fn=counting), with_probe=False)
    assert outcome.gates.repeatable.verdict == "mismatch"
    assert "loss" in outcome.gates.repeatable.explanation
    assert outcome.exact == (when != "always")  # faithful and repeatable are separate badges


def test_a_probe_of_a_loss_that_changes_is_not_certified(memory):
    calls = []

    def counting(model, x, y):
        calls.append(1)
        return mse(model, x, y) * (1 + 1e-6 * (len(calls) > 3))

    (outcome,) = outcomes([2], memory=memory, job=experiment(loss_fn=counting))
    assert outcome.exact and outcome.gates.repeatable.verdict == "exact" and not outcome.probe.certified


def test_random_numbers_from_outside_the_recorded_state_are_not_repeatable(memory):
    stream = np.random.default_rng(0)

    def noisy(model, x, y):
        return mse(model, x + mx.array(stream.normal(), dtype=mx.float32), y)

    (outcome,) = outcomes([2], memory=memory, job=experiment(loss_fn=noisy), with_probe=False)
    assert outcome.gates.repeatable.verdict == outcome.gates.faithful.verdict == "mismatch"


def test_a_cursor_that_the_sampler_goes_on_changing_does_not_spoil_the_repeat(memory):
    class Live(Points):
        def __init__(self):
            super().__init__()
            self.cursor = {"place": {"number": 0}, "pair": (1, 2)}  # JSON has no tuples

        def __next__(self):
            self.number = self.cursor["place"]["number"]
            batch = super().__next__()
            self.cursor["place"]["number"] += 1
            return batch

        def state_dict(self):
            return self.cursor

        def load_state_dict(self, cursor):
            self.cursor = cursor | {"pair": tuple(cursor["pair"])}

    def make():
        job = experiment()
        job.sampler = Live()
        return job

    states, evidence, layers = remembered(make(), 4)
    found = outcomes([2, 4], memory=(states, evidence, layers), job=make(), checkpoint=lambda step: states[step])
    assert all(outcome.exact and outcome.gates.repeatable.verdict == "exact" for outcome in found)


# ------------------------------------------------------------------------------------------------------------- progress


@pytest.mark.parametrize("with_probe", [True, False])
@pytest.mark.parametrize("steps", [[4], [2, 5], range(1, 5)])
def test_progress_counts_up_to_the_total(memory, steps, with_probe):
    calls = []
    outcomes(steps, memory=memory, with_probe=with_probe, progress=lambda *call: calls.append(call))
    done = [call[0] for call in calls]
    assert done == sorted(done) and done[0] == 0
    assert {call[1] for call in calls} == {done[-1]}
    assert all(isinstance(call[2], str) and call[2] for call in calls)


class Cancel(Exception):
    pass


@pytest.fixture
def run(tmp_path):
    """A recorded run of 12 steps with checkpoints at 0, 5, 10 and 12."""
    with Recorder(tmp_path / "run", *parts(experiment()), compile=False, save_every=5) as recorder:
        for batch in recorder.batches(12):
            recorder.step(batch)
    return open_run(tmp_path / "run")


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


# ------------------------------------------------------------------------------------------------------ threads, memory


def test_another_thread_gives_the_same_bits(memory):
    found = []

    def work():
        job = experiment(dropout=0.0)
        found.extend(outcomes([3, 5], memory=memory, job=job))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(found) == 2 and all(outcome.exact and outcome.probe.certified for outcome in found)
    for outcome, own in zip(found, outcomes([3, 5], memory=memory), strict=True):
        same_outcome(outcome, own)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_another_thread_draws_the_recorded_random_numbers(compiled):
    """A new thread has a random state of its own, and a compiled step must use it."""
    memory = remembered(experiment(dropout=0.3, compile=compiled), 4)
    job, found = experiment(dropout=0.3, compile=compiled), []
    before = mx.random.state[0].tolist()
    thread = threading.Thread(target=lambda: found.extend(outcomes([2, 4], memory=memory, job=job)))
    thread.start()
    thread.join()
    assert [outcome.exact for outcome in found] == [True, True]
    assert mx.random.state[0].tolist() == before  # of this thread


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


# ---------------------------------------------------------------------------------------------- what a run folder holds


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
    assert "recorded nan (0x7fc00000)" in trace.record.first_difference.detail


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
