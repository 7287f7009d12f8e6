"""A decoder-only transformer over any vocabulary of integer tokens, and its loss.

Pre-norm blocks (Xiong et al. 2020, arXiv:2002.04745) with RMSNorm (arXiv:1910.07467), rotary positions
(arXiv:2104.09864), causal attention, a GELU MLP and no biases: GPT-2's plan with today's norm and positions. It is
written to be read and replayed, not to win: query, key and value are three layers, so each has its own norms.

Parameter paths: `embedding`, `blocks.N.attention_norm`, `blocks.N.attention.query|key|value|output`,
`blocks.N.mlp_norm`, `blocks.N.mlp.up|down`, `norm`, and `head` where the head is not tied; each ends in `.weight`.

This module does not know bytes, text, optimizers, runs or steps.
"""

import hashlib
import math
from typing import Any, Literal, get_args

import mlx.core as mx
import mlx.nn as nn
import msgspec
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from ..errors import ExperimentError
from ..sabotage.alterations import IGNORED

Dtype = Literal["float32", "bfloat16", "float16"]

INIT_STD = 0.02  # GPT-2's; small enough that the first loss is close to ln(vocabulary)


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that determines the model's shape and arithmetic; the initial weights need a seed as well.

    Args:
        vocabulary: number of distinct tokens; token ids are 0 … vocabulary - 1.
        ctx: longest sequence the model accepts, in tokens.
        depth: number of blocks.
        width: size of the residual stream.
        heads: attention heads; each has width / heads components, an even number because RoPE rotates pairs.
        mlp: hidden size of the MLP as a multiple of width.
        dropout: probability of zeroing an element of the embedding and of each branch's output, in training only.
        tied: the output projection is the embedding matrix.
        dtype: of every parameter and of the activations.

    Raises:
        ExperimentError: a value out of range, naming the field, what was found and what is possible.
    """

    vocabulary: int
    ctx: int
    depth: int
    width: int
    heads: int
    mlp: int = 4
    dropout: float = 0.0
    tied: bool = True
    dtype: Dtype = "float32"

    def __post_init__(self) -> None:
        for name in ("vocabulary", "ctx", "depth", "width", "heads", "mlp"):
            size = getattr(self, name)
            if type(size) is not int or size < 1:
                raise ExperimentError(f"model.{name} is {size!r}; expected a whole number of at least 1")
        if self.width % self.heads:
            raise ExperimentError(
                f"model.width is {self.width}, which {self.heads} heads cannot share equally; "
                "expected a multiple of model.heads"
            )
        if self.width // self.heads % 2:
            raise ExperimentError(
                f"model.width {self.width} over {self.heads} heads makes heads of odd size {self.width // self.heads}, "
                f"but RoPE rotates pairs; expected a multiple of {2 * self.heads} as the width"
            )
        if not isinstance(self.dropout, int | float) or not 0 <= self.dropout < 1:
            raise ExperimentError(
                f"model.dropout is {self.dropout!r}; expected a probability of at least 0 and below 1"
            )
        if not isinstance(self.tied, bool):
            raise ExperimentError(f"model.tied is {self.tied!r}; expected true or false")
        if self.dtype not in get_args(Dtype):
            raise ExperimentError(f"model.dtype is {self.dtype!r}; expected one of {', '.join(get_args(Dtype))}")


# The vocabulary of `tiny` and `small` is the 256 bytes. `batch` is the number of rows of `ctx` tokens in a step.
PRESETS: dict[str, dict[str, Any]] = {
    # 0.1M parameters, 400 tokens a step: many steps a second on two CPU cores even without an optimized BLAS.
    "tiny": {"model": {"vocabulary": 256, "ctx": 50, "depth": 2, "width": 64, "heads": 2}, "batch": 8},
    # 10.7M parameters, 1,024 tokens a step.
    "small": {"model": {"vocabulary": 256, "ctx": 128, "depth": 6, "width": 384, "heads": 6}, "batch": 8},
    # 22M parameters, of which 12.6M are the embedding: a large vocabulary beside a small trunk.
    "huge": {"model": {"vocabulary": 49152, "ctx": 128, "depth": 12, "width": 256, "heads": 4}, "batch": 8},
    # 1.31B parameters, the shape of GPT-3 XL (Brown et al. 2020, arXiv:2005.14165, table 2.1): for a GPU, in bfloat16.
    "xl": {"model": {"vocabulary": 50257, "ctx": 1024, "depth": 24, "width": 2048, "heads": 16}, "batch": 8},
}


def depth_config(depth: int, *, vocabulary: int = 256, ctx: int = 128, **settings: Any) -> ModelConfig:
    """One number sets the size: `depth` blocks of width 64·depth, with `depth` heads of size 64, and a 4× MLP.

    Args:
        settings: any other field of `ModelConfig` (dropout, tied, dtype).

    Raises:
        ExperimentError: as `ModelConfig`.
    """
    return ModelConfig(vocabulary=vocabulary, ctx=ctx, depth=depth, width=64 * depth, heads=depth, mlp=4, **settings)


def parameter_count(config: ModelConfig) -> int:
    """The number of trainable scalars, from the configuration alone: nothing is allocated."""
    block = (4 + 2 * config.mlp) * config.width**2 + 2 * config.width  # 4 attention matrices, 2 of the MLP, 2 norms
    tables = 1 if config.tied else 2
    return tables * config.vocabulary * config.width + config.depth * block + config.width


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter by path, from the configuration alone."""
    width, hidden = config.width, config.mlp * config.width
    square = (width, width)
    block = {
        "attention.query": square,
        "attention.key": square,
        "attention.value": square,
        "attention.output": square,
        "attention_norm": (width,),
        "mlp.up": (hidden, width),
        "mlp.down": (width, hidden),
        "mlp_norm": (width,),
    }
    shapes: dict[str, tuple[int, ...]] = {"embedding": (config.vocabulary, width)}
    shapes |= {f"blocks.{number}.{path}": shape for number in range(config.depth) for path, shape in block.items()}
    shapes |= {"norm": (width,)} | ({} if config.tied else {"head": (config.vocabulary, width)})
    return {f"{path}.weight": shape for path, shape in shapes.items()}


class Attention(nn.Module):
    """Causal multi-head self-attention, (B, T, width) -> (B, T, width)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.scale = (config.width // config.heads) ** -0.5
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(config.width, config.width, bias=False)
        self.value = nn.Linear(config.width, config.width, bias=False)
        self.output = nn.Linear(config.width, config.width, bias=False)
        self.rope = nn.RoPE(config.width // config.heads)

    def __call__(self, x: mx.array) -> mx.array:
        query, key, value = (
            layer(x).reshape(*x.shape[:2], self.heads, -1).transpose(0, 2, 1, 3)  # (B, heads, T, head size)
            for layer in (self.query, self.key, self.value)
        )
        # Looked up on mx.fast at each call, so that a deterministic attention can be put in its place.
        mixed = mx.fast.scaled_dot_product_attention(
            self.rope(query), self.rope(key), value, scale=self.scale, mask="causal"
        )
        return self.output(mixed.transpose(0, 2, 1, 3).reshape(x.shape))


class MLP(nn.Module):
    """Position-wise network with exact (erf) GELU, (B, T, width) -> (B, T, width)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, config.mlp * config.width, bias=False)
        self.down = nn.Linear(config.mlp * config.width, config.width, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down(nn.gelu(self.up(x)))


class Block(nn.Module):
    """Attention, then MLP, each normed at its input and added to the stream, (B, T, width) -> (B, T, width)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.width)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def __call__(self, x: mx.array) -> mx.array:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class Transformer(nn.Module):
    """The whole model. Use `build_model`: constructed directly, it holds MLX's default random weights.

    At `dropout=0`, and in evaluation mode, a forward pass draws no random numbers: `nn.Dropout` is then the identity.
    Otherwise masks come from MLX's global random state, which is part of what a checkpoint keeps.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = [Block(config) for _ in range(config.depth)]
        self.norm = nn.RMSNorm(config.width)
        if not config.tied:
            self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def __call__(self, tokens: mx.array) -> mx.array:
        """tokens: (B, T) integers below `vocabulary` (MLX does not check the range), T <= ctx. Returns the logits
        (B, T, vocabulary) in the model's dtype. Raises ExperimentError for another shape."""
        if tokens.ndim != 2 or tokens.shape[1] > self.config.ctx:
            raise ExperimentError(
                f"the model got tokens of shape {tuple(tokens.shape)}; "
                f"expected (batch, length) with a length of at most model.ctx = {self.config.ctx}"
            )
        x = self.dropout(self.embedding(tokens))
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.embedding.as_linear(x) if self.config.tied else self.head(x)


def build_model(config: ModelConfig, seed: int, initial: bool = True) -> Transformer:
    """A model in training mode with the initial weights of `seed`, evaluated, in `config.dtype` and row-major.

    The global random state is left as it was found.

    Args:
        initial: False: its weights are of no account, since those of a state will be put in their place: none is drawn.

    Raises:
        ExperimentError: as `init_weights`.
    """
    state: Any = mx.random.state
    high, low = state[0].tolist()
    model = Transformer(config)
    mx.random.seed((high << 32) | low)  # MLX's layers draw default weights; those draws must not shift a run's
    if not initial:  # MLX's layers have lazy ones: nothing is computed
        model.apply(lambda weight: weight.astype(getattr(mx, config.dtype)))
        return model
    init_weights(model, seed)
    dtype = getattr(mx, config.dtype)
    # Row-major, as a restored checkpoint is: matmul kernels may depend on the strides, and results with them.
    model.apply(lambda weight: mx.contiguous(weight.astype(dtype)))
    mx.eval(model.parameters())
    return model


def init_weights(model: Transformer, seed: int) -> None:
    """Overwrite every parameter in float32: norms with 1, matrices with normal draws of standard deviation 0.02, the
    two projections of a block that add to the residual stream with 0.02 / √(2·depth) (there are 2·depth of them).

    That is GPT-2's initialisation: Radford et al. 2019, section 2.3, scales "the weights of residual layers" by 1/√N
    for N residual layers; 0.02 is from its code. A parameter depends on `seed` and on its own path and shape only.

    Raises:
        ExperimentError: `seed` is not a whole number from 0 to 2^64 - 1.
    """
    if type(seed) is not int or not 0 <= seed < 2**64:
        raise ExperimentError(f"the seed is {seed!r}; expected a whole number from 0 to 2^64 - 1")
    residual_std = INIT_STD / math.sqrt(2 * model.config.depth)
    leaves: Any = tree_flatten(model.parameters())
    weights = []
    for path, old in leaves:
        if old.ndim == 1:
            weight = mx.ones(old.shape)
        else:
            std = residual_std if path.endswith(("attention.output.weight", "mlp.down.weight")) else INIT_STD
            weight = mx.array(_normal(seed, path, old.shape, std))
        weights.append((path, weight))
    model.update(tree_unflatten(weights))


def _normal(seed: int, path: str, shape: tuple[int, ...], std: float) -> np.ndarray:
    """Draws that are normal to the eye and the same bits everywhere: float32, mean 0, at most 6·std in size.

    Each is the centred sum of twelve uniform 16-bit integers, whose variance is 2^32 - 1 (the Irwin-Hall
    approximation, excess kurtosis -0.1), from numpy's Philox, a bit generator whose integer stream is guaranteed to
    stay. Only integer sums, one product and one rounding to float32 are involved. The usual ways are not portable:
    `mx.random.normal` differs between CPU and CUDA and between Apple GPUs, numpy's normal may change with its version,
    and Box-Muller inherits the last bits of the platform's logarithm and cosine.
    """
    stream = int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "big")
    generator = np.random.Philox(key=(stream << 64) | seed)
    size = math.prod(shape)
    sums = np.zeros(size, np.uint64)  # two sums of six numbers each, one in either half: they can't run over
    for _ in range(3):  # three 64-bit words a draw, one at a time to hold the memory down
        words = generator.random_raw(size)
        for part in _stretches(size):
            sums[part] += words[part] & _EVERY_OTHER
            sums[part] += (words[part] >> np.uint64(16)) & _EVERY_OTHER
    del words
    draws = np.empty(size, np.float32)
    for part in _stretches(size):
        total = (sums[part] >> np.uint64(32)) + (sums[part] & np.uint64(0xFFFF_FFFF))
        centred = total.view(np.int64) - 12 * 0xFFFF // 2
        draws[part] = centred * (std / math.sqrt(2**32 - 1))
    return draws.reshape(shape)


_EVERY_OTHER = np.uint64(0x0000_FFFF_0000_FFFF)


def _stretches(size: int, length: int = 1 << 16) -> list[slice]:
    """Parts whose temporaries stay in a core's cache."""
    return [slice(start, start + length) for start in range(0, size, length)]


def token_losses(model: Transformer, inputs: mx.array, targets: mx.array) -> mx.array:
    """Cross entropy of each target in nats, (B, T) float32, of `inputs` and `targets`, (B, T) integers.

    The logits are cast to float32 first: log-sum-exp in bfloat16 would keep 8 bits of the loss.
    """
    return nn.losses.cross_entropy(model(inputs).astype(mx.float32), targets, reduction="none")


def loss(model: Transformer, inputs: mx.array, targets: mx.array) -> tuple[mx.array, dict[str, mx.array]]:
    """The mean of `token_losses`, a float32 scalar, and `{"token_loss": (B, T)}` as auxiliary output.

    The shape that `nn.value_and_grad` wants: only the first item is differentiated.
    """
    per_token = token_losses(model, inputs, targets)
    return mx.mean(per_token), {"token_loss": per_token}


def masked_loss(model: Transformer, inputs: mx.array, targets: mx.array) -> tuple[mx.array, dict[str, mx.array]]:
    """`loss`, the mean of those tokens only whose target is not `IGNORED` (-1); the others have a `token_loss` of 0.

    Where no target counts, the mean is 0/0: NaN, and with it every gradient, as in the trainers that people use. A
    function of its own, since a mean over a count that is known only at run time has other bits than `loss`.
    """
    counted = targets != IGNORED
    per_token = mx.where(counted, token_losses(model, inputs, mx.maximum(targets, 0)), 0.0)
    return mx.sum(per_token) / mx.sum(counted), {"token_loss": per_token}


def generate(model: Transformer, tokens: list[int], count: int, *, temperature: float, key: mx.array) -> list[int]:
    """Sample `count` tokens after `tokens` and return the new ones; the model sees the last `ctx` tokens each time.

    Uncompiled and without a cache: simple, and fine for the few hundred tokens that show what a model has learnt.
    The global random state and each module's training flag are left as they were.

    Args:
        temperature: divides the logits (in float32); 0 takes the most likely token and uses no randomness.
        key: from `mx.random.key`; the same key, model and tokens give the same sample.

    Raises:
        ExperimentError: no tokens, a token outside the vocabulary, or a negative or non-finite count or temperature.
    """
    vocabulary = model.config.vocabulary
    if not tokens:
        raise ExperimentError("there is nothing to continue; expected at least one token")
    for token in tokens:
        if not 0 <= token < vocabulary:
            raise ExperimentError(f"token {token} is outside the model's vocabulary; expected 0 to {vocabulary - 1}")
    if count < 0:
        raise ExperimentError(f"the count is {count}; expected the number of tokens to sample, 0 or more")
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ExperimentError(f"the temperature is {temperature!r}; expected a finite number of at least 0")
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        sequence = list(tokens)
        for _ in range(count):
            logits = model(mx.array([sequence[-model.config.ctx :]]))[0, -1].astype(mx.float32)
            if temperature == 0:
                choice = mx.argmax(logits)
            else:
                key, draw = mx.random.split(key)
                choice = mx.random.categorical(logits / temperature, key=draw)
            sequence.append(int(choice))
    finally:
        for module, training in modes:  # parents come first, so that a child's own flag has the last word
            module.train(training)
    return sequence[len(tokens) :]
