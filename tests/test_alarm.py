"""How a step stands in its run's past: judged at every step, and where the spike that it stands in began."""

import math

import pytest
import runs
from autopsies import own_read_only, stale
from helpers import edit_line

from workbench import open_run
from workbench.bits import float_bits
from workbench.cause.alarm import GAP, Alarm, alarms


def alarm(**changed):
    known = {"step": 9, "rule": "loss_z", "metric": "loss", "value": 4.0, "usual": 2.0, "sigma": 0.1, "usual_loss": 2.0}
    known |= {"loss_sigma": 0.1, "began": 9, "explanation": "", "judged": True}
    return Alarm(**(known | changed))


@pytest.fixture
def path(tmp_path):
    """12 steps, window 4."""
    return runs.recorded(tmp_path)


def spiked(path, *steps, value=50.0):
    for step in steps:
        edit_line(path, step, lambda line: line.update(loss=value, loss_bits=float_bits(value)))
    return open_run(path)


def test_a_step_that_no_rule_names_is_its_own_beginning(path):
    flagged, found = alarms(open_run(path), 9, 0)
    assert flagged == {} and (found.step, found.began, found.rule, found.metric) == (9, 9, None, "loss")
    assert found.judged and not alarms(open_run(path), 3, 0)[1].judged


def test_each_step_of_a_spike_is_flagged_though_detection_is_debounced(path):
    run = spiked(path, 8, 9, 10)
    assert run.spikes()["step"].tolist() == [8]
    flagged, found = alarms(run, 10, 0)
    assert sorted(flagged) == [8, 9, 10] and found.began == 8 and found.rule == "loss_factor"
    assert found.value == 50 and found.usual < 10 and math.isclose(found.usual_loss, found.usual)


@pytest.mark.parametrize(("second", "began"), [(8 + GAP + 1, 8), (8 + GAP + 2, 8 + GAP + 2)])
def test_a_spike_may_dip_for_as_many_steps_as_the_gap_allows(path, second, began):
    assert alarms(spiked(path, 8, second), second, 0)[1].began == began


def test_what_is_not_finite_is_named_by_what_it_is(path):
    edit_line(path, 9, lambda line: line.update(grad_norm=None, grad_norm_bits="0x7f800000"))
    found = alarms(open_run(path), 9, 0)[1]
    assert (found.rule, found.metric, found.value) == ("non_finite", "grad_norm", math.inf)
    assert found.phrase == "gradient norm"


@pytest.mark.parametrize(
    ("known", "value", "rise"),
    [
        ({}, 4.0, 1.0),
        ({}, 2.0, 0.0),
        ({}, 2.5, 0.25),
        ({}, math.nan, 1.0),
        ({}, math.inf, 1.0),
        ({"metric": "grad_norm", "value": 16.0, "usual": 1.0}, 4.0, 0.5),  # of the logarithm
        ({"value": math.nan}, 2.0, 0.0),
        ({"value": math.nan}, 4.0, 1.0),  # twice the usual
        ({"value": math.nan, "usual": math.nan}, 4.0, 0.0),
    ],
)
def test_how_much_of_a_rise_a_value_has(known, value, rise):
    assert alarm(**known).rise(value) == pytest.approx(rise)
    assert alarm(**known).gone(value) == (rise <= 1 / 3)


def test_the_alarm_of_an_own_loop_with_other_settings():
    run = own_read_only(stale, 46)
    flagged, found = alarms(run, 41, 0)
    assert found.rule == "loss_factor" and 40 not in flagged
    healthy = run.steps.query("step < 41 and step not in @flagged")["loss"].tail(run.manifest.spikes["window"])
    assert found.usual == healthy.median()
