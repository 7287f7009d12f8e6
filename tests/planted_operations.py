"""What the doctor's tests plant: operations and gradients that vary, so that no GPU is needed to find some."""

import itertools

import mlx.core as mx
import mlx.nn as nn
from helpers import experiment
from rich.console import Console
from runs import build as build_regression
from runs import parts

from workbench import Recorder, open_run
from workbench.examination.diagnosis import SelfTest
from workbench.examination.operations import Operation
from workbench.examination.repeats import Setting

SETTING = Setting("float32", False, True)
TEST = SelfTest(18, 18)


def small(setting):
    """A few parameters, dropout and AdamW: milliseconds a step."""
    return experiment(dropout=0.2, dtype=setting.dtype, compile=setting.compile, deterministic=setting.deterministic)


def varying_operation(name="my kernel", dtype="float32"):
    """An operation whose result is one ulp larger each time that it is performed."""

    def make():
        values, calls = mx.arange(1, 9).astype(mx.float32), itertools.count()
        return lambda: (values.view(mx.int32) + next(calls)).view(mx.float32)

    return Operation(name, dtype, make, remedy="use another kernel")


def steady_operation(name="steady", dtype="float32"):
    return Operation(name, dtype, lambda: lambda: mx.arange(8))


def drifting_gradient():
    """A loss function whose forward pass repeats and whose backward pass does not: a little more at each call."""
    calls = itertools.count()

    @mx.custom_function
    def identity(x):
        return x

    @identity.vjp
    def drifting(primal, cotangent, output):
        return cotangent * (1 + 2.0**-6 * next(calls))

    return lambda model, x, y: nn.losses.mse_loss(identity(model(x)), y)


def record_own_loop(folder, build=build_regression, steps=3):
    """Also what does not repeat, which the recorder's own check would refuse."""
    how = {"compile": False, "factory": "runs:build", "save_every": 2, "self_check": False}
    with Recorder(folder, *parts(build()), **how) as recorder:
        for batch in recorder.batches(steps):
            recorder.step(batch)
    return open_run(folder)


def printed(report, width=100):
    console = Console(width=width, record=True, file=open("/dev/null", "w"))
    with console.file:
        console.print(report)
    return console.export_text()
