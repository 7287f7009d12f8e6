"""An optimizer of the user's own, whose code changes an attribute: it was not told that, so nothing is compared."""

import mlx.optimizers as optim
import pytest
from helpers import Points, mlp, mse

import workbench as wb
from workbench.errors import ExperimentError


class Counting(optim.AdamW):
    def __init__(self, rate, **more):
        super().__init__(rate, **more)
        self.calls, self.last = 0, None

    def apply_gradients(self, gradients, parameters):
        self.calls, self.last = self.calls + 1, "applied"
        return super().apply_gradients(gradients, parameters)


class OfTheClass(optim.AdamW):
    calls, last = 0, None

    def apply_gradients(self, gradients, parameters):
        self.calls += 1
        return super().apply_gradients(gradients, parameters)


class Many(optim.MultiOptimizer):
    def __init__(self, rate):
        super().__init__([Counting(rate), Counting(rate, betas=[0.8, 0.9])], [lambda path, _: "weight" in path])


def parts(kind):
    return mlp(0.1), kind(1e-2), mse, Points()


@pytest.mark.filterwarnings("ignore:the step changes what no checkpoint holds")
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("kind", [Counting, OfTheClass, Many])
def test_it_is_recorded_resumed_and_replayed(tmp_path, kind, compile):
    ignore = ("calls", "last")
    for steps in (4, 8):
        with wb.Recorder(
            tmp_path / "run", *parts(kind), compile=compile, ignore=ignore, resume="auto", save_every=4
        ) as recorder:
            for batch in recorder.batches(steps):
                recorder.step(batch)
    run = wb.open_run(tmp_path / "run")
    mine = run.manifest.optimizer.get("members", [run.manifest.optimizer])
    assert all("calls" in one["changing"] and one["betas"] in ([0.9, 0.999], [0.8, 0.9]) for one in mine)
    experiment = wb.Experiment(*parts(kind), wb.StepOptions(compile=compile))
    assert [trace.exact for trace in run.replay([2, 6], experiment=experiment)] == [True, True]


def test_what_it_was_told_is_still_compared_and_a_count_that_is_used_still_refused(tmp_path):
    with wb.Recorder(tmp_path / "run", *parts(Counting), compile=False, ignore=("calls", "last")) as recorder:
        for batch in recorder.batches(2):
            recorder.step(batch)
    other = wb.Experiment(*parts(lambda rate: Counting(rate, weight_decay=0.5)), wb.StepOptions(compile=False))
    with pytest.raises(ExperimentError, match="weight_decay is 0.5, recorded 0.01$"):
        wb.open_run(tmp_path / "run").replay(2, experiment=other)

    class Using(Counting):
        def apply_single(self, gradient, parameter, state):
            return super().apply_single(gradient * (1 + 0.1 * (self.calls // 2)), parameter, state)

    with (
        pytest.raises(ExperimentError, match="calls"),
        wb.Recorder(tmp_path / "used", *parts(Using), compile=False) as recorder,
    ):
        for batch in recorder.batches(2):
            recorder.step(batch)


def test_a_run_recorded_before_has_the_number_after_its_first_step(tmp_path):
    """Which is a thing that it was told, as far as anybody knows."""
    from workbench.hyperparameters import describe_optimizer, other_optimizer, told

    before, after = describe_optimizer(Counting(1e-2)), describe_optimizer(Counting(1e-2)) | {"calls": 1}
    assert other_optimizer(before, after) == ["optimizer Counting: calls is 0, recorded 1"]
    assert other_optimizer(before, told(before, after)) == other_optimizer(after, told(before, after)) == []
    assert told(before, before) == before
