"""The order of an epoch: a pseudorandom permutation, evaluated at any index in constant time.

The order is a Feistel network on the smallest even number of bits that holds all indices; results
outside the domain are fed through again until they fall inside ("cycle walking", J. Black and P. Rogaway, "Ciphers
with Arbitrary Finite Domains", CT-RSA 2002). A bijection whatever the round function, with no table and no loop over
the epoch: on average at most four passes. The round function is the finaliser of splitmix64 (G. Steele, D. Lea and
C. Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014). Wrapping 64-bit integer arithmetic only, so
that every platform and numpy version gives the same order; numpy.random promises that for no method such as
`permutation`.
"""

import numpy as np

_GOLDEN = 0x9E3779B97F4A7C15  # splitmix64's increment: 2**64 / golden ratio, odd
_ROUNDS = np.array([(r * _GOLDEN) % 2**64 for r in range(1, 9)], np.uint64)  # eight rounds, one constant each


def mix(x: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser, elementwise on uint64 arrays (not scalars: numpy warns when those wrap)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def epoch_keys(epoch: np.ndarray, seed: int) -> np.ndarray:
    """One uint64 key an epoch: the splitmix64 sequence that starts at the mixed seed."""
    start = mix(np.array([seed], np.uint64))
    return mix(start + (epoch + np.uint64(1)) * np.uint64(_GOLDEN))


def _feistel(x: np.ndarray, keys: np.ndarray, half: int) -> np.ndarray:
    """A bijection of 0 .. 4**half - 1, elementwise; `keys` as long as `x`."""
    shift, mask = np.uint64(half), np.uint64(2**half - 1)
    left, right = x >> shift, x & mask
    for constant in _ROUNDS:
        left, right = right, left ^ (mix((keys + constant) ^ right) & mask)
    return (left << shift) | right


def permute(index: np.ndarray, epoch: np.ndarray, seed: int, size: int) -> np.ndarray:
    """Which of `size` windows comes at place `index` of an epoch's order.

    Args:
        index: (n,) uint64, each below `size`.
        epoch: (n,) uint64; each epoch has an order of its own.
        seed: from 0 to 2**64 - 1.
        size: from 1 to 2**62.

    Returns:
        (n,) uint64. Over all indices of one epoch each value from 0 to size - 1 comes exactly once.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = epoch_keys(epoch, seed)
    window = _feistel(index, keys, half)
    while (outside := window >= np.uint64(size)).any():
        window[outside] = _feistel(window[outside], keys[outside], half)
    return window
