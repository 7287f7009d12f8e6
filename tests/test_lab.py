"""`workbench lab`: a working copy of the notebooks that never writes over a person's edits, and JupyterLab on it."""

import sys

import pytest
import runs

from workbench import lab
from workbench.errors import WorkbenchError


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
    assert command[:3] == [sys.executable, "-m", "jupyterlab"]
    assert f"--ServerApp.root_dir={folder}" in command
    assert sorted(path.name for path in folder.iterdir()) == ["another.ipynb", "investigate.ipynb"]
    assert not any("token" in part or "ip=" in part or "0.0.0.0" in part for part in command)  # loopback, with a token
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
