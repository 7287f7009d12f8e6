"""The HTML report of a step, as a browser shows and prints it."""

import pytest

from workbench.run import Run
from workbench.step_report import report_html

from . import looks
from .conftest import screenshots
from .desks import SPIKE

HIDDEN = """() => [...document.querySelectorAll('.jp-RenderedHTMLCommon')]
    .filter(box => box.scrollHeight > box.clientHeight + 1 || box.scrollWidth > box.clientWidth + 1)
    .map(box => box.innerText.slice(0, 40))"""
BLEACHED = """() => [...document.querySelectorAll('*')]
    .filter(one => getComputedStyle(one).backgroundColor !== 'rgba(0, 0, 0, 0)')
    .filter(one => getComputedStyle(one).printColorAdjust !== 'exact').map(one => one.outerHTML.slice(0, 80))"""


@pytest.fixture
def page(context, recorded, tmp_path):
    path = tmp_path / "report.html"
    path.write_text(report_html(Run(recorded / "mine"), SPIKE))
    page = context.new_page()
    page.goto(path.as_uri())
    yield page
    page.close()


@pytest.mark.parametrize("width", [700, 1600])
def test_nothing_of_a_report_is_hidden(page, width):
    page.set_viewport_size({"width": width, "height": 900})
    page.screenshot(path=screenshots() / f"report-{width}.png", full_page=True)
    body = page.locator("body")
    assert looks.overlaps(body) == [] and looks.cut_off(body) == [] and looks.faint(body) == []
    assert page.evaluate(HIDDEN) == []


def test_white_text_is_printed_on_its_colour(page):
    page.emulate_media(media="print")
    assert page.evaluate(BLEACHED) == [] and page.evaluate(HIDDEN) == []
    page.add_style_tag(content="*{print-color-adjust:economy!important}")
    assert page.evaluate(BLEACHED) != [], "it would be seen"
