"""Standard output, as the commands write it: tables on a page of known width, and JSON."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import msgspec

from ..printed import echo_json, terminal

if TYPE_CHECKING:
    import pandas as pd


def page(width: int) -> Any:
    """A console as wide as the terminal; where the output goes elsewhere, of this many columns."""
    return terminal(highlight=False, width=None if sys.stdout.isatty() else width)


def print_json(value: Any) -> None:
    """Prints what msgspec can encode, indented: numbers by the fewest digits that read back the same, and null for
    those that are not finite."""
    echo_json(msgspec.json.format(msgspec.json.encode(value)))


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a table as `print_json` takes them; a missing value of any kind is None."""
    return frame.astype(object).where(frame.notna(), None).to_dict("records")
