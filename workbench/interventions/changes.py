"""A change: the one thing in which an intervention, or a fork, differs from the run. Text in, a typed value out.

Knows words and numbers; nothing of MLX, steps or runs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import ExperimentError


@dataclass(frozen=True)
class Times:
    """A factor on what the run had, as in `lr=0.5x`."""

    factor: float

    def __str__(self) -> str:
        return f"{self.factor!r}x"


@dataclass(frozen=True)
class Change:
    """One change, parsed.

    Attributes:
        name: one of `NAMES`.
        value: float (`clip`, `beta2`, `eps`, an absolute `lr`); `Times` (a relative `lr`); None (`clip=off`); int
            (`drop-row`, `batch`, `rng`, `state`); bool (`deterministic`, `compile`); a tuple of "m" and "v" (`reset`);
            otherwise the word itself ("max", "float32", "skip").
    """

    name: str
    value: Any

    @property
    def lasts(self) -> bool:
        """Whether it is a setting, which holds from step N on; the others touch state or batch once."""
        return self.name in ("lr", "clip", "beta2", "eps", "dtype", "deterministic", "compile")

    def __str__(self) -> str:
        """The text that parses to this change again."""
        value = self.value
        if isinstance(value, bool):
            value = "on" if value else "off"
        elif isinstance(value, tuple):
            value = ",".join(value)
        return f"{self.name}={'off' if value is None else value}"


def parse_change(text: str) -> Change:
    """Parses one change:

        lr=0.5x         the learning rate times 0.5            lr=1e-4         another learning rate
        clip=1.0        clip the global gradient norm at 1.0   clip=off        do not clip
        beta2=0.95      Adam's beta2                           eps=1e-6        Adam's epsilon
        reset=m         Adam's m set to zero (or v, or m,v)    v=max           v <- max(v, g²)
        drop-row=3      the batch without its row 3 (from 0)   batch=4100      the batch of step 4100
        batch=skip      go on with the next step's batch       state=4150      the state of step 4150
        dtype=float32   weights, moments, activations          rng=7           the random state of seed 7
        deterministic=on, deterministic=off, compile=on, compile=off

    Raises:
        ExperimentError: the text is malformed, or names an unknown change, or its value is out of range.
    """
    name, equals, value = text.partition("=")
    if not equals or name not in _VALUES:
        what = "is unknown" if equals else "is malformed"
        raise ExperimentError(
            f"change {text!r} {what}; expected NAME=VALUE, as in lr=0.5x, with NAME one of {', '.join(NAMES)}"
        )
    if re.search(r"\+[a-z]", value):
        raise ExperimentError(
            f"change {text!r} is more than one; expected exactly one, so that an effect has one cause"
        )
    expected, read = _VALUES[name]
    try:
        return Change(name, read(value))
    except (ValueError, KeyError):
        raise ExperimentError(f"change {text!r} has the value {value!r}; expected {expected}") from None


def _number(least: float, below: float = math.inf, *, zero: bool = False) -> Callable[[str], float]:
    def read(text: str) -> float:
        value = float(text)
        if not (least < value or (zero and value == least)) or not value < below or "_" in text:
            raise ValueError
        return value

    return read


def _whole(least: int, below: int = 2**62) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not (text.isascii() and text.isdecimal()) or len(text) > 20 or not least <= int(text) < below:
            raise ValueError
        return int(text)

    return read


def _rate(text: str) -> float | Times:
    positive = _number(0)
    return Times(positive(text[:-1])) if text.endswith("x") else positive(text)


def _limit(text: str) -> float | None:
    return None if text == "off" else _number(0)(text)


def _batch(text: str) -> int | str:
    return text if text == "skip" else _whole(1)(text)


def _switch(text: str) -> bool:
    return {"on": True, "off": False}[text]


def _moments(text: str) -> tuple[str, ...]:
    return {"m": ("m",), "v": ("v",), "m,v": ("m", "v"), "v,m": ("m", "v")}[text]


def _word(word: str) -> Callable[[str], str]:
    return {word: word}.__getitem__


_VALUES: dict[str, tuple[str, Callable[[str], Any]]] = {
    "lr": ("a positive factor such as 0.5x, or a positive learning rate such as 1e-4", _rate),
    "clip": ("a positive gradient norm, or off", _limit),
    "reset": ("m, v, or m,v", _moments),
    "v": ("max", _word("max")),
    "beta2": ("a number from 0 to below 1", _number(0, 1, zero=True)),
    "eps": ("a positive number", _number(0)),
    "drop-row": ("the number of a row, from 0", _whole(0)),
    "batch": ("the number of a step, from 1, or skip", _batch),
    "state": ("the number of a step, from 0", _whole(0)),
    "dtype": ("float32", _word("float32")),
    "rng": ("a seed from 0 to 2**64 - 1", _whole(0, 2**64)),
    "deterministic": ("on or off", _switch),
    "compile": ("on or off", _switch),
}
NAMES = tuple(_VALUES)
