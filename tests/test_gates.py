"""The three badges. The sensitive one must find out a checker that can't fail, whatever it is blind to."""

import mlx.core as mx
import mlx.optimizers as optim
import pytest
from helpers import experiment, state_of

from workbench import compare, fingerprint, gates, snapshot
from workbench.compare import Item, compare_evidence
from workbench.experiment import as_batch
from workbench.host import raw_views
from workbench.lines.line import LANES
from workbench.observe import observe
from workbench.step import Stepper
from workbench.trace import Difference


@pytest.fixture
def performed():
    """Batch, state and observation of a step."""
    job = experiment()
    stepper = Stepper(job)
    batch = as_batch(next(job.sampler))
    result = stepper(batch)
    return batch, state_of(job, 1), observe(stepper, batch, result, job.sampler.state_dict())


def test_repeatable_names_what_differed():
    assert gates.repeatable([]).verdict == "exact"
    gate = gates.repeatable(["loss", "state.weights"])
    assert gate.verdict == "mismatch" and "loss, state.weights" in gate.explanation


def test_faithful_counts_what_was_compared():
    evidence = {"loss": "0x3f800000", "batch_hash": "a0", "state.weights": "b0"}
    gate = gates.faithful(compare_evidence(evidence, evidence), None)
    assert gate.verdict == "exact" and "3 of 3 recorded items" in gate.explanation
    gate = gates.faithful(compare_evidence(evidence, evidence | {"loss": "0x3f800001"}), None)
    assert gate.verdict == "mismatch" and "2 of 3 recorded items" in gate.explanation


@pytest.mark.parametrize("missing", ["loss", "batch_hash", "state.weights"])
def test_faithful_needs_the_batch_the_loss_and_the_weights(missing):
    evidence = {"loss": "0x3f800000", "batch_hash": "a0", "state.weights": "b0", "state.rng": "c0"}
    recorded = {name: value for name, value in evidence.items() if name != missing}
    gate = gates.faithful(compare_evidence(recorded, evidence), None)
    assert gate.verdict == "unverified"
    assert gate.explanation == f"3 of 3 recorded items have the run's bits, but the run did not record {missing}"


def test_faithful_is_unverified_without_evidence():
    gate = gates.faithful(compare_evidence({}, {"loss": "0x3f800000"}), None)
    assert gate.verdict == "unverified" and "nothing to compare" in gate.explanation


def test_faithful_is_red_when_the_way_there_departed_although_the_step_agrees():
    items = compare_evidence({"loss": "0x3f800000"}, {"loss": "0x3f800000"})
    departed = Difference(step=3, where="roll-forward", item="batch_hash", detail="", consequences=[])
    gate = gates.faithful(items, departed)
    assert gate.verdict == "mismatch" and "roll-forward: batch_hash differs from the run at step 3" in gate.explanation


# ------------------------------------------------------------------------------------------------------------ sensitive


def test_sensitive_is_green_for_the_real_checker(performed):
    gate = gates.sensitive(*performed)
    assert gate.verdict == "exact"
    # Each of 14 items, the batch, and what is behind each of the six lanes.
    assert "each of 21 planted one-bit changes" in gate.explanation


@pytest.mark.parametrize("lane", LANES)
def test_a_fingerprint_that_ignores_a_lane_turns_it_red(performed, monkeypatch, lane):
    batch, state, observation = performed
    real = snapshot.lanes
    monkeypatch.setattr(snapshot, "lanes", lambda *parts: real(*parts) | {lane: observation.state[lane]})
    gate = gates.sensitive(batch, state, observation)
    assert gate.verdict == "mismatch"
    assert gate.explanation.count("a bit of") == 1


def test_a_fingerprint_that_does_not_tell_lanes_apart_turns_it_red(performed, monkeypatch):
    """A change that shows in two lanes is located in neither."""
    real = snapshot.lanes

    def smeared(*parts):
        found = real(*parts)
        return found | {"weights": found["weights"][:16] + found["adam_m"][:16]}

    monkeypatch.setattr(snapshot, "lanes", smeared)
    assert gates.sensitive(*performed).verdict == "mismatch"


@pytest.mark.parametrize("dtype", [mx.float32, mx.uint64])
def test_a_fingerprint_that_hashes_names_and_shapes_only_turns_it_red(performed, monkeypatch, dtype):
    """Scalars too: a planted change must not change a shape instead."""

    class Blind(fingerprint._Stream):
        def __init__(self, forms, arrays):
            super().__init__(forms, [mx.zeros_like(a) if a.dtype == dtype else a for a in arrays])

    monkeypatch.setattr(fingerprint, "_Stream", Blind)
    batch, state, observation = performed
    assert state.lanes() != observation.state
    state.optimizer.pop("learning_rate")  # so that the uint64 step is the first of its lane
    assert gates.sensitive(batch, state, observation).verdict == "mismatch"


def test_a_fingerprint_that_folds_values_together_turns_it_red(performed, monkeypatch):
    class Folded(fingerprint._Stream):
        def take(self, which, squares):
            self.digest.update(bytes(len(self.arrays[which])))

    monkeypatch.setattr(fingerprint, "_Stream", Folded)
    assert gates.sensitive(*performed).verdict == "mismatch"


@pytest.mark.parametrize(
    "always",
    [
        lambda recorded, replayed, layers=(): {name: Item(1, 1, "exact") for name in compare.ITEMS},
        lambda recorded, replayed, layers=(): {name: Item(1, 2, "mismatch") for name in compare.ITEMS},
        lambda recorded, replayed, layers=(): {},
    ],
    ids=["always equal", "always different", "nothing compared"],
)
def test_a_comparison_that_does_not_look_turns_it_red(performed, monkeypatch, always):
    monkeypatch.setattr(compare, "compare_evidence", always)
    assert gates.sensitive(*performed).verdict == "mismatch"


def test_a_batch_hash_that_does_not_look_turns_it_red(performed, monkeypatch):
    monkeypatch.setattr(gates, "batch_hash", lambda batch: performed[2].batch_hash)
    gate = gates.sensitive(*performed)
    assert gate.verdict == "mismatch" and "a bit of the batch" in gate.explanation


def test_a_checkpoint_comparison_that_does_not_look_turns_it_red(performed, monkeypatch):
    monkeypatch.setattr(gates, "first_difference", lambda left, right: None)
    gate = gates.sensitive(*performed)
    assert gate.verdict == "mismatch" and gate.explanation.count("a bit of") == len(LANES)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("make", [optim.AdamW, optim.SGD, optim.Adafactor, optim.Lion])
def test_it_works_for_other_dtypes_and_optimizers(dtype, make):
    job = experiment(dtype=dtype, optimizer=make(1e-3))
    stepper = Stepper(job)
    batch = as_batch(next(job.sampler))
    result = stepper(batch)
    seen = observe(stepper, batch, result, job.sampler.state_dict())
    assert gates.sensitive(batch, state_of(job, 1), seen).verdict == "exact"


def test_it_counts_only_the_changes_that_it_planted():
    """SGD keeps no `m`: the norms of it are undefined, and so is no bit of them; nor has the lane an array."""
    job = experiment(optimizer=optim.SGD(1e-3))
    stepper = Stepper(job)
    batch = as_batch(next(job.sampler))
    seen = observe(stepper, batch, stepper(batch), job.sampler.state_dict())
    assert seen.evidence()["adam_m_norms"] == [None, None]
    # 13 items, the batch, and what is behind five lanes.
    assert "each of 19 planted one-bit changes" in gates.sensitive(batch, state_of(job, 1), seen).explanation


@pytest.mark.parametrize("cursor", [{}, {"text": "a"}, {"deep": {"n": 1}}, {"yes": True, "n": 3}])
def test_a_cursor_of_any_form_is_checked(performed, cursor):
    batch, state, observation = performed
    state = snapshot.State(state.step, state.weights, state.optimizer, state.rng, cursor)
    assert gates.sensitive(batch, state, observation).verdict == "exact"


@pytest.mark.parametrize(
    "array",
    [
        mx.array(3, dtype=mx.uint64),
        mx.array(1.5),
        mx.array([1.5, 2.5], dtype=mx.bfloat16),
        mx.array([True, False]),
        mx.arange(6).reshape(2, 3).T,
    ],
)
def test_a_planted_change_is_one_bit_and_nothing_else(array):
    changed = gates._flipped(array)
    assert (changed.dtype, changed.shape) == (array.dtype, array.shape)
    before, after = (int.from_bytes(view.tobytes()) for view in raw_views([array, changed]))
    assert (before ^ after).bit_count() == 1
