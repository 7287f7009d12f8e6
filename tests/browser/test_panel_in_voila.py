"""The panel in Voilà, which shows a notebook's outputs and no code: what a person does there, in a real browser."""

import re
import shutil
from types import SimpleNamespace

import pytest

from . import driving, looks, servers
from .conftest import screenshots
from .desks import SPIKE, PanelPage

expect = pytest.importorskip("playwright.sync_api", reason=servers.missing()).expect
pytestmark = pytest.mark.skipif(servers.voila_missing() != "", reason=servers.voila_missing())

CODE = 'import workbench as wb\n\npanel = wb.Panel("runs", "mine")\npanel'
ICONS = r"https://cdn\.jsdelivr\.net/npm/@fortawesome/"  # in Voilà's own page; they are not loaded here


@pytest.fixture(scope="module")
def voila(recorded, tmp_path_factory):
    """The server, of a notebook with nothing but a panel."""
    root = tmp_path_factory.mktemp("voila")
    shutil.copytree(recorded, root / "runs")
    driving.empty_notebook(root / "panel.ipynb", CODE)
    with servers.voila_server(root / "panel.ipynb") as server:
        yield server
        running = servers.descendants(server.pid)
    assert servers.still_running(running) == []


@pytest.fixture
def page(context, voila, request):
    """It, as it is opened; what its console calls an error, and what it asks of other machines, is looked at."""
    page, console, abroad = context.new_page(), [], []
    page.route(re.compile(ICONS), lambda route: route.fulfill(status=200, content_type="text/css", body=""))
    page.on("console", lambda said: console.append(said.text) if said.type == "error" else None)
    page.on("pageerror", lambda error: console.append(str(error)))
    page.on("request", lambda asked: abroad.append(asked.url))
    page.goto(f"{voila.url}/?token={voila.token}", timeout=60_000)  # it runs the notebook before it answers
    yield page
    page.screenshot(path=screenshots() / f"{request.node.name}.png", animations="disabled")
    page.close()
    own = re.compile(rf"{re.escape(voila.url)}/|{ICONS}|data:|blob:")
    assert console == [] and [url for url in abroad if not own.match(url)] == []


def test_the_panel_works_in_voila(page):
    panel = PanelPage(SimpleNamespace(page=page, panel=page.locator("body")))
    panel.itself.wait_for(timeout=60_000)
    panel.await_step(SPIKE)
    assert "wb.Panel" not in page.locator("body").inner_text()
    assert panel.badges() == []
    panel["replay"].click()
    panel.await_status(f"Step {SPIKE} replayed")
    assert panel.badges() == ["repeatable: exact", "faithful: exact", "sensitive: exact"]
    expect(panel["layers"].get_by_role("img", name=re.compile(f"Norms of each layer at step {SPIKE}"))).to_be_visible()
    panel.slide("ArrowLeft", 2)
    panel.await_step(SPIKE - 2)
    panel["replay"].click()  # from state 0
    panel.await_status("olling forward")
    panel["cancel"].click()
    panel.await_status("cancelled; nothing was changed")
    for view in panel.views:
        panel.turn_to(view)
        assert looks.overlaps(panel.itself) == [] and looks.cut_off(panel.itself) == [], view
        assert looks.faint(panel.itself) == [], view
    panel.turn_to("Cause")
    panel["change"].locator("input").fill("nonsense")
    panel["try"].click()
    expect(panel.alert).to_contain_text("nonsense")
    expect(panel.alert).not_to_contain_text("Traceback")
