"""Numbers as they stand in sentences, tables and on the screen: one way of writing them.

Knows floats; imports nothing of the package.
"""

from __future__ import annotations

import math
from typing import SupportsFloat


def number(value: SupportsFloat, digits: int = 4) -> str:
    """A float for people: so many digits; NaN and inf by name; 3.575e-4 below a thousandth, 1.929e26 where the digits
    end before the point."""
    value = float(value)
    if not math.isfinite(value):
        return str(value).replace("nan", "NaN")
    small = 0 < abs(value) < 1e-3
    mantissa, power, exponent = (f"{value:.{digits - 1}e}" if small else f"{value:.{digits}g}").partition("e")
    if not power:
        return mantissa
    return f"{mantissa.rstrip('0').rstrip('.') if '.' in mantissa else mantissa}e{int(exponent)}"
