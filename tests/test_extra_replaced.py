"""A moving average handed over as `extra` whose name the loop gives to a new dict each step: said, however it is done;
and no word where it is changed in place."""

import warnings

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from helpers import mlp, mse
from mlx.utils import tree_map

import workbench as wb
from workbench.errors import ExperimentError

average = None


class Loop:
    """`move` is called within each step, after the update."""

    def __init__(self, move=lambda loop: None):
        self.model, self.optimizer, self.move = mlp(0.1), optim.AdamW(1e-2), move
        self.ema, self.count = self.copied(), 0

    def copied(self):
        return tree_map(lambda array: mx.array(array), self.model.parameters())

    def mixed(self, ema):
        return tree_map(lambda old, new: 0.9 * old + 0.1 * new, ema, self.model.parameters())

    def step(self, x, y):
        self.count += 1
        loss, gradients = nn.value_and_grad(self.model, mse)(self.model, x, y)
        self.optimizer.update(self.model, gradients)
        self.move(self)
        return loss


def batches(count):
    for number in range(count):
        x = mx.random.normal((4, 4), key=mx.random.key(number))
        yield x, mx.sin(x.sum(1, keepdims=True))


def record(path, loop, extra, outside=lambda: None, steps=6, **options):
    """The warnings; `outside` is called after each step. `extra` is a function, so that nothing here holds what it
    gives."""
    options = {"save_every": 3, "spikes": None, "ignore": ("count",), "step_fn": loop.step} | options
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with wb.Recorder(path, loop.model, loop.optimizer, mse, extra=extra(), **options) as recorder:
            for batch in batches(steps):
                recorder.step(batch)
                outside()
    return [str(one.message) for one in found]


def test_an_attribute_that_the_step_gives_another_dict_is_refused(tmp_path):
    def move(loop):
        loop.ema = loop.mixed(loop.ema)

    loop = Loop(move)
    first = loop.ema
    words = (
        r"^step 1 can't be replayed: the step puts another object in the place of the dict that was handed over as "
        r"extra 'ema' \(step_fn\.self\.ema\).*in place, self\.ema\.update\("
    )
    with pytest.raises(ExperimentError, match=words):
        record(tmp_path / "run", loop, lambda: {"ema": loop.ema})
    assert loop.ema is first and not (tmp_path / "run").exists()


def test_a_counter_beside_it_hides_nothing(tmp_path):
    def move(loop):
        loop.ema = loop.mixed(loop.ema)

    loop = Loop(move)
    with pytest.raises(ExperimentError, match="handed over as extra 'ema'"):
        record(tmp_path / "run", loop, lambda: {"ema": loop.ema}, ignore=())


def test_a_dict_within_and_an_array_are_refused_too(tmp_path):
    def move(loop):
        loop.ema = loop.mixed(loop.ema)

    loop = Loop(move)
    with pytest.raises(ExperimentError, match="the dict that stands in extra 'both'"):
        record(tmp_path / "dict", loop, lambda: {"both": {"ema": loop.ema}})
    total = mx.zeros(1)

    def add(loop):
        nonlocal total
        total = total + 1

    loop = Loop(add)
    with pytest.raises(ExperimentError, match=r"the array that stands in extra 'sums' .*total\[\.\.\.\] = "):
        record(tmp_path / "array", loop, lambda: {"sums": {"total": total}})


def test_a_global_variable_that_the_step_gives_another_dict_is_refused(tmp_path):
    global average

    def move(loop):
        global average
        average = loop.mixed(average)

    loop = Loop(move)
    average = loop.copied()
    with pytest.raises(ExperimentError, match=r"\(step_fn\.self\.move\.average\)"):
        record(tmp_path / "run", loop, lambda: {"ema": average})


def test_a_loop_that_does_so_between_two_steps_is_refused_if_the_step_holds_it(tmp_path):
    loop = Loop()

    def outside():
        loop.ema = loop.mixed(loop.ema)

    with pytest.raises(ExperimentError, match=r"^between two steps the loop put another object .*self\.ema") as caught:
        record(tmp_path / "run", loop, lambda: {"ema": loop.ema}, outside)
    assert f"The first step of this attempt is in {tmp_path / 'run'} already: remove that folder" in str(caught.value)


@pytest.mark.parametrize("compiled", [True, False])
def test_a_variable_of_the_loop_alone_is_warned_of_at_the_third_step(tmp_path, compiled):
    loop = Loop()
    ema = loop.copied()
    options = {"compile": compiled} | ({"step_fn": None} if compiled else {})
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        own = {"step_fn": loop.step, "ignore": ("count",), "spikes": None, "extra": {"ema": ema}} | options
        own |= {"ignore": ()} if compiled else {}
        with wb.Recorder(tmp_path / "run", loop.model, loop.optimizer, mse, **own) as recorder:
            del own
            for number, batch in enumerate(batches(6)):
                assert len(found) == (number > 2)
                recorder.step(batch)
                ema = loop.mixed(ema)
    (only,) = [str(one.message) for one in found]
    assert only.startswith("nothing but the recorder holds the dict any more that was handed over as extra 'ema'")
    assert "ema.update(...)" in only
    lines = [line for line in wb.open_run(tmp_path / "run").telemetry.lines if isinstance(line.since, int)]
    assert [(line.step, line.remarks) for line in lines] == [(3, [only])]


def test_a_global_variable_of_the_loop_alone_is_warned_of(tmp_path):
    global average
    loop = Loop()
    average = loop.copied()

    def outside():
        global average
        average = loop.mixed(average)

    (only,) = record(tmp_path / "run", loop, lambda: {"ema": average}, outside)
    assert "handed over as extra 'ema'" in only


class Average:
    def __init__(self, loop):
        self.tree = loop.copied()

    def state_dict(self):
        return {"tree": self.tree}

    def load_state_dict(self, state):
        self.tree = state["tree"]


def test_what_is_changed_in_place_or_held_by_the_recorder_alone_passes_without_a_word(tmp_path):
    loop = Loop(lambda loop: loop.ema.update(loop.mixed(loop.ema)))
    assert record(tmp_path / "in_place", loop, lambda: {"ema": loop.ema}) == []

    own = Average(Loop())

    def move(loop):
        own.tree = loop.mixed(own.tree)

    loop = Loop(move)
    assert record(tmp_path / "object", loop, lambda: {"ema": own}) == []

    assert record(tmp_path / "literal", Loop(), lambda: {"scale": {"value": mx.ones(3)}}) == []
    held = {"value": mx.ones(3)}
    assert record(tmp_path / "constant", Loop(), lambda: {"scale": held}) == []


def test_what_the_step_reaches_through_the_recorder_passes(tmp_path):
    seen = []

    def move(loop):
        own = seen[0].experiment.extra["ema"]
        own.update(loop.mixed(own))

    loop = Loop(move)
    own = {"extra": {"ema": loop.copied()}, "step_fn": loop.step, "ignore": ("count",), "spikes": None}
    tree = own["extra"]["ema"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with wb.Recorder(tmp_path / "run", loop.model, loop.optimizer, mse, **own) as recorder:
            seen.append(recorder)
            del tree
            for batch in batches(6):
                recorder.step(batch)


def test_what_is_called_wrongly_is_said_in_a_sentence(tmp_path):
    loop = Loop()
    with pytest.raises(ExperimentError, match="neither loss_fn nor step_fn"):
        wb.Recorder(tmp_path / "run", loop.model, loop.optimizer)
    with pytest.raises(ExperimentError, match="loss_fn is of type str; expected a function"):
        wb.Recorder(tmp_path / "run", loop.model, loop.optimizer, "mse")
    with wb.Recorder(tmp_path / "run", loop.model, loop.optimizer, mse) as recorder:
        with pytest.raises(
            ExperimentError, match=r"step got 2 arguments; expected one batch.*: step\(\(part1, part2\)\)"
        ):
            recorder.step(*next(batches(1)))
    assert not (tmp_path / "run").exists()


def test_a_step_of_ones_own_needs_no_loss_function(tmp_path):
    loop = Loop()
    with wb.Recorder(
        tmp_path / "run", loop.model, loop.optimizer, step_fn=loop.step, ignore=("count",), spikes=None
    ) as recorder:
        for batch in batches(3):
            recorder.step(batch)
    again = Loop()
    job = wb.Experiment(again.model, again.optimizer, step_fn=again.step)
    assert wb.open_run(tmp_path / "run").replay(3, experiment=job, with_probe=False, fresh_process=False).exact
