"""What all views of the panel share: text made safe for HTML, numbers for people, sentences, tables, code to copy.

Pure functions from data to text; they know nothing of widgets, files or MLX. Whatever comes from outside (names,
corpora, error messages) is escaped here. Text has the page's own colour, to be readable in a light and a dark theme.
"""

from __future__ import annotations

import html
import math
import re
import traceback
from collections.abc import Sequence
from typing import Any

import pandas as pd

from .. import number_text
from ..errors import WorkbenchError
from ..work.work_error import WorkError

LINES = "line-height:1.45;overflow-wrap:anywhere"
# Width 0 that grows to all there is: a wide table then scrolls by itself and does not widen the panel.
SCROLL = "width:0;min-width:100%;max-height:{height}em;overflow:auto;margin:2px 0"
MONOSPACE = "font-family:var(--jp-code-font-family,monospace)"


def escaped(text: Any) -> str:
    return html.escape(str(text), quote=True)


def number(value: Any, digits: int = 4) -> str:
    """As `number_text.number`; nothing where there is nothing."""
    return "" if value is None or value is pd.NA else number_text.number(value, digits)


def four_digits(value: float) -> str:
    """As `number`, but with the zeros at its end, so that a column is read down easily."""
    usual = math.isfinite(value) and 1e-3 <= abs(value) < 1e3
    return f"{value:#.4g}" if usual else number(value)


def count(amount: int, what: str) -> str:
    return f"{amount:,} {what}{'' if amount == 1 else 's'}"


# ---- sentences


def paragraph(text: str, *more: str) -> str:
    """Sentences, one a line."""
    return f'<div style="{LINES}">{"<br>".join(escaped(line) for line in (text, *more) if line)}</div>'


def small(text: str) -> str:
    return f'<div style="{LINES}"><small style="opacity:.85">{escaped(text)}</small></div>' if text else ""


# "--checkpoint STEP (checkpoint=STEP)", "factory='m' (--factory m)": the same for a terminal and for Python.
_OPTION = re.compile(r"`?--[a-z][a-z-]*(?: [^\s()`]+)?`? \(([a-z_]+=[^()]*)\)")
_OPTION_AFTER = re.compile(r"(?<=\S) \(--[a-z][a-z-]*(?: [^\s()]+)?\)")


def for_python(text: str) -> str:
    """A sentence that names options of the command line beside arguments, with the arguments alone."""
    return _OPTION_AFTER.sub("", _OPTION.sub(r"\1", text))


def heading(text: str) -> str:
    return f'<div style="font-weight:600;margin:10px 0 2px" role="heading" aria-level="4">{escaped(text)}</div>'


def alert(error: BaseException, hint: str = "", said: str = "") -> str:
    """The red box. An error that a person can act on is its sentence; of any other the details are folded away.

    Args:
        said: in place of its own words.
    """
    text, details = escaped(said or error), ""
    if not isinstance(error, WorkbenchError):
        name, trace = type(error).__name__, "".join(traceback.format_exception(error))
        if isinstance(error, WorkError):  # it was raised in another process
            name, trace = error.name, error.details
        text, trace = f"<b>{escaped(name)}</b>: {text}", escaped(trace)
        details = f'<details><summary>details</summary><pre style="white-space:pre-wrap">{trace}</pre></details>'
    more = f"<br>{escaped(hint)}" if hint else ""
    style = f"border-left:4px solid #D55E00;background:rgba(213,94,0,.13);padding:6px 10px;{LINES}"
    return f'<div role="alert" style="{style}"><b>✗</b> {text}{more}{details}</div>'


# ---- tables

# Titles of columns that hold no numbers.
LEFT = (
    *("run", "layer", "item", "verdict", "detail", "share of the loss", "source", "text", "change", "notes"),
    *("recorded", "here", "alike", "moved most|for its size"),
)
CELL = "padding:3px 6px"
# Vermilion that is dark enough for a light page, and light enough for a dark one.
DIFFERS = ".wb-differs{color:#B34700}[data-jp-theme-light=false] .wb-differs{color:#FF8A3D}"


def cell(value: Any, left: bool = False, wrap: bool = False) -> str:
    return cell_html(escaped(value), left, wrap)


def cell_html(value: str, left: bool = False, wrap: bool = False) -> str:
    """A cell of a table."""
    lines = "overflow-wrap:anywhere;max-width:none;min-width:0" if wrap else "white-space:nowrap"
    return f'<td style="text-align:{"left" if left else "right"};{lines};{CELL}">{value}</td>'


def table(head: Sequence[str], lines: str, height: int) -> str:
    """In Lab's own table style; scrolls by itself where it would be taller than `height` lines."""
    titles = "".join(
        f'<th style="text-align:{"left" if title in LEFT else "right"};{CELL}">{_title(title)}</th>' for title in head
    )
    inner = f'<table style="margin:0"><thead><tr>{titles}</tr></thead><tbody>{lines}</tbody></table>'
    return f'<div class="jp-RenderedHTMLCommon" style="{SCROLL.format(height=height)}">{inner}</div>'


def _title(title: str) -> str:
    """In one line, or in two where a bar says so."""
    return "<br>".join(escaped(part).replace(" ", "&nbsp;") for part in title.split("|"))


def bar(share: Any, widest: float, bold: bool = False) -> str:
    """A cell with a bar as long as the share, 0 to 1, of the widest one."""
    if share is pd.NA or not math.isfinite(share):
        return cell("")
    width = 100 * max(share, 0) / widest if widest > 0 else 0
    style = f"background:linear-gradient(to right,rgba(86,180,233,.5) {width:.1f}%,transparent {width:.1f}%)"
    weight = ";font-weight:700" if bold else ""
    return f'<td style="min-width:8em;text-align:left;{CELL};{style}{weight}">{100 * share:.1f} %</td>'


def alike(same: bool) -> str:
    """A cell that says whether two things are the same."""
    return cell_html("✓ same" if same else '<b class="wb-differs">≠ differs</b>', left=True)


# ---- to take away

# Selects what stands before the button and copies it: where the clipboard is denied, Ctrl+C then does.
_COPY = (
    "var r=document.createRange(),s=getSelection();r.selectNodeContents(this.previousElementSibling);"
    "s.removeAllRanges();s.addRange(r);this.textContent=document.execCommand('copy')?'Copied':'Press Ctrl+C'"
)


def copied(text: str, button: bool = True) -> str:
    """Code that one click selects, and a button that copies it."""
    code = f"user-select:all;-webkit-user-select:all;white-space:pre-wrap;overflow-wrap:anywhere;{MONOSPACE}"
    code += ";background:rgba(127,127,127,.16);border-radius:3px;padding:3px 7px;flex:0 1 auto"
    return (
        '<div style="display:flex;align-items:center;gap:8px;margin:4px 0">'
        f'<code style="{code}">{escaped(text)}</code>{copy_button() if button else ""}</div>'
    )


def code_line(text: str) -> str:
    """Python that gives the same data, folded away."""
    fold = '<summary style="cursor:pointer">Show the code</summary>'
    return f'<details class="wb-code-line" style="margin-top:8px">{fold}{copied(text)}</details>' if text else ""


def printed(text: str) -> str:
    """What slow work printed, folded away."""
    if not text.strip():
        return ""
    style = f"white-space:pre-wrap;overflow-wrap:anywhere;max-height:16em;overflow:auto;margin:4px 0;{MONOSPACE}"
    inner = f'<pre style="{style};color:inherit">{escaped(text.strip())}</pre>'
    return f"<details><summary>What the work printed</summary>{inner}</details>"


def copy_button() -> str:
    """Copies the text of the element before it."""
    style = "flex:none;font:inherit;font-size:.92em;color:inherit;background:rgba(127,127,127,.16);cursor:pointer"
    style += ";border:1px solid rgba(127,127,127,.5);border-radius:3px;padding:1px 9px"
    return f'<button type="button" class="wb-copy" style="{style}" onclick="{escaped(_COPY)}">Copy</button>'
