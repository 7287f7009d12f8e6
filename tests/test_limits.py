"""What updates moved too far, by two yardsticks, each against numpy on the states of a run with an unbounded m/√v."""

import autopsies
import numpy as np
import pytest

from workbench.cause import displacement, usual_adam
from workbench.cause.adam import settings
from workbench.cause.alarm import alarms
from workbench.cause.counterfactual import Trials
from workbench.cause.inquiry import Inquiry
from workbench.checkpoints import checkpoint_reader
from workbench.interventions.scene import Scene
from workbench.recorded.layout import CHECKPOINTS

STEP, FIRST = 40, 30


@pytest.fixture(scope="module")
def inquiry():
    run = autopsies.own_read_only(autopsies.unbounded, 46)
    scene = Scene.open(run, STEP, context=STEP - 1 - FIRST, checkpoint=FIRST, experiment=autopsies.unbounded())
    flagged, alarm = alarms(run, STEP, 0)
    return Inquiry(run, scene, Trials(scene), alarm, flagged, {})


def test_between_checkpoints_an_element_may_move_by_the_sum_of_the_rates(inquiry):
    run, known = inquiry.run, settings(inquiry.run.manifest.optimizer, inquiry.scene.state(FIRST))
    earliest, over = displacement.beyond(inquiry, known)
    rates = run.steps.set_index("step")["lr"]
    weights = {
        step: np.array(checkpoint_reader.read(run.path / CHECKPOINTS, step, 0).weights["w"], np.float64)
        for step, _ in run.checkpoints
        if step <= FIRST
    }
    expected, places = np.zeros(2), sorted(weights)
    assert places[0] == 0 == earliest and places[-1] == FIRST and len(places) > 2
    for left, right in zip(places, places[1:], strict=False):
        moved, most = weights[right] - weights[left], rates.loc[left + 1 : right].sum()
        expected += moved - np.clip(moved, -most, most)
    assert np.allclose(np.array(over["w"]), expected, rtol=1e-3, atol=1e-6) and abs(expected[1]) > 3 * rates.max()


def test_a_rate_that_was_not_logged_leaves_nothing_to_say(inquiry, monkeypatch):
    known = settings(inquiry.run.manifest.optimizer, inquiry.scene.state(FIRST))
    monkeypatch.setattr(displacement, "_rate", lambda inquiry, step: None)
    assert displacement.beyond(inquiry, known) == (FIRST, {})
    assert any(one.what == "updates before the held states" for one in inquiry.unchecked)


def test_updates_made_again_with_a_long_memory(inquiry):
    scene, steps = inquiry.scene, range(FIRST + 1, STEP)
    over = usual_adam.beyond(inquiry, steps)
    w = {step: np.array(scene.state(step).weights["w"], np.float64) for step in range(FIRST, STEP)}
    m = {step: np.array(scene.state(step).optimizer["w.m"], np.float64) for step in range(FIRST, STEP)}
    gradients = {step: (m[step] - 0.9 * m[step - 1]) / 0.1 for step in steps}
    scale = np.sqrt(np.mean([np.square(one) for one in gradients.values()], axis=0))
    expected = sum(w[step] - w[step - 1] + 1e-3 * m[step] / (1 - 0.9**step) / (scale + 1e-8) for step in steps)
    assert np.allclose(np.array(over["w"]), expected, rtol=1e-2, atol=1e-4)
    assert usual_adam.beyond(inquiry, range(STEP - 3, STEP)) == {}
