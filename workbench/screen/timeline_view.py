"""The timeline of a run as HTML: a picture that is drawn once, a cursor on it, and a mouse that goes to a step.

The mouse does what a person could type: it writes into the panel's fields Step and Show steps. A few lines of script in
the element's own attributes do that, so nothing has to be installed or loaded, and where scripts don't run (a saved
notebook, a report) the picture is still a picture.
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING

from .. import figures
from .markup import escaped, small

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HINT = "Click: go to that step. Drag: show these steps larger."
# `this` is the element that holds the picture; `this.wb` is where the button went down, in pixels of the page.
_DOWN = "if(!event.button){this.wb=event.clientX;event.preventDefault()}"
_MOVE = (
    "if(this.wb!=null){var b=this.getBoundingClientRect(),m=this.querySelector('.wb-mark').style,"
    "a=Math.min(this.wb,event.clientX),z=Math.max(this.wb,event.clientX);"
    "m.left=100*(a-b.left)/b.width+'%';m.width=100*(z-a)/b.width+'%';m.display=z-a>5?'block':'none'}"
)
_SET = (
    "var p=this.closest('.wb-panel'),i=p&&p.querySelector(f);"
    "if(i){i.value=v;['input','change'].forEach(function(n){i.dispatchEvent(new Event(n,{bubbles:true}))})}"
)
_UP = (
    "if(this.wb!=null){var b=this.getBoundingClientRect(),d=this.dataset,w=this.wb,c=event.clientX,"
    "at=function(x){return Math.max(d.first,Math.min(d.last,Math.round(((x-b.left)/b.width-d.left)/d.each)))},"
    "drag=Math.abs(c-w)>5,f=drag?'.wb-zoom input':'.wb-step input',"
    "v=drag?at(Math.min(w,c))+'-'+at(Math.max(w,c)):at(c);"
    "this.wb=null;this.querySelector('.wb-mark').style.display='none';" + _SET + "}"
)
_LEAVE = "this.wb=null;this.querySelector('.wb-mark').style.display='none'"


class Timeline:
    """The drawn timeline of some steps of a run, on which a cursor can be set without drawing it again.

    Args:
        first, last: the steps that it shows.
    """

    def __init__(self, figure: Figure, alt: str, first: int, last: int) -> None:
        width, height = figure.canvas.get_width_height()
        upper, lower = figure.axes[0], figure.axes[-1]
        left, right = (upper.transData.transform((step, 1.0))[0] / width for step in (0, 1))
        self._left, self._each = left, right - left  # where step 0 is, and the width of a step, in widths of the figure
        self._top, self._bottom = 1 - upper.get_position().y1, 1 - lower.get_position().y0
        self._chip = self._bottom + figures.NUMBERS_END / height
        self._first, self._last = first, last
        figure.set_dpi(figures.SHARP)
        source = base64.b64encode(figures.png(figure)).decode("ascii")
        self._image = (
            f'<img alt="{escaped(alt)}" width="{width}" height="{height}" decoding="sync" draggable="false" '
            f'style="max-width:100%;height:auto;display:block" src="data:image/png;base64,{source}">'
        )

    def at(self, step: int | None, *, live: bool = False) -> str:
        """The picture, with a dashed line at the step and its number below those of the axis.

        Args:
            step: one that it does not show has no line, and a sentence says so.
            live: with the mouse's part, for a page that is a panel.
        """
        cursor = aside = ""
        if step is not None and not self._first <= step <= self._last:
            aside = small(f"Step {step:,} is not among the steps {self._first:,} to {self._last:,} shown here.")
        elif step is not None:
            left = f"left:{100 * (self._left + self._each * step):.3f}%"
            line = f"position:absolute;{left};top:{100 * self._top:.2f}%;height:{100 * (self._bottom - self._top):.2f}%"
            chip = f"position:absolute;{left};top:{100 * self._chip:.2f}%;transform:translateX(-50%);background:#222222"
            chip += ";color:white;border-radius:3px;padding:0 5px;font-size:12px;line-height:17px;white-space:nowrap"
            cursor = f'<div style="{line};border-left:1.5px dashed #222222"></div><div style="{chip}">{step:,}</div>'
        style = "position:relative;display:inline-block;max-width:100%"
        if not live:
            return f'<div style="{style}">{self._image}{cursor}</div>{aside}'
        mark = f"position:absolute;top:{100 * self._top:.2f}%;height:{100 * (self._bottom - self._top):.2f}%"
        mark += ";display:none;pointer-events:none;background:rgba(0,114,178,.2)"
        mark = f'<div class="wb-mark" style="{mark}"></div>'
        data = {"left": f"{self._left:.8g}", "each": f"{self._each:.8g}", "first": self._first, "last": self._last}
        acts = {"down": _DOWN, "move": _MOVE, "up": _UP, "leave": _LEAVE}
        attributes = "".join(f' data-{name}="{value}"' for name, value in data.items())
        attributes += "".join(f' onpointer{name}="{escaped(code)}"' for name, code in acts.items())
        style += ";cursor:crosshair;user-select:none;touch-action:pan-y"
        picture = f'<div class="wb-picture" style="{style}"{attributes}>{self._image}{cursor}{mark}</div>'
        return picture + (aside or small(HINT))
