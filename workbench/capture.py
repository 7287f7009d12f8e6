"""Seeing what each layer returns, without touching parameter paths, classes or bits.

`Capture` patches `type(module).__call__` while it is open and dispatches on the instance (Python looks special methods
up on the type), one thread at a time. Outputs land in `activations` as ordinary arrays of the trace being built;
nothing is computed here.
Knows `nn.Module`; nothing of steps, losses or norms.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

_PATCHING = threading.RLock()  # classes belong to all threads: restored in another order, a patch would stay for ever


def layers_of(model: nn.Module) -> dict[str, list[str]]:
    """The layers of a model: modules that directly own trainable parameters.

    Returns:
        Path of the module to the paths of its own trainable parameters, in tree order. The root module is "".
    """
    modules = {path for path, _ in model.named_modules()}
    owned: dict[str, list[str]] = {}
    for parameter in dict(tree_flatten(model.trainable_parameters())):
        path = parameter
        while path:
            path = path.rpartition(".")[0]
            if path in modules:
                break
        owned.setdefault(path, []).append(parameter)
    return owned


class Capture:
    """Within a `with`, keeps the output of every call of the given layers.

    Args:
        model: the model whose modules are watched.
        layers: paths of the modules to watch.
        gradients: also keep the gradient that reaches each output, by way of an identity whose backward pass stores it.
            MLX evaluates such an identity by sharing the buffer: no kernel, no rounding.

    Attributes:
        activations: output of each call, keyed by path; calls after the first are `path#1`, `path#2`, …
        activation_gradients: the same for gradients, filled while the backward pass is traced.
        order: paths by first call.
    """

    def __init__(self, model: nn.Module, layers: Sequence[str], *, gradients: bool = False) -> None:
        modules = dict(model.named_modules())
        self._paths = {id(modules[path]): path for path in layers}
        classes = dict.fromkeys(type(modules[path]) for path in layers)
        # A class without the method (its parameters are used directly) has no output: `cls.__call__` is `type`'s.
        self._classes = [cls for cls in classes if any("__call__" in base.__dict__ for base in cls.__mro__)]
        self._gradients = gradients
        self._calls: dict[str, int] = {}
        self.activations: dict[str, mx.array] = {}
        self.activation_gradients: dict[str, mx.array] = {}

    @property
    def order(self) -> list[str]:
        return list(self._calls)

    def last(self, found: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """Of `activations` or `activation_gradients`, the entry of each layer's last call, keyed by plain path."""
        keys = {path: path if calls == 1 else f"{path}#{calls - 1}" for path, calls in self._calls.items()}
        return {path: found[key] for path, key in keys.items() if key in found}

    def __enter__(self) -> Capture:
        _PATCHING.acquire()
        self._thread = threading.get_ident()  # another thread may call the same model meanwhile
        self._saved = [(cls, cls.__dict__.get("__call__")) for cls in self._classes]
        # Resolved before any class is patched: a subclass may inherit the method of a class patched just before it.
        originals = [(cls, cls.__call__) for cls in self._classes]
        for cls, original in originals:
            cls.__call__ = self._watched(cls, original)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for cls, own in self._saved:
            if own is None:
                del cls.__call__
            else:
                cls.__call__ = own
        _PATCHING.release()

    def _watched(self, cls: type, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            output = original(module, *args, **kwargs)
            # A subclass may call this method by `super()`: that is a part of its call, not a call of its own.
            own = type(module) is cls and threading.get_ident() == self._thread
            path = self._paths.get(id(module)) if own else None
            return output if path is None else self._keep(path, output)

        return call

    def _keep(self, path: str, output: Any) -> Any:
        """Keeps the output, or the first floating-point array of a tuple (what a layer passes on)."""
        if isinstance(output, (tuple, list)):
            first = next((i for i, item in enumerate(output) if _is_floating(item)), None)
            if first is None:
                return output
            items = list(output)
            items[first] = self._keep(path, items[first])
            return getattr(output, "_make", type(output))(items)  # a namedtuple takes its items one by one
        if not _is_floating(output):
            return output
        calls = self._calls.get(path, 0)
        self._calls[path] = calls + 1
        key = path if calls == 0 else f"{path}#{calls}"
        if self._gradients:
            output = _gradient_tap(self.activation_gradients, key)(output)
        self.activations[key] = output
        return output


def _is_floating(value: Any) -> bool:
    return isinstance(value, mx.array) and mx.issubdtype(value.dtype, mx.floating)


def _gradient_tap(sink: dict[str, mx.array], key: str) -> Callable[[mx.array], Any]:
    @mx.custom_function
    def identity(x: mx.array) -> mx.array:
        return x

    @identity.vjp
    def keep(primal: mx.array, cotangent: mx.array, output: mx.array) -> mx.array:
        sink[key] = cotangent
        return cotangent

    return identity
