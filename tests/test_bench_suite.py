"""The benchmark suite: rows that run here, peers that answer, fail, die or are missing. No figure is judged."""

import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import runs

from workbench.bench.peer import KNOWN, Peers
from workbench.bench.problem import Problem
from workbench.bench.scaling import scaling
from workbench.bench.suite import ROWS, benchmark_suite
from workbench.commands import bench_suite
from workbench.errors import WorkbenchError

PEERS = Path(__file__).resolve().parent / "peers"
ANSWERS = """
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    if request["do"] == "die":
        print("out of memory", file=sys.stderr)
        sys.exit(3)
    answer = {"error": "no such thing"} if request["do"] == "fail" else request | {"arguments": sys.argv[1:]}
    print(json.dumps(answer), flush=True)
"""


def installed(folder, source=ANSWERS, name="torch"):
    """A folder of peers in which one is a script of ours."""
    folder.mkdir(exist_ok=True)
    script = folder / "script.py"
    script.write_text(source)
    entry = {"python": sys.executable, "script": str(script), "versions": {"torch": "1.0"}}
    (folder / "peers.json").write_text(json.dumps({name: entry}))
    return folder


@pytest.fixture
def peers(tmp_path):
    found = Peers(installed(tmp_path / "peers"), tmp_path)
    yield found
    found.close()


def test_a_peer_answers_in_its_own_process(peers):
    running = peers.get("torch", "serve", "problem")
    assert running.ask("add", a=1) == {"do": "add", "a": 1, "arguments": ["serve", "problem"]}
    assert running.ask("fail") == {"error": "no such thing"}
    assert peers.get("torch") is running
    assert peers.command("torch", "look")[0] == sys.executable


def test_a_peer_that_dies_says_so_and_is_started_anew(peers):
    running = peers.get("torch", "serve")
    assert running.ask("die") == {"error": "it ended with code 3: out of memory"}
    assert "error" in running.ask("add")
    peers.stop("torch")
    assert peers.get("torch").ask("add")["do"] == "add"


def test_what_is_not_installed_is_missing(peers, tmp_path):
    assert peers.missing == [name for name in KNOWN if name != "torch"]
    assert peers.get("flor") is None and peers.command("flor") is None
    assert Peers(None, tmp_path).missing == list(KNOWN)
    (tmp_path / "peers" / "script.py").unlink()
    assert Peers(tmp_path / "peers", tmp_path).missing == list(KNOWN)


@pytest.mark.parametrize("content", [None, "[]", "{", '{"torch": {}}'])
def test_a_folder_without_peers_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "peers.json").write_text(content)
    with pytest.raises(WorkbenchError, match=r"peers.json can't be read .*python tests/peers/install.py --to FOLDER"):
        Peers(tmp_path, tmp_path)


def test_the_installer_makes_every_peer_and_their_scripts_are_there():
    environments = runpy.run_path(str(PEERS / "install.py"))["ENVIRONMENTS"]
    assert set(environments) == set(KNOWN)
    for script, frameworks, packages in environments.values():
        compile((PEERS / script).read_text(), script, "exec")
        assert all("==" in one or "<" in one for one in [*packages, *(o for one in frameworks for o in one)])


def test_the_peers_get_the_very_batches_and_weights(tmp_path):
    import mlx.core as mx
    import numpy as np

    problem = Problem("tiny", tmp_path, 2)
    given = json.loads(problem.for_peers().read_text())
    assert given["model"]["width"] == 64 and given["model"]["depth"] == 2 and given["model"]["ctx"] == 32
    experiment = problem.build()
    with np.load(given["batches"]) as found:
        for number in range(3):
            x, y = (np.asarray(part) for part in next(experiment.sampler))
            assert np.array_equal(found["x"][number], x) and np.array_equal(found["y"][number], y)
    weights = mx.load(given["weights"])
    assert mx.array_equal(weights["embedding.weight"], experiment.model.embedding.weight).item()


# ---------------------------------------------------------------------------------------------------------- the suite


def test_the_command_names_the_rows_of_the_suite():
    assert tuple(ROWS) == bench_suite.ROWS


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"only": ["speed"]}, "'speed' is no row of the suite; expected some of recording"),
        ({"size": "vast"}, "'vast' is no size of the suite; expected one of tiny, small"),
        ({"rounds": 1}, "rounds is 1; expected 2 or more"),
    ],
)
def test_what_the_suite_refuses(given, sentence):
    with pytest.raises(WorkbenchError, match=sentence):
        benchmark_suite(**given)


def test_rows_run_and_say_which_peers_failed_or_are_missing(tmp_path):
    file, folder = tmp_path / "all.json", installed(tmp_path / "peers", "raise SystemExit(4)")
    rows = ("--only", "load", "--only", "curve", "--json", file)
    said = runs.here("bench", "suite", "--size", "tiny", "--rounds", 2, "--peers", folder, *rows)
    assert said.code == 0 and "not installed, and so not compared with: loggers, flor, cockpit, tables" in said.out
    document = runs.strict(file.read_text())
    load, curve = document["rows"]
    assert (load["row"], curve["row"]) == ("load", "curve") and load["value"] > 0 and curve["value"] > 0
    assert load["failed"]["torch"].startswith("it ended with code 4") and load["peers"] == {}
    assert list(curve["peers"]) == ["matplotlib, every point"]
    assert {"device", "mlx", "blas", "threads", "load average before", "python"} <= document["machine"].keys()
    assert document["machine"]["peers"] == {"torch": "1.0"}
    assert [one["verdict"] for one in document["table"] if one["contender"] == "torch"] == ["failed"]


def test_the_rows_that_record_and_replay_run_here():
    found = benchmark_suite("tiny", only=["checkpoint", "replay-live", "roll-forward"], rounds=2)
    assert {one.row for one in found.rows} == {"checkpoint", "replay-live", "roll-forward", "probe"}
    assert all(one.value > 0 for one in found.rows)


def test_growth_is_measured_at_each_size_and_length(monkeypatch):
    monkeypatch.setattr("workbench.bench.scaling.BURST_SECONDS", 0.01)
    found = scaling(shapes=[(1, 64)], most_steps=100, rounds=2)
    assert found["what"].tolist() == [
        *("a bare step", "what recording adds"),
        *("opening, the first time", "opening, after that", "replaying the last step"),
    ]
    assert found["x"].tolist()[2:] == [100.0] * 3 and (found["seconds"][2:] > 0).all()
    assert len(found.attrs["slopes"]) == 5


RECORDS = """
import json, sys
times = {"plain": [1.0, 3.0, 2.0], "control": [2.02], "batched hooks": [2.2], "trainscope": [3.0, 5.0]}
for line in sys.stdin:
    request = json.loads(line)
    if request["do"] == "prepare":
        answer = {"variants": request["names"], "failed": {"deterministic algorithms": "no kernel"}}
    else:
        answer = {"times": times} if request["do"] == "steps" else {"loss": 1.5}
    print(json.dumps(answer), flush=True)
"""


def test_a_peer_is_set_against_its_own_plain_step(tmp_path, monkeypatch):
    cost = SimpleNamespace(bare_ms=10.0, recorded=1.2, unrecorded=1.0, control=0.995)
    monkeypatch.setattr("workbench.bench.recording_rows.recording_cost", lambda *given, **more: cost)
    peers = installed(tmp_path / "peers", RECORDS)
    recorded, control, step = benchmark_suite("tiny", only=["recording"], rounds=2, peers=peers).rows
    assert recorded.value == 1.2 and recorded.goal == 1.05 and recorded.verdict == "missed"
    assert recorded.peers == pytest.approx({"torch, batched hooks": 1.1, "trainscope": 2.0})
    assert recorded.lost_to == ["torch, batched hooks"] and recorded.noise == pytest.approx(0.01)
    assert recorded.failed["torch, use_deterministic_algorithms"] == "no kernel"
    assert recorded.failed["torch"].startswith("measured on another model: its first loss is 1.5")
    assert recorded.parts["recording adds"] == pytest.approx(2.0) and recorded.parts["fingerprints alone"] > 0
    assert control.value == 0.995 and control.peers == pytest.approx({"torch, control": 1.01})
    assert control.lost_to == [] and step.value == 10.0 and step.peers == {"torch": 2000.0}
