"""What a loop changes in the state between two steps, without a word: refused at once, or gone on from exactly, or
marked so that a replay refuses it by name; and what is no change is none."""

import contextlib
import re
import warnings
from copy import copy

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from helpers import Points, mlp, mse
from mlx.utils import tree_flatten, tree_map

import workbench as wb
from workbench.errors import ChangedByHand, ExperimentError, TelemetryError
from workbench.lines.line import Edits
from workbench.observe import edit
from workbench.recording import by_hand
from workbench.recording.array_identity import identities

AT = 5  # the step after which the loop changes something


def build(optimizer=None, frozen=False, **options):
    model = mlp(0.2)
    if frozen:
        model.layers[0].freeze()
    optimizer = optimizer() if optimizer else optim.AdamW(1e-2)
    return wb.Experiment(model, optimizer, mse, Points(), wb.StepOptions(compile=False, **options))


def two():
    return optim.MultiOptimizer([optim.AdamW(1e-2), optim.SGD(1e-2, momentum=0.9)], [lambda path, _: "bias" in path])


def record(path, change, *, steps=10, when=lambda step: step == AT, job=None, compiled=False, **settings):
    """Records; `change(experiment)` is called after each step for which `when` holds. Returns the run and warnings."""
    job = job or build()
    settings = {"save_every": 4, "spikes": None} | settings
    parts = (job.model, job.optimizer, job.loss_fn, job.sampler)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with wb.Recorder(path, *parts, compile=compiled, extra=job.extra, **settings) as recorder:
            for batch in recorder.batches(steps):
                recorder.step(batch)
                if when(recorder.step_number):
                    change(job)
    return wb.open_run(path), [str(one.message) for one in said]


def again(job=None, compiled=False):
    job = job or build()
    job.options = wb.StepOptions(compile=compiled)
    return job


def exact(run, steps, job=build, compiled=False):
    for step in steps:
        trace = run.replay(step, experiment=again(job(), compiled), with_probe=False)
        assert trace.exact, trace.sentence()


def halve(job):
    job.model.layers[0].weight = job.model.layers[0].weight * 0.5


def scale_in_place(job):
    job.model.layers[0].weight *= 0.5  # the same Python object afterwards


def assign_in_place(job):
    job.model.layers[3].bias[...] = 0.25


def forget_moments(job):
    state = job.optimizer.state["layers"][3]["weight"]
    state["v"] = mx.zeros_like(state["v"])


def count_back(job):
    job.optimizer.state["step"] = job.optimizer.state["step"] * 0


def load(job):
    job.model.load_weights([(path, array + 1) for path, array in tree_flatten(job.model.parameters())])


CHANGES = {
    "layers.0.weight": halve,
    "layers.0.weight ": scale_in_place,
    "layers.3.bias": assign_in_place,
    "layers.3.weight.v of the optimizer's state": forget_moments,
    "step of the optimizer's state": count_back,
    "layers.0.bias": load,
}


# --------------------------------------------------------------------------------------------------------- is noticed


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_gone_on_from_exactly(tmp_path, name, compiled):
    run, said = record(tmp_path / "run", CHANGES[name], compiled=compiled)
    (sentence,) = said
    assert sentence.startswith(f"{name.strip()} was changed between steps {AT} and {AT + 1}, outside of the step. ")
    assert "recorder.open_segment()" in sentence and "segment 1 starts" in sentence
    assert [(entry.start, entry.parent) for entry in run.manifest.segments] == [(0, None), (AT, 0)]
    assert (AT, 1) in run.checkpoints
    exact(run, (AT, AT + 1, 10), compiled=compiled)


@pytest.mark.parametrize("name", CHANGES)
def test_nothing_is_lost_yet_after_the_first_step(tmp_path, name):
    words = rf"^{name.strip()} was changed between steps 1 and 2, outside of the step.*inside step_fn.*open_segment\(\)"
    with pytest.raises(ExperimentError, match=words):
        record(tmp_path / "run", CHANGES[name], when=lambda step: True)
    assert wb.open_run(tmp_path / "run").last_step == 1


def test_the_loop_may_call_open_segment_at_every_step(tmp_path):
    job = build()
    with wb.Recorder(tmp_path / "run", job.model, job.optimizer, mse, job.sampler, compile=False) as recorder:
        for batch in recorder.batches(4):
            recorder.step(batch)
            halve(job)
            recorder.open_segment()
    exact(wb.open_run(tmp_path / "run"), (1, 2, 3, 4))


@pytest.mark.parametrize("frozen", [False, True])
def test_several_optimizers_and_frozen_parts(tmp_path, frozen):
    def make():
        return build(two, frozen)

    def change(job):
        job.model.layers[0].weight = job.model.layers[0].weight + 1  # the frozen one

    run, (sentence,) = record(tmp_path / "run", change, job=make())
    assert sentence.startswith("layers.0.weight was changed")
    exact(run, (AT, AT + 1, 10), make)

    def moments(job):
        state = job.optimizer.state["states"][0]["layers"][3]["bias"]
        state["m"] = state["m"] + 1

    run, (sentence,) = record(tmp_path / "other", moments, job=make())
    assert sentence.startswith("states.0.layers.3.bias.m of the optimizer's state was changed")
    exact(run, (AT, AT + 1, 10), make)


def test_extra_state_of_either_kind(tmp_path):
    class Scale:
        value = 1.0

        def state_dict(self):
            return {"value": self.value}

        def load_state_dict(self, state):
            self.value = state["value"]

    def make():
        job = build()
        job.extra = {"ema": {"rate": mx.zeros(3)}, "scale": Scale()}
        return job

    def average(job):
        job.extra["ema"]["rate"] = job.extra["ema"]["rate"] + 1

    def scale(job):
        job.extra["scale"].value *= 2

    for change, name in ((average, "rate of extra 'ema'"), (scale, "json of extra 'scale'")):
        run, (sentence,) = record(tmp_path / name.split()[0], change, job=make())
        assert sentence.startswith(f"{name} was changed between steps 5 and 6")
        exact(run, (AT, AT + 1, 10), make)
    assert record(tmp_path / "calm", lambda job: None, job=make())[1] == []


def test_a_validation_in_training_mode_changes_running_statistics(tmp_path):
    def make():
        mx.random.seed(2)
        job = build()
        job.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm(8), nn.Linear(8, 1))
        return job

    def validate(job):
        mse(job.model, *map(mx.array, next(Points())))

    run, (sentence,) = record(tmp_path / "run", validate, job=make())
    assert "layers.1.running_mean was changed" in sentence and "model.eval() and model.train()" in sentence
    exact(run, (AT + 1, 10), make)

    def rightly(job):
        job.model.eval()
        validate(job)
        job.model.train()

    run, said = record(tmp_path / "other", rightly, job=make(), when=lambda step: True)
    assert said == [] and len(run.manifest.segments) == 1
    exact(run, (AT, 10), make)


# ------------------------------------------------------------------------------------------------------ is no change


def swap_and_back(job):
    kept = job.model.parameters()
    job.model.update(tree_map(lambda array: array * 0.9, job.model.parameters()))
    mx.eval(job.model.parameters())
    job.model.update(kept)


def copies(job):
    job.model.update(tree_map(lambda array: mx.array(array), job.model.parameters()))


def rate(job):
    job.optimizer.learning_rate = 5e-3


def seed(job):
    mx.random.seed(99)


def gradients(job):
    mx.eval(nn.value_and_grad(job.model, mse)(job.model, *map(mx.array, next(Points()))))


SILENT = {
    "evaluate": lambda job: mx.eval(job.model.parameters(), job.optimizer.state),
    "modes": lambda job: (job.model.eval(), job.model.train()),
    "swap": swap_and_back,
    "same bits": copies,
    "rate": rate,
    "rate of 0": lambda job: setattr(job.optimizer, "learning_rate", 0),
    "another layer like the one before": lambda job: job.model.layers.__setitem__(2, nn.Tanh()),
    "seed": seed,
    "gradients": gradients,
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", SILENT)
def test_what_leaves_the_bits_is_silent_and_exact(tmp_path, name, compiled):
    if compiled and "layer" in name:
        pytest.skip("a compiled step goes on with the containers that it saw, so that others are refused")
    run, said = record(tmp_path / "run", SILENT[name], when=lambda step: True, compiled=compiled)
    assert said == [] and len(run.manifest.segments) == 1
    exact(run, (AT, AT + 1, 10), compiled=compiled)


def test_a_handle_tells_its_array_from_every_other():
    one = mx.array([1.0, 2.0])
    same, scaled, assigned = copy(one), copy(one), copy(one)
    scaled *= 1
    assigned[0] = 1.0
    first, alike, *others = identities([one, same, scaled, assigned, mx.array([1.0, 2.0])])
    assert first == alike and first not in others and len(set(others)) == 3
    mx.eval(one, scaled)
    assert identities([one, scaled]) == [first, others[0]]


def test_without_identities_bits_are_compared(tmp_path, monkeypatch):
    monkeypatch.setattr(by_hand, "identities", lambda handles: None)
    run, said = record(tmp_path / "run", scale_in_place)
    assert len(said) == 1 and len(run.manifest.segments) == 2
    exact(run, (AT + 1,))
    assert record(tmp_path / "calm", SILENT["swap"])[1] == []


# --------------------------------------------------------------------------------------------- too often, or not saved


@pytest.fixture(scope="module")
def projected(tmp_path_factory):
    """Weights are changed after each step, recorded without the check that refuses that: 12 steps, from step 2 on."""
    path = tmp_path_factory.mktemp("projected") / "run"
    return record(path, halve, steps=12, when=lambda step: step >= 2, self_check=False)


def test_a_change_at_every_step_costs_few_checkpoints_and_few_words(projected):
    run, said = projected
    assert [entry.start for entry in run.manifest.segments] == [0, 2, 6, 10]
    assert len(said) == by_hand.TOLD and said[-1].endswith("; further changes are noted in the telemetry only")
    assert "no checkpoint holds the changed state" in said[1] and "from step 4 to the next checkpoint" in said[1]
    marks = {line.step: line.before.by_hand for line in run.telemetry.lines if line.type == "step" and line.before}
    assert {step for step, name in marks.items() if name} == {4, 5, 6, 8, 9, 10, 12}


def test_what_no_checkpoint_holds_is_refused_by_name_and_the_rest_is_exact(projected):
    run, _ = projected
    exact(run, (1, 2, 3, 7, 11))
    words = r"step 4 of run can't be replayed: before step 4 the loop changed layers\.0\.weight, .*\(step 3 can be\)"
    with pytest.raises(ChangedByHand, match=words):
        run.replay(4, experiment=again(), with_probe=False)
    with pytest.raises(ChangedByHand, match=r"before step 8 the loop .* \(step 7 can be\)"):
        run.replay(range(7, 10), experiment=again(), with_probe=False)


def test_verify_and_sweeps_say_so_too(projected):
    run, _ = projected
    found = run.verify(replay=12, experiment=again())
    steps = {check.what.split(",")[0]: check for check in found.checks if check.kind == "step"}
    assert {int(step) for step, check in steps.items() if check.verdict == "exact"} == {1, 2, 3, 7, 11}
    assert all("before step" in check.detail for check in steps.values() if check.verdict != "exact")
    assert {check.verdict for check in steps.values()} == {"exact", "unverified"}


def test_a_full_disk_ends_no_training(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    with contextlib.ExitStack() as stack:

        def change(job):
            halve(job)
            patch = stack.enter_context(monkeypatch.context())
            patch.setattr("workbench.manifest.write_atomic", full)

        run, said = record(tmp_path / "run", change, when=lambda step: step == AT, steps=7)
    assert "no checkpoint holds the changed state" in said[0]
    with pytest.raises(ChangedByHand, match="before step 6"):
        run.replay(7, experiment=again(), with_probe=False)
    exact(run, (AT,))


def test_a_loop_that_goes_on_after_a_step_was_cut_off(tmp_path):
    """What the half step left is no state of the run; it is gone on from as from any other change."""
    job = build()
    update, cut = job.optimizer.apply_gradients, [AT]

    def failing(gradients, parameters):
        found = update(gradients, parameters)
        if cut and int(job.optimizer.step.item()) == cut[0] + 1:
            cut.pop()
            raise MemoryError
        return found

    with wb.Recorder(tmp_path / "run", job.model, job.optimizer, mse, compile=False, save_every=4) as recorder:
        batches = [next(job.sampler) for _ in range(12)]
        for batch in batches[:AT]:
            recorder.step(batch)
        job.optimizer.apply_gradients = failing
        with pytest.raises(MemoryError):
            recorder.step(batches[AT])
        with pytest.warns(UserWarning, match=f"was changed between steps {AT} and {AT + 1}"):
            recorder.step(batches[AT + 1])
    plain = wb.Experiment(again().model, again().optimizer, mse, options=wb.StepOptions(compile=False))
    trace = wb.open_run(tmp_path / "run").replay(AT + 1, experiment=plain, with_probe=False)
    assert trace.exact, trace.sentence()


# ------------------------------------------------------------------------------------ a learning rate of another form

FORMS = {
    "integer": 0,
    "float16": mx.array(0.5e-2, mx.float16),
    "bfloat16": mx.array(0.5e-2, mx.bfloat16),
    "of one entry": mx.full((1,), 0.5e-2),
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", FORMS)
def test_a_learning_rate_of_another_form_is_set_by_the_replay_too(tmp_path, name, compiled):
    def change(job):
        job.optimizer.learning_rate = FORMS[name]

    run, said = record(tmp_path / "run", change, compiled=compiled)
    assert said == []
    exact(run, (AT, AT + 1, 9, 10), compiled=compiled)  # 9: from a checkpoint that holds it


def test_and_back_to_a_number_of_the_same_bits(tmp_path):
    def change(job):
        job.optimizer.learning_rate = 0 if job.optimizer.learning_rate.dtype == mx.float32 else 0.0

    run, said = record(tmp_path / "run", change, when=lambda step: step in (3, 6))
    assert said == []
    exact(run, (4, 7, 10))
    assert [step for step in range(1, 11) if (edits := run.edits(step, 0)) and edits.learning_rate] == [4, 7]


def test_of_a_member_and_after_a_resume(tmp_path):
    def change(job):
        job.optimizer.optimizers[1].learning_rate = 1

    run, said = record(tmp_path / "run", change, job=build(two))
    assert said == []
    job = build(two)
    with wb.Recorder(
        run.path, job.model, job.optimizer, mse, job.sampler, compile=False, resume=True, save_every=4, spikes=None
    ) as recorder:
        for batch in recorder.batches(12):
            recorder.step(batch)
    exact(wb.open_run(run.path), (AT + 1, 10, 12), lambda: build(two))


def test_a_learning_rate_of_many_entries_is_a_change_as_any_other(tmp_path):
    def change(job):
        job.optimizer.state["learning_rate"] = mx.full((100, 1), 1e-2)

    with pytest.raises(ExperimentError, match=r"learning_rate of .* \(from float32\(\) to float32\(100, 1\)\)"):
        record(tmp_path / "run", change, when=lambda step: step == 1)


def test_bytes_that_are_no_rate_are_named():
    edits = Edits(learning_rate=[None], rate_arrays=[("I32", [2], "00")])
    with pytest.raises(TelemetryError, match=r"'I32' and shape \[2\], which can't be made of the bytes '00'"):
        edit(build(), edits)


# ------------------------------------------------------------------------------------- what no checkpoint can give back


class Doubled(nn.Linear):
    def __call__(self, x):
        return 2 * super().__call__(x)


def doubled(job):
    layer = Doubled(4, 8)
    layer.weight, layer.bias = job.model.layers[0].weight, job.model.layers[0].bias
    job.model.layers[0] = layer


def stronger(job):
    job.model.layers[1] = nn.Dropout(0.5)


LAYERS = {
    "layers.2 (a Tanh before, a ReLU now)": lambda job: job.model.layers.__setitem__(2, nn.ReLU()),
    "layers.0 (a Linear before, a Doubled now)": doubled,
    "layers.0 (a Linear before, a Doubled now) ": lambda job: setattr(job.model.layers[0], "__class__", Doubled),
    "layers.1 (another Dropout, whose _p_1 is another)": stronger,
}


@pytest.mark.parametrize("name", LAYERS)
def test_another_layer_is_told_of_and_named_by_every_replay(tmp_path, name):
    run, said = record(tmp_path / "run", LAYERS[name])
    name = name.strip()
    (sentence,) = [one for one in said if "outside of the step" in one]
    assert sentence.startswith(f"{name} was changed between steps {AT} and {AT + 1}")
    assert len(run.manifest.segments) == 1
    exact(run, (1, AT))
    words = rf"before step 6 the loop changed {re.escape(name)}, .*no checkpoint can hold that.*\(step 5 can be\)$"
    with pytest.raises(ChangedByHand, match=words):
        run.replay(AT + 2, experiment=again(), with_probe=False)
    trace = run.replay(10, experiment=again(), with_probe=False)
    assert not trace.exact and name in trace.sentence() + " ".join(trace.notices)


@pytest.mark.parametrize("name", LAYERS)
def test_another_layer_is_refused_after_the_first_step(tmp_path, name):
    with pytest.raises(ExperimentError, match=rf"^{re.escape(name.strip())} was changed.*Build it so before"):
        record(tmp_path / "run", LAYERS[name], when=lambda step: step == 1)


def test_open_segment_can_not_hold_another_layer_either(tmp_path):
    job = build()
    with wb.Recorder(tmp_path / "run", job.model, job.optimizer, mse, job.sampler, compile=False) as recorder:
        for batch in recorder.batches(4):
            recorder.step(batch)
            if recorder.step_number == 2:
                job.model.layers[2] = nn.ReLU()
                with pytest.warns(UserWarning, match="a Tanh before, a ReLU now.*no checkpoint can hold that"):
                    recorder.open_segment()
    trace = wb.open_run(tmp_path / "run").replay(4, experiment=again(), with_probe=False)
    assert not trace.exact and "a Tanh before, a ReLU now" in trace.sentence() + " ".join(trace.notices)


FORMED = {
    "lr2 of the optimizer's state (which is new)": lambda job: job.optimizer.state.update(lr2=mx.array(1.0)),
    "layers.0.bias (from float32(8,) to bfloat16(8,))": lambda job: job.model.layers[0].update(
        {"bias": job.model.layers[0].bias.astype(mx.bfloat16)}
    ),
}


@pytest.mark.parametrize("name", FORMED)
def test_an_array_that_no_new_experiment_has_is_promised_to_none(tmp_path, name):
    run, said = record(tmp_path / "run", FORMED[name])
    assert said[0].startswith(f"{name} was changed between") and "exactly" not in said[0]
    exact(run, (1, AT))
    with pytest.raises(ChangedByHand, match=f"before step 6 the loop changed {re.escape(name)}"):
        run.replay(AT + 1, experiment=again(), with_probe=False)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.act = nn.Linear(4, 8), nn.Linear(8, 1), nn.relu

    def __call__(self, x):
        return self.two(self.act(self.one(x)))


def functional():
    mx.random.seed(1)
    return wb.Experiment(Net(), optim.AdamW(1e-2), mse, Points(), wb.StepOptions(compile=False))


def test_another_function_of_a_layer_is_another_layer(tmp_path):
    def change(job):
        job.model.act = nn.gelu

    run, said = record(tmp_path / "run", change, job=functional())
    assert said[0].startswith("act (another function) was changed between steps 5 and 6")
    exact(run, (AT,), functional)
    with pytest.raises(ChangedByHand, match=r"changed act \(another function\)"):
        run.replay(AT + 1, experiment=again(functional()), with_probe=False)


def test_a_function_that_is_made_anew_is_no_other(tmp_path):
    def make():
        return lambda x: mx.maximum(x, 0)

    def change(job):
        job.model.act = make()

    def begin():
        job = functional()
        change(job)
        return job

    run, said = record(tmp_path / "run", change, job=begin(), when=lambda step: True)
    assert said == []
    exact(run, (AT, 10), begin)
