"""What a step can't do without: something to train, and token losses that can be put together."""

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from helpers import Points, mlp, mse

import workbench as wb
from workbench.errors import ExperimentError


def performed(path, model, loss_fn=mse, **more):
    recorder = wb.Recorder(path, model, optim.AdamW(1e-2), loss_fn, Points(), **more)
    with recorder:
        for batch in recorder.batches(1):
            recorder.step(batch)


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_a_model_that_has_nothing_to_train_is_a_sentence(tmp_path, own, compile):
    model = mlp()
    model.freeze()

    def step(x, y):
        return nn.value_and_grad(model, mse)(model, x, y)[0]

    with pytest.raises(ExperimentError, match="the model has no trainable parameter: all are frozen"):
        performed(tmp_path / "run", model, compile=compile, step_fn=step if own else None)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("compile", [False, True])
def test_token_losses_of_micro_batches_that_have_no_rows_are_a_sentence(tmp_path, compile):
    def loss_fn(model, x, y):
        loss = mse(model, x, y)
        return loss, {"token_loss": loss}

    with pytest.raises(ExperimentError, match="token_loss of the loss function has no axis of rows.*2 micro-batches"):
        performed(tmp_path / "run", mlp(), loss_fn, compile=compile, accumulate=2)


def test_an_error_of_the_loss_function_itself_stays_what_it_is(tmp_path):
    def loss_fn(model, x, y):
        return mse(model, x, y) + mx.concatenate([mx.array(1.0)] * 2)

    with pytest.raises((IndexError, ValueError), match="concatenate"):
        performed(tmp_path / "run", mlp(), loss_fn, accumulate=2)
