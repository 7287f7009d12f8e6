"""Models of every make that people train with MLX, each with its batches and loss, at sizes that take milliseconds."""

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from helpers import Points, mse

from workbench.experiment import Experiment, StepOptions

VOCABULARY, LENGTH, ROWS, WIDTH = 32, 8, 4, 16


class Numbered:
    """Batches that are functions of their number, which is the cursor."""

    def __init__(self, draw):
        self.draw, self.number = draw, 0

    def __iter__(self):
        return self

    def __next__(self):
        batch = self.draw(np.random.Generator(np.random.Philox(key=3, counter=self.number)))
        self.number += 1
        return batch

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, cursor):
        self.number = cursor["number"]


def tokens():
    def draw(random):
        found = random.integers(0, VOCABULARY, (ROWS, LENGTH + 1), dtype=np.int32)
        return found[:, :-1], found[:, 1:]

    return Numbered(draw)


def images():
    return Numbered(
        lambda random: (
            random.standard_normal((ROWS, 8, 8, 3), dtype=np.float32),
            random.integers(0, 5, ROWS, np.int32),
        )
    )


def series():
    return Numbered(
        lambda random: (
            random.standard_normal((ROWS, LENGTH, 4), dtype=np.float32),
            random.standard_normal((ROWS, 1), dtype=np.float32),
        )
    )


def next_token(model, inputs, targets):
    return nn.losses.cross_entropy(model(inputs), targets, reduction="mean")


def label(model, x, y):
    return nn.losses.cross_entropy(model(x), y, reduction="mean")


# ------------------------------------------------------------------------------------------------- models


class Block(nn.Module):
    """Causal attention and a feed-forward layer, before which the norms stand."""

    def __init__(self, feed_forward=None, dropout=0.0):
        super().__init__()
        self.attention = nn.MultiHeadAttention(WIDTH, 2)
        self.feed_forward = feed_forward or nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
        self.norm1, self.norm2, self.dropout = nn.RMSNorm(WIDTH), nn.LayerNorm(WIDTH), nn.Dropout(dropout)

    def __call__(self, x):
        mask = nn.MultiHeadAttention.create_additive_causal_mask(x.shape[1])
        y = self.norm1(x)
        x = x + self.dropout(self.attention(y, y, y, mask))
        return x + self.dropout(self.feed_forward(self.norm2(x)))


class GPT(nn.Module):
    """A decoder; `tied`: the head is the embedding."""

    def __init__(self, blocks, tied=True, dropout=0.0):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks, self.norm, self.dropout = blocks, nn.LayerNorm(WIDTH), nn.Dropout(dropout)
        if not tied:
            self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def __call__(self, x):
        x = self.dropout(self.embedding(x) + self.positions(mx.arange(x.shape[1])))
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.head(x) if "head" in self else self.embedding.as_linear(x)


class Experts(nn.Module):
    """Four experts of which each token takes two, by softmax over its router's largest scores."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.up, self.down = mx.random.normal((4, WIDTH, 32)) * 0.2, mx.random.normal((4, 32, WIDTH)) * 0.2

    def __call__(self, x):
        scores = self.router(x)
        chosen = mx.stop_gradient(mx.argpartition(-scores, kth=1, axis=-1)[..., :2])
        weights = mx.softmax(mx.take_along_axis(scores, chosen, axis=-1), axis=-1)
        inner = nn.silu(mx.einsum("bti,btkio->btko", x, self.up[chosen]))
        return (mx.einsum("btki,btkio->btko", inner, self.down[chosen]) * weights[..., None]).sum(-2)


class SinkAttention(nn.Module):
    """Two heads with an attention sink each, trained by hand-written softmax: the fused one has no gradient for it."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.sinks, self.rope = mx.zeros(2), nn.RoPE(8)

    def __call__(self, x):
        q, k, v = (part.reshape(*x.shape[:2], 2, 8).transpose(0, 2, 1, 3) for part in mx.split(self.qkv(x), 3, axis=-1))
        scores = self.rope(q) @ self.rope(k).swapaxes(-1, -2) / 8**0.5
        causal = mx.triu(mx.full(scores.shape[-2:], -mx.inf), k=1)
        sinks = mx.broadcast_to(self.sinks[None, :, None, None], (*scores.shape[:3], 1))
        weights = mx.softmax(mx.concatenate([scores + causal, sinks], axis=-1), axis=-1)[..., :-1]
        return x + self.out((weights @ v).transpose(0, 2, 1, 3).reshape(x.shape))


class Convolutions(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(3, 8, 3, padding=1), norm, nn.Conv2d(8, 8, 3, stride=2)
        self.pool, self.head, self.dropout = nn.MaxPool2d(2, 2), nn.Linear(8, 5), nn.Dropout2d(0.2)

    def __call__(self, x):
        x = self.dropout(nn.relu(self.norm(self.first(x))))
        return self.head(self.second(self.pool(x)).mean((1, 2)))


class Recurrent(nn.Module):
    def __init__(self, cell):
        super().__init__()
        self.cell, self.head = cell, nn.Linear(8, 1)

    def __call__(self, x):
        out = self.cell(x)
        return self.head((out[0] if isinstance(out, tuple) else out)[:, -1])


class Collections(nn.Module):
    """Modules in a dict, in a list of lists, and beside parameters of the module's own."""

    def __init__(self):
        super().__init__()
        self.by_name = {"in": nn.Linear(4, 8), "out": nn.Linear(8, 1)}
        self.grid = [[nn.Linear(8, 8), nn.Tanh()], [nn.Linear(8, 8), nn.ReLU()]]
        self.scale, self.shifts = mx.ones(8), [mx.zeros(8), {"again": mx.zeros(8)}]

    def __call__(self, x):
        x = self.by_name["in"](x) * self.scale + self.shifts[0]
        for layer, activation in self.grid:
            x = activation(layer(x))
        return self.by_name["out"](x + self.shifts[1]["again"])


class Shared(nn.Module):
    """One layer that is called twice, and stands under two names."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 1)
        self.alias = self.inner

    def __call__(self, x):
        return self.head(nn.tanh(self.alias(nn.tanh(self.inner(x)))))


class Checkpointed(GPT):
    """Gradient checkpointing of each block, as `nn.utils.checkpoint` does it."""

    def __init__(self, blocks, **options):
        super().__init__(blocks, **options)
        self._again = [nn.utils.checkpoint(block) for block in blocks]

    def __call__(self, x):
        x = self.embedding(x) + self.positions(mx.arange(x.shape[1]))
        for block in self._again:
            x = block(x)
        return self.embedding.as_linear(self.norm(x))


class Adapter(nn.Module):
    """LoRA (Hu et al. 2021, arXiv:2106.09685) on a frozen layer; `magnitude`: DoRA (Liu et al. 2024, arXiv:2402.09353),
    which also learns the length of each output's weights."""

    def __init__(self, base, rank=4, magnitude=False):
        super().__init__()
        wide = 64
        self.base, self.dropout = base, nn.Dropout(0.1)
        self.a, self.b = mx.random.normal((wide, rank)) * 0.1, mx.zeros((rank, wide))
        self._whole = magnitude
        if magnitude:
            self.magnitude = mx.linalg.norm(self._weight(), axis=1)

    def _weight(self):
        base = self.base
        if isinstance(base, nn.QuantizedLinear):
            return mx.dequantize(base.weight, base.scales, base.biases, base.group_size, base.bits)
        return base.weight

    def __call__(self, x):
        y = self.base(x) + self.dropout(x) @ self.a @ self.b
        if self._whole:
            adapted = self._weight() + (self.a @ self.b).T
            y = y * (self.magnitude / mx.stop_gradient(mx.linalg.norm(adapted, axis=1)))
        return y


def adapted(quantised, magnitude=False):
    """A network of 64-wide layers whose base is frozen (and quantised to 4 bits); adapters and the head are trained."""
    model = nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 1))
    model.freeze()
    for number in (1, 3):
        base = model.layers[number]
        model.layers[number] = Adapter(
            nn.QuantizedLinear.from_linear(base, 64, 4) if quantised else base, magnitude=magnitude
        )
        model.layers[number].base.freeze()
    model.layers[4].unfreeze()
    return model


def partly_frozen():
    model = GPT([Block(), Block()])
    model.blocks[0].freeze()
    return model


def mlp():
    return nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 1))


def parameterless():
    return nn.Sequential(
        nn.Linear(4, 8), nn.Tanh(), nn.Identity(), nn.Dropout(0.0), nn.Softplus(), nn.Linear(8, 1), nn.GELU()
    )


# Name: model, batches, loss, options of the step.
ZOO = {
    "mlp": (mlp, Points, mse, {}),
    "mlp, accumulation and clipping": (mlp, Points, mse, {"accumulate": 3, "clip": 0.5}),
    "cnn": (lambda: Convolutions(nn.GroupNorm(2, 8)), images, label, {}),
    "batch norm": (lambda: Convolutions(nn.BatchNorm(8)), images, label, {}),
    "tied gpt": (lambda: GPT([Block(), Block()]), tokens, next_token, {"clip": 1.0}),
    "untied gpt": (lambda: GPT([Block()], tied=False), tokens, next_token, {}),
    "dropout everywhere": (lambda: GPT([Block(dropout=0.2)], dropout=0.2), tokens, next_token, {}),
    "mixture of experts": (lambda: GPT([Block(Experts())]), tokens, next_token, {}),
    "attention with sinks": (lambda: GPT([SinkAttention()]), tokens, next_token, {}),
    "rnn": (lambda: Recurrent(nn.RNN(4, 8)), series, mse, {}),
    "gru": (lambda: Recurrent(nn.GRU(4, 8)), series, mse, {}),
    "lstm": (lambda: Recurrent(nn.LSTM(4, 8)), series, mse, {}),
    "parameterless layers": (parameterless, Points, mse, {}),
    "modules in dicts and lists": (Collections, Points, mse, {}),
    "shared modules called twice": (Shared, Points, mse, {}),
    "partly frozen": (partly_frozen, tokens, next_token, {}),
    "lora": (lambda: adapted(False), Points, mse, {}),
    "lora, quantised": (lambda: adapted(True), Points, mse, {}),
    "dora, quantised": (lambda: adapted(True, magnitude=True), Points, mse, {}),
    "gradient checkpointing": (lambda: Checkpointed([Block(), Block()]), tokens, next_token, {}),
    "gradient checkpointing, dropout": (lambda: Checkpointed([Block(dropout=0.3)]), tokens, next_token, {}),
}


def model(name):
    mx.random.seed(11)
    made = ZOO[name][0]()
    mx.eval(made)
    return made


def build(name, compile=True):
    """The factory."""
    _, batches, loss_fn, options = ZOO[name]
    return Experiment(
        model(name),
        optim.AdamW(1e-2, bias_correction=True),
        loss_fn,
        batches(),
        StepOptions(compile=compile, **options),
    )
