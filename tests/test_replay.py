"""Replays of a range of steps: every state is that of the uninterrupted run, in any thread, and they repeat."""

import dataclasses
import threading

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest
from helpers import Points, advance, assert_same_state, experiment, mse, remembered, state_of
from replays import STEPS, outcomes, same_outcome

from workbench import probe
from workbench.compare import ITEMS
from workbench.errors import ReplayError

pytest_plugins = ["replay_fixtures"]


# ---------------------------------------------------------------------------------------------------------------- exact


def test_every_step_has_the_state_of_the_uninterrupted_run(memory):
    states = memory[0]
    found = outcomes(range(1, STEPS + 1), memory=memory, checkpoint=lambda step: states[step])
    assert [outcome.step for outcome in found] == list(range(1, STEPS + 1))
    for outcome in found:
        assert outcome.exact and outcome.first_difference is None
        assert {item.verdict for item in outcome.items.values()} == {"exact"} and len(outcome.items) == len(ITEMS)
        assert outcome.probe.certified
        assert [gate.verdict for gate in vars_of(outcome.gates)] == ["exact"] * 3
        assert_same_state(outcome.before, states[outcome.step - 1])
        assert_same_state(outcome.after, states[outcome.step])


def vars_of(gates):
    return [gates.repeatable, gates.faithful, gates.sensitive]


@pytest.mark.parametrize("start", [0, 3, 5])
def test_a_range_equals_single_replays_from_any_state_before(memory, start):
    states = memory[0]
    steps = [start + 1, start + 3]
    together = outcomes(steps, memory=memory, start=states[start])
    for step, outcome in zip(steps, together, strict=True):
        (single,) = outcomes([step], memory=memory)
        same_outcome(outcome, single)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_probe_is_certified_on_the_cpu(dtype, compiled):
    def make():
        return experiment(dtype=dtype, dropout=0.2, clip=0.5, compile=compiled, optimizer=optim.AdamW(1e-2, eps=1e-4))

    memory = remembered(make(), 3)
    found = outcomes([2, 3], memory=memory, job=make())
    assert all(outcome.exact and outcome.probe.certified for outcome in found)


def test_a_probe_that_is_not_certified_is_tried_again_compiled_like_the_step(monkeypatch):
    """From the same state: the first try has drawn random numbers."""

    def make():
        return experiment(dropout=0.3, compile=True)

    real = probe.probe

    def eager_differs(*arguments, compiled, **options):
        found = real(*arguments, compiled=compiled, **options)
        return found if compiled else dataclasses.replace(found, certified=False)

    memory = remembered(make(), 3)
    monkeypatch.setattr(probe, "probe", eager_differs)
    (outcome,) = outcomes([3], memory=memory, job=make())
    assert outcome.exact and outcome.probe.certified and outcome.probe.compiled
    monkeypatch.setattr(
        probe, "probe", lambda *a, **options: dataclasses.replace(real(*a, compiled=False), certified=False)
    )
    (outcome,) = outcomes([3], memory=memory, job=make())
    assert outcome.exact and not outcome.probe.certified  # the probe has no say in what is exact


def test_with_and_without_a_probe_the_state_after_is_the_same(memory):
    jobs = [experiment(), experiment()]
    for job, with_probe in zip(jobs, (True, False), strict=True):
        (outcome,) = outcomes([4], memory=memory, job=job, with_probe=with_probe)
        assert (outcome.probe is not None) == with_probe == bool(outcome.rows)
        assert_same_state(state_of(job, 4), outcome.after)  # the experiment stands at N, ready to go on
        advance(job, 2)
        assert_same_state(state_of(job, 6), memory[0][6])


def test_a_step_that_is_not_repeated_is_exact_all_the_same_and_its_badge_says_so(memory):
    told = []
    found = outcomes([3, 4, 5], memory=memory, repeat=lambda step: step == 5, progress=lambda *what: told.append(what))
    assert [outcome.gates.repeatable.verdict for outcome in found] == ["unverified", "unverified", "exact"]
    assert found[0].gates.repeatable.explanation == "not repeated" and all(outcome.exact for outcome in found)
    assert [what for _, _, what in told if "again" in what] == ["step 5, again, for the repeatable badge"]
    assert [done for done, _, _ in told] == sorted(done for done, _, _ in told)
    assert {total for _, total, _ in told} == {told[-1][0]}  # each piece of work was counted
    for outcome, whole in zip(found, outcomes([3, 4, 5], memory=memory), strict=True):
        same_outcome(outcome, whole)
        assert outcome.updates == whole.updates and outcome.first_nonfinite is None


def test_without_evidence_nothing_is_called_exact(memory):
    (outcome,) = outcomes([2], memory=memory, evidence={})
    assert not outcome.exact and outcome.first_difference is None
    assert outcome.gates.faithful.verdict == "unverified"
    assert outcome.gates.repeatable.verdict == outcome.gates.sensitive.verdict == "exact"


@pytest.mark.parametrize("steps", [[], [3], [2, 3], [5, 4], [4, 4], range(5, 4)])
def test_steps_that_are_not_ascending_after_the_start_are_refused(memory, steps):
    with pytest.raises(ReplayError, match="state 3"):
        outcomes(steps, memory=memory, start=memory[0][3])


def test_a_sampler_that_runs_dry_is_named(memory):
    class Short(Points):
        def __next__(self):
            if self.number == 2:
                raise StopIteration
            return super().__next__()

    job = experiment()
    job.sampler = Short()
    with pytest.raises(ReplayError, match="the sampler ran out before step 3"):
        outcomes([4], memory=memory, job=job)


# ----------------------------------------------------------------------------------------------------------- repeatable


@pytest.mark.parametrize("when", ["always", "only when repeated"])
def test_a_loss_that_depends_on_a_counter_is_not_repeatable(memory, when):
    calls = []

    def counting(model, x, y):
        calls.append(1)
        return mse(model, x, y) * (1 + 1e-6 * len(calls) if when == "always" else 1 + 1e-6 * (len(calls) > 2))

    (outcome,) = outcomes([2], memory=memory, job=experiment(loss_fn=counting), with_probe=False)
    assert outcome.gates.repeatable.verdict == "mismatch"
    assert "loss" in outcome.gates.repeatable.explanation
    assert outcome.exact == (when != "always")  # faithful and repeatable are separate badges


def test_a_probe_of_a_loss_that_changes_is_not_certified(memory):
    calls = []

    def counting(model, x, y):
        calls.append(1)
        return mse(model, x, y) * (1 + 1e-6 * (len(calls) > 3))

    (outcome,) = outcomes([2], memory=memory, job=experiment(loss_fn=counting))
    assert outcome.exact and outcome.gates.repeatable.verdict == "exact" and not outcome.probe.certified


def test_random_numbers_from_outside_the_recorded_state_are_not_repeatable(memory):
    stream = np.random.default_rng(0)

    def noisy(model, x, y):
        return mse(model, x + mx.array(stream.normal(), dtype=mx.float32), y)

    (outcome,) = outcomes([2], memory=memory, job=experiment(loss_fn=noisy), with_probe=False)
    assert outcome.gates.repeatable.verdict == outcome.gates.faithful.verdict == "mismatch"


def test_a_cursor_that_the_sampler_goes_on_changing_does_not_spoil_the_repeat(memory):
    class Live(Points):
        def __init__(self):
            super().__init__()
            self.cursor = {"place": {"number": 0}, "pair": (1, 2)}  # JSON has no tuples

        def __next__(self):
            self.number = self.cursor["place"]["number"]
            batch = super().__next__()
            self.cursor["place"]["number"] += 1
            return batch

        def state_dict(self):
            return self.cursor

        def load_state_dict(self, cursor):
            self.cursor = cursor | {"pair": tuple(cursor["pair"])}

    def make():
        job = experiment()
        job.sampler = Live()
        return job

    states, evidence, layers = remembered(make(), 4)
    found = outcomes([2, 4], memory=(states, evidence, layers), job=make(), checkpoint=lambda step: states[step])
    assert all(outcome.exact and outcome.gates.repeatable.verdict == "exact" for outcome in found)


# ------------------------------------------------------------------------------------------------------------- progress


@pytest.mark.parametrize("with_probe", [True, False])
@pytest.mark.parametrize("steps", [[4], [2, 5], range(1, 5)])
def test_progress_counts_up_to_the_total(memory, steps, with_probe):
    calls = []
    outcomes(steps, memory=memory, with_probe=with_probe, progress=lambda *call: calls.append(call))
    done = [call[0] for call in calls]
    assert done == sorted(done) and done[0] == 0
    assert {call[1] for call in calls} == {done[-1]}
    assert all(isinstance(call[2], str) and call[2] for call in calls)


# ------------------------------------------------------------------------------------------------------ threads, memory


def test_another_thread_gives_the_same_bits(memory):
    found = []

    def work():
        job = experiment(dropout=0.0)
        found.extend(outcomes([3, 5], memory=memory, job=job))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(found) == 2 and all(outcome.exact and outcome.probe.certified for outcome in found)
    for outcome, own in zip(found, outcomes([3, 5], memory=memory), strict=True):
        same_outcome(outcome, own)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_another_thread_draws_the_recorded_random_numbers(compiled):
    """A new thread has a random state of its own, and a compiled step must use it."""
    memory = remembered(experiment(dropout=0.3, compile=compiled), 4)
    job, found = experiment(dropout=0.3, compile=compiled), []
    before = mx.random.state[0].tolist()
    thread = threading.Thread(target=lambda: found.extend(outcomes([2, 4], memory=memory, job=job)))
    thread.start()
    thread.join()
    assert [outcome.exact for outcome in found] == [True, True]
    assert mx.random.state[0].tolist() == before  # of this thread
