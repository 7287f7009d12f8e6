"""The numeric environment as HTML: what recorded the run against what is here, and what the doctor found.

Pure functions from records to text; they know nothing of widgets, files or MLX.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from ..surroundings import compared
from .markup import DIFFERS, alike, cell, count, heading, paragraph, small, table

if TYPE_CHECKING:
    from ..examination.diagnosis import Report


def environment(recorded: Mapping[str, Any], here: Mapping[str, Any] | None, segments: Sequence[int] = ()) -> str:
    """The table, the differences first.

    Args:
        recorded: of the run.
        here: of this machine; None: not known yet.
        segments: where the run has several, those whose environment this is.
    """
    where = f" (segments {', '.join(map(str, segments))})" if segments else ""
    title = heading(f"What can move a bit: recorded{where}, and here")
    if here is None:
        return title + paragraph("This machine is not known yet.") + recorded_only(recorded)
    frame = compared(recorded, here)
    unlike = int((~frame["same"]).sum())
    said = "This machine computes as the one that recorded the run: everything known to move a bit is the same."
    if unlike:
        named = ", ".join(frame.loc[~frame["same"], "item"])
        said = f"{count(unlike, 'difference')}: {named}. A replay here is refused unless you ask for it anyway."
    style = f"<style>{DIFFERS}</style>"
    return style + title + paragraph(said) + table(["item", "recorded", "here", "alike"], _rows(frame), 34)


def recorded_only(recorded: Mapping[str, Any]) -> str:
    """The table without this machine."""
    frame = compared(recorded, {})
    lines = [cell(row.item, left=True) + cell(row.recorded, left=True, wrap=True) for row in frame.itertuples()]
    return table(["item", "recorded"], "".join(f"<tr>{line}</tr>" for line in lines), 34)


def _rows(frame: pd.DataFrame) -> str:
    return "".join(
        f"<tr>{cell(row.item, left=True)}{cell(row.recorded, left=True, wrap=True)}"
        f"{cell(row.here, left=True, wrap=True)}{alike(row.same)}</tr>"
        for row in frame.itertuples()
    )


def examination(report: Report | None, when: str = "") -> str:
    """What the doctor found."""
    title = heading("Does this machine give the same bits twice?")
    if report is None:
        text = (
            "“Examine the step” repeats this run's own first step, here and in fresh processes, and counts the "
            "results. “Examine the machine” does so with every operation of a training step: about half a minute."
        )
        return title + paragraph(text)
    what = "the machine" if report.run is None else f"a step of {report.run}"
    took = small(f"Of {what}, {report.seconds:.0f} s.{when}")
    body = report._repr_html_()
    left = "<style>.wb-report table{margin-left:0}</style>"
    return f'{title}{left}<div class="jp-RenderedHTMLCommon wb-report">{body}</div>{took}'
