"""Situations that users of other tools met with checkpoint files, an experiment each: group C of the cases."""

import os
import shutil
import signal
import subprocess
import sys
import traceback

import mlx.core as mx
import numpy as np
import pytest
import runs
from helpers import assert_same_state, repair_commit
from recordings import record, recorder

from workbench import open_run
from workbench.checkpoints import checkpoint_reader
from workbench.errors import CheckpointError, ReplayError


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return record(tmp_path_factory.mktemp("cases") / "run", 12)


@pytest.fixture
def run(whole, tmp_path):
    return open_run(shutil.copytree(whole.path, tmp_path / "run"))


def weights(run, step=8):
    return run.path / "checkpoints" / f"{step:08d}.safetensors"


# C1: a lazily loaded array silently takes new values when another save overwrites the file in place.


def test_c1_a_state_that_was_read_is_not_changed_by_a_save_over_its_files(run):
    state = checkpoint_reader.read(run.path / "checkpoints", 8, 0)
    before = {path: np.array(array) for path, array in state.weights.items()}
    other = checkpoint_reader.read(run.path / "checkpoints", 12, 0)
    with open(weights(run), "r+b") as file:  # in place, as a tool would that does not rename
        file.write(weights(run, 12).read_bytes())
    assert all(np.array_equal(np.array(state.weights[path]), before[path]) for path in before)
    assert any(not np.array_equal(np.array(other.weights[path]), before[path]) for path in before)
    with pytest.raises(CheckpointError, match="00000008.safetensors was changed: its SHA-256 is"):
        checkpoint_reader.read(run.path / "checkpoints", 8, 0)


# C2: the last kilobyte or the header cut off; a link.


@pytest.mark.parametrize("left", [0, 4, 8, 100, -1024, -1])
def test_c2_a_file_that_was_cut_off_is_named_before_any_array_is_made(run, left):
    content = weights(run).read_bytes()
    if left == -1024:  # a file that is long enough to lose a kilobyte
        left = max(1, len(content) - 1024)
    weights(run).write_bytes(content[:left])
    with pytest.raises(
        CheckpointError, match=rf"00000008.safetensors has \d+ bytes, expected {len(content)}: .*cut off"
    ):
        run.replay(9, experiment=runs.build(), with_probe=False)
    trace = run.replay(9, experiment=runs.build(), with_probe=False, checkpoint=4)  # an older one will do
    assert trace.exact


def test_c2_a_link_is_judged_by_what_it_leads_to(run, tmp_path):
    real = tmp_path / "elsewhere"
    weights(run).rename(real)
    weights(run).symlink_to(real)
    assert run.replay(9, experiment=runs.build(), with_probe=False).exact
    os.truncate(real, 1000)
    with pytest.raises(CheckpointError, match="00000008.safetensors has 1000 bytes"):
        open_run(run.path).replay(9, experiment=runs.build(), with_probe=False)


# C3: killed during a save.

KILLED = """
import os, signal, sys
import runs
from recordings import recorder
real, renamed = os.replace, []

def replace(*arguments):
    renamed.append(arguments)
    real(*arguments)
    if "00000008" in str(arguments[1]) and sum("00000008" in str(to) for _, to in renamed) == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)

os.replace = replace
with recorder(sys.argv[1]) as recording:
    for batch in recording.batches(12):
        recording.step(batch)
        recording._out.saves.checkpointer.wait()
"""


@pytest.mark.parametrize("files", [1, 2, 4])
def test_c3_a_half_saved_checkpoint_is_none_and_the_one_before_it_is_offered(tmp_path, whole, files):
    path = tmp_path / "run"
    tests = os.path.dirname(__file__)
    done = subprocess.run(
        [sys.executable, "-c", KILLED, path, str(files)], env=os.environ | {"PYTHONPATH": tests}, capture_output=True
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    run = open_run(path)
    assert len(list((path / "checkpoints").glob("00000008*"))) == files  # some of its files are there
    assert run.checkpoints == [(0, 0), (4, 0)] and run.last_step == 8
    with pytest.raises(CheckpointError, match="00000008.json does not exist, so there is no checkpoint of step 8"):
        checkpoint_reader.read(path / "checkpoints", 8, 0)
    with pytest.raises(ReplayError, match=r"has no checkpoint 7 before step 8; it has 0, 4 before it"):
        run.replay(8, experiment=runs.build(), checkpoint=7)
    with pytest.raises(CheckpointError, match=r"has no checkpoint of step 8; it has \[0, 4\]"):
        record(path, 12, resume=8)
    trace = run.replay(8, experiment=runs.build(), with_probe=False)
    assert trace.exact and trace.record.checkpoint == 4
    resumed = record(path, 12, resume=True)
    last = checkpoint_reader.read(resumed.path / "checkpoints", 12, resumed.manifest.segments[-1].segment)
    assert_same_state(last, checkpoint_reader.read(whole.path / "checkpoints", 12, 0))


# C4: one parameter without its `.v`; a prefix removed; one layer extra, one missing.


def rewrite(run, suffix, change):
    """Changes the arrays of checkpoint 8, with digests that are right again."""
    path = run.path / "checkpoints" / f"00000008{suffix}"
    mx.save_safetensors(str(path), change(dict(mx.load(str(path)))))
    repair_commit(run.path, "00000008")


@pytest.mark.parametrize(
    ("suffix", "change", "said"),
    [
        (
            ".optimizer.safetensors",
            lambda arrays: {path: array for path, array in arrays.items() if path != "layers.1.weight.v"},
            "the optimizer state of the checkpoint and .* do not fit: missing layers.1.weight.v. Rebuild",
        ),
        (
            ".safetensors",
            lambda arrays: {path.removeprefix("layers."): array for path, array in arrays.items()},
            "the weights of the checkpoint .*: missing layers.0.bias, layers.0.weight, layers.1.bias, layers.1.weight; "
            "unexpected 0.bias, 0.weight, 1.bias, 1.weight. Rebuild",
        ),
        (
            ".safetensors",
            lambda arrays: (
                {path: array for path, array in arrays.items() if not path.startswith("layers.1.")}
                | {"layers.2.weight": mx.zeros((2, 2)), "layers.0.bias": mx.zeros((9,))}
            ),
            r"missing layers.1.bias, layers.1.weight; unexpected layers.2.weight; "
            r"layers.0.bias is mlx.core.float32\(9,\), expected mlx.core.float32\(4,\). Rebuild",
        ),
    ],
    ids=["no v", "prefix", "layers"],
)
def test_c4_what_is_missing_unexpected_and_misshapen_is_listed_by_its_paths(run, suffix, change, said):
    rewrite(run, suffix, change)
    with pytest.raises(CheckpointError, match=said):
        run.replay(9, experiment=runs.build(), with_probe=False)


def test_c4_what_only_one_file_has_is_listed_without_numbers_that_there_are_not(tmp_path):
    """A NaN that is printed beside a tensor is one of the tensor's."""
    ones = mx.ones((2, 2))
    mx.save_safetensors(str(tmp_path / "a.safetensors"), {"same": ones, "both": ones, "lost": ones})
    mx.save_safetensors(str(tmp_path / "b.safetensors"), {"same": ones, "both": mx.nan * ones, "new": ones})
    said = runs.here("checkpoint", tmp_path / "a.safetensors", tmp_path / "b.safetensors").out
    cells = {row.split("│")[1].strip(): row.split("│")[2:-1] for row in said.splitlines() if row.startswith("│")}
    found = {name: [cell.strip() for cell in row] for name, row in cells.items()}
    assert found["lost"] == ["only in a", "float32", "2×2", "-", "-", "-", "-"]
    assert found["new"] == ["only in b", "float32", "2×2", "-", "-", "-", "-"]
    assert found["same"][0] == "equal" and found["same"][3] == "0"
    assert found["both"][0] == "differs" and "NaN" in found["both"][3:]


def test_the_last_line_of_a_resume_from_a_damaged_checkpoint_is_the_only_one(tmp_path):
    run = record(tmp_path / "run", 8)
    file = run.path / "checkpoints" / "00000008.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"Go on from an earlier checkpoint: resume=4 \(--resume 4\)$") as caught:
        recorder(run.path, resume="auto")
    shown = "".join(traceback.format_exception(caught.value))
    assert shown.count("Traceback") == 1 and "The above exception" not in shown
