"""A step that logs, counts and times itself is recorded where nothing it computes depends on that, and refused else."""

import collections
import csv
import io
import json
import logging
import queue
import statistics
import sys
import time

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest
from helpers import Points, ScaledJob, mlp, mse, record_scaled
from tqdm import tqdm

import workbench as wb
from workbench.errors import ExperimentError

log = logging.getLogger("test.step")
last_time = 0.0
tokens = 0


def recorded(path, make):
    """Returns what was said."""
    return record_scaled(path, make, 4)[1]


def replays(path, make):
    job = ScaledJob(make())
    own = wb.Experiment(job.model, job.optimizer, mse, Points(), step_fn=job.step)
    return wb.open_run(path).replay(3, experiment=own, with_probe=False).exact


class Meter:
    """As everybody has one."""

    def __init__(self):
        self.value, self.total, self.count, self.mean = 0.0, 0.0, 0, 0.0

    def update(self, value, n=1):
        self.value = value
        self.total += value * n
        self.count += n
        self.mean = self.total / self.count


class Board:
    """Buffers what it is given, as the client of a service does."""

    def __init__(self):
        self.step, self.buffer, self.waiting = 0, [], queue.Queue()

    def log(self, **values):
        self.step += 1
        self.buffer.append({"step": self.step, **values})
        self.waiting.put(values)


# ------------------------------------------------------------------------------------------- what nothing depends on


def logged():
    return lambda norm: log.info("norm %.3f", norm)


def printed():
    return lambda norm: print("norm", norm, file=sys.stderr)


def listed():
    history = []
    return lambda norm: history.append(norm)


def averaged_for_the_screen():
    recent = collections.deque(maxlen=2)

    def habit(norm):
        recent.append(norm)
        log.info("%.3f", sum(recent) / len(recent))

    return habit


def timed():
    def habit(norm):
        global last_time
        now = time.time()
        log.info("%.1f ms", 1000 * (now - last_time))
        last_time = now

    return habit


def counted():
    def habit(norm):
        global tokens
        tokens += 12 * 4
        print(f"{tokens} tokens, {tokens / 3:.1f} a line, {tokens:08d}, %d of %s" % (tokens, tokens), file=sys.stderr)

    return habit


def metered():
    meter = Meter()

    def habit(norm):
        meter.update(norm, 12)
        log.info(f"{meter.mean:.4f} over {round(meter.mean, 2)}")

    return habit


def smoothed():
    state = {"loss": 0.0}

    def habit(norm):
        state["loss"] = 0.9 * state["loss"] + 0.1 * norm + np.float64(0.5)
        state["least"] = -abs(state["loss"])

    return habit


def every_tenth_printed():
    count = 0

    def habit(norm):
        nonlocal count
        count += 1
        if count % 10 == 1 and norm > 0:
            print(f"step {count}: {norm:.3f}", round(norm, 2))
            log.info("step %d", count)

    return habit


def with_a_bar():
    bar = tqdm(range(10), file=io.StringIO(), mininterval=0)

    def habit(norm):
        bar.set_postfix(norm=norm)
        bar.update(1)

    return habit


def on_a_board():
    board = Board()
    return lambda norm: board.log(norm=norm)


def in_memory():
    text = io.StringIO()
    return lambda norm: print(norm, file=text)


SANE = [logged, printed, listed, averaged_for_the_screen, timed, counted, metered, smoothed, every_tenth_printed]
SANE += [with_a_bar, on_a_board, in_memory]
SILENT = [logged, printed]  # nothing that the step can reach has changed


@pytest.mark.parametrize("make", SANE)
def test_it_is_recorded_with_a_note_and_replays(tmp_path, make):
    said = recorded(tmp_path / "run", make)
    noted = [one.startswith("the step changes what no checkpoint holds: step_fn.habit.") for one in said]
    assert noted == ([] if make in SILENT else [True]), said
    assert replays(tmp_path / "run", make)


# ------------------------------------------------------------------------------------------------ what the step uses


def mean_that_scales():
    history = []
    return lambda norm: history.append(norm) or 1 / (1 + sum(history) / len(history))


def meter_that_scales():
    meter = Meter()

    def habit(norm):
        meter.update(norm)
        return 1 / (1 + meter.mean)

    return habit


def counter_that_warms_up():
    count = 0

    def habit(norm):
        nonlocal count
        count += 1
        return 0.5 if count > 100 else 1.0

    return habit


def lookup():
    state, scales = {"count": 0}, [1.0] * 100

    def habit(norm):
        state["count"] += 1
        return scales[state["count"]]

    return habit


def name_lookup():
    state, scales = {"count": 0.0}, {number: 1.0 for number in range(100)}

    def habit(norm):
        state["count"] += 1
        return scales[state["count"]]

    return habit


def every_tenth_drawn():
    count = 0

    def habit(norm):
        nonlocal count
        count += 1
        if count % 10 == 0:
            print(mx.random.normal((2,)).tolist())

    return habit


def every_tenth_something_else():
    count = 0

    def habit(norm):
        nonlocal count
        count += 1
        if count % 10 == 0:
            print("more")
        else:
            log.info("less")
        return 1.0

    return habit


def multiplied_by_zero():
    """MLX gets the number, though no bit depends on it at the first step."""
    count = 0

    def habit(norm):
        nonlocal count
        count += 1
        return mx.minimum(mx.array(1.0) * count, 1.0)

    return habit


def given_to_mlx():
    count = 0

    def habit(norm):
        nonlocal count
        count += 1
        return mx.minimum(mx.full((1,), count), 1.0)

    return habit


def ranged():
    count = 0

    def habit(norm):
        nonlocal count
        count += 1
        return 1 - 0 * mx.arange(count)[0]

    return habit


def with_numpy():
    count = 0

    def habit(norm):
        nonlocal count
        count += 1
        return float((np.zeros(3) * count + 1).mean())

    return habit


def bar_that_scales():
    bar = tqdm(range(10), file=io.StringIO())
    return lambda norm: bar.update(1) and None or 1 / (1 + bar.n)


def queue_that_is_read():
    waiting = queue.Queue()

    def habit(norm):
        waiting.put(norm)
        return 1 / (1 + waiting.get())

    return habit


def of_numpy():
    mean = np.float32(0)

    def habit(norm):
        nonlocal mean
        mean = np.float32(0.9) * mean + np.float32(norm)
        return 0.5 if mean > 1e6 else 1.0

    return habit


def exactly_of_a_type():
    """With anything else in the place of the number it goes another way."""
    count = 0

    def habit(norm):
        nonlocal count
        count = count + 1
        return 1.0 if type(count) is int else 0.5

    return habit


def caught():
    count = 0

    def habit(norm):
        nonlocal count
        count += 1
        try:
            return 0.5 if count > 100 else 1.0
        except BaseException:
            return 1.0

    return habit


def copied():
    import copy

    state = {"count": 0}

    def habit(norm):
        state["count"] += 1
        return 0.5 if copy.deepcopy(state)["count"] > 100 else 1.0

    return habit


LINE = counter_that_warms_up.__code__.co_firstlineno + 6  # where it compares

USED = [
    (mean_that_scales, r"step 2 .*history \(a list\)"),
    (meter_that_scales, r"step [12] .*habit\.meter"),
    (counter_that_warms_up, rf"number .*habit\.count \(from 0 to 1\), compares it \(\w+\.py, line {LINE}\)"),
    (lookup, r"habit\.state\.count \(from 0 to 1\), counts or looks something up by it \("),
    (name_lookup, r"habit\.state\.count \(from 0.0 to 1.0\), looks something up by it \("),
    (every_tenth_drawn, r"habit\.count \(from 0 to 1\), compares it \("),
    (every_tenth_something_else, r"habit\.count \(from 0 to 1\), compares it \("),
    (multiplied_by_zero, r"habit\.count \(from 0 to 1\), gives it to MLX \("),
    (given_to_mlx, r"habit\.count \(from 0 to 1\), gives it to MLX \("),
    (of_numpy, r"habit\.mean \(from 0.0 to 1\.\d+\), compares it \("),
    (exactly_of_a_type, r"habit\.count \(from 0 to 1\), gives other bits with a stand-in in its place"),
    (caught, r"habit\.count \(from 0 to 1\), compares it \("),
    (copied, r"habit\.state\.count \(from 0 to 1\), compares it \("),
    (ranged, r"habit\.count \(from 0 to 1\), hands it to something that takes no other number in its place \(arange"),
    (with_numpy, r"habit\.count \(from 0 to 1\), calculates with it and a numpy\.ndarray \("),
    (bar_that_scales, r"step [12] can't be replayed"),
    (queue_that_is_read, r"takes something from step_fn\.habit\.waiting \(a queue.Queue\)"),
]


@pytest.mark.parametrize(("make", "words"), USED, ids=lambda one: getattr(one, "__name__", ""))
def test_a_step_that_uses_what_it_keeps_is_refused(tmp_path, make, words):
    with pytest.raises(ExperimentError, match=words):
        recorded(tmp_path / "run", make)
    assert not (tmp_path / "run").exists() or "step 2" in words or "[12]" in words


# ---------------------------------------------------------------------------------------------------- what is not known


def handed_on():
    meter = Meter()

    def habit(norm):
        meter.update(norm)
        log.info("%f", float(meter.mean))

    return habit


def in_json():
    state = {"count": 0}

    def habit(norm):
        state["count"] += 1
        json.dumps(state)

    return habit


@pytest.mark.parametrize("make", [handed_on, in_json])
def test_what_becomes_of_a_number_that_is_handed_on_is_unverified(tmp_path, make):
    said = recorded(tmp_path / "run", make)
    assert said[0].startswith("whether a step depends on a number that no checkpoint holds is unverified (step_fn.")
    assert said[1].startswith("the step changes what no checkpoint holds: ") and len(said) == 2
    assert replays(tmp_path / "run", make)


def test_a_number_that_is_handed_on_is_named_with_the_line(tmp_path):
    said = recorded(tmp_path / "run", handed_on)[0]
    assert "habit.meter.total: the step hands it on as a number (test_step_that_logs.py, line " in said
    assert "meter.count" not in said


def of_the_library():
    """Whose own code compares the numbers."""
    state = {"sum": 0.0}

    def habit(norm):
        state["sum"] += norm
        statistics.median([state["sum"], 1.0])

    return habit


def test_a_library_that_only_calculates_is_no_reporter(tmp_path):
    with pytest.raises(ExperimentError, match=r"habit\.state\.sum .*compares it \(statistics.py, line "):
        recorded(tmp_path / "run", of_the_library)


# --------------------------------------------------------------------------------------- one line a step, all the same


def test_a_file_that_the_step_writes_to_has_one_line_a_step(tmp_path):
    with (tmp_path / "a.csv").open("w") as rows, (tmp_path / "b.txt").open("w+") as lines:
        writer = csv.writer(rows)

        def habit(norm):
            writer.writerow([norm])
            assert lines.write("x\n") == 2
            print("y", file=lines, flush=True)

        recorded(tmp_path / "run", lambda: habit)
    assert (tmp_path / "b.txt").read_text() == "x\ny\n" * 4
    assert len((tmp_path / "a.csv").read_text().split()) == 4


def test_a_queue_gets_one_entry_a_step(tmp_path):
    waiting, simple = queue.Queue(), queue.SimpleQueue()
    recorded(tmp_path / "run", lambda: lambda norm: waiting.put(norm) or simple.put_nowait(norm))
    assert waiting.qsize() == simple.qsize() == 4


def test_a_file_that_is_written_to_and_read_is_used(tmp_path):
    with (tmp_path / "b.txt").open("w+") as lines:

        def habit(norm):
            lines.write("x")
            lines.seek(0)
            return 1 / (1 + len(lines.read()))

        with pytest.raises(ExperimentError, match=r"it takes something from step_fn\.habit\.lines"):
            recorded(tmp_path / "run", lambda: habit)


def test_numbers_are_what_they_were_after_it(tmp_path):
    meter, times = Meter(), {"last": 0.0}

    def habit(norm):
        meter.update(norm, 2)
        times["last"] = time.time()
        return None

    recorded(tmp_path / "run", lambda: habit)
    assert meter.count == 8 and {type(value) for value in vars(meter).values()} == {int, float}
    assert type(times["last"]) is float and 0 <= time.time() - times["last"] < 600


def test_a_compiled_step_may_log_when_it_is_traced(tmp_path):
    calls = {"count": 0}

    def loss_fn(model, x, y):
        calls["count"] += 1
        return mse(model, x, y)

    with (
        pytest.warns(UserWarning, match=r"loss_fn\.calls\.count"),
        wb.Recorder(tmp_path / "run", mlp(), optim.SGD(1e-2), loss_fn, Points()) as recorder,
    ):
        for batch in recorder.batches(3):
            recorder.step(batch)
    assert calls["count"] == 1
