"""What a step reads through a module, and functions of libraries that a loop replaces: watched as global variables."""

import sys
import types
import warnings

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from helpers import Points

import workbench as wb
from workbench.code_names import chains
from workbench.errors import ExperimentError

settings = types.ModuleType("settings_of_a_job")
factor = 1.0


class Inner:
    scale = 1.0


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.act, self.last = nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)

    def __call__(self, x):
        return self.last(self.act(self.first(x))) * factor


class Holder:
    def __init__(self):
        self.module = settings


holder = Holder()


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch):
    for name, value in {"scale": 1.0, "inner": Inner(), "row": [1.0], "unread": 0, "times": _times}.items():
        monkeypatch.setitem(vars(settings), name, value)
    monkeypatch.setitem(sys.modules, "settings_of_a_job", settings)
    monkeypatch.setitem(globals(), "factor", 1.0)
    monkeypatch.setattr(nn.Tanh, "__call__", nn.Tanh.__call__)
    monkeypatch.setattr(optim.AdamW, "apply_single", optim.AdamW.apply_single)
    monkeypatch.setattr(nn.losses, "mse_loss", nn.losses.mse_loss)
    monkeypatch.setattr(mx, "tanh", mx.tanh)


def _times(x):
    return x


def loss_fn(model, x, y):
    return nn.losses.mse_loss(model(x), y)


def of_variable(x):
    return x * settings.scale


def of_object(x):
    return x * settings.inner.scale


def of_list(x):
    return x * settings.row[0]


def of_function(x):
    return settings.times(x)


def of_attribute(x):
    return x * holder.module.scale


def of_import(x):
    import settings_of_a_job

    return x * settings_of_a_job.scale


def of_none(x):
    return x


def said(path, reads, change, steps=6, **options):
    """What is warned of while `change()` is called before the fourth step."""
    model, optimizer, sampler = Net(), optim.AdamW(1e-2), Points()

    def step(x, y):
        loss, gradients = nn.value_and_grad(model, loss_fn)(model, reads(x), y)
        optimizer.update(model, gradients)
        return loss

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        options = {"step_fn": step, "save_every": 2, "spikes": None} | options
        with wb.Recorder(path, model, optimizer, loss_fn, sampler, **options) as recorder:
            for batch in recorder.batches(steps):
                if recorder.step_number == 3:
                    change()
                recorder.step(batch)
    return [str(one.message) for one in found]


def _other(x):
    return x * 2


CHANGES = {
    "variable": (of_variable, lambda: setattr(settings, "scale", 2.0), "settings.scale is 2.0 now"),
    "object": (of_object, lambda: setattr(settings.inner, "scale", 2.0), "settings.inner.scale is 2.0 now"),
    "list": (of_list, lambda: settings.row.__setitem__(0, 2.0), "settings.row[0] is 2.0 now"),
    "function": (of_function, lambda: setattr(settings, "times", _other), "settings.times is the function _other now"),
    "attribute": (of_attribute, lambda: setattr(settings, "scale", 2.0), "holder.module.scale is 2.0 now"),
    "import": (of_import, lambda: setattr(settings, "scale", 2.0), "settings_of_a_job.scale is 2.0 now"),
    "model": (of_none, lambda: globals().update(factor=2.0), "model.Net.__call__.factor is 2.0 now"),
    "loss": (of_none, lambda: setattr(nn.losses, "mse_loss", _loss), "nn.losses.mse_loss is the function _loss now"),
    "layer": (
        of_none,
        lambda: setattr(nn.Tanh, "__call__", _call),
        "model.act.Tanh.__call__ is the function _call now",
    ),
    "operation": (of_none, lambda: setattr(mx, "tanh", _other), "mlx.core.tanh is the function _other now"),
    "optimizer": (
        *(of_none, lambda: setattr(optim.AdamW, "apply_single", _apply)),
        "optimizer.AdamW.apply_single is the function _apply now",
    ),
}
_apply_single = optim.AdamW.apply_single


def _apply(self, gradient, parameter, state):
    return _apply_single(self, gradient * 2, parameter, state)


def _loss(predicted, y):
    return mx.mean(mx.abs(predicted - y))


def _call(self, x):
    return x


@pytest.mark.parametrize("what", CHANGES)
def test_what_a_loop_changes_is_named(tmp_path, what):
    reads, change, sentence = CHANGES[what]
    (only,) = said(tmp_path / "run", reads, change)
    assert sentence in only and "no checkpoint holds it" in only and "steps after 2 " in only
    is_code = "the function" in sentence
    assert ("Put it there before the recorder is made" in only) == is_code
    assert ("Hand it over in `extra`" in only) != is_code


def test_what_the_step_does_not_read_of_a_module_is_not_spoken_of(tmp_path):
    assert said(tmp_path / "run", of_variable, lambda: setattr(settings, "unread", 5)) == []
    assert said(tmp_path / "other", of_none, lambda: setattr(settings, "scale", 2.0)) == []


def test_what_only_the_making_of_an_object_reads_is_not_spoken_of(tmp_path):
    class Made(Net):
        def __init__(self):
            super().__init__()
            self.made_with = len(settings.row)

        def __call__(self, x):
            return super().__call__(x)

    made = Made()
    found = said(tmp_path / "run", lambda x: made.first(x)[:, :4], lambda: settings.row.append(2.0))
    assert not any("settings.row" in one for one in found)


def test_a_number_of_a_module_that_the_step_counts_is_refused_as_a_global_variable_is(tmp_path):
    def counts(x):
        settings.scale += 1
        return x * (1 + settings.scale // 10)

    with pytest.raises(ExperimentError, match=r"a number that no checkpoint holds, step_fn.reads.settings.scale"):
        said(tmp_path / "run", counts, lambda: None)


def test_the_attributes_that_are_asked_of_one_name_in_turn():
    def code(x):
        inner = [nn.losses.mse_loss(one, x) for one in mx.split(x, 2)]
        return settings.inner, inner, x.shape, settings

    assert set(chains(code.__code__)) == {("nn", "losses", "mse_loss"), ("mx", "split"), ("settings", "inner")}
