"""The batch of a step as HTML: its rows by the loss that they carried, their tokens coloured by theirs.

Knows tables; nothing of widgets, files or MLX.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pandas as pd

from .markup import MONOSPACE, bar, cell, copy_button, count, escaped, four_digits, number, paragraph, small, table

SHOWN_ROWS = 32
SHOWN_TOKENS = 6000  # an element each: more make the page slow
LEVELS = 8
# One hue, by its opacity: it stands out more the higher the loss, on a light page as on a dark one and to every kind of
# colour vision, and the page's own text colour stays readable on it (at least 4.5 to 1 in both themes of JupyterLab).
_HUE, _FULL = "213,94,0", 0.6
_STYLE = "".join(
    f".wb-tokens i.l{level}{{background:rgba({_HUE},{_FULL * level / LEVELS:.3f})}}" for level in range(1, LEVELS + 1)
)
_STYLE += ".wb-tokens i{font-style:normal}.wb-tokens i.nan{outline:2px solid currentColor;outline-offset:-2px}"
_STYLE += ".wb-tokens .off{opacity:.45;text-decoration:line-through}"
_STYLE += ".wb-tokens b{font-weight:400;opacity:.9;white-space:nowrap}"
_ESCAPE = re.compile(r"\\(?:[ntr]|x[0-9a-f]{2})|⟨U\+[0-9A-F]+⟩")


class Character(NamedTuple):
    """What is shown as one: a token, or the tokens of one character.

    Attributes:
        text: never empty.
        shown: the same, but for a space that one would not see.
        loss: the mean of its tokens'; NaN where unknown.
        counted: whether the loss counts it; the first of a row, which is not predicted, is taken to be.
        broken: whether a loss that counts is not finite.
    """

    text: str
    shown: str
    loss: float = math.nan
    counted: bool = True
    broken: bool = False

    @property
    def stands_for(self) -> bool:
        """Whether it stands for something else: for what can't be seen, or is no text."""
        return self.shown != self.text or _ESCAPE.fullmatch(self.text) is not None


def batch(
    rows: pd.DataFrame, tokens: pd.DataFrame | None, vocabulary: int | None = None, *, button: bool = True
) -> str:
    """The rows, the costliest first, and their text.

    Args:
        rows: as `batch_table`.
        tokens: as `token_table`; None where the batch is not one of tokens.
        vocabulary: of the model, for the loss of an even guess; None: unknown.
        button: whether the plain text has a button that copies it, for pages that let it work.
    """
    losses, places = "loss" in rows, bool(rows["source"].notna().any())
    head = [
        "row",
        *(["share of the loss", "loss"] if losses else []),
        *(["source", "offset"] if places else []),
        "text",
    ]
    widest = rows["share"].max() if losses else 0.0
    texts = _texts(rows, tokens)
    measured = np.zeros(0) if tokens is None else tokens["loss"].to_numpy(float)
    highest = float(measured[np.isfinite(measured)].max(initial=0.0))
    lines = []
    for row in rows.head(len(texts)).itertuples():
        cells = [cell(row.row)]
        if losses:
            cells += [bar(row.share, widest, bold=row.share > 2 / len(rows)), cell(four_digits(row.loss))]
        if places:
            source = "" if pd.isna(row.source) else row.source
            offset = "" if pd.isna(row.offset) else f"{row.offset:,}"
            cells += [cell(source, left=True, wrap=len(source) > 28), cell(offset)]
        lines.append(f"<tr>{''.join(cells)}{_text_cell(texts[row.row], highest)}</tr>")
    known = tokens is not None and tokens.attrs.get("known", False)
    shown = (
        f"{len(texts)} of {len(rows)} rows; batch_table(run, step, trace) has all." if len(texts) < len(rows) else ""
    )
    return (
        f"<style>{_STYLE}</style>"
        + (_legend(highest, vocabulary) if known else "")
        + f'<div class="wb-tokens">{table(head, "".join(lines), height=36)}</div>'
        + (paragraph(shown) if shown else "")
        + small(_remark(tokens))
        + _plain_text(rows, texts, button)
    )


# ---- text


def _texts(rows: pd.DataFrame, tokens: pd.DataFrame | None) -> dict[int, list[Character]]:
    """The characters of each row that is shown, by its number: as many rows as there is room for, at least one."""
    known = tokens is not None and tokens.attrs.get("known", False)
    groups = {} if tokens is None else dict(iter(tokens.groupby("row")))
    found: dict[int, list[Character]] = {}
    room = SHOWN_TOKENS
    for row in rows.head(SHOWN_ROWS).itertuples():
        text = str(row.text)
        own = list(characters(groups[row.row], known)) if row.row in groups else [Character(text, text)]
        room -= len(own)
        if found and room < 0:
            break
        found[int(row.row)] = own
    return found


def characters(tokens: pd.DataFrame, known: bool) -> Iterator[Character]:
    """The characters of one row of a batch, in order.

    Args:
        tokens: one row's, as `token_table`.
        known: whether losses are.
    """
    texts, first = tokens["text"].tolist(), tokens["position"].to_numpy() == 0
    counted, losses = tokens["counted"].to_numpy(bool), tokens["loss"].to_numpy(float)
    places = [place for place, text in enumerate(texts) if text]
    whole = [texts[place] for place in places]
    for index, (start, end) in enumerate(zip(places, [*places[1:], len(texts)], strict=True)):
        own = losses[start:end][counted[start:end]]
        broken = known and not np.isfinite(own).all()
        yield Character(
            text=whole[index],
            shown="\N{MIDDLE DOT}" if whole[index] == " " and not _between_words(whole, index) else whole[index],
            loss=float(own.mean()) if known and len(own) and not broken else math.nan,
            counted=bool(len(own)) or bool(first[start]),
            broken=broken,
        )


def _between_words(texts: list[str], place: int) -> bool:
    near = texts[max(place - 1, 0) : place + 2]
    return len(near) == 3 and all(text not in (" ", "\\n", "\\t", "\\r") for text in (near[0], near[2]))


def _text_cell(text: list[Character], highest: float) -> str:
    # Where the page is narrow the table scrolls: a text of one word a line can't be read.
    style = f"text-align:left;white-space:pre-wrap;overflow-wrap:anywhere;max-width:none;min-width:24em;{MONOSPACE}"
    return f'<td style="{style}"><bdi>{"".join(_character(one, highest) for one in text)}</bdi></td>'


def _character(one: Character, highest: float) -> str:
    text = f"<b>{escaped(one.shown)}</b>" if one.stands_for else escaped(one.shown)
    if not one.counted:
        return f'<i class="off" title="does not count">{text}</i>'
    if one.broken:
        return f'<i class="nan" title="loss not finite">{text}</i>'
    if math.isnan(one.loss):
        return text
    return f'<i class="l{level(one.loss, highest)}" title="loss {one.loss:.3g}">{text}</i>'


def level(loss: float, highest: float) -> int:
    """From 0 for a loss of 0 or less to `LEVELS` for the highest, in equal steps of loss."""
    return min(LEVELS, max(0, math.ceil(LEVELS * loss / highest))) if highest > 0 else 0


# ---- what goes with it


def _legend(highest: float, vocabulary: int | None) -> str:
    swatches = "".join(f'<i class="l{one}">&nbsp;&nbsp;</i>' for one in range(1, LEVELS + 1))
    guess = f"; an even guess among {vocabulary:,} would cost {math.log(vocabulary):.3g}" if vocabulary else ""
    text = f"loss of each token, from 0 {{}} to {number(highest, 3)}{guess}"
    before, after = (escaped(part) for part in text.split("{}"))
    return f'<div class="wb-tokens"><small style="opacity:.9">{before}{swatches}{after}</small></div>'


def _remark(tokens: pd.DataFrame | None) -> str:
    if tokens is None or bool((tokens["counted"] | (tokens["position"] == 0)).all()):
        return ""
    rows = tokens.loc[~tokens["counted"] & (tokens["position"] > 0), "row"].unique()
    return f"Struck out: targets that the loss does not count, in {count(len(rows), 'row')}."


def _plain_text(rows: pd.DataFrame, texts: dict[int, list[Character]], button: bool) -> str:
    """The rows as text to select or copy, folded away."""
    lines = []
    for row in rows.head(len(texts)).itertuples():
        facts = [f"row {row.row}"]
        if not pd.isna(row.source):
            facts.append(f"{row.source} offset {row.offset}")
        if "loss" in rows:
            facts.append(f"loss {number(row.loss)}")
            facts += [f"share {100 * row.share:.1f} %"] if np.isfinite(row.share) else []
        lines += [", ".join(facts), "".join(one.text for one in texts[int(row.row)]), ""]
    style = f"white-space:pre-wrap;overflow-wrap:anywhere;max-height:20em;overflow:auto;margin:4px 0;{MONOSPACE}"
    text = f'<pre style="{style};color:inherit">{escaped(chr(10).join(lines).rstrip())}</pre>'
    return f"<details><summary>As plain text, to copy</summary>{text}{copy_button() if button else ''}</details>"
