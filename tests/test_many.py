"""Many replays at once: the verdicts of single ones, a row for whatever fails, and no process left behind."""

import json
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jobs
import numpy as np
import pandas as pd
import pytest
import runs
from helpers import tree

import workbench as wb
from workbench import many
from workbench.commands.sweep import parse_steps
from workbench.errors import ExperimentError, RunError
from workbench.fan_out import WorkerLost, fan_out

STEPS = [2, 3, 5, 9]


@pytest.fixture(scope="module")
def run():
    return wb.open_run(runs.recorded_read_only())


@pytest.fixture(scope="module")
def here(run):
    return run.replay_many(STEPS, workers=0)


def columns(frame):
    return frame.astype(object).where(frame.notna(), None).to_dict("records")


# ------------------------------------------------------------------------------------------------------------- replays


def test_the_verdicts_are_those_of_single_replays(run, here, tmp_path):
    for row in here.itertuples():
        trace = run.replay(row.step, with_probe=False, repeat=False, fresh_process=False, trace_dir=tmp_path)
        assert row.verdict == "exact" and trace.exact and row.error is None and row.first_difference is None
        assert np.float32(trace.record.loss) == np.float32(row.loss) and row.segment == trace.record.segment
        assert row.compared == sum(
            item.verdict == "exact" for name, item in trace.record.items.items() if name != "checkpoint"
        )
    assert list(here["step"]) == STEPS and set(here["run"]) == {str(run.path)}


def test_other_processes_say_the_same_and_write_nothing(run, here):
    before, seen = tree(run.path), []
    frame = run.replay_many(STEPS, workers=2, progress=lambda done, total, what: seen.append((done, total)))
    pd.testing.assert_frame_equal(frame, here)
    assert tree(run.path) == before
    assert seen[0][0] == 0 and seen[-1][0] == seen[-1][1] and sorted(seen) == seen


def test_steps_with_a_checkpoint_in_common_share_one_roll_forward(run, monkeypatch):
    from workbench.replaying import fallback

    begun, real = [], fallback.prepared

    def noted(run, plan, **options):
        begun.append((plan.checkpoint[0], list(plan.steps)))
        return real(run, plan, **options)

    monkeypatch.setattr(fallback, "prepared", noted)
    frame = run.replay_many([*STEPS, 5], workers=0)
    expected = {}
    for step in STEPS:
        expected.setdefault(run.plan(step).checkpoint[0], []).append(step)
    assert dict(begun) == expected and len(begun) == len(expected) < len(STEPS)
    assert list(frame["step"]) == [*STEPS, 5] and frame["rolled"].tolist() == [
        step - 1 - run.plan(step).checkpoint[0] for step in [*STEPS, 5]
    ]


def test_what_fails_is_a_row(run, tmp_path):
    shutil.copytree(run.path, tmp_path / "damaged")
    first, second = run.checkpoints[0][0], run.checkpoints[1][0]
    with open(tmp_path / "damaged" / "checkpoints" / f"{second:08d}.safetensors", "r+b") as file:
        file.truncate(100)
    runs.edit_line(tmp_path / "damaged", first + 1, batch_hash="0" * 64)
    items = [(tmp_path / "damaged", step) for step in (first + 1, second + 1, 10**6)] + [(run, first + 1)]
    frame = wb.replay_many(items, workers=2)
    assert frame["verdict"].tolist() == ["mismatch", None, None, "exact"]
    assert frame["first_difference"][0].startswith(f"batch_hash at step {first + 1} (step)")
    assert "100 bytes, expected" in frame["error"][1] and "is not in the telemetry" in frame["error"][2]
    assert frame["error"][3] is None


def test_a_run_of_ones_own_needs_its_factory(tmp_path):
    experiment = runs.build()
    with wb.Recorder(
        tmp_path / "run", *runs.parts(experiment), compile=False, spikes=None, factory="runs:build"
    ) as loop:
        for batch in loop.batches(3):
            loop.step(batch)
    frame = wb.replay_many([(tmp_path / "run", 2)], workers=0)
    assert frame["verdict"][0] is None and "factory" in frame["error"][0]
    frame = wb.replay_many([(tmp_path / "run", 2), (tmp_path / "run", 3)], workers=1, factory="runs:build")
    assert frame["verdict"].tolist() == ["exact", "exact"]


def test_bad_input_is_refused(run, tmp_path):
    with pytest.raises(RunError):
        wb.replay_many([(tmp_path, 1)])
    with pytest.raises(ExperimentError, match="workers is -1; expected a number of processes from 0"):
        run.replay_many([2], workers=-1)
    with pytest.raises(ExperimentError, match="executor is a int; expected a concurrent.futures.Executor"):
        run.replay_many([2], executor=3)
    with (
        ThreadPoolExecutor(1) as threads,
        pytest.raises(ExperimentError, match="workers is 2 and an executor is given"),
    ):
        run.replay_many([2], executor=threads, workers=2)
    assert len(run.replay_many([])) == 0


def test_an_exception_of_the_progress_stops_all(run):
    class Enough(Exception):
        pass

    def progress(done, total, what):
        if done:
            raise Enough

    with pytest.raises(Enough):
        run.replay_many(STEPS, workers=2, progress=progress)


def test_a_sample_is_proven_in_other_processes_too(run):
    alone, apart = run.verify(replay=3), run.verify(replay=3, workers=2)
    assert apart.exact and apart.checks == alone.checks and apart.on_the_way == alone.on_the_way
    assert runs.here("verify", run.path, "--replay", 1, "--workers", 1).code == 0


# ------------------------------------------------------------------------------------------------------------- engines


def test_threads_of_this_process_take_turns(run, here):
    with ThreadPoolExecutor(3) as threads:
        pd.testing.assert_frame_equal(run.replay_many(STEPS, executor=threads), here)


def test_loky(run, here):
    loky = pytest.importorskip("loky")
    executor = loky.ProcessPoolExecutor(2)
    try:
        pd.testing.assert_frame_equal(run.replay_many(STEPS, executor=executor), here)
    finally:
        executor.shutdown(kill_workers=True)


def test_dask(run, here):
    """In a process of its own: its cluster warns and logs as it likes. Left alone, it sets threads in its workers."""
    pytest.importorskip("dask.distributed")
    code = f"""
import dask, workbench as wb
from distributed import Client, LocalCluster
if __name__ == "__main__":
    dask.config.set({{"distributed.nanny.pre-spawn-environ": {{}}}})
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster, Client(cluster) as client:
        frame = wb.open_run({str(run.path)!r}).replay_many({STEPS}, executor=client.get_executor())
        print(frame.to_json(orient="records"))
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert said.returncode == 0, said.stderr
    assert json.loads(said.stdout) == json.loads(here.to_json(orient="records"))


# ----------------------------------------------------------------------------------------------------------- processes


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_results_in_order_and_errors_among_them(workers):
    told = {}
    found = fan_out(jobs.double, [4, -1, 6], workers=workers, done=told.__setitem__)
    assert found[0] == 8 and found[2] == 12 and isinstance(found[1], ValueError)
    assert {number: str(one) for number, one in told.items()} == {n: str(one) for n, one in enumerate(found)}


def test_a_process_that_dies_takes_only_its_own_work_along(tmp_path):
    found = fan_out(jobs.die, range(8), workers=2)
    assert [one for one in found if not isinstance(one, Exception)] == [0, 1, 2, 4, 5, 6, 7]
    assert isinstance(found[3], WorkerLost) and "ended before it was done" in str(found[3])
    assert fan_out(jobs.die_once, [tmp_path / "mark"], workers=1) == ["done"]


def test_a_replay_whose_process_dies_is_a_row(run, monkeypatch):
    monkeypatch.setattr(many, "performed", jobs.die_at_checkpoint_0)
    frame = run.replay_many(STEPS, workers=2)
    lost = [run.plan(step).checkpoint == run.checkpoints[0] for step in STEPS]
    assert frame["verdict"].tolist() == [None if one else "exact" for one in lost] and any(lost) and not all(lost)
    assert all("its process ended before it was done" in error for error in frame["error"][lost])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL, signal.SIGTERM])
def test_no_process_outlives_the_one_that_started_it(tmp_path, number):
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from jobs import sleep
from workbench.fan_out import fan_out
if __name__ == "__main__":
    fan_out(sleep, [{str(tmp_path)!r}] * 2, workers=2)
"""
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE) as parent:
        try:
            wait_for(lambda: len(list(tmp_path.iterdir())) == 2)
            parent.send_signal(number)
            errors = parent.communicate(timeout=30)[1].decode()
        except BaseException:
            parent.kill()
            raise
    assert parent.returncode != 0 and ("KeyboardInterrupt" in errors) == (number == signal.SIGINT)
    wait_for(lambda: not any(running(int(path.name)) for path in tmp_path.iterdir()))


def running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition):
    end = time.monotonic() + 40
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


# -------------------------------------------------------------------------------------------------------- command line


def test_sweep_on_the_command_line(run):
    said = runs.here("sweep", run.path, "--steps", "2:6:2,999", "--workers", "0", "--json")
    rows = json.loads(said.out)
    assert said.code == 0 and [(row["step"], row["verdict"]) for row in rows] == [
        *((step, "exact") for step in (2, 4, 6)),
        (999, None),
    ]
    assert rows[:-1] == [row | {"loss": float(row["loss"])} for row in columns(run.replay_many([2, 4, 6], workers=0))]
    said = runs.here("sweep", run.path, "--steps", "2..3", "--workers", "0")
    assert said.code == 0 and said.out.endswith("2 exact\n") and "recorded items" in said.out
    assert "--steps or --spikes" in runs.here("sweep", run.path).sentence
    for text in ("3..2", "1:5:0", "1:5:00", "0", "00"):
        assert f"'{text}' is no step" in runs.here("sweep", run.path, "--steps", text).sentence
    spikes = sorted(set(map(int, run.spikes()["step"])))
    rows = json.loads(runs.here("sweep", run.path, "--spikes", "--workers", "0", "--json").out)
    assert [row["step"] for row in rows] == spikes


def test_ranges_have_their_last_step():
    assert parse_steps("100:200:50") == [100, 150, 200] and parse_steps("7") == [7]
    assert parse_steps("4..6, 5,1") == [1, 4, 5, 6] and parse_steps("4:6") == [4, 5, 6]
