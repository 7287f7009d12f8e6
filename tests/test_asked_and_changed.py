"""A loop that goes on with a run and hands over its batches itself: what it asks of the recorder, and what it changes
in the state, before its first batch."""

import logging
import sys

import mlx.core as mx
import pytest
from test_stored_batches import build, stream

import workbench as wb
from workbench.errors import ExperimentError
from workbench.recording.shown_only import shown_only

log = logging.getLogger("tests.asked")


def recorder(path, job, **more):
    return wb.Recorder(path, job.model, job.optimizer, job.loss_fn, save_every=4, spikes=None, **more)


def batches():
    return list(stream(epochs=3, batches=9))


@pytest.fixture
def run(tmp_path):
    with recorder(tmp_path / "run", build()) as one:
        for batch in batches()[:9]:
            one.step(batch)
    return tmp_path / "run"


# ---------------------------------------------------------------------------------------------------- asked


def test_a_loop_that_only_prints_where_it_stands_may_begin_again(run, capsys):
    with recorder(run, build(), resume="auto") as one:
        print(one.step_number)
        print(f"going on from {one.step_number}, " + "or so")
        for batch in batches()[:12]:
            one.step(batch)
    assert capsys.readouterr().out == "9\ngoing on from 9, or so\n"
    assert wb.open_run(run).telemetry.last_step() == 12
    assert [trace.exact for trace in wb.open_run(run).replay([10, 12], experiment=build())] == [True, True]


def test_one_that_may_go_by_it_is_still_asked(run):
    with recorder(run, build(), resume="auto") as one:
        start = one.step_number
        with pytest.raises(ExperimentError, match="which of the two it is can't be told"):
            one.step(batches()[0])
        assert start == 9
    with recorder(run, build(), resume="auto") as one:
        print("on" if one.step_number else "new")
        with pytest.raises(ExperimentError, match="which of the two it is can't be told"):
            one.step(batches()[0])


class Asked:
    """Whether the line that asks only shows what it gets."""

    found: list

    @property
    def n(self):
        self.found.append(shown_only(sys._getframe(1)))
        return 7


def test_what_is_only_shown():
    one, found, text = Asked(), [], "x"
    one.found = found
    print(one.n)
    print("at", f"step {one.n:>4}", str(one.n + 1), sep=text)
    log.debug("step %d", one.n)
    logging.getLogger("tests.asked")
    one.n  # noqa: B018 - as the last line of a cell
    assert one.n == 7
    assert found == [True] * 6


def test_what_may_be_gone_by():
    one, found = Asked(), []
    one.found = found

    def keep(value):
        return value

    def shadowed(print):
        print(one.n)

    number = one.n
    for _ in range(one.n):
        break
    keep(one.n)
    print(keep(one.n))
    shadowed(keep)
    print([keep(value) for value in range(one.n)][0])
    print(one.n or keep(number))
    if one.n > 8:
        keep(None)
    (other := one.n)
    assert keep(one.n) and other
    eval("one.n", {"one": one})
    getattr(one, "n")  # noqa: B009
    assert found == [False] * 12


# -------------------------------------------------------------------------------------------------- changed


def zero(job):
    job.model.layers[0].weight = mx.zeros_like(job.model.layers[0].weight)


def test_a_change_that_is_put_back_is_told(run):
    job = build()
    with recorder(run, job, resume="auto") as one:
        zero(job)
        with pytest.warns(UserWarning, match=r"layers\.0\.weight was changed .* is put back.*batch of step 10"):
            one.step(batches()[0])
        for batch in batches()[1:11]:
            one.step(batch)
    assert all(trace.exact for trace in wb.open_run(run).replay([10, 11], experiment=build()))


def test_what_the_loop_did_to_a_new_run_too_is_not(tmp_path):
    """A script that loads weights after it has made the recorder does so each time."""
    for steps in (5, 9):
        job = build()
        with recorder(tmp_path / "run", job, resume="auto") as one:
            zero(job)
            for batch in batches()[:steps]:
                one.step(batch)
    assert all(trace.exact for trace in wb.open_run(tmp_path / "run").replay(range(1, 10), experiment=build()))


def test_a_change_that_is_gone_on_from_is_told(run, caplog):
    job = build()
    with recorder(run, job, resume="auto", begins_again=False) as one:
        zero(job)
        for batch in batches()[9:11]:
            one.step(batch)
    assert "layers.0.weight was changed after the recorder was made and before its first step" in caplog.text
    assert "goes on from the changed state in segment 1, and not from that of step 9" in caplog.text
    assert all(trace.exact for trace in wb.open_run(run).replay([10, 11], experiment=build()))


def test_a_learning_rate_and_a_draw_are_no_such_change(run, caplog):
    job = build()
    with recorder(run, job, resume="auto", begins_again=False) as one:
        job.optimizer.learning_rate = 1e-4
        mx.random.uniform()
        one.step(batches()[9])
    assert "was changed" not in caplog.text
