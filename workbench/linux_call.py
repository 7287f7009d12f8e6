"""A function of the C library that only Linux has."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from typing import Any


@functools.cache
def linux_call(name: str, *types: Any) -> Callable[..., int] | None:
    """The function, which returns an int; None where the system or its C library has none.

    Args:
        types: of its arguments, from `ctypes`.
    """
    if not sys.platform.startswith("linux"):
        return None
    try:
        call = getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError):
        return None
    call.argtypes = types
    return call
