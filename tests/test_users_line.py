"""What a recorder warns of stands at the line of the loop that called it, however deep in its parts it is said."""

import warnings

import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from helpers import Points, mlp, mse

import workbench as wb


def full(*arguments):
    raise OSError(28, "No space left on device")


def layer(model):
    model.layers[1] = nn.ReLU()


def weight(model):
    model.layers[0].weight = model.layers[0].weight * 2


def nothing(model):
    pass


CASES = {
    # name: what the loop changes after step 1, what it calls then, and what is said
    "step": (weight, lambda recorder, batch: recorder.step(batch), "layers.0.weight was changed between"),
    "open_segment": (
        layer,
        lambda recorder, _: recorder.open_segment(),
        "layers.1 (a Dropout before, a ReLU now) was changed",
    ),
    "checkpoint": (nothing, lambda recorder, _: recorder.checkpoint(), "checkpoint 1 was not saved to"),
    "close": (weight, lambda recorder, _: recorder.close(), "no checkpoint of step 1 was saved to"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_warning_stands_at_the_line_of_the_loop(tmp_path, monkeypatch, name):
    change, call, text = CASES[name]
    model, sampler = mlp(0), Points()
    options = {"compile": False, "self_check": False, "black_box": 0}
    recorder = wb.Recorder(tmp_path / "run", model, optim.AdamW(1e-2), mse, sampler, **options)
    recorder.step(next(sampler))
    recorder._out.saves.checkpointer.wait()
    change(model)
    if name == "checkpoint":
        monkeypatch.setattr("workbench.checkpoints.checkpoint_writer.write_together", full)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        call(recorder, next(sampler))
    monkeypatch.undo()
    recorder.close()
    (found,) = [one for one in said if str(one.message).startswith(text)]
    assert (found.filename, found.lineno) == (__file__, call.__code__.co_firstlineno)
