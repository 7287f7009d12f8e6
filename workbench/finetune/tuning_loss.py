"""mlx-lm's loss and its gradient accumulation, in the form that a step of the core wants.

Knows mlx-lm's `default_loss` and MLX; nothing of data or runs.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from .examples import unpacked
from .settings import mlx_lm

Extras = dict[str, mx.array]


def tuning_loss(model: nn.Module, tokens: mx.array, lengths: mx.array, *widths: mx.array) -> tuple[mx.array, Extras]:
    """The loss of a step in nats a token, a float32 scalar, and `{"token_loss": (B, T-1)}`.

    Args:
        tokens: (B, T) int32.
        lengths: (B, 2) int32.
        widths: of a step of several micro-batches; see `examples.ExampleSampler`.
    """
    if widths:
        return _accumulated(model, unpacked(tokens, lengths, *widths))
    return _loss(model, tokens, lengths)


def _loss(model: Any, tokens: mx.array, lengths: mx.array) -> tuple[mx.array, Extras]:
    logits = []

    def watched(inputs: mx.array) -> mx.array:
        logits.append(model(inputs))
        return logits[-1]

    loss, _ = mlx_lm("tuner.trainer").default_loss(watched, tokens, lengths)
    # The same operations on the same arrays as in mlx-lm's loss, so that a compiled step performs them once; what
    # isn't a target has a loss of 0. Autodiff leaves auxiliary outputs alone.
    targets = tokens[:, 1:]
    steps = mx.arange(1, targets.shape[1] + 1)
    counted = mx.logical_and(steps >= lengths[:, 0:1], steps <= lengths[:, 1:])
    per_token = nn.losses.cross_entropy(logits[0], targets) * counted
    return loss, {"token_loss": mx.stop_gradient(per_token)}


def _accumulated(model: nn.Module, parts: list[tuple[mx.array, mx.array]]) -> tuple[mx.array, Extras]:
    """The mean of the micro-batches' losses, with the gradient that mlx-lm takes of it.

    Gradients of the micro-batches are added one after another, the newest first, and divided by their number: as one
    graph, autodiff would add the parts of a parameter that is used twice in another order, and divide before. So this
    function brings its own backward pass, which hands on what the forward pass has computed.
    """

    def part_loss(trained: Any, tokens: mx.array, lengths: mx.array) -> tuple[mx.array, mx.array]:
        model.update(trained)
        loss, extras = _loss(model, tokens, lengths)
        return loss, extras["token_loss"]

    @mx.custom_function
    def accumulated(trained: Any) -> Any:
        losses, token_losses, total = [], [], None
        for part in parts:
            (loss, per_token), gradients = mx.value_and_grad(part_loss)(trained, *part)
            losses.append(loss)
            token_losses.append(per_token)
            total = gradients if total is None else tree_map(mx.add, gradients, total)
        model.update(trained)
        widest = max(per_token.shape[1] for per_token in token_losses)
        padded = [mx.pad(per_token, [(0, 0), (0, widest - per_token.shape[1])]) for per_token in token_losses]
        mean = tree_map(lambda gradient: gradient / len(parts), total)
        return [sum(losses[1:], losses[0]) / len(parts), mx.concatenate(padded), *dict(tree_flatten(mean)).values()]

    @accumulated.vjp
    def backward(trained: Any, cotangents: Any, outputs: Any) -> Any:
        paths = dict(tree_flatten(trained))
        scaled = [gradient * cotangents[0].astype(gradient.dtype) for gradient in outputs[2:]]
        return tree_unflatten(list(zip(paths, scaled, strict=True)))

    found: Any = accumulated(model.trainable_parameters())
    return found[0], {"token_loss": mx.stop_gradient(found[1])}
