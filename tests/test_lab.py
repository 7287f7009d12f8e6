"""`workbench lab`: a working copy of the notebooks that never writes over a person's edits, and JupyterLab on it."""

import html
import json
import shutil
import sys
from urllib.parse import unquote

import ipywidgets as W
import nbformat
import pytest
import recordings
import runs

import workbench as wb
from workbench import lab
from workbench.errors import FactoryNeeded, WorkbenchError


@pytest.fixture
def started(tmp_path, monkeypatch):
    """JupyterLab is not started; what would have been is noted. Two notebooks are shipped."""
    shipped = tmp_path / "shipped"
    shipped.mkdir()
    for name in ("investigate", "another"):
        (shipped / f"{name}.ipynb").write_text(f'{{"name": "{name}"}}')
    (shipped / "notes.txt").write_text("not a notebook")
    commands = []
    monkeypatch.setattr(lab, "shared", lambda name: shipped)
    monkeypatch.setattr(lab.os, "execv", lambda program, command: commands.append((program, command)))
    monkeypatch.delenv("WORKBENCH_RUN", raising=False)
    monkeypatch.chdir(tmp_path)
    return commands


def test_lab_copies_the_notebooks_and_becomes_jupyterlab(started, tmp_path):
    assert runs.here("lab").code == 0
    ((program, command),) = started
    folder = (tmp_path / "spike-workbench").resolve()
    assert program == sys.executable
    assert command[:4] == [sys.executable, "-P", "-m", "jupyterlab"]
    assert f"--ServerApp.root_dir={folder}" in command
    assert sorted(path.name for path in folder.iterdir()) == ["another.ipynb", "investigate.ipynb"]
    assert "--ServerApp.ip=127.0.0.1" in command and not any("token" in part for part in command)  # which it has then
    assert "WORKBENCH_RUN" not in lab.os.environ


def test_edits_are_never_written_over(started, tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "investigate.ipynb").write_text("my edits")
    assert runs.here("lab", "--dir", folder).code == 0
    assert (folder / "investigate.ipynb").read_text() == "my edits"
    assert (folder / "another.ipynb").exists()


def test_a_run_is_handed_to_the_notebook_by_its_whole_path(started, tmp_path, monkeypatch):
    path = runs.recorded(tmp_path)
    monkeypatch.setenv("WORKBENCH_RUN", "to be undone")
    before = runs.digest(path)
    assert runs.here("lab", path.relative_to(tmp_path)).code == 0
    assert lab.os.environ["WORKBENCH_RUN"] == str(path.resolve())
    assert runs.digest(path) == before


def shown(command):
    (address,) = [part for part in command if part.startswith("--LabApp.default_url=")]
    return unquote(address.removeprefix("--LabApp.default_url=/lab/tree/"))


def test_without_a_run_the_explanations_are_shown(started):
    assert runs.here("lab").code == 0 and shown(started[0][1]) == "investigate.ipynb"


def test_a_run_is_shown_in_a_notebook_of_its_own(started, tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_RUN", "to be undone")
    path = runs.recorded(tmp_path)
    assert runs.here("lab", path).code == 0
    folder = tmp_path / "spike-workbench"
    assert shown(started[-1][1]) == "run.ipynb"
    notebook = nbformat.read(folder / "run.ipynb", as_version=4)
    nbformat.validate(notebook)
    (code,) = [cell["source"] for cell in notebook.cells if cell["cell_type"] == "code"]
    monkeypatch.delenv("WORKBENCH_RUN")
    names: dict = {}
    exec(code, names)
    assert names["panel"].opened.path == path and names["panel"].last_error is None
    W.Widget.close_all()

    edited = (folder / "run.ipynb").read_text().replace("Choose a spike", "My notes: choose a spike")
    (folder / "run.ipynb").write_text(edited)
    assert runs.here("lab", path).code == 0
    assert shown(started[-1][1]) == "run.ipynb" and (folder / "run.ipynb").read_text() == edited

    (tmp_path / "other").mkdir()
    shutil.copytree(path, tmp_path / "other" / "run")  # of the same name
    for _ in range(2):
        assert runs.here("lab", tmp_path / "other" / "run").code == 0
        assert shown(started[-1][1]) == "run-2.ipynb"
    assert sorted(file.name for file in folder.glob("run*")) == ["run-2.ipynb", "run.ipynb"]


@pytest.mark.parametrize("name", ['it\'s 100% \N{GRINNING FACE} "odd" #1', "...", "investigate"])
def test_a_run_may_have_any_name(started, tmp_path, monkeypatch, name):
    monkeypatch.setenv("WORKBENCH_RUN", "to be undone")
    path = runs.recorded(tmp_path).rename(tmp_path / name)
    assert runs.here("lab", path).code == 0
    monkeypatch.delenv("WORKBENCH_RUN")
    file = tmp_path / "spike-workbench" / shown(started[-1][1])
    assert (file.parent / "investigate.ipynb").read_text() == '{"name": "investigate"}'
    names: dict = {}
    exec(nbformat.read(file, as_version=4).cells[1]["source"], names)
    assert names["panel"].opened.path == path
    W.Widget.close_all()


def test_a_log_of_another_program_is_opened_too(started, tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_RUN", "to be undone")
    log = tmp_path / "trainer_state.json"
    history = [{"step": step, "loss": 2.0 + step % 3} for step in range(1, 30)]
    log.write_text(json.dumps({"global_step": 29, "log_history": history}))
    assert runs.here("lab", log).code == 0
    monkeypatch.delenv("WORKBENCH_RUN")
    names: dict = {}
    exec(nbformat.read(tmp_path / "spike-workbench" / shown(started[-1][1]), as_version=4).cells[1]["source"], names)
    assert names["panel"].opened.path == log and names["panel"].last_error is None
    W.Widget.close_all()


@pytest.mark.parametrize("content", ["no log", ""])
def test_a_file_that_is_no_log_is_refused(started, tmp_path, content):
    (tmp_path / "notes.txt").write_text(content)
    assert "expected" in runs.here("lab", tmp_path / "notes.txt").sentence.lower()
    assert started == [] and not (tmp_path / "spike-workbench").exists()


@pytest.mark.parametrize(
    "args", [["--no-browser", "--port", "8889"], ["--", "--no-browser", "--port", "8889"]], ids=["plain", "after --"]
)
def test_options_go_to_jupyterlab_with_and_without_a_run(started, tmp_path, monkeypatch, args):
    path = runs.recorded(tmp_path)
    monkeypatch.setenv("WORKBENCH_RUN", "to be undone")
    for given in (args, [path, *args]):
        said = runs.here("lab", *given)
        assert said.code == 0, said.err
        assert started[-1][1][-3:] == ["--no-browser", "--port", "8889"]


@pytest.mark.parametrize("run", ["nowhere", "."])
def test_what_is_no_run_is_refused_before_anything_is_copied(started, tmp_path, run):
    said = runs.here("lab", run)
    assert "run.json" in said.sentence
    assert started == [] and not (tmp_path / "spike-workbench").exists()


def test_a_file_in_place_of_the_folder(started, tmp_path):
    (tmp_path / "file").write_text("mine")
    assert "file" in runs.here("lab", "--dir", tmp_path / "file").sentence
    assert (tmp_path / "file").read_text() == "mine" and started == []


def test_notebooks_and_data_are_shipped():
    from workbench.share import shared

    assert (shared("data") / "shakespeare.txt").exists()
    with pytest.raises(WorkbenchError, match="the folder nonsense is neither in .* nor beside it; install"):
        shared("nonsense")


# ---- a run of one's own loop

SCRIPT = """\
import runs, workbench as wb
from recordings import recorder
with recorder("own") as recording:
    for batch in recording.batches(4):
        recording.step(batch)
"""


@pytest.fixture
def own(started, tmp_path, monkeypatch):
    """A run of a loop of one's own, as a script records it, which it names without consent to run it."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    run = recordings.record(tmp_path / "own", 4)
    runs.edit_json(run.path / "run.json", lambda held: held["rebuild"].update(script=str(script), argv=[]))
    monkeypatch.setenv("WORKBENCH_RUN", "to be undone")
    yield run
    W.Widget.close_all()


def test_the_script_of_a_loop_of_ones_own_is_named_and_its_steps_are_replayed(own, started, tmp_path, monkeypatch):
    assert runs.here("lab", own.path, "--factory", "train.py").code == 0
    folder = tmp_path / "spike-workbench"
    monkeypatch.chdir(folder)  # as JupyterLab has it
    cell = nbformat.read(folder / shown(started[-1][1]), as_version=4).cells[1]["source"]
    names: dict = {}
    exec(cell, names)
    assert cell.splitlines()[-2] == f"panel = wb.Panel(run={str(own.path)!r}, factory={str(tmp_path / 'train.py')!r})"
    assert names["panel"]._doer._factory == str(tmp_path / "train.py")  # and `Run.replay` takes it
    assert own.replay(3, factory=str(tmp_path / "train.py"), fresh_process=False).exact
    monkeypatch.chdir(tmp_path)
    assert runs.here("lab", own.path).code == 0 and shown(started[-1][1]) == "own.ipynb"  # it opens this run, too
    assert runs.here("lab", own.path, "--factory", "jobs:build").code == 0
    assert shown(started[-1][1]) == "own-2.ipynb"
    code = nbformat.read(folder / "own-2.ipynb", as_version=4).cells[1]["source"]
    assert f"sys.path.insert(0, {str(tmp_path)!r})" in code and "factory='jobs:build')" in code


@pytest.mark.parametrize(
    ("run", "factory", "words"),
    [
        ("own", "gone.py", "the script gone.py is not there; expected the one that recorded"),
        ("own", "no_such", "the factory 'no_such' is no module that is found from"),
        ("run", "train.py", "is rebuilt by it; leave --factory train.py out"),
        (None, "train.py", "names what rebuilds a run, and no run is given; leave it out"),
    ],
)
def test_a_factory_that_is_none_is_refused_before_anything_is_opened(own, started, tmp_path, run, factory, words):
    if run == "run":
        runs.recorded(tmp_path)
    said = runs.here("lab", *([] if run is None else [tmp_path / run]), "--factory", factory)
    assert said.code == 2 and words in said.err and not started and not (tmp_path / "spike-workbench").exists()


def test_the_panel_says_how_it_is_opened_with_the_code_that_is_missing(own, tmp_path):
    panel = wb.Panel(run=own.path)
    with pytest.raises(FactoryNeeded):
        panel.replay(3)
    line = f"wb.Panel(run={str(own.path)!r}, factory={str(tmp_path / 'train.py')!r})"
    assert line in html.unescape(panel.error.value)
