"""Standard output, as the commands write it: tables on a page of known width, and JSON."""

from __future__ import annotations

import sys
from typing import Any

import msgspec

from ..printed import echo_json, terminal


def page(width: int) -> Any:
    """A console as wide as the terminal; where the output goes elsewhere, of this many columns."""
    return terminal(highlight=False, width=None if sys.stdout.isatty() else width)


def print_json(value: Any) -> None:
    """Prints what msgspec can encode, indented."""
    echo_json(msgspec.json.format(msgspec.json.encode(value)))
