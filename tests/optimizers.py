"""Every optimizer of MLX, found by inspection, with the arguments that it needs and those that give it more state."""

import inspect

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from helpers import Points, mse

from workbench.experiment import Experiment, StepOptions

FOUND = {
    name: cls
    for name, cls in vars(optim).items()
    if inspect.isclass(cls) and issubclass(cls, optim.Optimizer) and cls is not optim.Optimizer
}

# Arguments, more than one set where others keep other arrays. A class that is missing here fails a test.
ARGUMENTS = {
    "SGD": [{"learning_rate": 0.1}, {"learning_rate": 0.1, "momentum": 0.9, "nesterov": True}],
    "RMSprop": [{"learning_rate": 1e-2}],
    "Adagrad": [{"learning_rate": 1e-1}],
    "AdaDelta": [{"learning_rate": 1.0}],
    "Adam": [{"learning_rate": 1e-2}, {"learning_rate": 1e-2, "bias_correction": True}],
    "AdamW": [{"learning_rate": 1e-2, "weight_decay": 0.1}],
    "Adamax": [{"learning_rate": 1e-2}],
    "Lion": [{"learning_rate": 1e-3}],
    "Adafactor": [{}, {"learning_rate": 1e-2, "relative_step": False, "beta_1": 0.9}],
    "Muon": [{"learning_rate": 1e-2}],
    "MultiOptimizer": [{}],
}


def schedule():
    return optim.join_schedules([optim.linear_schedule(0.0, 1e-2, 2), optim.cosine_decay(1e-2, 6)], [2])


def optimizer(name, number=0, scheduled=False):
    if name == "MultiOptimizer":
        rate = schedule() if scheduled else 1e-2
        members = [optim.Muon(rate), optim.SGD(rate, momentum=0.5)]
        return optim.MultiOptimizer(members, [lambda path, weight: weight.ndim == 2])
    arguments = dict(ARGUMENTS[name][number])
    if scheduled and "learning_rate" in arguments:
        arguments["learning_rate"] = schedule()
    return FOUND[name](**arguments)


CASES = [(name, number) for name, given in ARGUMENTS.items() for number in range(len(given))]


def build(name, number=0, compile=True, scheduled=False, dtype="float32"):
    """The factory."""
    mx.random.seed(4)
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.1), nn.Tanh(), nn.Linear(6, 1))
    model.set_dtype(getattr(mx, dtype))
    return Experiment(model, optimizer(name, number, scheduled), mse, Points(), StepOptions(clip=1.0, compile=compile))
