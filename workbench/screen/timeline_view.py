"""The timeline of a run as HTML: a picture that is drawn once, and a cursor on it."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING

from .. import figures
from .markup import escaped

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Timeline:
    """The drawn timeline of a run, on which a cursor can be set without drawing it again."""

    def __init__(self, figure: Figure, alt: str) -> None:
        width, height = figure.canvas.get_width_height()
        upper, lower = figure.axes[0], figure.axes[-1]
        left, right = (upper.transData.transform((step, 1.0))[0] / width for step in (0, 1))
        self._left, self._each = left, right - left  # where step 0 is, and the width of a step, in widths of the figure
        self._top, self._bottom = 1 - upper.get_position().y1, 1 - lower.get_position().y0
        figure.set_dpi(figures.SHARP)
        source = base64.b64encode(figures.png(figure)).decode("ascii")
        self._image = (
            f'<img alt="{escaped(alt)}" width="{width}" height="{height}" decoding="sync" '
            f'style="max-width:100%;height:auto;display:block" src="data:image/png;base64,{source}">'
        )

    def at(self, step: int | None) -> str:
        """The picture, with a dashed line at the step and its number where the line meets the axis."""
        cursor = ""
        if step is not None:
            left = f"left:{100 * (self._left + self._each * step):.3f}%"
            line = f"position:absolute;{left};top:{100 * self._top:.2f}%;height:{100 * (self._bottom - self._top):.2f}%"
            chip = (
                f"position:absolute;{left};top:{100 * self._bottom:.2f}%;transform:translateX(-50%);background:#222222"
            )
            chip += ";color:white;border-radius:3px;padding:0 5px;font-size:12px;line-height:17px;white-space:nowrap"
            cursor = f'<div style="{line};border-left:1.5px dashed #222222"></div><div style="{chip}">{step:,}</div>'
        return f'<div style="position:relative;display:inline-block;max-width:100%">{self._image}{cursor}</div>'
