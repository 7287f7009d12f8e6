"""Runs with spikes of known cause, recorded once a session: planted ones of the built-in trainer, and own loops whose
loss spikes for a reason that can be computed by hand."""

import functools
import re
import shutil
import warnings
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import runs

from workbench import open_run
from workbench.experiment import Experiment, StepOptions
from workbench.record import Recorder
from workbench.spikes import SpikeSettings
from workbench.trainer.training import train_run

AT, STEPS, WINDOW = 34, 42, 20
SETTINGS = runs.SMALL | {"save_every": 16, "spike_window": WINDOW, "compile_": False, "warmup": 2, "max_lr": 3e-3}


@functools.cache
def planted_read_only(*faults, **changed):
    """A run of the trainer with faults, `{AT}` in their text being the step; its labels are gone."""
    faults = [fault.format(AT=AT) for fault in faults]
    name = re.sub("[^a-z0-9]+", "-", "-".join([*faults, *map(str, changed.values())])) or "healthy"
    out = runs.scratch() / "autopsies" / name
    train_run(out, runs.corpus(), changed.pop("steps", STEPS), faults=faults, **(SETTINGS | changed))
    (out / "planted.json").unlink(missing_ok=True)
    return open_run(out)


def planted(folder, *faults, **changed):
    """A copy of it."""
    source = planted_read_only(*faults, **changed).path
    return open_run(Path(shutil.copytree(source, folder / "run")))


# ------------------------------------------------------------------------------------------------------- own loops


class Numbered:
    """Batches that are functions of their number, which is the cursor."""

    def __init__(self, batch):
        self.batch, self.number = batch, 0

    def __iter__(self):
        return self

    def __next__(self):
        self.number += 1
        return self.batch(self.number)

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, cursor):
        self.number = cursor["number"]


class Vector(nn.Module):
    """Linear regression."""

    def __init__(self, start):
        super().__init__()
        self.w = mx.array(start, mx.float32)

    def __call__(self, x):
        return x @ self.w


def squares(model, x, y):
    return mx.mean(mx.square(model(x) - y))


def curved():
    """Gradient descent with a rate of 2.6 / sharpness: a coordinate that starts at 1e-6 grows by 1.6 in each step."""
    x, y = np.array([[3.0, 0.0], [0.0, 0.3]], np.float32), np.array([0.0, 0.3], np.float32)
    return _job(Vector([1e-6, -9.0]), optim.SGD(2.6 / 9), lambda number: (x, y))


def _regression(number, second):
    draw = np.random.default_rng(number)
    x = draw.standard_normal((8, 2)).astype(np.float32)
    x[:, 1] = second
    return x, (x[:, 0] * 0.5 + 0.1 * draw.standard_normal(8)).astype(np.float32)


RARE = 40


def stale():
    """A feature that stands in no row before step 40, when its v is still 0: uncorrected Adam moves it by 3.2 times the
    learning rate, which a v of g² would hold to a tenth."""
    adam = optim.Adam(0.05, betas=[0.9, 0.999], bias_correction=False)
    return _job(Vector([0.5, 0.0]), adam, lambda number: _regression(number, 0.0 if number < RARE else 10.0))


def unbounded():
    """beta2 below beta1²: when the gradient of a feature fades, from step 20 on, m outlives v and drives it on."""

    def batch(number):
        return _regression(number, 1.0 if number >= RARE else max(0.2 ** max(0, number - 20), 1e-6))

    return _job(Vector([0.5, 0.0]), optim.Adam(1e-3, betas=[0.9, 0.4], bias_correction=True), batch)


def no_epsilon():
    """Adam without epsilon divides 0 by 0 in an element that never has a gradient."""
    adam = optim.Adam(1e-2, eps=0.0, bias_correction=True)
    return _job(Vector([0.5, 0.0]), adam, lambda number: _regression(number, 0.0))


class Attending(nn.Module):
    """One query on 200 keys with logits of `others`·s and one of s, whose value alone is not 0."""

    def __init__(self, s=20.0, others=0.9):
        super().__init__()
        self.attention = _Head(s, others)

    def __call__(self):
        return self.attention()


class _Head(nn.Module):
    def __init__(self, s, others):
        super().__init__()
        self.s = mx.array([s])
        self._keys = mx.array([others] * 200 + [1.0]).reshape(1, 1, 201, 1)
        self._values = mx.array([0.0] * 200 + [1.0]).reshape(1, 1, 201, 1)

    def __call__(self):
        query = self.s.reshape(1, 1, 1, 1)
        return mx.fast.scaled_dot_product_attention(query, self._keys, self._values, scale=1.0).reshape(1)


def attending():
    """The scale s has no gradient before step 30; then Adam raises it by some 60 in one update."""
    return _attending(Attending(), 150.0)


def attending_early():
    """The same with a logit that is 2.5, and is raised by some 9: small, but out of line with the steps before."""
    return _attending(Attending(2.5, 0.0), 23.0)


def _attending(attending, rate):

    def loss(model, gate, noise):
        seen = mx.stop_gradient(mx.mean(mx.square(model())))
        return seen - 1e-6 * mx.sum(gate * model.attention.s) + noise[0]

    def batch(number):
        noise = np.random.default_rng(number).uniform(0.010, 0.012, 1)
        return np.array([float(number == 30)], np.float32), noise.astype(np.float32)

    return _job(attending, optim.Adam(rate, betas=[0.9, 0.95], bias_correction=True), batch, loss)


class Table(nn.Module):
    """Logits of the next token, by token: one row of a table each."""

    def __init__(self, vocabulary=12):
        super().__init__()
        self.rows = nn.Embedding(vocabulary, vocabulary)
        self.rows.weight = mx.zeros((vocabulary, vocabulary))

    def __call__(self, tokens):
        return self.rows(tokens)


def mistaught():
    """After a token that is rare, batch 40 has wrong targets; it comes again, with the right ones, in step 45."""

    def loss(model, inputs, targets):
        tokens = nn.losses.cross_entropy(model(inputs), targets, reduction="none")
        return mx.mean(tokens), {"token_loss": tokens}

    def batch(number):
        inputs = np.random.default_rng(number).integers(0, 8, (6, 5)).astype(np.int32)
        targets = (inputs + 1) % 8
        if number < 12 or number in (40, 45):
            inputs[2], targets[2] = 10, 11 if number == 40 else 9
        return inputs, targets

    return _job(Table(), optim.SGD(20.0), batch, loss)


def undecided():
    """A loss that depends on a counter outside of the state: no replay can have its bits, nor repeat them."""
    calls = [0]

    def loss(model, x, y):
        calls[0] += 1
        return squares(model, x, y) + 1e-3 * calls[0] + (5.0 if calls[0] == 30 else 0.0)

    return _job(Vector([0.5, 0.1]), optim.SGD(0.01), lambda number: _regression(number, 1.0), loss)


def _job(model, optimizer, batch, loss=squares):
    mx.eval(model.parameters())
    return Experiment(model, optimizer, loss, Numbered(batch), StepOptions(compile=False))


@functools.cache
def own_read_only(make, steps, window=WINDOW):
    out = runs.scratch() / "autopsies" / make.__name__
    job = make()
    options = {name: getattr(job.options, name) for name in ("clip", "accumulate", "compile", "deterministic")}
    parts = (job.model, job.optimizer, job.loss_fn, job.sampler)
    recording = {"save_every": 10, "spikes": SpikeSettings(window=window), "factory": f"autopsies:{make.__name__}"}
    recording |= {"self_check": make is not undecided}  # which would refuse what can't be repeated
    with warnings.catch_warnings(), Recorder(out, *parts, **options, **recording) as recorder:
        if make is undecided:
            warnings.simplefilter("ignore", UserWarning)  # that its counter is no part of the state
        for batch in recorder.batches(steps):
            recorder.step(batch)
    return open_run(out)
