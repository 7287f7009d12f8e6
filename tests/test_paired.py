"""Two runs beside each other: identical twins, one changed setting, and every reason not to blame it."""

import functools
import json
import shutil
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
import runs

from workbench import compare_runs, fork, fork_point, open_run
from workbench.bits import flip_bit, float_bits
from workbench.compare import ITEMS, compare_evidence, overall
from workbench.errors import ReplayError, RunError
from workbench.record import Recorder

STEPS = 12


@functools.cache
def trained(name, *flags, steps=STEPS, corpus=None):
    """A run trained in this process, with the flags of `runs.recorded_read_only` unless others are given."""
    out = runs.scratch() / "paired" / name
    said = runs.here(
        *("train", "--corpus", corpus or runs.corpus(), "--steps", steps, "--out", out, "--save-every", 0),
        *(*runs.FLAGS, "--warmup", 1, *flags),
    )
    assert said.code == 0, said.err
    return out


def plain():
    return trained("plain")


@pytest.fixture
def copies(tmp_path):
    """Two copies of one run under other names and identities, to be damaged."""

    def copied(name, source):
        path = Path(shutil.copytree(source, tmp_path / name))
        identity = name * (32 // len(name))
        runs.edit_json(path / "run.json", lambda d: d.update(run=identity))
        lines = [json.loads(line) | {} for line in (path / "telemetry.jsonl").read_text().splitlines()]
        for line in lines:
            if line["type"] == "meta":
                line["run"] = identity
        (path / "telemetry.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path

    return lambda a=None, b=None: (copied("left", a or plain()), copied("rite", b or plain()))


def part(found):
    return found.parting.step, found.parting.item, found.parting.layer


# -------------------------------------------------------------------------------------------------------------- twins


def test_the_same_run_twice_is_identical():
    """A/A: recorded by two processes."""
    here = trained("twin", "--spike-window", 4, "--val-every", 5, "--val-split", 0.2, "--warmup", 1)
    there = runs.workbench(
        *("train", "--corpus", runs.corpus(), "--steps", STEPS, "--out", runs.scratch() / "paired" / "other"),
        *("--save-every", 5, *runs.FLAGS, "--warmup", 1, "--spike-window", 4, "--val-split", 0.2),
    )
    assert there.code == 0, there.err
    found = compare_runs(here, runs.scratch() / "paired" / "other")
    assert found.attribution == "identical" and found.parting is None and found.layer is None
    assert found.sentence == "twin and other are identical, bit for bit, over 12 steps (1 to 12)."
    assert (found.table["verdict"] == "exact").all() and (found.table["difference"] == 0).all()
    assert {one.name: one.kind for one in found.settings} == {
        "config.val_every": "no effect",
        "save_every": "no effect",
    }


def test_a_longer_twin_is_identical_as_far_as_both_go():
    short, long = (trained(f"constant{steps}", "--lr-schedule", "constant", steps=steps) for steps in (3, STEPS))
    found = compare_runs(long, short)
    assert found.attribution == "identical" and "over 3 steps (1 to 3), although they differ in" in found.sentence
    assert [one.name for one in found.knobs] == ["config.schedule.steps"]


def test_a_run_beside_itself():
    found = compare_runs(open_run(plain()), plain())
    assert found.attribution == "identical" and "Both are the same run." in found.notices


def test_a_resumed_run_is_its_own_twin(tmp_path):
    path = runs.segmented(tmp_path)
    found = compare_runs(runs.recorded_read_only(), path)
    assert found.attribution == "identical" and len(found.table) == STEPS
    assert found.notices == [
        "Steps 9 to 12 of run stand in several segments with the same bits.",
        "Both are the same run.",
    ]


# -------------------------------------------------------------------------------------------------- one changed setting


@pytest.mark.parametrize(
    ("flags", "knob", "where", "layer"),
    [
        (("--max-lr", "2e-3"), "config.schedule.max_lr", (1, "state.weights", None), (2, "embedding")),
        (("--beta1", "0.8"), "config.adamw.beta1", (1, "adam_m_norms", "embedding"), (1, "embedding")),
        (("--beta2", "0.9"), "config.adamw.beta2", (1, "adam_v_norms", "embedding"), (1, "embedding")),
        (("--weight-decay", "0.2"), "config.adamw.weight_decay", (1, "state.weights", None), (2, "embedding")),
        (("--grad-clip", "0.5"), "config.clip", (1, "adam_m_norms", "embedding"), (1, "embedding")),
        (("--grad-clip", "0"), "config.clip", (1, "adam_m_norms", "embedding"), (1, "embedding")),
        (
            ("--dropout", "0.1"),
            "config.model.dropout",
            (1, "per_layer_act_norms", "blocks.0.attention_norm"),
            (1, "blocks.0.attention_norm"),
        ),
        (("--seed", "1"), "config.seed", (0, "state.weights", None), (1, "embedding")),
        (("--val-split", "0.3"), "config.val_split", (1, "batch_hash", None), (1, "embedding")),
        (("--batch", "3"), "config.batch", (1, "batch_hash", None), (1, "embedding")),
        (("--fault", "garbage@7"), "config.substitutions", (7, "batch_hash", None), (7, "embedding")),
        (("--min-lr", "1e-4"), "config.schedule.min_lr", (3, "state.weights", None), (4, "embedding")),
    ],
    ids=lambda value: "".join(value[:2]) if isinstance(value, tuple) and isinstance(value[0], str) else "",
)
def test_a_difference_is_due_to_the_one_setting_that_differs(flags, knob, where, layer):
    found = compare_runs(plain(), trained("".join(flags).strip("-").replace("@", ""), *flags))
    assert [one.name for one in found.knobs] == [knob]
    assert part(found) == where and found.parting.start == (where[0] == 0)
    assert (found.layer.step, found.layer.layer) == layer
    assert found.attribution == "one setting"
    assert f"is due to {knob} (" in found.sentence and ") alone: " in found.sentence
    assert found.table.loc[found.table["step"] < where[0], "verdict"].eq("exact").all()
    assert found.table["first"].dropna().iloc[0] == (where[1] if where[0] else "batch_hash")


def test_another_corpus_is_a_setting(tmp_path):
    text = runs.corpus().read_text()
    changed = tmp_path / "corpus.txt"
    changed.write_text(text.replace("q", "z"))
    found = compare_runs(plain(), trained("changed", corpus=changed))
    (knob,) = found.knobs
    assert knob.name == "data.0" and "sha256" in knob.a and knob.a != knob.b
    assert part(found) == (1, "batch_hash", None) and found.attribution == "one setting"
    moved = tmp_path / "moved" / "corpus.txt"
    moved.parent.mkdir()
    moved.write_text(text)
    assert compare_runs(plain(), trained("moved", corpus=moved)).attribution == "identical"  # content, not place


def test_a_setting_that_never_acts_leaves_twins():
    one, other = trained("clip30", "--grad-clip", 30), trained("clip20", "--grad-clip", 20)
    found = compare_runs(one, other)
    assert found.attribution == "identical"
    assert found.sentence.endswith("although they differ in config.clip (30.0 against 20.0).")


def test_clipping_acts_first_where_a_norm_is_above_the_lower_limit():
    norms = open_run(plain()).steps["grad_norm"].to_numpy()
    limits = [float(f"{limit:.3f}") for limit in (np.sort(norms)[-3] + 0.01, 1e3)]
    one, other = (trained(f"limit{limit}", "--grad-clip", limit) for limit in limits)
    expected = int(np.flatnonzero(open_run(other).steps["grad_norm"].to_numpy() > limits[0])[0]) + 1
    assert expected > 1
    found = compare_runs(one, other)
    assert part(found)[:2] == (expected, "adam_m_norms") and found.attribution == "one setting"


# --------------------------------------------------------------------------------------- reasons not to blame a setting


def test_two_settings_are_not_one():
    found = compare_runs(plain(), trained("two", "--max-lr", "2e-3", "--dropout", "0.1"))
    assert found.attribution == "not attributable"
    assert "2 settings differ: config.model.dropout (0.0 against 0.1) and config.schedule.max_lr" in found.sentence


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d["segments"][0]["environment"].update(mlx="0.1.2"), "the environments differ: environment.mlx ("),
        (lambda d: d["segments"][0]["environment"]["blas"].update(library="x.so"), "environment.blas.library ("),
        (lambda d: d["segments"][0]["environment"]["variables"].update(A="1"), "variables.A (nothing against 1)"),
        (lambda d: d.update(workbench="9.9"), "the code differs: workbench (0.1.0 against 9.9)"),
        (lambda d: d["options"].update(accumulate=2), "2 settings differ"),
    ],
)
def test_nothing_else_may_differ(copies, change, words):
    a, b = copies(b=trained("max-lr2e-3", "--max-lr", "2e-3"))
    if "2 settings" in words:
        runs.edit_json(b / "run.json", lambda d: d["rebuild"]["config"].update(accumulate=2))
    runs.edit_json(b / "run.json", change)
    found = compare_runs(a, b)
    assert found.attribution == "not attributable" and words in found.sentence
    assert "can't be put down to" in found.sentence


@pytest.mark.parametrize(
    ("backend", "deterministic", "step", "words"),
    [
        ("cuda", True, 7, None),  # six steps that two executions performed alike
        ("cuda", False, 7, "on cuda with stock operations a step varies by itself"),
        ("cuda", True, 1, "no step that both performed alike shows that steps repeat on cuda"),
        ("metal", True, 1, "let workbench doctor RUN prove it there"),
        ("cpu", False, 7, None),  # there stock operations are deterministic
    ],
)
def test_where_steps_may_vary_nothing_is_put_down_to_a_setting(copies, backend, deterministic, step, words):
    other = trained(f"faultgarbage{step}", "--fault", f"garbage@{step}")
    paths = copies(b=other)

    def elsewhere(d):
        d["segments"][0]["environment"]["backend"] = backend
        d["options"]["deterministic"] = d["rebuild"]["config"]["deterministic"] = deterministic

    for path in paths:
        runs.edit_json(path / "run.json", elsewhere)
    found = compare_runs(*paths)
    assert part(found)[:2] == (step, "batch_hash")
    assert found.attribution == ("one setting" if words is None else "not attributable")
    assert words is None or words in found.sentence


def test_identical_is_a_fact_wherever_it_is_found(copies):
    paths = copies()
    for path in paths:
        runs.edit_json(path / "run.json", lambda d: d["options"].update(deterministic=False))
        runs.edit_json(path / "run.json", lambda d: d["segments"][0]["environment"].update(backend="cuda"))
    assert compare_runs(*paths).attribution == "identical"


@pytest.mark.parametrize("index", [0, 4])
@pytest.mark.parametrize("name", ["per_layer_act_norms", "per_layer_grad_norms", "adam_m_norms", "adam_v_norms"])
def test_one_bit_of_one_layer_parts_twins_and_no_setting_explains_it(copies, name, index):
    a, b = copies()
    line = next(line for line in runs.lines(b) if line["type"] == "step" and line["step"] == 5)
    values = line[name]
    values[index] = float(str(np.array(int(flip_bit(float_bits(values[index])), 16), np.uint32).view(np.float32)))
    runs.edit_line(b, 5, **{name: values})
    found = compare_runs(a, b)
    layer = open_run(a).manifest.layers[index]
    assert part(found) == (5, name, layer) and found.parting.ulp == 1
    assert found.attribution == "not attributable"
    assert "no setting differs, and yet they part at step 5" in found.sentence
    assert "workbench doctor RUN says whether a step repeats there" in found.sentence
    assert list(found.table.loc[found.table["verdict"] == "mismatch", "step"]) == [5]


@pytest.mark.parametrize(("name", "expected"), [("per_layer_act_norms", 2), ("per_layer_grad_norms", 6)])
def test_of_several_layers_the_first_in_order_of_execution_is_named(copies, name, expected):
    a, b = copies()
    values = next(line for line in runs.lines(a) if line["type"] == "step" and line["step"] == 5)[name]
    runs.edit_line(b, 5, **{name: [2 * v if i in (2, 4, 6) else v for i, v in enumerate(values)]})
    assert part(compare_runs(a, b)) == (5, name, open_run(a).manifest.layers[expected])


@pytest.mark.parametrize("planted", [("per_layer_act_norms", 1), ("adam_m_norms", 1), ("loss", 1)])
def test_runs_that_part_before_the_setting_can_act_part_for_another_reason(copies, planted):
    """A learning rate reaches nothing of step 1 but the weights that it leaves."""
    a, b = copies(b=trained("max-lr2e-3", "--max-lr", "2e-3"))
    name, step = planted
    line = next(line for line in runs.lines(b) if line["type"] == "step" and line["step"] == step)
    if name == "loss":
        bits = flip_bit(line["loss_bits"])
        value = np.array(int(bits, 16), np.uint32).view(np.float32)
        runs.edit_line(b, step, loss=float(str(value)), loss_bits=bits)
    else:
        runs.edit_line(b, step, **{name: [2 * line[name][0], *line[name][1:]]})
    found = compare_runs(a, b)
    assert found.attribution == "not attributable"
    assert "before config.schedule.max_lr can act" in found.sentence


def test_a_schedule_acts_first_where_the_logged_rates_differ(copies):
    a, b = copies(b=trained("min-lr1e-4", "--min-lr", "1e-4"))
    state = next(line for line in runs.lines(b) if line["type"] == "step" and line["step"] == 2)["state"]
    runs.edit_line(b, 2, state=state | {"weights": "0" * 32})
    found = compare_runs(a, b)
    assert part(found)[:2] == (2, "state.weights") and "before config.schedule.min_lr can act" in found.sentence


# ---------------------------------------------------------------------------------------------- data order, before all


def test_batches_that_no_setting_decides_are_named_before_any_kernel(copies):
    a, b = copies(b=trained("max-lr2e-3", "--max-lr", "2e-3"))
    for step in range(4, STEPS + 1):
        runs.edit_line(b, step, batch_hash="0" * 64)
    found = compare_runs(a, b)
    assert found.attribution == "not attributable"
    reasons = found.sentence.partition(": ")[2]
    assert reasons.startswith("the batches differ from step 4 on, and no setting that differs decides them")
    assert "before suspecting any kernel" in reasons


def test_a_substitution_explains_the_batches_of_its_own_steps_only(copies):
    a, b = copies(b=trained("faultgarbage7", "--fault", "garbage@7"))
    assert compare_runs(a, b).attribution == "one setting"
    runs.edit_line(b, 9, batch_hash="0" * 64)
    found = compare_runs(a, b)
    assert part(found)[:2] == (7, "batch_hash") and found.attribution == "not attributable"
    assert "the batches differ from step 9 on, and no setting that differs decides them" in found.sentence


class Shuffled(runs.Numbers):
    """The shuffle seed was dropped: the order of the data is another each time."""

    def __init__(self, seed):
        super().__init__()
        self.seed = seed

    def __next__(self):
        self.position += 1
        draw = np.random.default_rng([self.seed, self.position])
        x = draw.normal(size=(4, 3)).astype(np.float32)
        return x, x.sum(1, keepdims=True)


def record(out, *, sampler=None, lr=1e-2, beta2=0.95, arguments=None, seed=7, steps=4, **recording):
    mx.random.seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    optimizer = optim.AdamW(lr, betas=[0.9, beta2], bias_correction=True)
    factory = {} if arguments is None else {"factory": "runs:build", "arguments": arguments}
    with Recorder(
        out,
        model,
        optimizer,
        runs.squares,
        sampler or runs.Numbers(),
        compile=False,
        spikes=None,
        **factory,
        **({"save_every": 0} | recording),
    ) as recorder:
        for batch in recorder.batches(steps=steps):
            recorder.step(batch)
    return out


def test_a_dropped_shuffle_seed_is_data_order(tmp_path):
    found = compare_runs(*(record(tmp_path / f"r{seed}", sampler=Shuffled(seed)) for seed in (1, 2)))
    assert part(found) == (1, "batch_hash", None) and found.knobs == []
    assert (
        "the batches differ from step 1 on" in found.sentence and "look at the sampler and its seed" in found.sentence
    )


def test_loops_of_ones_own(tmp_path):
    base = record(tmp_path / "base")
    assert compare_runs(base, record(tmp_path / "again")).attribution == "identical"
    found = compare_runs(base, record(tmp_path / "lr", lr=2e-2))  # kept in the optimizer's state: only telemetry has it
    assert [one.name for one in found.knobs] == ["lr"] and found.attribution == "one setting"
    assert "as far as manifests tell, which do not hold the code of a loop of your own" in found.sentence
    found = compare_runs(base, record(tmp_path / "beta", beta2=0.9))
    assert [one.name for one in found.knobs] == ["optimizer.betas.1"] and part(found)[:2] == (1, "adam_v_norms")
    found = compare_runs(base, record(tmp_path / "init", seed=8))
    assert found.parting.start and found.attribution == "not attributable"
    assert "no setting differs, and yet they part in state 0" in found.sentence
    assert "code, seeds and data of a loop of your own are not in its manifest" in found.sentence


def test_what_an_argument_of_a_factory_decides_is_its_consequence(tmp_path):
    paths = [
        record(tmp_path / f"{beta2}-{lr}", beta2=beta2, lr=lr, arguments={"beta2": beta2, "lr": lr})
        for beta2, lr in ((0.95, 1e-2), (0.9, 1e-2), (0.9, 2e-2))
    ]
    found = compare_runs(*paths[:2])
    kinds = {one.name: one.kind for one in found.settings}
    assert kinds == {"arguments.beta2": "knob", "optimizer.betas.1": "consequence"}
    assert found.attribution == "one setting"
    kinds = {one.name: one.kind for one in compare_runs(*paths[1:]).settings}
    assert kinds == {"arguments.lr": "knob", "lr": "consequence"}
    assert "2 settings differ" in compare_runs(paths[0], paths[2]).sentence


def test_a_loop_that_changed_the_rate_by_hand_is_seen(copies):
    a, b = copies(b=trained("max-lr2e-3", "--max-lr", "2e-3"))
    runs.edit_line(b, 1, before={"learning_rate": ["0x3a83126f"]})
    assert "before step 1 the training loops themselves changed the state" in compare_runs(a, b).sentence


# ------------------------------------------------------------------------------------------------ what was not recorded


def test_too_little_to_call_identical(copies):
    paths = copies()
    for path in paths:
        for step in range(1, STEPS + 1):
            runs.edit_line(path, step, state=..., batch_hash=..., loss_bits=..., grad_norm_bits=...)
    found = compare_runs(*paths)
    assert found.attribution == "unverified" and (found.table["verdict"] == "unverified").all()
    assert "agree over 12 steps (1 to 12) in all that both logged" in found.sentence
    assert found.table["difference"].eq(0).all()


@pytest.mark.parametrize(("removed", "step"), [("batch_hash", 7), ("batch_hash", 6), ("state", 3), ("loss", 1)])
def test_steps_before_that_were_not_logged_prove_nothing(copies, removed, step):
    a, b = copies(b=trained("faultgarbage7", "--fault", "garbage@7"))
    assert compare_runs(a, b).attribution == "one setting"
    runs.edit_line(b, step, **{removed: ...} | ({"loss_bits": ...} if removed == "loss" else {}))
    found = compare_runs(a, b)
    assert found.attribution == "not attributable"
    assert f"of step {step} too little was logged to say that it was alike" in found.sentence


def test_other_methods_of_measuring_are_not_compared(copies):
    a, b = copies()
    runs.edit_json(b / "run.json", lambda d: d.update(norms="another way", fingerprint="another"))
    found = compare_runs(a, b)
    assert found.attribution == "unverified" and len(found.notices) == 2
    assert "Norms were added in other ways" in found.notices[0] and "other methods" in found.notices[1]


def test_other_models_are_compared_by_what_they_share():
    found = compare_runs(plain(), trained("deeper", "--depth", 2))
    assert "The models have other layers" in found.notices[0] and found.layer is None
    assert found.parting.start and {one.name for one in found.knobs} >= {"config.model.depth", "config.model.width"}


def test_numbers_that_are_not_finite_stay_apart_and_json_is_strict(copies):
    a, b = copies()
    runs.edit_line(a, 4, loss=None, loss_bits="0x7fc00000")
    runs.edit_line(b, 4, loss=None, loss_bits="0x7fc00000")
    runs.edit_line(a, 6, loss=None, loss_bits="0x7fc00000")
    runs.edit_line(b, 6, loss=None, loss_bits="0x7f800000")
    runs.edit_line(b, 8, loss=None, loss_bits=...)
    found = compare_runs(a, b)
    table = found.table.set_index("step")
    assert (table.loc[4, "verdict"], table.loc[6, "first"]) == ("exact", "loss")
    assert np.isnan(table.loc[6, "loss_a"]) and np.isinf(table.loc[6, "loss_b"])
    assert table.loc[8, "verdict"] == "unverified" and found.parting.ulp is None
    document = runs.strict(found.to_json())
    assert document["parting"]["a"] == "0x7fc00000" and document["steps"][5]["loss_a"] is None


def test_both_zeros_are_two_values(copies):
    a, b = copies()
    for path, zero in ((a, 0.0), (b, -0.0)):
        values = next(line for line in runs.lines(path) if line.get("step") == 3 and line["type"] == "step")
        runs.edit_line(path, 3, adam_m_norms=[zero, *values["adam_m_norms"][1:]])
    assert part(compare_runs(a, b))[:2] == (3, "adam_m_norms")


def test_a_step_that_one_lacks_is_left_out(copies):
    a, b = copies(b=trained("faultgarbage6", "--fault", "garbage@6"))
    lines = (b / "telemetry.jsonl").read_text().splitlines()
    kept = [line for line in lines if json.loads(line).get("step") != 5]
    (b / "telemetry.jsonl").write_text("\n".join(kept) + "\n")
    found = compare_runs(a, b)
    assert list(found.table["step"]) == [step for step in range(1, STEPS + 1) if step != 5]
    assert found.attribution == "not attributable" and "of step 5 too little was logged" in found.sentence


def test_an_older_manifest_without_a_setting_that_is_off_is_no_difference(copies):
    a, b = copies()
    runs.edit_json(b / "run.json", lambda d: d["rebuild"]["config"].pop("accumulate"))
    runs.edit_json(b / "run.json", lambda d: d["rebuild"]["config"].pop("substitutions"))
    found = compare_runs(a, b)
    assert [one.name for one in found.settings] == ["config.accumulate"]  # it was 1: not nothing


def test_a_fork_says_where_it_came_from(copies):
    a, b = copies()
    identity = open_run(a).manifest.run
    runs.edit_json(b / "run.json", lambda d: d.update(parent={"run": identity, "path": "left", "step": 4}))
    assert "rite is a fork of left, from its state 4." in compare_runs(a, b).notices


# ------------------------------------------------------------------------------------------------- segments, mistakes


def test_a_run_and_its_fork_are_compared_from_the_forks_first_step(tmp_path):
    parent = open_run(runs.recorded_read_only())
    twin, other = (fork(parent, 8, tmp_path / name, changes=how) for name, how in (("twin", []), ("other", ["lr=3x"])))
    for pair in ((parent, twin), (twin, parent)):
        found = compare_runs(*pair)
        assert found.attribution == "identical" and found.table["step"].to_list() == [9, 10, 11, 12]
    assert part(compare_runs(parent, other)) == (9, "state.weights", None)


def test_a_state_changed_outside_of_any_step_is_no_settings_doing():
    def planted(name, *faults):
        return trained(name, *(word for fault in faults for word in ("--fault", fault)))

    both = compare_runs(plain(), planted("both", "garbage@7", "weight-scaled@7"))
    assert both.attribution == "not attributable"
    assert "before step 7 the training loops themselves changed the state" in both.sentence
    seam = "In both segment 1 went on from another state than step 6 had left: weights differs."
    assert both.notices == [seam]
    later = compare_runs(plain(), planted("later", "garbage@7", "moments-zeroed@9"))
    assert later.attribution == "one setting"
    assert ") alone up to step 8, after which the loops changed the state themselves: " in later.sentence
    alike = compare_runs(planted("edited", "weight-scaled@7"), trained("edited2", "--fault", "weight-scaled@7"))
    assert alike.attribution == "identical"


def test_norms_of_other_numbers_of_layers_are_a_difference_not_a_failure(copies):
    left, right = copies()
    runs.edit_line(right, 5, per_layer_act_norms=[1.0, 2.0])
    found = compare_runs(left, right)
    assert part(found) == (5, "per_layer_act_norms", None) and found.parting.b == "2 entries"
    assert found.to_json() and found._repr_html_()


def test_segments_that_disagree_must_be_chosen(tmp_path):
    path = runs.segmented(tmp_path)
    runs.edit_line(path, 10, batch_hash="0" * 64)  # of segment 1
    with pytest.raises(ReplayError, match=r"step 10 stands in segments \[0, 1\].*--segment-a or --segment-b"):
        compare_runs(path, runs.recorded_read_only())
    assert compare_runs(path, runs.recorded_read_only(), segment_a=0).attribution == "identical"
    found = compare_runs(runs.recorded_read_only(), path, segment_b=1)
    assert part(found)[:2] == (10, "batch_hash") and len(found.table) == STEPS
    with pytest.raises(RunError, match="segment 7 does not exist"):
        compare_runs(path, path, segment_a=7, segment_b=0)


def test_runs_without_a_common_step_are_refused(copies):
    a, b = copies()
    lines = [json.loads(line) for line in (b / "telemetry.jsonl").read_text().splitlines()]
    moved = [line | ({"step": line["step"] + 100} if line["type"] == "step" else {}) for line in lines]
    (b / "telemetry.jsonl").write_text("".join(json.dumps(line) + "\n" for line in moved))
    with pytest.raises(ReplayError, match="no step in common: .* has steps 1 to 12, .* has steps 101 to 112"):
        compare_runs(a, b)


@pytest.mark.parametrize(
    "flags", [(), ("--max-lr", "2e-3"), ("--fault", "garbage@7")], ids=lambda flags: "".join(flags)
)
def test_it_agrees_with_the_checker_of_replays_step_by_step(flags):
    """Against the slow way: all bits of all items, through `compare_evidence`."""
    a, b = (
        open_run(plain()),
        open_run(trained("".join(flags).strip("-").replace("@", ""), *flags) if flags else plain()),
    )
    table = compare_runs(a, b).table.set_index("step")
    for step in range(1, STEPS + 1):
        items = compare_evidence(*({**side.evidence(step, 0), "lr": None} for side in (a, b)))  # there it is a setting
        first = [name for name in ITEMS if items[name].verdict == "mismatch"][:1]
        assert table.loc[step, "verdict"] == overall(items)
        assert table.loc[[step], "first"].dropna().to_list() == first


# ------------------------------------------------------------------------------------------------- what people look at


def test_tables_and_html():
    found = compare_runs(plain(), trained("max-lr2e-3", "--max-lr", "2e-3"))
    assert list(found.table) == ["step", "loss_a", "loss_b", "difference", "ulp", "verdict", "first"]
    assert list(found.differences["setting"]) == ["config.schedule.max_lr", "lr"]
    assert list(found.shown_rows()["step"]) == [1, 2, 3, 12]
    html = found._repr_html_()
    assert "due to config.schedule.max_lr" in html and "state.weights" in html


def test_two_folders_of_one_name_are_told_apart(tmp_path):
    path = shutil.copytree(plain(), tmp_path / "plain")
    assert compare_runs(plain(), path).a == str(plain())


def test_command_line():
    said = runs.here("compare", plain(), trained("max-lr2e-3", "--max-lr", "2e-3"))
    assert said.code == 0 and "is due to config.schedule.max_lr (0.001 against 0.002) alone" in said.out
    assert "first item to differ" in said.out
    document = runs.strict(runs.here("compare", plain(), trained("max-lr2e-3", "--max-lr", "2e-3"), "--json").out)
    assert document["attribution"] == "one setting" and len(document["steps"]) == STEPS
    assert document["parting"]["item"] == "state.weights" and document["layer"]["layer"] == "embedding"
    assert document["steps"][0] == {
        "step": 1,
        "loss_a": document["steps"][0]["loss_b"],
        "loss_b": document["steps"][0]["loss_a"],
        "difference": 0.0,
        "ulp": 0,
        "verdict": "mismatch",
        "first": "state.weights",
    }


def test_command_line_refuses_with_a_sentence(tmp_path):
    assert "nowhere does not exist" in runs.here("compare", plain(), "nowhere").sentence
    assert "RUN_B" in runs.here("compare", plain()).sentence
    assert "segment 3" in runs.here("compare", plain(), plain(), "--segment-a", 3).sentence


# ---- how scripts were started


def started(path, *argv, script="/jobs/train.py"):
    runs.edit_json(path / "run.json", lambda held: held["rebuild"].update(script=script, argv=list(argv)))
    return path


def settings(found):
    return [(one.name, one.kind, one.a, one.b) for one in found.settings]


@pytest.fixture
def pair(tmp_path):
    return [record(tmp_path / name) for name in ("base", "other")]


def test_an_option_that_only_names_the_runs_own_folder_is_no_setting(pair):
    a, b = started(pair[0], "--out", "runs/base", "--lr=3"), started(pair[1], "--lr", "3", "--out", "elsewhere/other")
    found = compare_runs(a, b)
    assert settings(found) == [("argv", "no effect", "--out runs/base", "--out elsewhere/other")]
    assert found.attribution == "identical" and "although" not in found.sentence


def test_options_that_differ_are_one_knob_in_one_line(pair):
    a = started(pair[0], "--out", "runs/base", "--fault", "lr", "--at", "-1", "-v", "corpus.txt")
    b = started(pair[1], "--at=5", "--fault", "lr", "--out", "runs/other", "other.txt")
    assert settings(compare_runs(a, b)) == [("argv", "knob", "--at -1 -v corpus.txt", "--at 5 other.txt")]


def test_two_scripts_are_other_code_with_their_command_lines(pair):
    a, b = started(pair[0], "--out", "runs/base"), started(pair[1], "a b", script="/jobs/fork.py")
    assert settings(compare_runs(a, b)) == [("script", "code", "train.py --out runs/base", "fork.py 'a b'")]


def test_a_fork_of_a_loop_of_ones_own_is_said_with_its_changes(tmp_path):
    base = record(tmp_path / "base", save_every=2)
    point = fork_point(base, 2, changes=["lr=0.5x", "reset=m"])
    job = runs.build()
    with Recorder(tmp_path / "forked", *runs.parts(job), compile=False, fork=point) as recorder:
        job.optimizer.learning_rate = 5e-3  # which is the loop's to make
        for batch in recorder.batches(steps=4):
            recorder.step(batch)
    found = compare_runs(base, tmp_path / "forked")
    assert ("fork.reset", "knob", None, "m") in settings(found)
    assert any(one.name == "lr" and one.kind == "knob" for one in found.settings)
    assert "forked is a fork of base, from its state 2, with lr=0.5x and reset=m." in found.notices
