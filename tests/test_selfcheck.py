"""What a recorder says at the start of a recording: what a replay could not rebuild is refused there, by its name."""

import collections
import random
import sys
import warnings

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from helpers import Points, mlp, mse

import workbench as wb
from workbench.bits import bits_float
from workbench.errors import ExperimentError
from workbench.reachable import unseen
from workbench.trainer.prefetch import Prefetcher


def record(path, steps=3, *, model=None, loss_fn=mse, sampler=None, **options):
    model = mlp(0.1) if model is None else model
    sampler = Points() if sampler is None else sampler
    with wb.Recorder(path, model, optim.AdamW(1e-2), loss_fn, sampler, spikes=None, **options) as recorder:
        for batch in recorder.batches(steps):
            recorder.step(batch)
    return wb.open_run(path)


def refused(path, words, **options):
    """The first step is refused, and nothing is on disk; without the check the same is recorded."""
    with pytest.raises(ExperimentError, match="step 1 can't be replayed: .*" + words):
        record(path, **options)
    assert not path.exists()


def bits(run):
    return [(line.loss_bits, line.grad_norm_bits, line.state, line.batch_hash) for line in run.telemetry.lines]


@pytest.mark.parametrize("options", [{}, {"compile": False}, {"clip": 0.5, "accumulate": 3}], ids=str)
def test_the_check_changes_no_bit(tmp_path, options):
    with_it = record(tmp_path / "with", 5, **options)
    without = record(tmp_path / "without", 5, self_check=False, **options)
    assert bits(with_it) == bits(without) and len(bits(with_it)) == 7


def test_the_check_changes_no_bit_after_a_resume(tmp_path):
    for name, check in (("with", True), ("without", False)):
        record(tmp_path / name, 3, self_check=check)
        record(tmp_path / name, 6, self_check=check, resume=True)
    runs = [wb.open_run(tmp_path / name) for name in ("with", "without")]
    assert bits(runs[0]) == bits(runs[1])
    assert runs[0].line(6, 0).state == record(tmp_path / "straight", 6).line(6, 0).state


def test_the_check_costs_one_step_and_two_batches(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "counted", [], raising=False)  # out of the check's sight: what it sees it puts back

    def note(letter):
        sys.counted.append(letter)

    class Counting(Points):
        def __next__(self):
            note(str(self.number))
            return super().__next__()

    def loss_fn(model, x, y):
        note("x")
        return mse(model, x, y)

    record(tmp_path / "run", 4, loss_fn=loss_fn, sampler=Counting(), compile=False)
    assert "".join(sys.counted) == "0x0x" + "11x" + "2x" + "3x"


# --------------------------------------------------------------------------------------------------- state outside


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "eager"])
def test_a_number_that_the_loss_changes_is_named(tmp_path, compiled):
    state = {"scale": 1.0}

    def loss_fn(model, x, y):
        state["scale"] *= 1.5
        return mse(model, x, y) * state["scale"]

    refused(
        tmp_path / "run", r"state that no checkpoint holds: loss_fn\.state\.scale\.", loss_fn=loss_fn, compile=compiled
    )


def test_an_array_that_the_loss_changes_is_named(tmp_path):
    class Averaged:
        def __init__(self):
            self.mean = mx.zeros(1)

        def __call__(self, model, x, y):
            loss = mse(model, x, y)
            self.mean = 0.9 * self.mean + mx.stop_gradient(loss)
            return loss + self.mean.sum()

    refused(tmp_path / "run", r"no checkpoint holds: loss_fn\.mean\.", loss_fn=Averaged(), compile=False)


def test_an_array_that_the_model_changes_out_of_sight_is_named(tmp_path):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self._seen = nn.Linear(4, 1), mx.zeros(4)

        def __call__(self, x):
            self._seen = self._seen + mx.stop_gradient(x).mean(0)
            return self.layer(x + self._seen)

    refused(tmp_path / "run", r"no checkpoint holds: model\._seen\.", model=Model(), compile=False)


def test_a_number_that_the_optimizer_keeps_beside_its_state_is_named(tmp_path):
    class Forgetful(optim.SGD):
        def __init__(self, rate):
            super().__init__(rate)
            self.calls = 0

        def apply_single(self, gradient, parameter, state):
            self.calls += 1
            return parameter - 1e-2 * self.calls * gradient

    job = mlp(), Forgetful(1e-2), mse, Points()
    with (
        wb.Recorder(tmp_path / "run", *job, compile=False) as recorder,
        pytest.raises(ExperimentError, match=r"state that no checkpoint holds: optimizer\.calls\."),
    ):
        for batch in recorder.batches(2):
            recorder.step(batch)


def counting(seen):
    """A loss that counts its calls, and is another one from the fourth on."""

    def loss_fn(model, x, y):
        seen["calls"] += 1
        return mse(model, x, y) * (2 if seen["calls"] > 3 else 1)

    return loss_fn


def test_a_number_that_the_step_changes_is_refused_even_if_the_first_step_does_not_depend_on_it(tmp_path):
    seen = {"calls": 0}
    words = r"changes a number that no checkpoint holds, loss_fn\.seen\.calls \(from 0 to 1\)"
    refused(tmp_path / "run", words, loss_fn=counting(seen), compile=False)
    assert seen["calls"] == 0  # and it can be begun again


def test_without_the_check_its_training_is_that_of_the_plain_loop(tmp_path):
    model, optimizer, sampler = mlp(0.1), optim.AdamW(1e-2), Points()
    passes, losses = nn.value_and_grad(model, counting({"calls": 0})), []
    for _ in range(6):
        loss, gradients = passes(model, *(mx.array(part) for part in next(sampler)))
        optimizer.update(model, gradients)
        losses.append(loss.item())
    with pytest.warns(UserWarning, match=r"loss_fn\.seen\.calls is 6 now, but no checkpoint holds it"):
        run = record(tmp_path / "run", 6, loss_fn=counting({"calls": 0}), compile=False, self_check=False)
    assert [bits_float(run.line(step, 0).loss_bits) for step in range(1, 7)] == losses


@pytest.mark.parametrize("options", [{}, {"compile": False}], ids=["compiled", "eager"])
def test_the_check_leaves_what_the_step_changes_as_one_step_left_it(tmp_path, options):
    seen = {"calls": 0 if not options else "", "sum": mx.zeros(1)}

    def loss_fn(model, x, y):
        seen["calls"] += 1 if not options else "x"
        seen["sum"] = seen["sum"] + 1
        return mse(model, x, y)

    with pytest.warns(UserWarning, match=r"changes what no checkpoint holds: loss_fn\.seen\.calls, loss_fn\.seen\.sum"):
        record(tmp_path / "run", 1, loss_fn=loss_fn, **options)
    assert seen["calls"] == (1 if not options else "x")
    if options:
        assert seen["sum"].item() == 1


# --------------------------------------------------------------------------------------------------- random states


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "eager"])
@pytest.mark.parametrize(
    ("draw", "named"), [(random.random, "Python's random"), (np.random.rand, r"numpy\.random")], ids=["random", "numpy"]
)
def test_a_loss_that_draws_from_a_generator_of_the_process(tmp_path, draw, named, compiled):
    def loss_fn(model, x, y):
        return mse(model, x, y) * draw()

    refused(tmp_path / "run", f"it draws from {named}", loss_fn=loss_fn, compile=compiled)


@pytest.mark.parametrize(
    ("draw", "named"), [(random.random, "Python's random"), (np.random.rand, r"numpy\.random")], ids=["random", "numpy"]
)
def test_a_sampler_that_draws_from_a_generator_of_the_process(tmp_path, draw, named):
    class Noisy(Points):
        def __next__(self):
            x, y = super().__next__()
            return x + np.float32(draw()), y

    refused(tmp_path / "run", f"the sampler draws from {named}, whose state its cursor does not hold", sampler=Noisy())


def test_a_sampler_may_draw_from_the_random_state_of_mlx(tmp_path):
    class Noisy(Points):
        def __next__(self):
            x, y = super().__next__()
            return mx.array(x) + mx.random.normal(x.shape), y

    run = record(tmp_path / "run", 5, sampler=Noisy())
    assert bits(run) == bits(record(tmp_path / "again", 5, sampler=Noisy(), self_check=False))
    assert run.replay(4, experiment=wb.Experiment(mlp(0.1), optim.AdamW(1e-2), mse, Noisy())).exact


class Masked(nn.Module):
    """Its step, an eager one, drops inputs in a function that it compiled without the random state."""

    def __init__(self):
        super().__init__()
        self.mask, self.layer = nn.Dropout(0.5), nn.Linear(4, 1)
        self._drop = mx.compile(lambda x: self.mask(x))

    def __call__(self, x):
        return self.layer(x)

    def step(self, optimizer):
        def step(x, y):
            loss, gradients = nn.value_and_grad(self, mse)(self, self._drop(x), y)
            optimizer.update(self, gradients)
            return loss

        return step


def masked(path, before):
    """Records steps that all have the same mask."""
    model, optimizer = Masked(), optim.SGD(1e-2)
    if before:
        mx.eval(model._drop(mx.array(next(Points())[0])))
    step = model.step(optimizer)
    with wb.Recorder(path, model, optimizer, mse, Points(), step_fn=step, compile=False) as recorder:
        for batch in recorder.batches(2):
            recorder.step(batch)


def test_numbers_that_are_drawn_only_when_a_function_is_traced(tmp_path):
    """Case D1."""
    with pytest.raises(ExperimentError, match="it does not draw as many random numbers each time"):
        masked(tmp_path / "run", before=False)


def test_a_mask_that_was_drawn_once_for_all_before(tmp_path):
    """Case D1: the function was traced before the recording, so nothing is drawn any more."""
    with pytest.warns(UserWarning, match=r"layers that draw random numbers \(mask\), and the step drew none"):
        masked(tmp_path / "run", before=True)


def test_a_step_that_compiles_its_passes_by_itself_can_not_be_seen_into(tmp_path):
    model, optimizer = mlp(0.5), optim.SGD(1e-2)
    passes = mx.compile(lambda x, y: nn.value_and_grad(model, mse)(model, x, y), inputs=model.state)

    def step(x, y):
        loss, gradients = passes(x, y)
        optimizer.update(model, gradients)
        return loss

    with (
        wb.Recorder(tmp_path / "run", model, optimizer, mse, Points(), step_fn=step, compile=False) as recorder,
        pytest.raises(ExperimentError, match="step_fn calls a function that is compiled by itself"),
    ):
        recorder.step(next(Points()))


# ------------------------------------------------------------------------------------------------ out of MLX's sight


class Stack:
    """A container of one's own."""

    def __init__(self, layers):
        self.items = layers


class Hidden(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.rest = Stack([nn.Linear(8, 8), nn.Linear(8, 1)])
        self.scales = (mx.ones(8), mx.zeros(8))

    def __call__(self, x):
        x = self.first(x) * self.scales[0] + self.scales[1]
        for layer in self.rest.items:
            x = layer(x)
        return x


def test_layers_in_a_container_of_ones_own_are_counted_and_named(tmp_path):
    """Case M2."""
    model = Hidden()
    hidden = ["rest.items[0].bias", "rest.items[0].weight", "rest.items[1].bias", "rest.items[1].weight"]
    assert sorted(unseen(model)) == [*hidden, "scales[0]", "scales[1]"]
    with pytest.warns(
        UserWarning, match=r"6 arrays are reachable from the model but not in parameters\(\): .*rest\.items"
    ):
        record(tmp_path / "run", model=model)


def test_what_mlx_keeps_as_constants_is_no_finding():
    model = nn.Sequential(
        nn.RoPE(8),
        nn.Embedding(3, 4),
        nn.BatchNorm(4),
        nn.QuantizedLinear(64, 64),
        nn.MultiHeadAttention(8, 2),
        nn.LSTM(2, 2),
    )
    model.freeze()
    assert unseen(model) == []


# ----------------------------------------------------------------------------------------------- cursors


class Ahead(Points):
    """Fetches `depth` batches ahead, and gives the cursor of what it fetched: the mistake of case R7."""

    def __init__(self, depth):
        super().__init__()
        self.depth, self.queue = depth, collections.deque()

    def __next__(self):
        while len(self.queue) <= self.depth:
            self.queue.append(super().__next__())
        return self.queue.popleft()

    def load_state_dict(self, cursor):
        self.queue.clear()
        super().load_state_dict(cursor)


@pytest.mark.parametrize("depth", [1, 4])
def test_a_cursor_of_what_was_fetched_ahead_is_off_by_k(tmp_path, depth):
    with pytest.raises(ExperimentError, match=f"step 2 can't be replayed: .*the cursor is off by {depth}\\."):
        record(tmp_path / "run", sampler=Ahead(depth))


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_a_prefetching_loader_that_counts_what_was_consumed_replays(tmp_path, depth):
    with Prefetcher(Points(), depth) as sampler:
        run = record(tmp_path / "run", 6, sampler=sampler)
    assert bits(run) == bits(record(tmp_path / "plain", 6))
    assert [run.line(step, 0).batch_hash for step in (5, 6)] == [
        run.replay(step, experiment=wb.Experiment(mlp(0.1), optim.AdamW(1e-2), mse, Points())).record.batch_hash
        for step in (5, 6)
    ]


@pytest.mark.parametrize("depth", [1, 4])
def test_a_loop_that_draws_ahead_by_itself_is_noticed(tmp_path, depth):
    sampler = Points()
    queue = collections.deque(next(sampler) for _ in range(depth))
    with (
        wb.Recorder(tmp_path / "run", mlp(), optim.AdamW(1e-2), mse, sampler) as recorder,
        pytest.raises(ExperimentError, match="step 1 can't be replayed"),
    ):
        queue.append(next(sampler))
        recorder.step(queue.popleft())


def test_a_batch_that_the_loop_changes_is_not_the_samplers(tmp_path):
    with (
        wb.Recorder(tmp_path / "run", mlp(), optim.AdamW(1e-2), mse, Points()) as recorder,
        pytest.raises(ExperimentError, match="or the batch is not as the sampler gave it"),
    ):
        for x, y in recorder.batches(2):
            recorder.step((x + 1, y))


def test_a_cursor_that_is_read_but_not_obeyed(tmp_path):
    class Deaf(Points):
        def load_state_dict(self, cursor):
            pass

    refused(tmp_path / "run", "load_state_dict does not put the stream where state_dict said it stood", sampler=Deaf())


def test_without_the_check_it_is_recorded_all_the_same(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = record(tmp_path / "run", sampler=Ahead(4), self_check=False, model=Hidden())
    assert not run.replay(3, experiment=wb.Experiment(Hidden(), optim.AdamW(1e-2), mse, Points())).exact


def test_a_refused_recording_can_be_begun_again(tmp_path):
    model = mlp(0.1)
    refused(tmp_path / "run", "Python's random", model=model, loss_fn=lambda m, x, y: mse(m, x, y) * random.random())
    mlp(0.1)  # leaves the random state that a model begins with
    assert bits(record(tmp_path / "run", model=model)) == bits(record(tmp_path / "new", model=mlp(0.1)))


@pytest.mark.parametrize(
    ("history", "push", "said"),
    [
        ([], lambda history, loss: history.append(1.0), "extra 'history' holds 0 as float; expected an MLX array"),
        ([], lambda history, loss: history.append(loss), "changes how many arrays extra 'history' holds .*new: 0"),
    ],
)
def test_an_extra_state_that_does_not_keep_its_form_is_named(tmp_path, history, push, said):
    model, optimizer = nn.Linear(4, 1), optim.AdamW(1e-2)

    def loss_fn(model, x, y):
        return nn.losses.mse_loss(model(x), y)

    def step(x, y):
        loss, gradients = nn.value_and_grad(model, loss_fn)(model, x, y)
        push(history, loss)
        optimizer.update(model, gradients)
        return loss

    recorder = wb.Recorder(tmp_path / "run", model, optimizer, loss_fn, step_fn=step, extra={"history": history})
    with pytest.raises(ExperimentError, match=said):
        recorder.step((mx.ones((2, 4)), mx.ones((2, 1))))


class Count:
    """Keeps an average and a number; both are in its state."""

    def __init__(self):
        self.average, self.updates = mx.zeros(()), 0

    def state_dict(self):
        return {"average": self.average, "updates": self.updates}

    def load_state_dict(self, state):
        self.average, self.updates = state["average"], state["updates"]


@pytest.mark.parametrize("kind", ["object", "dict"])
def test_what_is_in_extra_may_hang_on_the_model(tmp_path, kind):
    model, optimizer = mlp(), optim.AdamW(1e-2)
    own = Count() if kind == "object" else {"average": mx.zeros(())}
    model.__dict__["own"] = own  # as `model.own = own` does with an object

    def step(x, y):
        loss, gradients = nn.value_and_grad(model, mse)(model, x, y)
        optimizer.update(model, gradients)
        if kind == "object":
            own.average, own.updates = 0.9 * own.average + loss, own.updates + 1
        else:
            own["average"] = 0.9 * own["average"] + loss
        return loss

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with wb.Recorder(
            tmp_path / "run", model, optimizer, mse, Points(), step_fn=step, extra={"own": own}, spikes=None
        ) as recorder:
            for batch in recorder.batches(4):
                recorder.step(batch)
    assert wb.open_run(tmp_path / "run").last_step == 4
