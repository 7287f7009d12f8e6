"""Where no widget runs: GitHub's viewer, a page made by nbconvert, an editor without ipywidgets. Everything is readable
there; and the widgets are ipywidgets' own, which JupyterLab, Voilà and VS Code have.
"""

import base64
import re
import shutil
from html.parser import HTMLParser

import ipywidgets
import nbformat
import pytest
from nbconvert import HTMLExporter
from panels import SPIKE, press, spiked

import notebooks
from workbench import Dashboard
from workbench.panel import Panel

PATHS = sorted(notebooks.FOLDER.glob("*.ipynb"))
STANDARD = {"@jupyter-widgets/base", "@jupyter-widgets/controls"}  # what every place that has widgets brings along


class Page(HTMLParser):
    """What is on a page that runs no script.

    Attributes:
        text: all of it, white space apart.
        pictures: those that the page holds itself, as PNG files.
    """

    def __init__(self, content):
        super().__init__()
        self.text, self.pictures, self._inside = "", [], []
        self.feed(content)
        self.text = _squeezed(self.text)

    def handle_starttag(self, tag, attributes):
        if tag in ("script", "style", "head"):
            self._inside.append(tag)
        source = dict(attributes).get("src", "") if tag == "img" else ""
        if source.startswith("data:image/png;base64,"):
            self.pictures.append(base64.b64decode(source.partition(",")[2]))

    def handle_endtag(self, tag):
        if self._inside and self._inside[-1] == tag:
            self._inside.pop()

    def handle_data(self, data):
        if not self._inside:
            self.text += data


def _squeezed(text):
    return re.sub(r"\s+", "", text)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_notebook_as_a_page(path):
    notebook = nbformat.read(path, as_version=4)
    page = Page(HTMLExporter().from_notebook_node(notebook)[0])
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert len(outputs) > 3
    for output in outputs:
        data = output.get("data", {"text/plain": output.get("text", "")})
        if "image/png" in data:
            assert base64.b64decode(data["image/png"]) in page.pictures
        elif "text/html" in data:
            assert Page(data["text/html"]).text in page.text
        else:
            assert _squeezed(data["text/plain"]) in page.text
    if path.stem == "investigate":
        assert _squeezed("The batch of step 72 carries it: rows 2, 3, 4") in page.text
        assert _squeezed("repeatable: exact") in page.text and len(page.pictures) >= 3


def test_what_only_a_script_would_show_does_not_count():
    cell = nbformat.v4.new_code_cell("panel")
    cell.outputs = [nbformat.v4.new_output("display_data", {"application/javascript": "element.append('seen')"})]
    assert "seen" not in Page(HTMLExporter().from_notebook_node(nbformat.v4.new_notebook(cells=[cell]))[0]).text


@pytest.fixture
def panel(tmp_path):
    yield Panel(run=shutil.copytree(spiked(), tmp_path / "spiked"))  # a trace is written into it
    ipywidgets.Widget.close_all()


def test_the_panel_says_and_draws_itself(panel):
    press(panel)
    shown = panel._repr_mimebundle_()
    assert shown["text/plain"] == repr(panel) == f"Panel(run='spiked', step={SPIKE}, replayed)"
    assert shown["image/png"].startswith(b"\x89PNG") and panel.last_error is None


@pytest.mark.parametrize("make", [lambda: Panel(run=spiked()), lambda: Dashboard([spiked()])])
def test_only_standard_widgets_are_used(make):
    ipywidgets.Widget.close_all()
    make()
    made = list(ipywidgets.widgets.widget._instances.values())
    assert len(made) > 20
    for widget in made:
        assert widget._model_module in STANDARD, widget
        assert widget._view_module in STANDARD or widget._view_module is None, widget
    ipywidgets.Widget.close_all()
