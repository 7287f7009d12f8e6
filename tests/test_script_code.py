"""Which edits of the script that recorded a run touch its steps: those are named and refused, the rest is said."""

import shutil

import helpers
import pytest
import runs

import workbench as wb
from workbench.errors import EnvironmentMismatch
from workbench.script_code import parts_of
from workbench.sources import digest_of

SCRIPT = '''
"""A loop."""
from pathlib import Path
import mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim, numpy as np, workbench as wb
mx.set_default_device(mx.cpu)
mx.random.seed(0)
STEPS = 6
SCALE = 1.0

def scaled(x):
    return x * SCALE

def shown(loss):
    return f"{loss}"

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 1)

    def __call__(self, x):
        return self.inner(scaled(x))

model, optimizer = Net(), optim.Adam(1e-2)

def loss_fn(model, x, y):
    return mx.mean(mx.square(model(x) - y))

recorder = wb.Recorder(Path(__file__).parent / "run", model, optimizer, loss_fn, save_every=4)
draw = np.random.default_rng(0)
for _ in range(STEPS):
    x = mx.array(draw.standard_normal((4, 3)).astype(np.float32))
    shown(recorder.step((x, x.sum(1, keepdims=True))))
recorder.close()
'''


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("script")
    (folder / "loop.py").write_text(SCRIPT)
    done = helpers.python(folder / "loop.py")
    assert done.returncode == 0, done.stderr
    return wb.open_run(folder / "run")


def replayed(run, folder, old="", new="", name="loop.py", **options):
    assert old in SCRIPT
    (folder / name).write_text(SCRIPT.replace(old, new) if old else SCRIPT)
    return run.replay(6, factory=str(folder / name), with_probe=False, repeat=False, fresh_process=False, **options)


def test_as_it_was(recorded, tmp_path):
    trace = replayed(recorded, tmp_path)
    assert trace.exact and trace.notices == []
    code = recorded.manifest.segments[0].code
    parts = {name.partition(":")[2] for name in code if name.startswith("script:")}
    assert parts == {"Net", "model", "optimizer", "loss_fn", "scaled", "SCALE"}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("STEPS = 6", "STEPS = 60"),
        ("save_every=4", "save_every=4, resume=True"),
        ('f"{loss}"', 'f"{loss:.3f}"'),
        ("standard_normal((4, 3))", "standard_normal(size=(4, 3))"),
    ],
)
def test_an_edit_beside_the_step_is_said_and_replays(recorded, tmp_path, old, new):
    trace = replayed(recorded, tmp_path, old, new)
    assert trace.exact and trace.notices == [
        "the script loop.py is not as it was when it recorded; what its steps are made of is unchanged"
    ]


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ("mx.square(model(x) - y)", "mx.abs(model(x) - y)", "loss_fn"),
        ("self.inner(scaled(x))", "self.inner(scaled(x)) * 1", "Net"),
        ("SCALE = 1.0", "SCALE = 2.0", "SCALE"),
        ("return x * SCALE", "return SCALE * x", "scaled"),
    ],
)
def test_an_edit_of_the_step_is_named_and_refused(recorded, tmp_path, old, new, name):
    with pytest.raises(EnvironmentMismatch, match=rf"the code of {name}: recorded \w+, here \w+ .*--other-environment"):
        replayed(recorded, tmp_path, old, new)
    with pytest.raises(EnvironmentMismatch, match=rf"the code of {name}: "):
        replayed(recorded, tmp_path, old, new, name="renamed.py")
    trace = replayed(recorded, tmp_path, old, new, other_environment=True)
    assert "informational" in trace.sentence()
    checks = recorded.verify(replay=2, factory=str(tmp_path / "loop.py"), other_environment=True).checks
    assert all(f"the code of {name}" in one.detail or one.verdict == "mismatch" for one in checks if one.kind == "step")


def test_comments_and_docstrings_are_no_edit(recorded, tmp_path):
    trace = replayed(recorded, tmp_path, '"""A loop."""', '"""Another text."""  # and a comment')
    assert trace.exact and trace.notices == []


def test_a_run_from_before_is_said_to_have_noted_less(tmp_path):
    (tmp_path / "loop.py").write_text(SCRIPT)
    assert helpers.python(tmp_path / "loop.py").returncode == 0

    def change(document):
        for segment in document["segments"]:
            segment["code"] = {name: one for name, one in segment["code"].items() if not name.startswith("script:")}

    runs.edit_json(tmp_path / "run" / "run.json", change)
    trace = replayed(wb.open_run(tmp_path / "run"), tmp_path, "STEPS = 6", "STEPS = 7")
    assert trace.exact and trace.notices == [
        "the script loop.py is not as it was when it recorded; whether that touches its steps was not noted then"
    ]


# ------------------------------------------------------------------------------------------------------ what is reached


def reached(source, *names):
    return set(parts_of(source, names, digest_of))


def test_from_the_recorder_through_what_a_definition_names():
    source = "a = 1\nb = a\ndef f(x):\n    def g(y): return y + b\n    return g\nc = 2\nR = wb.Recorder('p', f, c=c)\n"
    assert reached(source) == {"f", "b", "a"}
    assert reached("def f(a): return a\na = 1\n", "f") == {"f"}  # its own argument


def test_within_a_function_and_beside_loops():
    source = """
def main():
    k = 2
    def loss(m, x): return k * m(x)
    with open('log') as log, Recorder('run', model=make(), loss_fn=loss) as recorder:
        for i in range(9):
            seen = recorder.step(i)
def make(): return other
def unused(): return main
"""
    assert reached(source) == {"loss", "k", "make"}
    assert reached("for n in range(3):\n    k = n\n    def f(x): return k\n", "f") == {"f"}  # k is of a round


def test_every_binding_of_a_name_counts_and_of_a_recorder_none():
    one = parts_of("k = 1\nk += 1\ndef f(): return k, rec\nrec = Recorder('a', f)\n", (), digest_of)
    two = parts_of("k = 1\nk += 2\ndef f(): return k, rec\nrec = Recorder('b', f, resume=True)\n", (), digest_of)
    assert one.keys() == two.keys() == {"f", "k"} and one["f"] == two["f"] and one["k"] != two["k"]


def test_what_is_no_python_is_no_digest():
    with pytest.raises(SyntaxError):
        parts_of("def (", ("f",), digest_of)
    assert parts_of("", ("f",), digest_of) == {}


def test_a_resume_with_another_step_says_so_and_both_parts_replay(tmp_path):
    """Each with the script of its time; a longer run of the same steps is not worth a word."""
    folder = tmp_path / "loop"
    folder.mkdir()
    goes_on = SCRIPT.replace("save_every=4", 'save_every=4, resume="auto"')
    goes_on = goes_on.replace("mx.random.seed(0)", "__import__('warnings').simplefilter('default'); mx.random.seed(0)")
    for steps, old, new, told in ((6, "", "", False), (9, "", "", False), (12, "SCALE = 1.0", "SCALE = 0.5", True)):
        text = goes_on.replace("STEPS = 6", f"STEPS = {steps}").replace(old, new) if old else goes_on
        (folder / "loop.py").write_text(text.replace("STEPS = 6", f"STEPS = {steps}"))
        done = helpers.python(folder / "loop.py")
        assert done.returncode == 0, done.stderr
        assert ("goes on with other code than it was recorded with: the code of SCALE" in done.stderr) == told
    run = wb.open_run(folder / "run")
    assert run.last_step == 12
    for step, scale, exact in ((7, "1.0", True), (11, "0.5", True)):
        (folder / "loop.py").write_text(goes_on.replace("SCALE = 1.0", f"SCALE = {scale}"))
        trace = run.replay(step, factory=str(folder / "loop.py"), with_probe=False, repeat=False, fresh_process=False)
        assert trace.exact is exact, trace.sentence()


def test_a_resume_from_a_damaged_checkpoint_names_the_one_before(recorded, tmp_path):
    folder = tmp_path / "loop"
    shutil.copytree(recorded.path.parent, folder)
    file = max((folder / "run" / "checkpoints").glob("????????.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"\x7f")
    (folder / "loop.py").write_text(SCRIPT.replace("save_every=4", "save_every=4, resume=True"))
    done = helpers.python(folder / "loop.py")
    assert done.returncode == 1
    assert done.stderr.strip().endswith("Go on from an earlier checkpoint: resume=4 (--resume 4)"), done.stderr
