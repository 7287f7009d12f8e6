"""Small recorded runs to experiment on, and the same steps as a plain MLX loop would do them: no code of ours in it."""

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from helpers import Points, mse
from helpers import experiment as own_experiment
from mlx.utils import tree_flatten, tree_unflatten

from workbench.interventions.scene import Scene
from workbench.record import Recorder
from workbench.run import Run

STEPS, SAVE_EVERY = 16, 5


def record_own(path, job, steps=STEPS, before_step=lambda number: None, **recording):
    """Records a loop of one's own; `before_step` is what the loop does before each step."""
    options = {name: getattr(job.options, name) for name in ("clip", "accumulate", "compile", "deterministic")}
    parts = (job.model, job.optimizer, job.loss_fn, job.sampler)
    with Recorder(path, *parts, **options, **({"save_every": SAVE_EVERY, "spikes": None} | recording)) as recorder:
        for batch in recorder.batches(steps):
            before_step(recorder.step_number + 1)
            recorder.step(batch)
    return Run(path)


def scene_of(tmp_path, step, build=own_experiment, steps=STEPS, opening=None, **options):
    """A scene of a new run of `build(**options)`, rebuilt by the same call."""
    run = record_own(tmp_path / "own", build(**options), steps)
    return Scene.open(run, step, experiment=build(**options), **(opening or {}))


def batch_of(step, rows=12):
    """The batch of a step of `Points`, as arrays."""
    points = Points(rows)
    points.number = step - 1
    return tuple(map(mx.array, next(points)))


def plain_steps(state, batches, optimizer, model, loss_fn=mse, clip=None, scale_lr=1.0):
    """Performs steps by `nn.value_and_grad`, `clip_grad_norm` and `optimizer.update`, from a state's arrays.

    Returns losses, gradient norms before clipping, and the weights after each step.
    """
    model.update(tree_unflatten(list(state.weights.items())))
    optimizer.init(model.trainable_parameters())
    optimizer.state = tree_unflatten(list(state.optimizer.items()))
    if scale_lr != 1.0:
        optimizer.learning_rate = optimizer.learning_rate * scale_lr
    losses, norms, weights = [], [], []
    for batch in batches:
        loss, gradients = nn.value_and_grad(model, loss_fn)(model, *batch)
        squares = [float(np.sum(np.square(np.array(g, np.float64)))) for _, g in tree_flatten(gradients)]
        norms.append(float(np.sqrt(sum(squares))))
        if clip is not None:
            gradients, _ = optim.clip_grad_norm(gradients, clip)
        optimizer.update(model, gradients)
        mx.eval(model.parameters(), optimizer.state)
        losses.append(loss.item())
        weights.append({path: np.array(array, np.float64) for path, array in tree_flatten(model.parameters())})
    return losses, norms, weights


def moved(state, weights):
    """L2 norm of each parameter's change, in float64."""
    return {path: float(np.linalg.norm(weights[path] - np.array(state.weights[path], np.float64))) for path in weights}
