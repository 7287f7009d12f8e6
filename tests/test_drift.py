"""Another machine, library, corpus or code than recorded: named before the replay, refused or informational as the user
chooses, and never exact by accident."""

import re
import sys
import textwrap

import mlx.core as mx
import numpy as np
import pytest
import runs

from workbench import environment, sources
from workbench.environment import differences, numeric_environment
from workbench.errors import DataError, EnvironmentMismatch
from workbench.experiment import Experiment, StepOptions
from workbench.run import open_run
from workbench.sources import changed, code_of, digest_of


@pytest.fixture
def run(tmp_path):
    return runs.recorded(tmp_path)


CHANGES = {
    "another mlx": ("mlx", "0.31.0"),
    "another default dtype": ("default_dtype", "float16"),
    "another device": ("device", "another processor"),
    "another numpy": ("numpy", "1.0"),
    "compilation switched off": ("compile_disabled", True),
    "denormals flushed": ("flush_to_zero", True),
    "another compiler": ("jit_compiler", "g++ 1.2.3"),
}


def recorded_elsewhere(path, name, value):
    def change(document):
        for segment in document["segments"]:
            segment["environment"][name] = value

    runs.edit_json(path / "run.json", change)
    return open_run(path)


@pytest.mark.parametrize("what", CHANGES)
def test_what_differs_is_named_before_the_replay_and_the_user_chooses(run, what):
    name, value = CHANGES[what]
    opened, performed = recorded_elsewhere(run, name, value), []
    with pytest.raises(
        EnvironmentMismatch, match=re.escape(f"{name}: recorded {value}, here ") + ".*--other-environment"
    ):
        opened.replay(6, progress=lambda *said: performed.append(said))
    assert performed == []
    trace = opened.replay(6, other_environment=True, with_probe=False, fresh_process=False)
    assert "informational" in trace.sentence() and trace.record.environment_differences


def test_another_blas_is_named_by_its_name_and_digest(run):
    def change(document):
        document["segments"][0]["environment"]["blas"] = {"library": "libopenblas.so.0", "sha256": "0" * 16}

    runs.edit_json(run / "run.json", change)
    with pytest.raises(
        EnvironmentMismatch, match=r"blas.library: recorded libopenblas.so.0.*blas.sha256: recorded 0000"
    ):
        open_run(run).replay(6)


def test_the_command_line_names_it_too_and_never_says_plain_exact(run):
    recorded_elsewhere(run, "mlx", "0.31.0")
    said = runs.here("replay", run, "--step", 6)
    assert "mlx: recorded 0.31.0" in said.sentence
    done = runs.here("replay", run, "--step", 6, "--other-environment", "--no-probe", "--no-fresh-process")
    assert "mlx: recorded 0.31.0" in done.err and "informational" in done.out


def test_a_changed_corpus_is_named(run, tmp_path):
    copy = tmp_path / "corpus.txt"
    content = bytearray(runs.corpus().read_bytes())
    content[1000] ^= 1
    copy.write_bytes(content)
    runs.edit_json(run / "run.json", lambda document: document["data"][0].update(path=str(copy)))
    with pytest.raises(DataError, match=r"corpus.txt has changed: found .* expected"):
        open_run(run).replay(6, other_environment=True)


# -------------------------------------------------------------------------------------------- what MLX can't be asked


@pytest.fixture
def uncompiled(monkeypatch):
    monkeypatch.delenv("MLX_DISABLE_COMPILE", raising=False)
    mx.disable_compile()
    yield
    mx.enable_compile()


def test_compilation_that_was_switched_off_by_a_call_is_noticed(uncompiled):
    there = numeric_environment()
    assert there["compile_disabled"] is True
    mx.enable_compile()
    assert numeric_environment()["compile_disabled"] is None
    assert differences(numeric_environment(), there) == ["compile_disabled: recorded nothing, here True"]


def test_looking_does_not_move_the_random_state():
    mx.random.seed(5)
    before = np.array(mx.random.state[0]).tolist()
    numeric_environment()
    assert np.array(mx.random.state[0]).tolist() == before


def test_a_run_is_refused_where_compilation_was_switched_off(run, uncompiled):
    with pytest.raises(EnvironmentMismatch, match="compile_disabled: recorded nothing, here True"):
        open_run(run).replay(6)


def test_flushing_denormals_is_noticed(monkeypatch):
    assert environment._flushes_to_zero() is None
    monkeypatch.setattr(environment.np, "float32", lambda value: np.float64(0.0))
    assert environment._flushes_to_zero() is True


# ------------------------------------------------------------------------------------------------------------- the code

MINE = '''
"""My job."""
from beside import SCALE
import mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim
import runs
from workbench.experiment import Experiment, StepOptions

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 1)

    def __call__(self, x):
        return self.inner(x) * SCALE

def loss(model, x, y):
    return mx.mean(mx.square(model(x) - y))

def build():
    mx.random.seed(1)
    return Experiment(Net(), optim.AdamW(1e-2, bias_correction=True), loss, runs.Numbers(), StepOptions(compile=False))
'''


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A factory in a file of its own, which imports another one; and a run recorded with it, in another process."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "myjob.py").write_text(MINE)
    (folder / "beside.py").write_text("SCALE = 1.0\n")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(str(folder))
    import helpers

    record = textwrap.dedent("""
        import mlx.core as mx
        mx.set_default_device(mx.cpu)
        import sys; sys.path[:0] = [".", sys.argv[1]]
        import myjob
        from workbench.record import Recorder
        job = myjob.build()
        with Recorder("run", job.model, job.optimizer, job.loss_fn, job.sampler, compile=False,
                      factory="myjob:build") as recorder:
            for batch in recorder.batches(4):
                recorder.step(batch)
    """)
    done = helpers.python("-c", record, str(helpers.__file__).rpartition("/")[0])
    assert not getattr(done, "returncode", 0), done
    yield folder
    for name in ("myjob", "beside"):
        sys.modules.pop(name, None)


def forgotten():
    for name in ("myjob", "beside"):
        sys.modules.pop(name, None)


def test_unchanged_code_replays_exactly(mine):
    code = open_run(mine / "run").manifest.segments[0].code
    assert {"user:myjob", "user:beside", "step"} <= code.keys() and not any("mlx" in name for name in code)
    assert open_run(mine / "run").replay(3, factory="myjob:build", fresh_process=False).exact


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [("myjob.py", "model(x) - y", "y - model(x)"), ("beside.py", "1.0", "2.0"), ("beside.py", "1.0", "0.5 + 0.5")],
)
def test_a_changed_factory_or_what_it_imports_is_named_although_the_bits_may_agree(mine, file, old, new):
    path = mine / file
    path.write_text(path.read_text().replace(old, new))
    run = open_run(mine / "run")
    with pytest.raises(
        EnvironmentMismatch, match=rf"the code of {path.stem}: recorded \w+, here \w+.*--other-environment"
    ):
        run.replay(3, factory="myjob:build")
    forgotten()
    trace = run.replay(3, factory="myjob:build", other_environment=True, fresh_process=False)
    assert "informational" in trace.sentence()
    assert trace.record.environment_differences[0].startswith(f"the code of {path.stem}: recorded ")


def test_comments_docstrings_and_layout_are_no_change(mine):
    path = mine / "myjob.py"
    text = path.read_text().replace('"""My job."""', '"""Mine, still.\n\nMore."""\n# a comment')
    path.write_text(text.replace("    def __call__(self, x):\n", "    def __call__(self, x):  # forward\n\n"))
    assert open_run(mine / "run").replay(3, factory="myjob:build", fresh_process=False).exact


def test_a_changed_trainer_is_named(run, monkeypatch):
    real = sources.digest_of_file
    monkeypatch.setattr(sources, "digest_of_file", lambda path: "f" * 16 if path.stem == "schedule" else real(path))
    with pytest.raises(EnvironmentMismatch, match="the code of trainer.schedule: recorded .* here ffffffffffffffff"):
        open_run(run).replay(6)
    assert "informational" in open_run(run).replay(6, other_environment=True, with_probe=False).sentence()


def test_a_run_from_before_says_nothing_of_its_code_and_replays(run):
    def change(document):
        for segment in document["segments"]:
            del segment["code"]

    runs.edit_json(run / "run.json", change)
    assert open_run(run).manifest.segments[0].code is None
    assert open_run(run).replay(6, with_probe=False, fresh_process=False).exact


def test_going_on_with_other_code_opens_a_segment(run, monkeypatch):
    assert runs.here("train", "--out", run, "--resume", "--steps", 13).code == 0
    assert len(open_run(run).manifest.segments) == 1
    real = sources.digest_of_file
    monkeypatch.setattr(sources, "digest_of_file", lambda path: "e" * 16 if path.stem == "model" else real(path))
    with pytest.warns(UserWarning, match=r"goes on with other code .*: the code of trainer.model"):
        assert runs.here("train", "--out", run, "--resume", "--steps", 14).code == 0
    segments = open_run(run).manifest.segments
    assert len(segments) == 2 and segments[1].code["trainer.model"] == "e" * 16 != segments[0].code["trainer.model"]


def test_what_counts_as_a_change_of_code():
    one = b'"""Docs."""\nx = 1\n\n\ndef f(a):\n    """More."""\n    return a  # so\n'
    same = b"x = 1\ndef f(a):\n\n    # a comment\n    return a\n"
    assert digest_of(one) == digest_of(same)
    for other in (
        b"x = 2\ndef f(a):\n    return a\n",
        b"x = 1\ndef f(a):\n  pass\nreturn a\n",
        b'x = "1"\ndef f(a):\n    return a\n',
    ):
        assert digest_of(other) != digest_of(one)
    assert digest_of(b"x = '''a\nb'''\n") != digest_of(b"x = '''a\nc'''\n")
    assert digest_of(b"def (") != digest_of(b"def ((")  # no Python: its bytes


def test_only_what_both_sides_know_is_compared():
    assert changed([{"a": "1", "gone": "2"}, None], {"a": "1", "new": "3"}) == []
    assert changed([{"user:a": "1"}, {"user:a": "1"}], {"user:a": "2"}) == ["the code of a: recorded 1, here 2"]


def test_a_script_that_is_run_is_known_by_its_name(tmp_path):
    import types

    module = types.ModuleType("__main__")
    module.__file__ = str(tmp_path / "train.py")
    assert sources._name(module) == "train"


def test_a_loss_that_is_partial_or_compiled_is_found():
    import functools

    job = runs.build()
    wrapped = Experiment(
        job.model, job.optimizer, functools.partial(job.loss_fn), job.sampler, StepOptions(compile=False)
    )
    assert "user:runs" in code_of(wrapped, {"kind": "none"})
