"""A step function of the user's own, and state that it keeps beside model and optimizer: replayed, or refused."""

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from helpers import Points, mlp, mse
from mlx.utils import tree_flatten, tree_map

import workbench as wb
from workbench.errors import ExperimentError, WorkbenchError

# ------------------------------------------------------------------------------------------- what users write


class Job:
    """A loop's parts: model, optimizer, loss, sampler, and what is beside them."""

    def __init__(self, loss_fn=mse):
        self.model, self.optimizer, self.loss_fn, self.sampler = mlp(0.1), optim.AdamW(1e-2), loss_fn, Points()
        self.passes = nn.value_and_grad(self.model, self.loss_fn)
        self.extra = {}

    def parts(self):
        return self.model, self.optimizer, self.loss_fn, self.sampler

    def options(self):
        return {"step_fn": self.step, "extra": self.extra}


class Clipped(Job):
    def step(self, x, y):
        loss, gradients = self.passes(self.model, x, y)
        gradients, _ = optim.clip_grad_norm(gradients, 0.5)
        self.optimizer.update(self.model, gradients)
        return loss


class Averaged(Job):
    """An exponential moving average of the weights, as a module."""

    def __init__(self):
        super().__init__()
        self.extra = {"ema": mlp(0.1)}
        self.extra["ema"].update(tree_map(lambda array: array, self.model.parameters()))

    def step(self, x, y):
        loss, gradients = self.passes(self.model, x, y)
        self.optimizer.update(self.model, gradients)
        ema = self.extra["ema"]
        ema.update(tree_map(lambda old, new: 0.9 * old + 0.1 * new, ema.parameters(), self.model.parameters()))
        return loss


class Teacher(Averaged):
    """The average is a teacher: the loss depends on it."""

    def step(self, x, y):
        def loss_fn(model, x, y):
            return mse(model, x, y) + 0.1 * mse(model, x, mx.stop_gradient(self.extra["ema"](x)))

        loss, gradients = nn.value_and_grad(self.model, loss_fn)(self.model, x, y)
        self.optimizer.update(self.model, gradients)
        ema = self.extra["ema"]
        ema.update(tree_map(lambda old, new: 0.5 * old + 0.5 * new, ema.parameters(), self.model.parameters()))
        return loss


class Scaled(Job):
    """A dynamic loss scale that halves on overflow and doubles after two good steps; arrays, so that it compiles."""

    def __init__(self):
        super().__init__(lambda model, x, y: mse(model, x, y) * self.extra["scale"]["value"])
        self.extra = {"scale": {"value": mx.array(2.0**10), "good": mx.array(0)}}

    def step(self, x, y):
        scale = self.extra["scale"]
        loss, gradients = self.passes(self.model, x, y)
        gradients = tree_map(lambda gradient: gradient / scale["value"], gradients)
        leaves = [gradient for _, gradient in tree_flatten(gradients)]
        finite = mx.all(mx.stack([mx.isfinite(leaf).all() for leaf in leaves]))
        self.optimizer.update(self.model, tree_map(lambda g: mx.where(finite, g, 0), gradients))
        good = mx.where(finite, scale["good"] + 1, 0)
        scale["value"] = mx.where(
            finite, mx.where(good % 2 == 0, scale["value"] * 2, scale["value"]), scale["value"] / 2
        )
        scale["good"] = good
        return loss


class Accumulated(Job):
    """Three micro-batches of four rows a step."""

    def step(self, x, y):
        total, gradients = 0, None
        for start in range(0, 12, 4):
            loss, found = self.passes(self.model, x[start : start + 4], y[start : start + 4])
            total = total + loss / 3
            gradients = found if gradients is None else tree_map(mx.add, gradients, found)
        self.optimizer.update(self.model, tree_map(lambda gradient: gradient / 3, gradients))
        return total


class Plateau:
    """Halves the learning rate when the loss has not fallen for three steps; plain Python, with a trace of arrays."""

    def __init__(self):
        self.best, self.bad, self.losses = 1e9, 0, [mx.array(0.0)]

    def see(self, loss, optimizer):
        self.losses.append(loss)
        self.bad = 0 if loss.item() < self.best else self.bad + 1
        self.best = min(self.best, loss.item())
        if self.bad == 3:
            optimizer.learning_rate, self.bad = optimizer.learning_rate * 0.5, 0

    def state_dict(self):
        return {"best": self.best, "bad": self.bad, "losses": self.losses}

    def load_state_dict(self, state):
        self.best, self.bad, self.losses = state["best"], state["bad"], list(state["losses"])


class Watching(Job):
    def __init__(self):
        super().__init__()
        self.extra = {"plateau": Plateau()}

    def step(self, x, y):
        loss, gradients = self.passes(self.model, x, y)
        self.optimizer.update(self.model, gradients)
        self.extra["plateau"].see(loss, self.optimizer)
        return loss


EAGER = {Watching}
JOBS = [Clipped, Averaged, Teacher, Scaled, Accumulated, Watching]


def record(path, job, steps=9, **options):
    options = {"save_every": 4, "spikes": None, "compile": type(job) not in EAGER} | job.options() | options
    with wb.Recorder(path, *job.parts(), **options) as recorder:
        losses = [recorder.step(batch) for batch in recorder.batches(steps)]
    return wb.open_run(path), losses


def experiment(job, **options):
    options = wb.StepOptions(compile=type(job) not in EAGER, **options)
    return wb.Experiment(*job.parts(), options, job.step, job.extra)


# ------------------------------------------------------------------------------------------------------- tests


@pytest.mark.parametrize("kind", JOBS)
def test_every_step_replays_and_a_resume_goes_on_with_the_same_bits(tmp_path, kind):
    run, losses = record(tmp_path / "run", kind())
    traces = run.replay(range(1, 10), experiment=experiment(kind()), with_probe=False)
    assert [trace.exact for trace in traces] == [True] * 9
    half = record(tmp_path / "half", kind(), 6)[1]
    resumed, rest = record(tmp_path / "half", kind(), resume=True)
    assert half + rest == losses and resumed.line(9, 0).state == run.line(9, 0).state


@pytest.mark.parametrize("kind", [Clipped, Accumulated])
def test_it_has_the_bits_of_the_step_outside_of_a_recorder(tmp_path, kind):
    job = kind()
    alone = [job.step(*(mx.array(part) for part in next(job.sampler))).item() for _ in range(9)]
    assert record(tmp_path / "run", kind(), compile=False)[1] == alone


def test_it_is_compiled_only_if_asked(tmp_path):
    for compiled in (None, False, True):
        run, _ = record(tmp_path / str(compiled), Clipped(), 1, compile=compiled)
        assert run.manifest.options["compile"] is (compiled is True)
    assert wb.Experiment(*Clipped().parts(), step_fn=Clipped().step).options.compile is False
    assert wb.Experiment(*Clipped().parts()).options.compile is True


LOOKS = {"item": lambda loss: loss.item(), "truth": lambda loss: loss > 0 and None, "eval": mx.eval}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_a_compiled_step_that_evaluates_an_array_is_told_apart_from_a_compiled_function_in_it(tmp_path, look):
    class Looking(Clipped):
        def step(self, x, y):
            loss = super().step(x, y)
            look(loss)
            return loss

    with pytest.raises(ExperimentError, match=r"^step_fn evaluates an array .* leave compile=True out"):
        record(tmp_path / "run", Looking(), compile=True)
    assert (
        record(tmp_path / "eager", Looking(), compile=False)[1] == record(tmp_path / "x", Clipped(), compile=False)[1]
    )


def test_a_batch_that_is_a_dict_is_refused_with_what_to_hand_over(tmp_path):
    job = Clipped()
    x, y = next(job.sampler)
    with wb.Recorder(tmp_path / "run", job.model, job.optimizer, mse, step_fn=job.step) as recorder:
        with pytest.raises(ExperimentError, match=r"a dict; .*recorder\.step\(\(batch\['x'\], batch\['y'\]\)\)"):
            recorder.step({"x": x, "y": y})


def test_gradients_are_those_before_clipping(tmp_path):
    run, _ = record(tmp_path / "run", Clipped())
    plain = Job()
    with wb.Recorder(tmp_path / "plain", *plain.parts(), spikes=None, clip=0.5) as recorder:
        recorder.step(next(recorder.batches(1)))
    ours, theirs = run.line(1, 0), wb.open_run(tmp_path / "plain").line(1, 0)
    assert ours.grad_norm == theirs.grad_norm > 0.5
    assert ours.per_layer_grad_norms == theirs.per_layer_grad_norms
    assert ours.per_layer_act_norms == theirs.per_layer_act_norms and None not in ours.per_layer_act_norms


def test_the_probe_sees_into_it(tmp_path):
    run, _ = record(tmp_path / "run", Clipped())
    trace = run.replay(5, experiment=experiment(Clipped()))
    assert trace.exact and trace.record.certified_probe
    assert {"activation_gradient", "gradient", "adam_v"} <= set(trace.layers["kind"])


@pytest.mark.parametrize("kind", [Averaged, Scaled])
def test_extra_state_is_in_checkpoints_and_in_the_lane_other(tmp_path, kind):
    run, _ = record(tmp_path / "run", kind())
    (name,) = kind().extra
    found = mx.load(str(run.path / "checkpoints" / "00000008.optimizer.safetensors"))
    assert [path for path in found if path.endswith(f"@{name}")]
    changed = kind()
    changed.extra[name].update(tree_map(lambda array: array * 2, dict(changed.extra[name])))
    run2, _ = record(tmp_path / "other", changed, 1)
    one, two = run.telemetry.meta(0).state, run2.telemetry.meta(0).state
    assert {lane for lane in one if one[lane] != two[lane]} == {"other"}


def test_without_the_extra_state_it_is_another_experiment(tmp_path):
    run, _ = record(tmp_path / "run", Teacher())
    job = Teacher()
    with pytest.raises(ExperimentError, match=r"extra is \[\], recorded \['ema'\]"):
        run.replay(3, experiment=wb.Experiment(*job.parts(), wb.StepOptions(), job.step))
    with pytest.raises(ExperimentError, match="the step is the built-in one, recorded one of its own"):
        run.replay(3, experiment=wb.Experiment(*job.parts(), wb.StepOptions(), None, job.extra))
    with pytest.raises(ExperimentError, match="the step is the built-in one, recorded one of its own"):
        with wb.Recorder(run.path, *job.parts(), extra=job.extra, resume=True):
            pass


def test_state_that_is_not_handed_over_is_refused_at_the_first_step(tmp_path):
    job = Teacher()
    with pytest.raises(ExperimentError, match=r"it changes state that no checkpoint holds: step_fn\.self\.extra\.ema"):
        record(tmp_path / "run", job, compile=False, extra={})


def test_changing_extra_state_between_steps_spoils_the_checkpoint(tmp_path):
    """As with weights: it is not the state that the step left, and is not saved as such."""
    job = Averaged()
    with wb.Recorder(tmp_path / "run", *job.parts(), **job.options(), compile=True, save_every=0) as recorder:
        for batch in recorder.batches(4):
            recorder.step(batch)
            recorder.checkpoint()
        job.extra["ema"].update(tree_map(lambda array: array + 1, job.extra["ema"].parameters()))
        with pytest.raises(ExperimentError, match="other changed after the step"):
            recorder.checkpoint()
        recorder.open_segment()
        for batch in recorder.batches(6):
            recorder.step(batch)
    traces = wb.open_run(tmp_path / "run").replay(range(5, 7), experiment=experiment(Averaged()), with_probe=False)
    assert [trace.exact for trace in traces] == [True, True]


# --------------------------------------------------------------------------------------------------- refused


def test_a_step_that_updates_never_or_twice(tmp_path):
    class Never(Job):
        def step(self, x, y):
            return self.passes(self.model, x, y)[0]

    class Twice(Job):
        def step(self, x, y):
            for _ in range(2):
                loss, gradients = self.passes(self.model, x, y)
                self.optimizer.update(self.model, gradients)
            return loss

    for kind, times in ((Never, 0), (Twice, 2)):
        with pytest.raises(
            ExperimentError, match=f"updated the experiment's optimizer {times} times; expected exactly once"
        ):
            record(tmp_path / "run", kind())
        assert not (tmp_path / "run").exists()


def test_a_step_saved_in_the_middle_of_its_accumulation_does_not_exist(tmp_path):
    """Case R8: a step is all of its micro-batches, so what updates only every third call is refused at the first."""

    class Split(Job):
        calls, held = 0, None

        def step(self, x, y):
            loss, gradients = self.passes(self.model, x, y)
            self.held = gradients if self.held is None else tree_map(mx.add, self.held, gradients)
            self.calls += 1
            if self.calls % 3 == 0:
                self.optimizer.update(self.model, self.held)
            return loss

    with pytest.raises(
        ExperimentError, match="updated the experiment's optimizer 0 times.*accumulate gradients inside it"
    ):
        record(tmp_path / "run", Split(), compile=False)


def test_a_step_without_a_loss(tmp_path):
    class Silent(Clipped):
        def step(self, x, y):
            super().step(x, y)

    with pytest.raises(ExperimentError, match="step_fn returned a NoneType; expected the loss"):
        record(tmp_path / "run", Silent())


def test_options_that_the_step_decides_itself():
    job = Clipped()
    for options in ({"clip": 1.0}, {"accumulate": 2}):
        with pytest.raises(ExperimentError, match="step_fn is a step of your own; do both inside it"):
            wb.Experiment(*job.parts(), wb.StepOptions(**options), job.step)
    with pytest.raises(ExperimentError, match="step_fn is compiled already"):
        wb.Experiment(*job.parts(), wb.StepOptions(), mx.compile(job.step))


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"a.b": {}}, "extra has the name 'a.b'"),
        ({"scale": {"value": 1.0}}, "extra 'scale' holds value as float; expected an MLX array"),
        ({"scale": 3.0}, "extra 'scale' is of type float; expected a dict or list"),
        ({"plateau": Plateau()}, "extra 'plateau' is of type Plateau, and a compiled step reads Python values once"),
    ],
)
def test_extra_state_that_can_not_be_restored_is_named(extra, words):
    with pytest.raises(ExperimentError, match=words):
        wb.Experiment(*Job().parts(), extra=extra)


def test_an_object_whose_state_json_would_change_is_named(tmp_path):
    job = Watching()
    job.extra["plateau"].best = float("inf")
    with pytest.raises(ExperimentError, match=r"the state of extra 'plateau'\.best is inf; expected a JSON value"):
        record(tmp_path / "run", job)


def test_changes_that_the_step_decides_itself_are_refused_as_interventions(tmp_path):
    run, _ = record(tmp_path / "run", Clipped())
    for change in ("clip=off", "clip=1", "beta2=0.5", "v=max"):
        with pytest.raises(WorkbenchError, match="the run has a step function of its own, and only that decides"):
            run.whatif(5, [change], experiment=experiment(Clipped()))
    table = run.whatif(5, ["lr=0.5x", "reset=m"], experiment=experiment(Clipped()), next_steps=1)
    assert len(set(table["update_norm"])) == 3
