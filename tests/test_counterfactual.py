"""Steps performed again with one thing changed: untouched ones have the run's bits, changes reach as far as told."""

import mlx.core as mx
import numpy as np
import pytest
from experiments import batch_of, moved, plain_steps, record_own
from helpers import experiment, mlp, tensor_bytes

from workbench.cause.adam import USUAL_BOUND, bound, excess, limited, settings
from workbench.cause.counterfactual import Trials, row_losses
from workbench.errors import ExperimentError
from workbench.interventions.scene import Scene
from workbench.step import StepResult

STEP = 12


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return record_own(tmp_path_factory.mktemp("counterfactual") / "own", experiment())


@pytest.fixture
def trials(run):
    return Trials(Scene.open(run, STEP, experiment=experiment(), next_steps=3))


def logged(run):
    frame = run.steps.set_index("step")
    return frame["loss"], frame["grad_norm"]


def test_steps_redone_without_a_change_have_the_runs_bits(run, trials):
    losses, norms = logged(run)
    shots = trials.redo(STEP - 5, beyond=3)
    assert [one.step for one in shots] == list(range(STEP - 5, STEP + 4))
    assert [one.loss for one in shots] == losses.loc[STEP - 5 : STEP + 3].tolist()
    assert [one.grad_norm for one in shots] == norms.loc[STEP - 5 : STEP + 3].tolist()


def test_drawing_on_from_a_state_has_the_runs_bits(run, trials):
    losses, _ = logged(run)
    assert [one.loss for one in trials.drawn(trials.scene.state(STEP - 4), beyond=2)] == losses.loc[
        STEP - 3 : STEP + 2
    ].tolist()


def test_a_setting_holds_in_its_steps_only_as_plain_mlx_has_it(run, trials):
    scene = trials.scene
    start = scene.state(STEP - 4)
    shots = trials.redo(STEP - 3, "lr=3x", steps=[STEP - 3, STEP - 2])
    batches = [batch_of(step) for step in range(STEP - 3, STEP + 1)]
    model, optimizer = experiment().model, experiment().optimizer
    losses, _, weights = plain_steps(start, batches[:2], optimizer, model, scale_lr=3.0)
    assert [one.loss for one in shots[:2]] == pytest.approx(losses, rel=1e-5)
    usual = [one.loss for one in trials.redo(STEP - 3)]
    assert shots[0].loss == usual[0] and shots[1].loss != usual[1]
    assert moved(start, weights[-1])["layers.0.weight"] > 0


def test_what_is_no_setting_is_made_once(trials):
    skipped = trials.redo(STEP - 2, "batch=skip")
    assert np.isnan(skipped[0].loss) and [one.step for one in skipped] == [STEP - 2, STEP - 1, STEP]
    swapped, usual = trials.redo(STEP - 2, f"batch={STEP - 5}"), trials.redo(STEP - 2)
    assert swapped[0].loss == trials.shot(STEP - 3, STEP - 5).loss != usual[0].loss
    with pytest.raises(ExperimentError, match="change nothing"):
        trials.redo(STEP - 2, "clip=off")


def test_a_shot_is_performed_once_and_is_the_batch_on_that_state(run, trials):
    scene, before = trials.scene, trials.scene.computed
    one = trials.shot(STEP - 4, STEP - 3)
    assert (one.loss, one.grad_norm) == tuple(series[STEP - 3] for series in logged(run))
    assert trials.shot(STEP - 4, STEP - 3) is one and scene.computed == before + 1
    assert trials.shot(STEP - 1, STEP) == trials.own() and scene.computed == before + 1


def test_the_loss_along_an_update_ends_at_its_states(trials):
    start, half, end = trials.along(STEP - 2, (0.0, 0.5, 1.0), STEP - 2)
    assert start.loss == trials.redo(STEP - 2)[0].loss
    assert end.loss == pytest.approx(trials.shot(STEP - 2, STEP - 2).loss, rel=1e-6)
    assert half.loss != start.loss


def test_nothing_that_was_tried_changes_the_scene(run, trials):
    before = {step: tensor_bytes(trials.scene.state(step).weights) for step in range(trials.scene.first, STEP + 1)}
    trials.redo(STEP - 4, "lr=9x", steps=range(STEP + 1))
    trials.drawn(trials.scene.state(STEP - 4))
    trials.along(STEP - 2, (0.3,), STEP)
    assert before == {step: tensor_bytes(trials.scene.state(step).weights) for step in before}
    assert trials.redo(STEP)[0].loss == logged(run)[0][STEP]


def test_losses_by_row():
    result = StepResult(np.float32(1), np.float32(1), {}, {}, mx.array([[1.0, 3.0], [5.0, 7.0]]))
    assert row_losses(result).tolist() == [2.0, 6.0]
    assert row_losses(StepResult(np.float32(1), np.float32(1), {}, {}, None)) is None


# -------------------------------------------------------------------------------------------------------------- adam


@pytest.mark.parametrize(("beta1", "beta2"), [(0.9, 0.999), (0.9, 0.95), (0.5, 0.9), (0.0, 0.5)])
def test_no_gradients_move_an_element_farther_than_the_bound(beta1, beta2):
    """By Cauchy and Schwarz the worst gradients are those in proportion to (beta1/beta2)^age."""
    ages = np.arange(4000)
    worst = (beta1 / beta2) ** ages
    draws = [worst, np.ones(4000), *np.random.default_rng(0).standard_cauchy((50, 4000))]
    found = []
    for gradients in draws:
        m = (1 - beta1) * np.sum(beta1**ages * gradients)
        v = (1 - beta2) * np.sum(beta2**ages * gradients**2)
        found.append(abs(m) / np.sqrt(v))
    assert max(found) == pytest.approx(bound(beta1, beta2), rel=1e-6) == found[0]


def test_without_a_bound():
    assert bound(0.9, 0.81) == bound(0.9, 0.5) == np.inf and bound(0.9, 0.82) < np.inf
    assert pytest.approx(7.27, abs=0.01) == USUAL_BOUND


def test_what_an_update_moved_beyond_the_learning_rate():
    before = mx.array([1.0, -2.0, 0.0, 3.0])
    after = before + mx.array([0.05, -0.31, 0.1, 0.0])
    assert excess(before, after, 0.1, 0.0) == pytest.approx(3.1, rel=1e-5)
    assert excess(before, after, 0.1, 0.5) == pytest.approx((0.31 - 0.1 * 0.5 * 2) / 0.1, rel=1e-5)
    assert np.array(limited(before, after, 0.1, 0.0)) == pytest.approx([0, -0.21, 0, 0], abs=1e-5)
    broken = mx.array([np.nan, 0.0, 0.0, 0.0])
    assert excess(before, broken, 0.1, 0.0) > 0 and np.isfinite(np.array(limited(before, broken, 0.1, 0.0))).all()


def test_settings_are_those_of_the_run(trials, run):
    found = settings(run.manifest.optimizer, trials.scene.state(STEP))
    assert sorted(found) == sorted(path for path, _ in mlp_parameters())
    one = found["layers.0.weight"]
    assert (one.beta1, one.beta2, one.member) == (0.9, 0.999, 0) and one.decay == 0.01
    assert settings({"class": "SGD"}, trials.scene.state(STEP)) == {}


def mlp_parameters():
    from mlx.utils import tree_flatten

    return tree_flatten(mlp().parameters())
