"""State of a training job outside model and optimizer: a moving average of the weights, a loss scale, a counter.

Each has a name and is one of three things: a tree (dict or list) of MLX arrays, which the step changes in place; a
module, likewise; or an object with `state_dict()` and `load_state_dict(state)`, whose state is arrays and JSON values,
for steps that are not compiled. Their arrays are kept beside the optimizer's, under "path@name" (no attribute has an @
in it), so they are checkpointed, fingerprinted in the lane `other`, and restored like them. Those of objects, under
"path@@name", need not stay as many.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import msgspec
import numpy as np
from mlx.utils import tree_flatten

from .errors import CheckpointError, ExperimentError
from .plain_json import plain_json
from .trees import put_arrays, state_arrays

_JSON = "json"  # path of what is no array in an object's state: the bytes of its JSON
_ARRAY = "\0array"  # key that stands in the JSON for an array, with its path


def check(extra: Mapping[str, Any], compiled: bool) -> None:
    """
    Raises:
        ExperimentError: something in `extra` can't be saved and restored.
    """
    for name, value in extra.items():
        if not isinstance(name, str) or not name or set(name) & set("@."):
            raise ExperimentError(f"extra has the name {name!r}; expected text without '.' and '@'")
        if _is_tree(value):
            leaves: dict[str, Any] = dict(tree_flatten(value))
            for path, leaf in leaves.items():
                if not isinstance(leaf, mx.array) and not isinstance(value, nn.Module):
                    raise ExperimentError(
                        f"extra {name!r} holds {path} as {type(leaf).__name__}; expected an MLX array, for a step can "
                        "change nothing else in place"
                    )
        elif not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
            raise ExperimentError(
                f"extra {name!r} is of type {type(value).__name__}; expected a dict or list of MLX arrays, such as "
                f"{{{name!r}: {{'value': mx.zeros(50)}}}}, a module, or an object with state_dict() and "
                "load_state_dict(state)"
            )
        elif compiled:
            raise ExperimentError(
                f"extra {name!r} is of type {type(value).__name__}, and a compiled step reads Python values once; keep "
                "its state in a dict of MLX arrays, or record with compile=False"
            )


def trees(extra: Mapping[str, Any]) -> list[Any]:
    """The trees and modules: what a compiled step captures."""
    return [value for value in extra.values() if _is_tree(value)]


def owns(path: str) -> bool:
    """Whether `arrays` would give something under this path."""
    return "@" in path


def of_object(path: str) -> bool:
    """Whether it belongs to the state of an object, whose arrays may be others after a step, and others in number."""
    return "@@" in path


def arrays(extra: Mapping[str, Any]) -> dict[str, mx.array]:
    """Every array of every extra state, by path."""
    return {
        f"{path}{_mark(value)}{name}": array for name, value in extra.items() for path, array in _arrays(name, value)
    }


def _mark(value: Any) -> str:
    return "@" if _is_tree(value) else "@@"


def put(extra: Mapping[str, Any], values: Mapping[str, mx.array]) -> None:
    """Puts arrays back where `arrays` found them."""
    for name, value in extra.items():
        end = f"{_mark(value)}{name}"
        own = {path.removesuffix(end): array for path, array in values.items() if path.endswith(end)}
        if _is_tree(value):
            put_arrays(value, own)
        else:
            value.load_state_dict(_filled(_decoded(name, own), own))


def _is_tree(value: Any) -> bool:
    return isinstance(value, (nn.Module, dict, list))


def _arrays(name: str, value: Any) -> Iterator[tuple[str, mx.array]]:
    if _is_tree(value):
        yield from state_arrays(value).items()
        return
    found: dict[str, mx.array] = {}
    skeleton = plain_json(_emptied(value.state_dict(), "", found), f"the state of extra {name!r}", "state_dict()")
    found[_JSON] = mx.array(np.frombuffer(msgspec.json.encode(skeleton), np.uint8))
    yield from sorted(found.items())


def _emptied(value: Any, path: str, found: dict[str, mx.array]) -> Any:
    """The value with a mark in place of each array, which goes into `found`."""
    if isinstance(value, mx.array):
        found[f"array{path}"] = value
        return {_ARRAY: f"array{path}"}
    if isinstance(value, dict):
        return {key: _emptied(item, f"{path}.{key}", found) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_emptied(item, f"{path}.{number}", found) for number, item in enumerate(value)]
    return value


def _decoded(name: str, own: Mapping[str, mx.array]) -> Any:
    try:
        return msgspec.json.decode(np.asarray(own[_JSON]).tobytes())
    except (KeyError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"the checkpoint's state of extra {name!r} can't be decoded: {error}") from error


def _filled(value: Any, own: Mapping[str, mx.array]) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_ARRAY}:
            return own[value[_ARRAY]]
        return {key: _filled(item, own) for key, item in value.items()}
    return [_filled(item, own) for item in value] if isinstance(value, list) else value
