"""What an optimizer's `m` and `v` are, for people: telemetry and traces call them Adam's, whoever keeps them.

Knows the manifest's description of an optimizer; nothing of MLX, tables or figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_ADAM = ("Adam", "AdamW")
_MOMENTUM = ("SGD", "Muon", "Lion")  # what these keep is a running mean of gradients
_WITHOUT = {  # of MLX's optimizers (mlx 0.32.4), those that keep only the other one
    "adam_m": ("SGD", "Muon", "RMSprop", "Adagrad", "AdaDelta", "Adafactor"),
    "adam_v": ("Lion", "Adafactor"),
}


def moment_names(optimizer: Mapping[str, Any]) -> dict[str, str]:
    """Names of the kinds `adam_m` and `adam_v` where they are not Adam's, such as "v (SGD momentum)".

    Args:
        optimizer: as the manifest describes it.

    Returns:
        By kind; empty for Adam and AdamW, whose they are.
    """
    members = optimizer.get("members")
    classes = [str(one.get("class")) for one in (members if isinstance(members, list) else [optimizer])]
    if all(name in _ADAM for name in classes):
        return {}
    found = {}
    for kind, without in _WITHOUT.items():
        keeping = dict.fromkeys(name for name in classes if name not in without)
        words = ", ".join(f"{name} momentum" if name in _MOMENTUM else name for name in keeping)
        found[kind] = kind[-1] + (f" ({words})" if words else "")
    return found
