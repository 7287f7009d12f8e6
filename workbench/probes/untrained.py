"""Parameters that no step trains: frozen on purpose, or by mistake. Knows paths; imports nothing of the package but how
a list is written."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from ..enumeration import some


def untrained(weights: Iterable[str], owned: Mapping[str, Collection[str]]) -> list[str]:
    """Those of a model's arrays that nothing trains, though they are parameters; none of a model with adapters.

    Args:
        weights: the paths of all arrays of the model.
        owned: layer: the paths of what is trained in it.
    """
    trained = {path for paths in owned.values() for path in paths}
    if any(_is_adapter(path) for path in trained):
        return []
    return [path for path in weights if path not in trained and _is_parameter(path)]


def sentence(paths: Collection[str], owned: Mapping[str, Collection[str]]) -> str:
    trained = sum(len(own) for own in owned.values())
    return f"{len(paths)} of {len(paths) + trained} parameters are not trained: {some(paths)}."


def _is_parameter(path: str) -> bool:
    """Running statistics and the like are none that someone froze."""
    return path.rpartition(".")[2] in ("weight", "bias")


def _is_adapter(path: str) -> bool:
    """A low-rank adapter (LoRA, Hu et al. 2021, arXiv:2106.09685), as mlx-lm names its parameters: with these, not to
    train the others is what is wanted."""
    return path.rpartition(".")[2] in ("lora_a", "lora_b")
