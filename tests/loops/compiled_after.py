"""A training loop as people write it for MLX: a compiled step, data in memory, a new order each epoch."""

import sys

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np

import workbench as wb


class MLP(nn.Module):
    def __init__(self, dims):
        super().__init__()
        self.layers = [nn.Linear(n, m) for n, m in zip(dims[:-1], dims[1:], strict=True)]
        self.dropout = nn.Dropout(0.1)

    def __call__(self, x):
        for layer in self.layers[:-1]:
            x = self.dropout(nn.relu(layer(x)))
        return self.layers[-1](x)


def loss_fn(model, x, y):
    return nn.losses.cross_entropy(model(x), y, reduction="mean")


def batch_iterate(batch_size, x, y):
    order = np.random.permutation(len(x))
    for start in range(0, len(x), batch_size):
        ids = order[start : start + batch_size]
        yield mx.array(x[ids]), mx.array(y[ids])


out = sys.argv[1]
mx.random.seed(1)
np.random.seed(1)
points = np.random.randn(96, 8).astype(np.float32)
labels = (points[:, 0] * points[:, 1] > 0).astype(np.int32)

model = MLP([8, 16, 16, 2])
optimizer = optim.AdamW(optim.cosine_decay(1e-2, 20))
mx.eval(model.parameters())
state = [model.state, optimizer.state, mx.random.state]


def step(x, y):
    loss, grads = nn.value_and_grad(model, loss_fn)(model, x, y)
    grads, _ = optim.clip_grad_norm(grads, 1.0)
    optimizer.update(model, grads)
    return loss


recorder = wb.Recorder(out, model, optimizer, loss_fn, step_fn=step, compile=True)
for epoch in range(3):
    for x, y in batch_iterate(16, points, labels):
        loss = recorder.step((x, y))
        mx.eval(state)
    print(f"epoch {epoch}: loss {loss.item():.3f}")
recorder.close()

model.save_weights(f"{out}.npz")
