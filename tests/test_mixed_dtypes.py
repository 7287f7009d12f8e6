"""Steps that mix bfloat16 weights with float32 gradients or moments: recorded and replayed, or refused by name."""

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from helpers import Points, mlp, mse
from mlx.utils import tree_flatten, tree_map

import workbench as wb
from workbench.errors import CheckpointError, ExperimentError


def job(mend=lambda gradients, model: gradients, dtype=mx.bfloat16, after=lambda model: None):
    """A step with gradients in float32, as `mend` gives them to the optimizer."""
    model, optimizer = mlp(0.1, dtype), optim.AdamW(1e-2)
    passes = nn.value_and_grad(model, mse)

    def step(x, y):
        loss, gradients = passes(model, x, y)
        gradients = tree_map(lambda one: one.astype(mx.float32), gradients)
        optimizer.update(model, mend(gradients, model))
        after(model)
        return loss

    return model, optimizer, step


def record(path, built, steps=6, **options):
    model, optimizer, step = built
    with wb.Recorder(path, model, optimizer, mse, Points(), step_fn=step, save_every=2, **options) as recorder:
        for batch in recorder.batches(steps):
            recorder.step(batch)
    return wb.open_run(path)


def cast(gradients, model):
    return tree_map(lambda one, weight: one.astype(weight.dtype), gradients, model.trainable_parameters())


def half(model):
    """Weights in bfloat16 again: only the moments are in float32."""
    model.update(tree_map(lambda one: one.astype(mx.bfloat16), model.parameters()))


@pytest.mark.parametrize("compiled", [False, True])
def test_weights_that_become_float32_are_named_with_the_remedy(tmp_path, compiled):
    with pytest.raises(ExperimentError) as refused:
        record(tmp_path / "run", built := job(), compile=compiled)
    words = (
        "step 1 can't be replayed: it changed the dtype or shape of layers.0.bias (from bfloat16(8,) to float32(8,))"
    )
    assert str(refused.value).startswith(words) and "cast them to each parameter's dtype" in str(refused.value)
    assert not (tmp_path / "run").exists()
    assert {one.dtype for _, one in tree_flatten(built[0].parameters())} == {mx.bfloat16}  # the start again


def test_moments_that_become_float32_are_named(tmp_path):
    with pytest.raises(ExperimentError, match=r"layers\.0\.bias\.m \(from bfloat16\(8,\) to float32\(8,\)\)"):
        record(tmp_path / "run", job(after=half))


@pytest.mark.parametrize("options", [{"mend": cast}, {"dtype": mx.float32}], ids=["cast", "float32"])
@pytest.mark.parametrize("compiled", [False, True])
def test_with_the_remedy_every_step_replays(tmp_path, options, compiled):
    run = record(tmp_path / "run", job(**options), compile=compiled)
    built = job(**options)
    experiment = wb.Experiment(*built[:2], mse, Points(), wb.StepOptions(compile=compiled), built[2])
    assert [trace.exact for trace in run.replay(range(1, 7), experiment=experiment)] == [True] * 6


def test_without_the_check_it_is_recorded_and_said_at_once(tmp_path):
    with pytest.warns(UserWarning, match=r"step 1 can't be replayed, nor any after it: it changed the dtype"):
        run = record(tmp_path / "run", job(), self_check=False)
    model, optimizer, step = job()
    own = wb.Experiment(model, optimizer, mse, Points(), step_fn=step)
    with pytest.raises(CheckpointError, match=r"layers\.0\.bias is .*bfloat16"):
        run.replay(1, experiment=own, with_probe=False)
