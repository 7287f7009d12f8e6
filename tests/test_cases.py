"""Situations that users met: spikes and NaN (S), and the same seed with different numbers (D), an experiment each."""

import shutil
import threading

import autopsies
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
import runs
from autopsies import AT, Numbered, Vector, planted, planted_read_only, squares
from mlx.utils import tree_map
from models import ByHand, Decoder, job, seeded, token_loss

from workbench import Recorder, compare_runs, open_run
from workbench.cause.adam import fresh
from workbench.errors import ReplayError
from workbench.experiment import Experiment, StepOptions
from workbench.interventions.scene import Scene
from workbench.spikes import SpikeSettings
from workbench.step_report import report_html
from workbench.trace import read

OPTIONS = {"compile": False, "save_every": 10, "spikes": SpikeSettings(window=20)}


def recorded(out, make, steps, **options):
    """A run of `make()`; seeded, so that parameters that it leaves to chance are the same each time."""
    mx.random.seed(3)
    one = make()
    parts = (one.model, one.optimizer, one.loss_fn, one.sampler)
    with Recorder(out, *parts, clip=one.options.clip, step_fn=one.step_fn, **(OPTIONS | options)) as recorder:
        for batch in recorder.batches(steps):
            recorder.step(batch)
    return open_run(out)


def again(make):
    mx.random.seed(3)
    return make()


def sentences(verdict):
    parts = (verdict.evidence, verdict.refuted, verdict.outliers)
    return " ".join([*(one.sentence for part in parts for one in part), *verdict.notices, verdict.reason])


# ---------------------------------------------------------------------------------------------------- spikes and NaN


def test_s1_telemetry_masks_a_loss_that_is_not_finite(tmp_path):
    """Neither a match nor a broken replay: the cause of the NaN is looked for all the same."""
    run = planted(tmp_path, "targets-ignored@{AT}")
    usual = float(run.steps.set_index("step")["loss"][AT - 1])
    bits = f"0x{int(np.float32(usual).view(np.uint32)):08x}"
    runs.edit_line(run.path, AT, loss=usual, loss_bits=bits)
    run = open_run(run.path)
    trace = run.replay(AT)
    (masks,) = [one for one in trace.findings() if "masks" in one]
    assert masks.startswith(f"Telemetry masks a non-finite loss: it has {usual:.6g} for step {AT}")
    found = run.autopsy(AT)
    assert found.verdict == "data" and found.flagged == "non_finite", found.sentence()
    assert "telemetry masks it" in sentences(found) and found.first_difference is None


def test_s2_zero_target_tokens(tmp_path):
    run = planted_read_only("targets-ignored@{AT}")
    trace = run.replay(AT, trace_dir=tmp_path)
    assert trace.exact and np.isnan(trace.loss) and trace.record.targets == 0
    assert trace.findings()[0].startswith("Zero target tokens")
    assert "no target counts" in run.autopsy(AT, trace_dir=tmp_path).reason


def test_s3_a_fully_masked_attention_row(tmp_path):
    """Finite forward, NaN backward: placed in the gradient of that layer's attention scores."""

    def make():
        return job(model=seeded(lambda: Decoder([ByHand(), ByHand(hide=[3])])), loss_fn=token_loss)

    trace = recorded(tmp_path / "run", make, 1).replay(1, experiment=again(make))
    first = trace.record.first_nonfinite
    assert np.isfinite(trace.loss) and (first.kind, first.path) == ("attention_gradient", "blocks.1")


class Deep(nn.Module):
    """Two layers, so that one is lower."""

    def __init__(self):
        super().__init__()
        self.lower, self.upper = nn.Linear(3, 4), nn.Linear(4, 1)

    def __call__(self, x):
        return self.upper(nn.tanh(self.lower(x)))


def test_s4_the_order_of_onset(tmp_path):
    """The lower layer's gradient and moments double from step 25 on, under a loss that stays until step 30."""

    def loss(model, x, y, push):
        weight = model.lower.weight
        return squares(model, x, y) + mx.sum(push * (weight - mx.stop_gradient(weight)))  # adds 0, and a gradient

    def batch(number):
        draw = np.random.default_rng(number)
        x = draw.standard_normal((8, 3)).astype(np.float32)
        y = x[:, :1] + (100.0 if number == 30 else 0.0)
        return x, y, np.array([4.0 ** (number - 25) if 25 <= number else 0.0], np.float32)

    def make():
        return Experiment(Deep(), optim.Adam(1e-4), loss, Numbered(batch), StepOptions(compile=False))

    run = recorded(tmp_path / "run", make, 31)
    onset = run.context(30, 8, experiment=again(make)).onset()
    assert onset.iloc[0].tolist()[:3] == [26, "lower", "adam_m"] and onset.iloc[1].tolist()[:3] == [
        26,
        "lower",
        "adam_v",
    ]
    assert (onset.loc[onset["layer"] == "upper", "step"] == 30).all() and (onset["layer"] == "upper").any()
    rules = run.spikes().set_index("step")["rule"]
    assert not [step for step, rule in rules.items() if rule.startswith("loss") and step < 30]


def test_s4_growth_that_fills_the_whole_window(tmp_path):
    """Eight steps of which each doubles the lower layer's gradient are no yardstick of their own."""

    def loss(model, x, y, push):
        weight = model.lower.weight
        return squares(model, x, y) + mx.sum(push * (weight - mx.stop_gradient(weight)))

    def batch(number):
        x = np.random.default_rng(number).standard_normal((64, 3)).astype(np.float32)
        y = x[:, :1] + (9.0 if number == 40 else 0.0)
        return x, y, np.array([2.0 ** (number - 33) if 33 <= number else 0.0], np.float32)

    def make():
        return Experiment(Deep(), optim.Adam(1e-5), loss, Numbered(batch), StepOptions(compile=False))

    run = recorded(tmp_path / "run", make, 41, spikes=None)
    context = run.context(40, 8, experiment=again(make))
    first = context.onset().iloc[0]
    assert (first["step"], first["layer"]) == (33, "lower") and len(context.logged) and min(context.steps) == 32
    assert "of lower at step 33" in context.sentence()
    assert "of lower at step 33 (z " in report_html(run, 40)  # by the telemetry alone
    assert (context.onset().query("layer == 'upper'")["step"] == 40).all()


def test_s5_a_number_of_the_batch_that_is_not_finite_is_named_with_its_row(tmp_path):
    """By what rows hold, for the losses of a step of one's own are not seen row by row."""

    def batch(number):
        x = np.random.default_rng(number).standard_normal((8, 3)).astype(np.float32)
        y = x[:, :1].copy()
        x[5, 1] = np.nan if number == 24 else x[5, 1]
        return x, y

    def make():
        return Experiment(Deep(), optim.SGD(1e-2), squares, Numbered(batch), StepOptions(compile=False))

    run = recorded(tmp_path / "run", make, 26)
    trace = run.replay(24, experiment=again(make))
    assert trace.findings()[0].startswith("The first non-finite tensor is array 0 of the batch: 1 NaN of 24 elements")
    found = run.autopsy(24, experiment=again(make))
    assert found.verdict == "data" and [one["row"] for one in found.culprit["rows"]] == [5]
    assert found.reason == "The batch of step 24 carries it: row 5 (NaN in array 0 of the batch)."
    assert {one.change for one in found.remedies if one.helps} == {"batch=skip", "drop-row=5"}


@pytest.mark.parametrize("own", [False, True], ids=["the recorder's step", "a step of one's own, compiled"])
@pytest.mark.parametrize(("factor", "what", "spoilt"), [(1.0, "inf", 1), (0.0, "NaN", 12)], ids=["one inf", "one NaN"])
def test_s5_clipping_spreads_one_bad_value(tmp_path, factor, what, spoilt, own):
    """In step 24 one element of a gradient is not finite. Clipped, an inf is NaN and all other gradients are 0; a NaN
    makes all of them NaN. What is recorded and named is what was there before."""

    def loss(model, x, y, push):
        element = model.lower.weight[1, 2]
        change = mx.sqrt(push[0] + element - mx.stop_gradient(element)) - mx.sqrt(push[0])  # 0, with gradient inf at 0
        return squares(model, x, y) + push[1] * change

    def batch(number):
        x = np.random.default_rng(number).standard_normal((8, 3)).astype(np.float32)
        push = [0.0, factor] if number == 24 else [1.0, 0.0]
        return x, x[:, :1], np.array(push, np.float32)

    def make():
        model, optimizer = Deep(), optim.SGD(1e-2)

        def step(*arrays):
            value, gradients = nn.value_and_grad(model, loss)(model, *arrays)
            gradients, _ = optim.clip_grad_norm(gradients, 1.0)
            optimizer.update(model, gradients)
            return value

        options = StepOptions(compile=own, clip=None if own else 1.0)
        return Experiment(model, optimizer, loss, Numbered(batch), options, step_fn=step if own else None)

    run = recorded(tmp_path / "run", make, 24, compile=own)
    line = run.line(24, 0)
    lower, upper = line.per_layer_grad_norms
    assert run.manifest.layers == ["lower", "upper"] and lower is None and 0 < upper < np.inf
    trace = run.replay(24, experiment=again(make))
    assert trace.exact and np.isfinite(trace.loss) and not np.isfinite(trace.grad_norm)
    first = trace.record.first_nonfinite
    assert (first.kind, first.path, first.count) == ("gradient", "lower.weight", 1)
    named = f"The first non-finite tensor is the gradient of lower.weight: 1 {what} of 12 elements"
    assert trace.findings()[0] == f"{named}; all before it is finite."
    counts = {(row.kind, row.path): row.nonfinite for row in trace.record.rows}
    gradients = {path: count for (kind, path), count in counts.items() if kind == "gradient"}
    assert gradients == {"lower.weight": 1, "lower.bias": 0, "upper.weight": 0, "upper.bias": 0}
    assert counts["weight", "lower.weight"] == spoilt
    assert (counts["weight", "upper.weight"] > 0) == (what == "NaN")  # what clipping made of it


def test_s6_gradients_that_are_exactly_zero(tmp_path):
    def severed(model, x, y):
        model.lower.weight = mx.stop_gradient(model.lower.weight)
        model.lower.bias = mx.stop_gradient(model.lower.bias)
        return squares(model, x, y)

    def batch(number):
        x = np.random.default_rng(number).standard_normal((8, 3)).astype(np.float32)
        return x, x[:, :1]

    def make():
        return Experiment(Deep(), optim.Adam(1e-3), severed, Numbered(batch), StepOptions(compile=False))

    run = recorded(tmp_path / "run", make, 24)
    trace = run.replay(24, experiment=again(make))
    assert "The gradient is exactly 0 in 1 of 2 layers: lower." in trace.findings()
    found = run.autopsy(24, experiment=again(make))
    assert (found.verdict, [one.name for one in found.outliers if "zero" in one.name]) == (
        "no-spike",
        ["zero gradient"],
    )


def test_s6_a_block_frozen_by_mistake(tmp_path):
    def batch(number):
        x = np.random.default_rng(number).standard_normal((8, 3)).astype(np.float32)
        return x, x[:, :1]

    def make():
        model = Deep()
        model.lower.freeze()
        return Experiment(model, optim.Adam(1e-3), squares, Numbered(batch), StepOptions(compile=False))

    trace = recorded(tmp_path / "run", make, 3).replay(3, experiment=again(make))
    said = "2 of 4 parameters are not trained: lower.weight, lower.bias."
    assert said in trace.findings() and said in read(trace.path).findings()


def counted(model, inputs, targets):
    losses = nn.losses.cross_entropy(model(inputs), targets)
    return mx.mean(losses), {"token_loss": losses, "targets": targets.size}


def test_s7_a_first_loss_above_a_uniform_guess_and_a_checkpoint_with_nan(tmp_path):
    def make():
        one = job(loss_fn=counted)
        one.model.update(tree_map(lambda array: 30 * array, one.model.parameters()))
        return one

    (high,) = recorded(tmp_path / "high", make, 1).replay(1, experiment=again(make)).findings()
    assert "The first loss" in high and "is above ln(" in high
    run = recorded(tmp_path / "run", autopsies.no_epsilon, 24)
    assert (1, 0) in run.checkpoints  # the black box: the state before step 2, whose loss is NaN
    with pytest.raises(ReplayError, match="w is not finite in checkpoint 1"):
        run.autopsy(2, checkpoint=1, experiment=autopsies.no_epsilon())
    found = run.autopsy(2, experiment=autopsies.no_epsilon())
    assert found.checkpoint == 0 and found.verdict == "optimizer"


def test_s8_moments_lost_on_resume_without_bias_correction(tmp_path):
    """The first update is between 3.16 and 13.8 times as large as usual, by how much gradients agree."""
    largest = max(range(1, 100), key=lambda number: fresh(0.9, 0.999, number)[0])
    assert largest == 12 and fresh(0.9, 0.999, 12)[0] == pytest.approx(6.57, abs=5e-3)
    assert fresh(0.9, 0.999, 1) == pytest.approx((3.162, 13.78), abs=5e-3)

    def batch(number):
        x = np.random.default_rng(number).standard_normal((8, 2)).astype(np.float32)
        return x, (x @ np.array([0.5, 0.1]) + 1e-3 * x[:, 0]).astype(np.float32)

    def make():
        adam = optim.Adam(3e-2, betas=[0.9, 0.999])
        return Experiment(Vector([0.5, 0.1]), adam, squares, Numbered(batch), StepOptions(compile=False))

    one = make()
    with Recorder(tmp_path / "run", one.model, one.optimizer, squares, one.sampler, **OPTIONS) as recorder:
        for drawn in recorder.batches(64):
            recorder.step(drawn)
            if recorder.step_number == 60:
                one.optimizer.state["w"] = {leaf: mx.zeros((2,)) for leaf in ("m", "v")}
                recorder.open_segment()
    run = open_run(tmp_path / "run")
    flagged = [int(step) for step in run.spikes()["step"] if step > 60]
    found = run.autopsy(flagged[0], experiment=make())
    assert found.verdict == "resume", found.sentence()
    (lost,) = [one for one in found.evidence if one.name == "moments lost"]
    assert lost.numbers["noise"] == pytest.approx(13.78, abs=5e-3)
    scene = Scene.open(run, 62, experiment=make())
    moved = [
        float(mx.linalg.norm(scene.state(step).weights["w"] - scene.state(step - 1).weights["w"]).item())
        for step in (58, 59, 60, 61)
    ]
    assert moved[3] > 2 * max(moved[:3])


# ------------------------------------------------------------------------------------- same seed, different numbers


class FixedDropout(nn.Dropout):
    """A mask from a key of its own: what dropout in a function compiled without the random state comes to."""

    def __call__(self, x):
        return x * mx.random.bernoulli(self._p_1, x.shape, key=mx.random.key(7)) / self._p_1


class Dropping(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.layer, self.dropout = nn.Linear(3, 1), dropout(0.5)

    def __call__(self, x):
        return self.layer(self.dropout(x))


def _same_rows(number):
    x = np.random.default_rng(0).standard_normal((8, 3)).astype(np.float32)
    return x, x[:, :1]


@pytest.mark.parametrize(("dropout", "frozen"), [(nn.Dropout, False), (FixedDropout, True)])
def test_d1_a_dropout_mask_that_is_frozen(tmp_path, dropout, frozen):
    """The recorder's compiled step captures the random state: on one batch, with a rate of 0, each step has a mask and
    so a loss of its own. Where it has not, that is noticed."""

    def make():
        options = StepOptions(compile=True)
        return Experiment(Dropping(dropout), optim.SGD(0.0), squares, Numbered(_same_rows), options)

    run = recorded(tmp_path / "run", make, 24, compile=True, self_check=not frozen)  # which would warn at once
    assert (run.steps["loss"].nunique() == 1) == frozen
    found = run.autopsy(24, experiment=again(make))
    assert found.exact and ("frozen mask" in [one.name for one in found.outliers]) == frozen


def test_d2_measuring_does_not_change_the_step(tmp_path):
    """Digests of weights, m, v and random state after a step, with the probe pass and without it."""
    run = planted_read_only("garbage@{AT}:rows=2")
    lanes = ("state.weights", "state.adam_m", "state.adam_v", "state.rng")
    probed, plain = run.replay(AT, trace_dir=tmp_path), run.replay(AT, trace_dir=tmp_path / "plain", with_probe=False)
    assert probed.record.certified_probe and plain.record.certified_probe is None
    for lane in lanes:
        items = [one.record.items[lane] for one in (probed, plain)]
        assert items[0].replayed == items[1].replayed == items[0].recorded


def test_d3_a_replay_from_another_thread(tmp_path):
    run = planted_read_only("garbage@{AT}:rows=2", dropout=0.1)
    own, traces = run.replay(AT, trace_dir=tmp_path), []
    thread = threading.Thread(target=lambda: traces.append(run.replay(AT, trace_dir=tmp_path / "other")))
    thread.start()
    thread.join()
    assert traces[0].exact and traces[0].record.items == own.record.items


def test_d4_data_order_before_any_kernel(tmp_path):
    one = planted_read_only().path
    shutil.copytree(one, tmp_path / "one")
    other = planted_read_only(seed=5).path
    found = compare_runs(tmp_path / "one", other)
    assert "config.seed" in found.sentence
