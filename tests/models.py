"""Small models of several makes, each with its batches and loss: what a probe must be able to see into."""

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from helpers import Numbered

from workbench.experiment import Experiment, StepOptions
from workbench.trainer.model import ModelConfig, build_model, loss

VOCABULARY, CTX, ROWS = 32, 8, 6


class Tokens(Numbered):
    """Batches of tokens and their successors."""

    def batch(self, number):
        tokens = np.random.default_rng(number).integers(0, VOCABULARY, (ROWS, CTX + 1)).astype(np.int32)
        return tokens[:, :-1], tokens[:, 1:]


class GroupedAttention(nn.Module):
    """Four query heads on two key heads, with sinks."""

    def __init__(self, width=16, sinks=True):
        super().__init__()
        self.query, self.output = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.key, self.value = nn.Linear(width, width // 2, bias=False), nn.Linear(width, width // 2, bias=False)
        self._sinks = mx.array([0.5, -1.0, 0.0, 2.0]) if sinks else None

    def __call__(self, x):
        q, k, v = (
            layer(x).reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3)
            for layer, heads in ((self.query, 4), (self.key, 2), (self.value, 2))
        )
        mixed = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.5, mask="causal", sinks=self._sinks)
        return self.output(mixed.transpose(0, 2, 1, 3).reshape(x.shape))


class ByHand(nn.Module):
    """Attention written out. A row of the mask that hides everything gives NaN, which is replaced: finite forward."""

    def __init__(self, width=16, hide=()):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self._hide = list(hide)

    def __call__(self, x):
        q, k, v = (
            layer(x).reshape(*x.shape[:2], 2, -1).transpose(0, 2, 1, 3) for layer in (self.query, self.key, self.value)
        )
        length = x.shape[1]
        allowed = mx.array(np.tril(np.ones((length, length), bool)) & ~np.isin(np.arange(length), self._hide)[:, None])
        weights = mx.softmax(mx.where(allowed, q @ k.swapaxes(-1, -2) * 0.5, -mx.inf), axis=-1)
        weights = mx.where(mx.isnan(weights), 0.0, weights)
        return (weights @ v).transpose(0, 2, 1, 3).reshape(x.shape)


class Decoder(nn.Module):
    """An embedding, residual attention blocks, and a head. `shared`: the same block twice."""

    def __init__(self, blocks, shared=False, width=16):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = blocks
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self._passes = 2 if shared else 1

    def __call__(self, tokens):
        x = self.embedding(tokens)
        for _ in range(self._passes):
            for block in self.blocks:
                x = x + block(x)
        return self.head(x)


def token_loss(model, inputs, targets):
    return nn.losses.cross_entropy(model(inputs).astype(mx.float32), targets, reduction="mean")


def transformer(**changed):
    model = {"vocabulary": VOCABULARY, "ctx": CTX, "depth": 2, "width": 16, "heads": 2}
    return build_model(ModelConfig(**(model | changed)), seed=1)


def seeded(make):
    mx.random.seed(5)
    model = make()
    mx.eval(model.parameters())
    return model


# Name: model, loss.
MODELS = {
    "transformer": (lambda: transformer(dropout=0.1), loss),
    "bfloat16": (lambda: transformer(dtype="bfloat16", tied=False), loss),
    "grouped": (lambda: seeded(lambda: Decoder([GroupedAttention(), GroupedAttention(sinks=False)])), token_loss),
    "shared": (lambda: seeded(lambda: Decoder([GroupedAttention()], shared=True)), token_loss),
    "by hand": (lambda: seeded(lambda: Decoder([ByHand()])), token_loss),
}


def job(name="transformer", *, optimizer=None, loss_fn=None, model=None, **options):
    """An experiment with one of `MODELS`, or with `model`; `options` are those of `StepOptions`."""
    make, own_loss = MODELS[name]
    return Experiment(
        make() if model is None else model,
        optim.AdamW(1e-2, bias_correction=True) if optimizer is None else optimizer,
        own_loss if loss_fn is None else loss_fn,
        Tokens(),
        StepOptions(**({"compile": False, "clip": 1.0} | options)),
    )


def classes_of(model):
    """What every class in the tree, and every function that is ever replaced, is, by identity."""
    classes = {cls for module in model.modules() for cls in type(module).__mro__ if cls is not object}
    functions = (
        mx.fast.scaled_dot_product_attention,
        mx.softmax,
        mx.take,
        nn.losses.cross_entropy,
        mx.array.__getitem__,
    )
    return {cls: dict(cls.__dict__) for cls in classes}, functions
