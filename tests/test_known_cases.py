"""Situations of recording and replay that users met, by their numbers. Others stand with what they are about."""

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
import zoo
from helpers import Points, advance, assert_same_state, experiment, mlp, mse, remembered, state_of

import workbench as wb
from workbench.errors import CheckpointError, ExperimentError
from workbench.experiment import random_key, set_random_key
from workbench.observe import observe
from workbench.snapshot import State, capture, restore
from workbench.state_edits import zeroed
from workbench.step import Stepper


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_r1_a_random_state_beyond_two_to_the_53_comes_back(tmp_path, compiled):
    key = (0xFEDCBA98, 0x76543211)
    job = experiment(dropout=0.5, compile=compiled)
    set_random_key(key)
    with wb.Recorder(
        tmp_path / "run", *(job.model, job.optimizer, job.loss_fn, job.sampler), compile=compiled
    ) as recorder:
        for batch in recorder.batches(4):
            recorder.step(batch)
    run = wb.open_run(tmp_path / "run")
    again = experiment(dropout=0.5, compile=compiled)
    mx.random.seed(0)
    assert run.replay(1, experiment=again).exact
    assert random_key() == (0, 0)  # and the replay left this thread's own as it was


def test_r2_an_optimizer_state_that_a_compiled_step_would_not_see(tmp_path):
    job = experiment(compile=True)
    with wb.Recorder(tmp_path / "run", *(job.model, job.optimizer, job.loss_fn, job.sampler)) as recorder:
        for batch in recorder.batches(2):
            recorder.step(batch)
        saved = dict(job.optimizer.state)
        job.optimizer.state.update(saved)  # exact
        for batch in recorder.batches(3):
            recorder.step(batch)
        job.optimizer.state = saved
        with pytest.raises(ExperimentError, match=r"optimizer\.state was replaced.*optimizer\.state\.update"):
            recorder.step(next(Points()))


def test_r5_lost_moments_are_seen_after_the_very_step():
    _, evidence, _ = remembered(experiment(), 4)
    job = experiment()
    advance(job, 3)
    restore(job, zeroed(state_of(job, 3)))
    batch = next(job.sampler)
    stepper = Stepper(job)
    arrays = tuple(mx.array(part) for part in batch)
    seen = observe(stepper, arrays, stepper(arrays), job.sampler.state_dict()).evidence()
    unlike = [name for name in seen if seen[name] != evidence[4][name]]
    assert "loss" not in unlike and "grad_norm" not in unlike and "batch_hash" not in unlike
    assert {"state.adam_m", "state.adam_v", "state.weights"} <= set(unlike)


def test_r6_the_random_state_is_restored_after_the_sampler():
    class Drawing(Points):
        def load_state_dict(self, cursor):
            mx.eval(mx.random.uniform(shape=(3,)))
            super().load_state_dict(cursor)

    job = experiment(dropout=0.5)
    job.sampler = Drawing()
    job.prepare()
    state = capture(job, 0, {"number": 0}, rng=(7, 9))
    restore(job, state)
    assert random_key() == (7, 9)


def test_r9_a_module_under_two_names_has_two_equal_entries_and_a_lost_one_is_named():
    job = zoo.build("shared modules called twice")
    advance(job, 3)
    state = state_of(job, 3)
    assert mx.array_equal(state.weights["alias.weight"], state.weights["inner.weight"]).item()
    other = zoo.build("shared modules called twice")
    restore(other, state)
    assert other.model.alias is other.model.inner
    assert_same_state(state_of(other, 3), state)
    less = {path: array for path, array in state.weights.items() if path != "alias.weight"}
    with pytest.raises(CheckpointError, match=r"missing alias\.weight"):
        restore(other, State(3, less, state.optimizer, state.rng, state.cursor))
    torn = state.weights | {"alias.weight": state.weights["alias.weight"] + 1}
    with pytest.raises(ExperimentError, match="two entries share that path"):
        restore(other, State(3, torn, state.optimizer, state.rng, state.cursor))


class Twice(nn.Module):
    """An embedding, and a head that begins as the same array."""

    def __init__(self, module):
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.head = self.embedding if module else nn.Linear(4, 5, bias=False)
        if not module:
            self.head.weight = self.embedding.weight

    def __call__(self, x):
        return self.head.as_linear(self.embedding(x)) if self.head is self.embedding else self.head(self.embedding(x))


@pytest.mark.parametrize("module", [False, True], ids=["one array", "one module"])
def test_r9_one_array_under_two_paths_is_no_tie(tmp_path, module, recwarn):
    mx.random.seed(1)
    model = Twice(module)
    parts = (model, optim.Adam(1e-2), lambda model, x, y: nn.losses.cross_entropy(model(x), y, reduction="mean"))
    with wb.Recorder(tmp_path / "run", *parts, compile=False, save_every=9) as recorder:
        for number in range(3):
            recorder.step((mx.array([number, 1]), mx.array([2, 3])))
    said = [str(one.message) for one in recwarn if "were one array" in str(one.message)]
    assert len(said) == (0 if module else 1)
    assert module or said[0].startswith("embedding.weight, head.weight were one array when the first step began")


def test_m3_a_number_that_changes_every_step_compiles_nothing_anew(tmp_path):
    traced = []

    def loss_fn(model, x, y):
        traced.append(1)
        return mse(model, x, y)

    model, optimizer = mlp(), optim.AdamW(1e-2)
    with wb.Recorder(tmp_path / "run", model, optimizer, loss_fn, Points(), save_every=0, spikes=None) as recorder:
        for batch in recorder.batches(500):
            optimizer.learning_rate = 1e-2 / (1 + recorder.step_number)
            recorder.step(batch)
    assert len(traced) == 1  # that of the self-check is put back


@pytest.mark.parametrize(
    "changed", [{"eps": 1e-6}, {"betas": [0.8, 0.99]}, {"bias_correction": True}, {"weight_decay": 0.1}]
)
def test_m4_hyperparameters_are_the_runs(tmp_path, changed):
    with wb.Recorder(tmp_path / "run", mlp(), optim.AdamW(1e-2), mse, Points()) as recorder:
        for batch in recorder.batches(2):
            recorder.step(batch)
    other = wb.Experiment(mlp(), optim.AdamW(1e-2, **changed), mse, Points())
    with pytest.raises(
        ExperimentError, match=f"this is not the experiment that run recorded: optimizer .*{next(iter(changed))}"
    ):
        wb.open_run(tmp_path / "run").replay(2, experiment=other)
