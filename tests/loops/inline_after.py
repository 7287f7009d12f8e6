"""A training loop as people write it for MLX: a small language model, its step written out in the loop."""

import sys

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np

import workbench as wb

TEXT = b"the quick brown fox jumps over the lazy dog and runs away from it. " * 20
CONTEXT, BATCH, STEPS = 16, 8, 12


class Transformer(nn.Module):
    def __init__(self, width=32, heads=2, depth=2):
        super().__init__()
        self.embedding = nn.Embedding(128, width)
        self.encoder = nn.TransformerEncoder(depth, width, heads, dropout=0.1, norm_first=True)
        self.head = nn.Linear(width, 128)

    def __call__(self, x):
        mask = nn.MultiHeadAttention.create_additive_causal_mask(x.shape[1])
        return self.head(self.encoder(self.embedding(x), mask))


def loss_fn(model, x, y):
    return mx.mean(nn.losses.cross_entropy(model(x), y))


def get_batch(tokens):
    starts = np.random.randint(0, len(tokens) - CONTEXT - 1, BATCH)
    windows = np.stack([tokens[start : start + CONTEXT + 1] for start in starts])
    return mx.array(windows[:, :-1]), mx.array(windows[:, 1:])


out = sys.argv[1]
mx.random.seed(1)
np.random.seed(1)
tokens = np.frombuffer(TEXT, np.uint8).astype(np.int32)
model = Transformer()
optimizer = optim.Adam(optim.linear_schedule(0.0, 1e-3, 10))
mx.eval(model.parameters())
recorder = wb.Recorder(out, model, optimizer, loss_fn, compile=False)

for number in range(STEPS):
    x, y = get_batch(tokens)
    loss = recorder.step((x, y))
    mx.eval(model.parameters(), optimizer.state)
    if number % 4 == 0:
        print(f"step {number}: loss {loss.item():.3f}")

recorder.close()
model.save_weights(f"{out}.npz")
