"""Files that a step opens by itself are noted with what was in them, and a replay says which is another now."""

import builtins
import hashlib
import json
import os
import sys
import threading

import helpers
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
import runs
from helpers import Points, mlp, mse
from mlx.utils import tree_map

import workbench as wb
from workbench import files_read
from workbench.files_read import ReadFile, described, differences, reads


def open_it(path):
    with open(path, "rb") as file:
        return file.read()


WAYS = {
    "open": open_it,
    "pathlib": lambda path: path.read_bytes(),
    "os.open": lambda path: os.close(os.open(path, os.O_RDONLY)),
    "np.load": lambda path: np.load(path),
    "np.load, mapped": lambda path: np.load(path, mmap_mode="r"),
    "np.memmap": lambda path: np.memmap(path, np.uint8, "r"),
    "np.fromfile": lambda path: np.fromfile(path, np.uint8),
    "mx.load": lambda path: mx.load(str(path)),
}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "batch.npy"
    np.save(path, np.arange(3, dtype=np.float32))
    return path


@pytest.mark.parametrize("way", WAYS)
def test_however_it_is_opened(file, way):
    with reads() as found:
        WAYS[way](file)
        WAYS[way](file)
    assert found == [str(file)]


def test_what_is_no_file_of_data_is_left_out(tmp_path, file):
    with reads() as found:
        for path in (np.__file__, "/proc/self/status", "/etc/hostname", os.devnull, sys.executable):
            open_it(path)
        (tmp_path / "out.txt").write_text("x")
        with (tmp_path / "out.txt").open("a") as log, (tmp_path / "out.txt").open("r+"):
            log.write("y")
        os.close(os.open(tmp_path / "out.txt", os.O_WRONLY))
        with pytest.raises(FileNotFoundError):
            open_it(tmp_path / "missing")
        thread = threading.Thread(target=open_it, args=(file,))
        thread.start()
        thread.join()
    assert found == []


def test_afterwards_everything_is_as_before(file):
    before = builtins.open, os.open, mx.load
    with pytest.raises(KeyError), reads() as found:
        open_it(file)
        raise KeyError
    assert (builtins.open, os.open, mx.load) == before and found == [str(file)]
    open_it(file)
    assert found == [str(file)]


def test_a_file_is_known_by_its_content(tmp_path, file, monkeypatch):
    [found] = described([str(file)])
    content = file.read_bytes()
    status = file.stat()
    assert found == ReadFile(str(file), len(content), status.st_mtime_ns, hashlib.sha256(content).hexdigest())
    os.utime(file, ns=(1, 1))
    assert differences([found]) == []  # a copy of it is as good
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert differences([found]) == [
        f"the step reads {file} by itself, and its content is another than when the run was recorded "
        f"({len(content)} bytes then, {len(content)} now)"
    ]
    file.unlink()
    assert differences([found]) == [f"the step reads {file} by itself, and that can't be read any more"]
    assert described([str(file)]) == []


def test_one_too_large_for_a_digest_is_known_by_size_and_time(file, monkeypatch):
    monkeypatch.setattr(files_read, "SMALL", 10)
    [found] = described([str(file)])
    assert found.sha256 is None and differences([found]) == []
    os.utime(file, ns=(1, 1))
    assert len(differences([found])) == 1 and "it is too large for a digest" in differences([found])[0]


def test_a_pipe_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert described([str(tmp_path / "pipe"), str(tmp_path)]) == []


class Job:
    """Whose step reads the scale of its gradients from a file."""

    def __init__(self, path):
        self.model, self.optimizer = mlp(), optim.SGD(1e-1)
        passes = nn.value_and_grad(self.model, mse)

        def step(x, y):
            loss, gradients = passes(self.model, x, y)
            scale = float(np.load(path)[1])
            self.optimizer.update(self.model, tree_map(lambda one: one * scale, gradients))
            return loss

        self.step = step

    def experiment(self):
        return wb.Experiment(self.model, self.optimizer, mse, Points(), step_fn=self.step)


def test_a_replay_says_which_of_them_is_another(tmp_path, file):
    job = Job(file)
    said = f"the step reads {file} by itself, and a replay reads what is in it then (its size and digest are noted; "
    with (
        pytest.warns(UserWarning) as warned,
        wb.Recorder(tmp_path / "run", job.model, job.optimizer, mse, Points(), step_fn=job.step) as recorder,
    ):
        for batch in recorder.batches(3):
            recorder.step(batch)
    assert [str(one.message).startswith(said) for one in warned] == [True]
    run = wb.open_run(tmp_path / "run")
    assert [line.reads for line in run.telemetry.metas] == [described([str(file)])]
    result = run.replay(2, experiment=Job(file).experiment(), with_probe=False)
    assert result.exact and not any(str(file) in one for one in result.notices)
    np.save(file, np.array([0, 0.5, 2], np.float32))
    result = wb.open_run(tmp_path / "run").replay(2, experiment=Job(file).experiment(), with_probe=False)
    assert not result.exact
    [notice] = [one for one in result.notices if "its content is another than when the run was recorded" in one]
    assert str(file) in notice and any("That is the likely reason" in one for one in result.notices)


def test_a_run_that_someone_sent_has_no_file_looked_at(tmp_path, monkeypatch):
    """Where no code of the user's is run by consent: one of the built-in trainer."""
    folder = runs.recorded(tmp_path)
    files = [{"path": "/etc/hostname", "bytes": 1, "changed": 1}]
    first, *rest = (folder / "telemetry.jsonl").read_text().splitlines()
    lines = [json.dumps(json.loads(first) | {"reads": files}), *rest]
    (folder / "telemetry.jsonl").write_text("\n".join(lines) + "\n")
    helpers.reseal(folder)
    assert wb.open_run(folder).telemetry.metas[0].reads == [ReadFile("/etc/hostname", 1, 1)]
    monkeypatch.setattr(files_read, "_described", lambda path: pytest.fail(path))
    assert wb.open_run(folder).replay(6, with_probe=False).exact


def test_a_step_that_reads_nothing_has_none(tmp_path):
    with wb.Recorder(tmp_path / "run", mlp(), optim.SGD(1e-2), mse, Points()) as recorder:
        for batch in recorder.batches(2):
            recorder.step(batch)
    assert b'"reads"' not in (tmp_path / "run" / "telemetry.jsonl").read_bytes()
