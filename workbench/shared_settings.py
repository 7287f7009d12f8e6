"""Settings that a whole process shares, and a step may change: numpy's error handling, the locale, a decimal context.

Knows the modules that hold them; nothing of experiments.
"""

from __future__ import annotations

import decimal
import gc
import locale
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

_DECIMAL = ("prec", "rounding", "Emin", "Emax", "capitals", "clamp")
_MODULES = ("sys", "mlx.core", "mlx.nn", "mlx.optimizers")  # whose attributes one's own code may set


def _decimal() -> dict[str, Any]:
    context = decimal.getcontext()
    return {name: getattr(context, name) for name in _DECIMAL} | {"traps": dict(context.traps)}


def _set_decimal(then: dict[str, Any]) -> None:
    context = decimal.getcontext()
    for name in _DECIMAL:
        setattr(context, name, then[name])
    context.traps.update(then["traps"])


_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "numpy's error handling (np.seterr)": (np.geterr, lambda then: np.seterr(**then)),
    "the thresholds of gc": (gc.get_threshold, lambda then: gc.set_threshold(*then)),
    "the locale": (lambda: locale.setlocale(locale.LC_ALL), lambda then: locale.setlocale(locale.LC_ALL, then)),
    "the switch interval of sys": (  # kept in whole microseconds, cut off
        sys.getswitchinterval,
        lambda then: sys.setswitchinterval(then + 5e-7),
    ),
    "the recursion limit of sys": (sys.getrecursionlimit, sys.setrecursionlimit),
    "the context of decimal": (_decimal, _set_decimal),
}


class ProcessSettings:
    """The settings at one moment."""

    def __init__(self) -> None:
        self._then = {name: read() for name, (read, _) in _SETTINGS.items()}
        self._filters = list(warnings.filters)
        self._attributes = {name: dict(vars(sys.modules[name])) for name in _MODULES if name in sys.modules}

    def moved(self) -> list[str]:
        """Those that are others now, by name; without filters of warnings, and attributes of modules, which an import
        may set."""
        return [name for name, (read, _) in _SETTINGS.items() if read() != self._then[name]]

    def put_back(self) -> None:
        """Gives each the value that it had."""
        for name in self.moved():
            _SETTINGS[name][1](self._then[name])
        if list(warnings.filters) != self._filters:
            warnings.filters[:] = self._filters  # type: ignore[index]
        for name, then in self._attributes.items():
            now = vars(sys.modules[name])
            for key in [key for key in now if key not in then]:
                del now[key]
            now.update({key: value for key, value in then.items() if now.get(key, now) is not value})
