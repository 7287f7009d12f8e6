"""A run folder that someone sent: opening, listing, plotting, verifying or replaying it executes nothing from it, reads
and writes nothing outside of it, and puts nothing of its own on the screen. Each attack is a real file."""

import contextlib
import html.parser
import json
import os
import pickle
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import zipfile
from pathlib import Path

import helpers
import numpy as np
import panels
import pytest
import runs
from safetensors.numpy import save_file

from workbench import interpreter, lab, trace, verdict
from workbench.errors import CheckpointError, DataError, ExperimentError, RunError, WorkbenchError
from workbench.panel import Panel
from workbench.printed import printable
from workbench.record import Recorder
from workbench.recorded.listing import list_runs
from workbench.run import open_run
from workbench.trainer.corpus import Corpus

TAG = "<img src=x onerror=alert(1)>"
QUOTED = "\"'><script>alert(1)</script>"
ANSI = "\x1b]0;owned\x07\x1b[2J\x1b[31m\x9b5A\u202e"
FORMAT = "{0.__class__.__mro__} %s%n {step} $\\frac{$ [/red] :bomb:"


@pytest.fixture
def run(tmp_path):
    return runs.recorded(tmp_path)


@pytest.fixture
def marker(tmp_path):
    """A file that exists if an attack succeeded."""
    path = tmp_path / "owned"
    yield path
    assert not path.exists(), "code of the run was executed"


def python_that(marker):
    return f"open({str(marker)!r}, 'w').write('owned')\n"


class Bomb:
    """Unpickling it writes the marker."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return exec, (python_that(self.marker),)


def looked_at_everywhere(path):
    """What a person who opens, lists, plots or verifies a run calls."""
    run = open_run(path)
    run._repr_html_(), run.steps, run.spikes(), run.norms(6), run.plan(6), run.checkpoints
    list_runs(path.parent)._repr_html_()
    run.batch_facts(6)
    return run


# ------------------------------------------------------------------------------------------------------------ no code


@pytest.mark.parametrize(
    "name", ["00000004.safetensors", "00000004.optimizer.safetensors", "00000004.rng", "00000004.cursor"]
)
@pytest.mark.parametrize("kind", ["pickle", "npy", "npz"])
def test_a_pickle_under_the_name_of_a_part_of_a_checkpoint(run, marker, name, kind):
    path = run / "checkpoints" / name
    with path.open("wb") as file:
        if kind == "pickle":
            pickle.dump(Bomb(marker), file)
        elif kind == "npy":
            np.save(file, np.array([Bomb(marker)], object), allow_pickle=True)
        else:
            np.savez(file, bomb=np.array([Bomb(marker)], object))
    helpers.repair_commit(run, "00000004")
    with pytest.raises(CheckpointError, match="can't be decoded"):
        open_run(run).replay(6)


@pytest.mark.parametrize("name", ["corpus.npy", "corpus.npz", "corpus.pkl", "corpus.bin"])
def test_a_pickle_as_corpus(tmp_path, marker, name):
    path = tmp_path / name
    with path.open("wb") as file:
        np.save(file, np.array([Bomb(marker)] * 2, object), allow_pickle=True) if name != "corpus.npz" else np.savez(
            file, bomb=np.array([Bomb(marker)], object)
        )
    if name == "corpus.npy":
        with pytest.raises(DataError, match="not a readable .npy file"):
            Corpus.open(path)
    else:
        with contextlib.suppress(DataError):  # an odd number of bytes
            assert Corpus.open(path).tokens.dtype in (np.uint8, np.dtype("<u2"))  # its bytes are the tokens


def test_a_factory_is_not_imported_without_consent(run, marker, tmp_path, monkeypatch):
    (tmp_path / "evil.py").write_text(python_that(marker))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    described = {"kind": "factory", "factory": "evil:build", "arguments": {"command": "rm -rf ~"}}
    runs.edit_json(run / "run.json", lambda document: document.update(rebuild=described))
    opened = open_run(run)
    opened._repr_html_(), opened.spikes(), list_runs(run.parent), opened.verify()
    told = r"evil:build.*only with your consent.*called with .*rm -rf"
    for ask in (opened.replay, opened.autopsy):
        with pytest.raises(ExperimentError, match=told):
            ask(6)
    assert re.search(told, opened.verify(replay=2).checks[-1].detail)
    with pytest.raises(ExperimentError, match="names the factory 'evil:build', not 'runs:build'"):
        opened.replay(6, factory="runs:build")
    assert "evil" not in sys.modules


def test_modules_that_lie_in_the_working_folder_are_not_run(run, marker, monkeypatch):
    """Whoever works in the folder that was sent starts Python there; what a replay starts must not look there."""
    for name in ("workbench", "mlx", "numpy", "json", "msgspec"):
        (run / name).mkdir()
        (run / name / "__init__.py").write_text(python_that(marker))
        (run / name / "__main__.py").write_text(python_that(marker))
    monkeypatch.chdir(run)
    assert open_run(".").replay(6, with_probe=False, fresh_process=True).exact
    ladder = open_run(".").diverge(6, rungs=["fresh process"])
    assert repr(ladder) == "Ladder(step=6, fresh process: equal)"


def test_the_guard_against_such_modules_is_needed(run, tmp_path):
    (run / "workbench").mkdir()
    (run / "workbench" / "__main__.py").write_text(python_that(tmp_path / "theirs"))
    (run / "workbench" / "__init__.py").touch()
    subprocess.run([sys.executable, "-m", "workbench"], cwd=run, check=True)
    assert (tmp_path / "theirs").exists()
    command = interpreter.python_command("workbench", "--version")
    done = subprocess.run(command, cwd=run, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("workbench, version ")


def test_a_run_whose_name_is_an_option(tmp_path, monkeypatch):
    shutil.copytree(runs.recorded_read_only(), tmp_path / "--help")
    monkeypatch.chdir(tmp_path)
    assert open_run("--help").replay(6, with_probe=False, fresh_process=True).exact


# ----------------------------------------------------------------------------------------------------- no other folder


@pytest.mark.parametrize("path", ["../secret.txt", "a/../../secret.txt", "../../../../../../etc/passwd"])
def test_a_data_file_outside_by_a_relative_path(run, path):
    (run.parent / "secret.txt").write_text("the password is 1234\n" * 100)
    runs.edit_json(run / "run.json", lambda document: document["data"][0].update(path=path))
    for ask in (lambda: open_run(run).replay(6), lambda: open_run(run).batch_facts(6)):
        with pytest.raises(DataError, match="outside of the run") as caught:
            ask()
        assert "1234" not in str(caught.value)


def test_a_data_file_anywhere_is_used_only_if_it_is_the_one_that_the_run_had(run, tmp_path):
    """The path is absolute in any run; the size, the SHA-256 and the batch's hash are what counts."""
    secret = tmp_path / "secret.txt"
    secret.write_text("the password is 1234\n" * 400)
    runs.edit_json(run / "run.json", lambda document: document["data"][0].update(path=str(secret)))
    for ask in (lambda: open_run(run).replay(6), lambda: open_run(run).batch_facts(6)):
        with pytest.raises(DataError, match="has changed|is not the one that") as caught:
            ask()
        assert "1234" not in str(caught.value)


@pytest.mark.parametrize("name", ["run.json", "telemetry.jsonl", "checkpoints", "traces", "batches"])
def test_a_part_of_the_run_that_is_a_link_out_of_it(run, tmp_path, name):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    target = elsewhere / "target"
    if (run / name).exists():
        (run / name).rename(target)
    else:
        target.mkdir()
    before = runs.digest(elsewhere)
    (run / name).symlink_to(target)
    with pytest.raises(RunError, match=f"{name} is a link that leads out of the run, to .*elsewhere"):
        open_run(run)
    assert runs.here("replay", run, "--step", 6).sentence and runs.digest(elsewhere) == before
    assert "leads out" in list_runs(run.parent).set_index("run")["problem"]["run"]


@pytest.mark.parametrize("name", ["telemetry.jsonl", "batches"])
def test_no_run_is_begun_where_a_part_of_it_would_stand_elsewhere(tmp_path, name):
    """It was recorded, its lines written to where the link leads, and then nobody could open it."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunError, match=f"{name} is a link that leads out of the run, to .*elsewhere"):
        Recorder(tmp_path / "run", *runs.parts(runs.build()), compile=False)
    assert not (tmp_path / "elsewhere").exists()


def test_a_link_within_the_run_is_none_out_of_it(run):
    (run / "stored").mkdir()
    (run / "telemetry.jsonl").rename(run / "stored" / "lines")
    (run / "telemetry.jsonl").symlink_to(run / "stored" / "lines")
    assert open_run(run).last_step == 12


def test_a_part_of_a_checkpoint_that_is_a_link_to_another_file(run, tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(b"1234" * 100)
    path = run / "checkpoints" / "00000004.cursor"
    path.unlink()
    path.symlink_to(secret)
    with pytest.raises(CheckpointError, match="00000004.cursor has 400 bytes, expected") as caught:
        open_run(run).replay(6)
    assert "1234" not in str(caught.value)


def test_a_trace_that_is_a_link_is_replaced_and_not_written_through(run, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (run / "traces").mkdir()
    for name in ("00000006.json", f".00000006.{os.getpid()}.tmp.json"):
        (run / "traces" / name).symlink_to(victim)
    with contextlib.suppress(WorkbenchError):
        open_run(run).replay(6, with_probe=False, fresh_process=False)
    assert victim.read_text() == "mine"


@pytest.mark.parametrize("change", ["lr=../../x", "../../x", "swap-batch=/etc/passwd", "lr=0.5x/../../../x"])
def test_an_experiments_name_leads_nowhere(run, change):
    with pytest.raises(WorkbenchError):
        open_run(run).whatif(6, [change])
    assert sorted(path.name for path in run.parent.iterdir()) == ["run"]


# ----------------------------------------------------------------------------------------------------- nothing unpacked


@pytest.mark.parametrize("name", ["corpus.gz", "corpus.zip", "corpus.npz", "corpus.npy"])
def test_an_archive_is_never_unpacked(tmp_path, name):
    """10 MB of zeros in some kilobytes: a file is its bytes."""
    path = tmp_path / name
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("bomb.npy", bytes(10**7))
    if name == "corpus.npy":
        with pytest.raises(DataError, match="not a readable .npy file"):
            Corpus.open(path)
    else:
        assert len(Corpus.open(path)) == path.stat().st_size < 20000


def test_an_array_file_that_claims_to_be_huge(tmp_path):
    path = tmp_path / "corpus.npy"
    np.save(path, np.zeros(4, np.uint16))
    path.write_bytes(path.read_bytes().replace(b"'shape': (4,)", b"'shape': (1099511627776,)".ljust(13)))
    with pytest.raises(DataError, match="not a readable .npy file"):
        Corpus.open(path)


# ------------------------------------------------------------------------------------------------------- on the screen


class Elements(html.parser.HTMLParser):
    """What a browser would make of it: scripts, handlers, and elements that load something."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attributes):
        if tag in ("script", "iframe", "object", "embed", "svg", "link", "base", "form"):
            self.found.append(tag)
        for name, value in attributes:
            if name.startswith("on") and "createRange" not in (value or ""):  # the button that copies
                self.found.append(f"{tag} {name}={value}")
            if name in ("src", "href") and not (value or "").startswith("data:image/png;base64,"):
                self.found.append(f"{tag} {name}={value}")


def dangerous(markup):
    parser = Elements()
    parser.feed(markup)
    return parser.found


def test_the_eyes_of_these_tests_are_open():
    assert dangerous(TAG) == ["img src=x", "img onerror=alert(1)"] and dangerous(f'<p title="{QUOTED}">') == ["script"]
    assert dangerous("<p title='&lt;script&gt;'>&lt;img src=x&gt;</p>") == []


ATTACK = f"{TAG}{QUOTED}{FORMAT}"


@pytest.fixture
def attacking(tmp_path):
    """Every text of the run's files that comes to be shown is an attack, and so is the folder's name."""
    path = tmp_path / "runs" / ATTACK.replace("/", "∕")
    path.parent.mkdir()
    shutil.copytree(runs.recorded_read_only(), path)
    corpus = tmp_path / f"{TAG.replace('/', '')}.txt"
    corpus.write_bytes((ATTACK.encode() * 2000)[: runs.corpus().stat().st_size])

    def change(document):
        document["parent"] = {"run": ATTACK, "path": ATTACK, "step": 1, "segment": 0, "changes": [ATTACK]}
        names = {layer: f"{ATTACK}{number}" for number, layer in enumerate(document["layers"])}
        document["owned"] = {names[layer]: paths for layer, paths in document["owned"].items()}
        document["layers"] = list(names.values())
        for segment in document["segments"]:
            segment["environment"] |= {"mlx": ATTACK, "backend": "cpu", "device": ATTACK}
        document["data"][0]["path"] = str(corpus)

    runs.edit_json(path / "run.json", change)
    runs.edit_line(path, 9, spike=True, spike_rule=ATTACK)
    return path


def test_nothing_of_the_run_becomes_html(attacking):
    run = open_run(attacking)
    shown = [run._repr_html_(), list_runs(attacking.parent)._repr_html_(), run.verify()._repr_html_()]
    shown += [run.spikes()._repr_html_(), run.norms(6)._repr_html_()]
    from workbench.pairs.paired import compare_runs

    compared = compare_runs(attacking, runs.recorded_read_only())
    shown.append(compared._repr_html_())
    assert [dangerous(one) for one in shown] == [[]] * len(shown)
    assert "&lt;img src=x onerror" in shown[0]
    compared.figure()


def test_nothing_of_a_trace_or_a_verdict_becomes_html(run, tmp_path):
    opened = open_run(run)
    opened.replay(6, fresh_process=False)
    opened.autopsy(6)

    def evil(value):
        """Every text that is free text."""
        if isinstance(value, dict):
            return {key: evil(inner) if key not in FIXED else inner for key, inner in value.items()}
        if isinstance(value, list):
            return [evil(inner) for inner in value]
        return ATTACK if isinstance(value, str) and not re.fullmatch(r"0x[0-9a-f]{8}|[0-9a-f]{32,64}", value) else value

    FIXED = {
        "verdict",
        "kind",
        "supports",
        "cause",
        "where",
        "provenance",
        "options",
        "environment",
        "dtype",
        "item",
        "rule",
    }
    for file, read in (("00000006.json", trace.read), ("00000006.autopsy.json", verdict.read)):
        path = run / "traces" / file
        path.write_text(json.dumps(evil(json.loads(path.read_text()))))
        try:
            markup = read(path)._repr_html_()
        except WorkbenchError:  # a text that is one of few
            markup = None
        if markup is not None:
            assert dangerous(markup) == [] and "&lt;img" in markup, file
        else:
            pytest.fail(f"{file} can't be read, so nothing was tried")


def in_the_panel(path):
    """All that the panel shows in each of its views."""
    panel, shown = Panel(path.parent, path.name), {}
    panel.step.value = 6
    for view in panel.view.options:
        panel.view.value = view
        panel.wait(120)
        shown |= {f"{view}: {name}": str(getattr(panel, name).value) for name in panels.EVERY}
    return shown


def test_nothing_of_the_run_becomes_html_in_the_panel(attacking):
    """It has the same elements and handlers as with a run that is none."""
    shown, harmless = in_the_panel(attacking), in_the_panel(runs.recorded_read_only())
    assert {name: dangerous(text) for name, text in shown.items()} == {
        name: dangerous(text) for name, text in harmless.items()
    }
    assert sum("&lt;img" in text for text in shown.values()) > 2


TERMINAL = {
    "spikes": ["spikes"],
    "verify": ["verify"],
    "plan and error": ["replay", "--step", "6"],
    "a step that is not there": ["replay", "--step", "99"],
    "autopsy": ["autopsy", "--step", "6"],
    "batch": ["batch", "--step", "6"],
    "compare": ["compare", runs.recorded_read_only],
    "diverge": ["diverge", "--step", "6"],
    "doctor": ["doctor"],
    "its checkpoints": ["checkpoint"],
    "ranks": ["ranks", "--step", "6"],
    "report": ["report", "--step", "9", "--out", "report.html"],
    "resumption": ["resumption", "--from", "4"],
    "spikes by rules": ["spikes", "--rule", "all"],
    "spikes of several": ["spikes", runs.recorded_read_only],
    "sweep": ["sweep", "--steps", "6,9", "--workers", "0"],
    "whatif": ["whatif", "--step", "6", "--set", "lr=0.5x"],
}
NAMES = (ANSI, "a[/red]", ":bomb: [bold]x[/bold]", FORMAT)  # of tensors


@pytest.mark.parametrize("what", TERMINAL)
def test_nothing_of_the_run_moves_the_cursor(tmp_path, monkeypatch, what):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "runs" / f"name{ANSI}"
    path.parent.mkdir()
    shutil.copytree(runs.recorded_read_only(), path)
    if what == "ranks":
        runs.as_ranks(path, ANSI, FORMAT)
    runs.edit_line(path, 9, loss=None, loss_bits="0x7fc00000", spike=True, spike_rule=ANSI)

    def change(document):
        document["segments"][0]["environment"]["mlx"] = ANSI
        document["data"][0]["path"] = f"/nowhere/{ANSI}"

    runs.edit_json(path / "run.json", change)
    command, *options = (part() if callable(part) else part for part in TERMINAL[what])
    said = runs.here(command, path, *options)
    shown = said.out + said.err
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", shown), shown
    assert said.code in (0, 1, 2) and "Traceback" not in shown
    listed = runs.here("runs", path.parent)
    assert "␛]0;owned␇" in listed.out and "\x1b" not in listed.out
    if what == "ranks":
        assert said.code == 0 and "␛]0;owned␇" in said.out and "[/red] :bomb:" in said.out


@pytest.mark.parametrize("several", [False, True])
def test_no_tensors_name_moves_the_cursor_or_is_markup(tmp_path, several):
    files = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"][: 1 + several]
    for file in files:
        save_file({name: np.ones(2, np.float32) for name in NAMES}, file)
    said = runs.here("checkpoint", *files)
    assert said.code == 0 and not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", said.out), said.out
    assert "␛]0;owned␇␛[2J␛[31m⟨U+009B⟩5A⟨U+202E⟩" in said.out
    assert "a[/red]" in said.out and ":bomb: [bold]x[/bold]" in said.out
    rows = runs.strict(runs.here("checkpoint", *files, "--json").out)
    assert {row["tensor"] for row in rows} == set(NAMES)


def test_json_for_scripts_keeps_the_values(tmp_path):
    path = tmp_path / "runs" / f"name{ANSI}"
    path.parent.mkdir()
    shutil.copytree(runs.recorded_read_only(), path)
    said = runs.here("verify", path, "--json")
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", said.out)
    assert runs.strict(said.out)["name"] == path.name


def test_what_is_printable():
    assert printable("a\tb\nc é 中 🙂") == "a\tb\nc é 中 🙂"
    assert printable("\x1b[2J\r\x7f\x9b\u202e\udcff") == "␛[2J␍␡⟨U+009B⟩⟨U+202E⟩⟨U+DCFF⟩"


# --------------------------------------------------------------------------------------------------------- JupyterLab


def test_lab_writes_through_no_link(tmp_path, monkeypatch):
    folder, victim = tmp_path / "spike-workbench", tmp_path / "victim"
    folder.mkdir()
    for notebook in lab.shared("notebooks").glob("*.ipynb"):
        (folder / notebook.name).symlink_to(victim)  # which is not there yet
    monkeypatch.setattr(lab.os, "execv", lambda program, command: None)
    assert runs.here("lab", "--dir", folder).code == 0
    assert not victim.exists()


def listens(described: Path) -> bool:
    """Whether the server of a file that Jupyter wrote answers: it writes the file before it binds its port."""
    try:
        port = json.loads(described.read_text())["port"]
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            return True
    except (json.JSONDecodeError, OSError):
        return False


def test_jupyterlab_listens_on_loopback_with_its_token(tmp_path, marker):
    """Although the working folder holds a configuration that says otherwise, and a module of its name."""
    (tmp_path / "jupyter_server_config.py").write_text(
        python_that(marker) + "c.ServerApp.ip = '0.0.0.0'\nc.IdentityProvider.token = ''\n"
    )
    (tmp_path / "jupyterlab.py").write_text(python_that(marker))
    runtime = tmp_path / "runtime"
    variables = {"JUPYTER_RUNTIME_DIR": str(runtime), "JUPYTER_CONFIG_DIR": str(tmp_path / "config")}
    command = [str(Path(sys.executable).with_name("workbench")), "lab", "--dir", str(tmp_path / "lab")]
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(
        [*command, "--", "--no-browser", "--allow-root"], cwd=tmp_path, env=os.environ | variables, **quiet
    ) as server:
        try:
            deadline = time.time() + 120
            while not (found := list(runtime.glob("jpserver-*.json"))) or not listens(found[0]):
                assert server.poll() is None and time.time() < deadline
                time.sleep(0.2)
            said = json.loads(found[0].read_text())
            assert said["hostname"] == "127.0.0.1" and len(said["token"]) >= 32
            where = f"http://127.0.0.1:{said['port']}/api/contents"
            with pytest.raises(urllib.error.HTTPError, match="403"):
                urllib.request.urlopen(where, timeout=60)
            with urllib.request.urlopen(f"{where}?token={said['token']}", timeout=60) as answer:
                assert "investigate.ipynb" in answer.read().decode()
        finally:
            server.terminate()
            server.wait(60)
