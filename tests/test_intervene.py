"""Interventions: the untouched bits, what holds and for how long, what is left behind, and the 2 by 2."""

from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from experiments import batch_of, plain_steps, record_own, scene_of
from helpers import Points, experiment, mlp, mse, state_of

from workbench.errors import ExperimentError
from workbench.experiment import random_key
from workbench.interventions.intervene import _carrier, _shares, intervene, two_by_two
from workbench.interventions.scene import Scene
from workbench.snapshot import first_difference

N = 12


@pytest.fixture(scope="module", params=[False, True], ids=["eager", "compiled"])
def scene(tmp_path_factory, request):
    """With dropout, so that random numbers matter, and a schedule."""

    def build():
        optimizer = optim.AdamW(optim.cosine_decay(1e-2, 30), bias_correction=True)
        return experiment(dropout=0.2, optimizer=optimizer, clip=0.3, compile=request.param)

    return scene_of(tmp_path_factory.mktemp("own"), N, build=build, opening={"next_steps": 4})


def bits(effect):
    return effect.loss, effect.grad_norm, effect.updates, effect.next_losses, effect.compiled


CHANGES = ("lr=0.5x", "clip=off", "reset=m,v", "v=max", "beta2=0.5", "drop-row=2", "batch=3", "batch=skip", "state=6")


def test_nothing_changed_gives_the_runs_own_bits(scene):
    assert scene.exact and scene.draws
    again = intervene(scene, None)
    assert bits(again) == bits(scene.baseline) and again.steps == 5
    assert float(again.loss) == scene.run.steps.set_index("step")["loss"][N]
    logged = scene.run.steps.set_index("step")["loss"]
    assert [float(loss) for loss in again.next_losses] == logged.loc[N + 1 : N + 4].tolist()


def test_nothing_is_left_behind_by_any_change(scene):
    key, before = random_key(), scene.baseline
    owners = state_of(scene.stepper.experiment)  # which was handed in
    assert first_difference(owners, scene.state(N)) is not None
    for change in (*CHANGES, "rng=5", f"compile={'off' if before.compiled else 'on'}"):
        with scene.at_rest():
            intervene(scene, change)
            there = state_of(scene.stepper.experiment, N)
            assert first_difference(replace(there, rng=scene.state(N).rng), scene.state(N)) is None
        assert first_difference(state_of(scene.stepper.experiment), owners) is None
    assert bits(intervene(scene, None)) == bits(before)
    assert random_key() == key


def test_an_experiment_gives_the_same_bits_again(scene):
    for change in CHANGES:
        assert bits(intervene(scene, change)) == bits(intervene(scene, change))


def test_edits_go_through_the_runs_own_step_and_settings_say_that_theirs_is_eager(scene):
    compiled = scene.baseline.compiled
    for change in ("reset=m", "v=max", "drop-row=2", "batch=3", "state=6", "rng=5"):
        effect = intervene(scene, change, 0)
        assert effect.compiled is compiled and not any("eagerly" in note for note in effect.notes)
    for change in ("lr=0.5x", "clip=off", "beta2=0.5", "eps=1e-4"):
        effect = intervene(scene, change, 0)
        assert effect.compiled is False and any("eagerly" in note for note in effect.notes) is compiled


def test_the_steps_computed_are_counted(scene):
    before = scene.computed
    effect = intervene(scene, "lr=0.5x", 2)
    assert effect.steps == 3 == scene.computed - before and len(effect.next_losses) == 2


def test_a_setting_holds_unless_it_is_for_once(scene):
    """From the step after on, `once` goes on as the run: a plain loop from where the changed step ended."""
    held, once = intervene(scene, "lr=0.01x"), intervene(scene, "lr=0.01x", once=True)
    assert once.next_losses[0] == held.next_losses[0]  # of the state that the same update left
    assert once.next_losses[2:] != held.next_losses[2:]
    edit = intervene(scene, "reset=m", once=True)
    assert bits(edit) == bits(intervene(scene, "reset=m"))


def test_once_leaves_a_constant_learning_rate_as_the_run_had_it(tmp_path):
    scene = scene_of(tmp_path, N, opening={"next_steps": 3})
    effect = intervene(scene, "lr=0.1x", once=True)
    optimizer, model = optim.AdamW(1e-2, bias_correction=True), mlp()
    batches = [batch_of(step) for step in range(N, N + 4)]
    losses, _, weights = plain_steps(scene.state(N - 1), batches[:1], optimizer, model, scale_lr=0.1)
    optimizer.learning_rate = 1e-2
    for batch in batches[1:]:
        loss, gradients = nn.value_and_grad(model, mse)(model, *batch)
        optimizer.update(model, gradients)
        losses.append(loss.item())
    assert [effect.loss, *effect.next_losses] == pytest.approx(losses, rel=2e-5)


def test_once_in_another_dtype_goes_on_in_the_runs_own(tmp_path):
    scene = scene_of(tmp_path, N, dtype="bfloat16", opening={"next_steps": 2})
    once, held = intervene(scene, "dtype=float32", once=True), intervene(scene, "dtype=float32")
    assert once.loss == held.loss != scene.result.loss
    assert once.next_losses != held.next_losses
    assert all(mx.array(float(loss)).astype(mx.bfloat16).item() == loss for loss in once.next_losses)


def test_a_loop_that_sets_its_learning_rate_goes_on_setting_it(tmp_path):
    """The steps after N have the learning rates that the loop gave them, times the factor."""
    job = experiment()

    def set_rate(step):
        job.optimizer.learning_rate = 1e-2 / step

    run = record_own(tmp_path / "own", job, before_step=set_rate)
    scene = Scene.open(run, N, experiment=experiment(), next_steps=3)
    assert scene.exact
    batches = [batch_of(step) for step in range(N, N + 4)]
    scheduled = optim.AdamW(lambda done: 1e-2 / (done + 1) * 0.5, bias_correction=True)
    losses, _, _ = plain_steps(scene.state(N - 1), batches, scheduled, mlp())
    effect = intervene(scene, "lr=0.5x")
    assert [effect.loss, *effect.next_losses] == pytest.approx(losses, rel=2e-5)
    logged = run.steps.set_index("step")["loss"]
    assert [float(loss) for loss in intervene(scene, None).next_losses] == logged.loc[N + 1 : N + 3].tolist()


# --------------------------------------------------------------------------------------------------------------- 2 by 2


class Spoiled(Points):
    """Batches whose targets are a hundred times too large at chosen steps."""

    def __init__(self, *steps):
        super().__init__()
        self.steps = steps

    def __next__(self):
        x, y = super().__next__()
        return x, y * np.float32(100) if self.number in self.steps else y


def spoiled(*steps, lr=1e-2):
    job = experiment(optimizer=optim.AdamW(lr, bias_correction=True))
    job.sampler = Spoiled(*steps)
    return job


def test_a_bad_batch_carries_the_spike_on_any_state(tmp_path):
    scene = scene_of(tmp_path, N, build=lambda: spoiled(N))
    found = two_by_two(scene)
    assert found.carrier == "batch" and found.batch_share > 0.9
    assert found.state_share + found.batch_share == pytest.approx(1)
    (last, earlier), (own, other) = found.states, found.batches
    assert (last, earlier, own) == (N - 1, scene.first, N) and earlier < other < N - 1
    assert found.table.shape == (2, 2) and found.table.loc[f"state {last}", f"batch {own}"] == float(scene.result.loss)
    # Each of the four is what a plain loop gets from that state on that batch.
    for (state, batch), loss in found.losses.items():
        arrays = tuple(mx.array(a) for a in _batch(Spoiled(N), batch))
        plain, _, _ = plain_steps(scene.state(state), [arrays], optim.AdamW(1e-2, bias_correction=True), mlp())
        assert loss == pytest.approx(plain[0], rel=2e-5)


def _batch(points, step):
    points.number = step - 1
    return next(points)


def test_a_bad_state_carries_the_spike_on_any_batch(tmp_path):
    """The batch before the spike blew the weights up, by plain SGD; that of the spike is as good as any."""

    def build():
        job = experiment(optimizer=optim.SGD(0.05))
        job.sampler = Spoiled(N - 1)
        return job

    found = two_by_two(scene_of(tmp_path, N, build=build))
    assert found.carrier == "state" and found.state_share > 0.9


def test_a_calm_step_has_nothing_to_carry(tmp_path):
    assert two_by_two(scene_of(tmp_path, N)).carrier == "neither"


def test_the_earlier_state_and_the_other_batch_may_be_named(tmp_path):
    scene = scene_of(tmp_path, N, build=lambda: spoiled(N))
    found = two_by_two(scene, state=6, batch=14)
    assert found.states == (11, 6) and found.batches == (12, 14) and found.carrier == "batch"
    for state in (2, 10, 11):
        with pytest.raises(ExperimentError, match="needs a state from 3 to 9"):
            two_by_two(scene, state=state)


def test_early_in_the_run_there_is_no_earlier_state(tmp_path):
    with pytest.raises(ExperimentError, match="the 2 by 2 of step 2 needs a state"):
        two_by_two(scene_of(tmp_path, 2, steps=3))


@pytest.mark.parametrize(("bad", "carrier"), [("batch", "batch"), ("state", "state"), ("both", "both")])
def test_a_loss_that_is_not_finite_is_carried_by_what_makes_it_finite(bad, carrier):
    nan = np.float32("nan")
    losses = {(9, 10): nan, (9, 5): np.float32(1), (1, 10): np.float32(1), (1, 5): np.float32(1)}
    if bad == "batch":
        losses[1, 10] = nan
    if bad == "state":
        losses[9, 5] = nan
    assert np.isnan(_shares(losses, (9, 1), (10, 5))).any()
    assert _carrier(losses, (9, 1), (10, 5), float("nan"), [1.0] * 8) == carrier
