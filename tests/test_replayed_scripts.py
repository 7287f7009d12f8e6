"""A script that is run again for a replay destroys nothing, runs where it ran, and says why where it can't be run."""

import contextlib
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import warnings

import mlx.core as mx
import pytest
import runs

import workbench as wb
from workbench.errors import ExperimentError, ReplayError
from workbench.own_scripts import guard as guards

OPEN, SAVE = open, mx.save_safetensors
HEAD = """
import os, shutil, sys
import mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim, numpy as np
import workbench as wb

out = OUT
{before}
mx.random.seed(0)
rng = np.random.default_rng(0)
model, optimizer = nn.Linear(4, 1), optim.Adam(1e-2)
def loss_fn(model, x):
    return model(x).square().mean()
"""
STEP = """
def step(x):
    loss, gradients = nn.value_and_grad(model, loss_fn)(model, x)
    {inside}
    optimizer.update(model, gradients)
    return loss
"""
LOOP = """
recorder = wb.Recorder(out, model, optimizer, step_fn=step)
{after}
for _ in range(3):
    recorder.step(mx.array(rng.standard_normal((2, 4)).astype(np.float32)))
recorder.close()
"""


def text(before="", inside="pass", after="", step=STEP, loop=LOOP):
    return HEAD.format(before=before) + step.format(inside=inside) + loop.format(after=after)


class Desk:
    """A folder of the user's, with a script and the run that it recorded, both in this process."""

    def __init__(self, folder, monkeypatch):
        self.folder = folder
        monkeypatch.chdir(folder)

    def record(self, body, name="loop.py", out="runs/mine"):
        script = self.folder / name
        script.write_text(body.replace("OUT", repr(out)))
        namespace, main = {"__name__": "__main__", "__file__": str(script)}, sys.modules["__main__"]
        path = list(sys.path)
        module = type(sys)("__main__")
        module.__dict__.update(namespace)
        sys.modules["__main__"], sys.path[:0] = module, [str(self.folder)]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what a recorder says of such loops is tested elsewhere
                exec(compile(script.read_bytes(), str(script), "exec"), module.__dict__)
        finally:
            sys.modules["__main__"], sys.path[:] = main, path
            os.chdir(self.folder)
        return wb.open_run(self.folder / out)

    def replay(self, run, script="loop.py", step=2):
        return run.replay(step, factory=script, fresh_process=False)


@pytest.fixture
def desk(tmp_path, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(sys, "argv", ["loop.py"])
    return Desk(tmp_path, monkeypatch)


def everything(folder):
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts and "traces" not in path.parts
    }


# ------------------------------------------------------------------------------------------- nothing is destroyed


@pytest.mark.parametrize(
    "deed",
    [
        "shutil.rmtree(out, ignore_errors=True)",
        "shutil.rmtree('runs', ignore_errors=True)",
        "shutil.rmtree(os.path.join(out, 'checkpoints'), ignore_errors=True)",
        "os.remove(out + '/run.json')",
        "os.unlink('run.json', dir_fd=os.open(out, os.O_RDONLY))",
        "os.rename(out, out + '-old')",
        "os.replace('other.txt', out + '/run.json')",
        "shutil.move(out, 'elsewhere')",
        "os.truncate(out + '/telemetry.jsonl', 0)",
        "open(out + '/telemetry.jsonl', 'w')",
        "open(os.path.join('link', 'telemetry.jsonl'), 'a')",
        "os.open(out + '/telemetry.jsonl', os.O_WRONLY | os.O_TRUNC)",
        "os.link(out + '/telemetry.jsonl', 'second')",
        "__import__('pathlib').Path(out, 'run.json').write_text('')",
        "mx.save_safetensors(out + '/checkpoints/00000000.safetensors', {'a': mx.ones(1)})",
        "os.system('rm -rf ' + out)",
        "__import__('subprocess').run(['rm', '-rf', out])",
    ],
)
def test_what_would_destroy_evidence_is_refused_and_nothing_is_lost(desk, deed):
    before = f"if os.path.exists(out) and sys.argv[0] != 'recording':\n    {deed}"
    (desk.folder / "other.txt").write_text("other")
    sys.argv[0] = "recording"
    run = desk.record(text(before))
    (desk.folder / "link").symlink_to("runs/mine")
    found = everything(desk.folder)
    with pytest.raises(ExperimentError, match=r"It was refused, and nothing is lost") as caught:
        desk.replay(run)
    assert "on line 8 of loop.py (`" in str(caught.value) and "if not wb.rebuilding():" in str(caught.value)
    assert everything(desk.folder) == found


def test_a_scripts_own_except_does_not_swallow_it(desk):
    body = "if os.path.exists(out):\n    try:\n        shutil.rmtree(out)\n    except:\n        pass"
    run = desk.record(text(body))
    found = everything(desk.folder)
    with pytest.raises(ExperimentError, match="would delete runs/mine, the run that is replayed"):
        desk.replay(run)
    assert everything(desk.folder) == found


def test_another_run_of_the_script_is_not_deleted_either(desk):
    (desk.folder / "other").mkdir()
    (desk.folder / "other" / "run.json").write_text("{}")
    run = desk.record(text("if os.path.exists(out): shutil.rmtree('other')"))
    with pytest.raises(ExperimentError, match="would delete other, which was there before"):
        desk.replay(run)
    assert (desk.folder / "other" / "run.json").exists()


def test_a_script_that_asks_whether_it_is_replayed_replays(desk):
    run = desk.record(text("if not wb.rebuilding(): shutil.rmtree(out, ignore_errors=True)"))
    assert desk.replay(run).exact and not wb.rebuilding()


def test_the_command_line_says_it_and_exits_with_2(desk):
    run = desk.record(text("shutil.rmtree(out, ignore_errors=True)"))
    said = runs.here("replay", run.path, "--step", 2, "--factory", "loop.py", "--quick")
    assert said.code == 2 and "would delete runs/mine" in said.err and (run.path / "run.json").exists()


def test_what_it_writes_to_files_that_are_there_goes_to_copies_and_it_reads_them_back(desk):
    before = """
import json
from pathlib import Path
log = open("train.log", "w"); print("begun", file=log); log.close()
with open("more.log", "a") as more: more.write("more")
os.makedirs(out, exist_ok=True)
with open(out + "/args.json", "w") as args: json.dump({"rate": 0.5}, args)
with open(out + "/args.json") as args: assert json.load(args) == {"rate": 0.5}
Path(out, "note.txt").write_text("a note")
np.save("cache.npy", np.arange(3)); assert np.load("cache.npy").sum() == 3
mx.save_safetensors("w", {"a": mx.ones(2)}); assert mx.load("w.safetensors")["a"].sum().item() == 2
"""
    run = desk.record(text(before, inside="Path('steps.log').write_text('a step')"))
    (run.path / "note.txt").unlink()
    found = everything(desk.folder)
    trace = desk.replay(run)
    assert trace.exact and everything(desk.folder) == found
    said = [one for one in trace.notices if "scratch copy" in one]
    names = ("train.log", "more.log", "args.json", "note.txt", "cache.npy", "w.safetensors", "steps.log")
    assert [name in one for name, one in zip(names, said, strict=True)] == [True] * len(names)
    assert "on line 10 of loop.py" in said[0] and "no file was made there" in said[3]


MAKING = """
from pathlib import Path
Path("scratch.txt").write_text("x"); os.rename("scratch.txt", "moved.txt"); os.remove("moved.txt")
os.makedirs("made", exist_ok=True); Path("made/new.txt").write_text("x"); shutil.rmtree("made")
Path("new.txt").write_text("x")
"""


def test_what_it_made_itself_it_may_delete_and_new_files_are_made(desk):
    run = desk.record(text(MAKING))
    (desk.folder / "new.txt").unlink()
    assert desk.replay(run).exact and (desk.folder / "new.txt").read_text() == "x"


def test_a_factory_is_watched_too(desk, monkeypatch):
    run = desk.record(text())
    body = text().replace("OUT", "'runs/mine'").replace("out = ", "    out = ")
    lines = "\n".join(f"    {line}" for line in body.splitlines() if not line.startswith(("import", "    out")))
    made = "import os, shutil, sys\nimport mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim, numpy as np\n"
    made += "import workbench as wb\ndef build():\n    global model, optimizer\n"
    made += "    out = 'runs/mine'\n    shutil.rmtree(out)\n"
    (desk.folder / "destroying.py").write_text(made + lines)
    with pytest.raises(ExperimentError, match=r"the factory 'destroying:build' would delete runs/mine"):
        desk.replay(run, "destroying:build")
    assert (run.path / "run.json").exists()
    sys.modules.pop("destroying", None)


def test_afterwards_nothing_is_watched(desk):
    run = desk.record(text())
    desk.replay(run)
    assert not guards._guards and open is OPEN and mx.save_safetensors is SAVE
    shutil.rmtree(run.path)
    assert not run.path.exists()


# --------------------------------------------------------------------------------- where it ran, and what it raises


@pytest.mark.parametrize(
    ("before", "inside"),
    [
        ("", "import beside; gradients = beside.same(gradients)"),
        ("sys.path.append(os.path.abspath('lib'))", "import in_lib"),
        ("import pickle\nclass Q: pass\nblob = pickle.dumps(Q())", "pickle.loads(blob)"),
        ("out = os.path.abspath(out); os.chdir('lib')", "open('in_lib.py').close()"),
        ("", "assert sys.argv[1:] == ['--rate', '3']"),
    ],
    ids=["a module beside it", "sys.path", "__main__", "the working folder", "sys.argv"],
)
def test_a_step_finds_what_it_found(desk, before, inside):
    (desk.folder / "lib").mkdir()
    (desk.folder / "lib" / "in_lib.py").write_text("")
    (desk.folder / "beside.py").write_text("def same(gradients): return gradients\n")
    sys.argv[1:] = ["--rate", "3"]
    run = desk.record(text(before, inside))
    for name in ("beside", "in_lib"):
        sys.modules.pop(name, None)
    sys.argv[1:] = []
    here = os.getcwd(), list(sys.path), sys.modules["__main__"], list(sys.argv)
    assert desk.replay(run).exact
    assert (os.getcwd(), sys.path, sys.modules["__main__"], sys.argv) == here


@pytest.mark.parametrize(
    ("after", "inside", "words"),
    [
        (
            "history = []",
            "history.append(1)",
            ("NameError", "history is bound on line 21 of loop.py, after the Recorder"),
        ),
        ("def scaled(g): return g", "gradients = scaled(gradients)", ("NameError", "scaled is bound on line 21")),
        ("model.rate = 1", "model.rate", ("AttributeError", "rate is bound on line 21 of loop.py, after the Recorder")),
        ("", "recorder.step_number", ("NameError", "recorder is what line 20 of loop.py makes of the Recorder")),
        ("flag = 1", "open('gone.txt') if 'flag' not in globals() else 0", ("FileNotFoundError", "gone.txt")),
    ],
)
def test_what_a_step_raises_is_named_with_its_line(desk, after, inside, words):
    run = desk.record(text(inside=inside, after=after))
    with pytest.raises(ReplayError) as caught:
        desk.replay(run)
    said = str(caught.value)
    assert said.startswith("step 1 could not be replayed: the code of the run's own raised ")
    assert "loop.py, line 16)" in said and all(word in said for word in words)
    shown = runs.here("replay", run.path, "--step", 2, "--factory", "loop.py", "--quick")
    assert shown.code == 2 and said in shown.err


SAMPLER = """
class Drawn:
    def __init__(self): self.at = 0
    def __iter__(self): return self
    def __next__(self):
        import beside
        if self.at == 3: raise StopIteration
        if FAILS: raise OSError("the disk is gone")
        self.at += 1
        return mx.full((2, 4), float(self.at)) * beside.SCALE
    def state_dict(self): return {"at": self.at}
    def load_state_dict(self, state): self.at = state["at"]
FAILS = os.path.exists("gone")
"""
DRAWING = """
recorder = wb.Recorder(out, model, optimizer, loss_fn, Drawn(), compile=False)
for batch in recorder.batches():
    recorder.step(batch)
recorder.close()
"""


def test_a_sampler_runs_where_it_ran_too(desk):
    (desk.folder / "beside.py").write_text("SCALE = 0.5\n")
    run = desk.record(text(SAMPLER, loop=DRAWING))
    sys.modules.pop("beside", None)
    assert desk.replay(run, step=3).exact
    assert "user:loop" in run.manifest.segments[-1].code
    (desk.folder / "gone").touch()
    with pytest.raises(ReplayError, match=r"OSError: the disk is gone \(loop.py, line 14\)"):
        desk.replay(run)
    said = runs.here("replay", run.path, "--step", 2, "--factory", "loop.py", "--quick")
    assert said.code == 2 and "OSError: the disk is gone" in said.err
    sys.modules.pop("beside", None)


def test_a_sampler_in_a_module_of_its_own_is_still_compared_with_the_one_that_recorded(desk):
    module = desk.folder / "drawing.py"
    source = SAMPLER.replace("import beside", "").replace(" * beside.SCALE", "")
    module.write_text("import os\nimport mlx.core as mx\n" + source)
    run = desk.record(text("from drawing import Drawn", loop=DRAWING))
    sys.modules.pop("drawing")
    assert desk.replay(run, step=3).exact
    sys.modules.pop("drawing")
    module.write_text(module.read_text().replace("(2, 4)", "(3, 4)"))
    with pytest.raises(wb.WorkbenchError, match="the code of drawing: recorded"):
        desk.replay(run, step=3)
    sys.modules.pop("drawing")


def test_other_commands_say_it_too(desk):
    run = desk.record(text(inside="history.append(1)", after="history = []"))
    said = runs.here("whatif", run.path, "--step", 2, "--set", "lr=0.5x", "--factory", "loop.py")
    assert said.code == 2 and "NameError: name 'history' is not defined" in said.err and "line 21" in said.err


@pytest.mark.parametrize(
    ("opening", "inside", "kind"),
    [
        ("with open('train.log', 'w') as log:", "log.write('x')", "with"),
        ("try:", "CLEARED[0]", "try"),
    ],
)
def test_a_with_or_finally_that_has_ended_is_named(desk, opening, inside, kind):
    body = text("CLEARED = [1]", inside=inside).replace("def step", "if True:\n  pass\ndef step")
    head, _, loop = body.partition("recorder = ")
    ending = "\nfinally:\n    CLEARED.clear()" if kind == "try" else ""
    inner = "\n".join(f"    {line}" for line in ("recorder = " + loop).splitlines())
    run = desk.record(f"{head}{opening}\n{inner}{ending}\n")
    with pytest.raises(ReplayError, match=f"The Recorder is made inside the `{kind}` of line 22, which ended"):
        desk.replay(run)


def test_a_replay_that_a_finally_made_another_says_so(desk):
    inside = "gradients = {name: RATE[0] * one for name, one in gradients.items()}"
    head, _, loop = text("RATE = [0.5]", inside=inside).partition("recorder = ")
    inner = "\n".join(f"    {line}" for line in ("recorder = " + loop).splitlines())
    run = desk.record(f"{head}try:\n{inner}\nfinally:\n    RATE[0] = 1.0\n")
    trace = desk.replay(run)
    assert not trace.exact and any("inside the `try` of line 20, which ended" in one for one in trace.notices)


def test_a_bare_except_around_the_recorder_is_no_obstacle(desk):
    head, _, loop = text().partition("recorder = ")
    inner = "\n".join(f"    {line}" for line in ("recorder = " + loop).splitlines())
    run = desk.record(f"{head}try:\n{inner}\nexcept:\n    sys.exit('went wrong')\n")
    assert desk.replay(run).exact


# ------------------------------------------------------------------------------------------------ several recorders

SEVERAL = """
def made(rate):
    model, optimizer = nn.Linear(4, 1), optim.Adam(1e-2)
    def step(x):
        loss, gradients = nn.value_and_grad(model, loss_fn)(model, x)
        gradients = {name: rate * one for name, one in gradients.items()}
        optimizer.update(model, gradients)
        return loss
    return model, optimizer, step
"""


def several(together):
    parts = (
        "recorders = []\nfor number, rate in enumerate((1.0, 0.5, 0.25)):\n    model, optimizer, step = made(rate)\n"
    )
    parts += "    recorders.append(wb.Recorder(f'{out}{number}', model, optimizer, step_fn=step))\n"
    train = "for recorder in {}:\n    for _ in range(2): recorder.step(mx.ones((2, 4)))\n    recorder.close()\n"
    if together:
        return SEVERAL + parts + train.format("recorders")
    return SEVERAL + parts + "".join(f"    {line}\n" for line in train.format("recorders[-1:]").splitlines())


@pytest.mark.parametrize("number", [0, 1, 2])
def test_of_several_recorders_it_is_the_one_of_the_run(desk, number):
    assert desk.replay(recorded_as(desk, HEAD.format(before="") + several(together=True), number)).exact


def recorded_as(desk, body, number):
    """The script's number-th run; counts its recorders from 1, as a process of its own does."""
    from workbench import script

    script._made = 0
    with contextlib.suppress(wb.WorkbenchError):  # there is no run in "runs/mine" itself
        desk.record(body)
    return wb.open_run(desk.folder / f"runs/mine{number}")


@pytest.mark.parametrize("number", [0, 1, 2])
def test_of_a_run_that_was_moved_it_is_the_one_that_was_made_as_that(desk, number):
    recorded_as(desk, HEAD.format(before="") + several(together=True), number)
    (desk.folder / f"runs/mine{number}").rename(desk.folder / "moved")
    assert desk.replay(wb.open_run(desk.folder / "moved")).exact


def test_an_older_run_that_was_moved_takes_none_whose_folder_holds_another(desk):
    recorded_as(desk, HEAD.format(before="") + several(together=True), 1)
    (desk.folder / "runs/mine1").rename(desk.folder / "moved")
    runs.edit_json(desk.folder / "moved" / "run.json", lambda document: document["rebuild"].pop("recorder"))
    assert desk.replay(wb.open_run(desk.folder / "moved")).exact


def test_one_that_comes_after_a_training_is_refused_and_nothing_is_trained(desk):
    first = recorded_as(desk, HEAD.format(before="") + several(together=False), 0)
    assert desk.replay(first).exact
    found = everything(desk.folder)
    second = wb.open_run(desk.folder / "runs/mine1")
    with pytest.raises(ExperimentError, match=r"makes the run runs/mine0 first, and trains it before") as caught:
        desk.replay(second)
    assert "--factory module:function" in str(caught.value) and everything(desk.folder) == found


# ------------------------------------------------------------------------------------------- python -m, and names


@pytest.fixture
def package(desk):
    """A run of `python -m pkg.train`, whose module imports relatively."""
    folder = desk.folder / "pkg"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "parts.py").write_text("RATE = 1.0\n")
    (folder / "train.py").write_text(text("from .parts import RATE").replace("OUT", "sys.argv[1]"))
    subprocess.run([sys.executable, "-W", "ignore", "-m", "pkg.train", "runs/pkg"], check=True)
    return wb.open_run(desk.folder / "runs/pkg")


@pytest.mark.filterwarnings("ignore::ImportWarning")  # of the relative import, before it fails
def test_what_was_run_as_a_module_is_run_as_one(desk, package):
    assert package.manifest.rebuild["module"] == "pkg.train" and package.manifest.rebuild["recorder"] == 1
    with pytest.raises(ExperimentError, match=r"--factory pkg/train\.py$"):
        package.replay(2)
    for factory in ("pkg/train.py", "pkg.train"):
        trace = desk.replay(package, factory)
        assert trace.exact
        for name in ("pkg", "pkg.parts"):
            sys.modules.pop(name, None)
    runs.edit_json(package.path / "run.json", lambda document: document["rebuild"].pop("module"))
    older = wb.open_run(package.path)
    with pytest.raises(ExperimentError, match=r"relative import.*--factory pkg\.train \(factory=\)"):
        desk.replay(older, "pkg/train.py")
    assert desk.replay(older, "pkg.train").exact
    for name in ("pkg", "pkg.parts"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("factory", "words"),
    [("train.ipynb", "is a notebook, and a replay runs no notebook"), ("nowhere", "is no module that is found from")],
)
def test_what_is_no_code_is_a_sentence(desk, factory, words):
    run = desk.record(text())
    said = runs.here("replay", run.path, "--step", 2, "--factory", factory)
    assert said.code == 2 and words in said.err


def test_a_factory_that_parses_arguments_gets_none_of_the_workbench(desk):
    run = desk.record(text())
    (desk.folder / "parsing.py").write_text(
        "import argparse\nparser = argparse.ArgumentParser(); parser.add_argument('needed'); parser.parse_args()\n"
    )
    said = runs.here("replay", run.path, "--step", 2, "--factory", "parsing:build")
    assert said.code == 2 and "can't be imported here: it ended with SystemExit" in said.err
    sys.modules.pop("parsing", None)


def test_a_manifest_that_knows_less_still_replays(desk):
    run = desk.record(text())
    document = json.loads((run.path / "run.json").read_text())
    for name in ("recorder", "module"):
        document["rebuild"].pop(name, None)
    (run.path / "run.json").write_text(json.dumps(document))
    assert desk.replay(wb.open_run(run.path)).exact
