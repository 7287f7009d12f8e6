"""A loop that goes on, or ends its recording, after a Ctrl-C or an exception at an unlucky point of a step: the run
stays whole, and its steps replay exactly."""

import contextlib
import json
import os
import random
import signal
import threading
import time
import warnings

import helpers
import mlx.core as mx
import mlx.optimizers as optim
import pytest
from helpers import mlp, mse

import workbench as wb
from workbench import step
from workbench.interrupts import Deferral
from workbench.lines.line import Line
from workbench.lines.seal import Chain
from workbench.lines.writer import Writer
from workbench.saving import Save, Saver

STEPS = 10
Boom = type("Boom", (BaseException,), {})


def build():
    return wb.Experiment(mlp(0.2), optim.AdamW(1e-2), mse, None, wb.StepOptions(compile=False))


def batches(steps=STEPS):
    keys = [mx.random.key(number) for number in range(steps)]
    inputs = [mx.random.normal((6, 4), key=key) for key in keys]
    return [(one, one.sum(axis=1, keepdims=True)) for one in inputs]


def once(owner, name, when=lambda *_, **__: True, *, after=False, error=KeyboardInterrupt):
    """The first call for which `when` holds raises: instead of doing anything, or when it is done."""
    real, left = getattr(owner, name), [1]

    def call(*arguments, **more):
        if not left or not when(*arguments, **more):
            return real(*arguments, **more)
        left.clear()
        if after:
            real(*arguments, **more)
        raise error

    setattr(owner, name, call)


def line_of(step):
    return lambda **fields: fields["type"] == "step" and fields["step"] == step


def recorded(path, prepare, *, change=None, **settings):
    """A loop that goes on after each interrupt. Returns at which batches they came, and the warnings."""
    job, came = build(), []
    settings = {"save_every": 3, "black_box": 0, "compile": False} | settings
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        recorder = wb.Recorder(path, job.model, job.optimizer, job.loss_fn, **settings)
        for number, batch in enumerate(batches(), 1):
            if number == 3:
                prepare(recorder)
            if number == 6 and change is not None:
                change(job)
            try:
                recorder.step(batch)
            except (KeyboardInterrupt, Boom):
                came.append(number)
        recorder.close()
    return came, [str(one.message) for one in said]


def assert_whole(path, steps):
    found = wb.open_run(path).verify(replay=STEPS, experiment=build())
    assert found.whole, found.sentence()
    lines = [json.loads(line) for line in (path / "telemetry.jsonl").read_bytes().splitlines()]
    logged = [line["step"] for line in lines if line["type"] == "step"]
    assert logged == list(range(1, steps + 1)) and (lines[-1]["type"], lines[-1]["step"]) == ("done", steps)


def scale(job):
    job.model.layers[0].weight = job.model.layers[0].weight * 1.5


def between(name, **more):
    return lambda recorder: once(recorder._out, name, **more)


@pytest.fixture
def cut(monkeypatch):
    """Has the n-th forward and backward pass from now on raise: `cut(n)`. Compiled, that is one while MLX traces it."""
    real, left = step.forward_backward, []

    def passed(*arguments, **more):
        if left and len(left.pop()) == 0:
            raise KeyboardInterrupt
        return real(*arguments, **more)

    def set_(number):
        left[:] = [[None] * place for place in range(number)]

    monkeypatch.setattr(step, "forward_backward", passed)
    return set_


@pytest.mark.parametrize("which", [1, 2], ids=["itself", "checked"])
@pytest.mark.parametrize("compile", [False, True])
def test_a_first_step_of_a_process_that_was_cut_off_is_none(tmp_path, cut, compile, which):
    """Its batch is the next step's, and what MLX's trace left in place of arrays is put back: after the second one,
    which checks the first, too."""
    for steps, goes_on in ((4, {}), (7, {"resume": True, "begins_again": False})):
        job, options = build(), {"compile": compile, "save_every": 100, **goes_on}
        with wb.Recorder(tmp_path / "run", job.model, job.optimizer, mse, **options) as recorder:
            cut(which)
            with pytest.raises(KeyboardInterrupt):
                recorder.step(batches()[recorder.step_number])
            for batch in batches()[recorder.step_number : steps]:
                recorder.step(batch)
    job = wb.Experiment(mlp(0.2), optim.AdamW(1e-2), mse, None, wb.StepOptions(compile=compile))
    found = wb.open_run(tmp_path / "run").verify(replay=STEPS, experiment=job)
    assert found.whole and found.exact and sum(one.kind == "step" for one in found.checks) == 7, found.sentence()


def test_a_later_step_that_was_cut_off_while_it_was_traced_is_one_sentence(tmp_path, cut):
    """MLX leaves nothing in the arrays then, without a recorder, too; what was committed is gone on with."""

    def recorder(**more):
        return wb.Recorder(tmp_path / "run", mlp(0.2), optim.AdamW(1e-2), mse, save_every=2, **more)

    with recorder() as one:
        for batch in batches()[:4]:
            one.step(batch)
        cut(1)
        with pytest.raises(KeyboardInterrupt):
            one.step(tuple(part[:5] for part in batches()[4]))  # of another shape: traced again
        with pytest.raises(wb.errors.ExperimentError, match=r"step 5 was cut off while MLX traced it.*resume=True"):
            one.step(batches()[4])
    mx.random.seed(0)
    with recorder(resume=True, begins_again=False) as two:
        assert two.step_number == 4
        two.step(batches()[4])
        assert two.step_number == 5


CASES = {
    # name: what raises, the batches at which it does, steps that count in the end, more
    "before a line": (lambda r: once(r._out, "append", line_of(5)), [5], 9, {}),
    "after a line": (lambda r: once(r._out, "append", line_of(5), after=True), [5], 10, {}),
    "before the last line": (lambda r: once(r._out, "append", line_of(10)), [10], 9, {}),
    "after the last line": (lambda r: once(r._out, "append", line_of(10), after=True), [10], 10, {}),
    "before a due save": (lambda r: once(r._out.saves, "save", lambda held, _: held.state.step == 6), [6], 10, {}),
    "after a due save": (
        lambda r: once(r._out.saves, "save", lambda held, _: held.state.step == 6, after=True),
        [6],
        10,
        {},
    ),
    "before the last due save": (
        lambda r: once(r._out.saves, "save", lambda held, _: held.state.step == 10),
        [10],
        10,
        {"save_every": 5},
    ),
    "within a step": (lambda r: once(r._stepper, "_performed", lambda *_: r.step_number == 5, after=True), [6], 9, {}),
    "within the last step": (
        lambda r: once(r._stepper, "_performed", lambda *_: r.step_number == 9, after=True),
        [10],
        9,
        {},
    ),
    "while a segment is begun": (lambda r: once(r._out, "add_segment", after=True), [6], 9, {"change": scale}),
    "before a segment's line": (lambda r: once(r._out, "append_meta"), [6], 9, {"change": scale}),
    "before a segment's save": (
        lambda r: once(r._out.saves, "save", lambda held, _: held.segment == 1),
        [6],
        9,
        {"change": scale, "save_every": 100},
    ),
    "after a segment's save": (
        lambda r: once(r._out.saves, "save", lambda held, _: held.segment == 1, after=True),
        [6],
        9,
        {"change": scale, "save_every": 100},
    ),
}


OF_OTHERS = ["before a line", "after a line", "before a due save", "before a segment's save"]


@pytest.mark.parametrize(
    ("name", "error"), [(name, KeyboardInterrupt) for name in CASES] + [(name, Boom) for name in OF_OTHERS]
)
def test_a_run_stays_whole(tmp_path, name, error, monkeypatch):
    prepare, at, steps, more = CASES[name]
    monkeypatch.setitem(once.__kwdefaults__, "error", error)
    came, _ = recorded(tmp_path / "run", prepare, **more)
    assert came == at
    assert_whole(tmp_path / "run", steps)


def test_two_in_a_row(tmp_path):
    def prepare(recorder):
        once(recorder._stepper, "_performed", lambda *_: recorder.step_number == 5, after=True)
        once(recorder._out.saves, "save", lambda held, _: held.segment == 1)

    came, said = recorded(tmp_path / "run", prepare, save_every=100)
    assert came == [6, 7] and len(said) == 1
    assert_whole(tmp_path / "run", 8)


def test_a_line_and_then_its_segment(tmp_path):
    def prepare(recorder):
        once(recorder._out, "append", line_of(5))
        once(recorder._out.saves, "save", lambda held, _: held.segment == 1)

    assert recorded(tmp_path / "run", prepare, save_every=100)[0] == [5, 6]
    assert_whole(tmp_path / "run", 8)


@pytest.mark.parametrize("after", [False, True])
def test_a_segment_at_the_very_end(tmp_path, after):
    """Its opening is cut off, and no step follows: nothing contradicts it, though no step speaks for it."""
    job = build()
    recorder = wb.Recorder(tmp_path / "run", job.model, job.optimizer, mse, save_every=3, black_box=0, compile=False)
    for batch in batches():
        recorder.step(batch)
    scale(job)
    once(recorder._out.saves, "save", lambda held, _: held.segment == 1, after=after)
    with pytest.raises(KeyboardInterrupt):
        recorder.step(batch)
    recorder.close()
    found = wb.open_run(tmp_path / "run").verify(replay=STEPS, experiment=build())
    assert found.exact and (10, 1) in wb.open_run(tmp_path / "run").checkpoints, found.sentence()


@pytest.mark.parametrize("taken", [False, True])
def test_a_batch_that_was_drawn_for_a_step_that_never_began(tmp_path, taken):
    """The loop is begun again, and goes on with the next batch."""
    job, drawn = helpers.experiment(dropout=0.2), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        recorder = wb.Recorder(tmp_path / "run", *helpers.parts(job), save_every=4, black_box=0, compile=False)
        for _ in range(2):
            with contextlib.suppress(KeyboardInterrupt):
                for batch in recorder.batches(STEPS):
                    drawn.append(batch)
                    if len(drawn) == 6:
                        if not taken:
                            raise KeyboardInterrupt
                        once(recorder._first_steps, "of_next")
                    recorder.step(batch)
        recorder.close()
    assert len(drawn) == STEPS + 1
    found = wb.open_run(tmp_path / "run").verify(replay=STEPS, experiment=helpers.experiment(dropout=0.2))
    assert found.whole, found.sentence()


def test_a_stored_batch_that_was_taken_for_a_step_that_never_began(tmp_path):
    came, said = recorded(tmp_path / "run", lambda recorder: once(recorder._first_steps, "of_next"))
    assert came == [3] and said == []
    assert_whole(tmp_path / "run", 9)


def test_a_due_checkpoint_whose_state_is_gone_is_said(tmp_path):
    """Step 6 is cut off before its checkpoint, and the loop changes the weights before step 7."""
    job, said = build(), []
    recorder = wb.Recorder(tmp_path / "run", job.model, job.optimizer, mse, save_every=3, black_box=0, compile=False)
    for number, batch in enumerate(batches(), 1):
        if number == 6:
            once(recorder._out.saves, "save", lambda held, _: held.state.step == 6)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                recorder.step(batch)
            except KeyboardInterrupt:
                scale(job)
        said += [str(one.message) for one in caught]
    recorder.close()
    assert [one for one in said if one.startswith("checkpoint 6 was not saved to ")]
    assert wb.open_run(tmp_path / "run").replay(8, experiment=build(), fresh_process=False).exact


# ---------------------------------------------------------------------------------------------------------- the saver


def test_a_thread_that_does_not_start_leaves_nothing_behind(monkeypatch):
    saver, done = Saver(2), []

    def start(self):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(KeyboardInterrupt):
            saver.put(Save(1, lambda: done.append(1)))
    assert saver.idle
    saver.put(Save(2, lambda: done.append(2)))
    saver.wait()
    assert done == [2]


def test_a_thread_that_starts_all_the_same_saves_nothing_twice(monkeypatch):
    saver, done, real = Saver(2), [], threading.Thread.start

    def start(self):
        real(self)
        monkeypatch.setattr(threading.Thread, "start", real)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(KeyboardInterrupt):
        saver.put(Save(1, lambda: done.append(1)))
    saver.put(Save(2, lambda: done.append(2)))
    saver.wait()
    assert done == [2]


# ---------------------------------------------------------------------------------------------------------- the lines


def seals_hold(path):
    chain = Chain()
    return [chain.follow(line) for line in path.read_bytes().splitlines(keepends=True)]


@pytest.mark.parametrize("after", [False, True])
def test_a_write_that_was_cut_off_is_neither_lost_nor_doubled(tmp_path, monkeypatch, after):
    writer = Writer(tmp_path / "lines")
    line = {number: Line(type="step", t=0.0, elapsed_s=0.0, segment=0, step=number) for number in (1, 2, 3)}
    writer.append(line[1])
    with monkeypatch.context() as patch:
        real = os.write

        def write(descriptor, content):
            if after:
                real(descriptor, content)
            raise KeyboardInterrupt

        patch.setattr(os, "write", write)
        with pytest.raises(KeyboardInterrupt):
            writer.append(line[2])
    assert writer.logged == (0, 2)
    writer.append(line[3])
    writer.close()
    assert seals_hold(tmp_path / "lines") == [True] * 3
    assert [json.loads(one)["step"] for one in (tmp_path / "lines").read_bytes().splitlines()] == [1, 2, 3]


# ----------------------------------------------------------------------------------------------------------- signals


def test_a_ctrl_c_waits_for_the_end_of_the_block():
    before, reached = signal.getsignal(signal.SIGINT), []
    with pytest.raises(KeyboardInterrupt):
        with Deferral():
            signal.raise_signal(signal.SIGINT)
            reached.append("end")
    assert reached == ["end"] and signal.getsignal(signal.SIGINT) is before


def test_a_second_one_does_not_wait():
    reached = []
    with pytest.raises(KeyboardInterrupt):
        with Deferral(), Deferral():  # one within another
            signal.raise_signal(signal.SIGINT)
            reached.append("first")
            signal.raise_signal(signal.SIGINT)
            reached.append("second")
    assert reached == ["first"]


def test_a_handler_of_the_users_own_gets_each(monkeypatch):
    got, own = [], []
    before = signal.signal(signal.SIGTERM, lambda number, _: got.append(number))
    try:
        with Deferral():
            signal.raise_signal(signal.SIGTERM)
            own.append(list(got))
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
        assert own == [[]] and got == [signal.SIGTERM] * 3
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_handler_that_is_set_within_the_block_stays():
    before = signal.getsignal(signal.SIGINT)

    def other(number, frame): ...

    try:
        with Deferral():
            signal.signal(signal.SIGINT, other)
        assert signal.getsignal(signal.SIGINT) is other
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_thread_has_nothing_to_defer():
    found = []

    def run():
        with Deferral():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    assert found == [signal.getsignal(signal.SIGINT)]


def test_a_ctrl_c_while_a_line_is_written_comes_when_the_step_is_whole(tmp_path):
    job = build()
    recorder = wb.Recorder(tmp_path / "run", job.model, job.optimizer, mse, save_every=3, black_box=0, compile=False)
    real = recorder._out.append

    def append(**fields):
        if fields["type"] == "step" and fields["step"] == 6:
            signal.raise_signal(signal.SIGINT)
        real(**fields)

    recorder._out.append = append
    with pytest.raises(KeyboardInterrupt):
        for batch in batches():
            recorder.step(batch)
    assert recorder.step_number == 6
    recorder.close()
    assert (6, 0) in wb.open_run(tmp_path / "run").checkpoints
    assert_whole(tmp_path / "run", 6)


@pytest.mark.parametrize("seed", range(4))
def test_a_ctrl_c_at_any_time(tmp_path, seed):
    """Real signals, out of a timer, at random times of a step."""
    chosen, job, came, took = random.Random(seed), build(), 0, 0.01
    recorder = wb.Recorder(tmp_path / "run", job.model, job.optimizer, mse, save_every=3, black_box=0, compile=False)
    before = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for number, batch in enumerate(batches(14), 1):
                try:
                    if 2 < number < 13:  # the last ones are whole
                        signal.setitimer(signal.ITIMER_REAL, chosen.uniform(0.02, 0.7) * took)
                    began = time.perf_counter()
                    recorder.step(batch)
                    signal.setitimer(signal.ITIMER_REAL, 0)
                    took = time.perf_counter() - began  # so that most of the next signals come within a step
                except KeyboardInterrupt:
                    came += 1
            recorder.close()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert came
    found = wb.open_run(tmp_path / "run").verify(replay=14, experiment=build())
    assert found.whole, found.sentence()
