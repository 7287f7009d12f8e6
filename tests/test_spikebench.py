"""SpikeBench: its cases are the seed's alone, no answer can come from a label, and its figures are what they claim."""

import functools
import json
from collections import Counter
from pathlib import Path

import msgspec
import pandas as pd
import pytest
import runs
from rich.console import Console

from workbench.bench import baselines, casebook, scores, spikebench, trial
from workbench.bench.casebook import HEALTHY, NATURAL, SIZES, VARIANTS, Case, Variant, plan
from workbench.bench.outcome import CASE, LABEL, NOTHING, OUTCOME, RUN, Answer, Outcome, hopeless
from workbench.bench.spikebench import parse_seeds, run_bench
from workbench.bench.spikebench_report import Bench
from workbench.errors import ExperimentError, RunError
from workbench.faults import KINDS, parse
from workbench.trainer.training import fresh

# ---------------------------------------------------------------------------------------------------------------- plan


def test_the_seed_decides_everything():
    assert plan([1, 2]) == plan([1, 2]) and plan([1, 2]) == plan([1, 2, 1])
    one, other = plan([1]), plan([2])
    assert [case.steps for case in one] != [case.steps for case in other]
    assert {case.fault for case in one} != {case.fault for case in other}
    by_name = {case.name: case for case in plan([2, 1])}  # beside another seed, in another turn of the sizes
    assert all(by_name[case.name] == case for case in plan([2]) if case.name in by_name)


def test_every_fault_has_a_case_and_so_has_no_fault():
    assert {variant.fault for variant in VARIANTS} == {HEALTHY, NATURAL, *KINDS}
    assert len({case.name for case in plan([1, 2])}) == len(plan([1, 2])) == 2 * len(VARIANTS)
    assert 10 <= len(plan([1, 2], quick=True)) <= 14


def test_default_seeds_are_unseen_and_sizes_too():
    assert all(case.seed >= casebook.FIRST_UNSEEN for case in plan())
    assert {case.size for case in plan()} == set(casebook.DEFAULT_SIZES)


@pytest.mark.parametrize("size", SIZES)
def test_every_case_can_be_planted(tmp_path, size):
    for case in plan([3], [size]):
        given = {"out": tmp_path / case.name, "corpus": runs.corpus(), "steps": casebook.HORIZON, "device": "cpu"}
        job = fresh(given | case.options | {"seed": case.seed, "faults": [case.fault] if case.fault else []})
        last = case.steps if case.fault is None else parse(case.fault).step + casebook.WITHIN
        assert last <= case.steps <= job.config.steps
        assert all(casebook.QUIET <= step <= case.steps or case.steps < casebook.QUIET for step in case.ask)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"faults": ["rot"]}, "fault 'rot' is unknown"),
        ({"sizes": ["vast"]}, "size 'vast' is unknown"),
        ({"seeds": [-1]}, "seed -1 is out of range"),
        ({"seeds": []}, "no case to run"),
        ({"faults": ["no-clip"], "quick": True}, "no case to run"),
    ],
)
def test_a_plan_of_nothing_is_refused(given, sentence):
    with pytest.raises(ExperimentError, match=sentence):
        plan(**given)


def test_seeds_are_numbers_and_ranges():
    assert parse_seeds("1000..1002") == [1000, 1001, 1002] and parse_seeds("4,7..8") == [4, 7, 8]
    for text in ("", "a", "1..", "3..1", "1...3", "-1", "1,,2", "0..9999999", "²"):
        with pytest.raises(ExperimentError, match="malformed"):
            parse_seeds(text)


# --------------------------------------------------------------------------------------------------------------- trial

SHORTEST = (  # faults that are visible at once: NaN
    Variant("ignored-all", "targets-ignored", steps=(54, 56)),
    Variant("v-bit", "v-bit", steps=(8, 9)),
    Variant("too-many", "garbage", {"rows": "99"}, steps=(8, 9)),  # the batch has no so many rows
)


def smallest(number):
    return casebook.draw(SHORTEST[number], seed=1, size="shallow")


class Says:
    """A verdict, as far as the bench reads one."""

    def __init__(self, verdict, **culprit):
        self.verdict, self.culprit = verdict, culprit

    def to_json(self):
        return json.dumps({"verdict": self.verdict, "culprit": self.culprit, "seconds": 1.0, "step_times": 12.0})


@functools.cache
def performed():
    """The folder and the outcome of a case; whoever answers sees the run without its label."""
    folder = runs.scratch() / "trial"
    folder.mkdir()

    def ask(run, step):
        assert not (run.path / "planted.json").exists()
        return Says("data", step=step, asked=run.path.name)

    return folder, trial.perform(smallest(0), folder, ask)


def test_a_trial_asks_about_the_flagged_step_without_showing_the_label():
    folder, outcome = performed()
    step = parse(smallest(0).fault).step
    (answer,) = outcome.answers
    assert outcome.visible and outcome.applied == "data" and (answer.step, answer.expected) == (step, "data")
    assert answer.rule == "non_finite" and answer.said["culprit"] == {"step": step, "asked": RUN}
    assert len(answer.culprit["rows"]) == 8 and json.loads((folder / LABEL).read_text())["fault"] == "targets-ignored"
    assert (outcome.judged, outcome.alarms) == (step - 51, [])
    assert outcome.environment["mlx"] and outcome.training_seconds > 0


def test_a_run_that_is_there_is_not_trained_again():
    folder, first = performed()
    before = runs.digest(folder)

    def fails(run, step):
        raise RuntimeError("no idea")

    outcome = trial.perform(smallest(0), folder, fails)
    assert runs.digest(folder) == before and outcome.training_seconds is None
    (answer,) = outcome.answers
    assert (answer.said, answer.failed, answer.step) == (None, "RuntimeError: no idea", first.answers[0].step)


def test_what_no_rule_sees_is_asked_at_its_own_step_and_is_no_spike(tmp_path):
    folder, _ = performed()
    label = json.loads((folder / LABEL).read_text())
    case = msgspec.structs.replace(smallest(0), fault="repeated-batch@30")
    run = trial.open_run(folder / RUN)
    label |= {"step": 30, "expected_verdict": "no-spike", "culprit": {"step": 30, "of": 29}}
    outcome = trial._look(case, run, label)
    assert not outcome.visible and [(one.step, one.rule, one.expected) for one in outcome.answers] == [
        (30, None, "no-spike")
    ]
    label |= {"step": parse(smallest(0).fault).step - 2}  # a rule fires after all, so its nature is what is expected
    (answer,) = trial._look(case, run, label).answers
    assert (answer.step, answer.expected) == (label["step"] + 2, "data")


def test_a_healthy_run_is_asked_where_no_rule_fires(tmp_path):
    folder, _ = performed()
    spike = parse(smallest(0).fault).step
    case = msgspec.structs.replace(smallest(0), fault=None, ask=[spike, 30, 30, 52, 53], asks=2)
    outcome = trial._look(case, trial.open_run(folder / RUN), {})
    assert [answer.step for answer in outcome.answers] == [30, 52] and outcome.visible is None
    assert {answer.expected for answer in outcome.answers} == {"no-spike"}
    assert (outcome.judged, outcome.alarms) == (case.steps - 50, [*range(spike, case.steps + 1)])  # NaN from there on


def test_where_rules_fire_on_their_own_the_first_such_step_is_asked_about():
    folder, _ = performed()
    case = msgspec.structs.replace(smallest(0), fault=None, natural=True)
    outcome = trial._look(case, trial.open_run(folder / RUN), {})
    assert [(one.step, one.expected) for one in outcome.answers] == [(parse(smallest(0).fault).step, NOTHING)]
    assert (outcome.judged, outcome.alarms) == (0, [])


# --------------------------------------------------------------------------------------------------------------- bench


@pytest.fixture
def tiny_plan(monkeypatch):
    monkeypatch.setattr(casebook, "VARIANTS", SHORTEST)


def test_a_bench_counts_a_crash_keeps_its_runs_and_goes_on(tmp_path, tiny_plan):
    told = []
    given = {"seeds": [1], "sizes": ["shallow"], "out": tmp_path / "bench", "processes": 2}
    bench = run_bench(**given, progress=lambda *state: told.append(state))
    assert [outcome.case.name for outcome in bench.outcomes] == [smallest(number).name for number in range(3)]
    assert [outcome.visible for outcome in bench.outcomes] == [True, True, True]
    broken = bench.outcomes[2]
    assert "rows=99" in broken.failed and bench.scores.failed[-1] == broken.case.name
    assert bench.scores.top1.of == 3 and bench.scores.top1.right <= 2
    assert [state[:2] for state in told] == [(0, 3), (1, 3), (2, 3), (3, 3)]
    kept = {path: path.stat().st_mtime_ns for path in given["out"].rglob("*.*")}
    for name in (smallest(0).name, smallest(1).name):
        assert (given["out"] / name / OUTCOME).exists() and not list((given["out"] / name / RUN).glob("planted*"))

    (given["out"] / smallest(1).name / OUTCOME).unlink()  # as if it had been interrupted in the midst of a run
    (given["out"] / smallest(1).name / LABEL).unlink()
    told.clear()
    again = run_bench(**given, progress=lambda *state: told.append(state))
    assert told[0][:2] == (1, 3) and again.reused == 1 and "not repeated: 1" in "".join(again.notices())
    assert again.outcomes[0] == bench.outcomes[0] and again.outcomes[1].training_seconds is not None
    assert again.outcomes[1].answers[0].step == bench.outcomes[1].answers[0].step
    changed = {path for path, then in kept.items() if not path.exists() or path.stat().st_mtime_ns != then}
    assert changed and all(smallest(0).name not in path.parts for path in changed)


def test_a_folder_with_another_case_is_refused(tmp_path, tiny_plan):
    folder = tmp_path / smallest(0).name
    folder.mkdir()
    other = msgspec.structs.replace(smallest(0), steps=9)
    (folder / CASE).write_bytes(msgspec.json.encode(other))
    with pytest.raises(RunError, match="holds another case of this name"):
        run_bench(seeds=[1], sizes=["shallow"], out=tmp_path)
    (folder / CASE).write_text("{")
    with pytest.raises(RunError, match="is damaged"):
        run_bench(seeds=[1], sizes=["shallow"], out=tmp_path)
    with spikebench._folder(tmp_path), pytest.raises(RunError, match="in use by another bench"):
        run_bench(seeds=[1], sizes=["shallow"], out=tmp_path)


# --------------------------------------------------------------------------------------------------------------- score


def outcome(
    name,
    applied,
    expected,
    said,
    *,
    culprit=None,
    named=None,
    fault="garbage@9",
    exact=True,
    judged=0,
    alarms=(),
    **facts,
):
    """An outcome of one question; `said` None: it failed."""
    case = Case(name=name, fault=fault, seed=1, size="tiny", steps=9, options={}, ask=[], asks=1)
    answer = Answer(step=9, rule=None, expected=expected, culprit=culprit or {}, **facts)
    if said is None:
        answer.failed = "it broke"
    else:
        answer.said = {"verdict": said, "culprit": named or {}, "exact": exact, "step_times": 10.0}
        answer.seconds = 2.0
    visible = None if fault is None else expected != "no-spike"
    found = Outcome(case=case, applied=applied, visible=visible, answers=[answer])
    found.judged, found.alarms = judged, list(alarms)
    return found


ROWS = [{"row": row, "source": "1.bin", "offset": 51 * row} for row in range(3)]
SAME_ROWS = [entry | {"source": f"/data/{entry['source']}", "loss": 9.0} for entry in reversed(ROWS)]
LANES = {"step": 9, "lanes": ["adam_m", "adam_v"]}
MATRIX = {"step": 9, "lanes": ["weights"], "layer": "blocks.0.mlp.up", "parameter": "blocks.0.mlp.up.weight"}
MADE = [
    outcome("a", "data", "data", "data", culprit={"rows": ROWS}, named={"rows": SAME_ROWS}, tripled=True, loudest="x"),
    outcome("b", "data", "data", "data", culprit={"rows": ROWS}, named={"rows": ROWS[:2]}, loudest="x"),
    outcome("c", "data", "data", "schedule", culprit={"rows": ROWS}, named={"rows": ROWS}, loudest="y"),
    outcome("d", "data", "data", None, culprit={"rows": ROWS}, tripled=True, loudest="x"),
    outcome("e", "state", "resume", "resume", culprit=LANES, named={"lanes": ["adam_v", "adam_m"]}, loudest="x"),
    outcome("f", "state", "resume", "resume", culprit=MATRIX, named=MATRIX | {"step": 1}, loudest="blocks.0.mlp.up"),
    outcome("g", "state", "resume", "optimizer", culprit=MATRIX, loudest="y", tripled=True),
    outcome("h", "schedule", "schedule", "schedule", culprit={"step": 9}, named={"step": 8}, loudest="x"),
    outcome("i", "transient", "transient-fault", "data", culprit={"layer": "x"}, exact=False, loudest="x"),
    outcome("j", "state", "no-spike", "no-spike", culprit=LANES, judged=100, alarms=[70]),
    outcome("k", None, "no-spike", "data", fault=None, judged=200, alarms=[60, 90]),
    outcome("l", None, "no-spike", "no-spike", fault=None, judged=200, tripled=True),
    outcome("p", None, NOTHING, "curvature", fault=None),
    outcome("q", None, NOTHING, "unknown", fault=None),
    outcome("r", None, NOTHING, "resume", fault=None),
    hopeless(Case(name="m", fault="lr@9", seed=1, size="tiny", steps=9, options={}, ask=[], asks=1), "it crashed"),
]


def test_the_matrix_counts_what_was_said():
    counts = Counter()
    for one in MADE:
        for answer in one.answers:
            counts[answer.expected, answer.said["verdict"] if answer.said else "failed"] += 1
    matrix = scores.confusion(scores.table(MADE))
    assert {(row, column): matrix.at[row, column] for row in matrix.index for column in matrix} == {
        (row, column): counts[row, column] for row in matrix.index for column in matrix
    }
    assert matrix.to_numpy().sum() == len(MADE) == sum(counts.values())
    known = ["data", "optimizer", "schedule", "curvature", "resume", "unknown", "no-spike", "failed"]
    assert list(matrix.columns) == known and list(matrix.index)[-1] == NOTHING


def test_accuracies_have_the_denominators_they_claim():
    found = scores.score(MADE)
    assert (found.top1.right, found.top1.of) == (5, 10)  # a, b, e, f, h of a to i and m
    assert (found.data_and_state.right, found.data_and_state.of) == (3, 7)  # a, e, f of a to g
    assert {kind: (share.right, share.of) for kind, share in found.culprits.items()} == {
        "data": (1, 4),
        "state": (2, 3),
        "schedule": (0, 2),
        "transient": (0, 1),
    }
    assert (found.quiet.right, found.quiet.of) == (2, 3)
    assert (found.inexact.right, found.inexact.of) == (1, 1)
    assert (found.invented.right, found.invented.of) == (1, 3)  # r of p, q, r
    assert (found.alarms.right, found.alarms.of) == (3, 500)
    assert (found.alarms_healthy.right, found.alarms_healthy.of) == (2, 400)
    assert found.missed == ["j"] and found.failed == ["d", "m"]
    assert found.seconds == (2.0, 2.0) and found.step_times == (10.0, 10.0)


def test_a_failure_is_a_wrong_answer_and_never_missing():
    before = scores.score(MADE[:1])
    crashed = hopeless(Case(name="n", fault="garbage@9", seed=1, size="tiny", steps=9, options={}, ask=[], asks=1), "?")
    after = scores.score([MADE[0], crashed])
    assert (before.top1.of, after.top1.of, after.top1.right) == (1, 2, 1)
    assert (before.data_and_state.of, after.data_and_state.of, after.data_and_state.right) == (1, 2, 1)
    healthy = hopeless(Case(name="o", fault=None, seed=1, size="tiny", steps=9, options={}, ask=[], asks=1), "?")
    assert (scores.score([healthy]).quiet.right, scores.score([healthy]).quiet.of) == (0, 1)


def test_the_baselines_are_scored_over_the_same_faults():
    assert scores.score([]).top1.rate is None
    found = scores.score(MADE)
    assert (found.majority[0], found.majority[1].right, found.majority[1].of) == ("data", 4, 10)
    assert (found.tripled.right, found.tripled.of) == (3, 10)
    assert (found.tripled_cause.right, found.tripled_cause.of) == (2, 10)
    assert (found.layer.right, found.layer.of) == (2, 3)  # f and i of f, g, i: the faults that are of one layer
    # Where "x" is loudest the others are mostly data: a, b and d are right. "y" has c and g, which name each other.
    assert (found.layer_cause.right, found.layer_cause.of) == (3, 10)


def test_leaving_one_out_never_tells_a_case_its_own_truth():
    assert baselines.leave_one_out(["x", "x", "x", "y", None, None], list("aabcdd")) == [
        "a",
        "a",
        "a",
        None,
        None,
        None,
    ]


@pytest.mark.parametrize(
    ("applied", "culprit", "named", "missing"),
    [
        ("data", {"rows": ROWS}, {"rows": [entry | {"offset": 0} for entry in ROWS]}, ["rows"]),
        ("data", {"rows": ROWS}, {"rows": [entry | {"source": "2.bin"} for entry in ROWS]}, ["rows"]),
        ("data", {"rows": ROWS}, {"rows": [0, 1, 2]}, ["rows"]),
        ("data", {"rows": ROWS}, {"rows": [*ROWS, 3]}, ["rows"]),
        ("state", MATRIX, {"lanes": ["weights"]}, ["layer", "parameter"]),
        ("state", LANES, {"lanes": ["adam_v"]}, ["lanes"]),
        ("schedule", {"step": 9}, {"step": 9}, []),
        ("option", {"step": 1, "option": "eps"}, {"option": "beta2"}, ["option"]),
        ("transient", {"step": 9, "layer": "x", "parameter": "x.weight"}, {"layer": "x"}, []),
        ("transient", {"item": "loss", "bit": 3}, {}, ["item"]),
    ],
)
def test_a_culprit_is_named_whole_or_not(applied, culprit, named, missing):
    one = outcome("z", applied, "data", "data", culprit=culprit, named=named)
    assert scores.missed(one, one.answers[0]) == missing


# ----------------------------------------------------------------------------------------------------------- baselines


def test_three_times_the_average_beside_a_slow_reference():
    losses = [3.0 + (step * 7 % 5) / 10 for step in range(80)]
    losses[10], losses[60], losses[61], losses[70] = 90.0, 11.0, 8.0, float("nan")
    flagged = []
    for at, loss in enumerate(losses):
        before = losses[at - 50 : at] if at >= 50 else []
        if loss != loss or (before and loss > 3 * (sum(before) / 50)):
            flagged.append(at + 1)
    assert flagged == [71] or flagged == [61, 71]
    assert baselines.above_average(pd.DataFrame({"step": range(1, 81), "segment": 0, "loss": losses})) == flagged


def test_the_loudest_layer_is_that_of_the_log():
    run = trial.open_run(runs.recorded_read_only())
    (line,) = [line for line in runs.lines(run.path) if line["type"] == "step" and line["step"] == 7]
    norms = line["per_layer_grad_norms"]
    assert baselines.loudest_layer(run, 7) == run.manifest.layers[norms.index(max(norms))]


# -------------------------------------------------------------------------------------------------------------- report


def test_the_report_says_which_seeds_and_what_was_wrong():
    bench = Bench(MADE, seeds=[1])
    console = Console(width=160, record=True, file=open("/dev/null", "w"))
    with console.file:
        console.print(bench)
    text = console.export_text()
    assert "seed 1 (for deriving rules)" in text and "5 of 10 (50.0%)" in text and "rows not named" in text
    assert "Not visible" in text and "it crashed" in text and "3 of 500 (0.60%)" in text
    assert "(unseen)" in Bench(MADE, seeds=[1000, 1001]).sentence()
    assert set(bench.wrong["case"]) == {"b", "c", "d", "g", "h", "i", "k", "m", "r"}
    assert "<table" in bench._repr_html_() and "1 (for deriving rules)" in bench._repr_html_()


def test_json_is_strict_and_complete():
    found = runs.strict(Bench(MADE, seeds=[1000]).to_json())
    assert found["unseen"] is True and found["scores"]["top1"] == {"right": 5, "of": 10}
    assert found["confusion"]["data"]["failed"] == 1 and len(found["outcomes"]) == len(MADE)


def test_the_command_says_what_it_did(monkeypatch):
    given = {}

    def bench(**options):
        given.update(options)
        options["progress"](1, 1, "a")
        return Bench(MADE, seeds=[7])

    monkeypatch.setattr(spikebench, "run_bench", bench)
    said = runs.here("bench", "spikes", "--seeds", "7", "--sizes", "short,tiny", "--faults", "lr,healthy", "--json")
    assert said.code == 0 and runs.strict(said.out)["seeds"] == [7]
    assert (given["seeds"], given["sizes"], given["faults"]) == ([7], ["short", "tiny"], ["lr", "healthy"])
    said = runs.here("bench", "spikes", "--out", Path("kept"), "--again", "--processes", 2)
    assert said.code == 0 and "5 of 10" in said.out
    assert given["again"] and given["out"] == Path("kept") and given["seeds"] == casebook.DEFAULT_SEEDS


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--again"], "--again goes with --out"),
        (["--seeds", "x"], "malformed"),
        (["--sizes", "vast"], "size 'vast' is unknown"),
        (["--faults", "rot"], "fault 'rot' is unknown"),
    ],
)
def test_bad_options_are_one_sentence(options, sentence):
    assert sentence in runs.here("bench", "spikes", *options).sentence
