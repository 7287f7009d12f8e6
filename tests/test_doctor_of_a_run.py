"""The doctor, asked about a run: its own module, parameter or sampler is named."""

import itertools

import pytest
from helpers import Points, experiment, tree
from planted_operations import TEST, drifting_gradient, printed, record_own_loop
from runs import build as build_regression
from runs import recorded_read_only, strict, workbench

from workbench import doctor, open_run
from workbench.errors import ExperimentError, ReplayError
from workbench.examination import conclusion
from workbench.examination.diagnosis import StepRow


def test_a_run_of_the_trainer():
    run = recorded_read_only()
    before = tree(run)
    said = workbench("doctor", run, "--json")
    assert said.code == 0, said.err
    report = strict(said.out)
    assert report["sentence"] == (
        "Replay is bit-exact on this machine for recorded (float32, compiled, deterministic operations): "
        "8 repetitions here and 1 in a fresh process gave one result."
    )
    assert [row["distinct"] for row in report["operations"]] == [1] * len(open_run(run).manifest.parameters)
    assert report["operations"][-1]["name"] == "embedding.weight"  # the first layer's gradient comes last
    assert tree(run) == before


def test_a_loop_of_ones_own(tmp_path):
    run = record_own_loop(tmp_path / "run")
    report = doctor.examine_run(run, experiment=build_regression())
    assert report.sentence.startswith("Replay is bit-exact within one process on this machine for run (float32, eager")
    with pytest.raises(ExperimentError, match="runs:build"):
        doctor.examine_run(run)
    with pytest.raises(ExperimentError, match="learning_rate|eps"):
        doctor.examine_run(run, experiment=build_regression(eps=1e-3))


def test_a_run_whose_gradient_varies_is_told_module_and_parameter(tmp_path):
    def build():
        job = build_regression()
        job.loss_fn = drifting_gradient()
        return job

    run = record_own_loop(tmp_path / "run", build)
    report = doctor.examine_run(run, experiment=build())
    assert report.step[0].first == "gradient of layers.1.weight" and report.step[0].module == "layers.1"
    assert report.sentence == (
        "Replay is not bit-exact on this machine for run (float32, eager, deterministic operations): "
        "the gradient of layers.1.weight (module layers.1) varies first; 4 gradients vary in all."
    )
    assert all(row.distinct == row.repeats == 8 and row.remedy for row in report.operations)
    text = printed(report)
    assert "0 of 4 gradients came out the same" in text and "layers.0.bias" in text


def test_a_sampler_that_gives_another_batch_is_named(tmp_path):
    class Forgetful(Points):
        calls = itertools.count()

        def load_state_dict(self, cursor):
            self.number = cursor["number"] + next(self.calls)

    def build():
        job = experiment()
        job.sampler = Forgetful()
        return job

    run = record_own_loop(tmp_path / "run", build)
    report = doctor.examine_run(run, experiment=build())
    assert report.sentence.endswith(
        "the batch varies first; 4 gradients vary in all, so its sampler does not give the "
        "same batch from the same cursor."
    )


def test_stock_operations_of_a_run_are_told_the_remedy():
    rows = [
        StepRow("bfloat16", True, det, 1, 8, 1, n, first, "embedding" if first else None)
        for det, n, first in ((False, 9, "gradient of embedding.weight"), (True, 1, None))
    ]
    assert conclusion.conclude_run("mine", rows, 1, TEST) == (
        "Replay is not bit-exact on this machine for mine (bfloat16, compiled, stock operations): "
        "the gradient of embedding.weight (module embedding) varies first; with deterministic operations (the default) "
        "it would be exact, so record with them."
    )


def test_a_run_without_a_checkpoint_is_refused(tmp_path):
    run = record_own_loop(tmp_path / "run")
    for path in (run.path / "checkpoints").iterdir():
        path.unlink()
    with pytest.raises(ReplayError, match="no checkpoint"):
        doctor.examine_run(run, experiment=build_regression())
