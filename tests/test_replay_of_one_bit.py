"""One bit that differs, in the evidence, the state or the batch, turns exactly its item red."""

import numpy as np
import pytest
from helpers import Points, experiment, flipped
from replays import outcomes

from workbench.compare import ITEMS, with_one_bit_flipped
from workbench.lines.line import LANES
from workbench.snapshot import State

pytest_plugins = ["replay_fixtures"]


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
