"""The built-in trainer's GPT in PyTorch: the same layers, initial weights and batches, to be measured beside it.

A problem is a JSON file that `workbench bench suite` writes: the model's shape, AdamW's settings, the number of compute
threads, and where the initial weights (.safetensors) and some batches (.npz, `x` and `y` of shape (count, batch, ctx))
are.
"""

import json
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn


class Attention(nn.Module):
    def __init__(self, width, heads, ctx):
        super().__init__()
        self.heads = heads
        for name in ("query", "key", "value", "projection"):
            setattr(self, name, nn.Linear(width, width, bias=False))
        half = width // heads // 2
        angles = torch.arange(ctx)[:, None] * 10000.0 ** (-torch.arange(half) / half)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def turned(self, x):
        """Rotary positions: the first half of a head's components with the second (arXiv:2104.09864)."""
        first, second = x.chunk(2, dim=-1)
        cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
        return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)

    def forward(self, x):
        query, key, value = (
            layer(x).view(*x.shape[:2], self.heads, -1).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(self.turned(query), self.turned(key), value, is_causal=True)
        return self.projection(mixed.transpose(1, 2).reshape(x.shape))


class MLP(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, shape):
        super().__init__()
        width = shape["width"]
        self.attention_norm = nn.RMSNorm(width, eps=1e-5)
        self.attention = Attention(width, shape["heads"], shape["ctx"])
        self.mlp_norm = nn.RMSNorm(width, eps=1e-5)
        self.mlp = MLP(width, shape["mlp"] * width)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.embedding = nn.Embedding(shape["vocabulary"], shape["width"])
        self.blocks = nn.ModuleList([Block(shape) for _ in range(shape["depth"])])
        self.norm = nn.RMSNorm(shape["width"], eps=1e-5)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embedding.weight)


class Training:
    """A model, its AdamW and its batches."""

    def __init__(self, problem):
        self.model = GPT(problem["model"])
        # BackPACK keeps something of its own under the name `output` in each module.
        weights = {name.replace(".output.", ".projection."): one for name, one in load_file(problem["weights"]).items()}
        self.model.load_state_dict(weights)
        adam = problem["adamw"]
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=problem["lr"],
            betas=(adam["beta1"], adam["beta2"]),
            eps=adam["eps"],
            weight_decay=adam["weight_decay"],
        )
        self.clip = problem["clip"]
        with np.load(problem["batches"]) as found:
            self.batches = list(zip(found["x"].astype(np.int64), found["y"].astype(np.int64), strict=True))
        self.number = 0

    def loss(self):
        x, y = (torch.from_numpy(part) for part in self.batches[self.number % len(self.batches)])
        return F.cross_entropy(self.model(x).flatten(0, 1), y.flatten())

    def backward(self):
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss()
        loss.backward()
        return loss

    def update(self):
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.number += 1

    def step(self):
        """The loop that anyone would write; returns the loss as a number, as a loop that prints it needs it."""
        loss = self.backward()
        self.update()
        return loss.item()


def read_problem(path):
    problem = json.loads(Path(path).read_text())
    torch.set_num_threads(problem["threads"])
    return problem
