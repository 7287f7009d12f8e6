"""The one step function against a loop written by hand, to the bit; clipping against numpy in float64."""

import io

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from helpers import Points, advance, experiment, flipped, mlp, mse, tensor_bytes
from mlx.utils import tree_flatten, tree_map

from workbench.errors import ExperimentError
from workbench.experiment import as_batch, state_arrays
from workbench.step import Stepper, clipped, global_norm, micro_batches
from workbench.trainer.model import ModelConfig, build_model
from workbench.trainer.model import loss as token_loss

STEPS = 5


def by_hand(model, optimizer, loss_fn, sampler, *, clip, compiled, steps=STEPS):
    """What a user would write, with nothing of the package: losses, gradient norms and the final arrays."""

    def step(x, y):
        loss, gradients = nn.value_and_grad(model, loss_fn)(model, x, y)
        norm = None
        if clip is not None:
            gradients, norm = optim.clip_grad_norm(gradients, clip)
        optimizer.update(model, gradients)
        return loss, norm

    if compiled:
        state = [model.state, optimizer.state, mx.random.state]
        step = mx.compile(step, inputs=state, outputs=state)
    losses, norms = [], []
    for _ in range(steps):
        loss, norm = step(*map(mx.array, next(sampler)))
        mx.eval(loss, norm, model.parameters(), optimizer.state)
        losses.append(loss.item())
        norms.append(None if norm is None else norm.item())
    return losses, norms, tensor_bytes(dict(tree_flatten([model.parameters(), optimizer.state])))


def arrays(job):
    return tensor_bytes(dict(tree_flatten([job.model.parameters(), job.optimizer.state])))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("clip", [None, 0.1, 100.0])
def test_a_step_is_value_and_grad_clip_and_adamw(clip, compiled):
    def parts():
        return mlp(dropout=0.1), optim.AdamW(optim.cosine_decay(1e-2, 10), bias_correction=True), mse, Points()

    losses, norms, expected = by_hand(*parts(), clip=clip, compiled=compiled)
    model, optimizer, _, _ = parts()
    job = experiment(model=model, optimizer=optimizer, clip=clip, compile=compiled)
    _, results = advance(job, STEPS)
    assert [float(result.loss) for result in results] == losses
    assert arrays(job) == expected
    if clip is not None:
        assert [float(result.grad_norm) for result in results] == norms
        assert (max(norms) > clip) == (clip == 0.1)  # both sides of the limit are tested


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_of_the_transformer_is_the_one_by_hand(dtype):
    class Tokens(Points):
        def __next__(self):
            self.number += 1
            tokens = np.random.default_rng(self.number).integers(0, 11, (4, 9)).astype(np.int32)
            return tokens[:, :-1], tokens[:, 1:]

    settings = ModelConfig(vocabulary=11, ctx=8, depth=1, width=8, heads=2, dropout=0.1, dtype=dtype)
    clip = 0.5 if dtype == "float32" else None  # MLX's own clipping sums bfloat16 squares in bfloat16
    mx.random.seed(4)
    losses, norms, expected = by_hand(
        *(build_model(settings, 0), optim.AdamW(1e-2), lambda *a: token_loss(*a)[0], Tokens()),
        clip=clip,
        compiled=False,
    )
    mx.random.seed(4)
    job = experiment(model=build_model(settings, 0), loss_fn=token_loss, optimizer=optim.AdamW(1e-2), clip=clip)
    job.sampler = Tokens()
    _, results = advance(job, STEPS)
    assert [float(result.loss) for result in results] == losses
    assert arrays(job) == expected
    assert clip is None or [float(result.grad_norm) for result in results] == norms
    assert results[0].token_loss.shape == (4, 8)


def test_the_comparison_by_hand_would_show_one_bit():
    model = mlp()
    _, _, expected = by_hand(model, optim.AdamW(1e-2, bias_correction=True), mse, Points(), clip=None, compiled=False)
    job = experiment()
    job.model.layers[0].weight = flipped(job.model.layers[0].weight, bit=12)
    advance(job, STEPS)
    assert arrays(job) != expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_accumulation_is_the_mean_over_equal_parts(dtype, compiled):
    job = experiment(accumulate=3, clip=0.5, dtype=dtype, dropout=0.1, compile=compiled)
    reference = mlp(0.1, getattr(mx, dtype))
    optimizer, sampler = optim.AdamW(1e-2, bias_correction=True), Points()
    key = mx.random.state[0]
    _, results = advance(job, STEPS)
    mx.random.seed((key[0].item() << 32) | key[1].item())
    for result in results:
        x, y = map(mx.array, next(sampler))
        found = [nn.value_and_grad(reference, mse)(reference, x[i : i + 4], y[i : i + 4]) for i in (0, 4, 8)]
        total = found[0][0].astype(mx.float32)
        gradients = found[0][1]
        for loss, more in found[1:]:
            total, gradients = total + loss.astype(mx.float32), tree_map(mx.add, gradients, more)
        gradients = tree_map(lambda g: g / 3, gradients)
        norm = mx.sqrt(sum(mx.sum(mx.square(g.astype(mx.float32))) for _, g in tree_flatten(gradients)))
        scale = mx.minimum(0.5 / (norm + 1e-6), 1.0)
        optimizer.update(reference, tree_map(lambda g, s=scale: (g * s).astype(g.dtype), gradients))
        mx.eval(reference.parameters(), optimizer.state)
        assert (float(result.loss), float(result.grad_norm)) == ((total / 3).item(), norm.item())
        assert tensor_bytes(result.gradients) == tensor_bytes(dict(tree_flatten(gradients)))
    assert arrays(job) == tensor_bytes(dict(tree_flatten([reference.parameters(), optimizer.state])))


def test_accumulated_gradients_are_nearly_those_of_the_whole_batch():
    whole, parts = (advance(experiment(accumulate=n), 1)[1][0] for n in (1, 3))
    assert float(whole.loss) == pytest.approx(float(parts.loss), rel=1e-6)
    for path, gradient in whole.gradients.items():
        np.testing.assert_allclose(np.array(gradient), np.array(parts.gradients[path]), rtol=1e-4, atol=1e-6)


def test_a_batch_that_can_not_be_cut_is_refused_with_its_size():
    for batch in ((mx.zeros((4, 1)),), (mx.zeros((6, 1)), mx.zeros((3, 1))), (mx.zeros(()),), (mx.zeros((0, 1)),)):
        with pytest.raises(ExperimentError, match="3 equal micro-batches"):
            micro_batches(batch, 3)


def test_micro_batches_are_the_rows_in_order():
    x, y = mx.arange(12).reshape(6, 2), mx.arange(6)
    found = micro_batches((x, y), 3)
    assert mx.concatenate([a for a, _ in found]).tolist() == x.tolist()
    assert [b.tolist() for _, b in found] == [[0, 1], [2, 3], [4, 5]]


# ------------------------------------------------------------------------------------------------------------- clipping


@pytest.mark.parametrize("scale", [1e-12, 1e-3, 1.0, 1e3, 1e15])
@pytest.mark.parametrize("limit", [0.5, 1.0])
def test_clipping_is_numpy_s_in_float64(scale, limit):
    rng = np.random.default_rng(0)
    values = {"a": rng.standard_normal((30, 4)) * scale, "b": {"c": rng.standard_normal(7) * scale}}
    gradients = tree_map(lambda x: mx.array(x.astype(np.float32)), values)
    exact = [np.array(g).astype(np.float64) for _, g in tree_flatten(gradients)]
    norm = np.sqrt(sum(np.sum(g**2) for g in exact))
    found = global_norm(gradients)
    # 127 squares: rounding each, and adding them in float32, costs a few units in the last place.
    assert found.item() == pytest.approx(norm, rel=1e-6)
    factor = min(1.0, limit / (norm + 1e-6))
    for (_, got), want in zip(tree_flatten(clipped(gradients, found, limit)), exact, strict=True):
        np.testing.assert_allclose(np.array(got), want * factor, rtol=2e-6)


def test_below_the_limit_no_bit_is_changed():
    gradients = {"a": mx.array([3e-3, -4e-3, -0.0])}
    assert tensor_bytes(clipped(gradients, global_norm(gradients), 1.0)) == tensor_bytes(gradients)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_half_precision_gradients_keep_their_dtype_and_are_summed_in_float32(dtype):
    gradients = {"a": mx.full((5000,), 300.0).astype(dtype)}  # squares overflow float16; their sum loses bits in both
    value = gradients["a"][0].astype(mx.float32).item()
    # MLX's sum on the CPU is sequential: 4e-5 off here, as float32 is. In bfloat16 it would be off by 0.9.
    assert global_norm(gradients).item() == pytest.approx(value * np.sqrt(5000), rel=1e-4)
    assert clipped(gradients, global_norm(gradients), 1.0)["a"].dtype == dtype


def test_the_norm_shows_what_clipping_would_spread():
    """One NaN makes all gradients NaN; one infinity makes itself NaN and the others 0: so the norm is of before."""
    for bad, others in ((mx.nan, np.nan), (mx.inf, 0.0)):
        gradients = {"a": mx.array([1.0, bad])}
        norm = global_norm(gradients)
        assert not np.isfinite(norm.item())
        np.testing.assert_equal(np.array(clipped(gradients, norm, 1.0)["a"]), [others, np.nan])


def test_logged_gradients_are_those_before_clipping():
    plain, clip = (advance(experiment(clip=limit), 1)[1][0] for limit in (None, 1e-3))
    assert tensor_bytes(plain.gradients) == tensor_bytes(clip.gradients)
    assert plain.grad_norm == clip.grad_norm > 1e-3


# ---------------------------------------------------------------------------------------------------------- the stepper


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_the_loss_function_is_traced_once_in_200_compiled_steps(compiled):
    calls = []

    def counting(model, x, y):
        calls.append(1)
        return mse(model, x, y)

    job = experiment(
        loss_fn=counting,
        optimizer=optim.AdamW(optim.join_schedules([optim.linear_schedule(0, 1e-3, 5), lambda n: 1e-3 / n], [5])),
        compile=compiled,
    )
    stepper, _ = advance(job, 2)
    before = len(calls)
    advance(job, 200, stepper)
    assert len(calls) - before == (0 if compiled else 200)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("make", [optim.SGD, optim.Muon, optim.Adafactor, optim.AdamW])
def test_the_state_after_a_step_has_the_strides_of_a_restored_one(make, compiled):
    """Along an axis of length 1 a stride may be anything, and MLX's matmul picks its kernel by it. By itself, SGD
    leaves weights of shape (1, 8) with strides (1, 1), or not, depending on which buffers were free to be reused."""
    job = experiment(optimizer=make(1e-2), compile=compiled)
    stepper = None
    for _ in range(3):
        stepper, _ = advance(job, 1, stepper)
        for tree in (job.model, job.optimizer.state):
            for path, array in state_arrays(tree).items():
                if array.ndim > 1:
                    fresh = np.empty(array.shape, np.float32)
                    assert memoryview(array).strides == fresh.strides, path


@pytest.mark.parametrize("holding", [False, True])
def test_what_else_holds_the_old_state_moves_no_bit(holding):
    def run(held):
        job, stepper, losses = experiment(optimizer=optim.SGD(0.1)), None, []
        for _ in range(8):
            held.append(list(state_arrays(job.model).values()))
            stepper, results = advance(job, 1, stepper)
            losses.append(float(results[0].grad_norm))
            if not holding:
                held.clear()
        return losses, arrays(job)

    assert run([]) == run([]) == run([[mx.zeros(n) for n in range(1, 50)]])


def test_layers_are_found_in_order_of_execution_without_moving_the_state():
    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.idle = nn.Linear(4, 1), nn.Linear(4, 4), nn.Linear(2, 2)
            self.dropout = nn.Dropout(0.5)
            self.norm = nn.BatchNorm(4)

        def __call__(self, x):
            return self.a(self.dropout(self.norm(self.b(x))))

    job = experiment(model=Backwards())
    stepper = Stepper(job)
    assert stepper.layers == []
    stepper(as_batch(next(job.sampler)))
    assert stepper.layers == ["b", "norm", "a", "idle"]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_finding_the_layers_costs_no_forward_pass_of_its_own(compiled):
    """Whatever else a loss function does, it does once a step (compiled: once), as in the loop it was taken from."""
    job = experiment(compile=compiled)
    calls, real = [], job.loss_fn
    job.loss_fn = lambda *arguments: calls.append(1) or real(*arguments)
    stepper = Stepper(job)
    for step in range(1, 4):
        stepper(as_batch(next(job.sampler)))
        assert len(calls) == (1 if compiled else step)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_loss_function_that_changes_its_arguments_leaves_the_batch_alone(compiled):
    job = experiment(compile=compiled)
    real = job.loss_fn

    def changing(model, x, y):
        x -= 0.5
        return real(model, x, y)

    job.loss_fn = changing
    batch = as_batch(next(job.sampler))
    before = [np.array(array) for array in batch]
    Stepper(job)(batch)
    assert all((np.array(array) == then).all() for array, then in zip(batch, before, strict=True))


def test_another_optimizer_state_in_the_place_of_the_first_is_refused_where_it_would_not_be_used():
    eager, job = experiment(), experiment(compile=True)
    for one in (eager, job):
        stepper = Stepper(one)
        stepper(as_batch(next(one.sampler)))
        one.optimizer.state = dict(one.optimizer.state)
        if one is eager:
            stepper(as_batch(next(one.sampler)))
    with pytest.raises(ExperimentError, match=r"optimizer.state was replaced by another dict"):
        stepper(as_batch(next(job.sampler)))


def test_other_layers_than_the_recorded_ones_are_named():
    with pytest.raises(ExperimentError, match=r"missing \['layers.9'\], unexpected \['layers.3'\]"):
        Stepper(experiment(), ["layers.0", "layers.9"])


def graph(arrays):
    """The operations that are still to be computed."""
    text = io.StringIO()
    mx.export_to_dot(text, *arrays)
    return [line for line in text.getvalue().splitlines() if "shape=rectangle" in line]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_nothing_is_left_to_be_computed_after_a_step(compiled):
    """Otherwise each step's graph would hold the one before, and memory would grow."""
    job = experiment(dropout=0.1, compile=compiled)
    _, (*_, result) = advance(job, 3)
    left = [*state_arrays(job.model).values(), *state_arrays(job.optimizer.state).values(), mx.random.state[0]]
    assert graph([*left, *result.gradients.values(), *result.activations.values()]) == []
    assert graph([left[0] + 1]) != []


def test_dropout_draws_a_new_mask_at_each_compiled_step():
    """Forgetting the random state among the inputs of `mx.compile` would freeze the mask."""

    def loss_fn(model, x, y):
        return mx.mean(model.layers[1](mx.ones((1, 64)))) + 0 * mse(model, x, y)

    _, results = advance(experiment(dropout=0.5, loss_fn=loss_fn, compile=True), 6)
    assert len({float(result.loss) for result in results}) > 1


def test_extras_are_optional_and_token_losses_are_joined():
    def with_tokens(model, x, y):
        losses = mx.square(model(x) - y)[:, 0]
        return mx.mean(losses), {"token_loss": losses, "other": 1}

    for parts in (1, 3):
        _, (result,) = advance(experiment(loss_fn=with_tokens, accumulate=parts), 1)
        assert result.token_loss.shape == (12,)
        assert float(result.loss) == pytest.approx(np.mean(np.array(result.token_loss)), rel=1e-6)
    _, (result,) = advance(experiment(loss_fn=lambda *a: (mse(*a), {"accuracy": 1})), 1)
    assert result.token_loss is None


def test_activations_are_those_that_the_loss_was_computed_from():
    job = experiment()
    x, _ = as_batch(next(job.sampler))
    job.sampler.load_state_dict({"number": 0})
    hidden = job.model.layers[0](x)
    out = job.model.layers[3](mx.tanh(hidden))
    mx.eval(hidden, out)
    _, (result,) = advance(job, 1)
    assert tensor_bytes(result.activations) == tensor_bytes({"layers.0": hidden, "layers.3": out})
