"""A number that the step changes: refused, for a later step may ask it; passed where it is named, and recalled then."""

import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from helpers import mlp, mse

import workbench as wb
from workbench.errors import ExperimentError
from workbench.ignored import ignored, refuse_unknown


class Loop:
    """Somebody's training loop, which counts its steps; every tenth has another loss, if `matters`."""

    def __init__(self, matters=False):
        self.model, self.optimizer = mlp(), optim.AdamW(1e-2)
        self.gstep, self.matters, self.log = 0, matters, {"tokens": 0, "losses": []}

    def loss(self, model, x, y):
        return mse(model, x, y) * (2 if self.matters and self.gstep % 10 == 0 else 1)

    def step(self, x, y):
        self.gstep += 1
        self.log["tokens"] += x.shape[0]
        loss, gradients = nn.value_and_grad(self.model, self.loss)(self.model, x, y)
        self.optimizer.update(self.model, gradients)
        return loss


def batches(count):
    own = np.random.default_rng(1)
    return [(x := own.standard_normal((4, 4), np.float32), np.sin(x.sum(1, keepdims=True))) for _ in range(count)]


def record(path, loop, steps, **options):
    own = loop.model, loop.optimizer, loop.loss
    with wb.Recorder(path, *own, step_fn=loop.step, spikes=None, save_every=8, **options) as recorder:
        for batch in batches(steps):
            recorder.step(batch)
    return wb.open_run(path)


def replayed(run, step, loop=None):
    loop = loop or Loop()
    job = wb.Experiment(loop.model, loop.optimizer, loop.loss, step_fn=loop.step)
    return run.replay(step, experiment=job, with_probe=False, fresh_process=False)


def test_a_counter_that_is_asked_is_refused_and_the_refusal_says_how_to_pass_it(tmp_path):
    words = r"changes a number .*gstep \(from 0 to 1\).*ignore=\('gstep',"
    with pytest.raises(ExperimentError, match=words) as caught:
        record(tmp_path / "run", Loop(matters=True), 2)
    (given,) = [part.split(")")[0] for part in str(caught.value).split("ignore=(")[1:]]
    names = [name.strip(" '") for name in given.split(",") if name.strip()]
    assert names == ["gstep"]
    with pytest.warns(UserWarning, match="what no checkpoint holds: loss_fn.self.log.tokens"):
        assert record(tmp_path / "run", Loop(matters=True), 2, ignore=names).last_step == 2


@pytest.mark.filterwarnings("error")
def test_what_is_ignored_passes_without_a_word_is_kept_and_replays(tmp_path):
    loop = Loop()
    run = record(tmp_path / "run", loop, 12, ignore=("gstep", "log"))
    assert loop.gstep == 12 and loop.log["tokens"] == 48
    assert run.manifest.ignore == ["gstep", "log"]
    (meta,) = run.telemetry.metas
    assert meta.remarks == [
        "the step changes loss_fn.self.gstep, loss_fn.self.log.tokens, which no checkpoint holds and the recorder was "
        "told to ignore"
    ]
    for step in (1, 7, 12):
        trace = replayed(run, step)
        assert trace.exact and not any("ignore" in notice for notice in trace.notices)


def test_one_that_matters_after_all_is_recalled_by_the_replay_that_differs(tmp_path):
    run = record(tmp_path / "run", Loop(matters=True), 12, ignore=("self.gstep", "tokens"))
    assert replayed(run, 8, Loop(matters=True)).exact
    trace = replayed(run, 10, Loop(matters=True))  # from checkpoint 8, where a new loop counts from 0 again
    assert not trace.exact
    (notice,) = [one for one in trace.notices if "likely reason" in one]
    assert notice.startswith("What the recorder could not rule out: the step changes ") and "gstep" in notice
    loop = Loop(matters=True)
    loop.gstep = 5
    job = wb.Experiment(loop.model, loop.optimizer, loop.loss, step_fn=loop.step)
    checks = [check for check in run.verify(replay=12, experiment=job).checks if check.kind == "step"]
    wrong = [check.detail for check in checks if check.verdict == "mismatch"]
    assert wrong and all("told to ignore. That is the likely reason." in detail for detail in wrong)


def test_what_the_first_steps_depend_on_is_still_refused(tmp_path):
    class Growing(Loop):
        def loss(self, model, x, y):
            return mse(model, x, y) * (1 if len(self.log["losses"]) < 2 else 2)

        def step(self, x, y):
            self.log["losses"].append(0.0)
            return super().step(x, y)

    with pytest.raises(ExperimentError, match=r"step 1 can't be replayed: performed again.*losses \(a list\)"):
        record(tmp_path / "run", Growing(), 3, ignore=("gstep", "log"))


def test_a_name_of_nothing_is_refused(tmp_path):
    with pytest.raises(ExperimentError) as caught:
        record(tmp_path / "run", Loop(), 2, ignore=("gsteps",))
    assert str(caught.value).startswith(
        "ignore names 'gsteps', and the step can reach nothing of that name: what it changes beside its state is "
        "loss_fn.self.gstep, loss_fn.self.log.tokens; "
    )
    assert "replayed" not in str(caught.value) and "self_check" not in str(caught.value)
    for odd in ((3,), ("",), (".",)):
        with pytest.raises(ExperimentError, match="ignore has"):
            record(tmp_path / "run", Loop(), 2, ignore=odd)


def test_names_are_whole_parts_of_a_path():
    assert ignored("step_fn.self.gstep", ["gstep"]) and ignored("step_fn.self.gstep", ["self.gstep"])
    assert ignored("bar.n", ["bar"]) and ignored("logs[2].n (a list)", ["logs"])
    assert not ignored("step_fn.self.gstep", ["step"]) and not ignored("bar (a list)", ["list"])
    with pytest.raises(ExperimentError, match="ignore names 'x'"):
        refuse_unknown(["x"], [], [], [])


def test_a_run_without_the_check_says_so_where_it_differs(tmp_path):
    with pytest.warns(UserWarning, match="gstep is 8 now, but no checkpoint holds it"):
        run = record(tmp_path / "run", Loop(matters=True), 12, self_check=False, ignore=("log",))
    trace = replayed(run, 10, Loop(matters=True))
    assert not trace.exact and any("without a self-check (self_check=False)" in notice for notice in trace.notices)
    found = run.resumption(8, steps=3, experiment=wb.Experiment(*_of(Loop(matters=True))))
    assert found.trajectory == "mismatch" and "That is the likely reason." in str(found)


class Counting(Loop):
    """Its counter is a number of the class until the step counts."""

    gstep = 0

    def __init__(self, matters=False):
        super().__init__(matters)
        del self.gstep


def test_a_counter_that_begins_as_a_number_of_the_class_is_one_of_the_object(tmp_path):
    with pytest.raises(ExperimentError, match=r"gstep \(from 0 to 1\).*compares it \(test_ignored.py, line \d+\)"):
        record(tmp_path / "run", Counting(matters=True), 2)
    with pytest.warns(UserWarning, match="what no checkpoint holds: .*gstep"):
        loop = Counting()
        assert record(tmp_path / "run", loop, 3).last_step == 3
    assert loop.gstep == 3 and Counting.gstep == 0


def _of(loop):
    return loop.model, loop.optimizer, loop.loss, None, None, loop.step
