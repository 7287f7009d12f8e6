"""Steps that the doctor repeats, here and in fresh processes; and the self-test, which has to find what it plants."""

import pytest
from planted_operations import SETTING, small, varying_operation

from workbench import doctor
from workbench.errors import ReplayError
from workbench.examination import operations, repeats, selftest
from workbench.examination.repeats import Job, Setting, fresh_experiments, in_fresh_processes, perform, repeat, tally

# --------------------------------------------------------------------------------------------------------- whole steps


def test_steps_repeat_from_the_same_state():
    stepper, start = fresh_experiments(small)(SETTING)
    found = repeat(stepper, start, 3, 4, 60.0, lambda number: None)
    assert len(found) == 4
    counted = tally(found)
    assert (counted.distinct, counted.first, set(counted.counts.values())) == (1, None, {1})
    names = list(found[0])
    assert names[0] == "batch (step 1)" and names[-1] == "state (cursor)"
    gradients = [name for name in names if name.startswith("gradient of")]
    assert gradients[0].startswith("gradient of layers.3.")  # the last layer's come first


def test_a_slow_step_is_repeated_twice_at_least():
    stepper, start = fresh_experiments(small)(SETTING)
    assert len(repeat(stepper, start, 1, 8, 0.0, lambda number: None)) == 2


def test_the_first_tensor_that_varies_is_the_first_in_execution():
    runs = [{"a": "1", "b": "1", "c": "1"}, {"a": "1", "b": "2", "c": "2"}, {"a": "1", "b": "1", "c": "3"}]
    counted = tally(runs)
    assert (counted.distinct, counted.counts, counted.first) == (3, {"a": 1, "b": 2, "c": 3}, "b")
    assert tally([{"a": "1"}, {"a": "1", "b": "1"}]).first == "b"


def test_a_fresh_process_finds_the_same():
    settings = [Setting(dtype, False, True) for dtype in ("float32", "bfloat16")]
    found = in_fresh_processes(Job(device="cpu", settings=settings, steps=1), 1)
    subject = fresh_experiments(repeats.small_transformer)
    assert found == [[perform(*subject(setting), 1) for setting in settings]]
    assert "gradient of embedding.weight" in found[0][0]


def test_a_fresh_process_that_fails_says_why(tmp_path):
    with pytest.raises(ReplayError, match=r"a fresh process failed: .*nowhere does not exist"):
        in_fresh_processes(Job(device="cpu", settings=[SETTING], steps=1, run=str(tmp_path / "nowhere")), 1)


# ----------------------------------------------------------------------------------------------------------- self-test


def test_the_self_test_finds_what_it_plants():
    test = selftest.self_test(*fresh_experiments(small)(SETTING))
    assert test.found == test.planted >= 15


def test_a_count_that_always_says_one_fails_the_self_test(monkeypatch):
    monkeypatch.setattr(operations, "count_distinct", lambda *parts: 1)
    report = doctor.examine(operations=[varying_operation()], build=small)
    assert report.operations[0].distinct == 1  # fooled, but
    assert report.self_test.found == report.self_test.planted - 2
    assert report.sentence.startswith("Nothing is proven: the doctor missed 2 of")


@pytest.mark.parametrize(
    ("module", "name", "blind"),
    [
        (selftest, "missed_flips", lambda evidence: list(evidence)),
        (selftest, "first_difference", lambda left, right: None),
        (selftest, "tally", lambda found: tally(found[:1])),
    ],
)
def test_each_blind_spot_fails_the_self_test(monkeypatch, module, name, blind):
    monkeypatch.setattr(module, name, blind)
    test = selftest.self_test(*fresh_experiments(small)(SETTING))
    assert test.found < test.planted


def test_a_fingerprint_of_shapes_only_fails_the_self_test(monkeypatch):
    monkeypatch.setattr(repeats, "fingerprint", lambda tensors: str([array.shape for array in tensors.values()]))
    test = selftest.self_test(*fresh_experiments(small)(SETTING))
    assert test.found == test.planted - 1
