"""Seeing what each layer returns, without touching parameter paths, classes or bits.

`ModuleCalls` patches `type(module).__call__` while it is open and dispatches on the instance (Python looks special
methods up on the type), one thread at a time. `Capture` keeps what passes: outputs land in `activations` as ordinary
arrays of the trace being built; nothing is computed here.
Knows `nn.Module`; nothing of steps, losses or norms.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

Around = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

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


class ModuleCalls:
    """Within a `with`, the calls that this thread makes of the given modules pass through `around`.

    Args:
        paths: path of each module, by its id.
        classes: the modules' classes, to be patched.
        around: called as `around(path, perform, args, kwargs)` in place of the call; `perform(*args, **kwargs)` is the
            call itself, and what `around` returns is its result.

    Attributes:
        stack: paths of the calls that are being performed, the outermost first.
    """

    def __init__(self, paths: Mapping[int, str], classes: Iterable[Any], around: Around) -> None:
        self._paths, self._around = paths, around
        # A class without the method (its parameters are used directly) has no output: `cls.__call__` is `type`'s.
        self._classes = [cls for cls in classes if any("__call__" in base.__dict__ for base in cls.__mro__)]
        self.stack: list[str] = []

    @classmethod
    def of_all(cls, model: nn.Module, around: Around) -> ModuleCalls:
        """The calls of every module of a model. One that stands in several places has the path of the first."""
        modules = model.named_modules()
        return cls({id(module): path for path, module in reversed(modules)}, {type(m) for _, m in modules}, around)

    @property
    def path(self) -> str:
        """Of the module whose call is being performed; "" outside of all calls."""
        return self.stack[-1] if self.stack else ""

    def __enter__(self) -> ModuleCalls:
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
            # A subclass may call this method by `super()`: that is a part of its call, not a call of its own.
            own = type(module) is cls and threading.get_ident() == self._thread
            path = self._paths.get(id(module)) if own else None
            if path is None:
                return original(module, *args, **kwargs)
            self.stack.append(path)
            try:
                return self._around(path, partial(original, module), args, kwargs)
            finally:
                self.stack.pop()

        return call


@contextmanager
def function_calls(owner: Any, name: str, around: Callable[..., Any]) -> Iterator[None]:
    """While open, this thread's calls of the function `owner.name` pass through `around(perform, *args, **kwargs)`.

    To be opened within a `ModuleCalls`, which keeps other threads from replacing the same function meanwhile.
    """
    perform, thread = getattr(owner, name), threading.get_ident()

    def function(*args: Any, **kwargs: Any) -> Any:
        own = threading.get_ident() == thread
        return around(perform, *args, **kwargs) if own else perform(*args, **kwargs)

    setattr(owner, name, function)
    try:
        yield
    finally:
        setattr(owner, name, perform)


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
        self._classes = dict.fromkeys(type(modules[path]) for path in layers)
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
        self._watch = ModuleCalls(self._paths, self._classes, self._around)
        self._watch.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watch.__exit__(kind, error, trace)
        del self._watch  # it knows this object: a circle would keep all activations until Python looks for circles

    def _around(self, path: str, perform: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return self._keep(path, perform(*args, **kwargs))

    def _keep(self, path: str, output: Any) -> Any:
        """Keeps the output, or the first floating-point array of a tuple (what a layer passes on)."""
        if isinstance(output, (tuple, list)):
            first = next((i for i, item in enumerate(output) if is_floating(item)), None)
            if first is None:
                return output
            items = list(output)
            items[first] = self._keep(path, items[first])
            return getattr(output, "_make", type(output))(items)  # a namedtuple takes its items one by one
        if not is_floating(output):
            return output
        calls = self._calls.get(path, 0)
        self._calls[path] = calls + 1
        key = path if calls == 0 else f"{path}#{calls}"
        if self._gradients:
            output = gradient_tap(output, lambda cotangent: self.activation_gradients.__setitem__(key, cotangent))
        self.activations[key] = output
        return output


def is_floating(value: Any) -> bool:
    return isinstance(value, mx.array) and mx.issubdtype(value.dtype, mx.floating)


def gradient_tap(array: mx.array, keep: Callable[[mx.array], object]) -> mx.array:
    """The array itself; its gradient is passed to `keep` when the backward pass is traced."""

    @mx.custom_function
    def identity(x: mx.array) -> mx.array:
        return x

    @identity.vjp
    def backward(primal: mx.array, cotangent: mx.array, output: mx.array) -> mx.array:
        keep(cotangent)
        return cotangent

    return cast(mx.array, identity(array))
