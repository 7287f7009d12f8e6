"""Windows of a tiny corpus: what the tests of the trainer's data share."""

import numpy as np

from workbench.trainer.data import WindowSampler

CTX, BATCH = 8, 3
LENGTH = 100  # (100 - 8) // 8 = 11 windows an epoch: no multiple of 3, so batches straddle epochs
WINDOWS = 11


def sampler(corpus, **changed):
    return WindowSampler([corpus], **({"batch": BATCH, "ctx": CTX, "seed": 42} | changed))


def equal(a, b):
    return len(a) == len(b) and all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in zip(a, b, strict=True))
