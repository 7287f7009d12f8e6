"""Situations that users met with MLX itself, an experiment each: group M of the cases."""

import gc
import os
import runpy
import sys

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import models
import numpy as np
import pytest
from helpers import Points, experiment, mlp, mse, parts

import workbench as wb
from workbench.errors import ExperimentError, ReplayError

# M1: no mx.eval, so memory grows.

ROWS = 2000  # of a batch: so that a batch and its activations are most of the memory, and a graph that is kept shows

NOISE = 2  # a peak depends on when MLX's threads let go of arrays; one batch kept each time would be more than this

HERE = {"with_probe": False, "fresh_process": False}  # and nothing in another process, whose memory is its own


def job(**changed):
    return experiment(dropout=0.2, rows=ROWS, **changed)


@pytest.fixture(scope="module")
def long_run(tmp_path_factory):
    one = job()
    with wb.Recorder(
        tmp_path_factory.mktemp("m1") / "run", *parts(one), compile=False, save_every=0, spikes=None
    ) as recorder:
        for batch in recorder.batches(60):
            recorder.step(batch)
    return wb.open_run(recorder.path)


@pytest.fixture
def without_collector():
    """Nothing here may need Python's search for circles: it counts objects, and knows nothing of the size of arrays."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def peak_of(act):
    """Bytes of arrays: the most there were while it acted, and how many more there are after it."""
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    act()
    return mx.get_peak_memory() - before, mx.get_active_memory() - before


def test_m1_peak_memory_is_flat_over_50_replays(long_run, tmp_path, without_collector):
    def replay():
        assert long_run.replay(3, experiment=job(), trace_dir=tmp_path, **HERE).exact

    peaks, left = (np.array(column) for column in zip(*(peak_of(replay) for _ in range(50)), strict=True))
    assert peaks[5:].max() <= NOISE * peaks[:5].max()
    assert left[1:].max() < ROWS  # not even one array of the batch's length


def test_m1_what_a_probe_keeps_is_found_again(long_run, tmp_path):
    def replay():
        assert long_run.replay(3, experiment=job(), trace_dir=tmp_path, fresh_process=False).exact
        gc.collect()

    peaks, left = (np.array(column) for column in zip(*(peak_of(replay) for _ in range(10)), strict=True))
    assert peaks[3:].max() <= NOISE * peaks[:3].max() and left[1:].max() < ROWS


def test_m1_a_long_roll_forward_takes_no_more_memory_than_a_short_one(long_run, tmp_path, without_collector):
    def replay(step):
        assert long_run.replay(step, experiment=job(), trace_dir=tmp_path, **HERE).exact

    short, long = (peak_of(lambda step=step: replay(step))[0] for step in (3, 60))
    assert long <= NOISE * short


WIDE = 3000  # units, so that a state outweighs all else here

SCRIPT = f"""
import mlx.core as mx
import mlx.nn as nn
import helpers
import workbench as wb

def wide():
    return nn.Sequential(nn.Linear(4, {WIDE}), nn.Tanh(), nn.Linear({WIDE}, 1))

mx.random.seed(3)
one = helpers.experiment(model=wide())
with wb.Recorder(OUT, *helpers.parts(one), compile=False, save_every=4, spikes=None) as recorder:
    for batch in recorder.batches(8):
        recorder.step(batch)
"""

ASKED = {
    "replay": lambda run, by: run.replay(6, factory=by, **HERE),
    "autopsy": lambda run, by: run.autopsy(6, factory=by),
    "whatif": lambda run, by: run.whatif(6, "lr=0.5x", factory=by, next_steps=1),
    "diverge": lambda run, by: run.diverge(6, factory=by, rungs=["same process"]),
    "resumption": lambda run, by: run.resumption(4, factory=by),
}


@pytest.fixture(scope="module")
def scripted(tmp_path_factory):
    """A run that a script recorded, and the script: its names and functions hold each other, and so its model."""
    folder = tmp_path_factory.mktemp("m1-script")
    script = folder / "loop.py"
    script.write_text(
        f"import sys\nsys.path.append({os.path.dirname(__file__)!r})\nOUT = {str(folder / 'run')!r}\n{SCRIPT}"
    )
    runpy.run_path(str(script))
    return wb.open_run(folder / "run"), str(script)


@pytest.mark.parametrize("asked", ASKED)
def test_m1_whatever_is_asked_again_keeps_no_state_of_the_time_before(scripted, without_collector, asked):
    levels = []
    for _ in range(4):
        ASKED[asked](*scripted)
        levels.append(mx.get_active_memory())
    assert max(levels[1:]) - levels[0] < 4 * WIDE  # one bias of the model


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_m1_recording_keeps_nothing_of_the_steps_before(tmp_path, without_collector, compiled):
    one = job(compile=compiled)
    levels = []
    with wb.Recorder(
        tmp_path / "run", *parts(one), compile=compiled, save_every=0, black_box=0, spikes=None
    ) as recorder:
        for batch in recorder.batches(40):
            recorder.step(batch)
            levels.append(mx.get_active_memory())
    assert max(levels[3:]) - min(levels[3:]) < ROWS


def test_m1_the_measure_sees_a_graph_that_is_kept():
    model = mlp()
    batch = [mx.array(array) for array in next(Points(ROWS))]
    mx.eval(batch)

    def total(count):
        mx.eval(sum(mse(model, *batch) for _ in range(count)))  # never evaluated one by one

    assert peak_of(lambda: total(40))[0] > 2 * peak_of(lambda: total(1))[0]


# M2: layers kept in a custom list are invisible to parameters().


class Layers:
    """A container of one's own."""

    def __init__(self, *layers):
        self.layers = layers


class Hidden(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.rest = Layers(nn.Linear(8, 8), nn.Linear(8, 1))

    def __call__(self, x):
        for layer in (self.first, *self.rest.layers):
            x = layer(x)
        return x


def test_m2_arrays_outside_parameters_are_counted_and_named(tmp_path):
    one = experiment(model=Hidden())
    with wb.Recorder(tmp_path / "run", *parts(one), compile=False) as recorder:
        with pytest.warns(UserWarning, match=r"4 arrays .*reachable.* not in parameters\(\).*rest\.layers"):
            for batch in recorder.batches(2):
                recorder.step(batch)


# M3: a Python float that changes every step recompiles the step.


def test_m3_a_rate_that_changes_every_step_recompiles_no_replay(tmp_path):
    """Recording: `test_known_cases`. A replay rolls forward with the rates that the loop had set."""
    traced = []

    def loss_fn(model, x, y):
        traced.append(1)
        return mse(model, x, y)

    def build():
        return wb.Experiment(mlp(), optim.AdamW(1e-2), loss_fn, Points())

    one = build()
    with wb.Recorder(tmp_path / "run", *parts(one), save_every=0, spikes=None) as recorder:
        for batch in recorder.batches(40):
            one.optimizer.learning_rate = 1e-2 / (1 + recorder.step_number)
            recorder.step(batch)
    run = wb.open_run(tmp_path / "run")
    counts = []
    for step in (2, 40):
        traced.clear()
        assert run.replay(step, experiment=build(), with_probe=False).exact
        counts.append(len(traced))
    assert counts[0] == counts[1]


# M4: hyperparameters come from the run, not from defaults, or the replay refuses.


@pytest.mark.parametrize(
    ("recorded", "defaults", "named"),
    [
        (optim.Adam(1e-2, bias_correction=True), optim.Adam(1e-2), "bias_correction"),
        (optim.AdamW(1e-2, betas=[0.8, 0.9]), optim.AdamW(1e-2), "betas"),
        (optim.Adam(1e-2, eps=1e-6), optim.Adam(1e-2), "eps"),
        (optim.SGD(1e-2, momentum=0.9, nesterov=True), optim.SGD(1e-2, momentum=0.9), "nesterov"),
        (optim.Adam(optim.cosine_decay(1e-2, 50)), optim.Adam(1e-2), "schedules"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_m4_a_setting_left_to_its_default_is_refused_by_name(tmp_path, recorded, defaults, named):
    with wb.Recorder(tmp_path / "run", mlp(), recorded, mse, Points(), compile=False) as recorder:
        for batch in recorder.batches(2):
            recorder.step(batch)
    other = wb.Experiment(mlp(), defaults, mse, Points(), wb.StepOptions(compile=False))
    with pytest.raises(ExperimentError, match=named):
        wb.open_run(tmp_path / "run").replay(2, experiment=other)


def test_m4_another_schedule_is_no_exact_replay_and_the_rate_is_named(tmp_path):
    """A function can't be compared with another; what it gave is in the telemetry."""

    def build(steps):
        return wb.Experiment(
            mlp(), optim.Adam(optim.cosine_decay(1e-2, steps)), mse, Points(), wb.StepOptions(compile=False)
        )

    run = record(tmp_path / "run", build(50))
    assert run.replay(3, experiment=build(50)).exact
    trace = run.replay(3, experiment=build(60))
    assert not trace.exact and trace.record.items["lr"].verdict == "mismatch"


# M5: instrument, trace, remove: class attributes are identical to before, twice in a row.


def attributes():
    """Every attribute of every class and function of MLX, by identity; and what is replaced while a step is probed."""
    found = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] != "mlx" or module is None:
            continue
        for key, value in list(vars(module).items()):
            found[name, key] = value
            if isinstance(value, type) and value.__module__.startswith("mlx"):
                found |= {(name, key, inner): one for inner, one in list(vars(value).items())}
    return found


def unlike(before, after):
    return sorted(
        key for key in before.keys() | after.keys() if key not in before or before[key] is not after.get(key, before)
    )


def record(path, one, steps=3, **recording):
    with wb.Recorder(path, *parts(one), compile=one.options.compile, save_every=1, **recording) as recorder:
        for batch in recorder.batches(steps):
            recorder.step(batch)
    return wb.open_run(path)


@pytest.mark.parametrize("name", ["gpt", "mlp"])
def test_m5_whatever_is_asked_of_a_step_leaves_mlx_as_it_was_twice_in_a_row(tmp_path, name):
    def build():
        return experiment() if name == "mlp" else models.job(clip=None)

    run = record(tmp_path / "run", build())
    one = build()
    before, classes = attributes(), models.classes_of(one.model)
    assert len(before) > 1000
    for _ in range(2):
        assert run.replay(3, experiment=one, trace_dir=tmp_path).exact
        assert unlike(before, attributes()) == [] and models.classes_of(one.model) == classes
        run.context(3, before=2, experiment=one, trace_dir=tmp_path)
        run.whatif(3, "lr=0.5x", experiment=one, next_steps=1, trace_dir=tmp_path)
        assert unlike(before, attributes()) == [] and models.classes_of(one.model) == classes


class Interrupted(Exception):
    pass


def test_m5_a_replay_that_breaks_off_leaves_mlx_as_it_was_too(tmp_path):
    calls = []

    class Fragile(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = mlp()
            self.fails_at = None

        def __call__(self, x):
            calls.append(1)
            if self.fails_at is not None and len(calls) == self.fails_at:
                raise Interrupted
            return self.inner(x)

    run = record(tmp_path / "run", experiment(model=Fragile()), self_check=False, ignore=("calls",))
    one = experiment(model=Fragile())
    calls.clear()
    assert run.replay(3, experiment=one, trace_dir=tmp_path).exact
    whole = len(calls)
    before, classes = attributes(), models.classes_of(one.model)
    assert whole > 2
    for place in range(1, whole + 1):  # in each pass: the exact ones, and those that are instrumented
        one = experiment(model=Fragile())
        calls.clear()
        one.model.fails_at = place
        with pytest.raises(ReplayError, match="raised Interrupted"):
            run.replay(3, experiment=one, trace_dir=tmp_path)
        assert unlike(before, attributes()) == [] and models.classes_of(one.model) == classes


def test_m5_the_comparison_sees_what_is_left_behind(monkeypatch):
    before = attributes()
    monkeypatch.setattr(nn.Linear, "__call__", lambda self, x: x)
    assert ("mlx.nn", "Linear", "__call__") in unlike(before, attributes())
    monkeypatch.undo()
    monkeypatch.setattr(nn.Dropout, "mark", 1, raising=False)
    assert ("mlx.nn", "Dropout", "mark") in unlike(before, attributes())
    monkeypatch.undo()
    assert unlike(before, attributes()) == []
