"""One JupyterLab and one browser for all tests here. They are ended with this folder, and not with the session: while
Playwright lives, nothing else can have an event loop in this thread, and the notebooks' tests need one.
"""

import os
import shutil
from pathlib import Path

import pytest
import runs

from . import driving, servers
from .desks import SPIKE, PanelPage, record

FOLDER = Path(__file__).resolve().parent


def screenshots() -> Path:
    folder = Path(os.environ.get("WORKBENCH_SCREENSHOTS") or FOLDER / "screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="package")
def recorded(tmp_path_factory):
    """A folder with three runs: `mine`, 90 steps with three rows of garbage at step 72 and nothing between the
    checkpoints 0 and 90 but the state before the spike; `damaged`, the same with a byte of that state changed;
    `elsewhere`, the same as if another version of MLX had recorded it.
    """
    if reason := servers.missing():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("recorded")
    mine = record(folder / "mine")
    damaged = shutil.copytree(mine, mine.with_name("damaged"))
    path = damaged / "checkpoints" / f"{SPIKE - 1:08d}.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    elsewhere = shutil.copytree(mine, mine.with_name("elsewhere"))
    runs.edit_json(elsewhere / "run.json", _recorded_by_another)
    return folder


def _recorded_by_another(manifest):
    for segment in manifest["segments"]:
        segment["environment"]["mlx"] = "0.1.0"


@pytest.fixture(scope="package")
def lab(recorded, tmp_path_factory):
    """The server, of a folder with the notebooks and a folder `runs`."""
    root = tmp_path_factory.mktemp("lab")
    mine = shutil.copytree(recorded, root / "runs") / "mine"
    with servers.lab_server(root, mine) as server:
        yield server
        running = servers.descendants(server.pid)
    assert servers.still_running(running) == []


@pytest.fixture
def work(lab, recorded):
    """The folder `runs`, as it was recorded: what an earlier test left in it is gone."""
    shutil.rmtree(lab.root / "runs")
    return shutil.copytree(recorded, lab.root / "runs")


@pytest.fixture(scope="package")
def context(recorded):
    with servers.browser() as context:
        yield context


@pytest.fixture
def open_desk(context, lab, work, request):
    """Opens pages of JupyterLab that are checked and closed after the test: `open_desk()`."""
    opened = []

    def open_one(**where):
        opened.append(driving.Desk(context, lab, request.node.name, **where))
        return opened[-1]

    yield open_one
    for desk in opened:
        desk.take(screenshots() / f"{request.node.name}.png")
        with desk:
            desk.check()


@pytest.fixture(scope="package")
def bench(context, lab):
    """A page with a notebook for one panel after another: a kernel each would be most of the time."""
    with driving.Desk(context, lab, "bench") as desk:
        driving.empty_notebook(lab.root / "bench.ipynb")
        yield desk.open("bench.ipynb")


@pytest.fixture
def panel_on(bench, work, request):
    """Puts a new panel on the page, as a cell with this code would: `panel_on('wb.Panel("runs")')`."""

    def put(code: str) -> PanelPage:
        bench.write(
            f"import ipywidgets\nimport workbench as wb\n\nipywidgets.Widget.close_all()\npanel = {code}\npanel"
        )
        bench.run_all()
        page = PanelPage(bench)
        page.itself.wait_for()
        return page

    yield put
    bench.desk.take(screenshots() / f"{request.node.name}.png")
    bench.desk.check()


@pytest.fixture
def panel(panel_on):
    """On the run `mine`, at its spike."""
    return panel_on('wb.Panel("runs", "mine")')
