"""Every notebook, opened in JupyterLab in a real browser, and Run All. What the cells print is nbval's part."""

import pytest

import notebooks

from . import driving
from .conftest import screenshots

NAMES = sorted(path.name for path in notebooks.FOLDER.glob("*.ipynb"))


@pytest.fixture(scope="module")
def started(context, lab):
    """All of them, open in one page and running: each has a kernel of its own."""
    with driving.Desk(context, lab, "notebooks") as desk:
        opened = {name: desk.open(name) for name in NAMES}
        for notebook in opened.values():
            notebook.start_all()
        yield opened


@pytest.mark.parametrize("name", NAMES)
def test_it_runs_and_shows_everything(started, name):
    notebook = started[name]
    try:
        notebook.finish(seconds=300)
    finally:
        notebook.show()
        with notebook.at_full_height():
            notebook.desk.take(screenshots() / f"{name}.png")
    with notebook.at_full_height():
        outputs = notebook.panel.locator(".jp-OutputArea-output")
        assert outputs.count() >= notebook.javascript(OUTPUTS) > 3
        for panel in notebook.panel.locator(".wb-panel").all():
            panel.wait_for()
        assert notebook.panel.locator(".wb-panel").count() == notebook.javascript(PANELS)
        assert notebook.javascript(BROKEN_PICTURES) == []
    assert "Error displaying widget" not in notebook.panel.inner_text()
    notebook.desk.check()


CELLS = "[...open.content.model.cells].filter(cell => cell.type === 'code')"
OUTPUTS = f"return {CELLS}.flatMap(cell => cell.outputs.toJSON()).length"
PANELS = (
    f"return {CELLS}.flatMap(cell => cell.outputs.toJSON())"
    ".filter(output => 'application/vnd.jupyter.widget-view+json' in (output.data || {})).length"
)
BROKEN_PICTURES = (
    "return [...open.node.querySelectorAll('img')].filter(one => one.style.display !== 'none')"
    ".filter(one => !one.complete || one.naturalWidth < 100)"
    ".map(one => one.outerHTML.slice(0, 100))"
)
