"""What the loop changes between two steps of what a step reads, whatever its type: it is told by its name, and once."""

import decimal
import types
import warnings

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from helpers import Points, mlp, mse

import workbench as wb

CHANGED_BEFORE, STEPS, EACH = 4, 6, 3  # a checkpoint at step 3 is the last look before


class Job:
    """A step whose loss depends on one of its attributes, by its name."""

    def __init__(self, kind, value):
        self.kind, self.value, self.losses, self.history, self.metrics = kind, value, [], [], {}
        self.model, self.optimizer = mlp(), optim.SGD(1e-2)
        self.passes = nn.value_and_grad(self.model, self.loss)

    def loss(self, model, x, y):
        return mse(model, x, y) * READS[self.kind](self)

    def step(self, x, y):
        loss, gradients = self.passes(self.model, x, y)
        self.optimizer.update(self.model, gradients)
        return loss


def put(value):
    return lambda job: setattr(job, "value", value)


def in_place(change):
    return lambda job: change(job.value)


READS = {
    "numpy": lambda job: float(job.value[0]),
    "list": lambda job: len(job.value),
    "dict": lambda job: job.value.get("b", 1.0),
    "set": lambda job: 2.0 if "b" in job.value else 1.0,
    "frozenset": lambda job: 2.0 if "b" in job.value else 1.0,
    "dtype": lambda job: mx.ones(1).astype(job.value).itemsize,
    "function": lambda job: job.value(mx.array(0.5)).item(),
    "compiled": lambda job: job.value(mx.array(0.5)).item(),
    "decimal": lambda job: float(job.value),
    "bytes": lambda job: len(job.value),
    "complex": lambda job: job.value.real,
    "range": lambda job: len(job.value),
    "object": lambda job: 2.0 if type(job.value) is types.SimpleNamespace else 1.0,
}
CASES = [
    (
        "numpy",
        lambda: np.ones(1),
        in_place(lambda value: value.__setitem__(0, 2.0)),
        "another numpy array of shape (1,)",
    ),
    ("list", lambda: ["a"], in_place(lambda value: value.append("b")), "a list of 2 items"),
    ("dict", lambda: {"a": 1.0}, in_place(lambda value: value.update(b=2.0)), "a dict of 2 keys"),
    ("set", lambda: {"a"}, in_place(lambda value: value.add("b")), "a set of 2 items"),
    ("frozenset", lambda: frozenset("a"), put(frozenset("b")), "another frozenset of 1 item"),
    ("dtype", lambda: mx.float32, put(mx.bfloat16), "mlx.core.bfloat16"),
    ("function", lambda: nn.tanh, put(nn.sigmoid), "the function sigmoid"),
    ("compiled", lambda: nn.relu, put(nn.silu), "the function silu"),
    ("decimal", lambda: decimal.Decimal(1), put(decimal.Decimal(2)), "Decimal('2')"),
    ("bytes", lambda: b"a", put(b"ab"), "b'ab'"),
    ("complex", lambda: 1 + 0j, put(2 + 0j), "(2+0j)"),
    ("range", lambda: range(1), put(range(5)), "range(0, 5)"),
    ("object", lambda: object(), put(types.SimpleNamespace()), "a SimpleNamespace"),
]


def said(path, job, change=lambda job, step: None, **options):
    """What is warned of while `change(job, step)` is called before each step."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        options = {"step_fn": job.step, "save_every": EACH, "spikes": None} | options
        with wb.Recorder(path, job.model, job.optimizer, mse, Points(), **options) as recorder:
            for batch in recorder.batches(STEPS):
                change(job, recorder.step_number + 1)
                recorder.step(batch)
    return [str(one.message) for one in found]


@pytest.mark.parametrize(("kind", "value", "change", "now"), CASES, ids=[case[0] for case in CASES])
def test_a_value_of_any_type_that_the_step_reads(tmp_path, kind, value, change, now):
    def once(job, step):
        if step == CHANGED_BEFORE:
            change(job)

    (only,) = said(tmp_path / "run", Job(kind, value()), once)
    assert only.startswith(f"step_fn.self.value is {now} now, but no checkpoint holds it, and a replay starts with ")
    assert f": steps after {EACH} that depend on it will not replay exactly" in only
    job = Job(kind, value())
    own = wb.Experiment(job.model, job.optimizer, mse, Points(), step_fn=job.step)
    run = wb.open_run(tmp_path / "run")
    exact = [run.replay(step, experiment=own, with_probe=False).exact for step in (EACH, EACH + 1)]
    assert exact == [True, False]


def test_all_that_change_at_once_are_told_at_once(tmp_path):
    class Many(Job):
        def __init__(self):
            super().__init__("numpy", np.ones(1))
            self.a = self.b = self.c = self.d = self.e = self.f = self.g = self.h = 1.0

        def loss(self, model, x, y):
            factors = (self.a, self.b, self.c, self.d, self.e, self.f, self.g, self.h)
            return mse(model, x, y) * float(np.prod(factors))

    def change(job, step):
        if step == CHANGED_BEFORE:
            for name in "abcdefgh":
                setattr(job, name, 1.1)

    found = said(tmp_path / "run", Many(), change)
    assert [one.partition(" is ")[0][-1] for one in found[:-1]] == list("abcdef")
    assert found[-1].startswith("step_fn.self.g, step_fn.self.h: what stands there is not what it was at the start")
    assert all(f"steps after {EACH} " in one for one in found)
    lines = [line for line in wb.open_run(tmp_path / "run").telemetry.lines if isinstance(line.since, int)]
    assert [(line.step, line.since, len(line.remarks)) for line in lines] == [(STEPS, EACH, 7)]


class Acting(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)
        self.acts, self.table, self.flags = [nn.tanh, nn.relu], {"act": nn.tanh}, {1, 2}

    def __call__(self, x):
        hidden = self.acts[0](self.first(x)) + self.table["act"](self.first(x))
        return self.last(hidden) * (2.0 if 3 in self.flags else 1.0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda model: model.acts.__setitem__(0, nn.relu), "model.acts[0] is the function relu now"),
        (lambda model: model.table.update(act=nn.relu), "model.table.act is the function relu now"),
        (lambda model: model.flags.add(3), "model.flags is a set of 3 items now"),
    ],
)
def test_what_a_model_holds_beside_its_layers(tmp_path, change, words):
    job = Job("list", ["a"])
    job.model = Acting()
    (only,) = said(
        tmp_path / "run",
        job,
        lambda job, step: change(job.model) if step == CHANGED_BEFORE else None,
        step_fn=None,
        compile=False,
    )
    assert only.startswith(words)


def logs(job, step):
    """As a loop does: under a name that is one of MLX's modules, too."""
    job.losses.append(1.0 / step)
    job.metrics[f"loss {step}"] = 1.0 / step


class Sparse(Job):
    """Appends to a list of its own at every second step, and reads its losses in no step."""

    def __init__(self):
        super().__init__("list", ["a"])
        self.steps, self.rows = np.zeros(1), {"all": []}

    def loss(self, model, x, y):
        return mx.mean(nn.losses.mse_loss(model(x), y))

    def step(self, x, y):
        loss = super().step(x, y)
        if x[0, 0].item() < 0.5:
            self.history.append(1.0)
            self.rows["all"].append(1.0)
            self.metrics["last"] = 1.0
        return loss

    def best(self):
        return min(self.losses)


def test_what_only_the_loop_logs_or_the_step_only_puts_in_is_not_spoken_of(tmp_path):
    job = Sparse()
    found = said(tmp_path / "run", job, logs, self_check=False)
    assert job.best() == 1 / STEPS and len(job.history) > 0 and job.rows["all"] and "last" in job.metrics
    assert found == []


def test_a_log_that_the_step_reads_is_spoken_of(tmp_path):
    class Reading(Sparse):
        def loss(self, model, x, y):
            return super().loss(model, x, y) * (1 + len(self.losses))

    found = said(tmp_path / "run", Reading(), lambda job, step: step > 3 and job.losses.append(1.0), self_check=False)
    assert [one.partition(" is ")[0] for one in found] == ["step_fn.self.losses"]


def test_a_large_buffer_of_numpy_is_not_looked_at(tmp_path):
    def change(job, step):
        job.value[0] = step

    assert said(tmp_path / "run", Job("numpy", np.ones(1 << 18)), change) == []
    assert said(tmp_path / "other", Job("numpy", np.ones(1 << 16)), change) != []


def taught(compiled):
    """A step that reads the output of another model with dropout."""
    job = Job("list", ["a"])
    job.teacher = mlp(0.5, seed=4)
    passes = nn.value_and_grad(job.model, lambda model, x, y: mse(model, x, y) + mx.mean(model(x) * job.teacher(x)))

    def step(x, y):
        loss, gradients = passes(job.model, x, y)
        job.optimizer.update(job.model, gradients)
        return loss

    return job, {"step_fn": step, "compile": compiled}


def evaluate(job, step):
    if step == CHANGED_BEFORE:
        job.teacher.eval()


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("in_extra", [True, False])
def test_a_teacher_left_in_evaluation_mode_is_one_sentence(tmp_path, compiled, in_extra):
    job, options = taught(compiled)
    extra = {"teacher": job.teacher} if in_extra else {}
    if not in_extra and compiled:
        return  # its arrays would be constants
    name = "extra.teacher" if in_extra else "step_fn.job.teacher"
    found = [one for one in said(tmp_path / "run", job, evaluate, extra=extra, **options) if "mode" in one]
    assert len(found) == 1 and f"{name} is in evaluation mode now" in found[0], found
    assert found[0].endswith("Call teacher.train() before the next step")
    assert ("the compiled step was traced in training mode" in found[0]) is compiled
    assert (f"steps after {EACH} may not replay exactly" in found[0]) is not compiled


def test_a_teacher_whose_mode_is_set_after_the_recorder_is_made(tmp_path):
    job, options = taught(False)
    found = said(tmp_path / "run", job, lambda job, step: job.teacher.eval(), extra={"teacher": job.teacher}, **options)
    (only,) = [one for one in found if "mode" in one]
    assert only.startswith("extra.teacher is in evaluation mode at the first step, and was in training mode when ")


def test_a_teacher_that_is_put_back_is_not_spoken_of(tmp_path):
    job, options = taught(False)

    def validate(job, step):
        job.teacher.eval()
        job.teacher.train()

    found = said(tmp_path / "run", job, validate, extra={"teacher": job.teacher}, **options)
    assert not any("mode" in one for one in found)
