"""Runs that several ranks train together: real ones, of two ranks on this host, under MLX's own launcher."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import helpers
import mlx.core as mx
import msgspec
import numpy as np
import pytest
import runs
from helpers import tree
from ranks_job import SAVE_EVERY, SPIKE, STEPS, build

import workbench as wb
from workbench.bits import bits_float, float_bits
from workbench.checkpoints import checkpoint_reader
from workbench.errors import CheckpointError, ExperimentError, ReplayError, RunError, TelemetryError
from workbench.lines.line import ARRAYS, Line
from workbench.lines.scan import Scan
from workbench.ranks.attendance import absence, shown
from workbench.ranks.carrier import carried
from workbench.ranks.launching import free_ports, launch_command
from workbench.ranks.own_line import differing, own_line
from workbench.ranks.rank_run import RankRun
from workbench.ranks.rank_setup import RankSetup
from workbench.ranks.signs import backend_here
from workbench.ranks.told_apart import told_apart
from workbench.ranks.world import World, exchange, exchange_json, world

JOB = Path(__file__).with_name("ranks_job.py")
SETUP = RankSetup(size=2, backend="ring", hosts=[socket.gethostname()] * 2)


def launch(what, folder, *arguments, ranks=2):
    """What each rank left, in the order of ranks, and what the launcher printed."""
    setup = msgspec.structs.replace(SETUP, size=ranks, hosts=[socket.gethostname()] * ranks)
    command = [*launch_command(setup), sys.executable, str(JOB), what, str(folder), *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(JOB.parent)}
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env=environment, start_new_session=True, **streams) as child:
        patience = threading.Timer(200, os.killpg, (child.pid, signal.SIGKILL))  # ranks that never meet say nothing
        patience.start()
        try:
            said = "".join(iter(child.stdout.readline, ""))  # its input stays open: see `launching.watched`
            child.wait(200)
        finally:
            patience.cancel()
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
    found = [folder / f"{what}.{rank}.json" for rank in range(ranks)]
    return [json.loads(path.read_text()) if path.exists() else None for path in found], said


def unable():
    """Why no ranks can meet here, if they can't."""
    if not mx.distributed.is_available("ring"):
        return "this MLX has no back end 'ring'"
    try:
        launch_command(SETUP)
    except ReplayError as error:
        return str(error)
    except OSError as error:
        return f"no socket can be opened on this host: {error}"
    return None


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """Runs of two ranks, recorded and replayed by them; one whose rank 1 was killed, and which went on."""
    if why := unable():
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("ranks")
    left, said = launch("killed", folder)
    assert left == [None, None] and "exited with code -9" in said, said
    saved = [step for step, _ in wb.open_run(folder / "killed").checkpoints]
    assert saved in ([0, SAVE_EVERY], [0, SAVE_EVERY, 2 * SAVE_EVERY])  # the last may have been under way
    found, said = launch("everything", folder, runs.corpus())
    assert None not in found, said
    return folder, found


# ------------------------------------------------------------------------------------- recorded and replayed together


def test_ranks_tell_each_other_what_they_have_to_say(together):
    folder, found = together
    assert [one["world"] for one in found] == [[0, 2, "ring"], [1, 2, "ring"]]
    for one in found:
        assert one["told"] == [3, 90_003]
        assert one["asked"] == [False, True, True, False, 15]


def test_sums_over_ranks_have_the_same_bits_on_each_rank_and_each_time(together):
    for dtype in (slice(0, 3), slice(3, 6)):
        assert len({bits for one in together[1] for bits in one["sums"][dtype]}) == 1


def test_each_rank_records_its_own_batch_and_state_and_shares_weights(together):
    folder, found = together
    assert found[0]["weights"] == found[1]["weights"]
    run = wb.open_run(folder / "own")
    assert run.manifest.ranks == SETUP
    first, second = (RankRun(run.path, rank).line(6, 0) for rank in (0, 1))
    assert first.batch_hash != second.batch_hash and first.loss_bits != second.loss_bits
    assert {lane for lane in first.state if first.state[lane] != second.state[lane]} == {"rng"}
    losses = [float(bits_float(one.loss_bits)) for one in (first, second)]
    assert run.line(6, 0).loss_bits == float_bits(np.float32(sum(losses) / 2))  # of two float32 that is exact till then
    assert [path.name for path in (folder / "own" / "checkpoints").glob("*.ranks")]
    state = checkpoint_reader.read(folder / "own" / "checkpoints", SAVE_EVERY, 0)
    assert state.ranks[0].rng != state.ranks[1].rng and state.rng == state.ranks[0].rng


def test_a_replay_by_all_ranks_is_exact_on_each(together):
    for one in together[1]:  # every rank has the whole answer
        for trace in (one["replay"], *one["range"], one["handed"], one["trained"]):
            assert trace["exact"] and trace["ranks"] == [[0, True, []], [1, True, []]]
        assert one["replay"]["badges"] == ["exact", "exact", "exact"]


def test_a_trace_says_whose_batch_carried_the_spike(together):
    folder, found = together
    trace = wb.open_run(folder / "own").trace(SPIKE)
    assert trace.record.carried.startswith(f"Rank 1's batch carried step {SPIKE}: ")
    assert trace.record.carried in trace.findings()
    assert trace.record.ranks[1].excess > 6 > trace.record.ranks[0].excess
    losses = np.float32(found[0]["replay"]["losses"]).astype(float)
    assert np.float32(found[0]["replay"]["loss"]) == np.float32(losses.sum() / 2)
    assert found[0]["range"][0]["carried"].startswith("No rank's batch stands out")


def test_one_flipped_bit_in_one_ranks_batch_is_seen_and_the_rank_named(together):
    for one in together[1]:
        assert not one["flipped"]["exact"] and one["flipped"]["badges"][1] == "mismatch"
        assert one["flipped"]["ranks"][0] == [0, True, []]
        assert one["flipped"]["ranks"][1][:2] == [1, False] and "batch_hash" in one["flipped"]["ranks"][1][2]
        assert "rank 1: recorded" in one["flipped"]["sentence"]


def test_activations_that_are_not_finite_on_one_rank_only_are_replayed_exactly(together):
    folder, found = together
    for rank in (0, 1):
        for one in found:
            trace = one["infinite"][rank]
            assert trace["exact"] and trace["ranks"] == [[0, True, []], [1, True, []]]
        odd, even = (RankRun(folder / f"infinite-{rank}", of).line(2, 0) for of in (rank, 1 - rank))
        assert None in odd.per_layer_act_norms and len(odd.per_layer_act_norms_bits) == 2
        assert None not in even.per_layer_act_norms and even.per_layer_act_norms_bits is msgspec.UNSET


def test_only_one_rank_writes(together):
    folder, _ = together
    lines = wb.open_run(folder / "own").telemetry.lines
    assert [line.type for line in lines] == ["meta", *["step"] * STEPS, "done"]
    assert not (folder / "own" / "recorder.lock").exists()


# -------------------------------------------------------------------------------------------- ranks that part are named


def test_ranks_that_do_not_average_or_start_apart_are_refused_and_leave_nothing(together):
    folder, found = together
    for one in found:
        assert one["unaveraged"].startswith("RanksDiverged: rank 1 diverged at the first step: weights, adam_m, adam_v")
        assert "nn.average_gradients" in one["unaveraged"]
        assert one["unseeded"].startswith("RanksDiverged: rank 1 starts with other weights than rank 0")
        assert "the run's folder is" in one["elsewhere"]
    assert not any((folder / name).exists() for name in ("unaveraged", "unseeded", "of-rank-0", "of-rank-1"))


def test_a_flipped_bit_of_one_ranks_weights_is_found_at_the_next_step(together):
    folder, found = together
    for one in found:
        assert one["struck"].startswith("RanksDiverged: rank 1 diverged at step 4: weights differ from rank 0's, first")
        assert "layers.3.weight" in one["struck"]
    run = wb.open_run(folder / "struck")
    assert [step for step, _ in run.checkpoints] == [0, 2]
    assert run.last_step == 4 and run.line(4, 0).ranks[1]["state"].keys() >= {"weights"}


def test_what_all_ranks_change_between_two_steps_is_gone_on_from(together):
    folder, found = together
    assert all(one["pruned"]["exact"] for one in found)
    run = wb.open_run(folder / "pruned")
    assert [entry.start for entry in run.manifest.segments] == [0, 3] and run.seam(1) == ["weights"]


def test_what_is_not_made_for_several_ranks_says_so(together):
    folder, found = together
    for one in found:
        assert "going back is not made for several" in one["rollback"]
        assert "was recorded by 2 ranks together" in one["autopsy"]
    run = wb.open_run(folder / "trained")
    for ask in (lambda: run.whatif(5, "lr=0.5x"), lambda: run.diverge(5), lambda: wb.fork_point(run, 5)):
        with pytest.raises(ReplayError, match="recorded by 2 ranks together"):
            ask()


# ------------------------------------------------------------------------------------------ seen from a process alone


def test_a_process_alone_starts_the_ranks_for_a_replay(together, tmp_path):
    folder, _ = together
    said = runs.here("replay", folder / "trained", "--step", "3", "--trace-dir", tmp_path, "--json")
    assert said.code == 0, said.err
    document = json.loads(said.out)
    assert document["exact"] and [one["exact"] for one in document["ranks"]] == [True, True]
    assert len(document["row_loss"]) == 8  # of both ranks


def test_a_process_alone_does_not_pretend_to_be_two(together):
    folder, _ = together
    before = tree(folder / "own")
    with pytest.raises(
        ReplayError, match="this experiment exists in this process only; start your program by mlx.launc"
    ):
        wb.open_run(folder / "own").replay(5, experiment=build())
    experiment = build()
    given = (experiment.model, experiment.optimizer, experiment.loss_fn, experiment.sampler)
    with pytest.raises(ExperimentError, match="by 2 ranks together, and this process was started alone"):
        wb.Recorder(folder / "own", *given, step_fn=experiment.step_fn, resume=True)
    assert tree(folder / "own") == before


def test_another_number_of_ranks_is_refused_by_name():
    manifest = wb.open_run(runs.recorded_read_only()).manifest
    together = msgspec.structs.replace(manifest, ranks=SETUP)
    assert absence(together, Path("r"), World(0, 2, "ring")) is None
    assert absence(manifest, Path("r"), World()) is None
    three = absence(together, Path("r"), World(0, 3, "ring"))
    assert "recorded by 2 ranks together, and there are 3 ranks here" in three
    assert "mlx.launch -n 2 --backend ring --" in three
    assert "recorded by one process, and there are 2 ranks here" in absence(manifest, Path("r"), World(0, 2, "ring"))


def test_ranks_on_other_hosts_are_not_started_from_here():
    setup = RankSetup(size=2, backend="ring", connections=2, hosts=["one.example", "two.example"])
    with pytest.raises(ReplayError, match="ran on one.example, two.example, and this is .*: start all 2"):
        launch_command(setup)
    assert shown(setup) == "mlx.launch --hosts one.example,two.example --backend ring --connections-per-ip 2"
    assert 1024 < free_ports(4) < 65536


def test_what_can_be_read_of_it_is(together):
    folder, _ = together
    run = wb.open_run(folder / "own")
    table = wb.rank_table(run, SPIKE)
    assert list(table["stands_out"]) == [False, True] and table["batch_hash"].nunique() == 2
    said = runs.here("ranks", folder / "own", "--step", SPIKE)
    assert said.code == 0 and "Rank 1's batch carried" in said.out
    with pytest.raises(ReplayError, match="recorded by one process"):
        wb.rank_table(wb.open_run(runs.recorded_read_only()), 3)
    facts = wb.open_run(folder / "trained").batch_facts(5)
    assert sorted(facts[facts["step"] == 5]["row"]) == list(range(8))
    assert any("rank R had the 4 rows from 4 · R on" in notice for notice in facts.attrs["notices"])
    assert len(wb.batch_table(wb.open_run(folder / "handed"), 2)) == 16
    for name in ("own", "handed", "trained"):
        verified = wb.open_run(folder / name).verify(replay=2)
        assert set(verified.frame["verdict"]) == {"exact", "unverified"}
    assert run.spikes()["step"].tolist() == [SPIKE]


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda line: line.update(loss=1.0, loss_bits="0x3f800000"), "its loss is 1, and that of its ranks is"),
        (lambda line: line["ranks"][1].update(loss_bits="0x3f800000", loss=1.0), "and that of its ranks is"),
        (
            lambda line: [entry.update(rank=1 - entry["rank"]) for entry in line["ranks"]],
            "numbered 1, 0; expected 0 to 1",
        ),
        (lambda line: line["ranks"].append(dict(line["ranks"][1], rank=2)), "numbered 0, 1, 2; expected 0 to 1"),
        (lambda line: line.pop("ranks"), "it has no `ranks`"),
    ],
)
def test_a_line_that_does_not_agree_with_its_ranks_is_seen(together, tmp_path, edit, said):
    path = tmp_path / "edited"
    shutil.copytree(together[0] / "own", path)
    lines = [json.loads(line) for line in (path / "telemetry.jsonl").read_text().splitlines()]
    edit(next(line for line in lines if line.get("type") == "step" and line["step"] == 5))
    (path / "telemetry.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = wb.open_run(path).verify().frame
    (bad,) = found[(found["kind"] == "telemetry") & (found["what"] == "ranks")].to_dict("records")
    assert bad["verdict"] == "mismatch" and "step 5" in bad["detail"] and said in bad["detail"]


def test_what_was_dropped_from_the_entry_of_a_rank_is_seen(together, tmp_path):
    path = shutil.copytree(together[0] / "own", tmp_path / "edited")
    lines = (path / "telemetry.jsonl").read_bytes()
    for step in (5, SAVE_EVERY):
        helpers.edit_line(path, step, lambda line: line["ranks"][1].pop("batch_hash"))
    helpers.edit_line(path, SAVE_EVERY, lambda line: line["ranks"][1].pop("state"))
    found = {
        f"{one.kind} {one.what}": one.detail for one in wb.open_run(path).verify().checks if one.verdict != "exact"
    }
    assert (
        found["checkpoint 00000004"] == "rng of rank 1 differs from what it logged" and "telemetry rank 1" not in found
    )
    runs.edit_json(path / "run.json", lambda document: document.pop("sealed"))  # as before there were seals
    found = [one.detail for one in wb.open_run(path).verify().checks if one.what == "rank 1"]
    assert len(found) == 2 and "batch_hash is missing from the line of steps 4, 5, and others have it" in found[0]
    dropped = json.loads(lines.splitlines()[5])
    del dropped["ranks"][1]["batch_hash"]
    (path / "telemetry.jsonl").write_bytes(lines.replace(lines.splitlines()[5], json.dumps(dropped).encode()))
    shutil.copy(together[0] / "own" / "run.json", path / "run.json")
    found = [one for one in wb.open_run(path).verify().checks if one.verdict == "mismatch"]
    assert [one.what for one in found] == ["seals"] and "line 6 (step 5) does not end with its seal" in found[0].detail


def test_an_edited_mean_loss_is_no_exact_replay(together, tmp_path):
    path = tmp_path / "edited"
    shutil.copytree(together[0] / "own", path)
    runs.edit_line(path, 5, loss=1.0, loss_bits="0x3f800000")
    with pytest.raises(TelemetryError, match="step 5 does not agree with itself: its loss is 1, and that of its ranks"):
        RankRun(path, 0).line(5, 0)


def test_its_telemetry_is_read_quickly_to_the_same_columns(together):
    path = together[0] / "own" / "telemetry.jsonl"
    with open(path, "rb") as file:
        quick = Scan(path).read(file)
    with open(path, "rb") as file:
        strict = Scan.strictly(path).read(file)
    for name in ("step", "loss", "grad_norm", "per_layer_act_norms"):
        assert np.array_equal(quick.steps.column(name), strict.steps.column(name))


def test_a_checkpoint_without_the_parts_of_all_ranks_is_none(together, tmp_path):
    shutil.copytree(together[0] / "own" / "checkpoints", tmp_path / "c")
    part = tmp_path / "c" / f"{SAVE_EVERY:08d}.ranks"
    part.write_bytes(part.read_bytes().replace(b"0", b"1", 1))
    with pytest.raises(CheckpointError, match="was changed"):
        checkpoint_reader.read(tmp_path / "c", SAVE_EVERY, 0)
    part.unlink()
    with pytest.raises(CheckpointError, match="can't be read"):
        checkpoint_reader.read(tmp_path / "c", SAVE_EVERY, 0)


# ----------------------------------------------------------------------------------------------------- a rank is killed


def test_after_a_killed_rank_all_go_on_to_the_same_bits(together):
    folder, found = together
    assert [one["resumed"] for one in found] == [found[0]["weights"]] * 2
    whole, again = (wb.open_run(folder / name) for name in ("own", "killed"))
    last = again.manifest.segments[-1].segment
    for rank in range(2):
        ours, theirs = RankRun(whole.path, rank).line(STEPS, 0), RankRun(again.path, rank).line(STEPS, last)
        assert ours.evidence() == theirs.evidence()
    assert (SPIKE - 1, last) in again.checkpoints  # before the spike, with the parts of both ranks
    assert len(checkpoint_reader.read(again.path / "checkpoints", SPIKE - 1, last).ranks) == 2


# ----------------------------------------------------------------------------------------------- formats, and one alone


def test_a_line_of_a_rank_is_the_shared_one_with_what_is_its_own():
    main = {"type": "step", "step": 3, "batch_hash": "a", "grad_norm": 1.0, "grad_norm_bits": "0x3f800000"}
    main |= {
        "state": {"weights": "w", "rng": "0"},
        "per_layer_act_norms": [None],
        "per_layer_act_norms_bits": ["0x7fc00000"],
    }
    other = main | {"batch_hash": "b", "state": {"weights": "w", "rng": "1"}, "per_layer_act_norms": [2.0]}
    del other["per_layer_act_norms_bits"]
    own = {"batch_hash": "b", "state": {"rng": "1"}, "per_layer_act_norms": [2.0]}
    assert differing(other, main) == own | {"per_layer_act_norms_bits": None}
    for entry in (own, differing(other, main)):
        line = msgspec.convert(main | {"ranks": [{"rank": 0}, {"rank": 1} | entry]}, Line)
        assert own_line(line, 1) == msgspec.convert(other, Line)
        assert own_line(line, 0) == msgspec.convert(main, Line)
    with pytest.raises(TelemetryError, match="has 2 ranks; expected one of rank 2"):
        own_line(line, 2)
    line.ranks[1]["grad_norm"] = 7.0
    line.ranks[1]["grad_norm_bits"] = "0x3f800000"
    with pytest.raises(TelemetryError, match="says of rank 1 is damaged"):
        own_line(line, 1)


ABSENT = {"before": {"skip": 1}, "spike": True, "remarks": ["x"], "unstable": "x", "batch_hash": "a", "ma": 1.0}


@pytest.mark.parametrize("name", [*ABSENT, *(f"{name}_bits" for name in (*ARRAYS, "grad_norm"))])
def test_what_only_rank_0_has_is_not_there_in_the_line_of_another(name):
    """`ma`, which may be null, stays so: it can't be told from one that is null."""
    value = ABSENT.get(name, "0x3f800000" if name == "grad_norm_bits" else ["0x3f800000"])
    beside = {} if name in ABSENT else {name.removesuffix("_bits"): 1.0 if name == "grad_norm_bits" else [1.0]}
    main = {"type": "step", "step": 3, "loss": 1.0} | beside
    line = msgspec.convert(
        main | {name: value, "ranks": [{"rank": 0}, {"rank": 1} | differing(main, main | {name: value})]}, Line
    )
    for entry in line.ranks:
        entry.update(loss=1.0, loss_bits="0x3f800000")
    found = getattr(own_line(line, 1), name)
    assert found is (None if name == "ma" else msgspec.UNSET) and getattr(own_line(line, 0), name) is not msgspec.UNSET


ADAFACTOR = {"class": "Adafactor", "beta_1": None, "clip_threshold": 1.0, "decay_rate": -0.8, "eps": [1e-30, 0.001]}
ADAFACTOR |= {"relative_step": True, "scale_parameter": True, "warmup_init": False, "weight_decay": 0.0}


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        (5, 6, ("5", "6")),
        (ADAFACTOR, ADAFACTOR | {"weight_decay": 0.1}, ("weight_decay 0.0", "weight_decay 0.1")),
        (
            {"class": "MultiOptimizer", "members": [{"class": "SGD"}, ADAFACTOR]},
            {"class": "MultiOptimizer", "members": [{"class": "SGD"}, ADAFACTOR | {"eps": [1e-30, 0.01]}]},
            ("members.1.eps [1e-30, 0.001]", "members.1.eps [1e-30, 0.01]"),
        ),
        ({"a": 1, "b": 2}, {"b": 2}, ("a 1", "a not there")),
        (dict.fromkeys("abcde", 1), dict.fromkeys("abcde", 2), ("a 1, b 1, c 1, 2 more", "a 2, b 2, c 2, 2 more")),
        ("x" * 119, "x" * 120, ("x" * 119, "x" * 120)),
        (f"{'x' * 200}a{'y' * 200}", f"{'x' * 200}b{'y' * 200}", tuple(f"…{'x' * 20}{c}{'y' * 99}…" for c in "ab")),
    ],
)
def test_of_what_is_not_alike_on_all_ranks_the_parts_that_differ_are_named(ours, theirs, said):
    assert told_apart(ours, theirs) == said and told_apart(theirs, ours) == said[::-1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hosts": ["one"]}, "`hosts` names 1; expected as many as `size` says, 2"),
        ({"hosts": ["one", "two", "three"]}, "`hosts` names 3; expected as many as `size` says, 2"),
        ({"size": 10**11}, "`hosts` names 2; expected as many as `size` says, 100000000000"),
        ({"size": -1}, "`size` is -1; expected 2 ranks or more"),
        ({"size": 1, "hosts": ["one"]}, "`size` is 1; expected 2 ranks or more"),
        ({"size": "2"}, "Expected `int`, got `str` - at `$.ranks.size`"),
        ({"backend": "ring; rm -rf x"}, "`backend` is 'ring; rm -rf x'; expected one of ring, nccl, jaccl, mpi"),
        ({"connections": 0}, "`connections` is 0; expected 1 to 1024"),
        ({"connections": 10**9}, "`connections` is 1000000000; expected 1 to 1024"),
    ],
)
def test_who_trained_together_is_read_with_care(tmp_path, change, said):
    path = runs.as_ranks(runs.recorded(tmp_path), "one", "two")
    assert runs.here("ranks", path, "--step", 6).code == 0
    runs.edit_json(path / "run.json", lambda document: document["ranks"].update(change))
    for command in (("ranks", path, "--step", 6), ("verify", path)):
        sentence = runs.here(*command).sentence
        assert f"{path / 'run.json'} is damaged: {said}" in sentence and "$.ranks" in sentence
    with pytest.raises(RunError, match="is damaged"):
        wb.open_run(path)


@pytest.mark.parametrize(
    ("step", "change", "said"),
    [
        (6, {"ranks": [{"rank": 0}]}, "numbered 0; expected 0 to 1, each once"),
        (6, {"ranks": ...}, "it has no `ranks`"),
        (
            6,
            {"ranks": [{"rank": 0}, {"rank": 1}], "loss": ..., "loss_bits": ...},
            "logged no loss at step 6; expected one of each",
        ),
        (5, {"ranks": [{"rank": 0, "loss_bits": "owned"}] * 2}, "what the line of step 5 says of its ranks is damaged"),
    ],
)
def test_a_table_of_ranks_is_not_made_of_a_damaged_line(tmp_path, step, change, said):
    path = runs.as_ranks(runs.recorded(tmp_path), "one", "two")
    runs.edit_line(path, step, **change)
    assert said in runs.here("ranks", path, "--step", 6).sentence


def test_a_table_of_ranks_without_batch_hashes_says_so(tmp_path):
    path = runs.as_ranks(runs.recorded(tmp_path), "one", "two")
    runs.edit_line(path, 6, batch_hash=...)
    assert runs.here("ranks", path, "--step", 6).out.count("not recorded") == 2
    found = runs.strict(runs.here("ranks", path, "--step", 6, "--json").out)
    assert [one["batch_hash"] for one in found["ranks"]] == [None, None]


def test_a_run_of_one_process_has_nothing_of_ranks():
    run = wb.open_run(runs.recorded_read_only())
    assert b"ranks" not in (run.path / "run.json").read_bytes()
    assert b"ranks" not in (run.path / "telemetry.jsonl").read_bytes()
    assert not list((run.path / "checkpoints").glob("*.ranks"))
    assert world() == World() and exchange(b"x") == [b"x"] and exchange_json([1]) == [[1]]


def test_who_started_a_process_is_told_by_what_the_launcher_left():
    ring = {"MLX_RANK": "0", "MLX_HOSTFILE": "/tmp/h"}
    assert backend_here({}) is None and backend_here({"MLX_RANK": "0"}) is None
    assert backend_here(ring) == "ring"
    assert backend_here({"MLX_RANK": "1", "NCCL_HOST_IP": "127.0.0.1", "MLX_WORLD_SIZE": "2"}) == "nccl"


USUAL = [2.0, 2.1, 1.9, 2.2] * 3
NONE = "No rank's batch stands out in step 5: losses from 2 to "
FEW = "; too few steps come before it to say which are unusual"


@pytest.mark.parametrize(
    ("losses", "past", "ranks", "said"),
    [
        ([2.0, 9.0, 2.1], USUAL, [1], "Rank 1's batch carried step 5: loss 9, against 2 to 2.1 on ranks 0, 2."),
        ([2.0, 2.1], USUAL, [], f"{NONE}2.1."),
        ([9.0, 9.5], USUAL, [0, 1], "Step 5 is alike on all 2 ranks: every rank's loss stands out."),
        ([2.0, np.nan], USUAL, [1], "Rank 1's batch carried step 5: loss NaN, against 2 on rank 0."),
        ([2.0, 9.0], USUAL[:2], [], f"{NONE}9{FEW}."),
        ([2.0, 9.0], [2.0] * 20, [], f"{NONE}9{FEW}."),
    ],
)
def test_whose_batch_carried_a_step(losses, past, ranks, said):
    found = carried(losses, past)
    assert found.ranks == ranks and found.sentence(5) == said
