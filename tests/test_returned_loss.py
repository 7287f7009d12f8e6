"""The loss that a recorder returns: what a loop computes with it has the bits that it had with MLX's array."""

import copy
import json
import math
import operator
import pickle

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest

from workbench import Recorder, open_run
from workbench.recording.returned_loss import ReturnedLoss

ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
IN_PLACE = ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow")
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
OPERATORS = {name: getattr(operator, name) for name in (*ARITHMETIC, *IN_PLACE, *COMPARISONS)}
DTYPES = (mx.float32, mx.bfloat16, mx.float16, mx.int32)
ALL = (*DTYPES, mx.bool_, mx.complex64)
VALUES = (1.1, -0.37, 0.0, -0.0, math.inf, math.nan, 2e-41, 3e4)
NUMBERS = (0.1, 3, -7.25, True, 0, 1e-30, math.nan, math.inf, 2**40, 1.1)
NUMBERS += (
    np.float64(0.1),
    np.float32(0.1),
    np.float16(0.1),
    np.int64(3),
    np.int8(-2),
    np.bool_(True),
    np.complex64(1j),
)
OF_NUMPY = (np.array([0.1, 0.2]), np.array([0.1, 2], np.float32), np.array(0.1, np.float32), np.array([3, 4]))


def bits(value):
    """Of a result: what it is, with dtype and shape, to the last bit."""
    if isinstance(value, ReturnedLoss):
        value = value.__mlx_array__()
    if isinstance(value, mx.array):
        raw = np.array(value.view(mx.uint16) if value.dtype == mx.bfloat16 else value)
        return "mlx", str(value.dtype), value.shape, raw.tobytes()
    if isinstance(value, (np.ndarray, np.generic)):
        return "numpy", str(value.dtype), value.shape, value.tobytes()
    return type(value).__name__, repr(value)


def tried(operation, *values):
    try:
        with np.errstate(all="ignore"):
            return bits(operation(*values))
    except (TypeError, ValueError):
        return None


def arrays_of_mlx(dtypes):
    return [mx.array(value).astype(dtype) for dtype in dtypes for value in ([0.3, 2.7], 2.7)]


def unlike(dtype, shape, others, *, reflected):
    """The expressions that an array can compute and the returned loss computes otherwise; and how many it can."""
    found, count = [], 0
    values = [value for value in VALUES if dtype != mx.int32 or math.isfinite(value)]
    for value in values:
        for other in others:
            for name, operation in OPERATORS.items():
                theirs, ours = mx.array(value).astype(dtype).reshape(shape), copy.copy(other)
                loss = ReturnedLoss(theirs)
                pairs = [(copy.copy(other), theirs), (ours, loss)]
                one, two = (tried(operation, *(pair if reflected else pair[::-1])) for pair in pairs)
                count += one is not None
                if one is not None and one != two:
                    found.append((name, value, other, one, two))
    return found, count


@pytest.mark.parametrize("shape", [(), (1,)], ids=["scalar", "one"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_operator_has_the_bits_of_an_array(dtype, shape):
    others = [*NUMBERS, *OF_NUMPY]
    for reflected in (False, True):
        found, count = unlike(dtype, shape, others, reflected=reflected)
        assert not found and count > 900
    found, count = unlike(dtype, shape, [*arrays_of_mlx(ALL), 2.5j], reflected=False)
    assert not found and count > 400


def test_to_the_right_of_an_array_it_is_a_number():
    """Nothing that is a float can be anything else there; so it is told in the class."""
    found, count = unlike(mx.float32, (), arrays_of_mlx([mx.float32, mx.int32, mx.bool_, mx.complex64]), reflected=True)
    assert not found and count > 400
    half = mx.array([0.1], mx.bfloat16)
    assert (half * ReturnedLoss(1.1)).dtype == mx.bfloat16
    assert bits(half * mx.array(ReturnedLoss(1.1))) == bits(half * mx.array(1.1)) == bits(ReturnedLoss(1.1) * half)


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_with_another_loss_and_by_itself(dtype):
    for value in VALUES:
        theirs, second = mx.array(value).astype(dtype), mx.array(2.7).astype(dtype)
        for name, operation in OPERATORS.items():
            one, two = operation(mx.array(theirs), second), operation(ReturnedLoss(theirs), ReturnedLoss(second))
            assert bits(one) == bits(two), (name, value)
        assert bits(-ReturnedLoss(theirs)) == bits(-theirs) and bits(abs(ReturnedLoss(theirs))) == bits(abs(theirs))
        assert bits(+ReturnedLoss(theirs)) == bits(+theirs)


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_expressions_of_a_loop(dtype):
    mine = its = 0.0
    for value in np.random.default_rng(7).standard_normal(40).tolist():
        loss = mx.array(value).astype(dtype)
        mine, its = 0.9 * mine + 0.1 * ReturnedLoss(loss) ** 2, 0.9 * its + 0.1 * loss**2
        for rate in (
            lambda loss: 0.01 * (loss < 0.3) + 0.001,
            lambda loss: ~(loss < 0) * 0.1,
            lambda loss: loss[None] / 3,
        ):
            assert bits(rate(ReturnedLoss(loss))) == bits(rate(loss))
        for name in ("square", "exp", "abs", "mean", "sum"):
            assert bits(getattr(ReturnedLoss(loss), name)()) == bits(getattr(loss, name)())
    assert bits(mine) == bits(its)
    several = [mx.array(value).astype(dtype) for value in (0.1, 0.7, 1.3)]
    assert bits(sum(map(ReturnedLoss, several))) == bits(sum(several))
    assert bits(max(map(ReturnedLoss, several))) == bits(max(several)) and min(several).item() == min(
        map(float, several)
    )


def test_numpy_computes_with_it_as_with_an_array():
    theirs = mx.array(1.1)
    for function in (np.exp, np.sqrt, np.isnan, lambda loss: np.maximum(loss, 0.5), lambda loss: np.add(0.1, loss)):
        assert bits(function(ReturnedLoss(theirs))) == bits(function(theirs))
    total = np.zeros(2, np.float32)
    total += ReturnedLoss(theirs)
    assert total.tolist() == [theirs.item()] * 2


def test_it_is_still_a_number():
    loss = ReturnedLoss(0.5)
    assert isinstance(loss, float) and loss == 0.5 and loss < 1 and f"{loss:.2f}" == "0.50" and repr(loss) == "0.5"
    assert loss.item() == loss.tolist() == float(loss) and type(loss.item()) is float
    assert json.dumps({"loss": loss}) == '{"loss": 0.5}' and math.sqrt(loss) == math.sqrt(0.5) and round(loss, 1) == 0.5
    assert {0.5: "half"}[loss] == "half" and loss in [0.5] and hash(loss) == hash(0.5) and int(loss) == 0
    assert sorted([loss, 0.1, ReturnedLoss(0.3)]) == [0.1, 0.3 * ReturnedLoss(1), 0.5] and np.mean([loss, 1.5]) == 1.0
    assert loss != "0.5" and loss is not None and not loss == None  # noqa: E711
    assert loss == pytest.approx(0.5) and type(loss + 1) is ReturnedLoss
    assert (loss.dtype, loss.shape, loss.ndim, loss.size) == (mx.float32, (), 0, 1)
    with pytest.raises(TypeError):
        loss + "x"
    with pytest.raises(AttributeError):
        loss.nothing  # noqa: B018


@pytest.mark.parametrize("made", [copy.copy, copy.deepcopy, lambda loss: pickle.loads(pickle.dumps(loss))])
def test_a_copy_is_one_too(made):
    loss = made(ReturnedLoss(mx.array([1.1], mx.bfloat16)))
    assert type(loss) is ReturnedLoss and bits(loss) == bits(mx.array([1.1], mx.bfloat16))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
def test_a_step_of_ones_own_gives_its_dtype_back(tmp_path, dtype):
    def run(record, **options):
        mx.random.seed(0)
        model, optimizer = nn.Linear(4, 2), optim.SGD(0.05)

        def step(x):
            loss, gradients = nn.value_and_grad(model, lambda model, x: mx.mean(mx.square(model(x) - 1)))(model, x)
            optimizer.update(model, gradients)
            return loss.astype(dtype)

        recorder = Recorder(tmp_path / "run", model, optimizer, step_fn=step, **options) if record else None
        mean, generator = 0.0, np.random.default_rng(3)
        for _ in range(options.get("resume", False) + 3):
            x = mx.array(generator.normal(size=(6, 4)).astype(np.float32))
            loss = step(x) if recorder is None else recorder.step(x)
            mean = 0.9 * mean + loss * 0.1
            optimizer.learning_rate = 0.01 + 0.1 * mean
        if recorder is not None:
            recorder.close()
        return bits(model.weight), bits(mean)

    assert run(True) == run(False)
    assert open_run(tmp_path / "run").manifest.loss == str(dtype).rpartition(".")[2]
    again = run(True, resume=True)
    assert again[1][1] == run(False)[1][1]
