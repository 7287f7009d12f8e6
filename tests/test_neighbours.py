"""A number against the run's own healthy steps: which steps count, on which scale, and where it began."""

import mlx.core as mx
import msgspec
import numpy as np
import pandas as pd
import pytest
from models import Tokens, job

from workbench import Recorder, open_run
from workbench.detection.window import NORMAL_SIGMA_PER_MAD
from workbench.probes.neighbours import (
    COLUMNS,
    FEW,
    LINEAR_FLOOR,
    LOG_FLOOR,
    LOG_FLOORS,
    THRESHOLD,
    Context,
    neighbours_notice,
    numbers,
    scored,
)
from workbench.probes.trace_tables import KINDS
from workbench.trainer.model import loss


def series(values, kind="gradient", statistic="l2", first=1):
    rows = [(first + n, "a", "a", kind, statistic, value) for n, value in enumerate(values)]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def z(values, flagged=(), **names):
    return scored(series(values, **names), flagged)["z"].tolist()


def by_hand(past, now, floor):
    past = np.array(past)
    median = np.median(past)
    sigma = FEW[len(past)] * NORMAL_SIGMA_PER_MAD * np.median(np.abs(past - median))
    return (now - median) / max(sigma, floor)


VALUES = [1.0, 1.5, 0.8, 1.2, 2.0, 0.9, 1.1, 1.4, 1.3]


def test_a_norm_is_scored_by_its_logarithm_against_the_steps_before():
    found, logs = z(VALUES), np.log(VALUES)
    assert np.isnan(found[:4]).all()  # four values are the least
    assert found[4:] == pytest.approx([by_hand(logs[:n], logs[n], LOG_FLOOR) for n in range(4, 9)])


def test_a_fraction_is_scored_as_it_is():
    found = z(VALUES, kind="update", statistic="cosine")
    expected = [by_hand(VALUES[:n], VALUES[n], LINEAR_FLOOR * max(1, np.median(VALUES[:n]))) for n in range(4, 9)]
    assert found[4:] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("kind", "statistic", "floor"),
    [
        ("gradient", "l2", LOG_FLOOR),
        ("adam_v", "max_abs", LOG_FLOOR),
        ("activation", "l2", LOG_FLOORS["activation"]),
        ("weight", "l2", LOG_FLOORS["weight"]),
        ("update", "staleness_rms", LOG_FLOOR),
        ("step", "loss", LOG_FLOORS["loss"]),
        ("step", "grad_norm", LOG_FLOOR),
    ],
)
def test_eight_equal_steps_have_the_floor_as_their_sigma(kind, statistic, floor):
    assert z([3.0] * 8 + [4.5], kind=kind, statistic=statistic)[-1] == pytest.approx(np.log(1.5) / floor)


@pytest.mark.parametrize(("level", "floor"), [(0.5, LINEAR_FLOOR), (-40.0, 40 * LINEAR_FLOOR)])
def test_the_floor_of_a_plain_number_grows_with_it(level, floor):
    found = z([level] * 8 + [level + 1], kind="attention", statistic="logit_max")[-1]
    assert found == pytest.approx(1 / floor)


@pytest.mark.parametrize(
    ("kind", "statistic"), [("gradient", "rms"), ("gradient", "mean"), ("step", "lr"), ("gradient", "nonfinite")]
)
def test_what_has_no_scale_is_not_scored(kind, statistic):
    assert np.isnan(z(VALUES, kind=kind, statistic=statistic)).all()


def test_what_went_off_is_no_yardstick_for_what_follows():
    """Case S4: twice the norm from the fifth step on, long before the last."""
    found = z([1, 1.1, 0.9, 1, 2.5, 2.6, 2.4, 2.5, 2.5])
    assert all(score > THRESHOLD for score in found[4:])


def test_a_spike_among_the_neighbours_is_left_out():
    calm = [1.0] * 4
    off = [1.5, 1.5, 1.5, 1.5, 1.5]
    assert z(calm + off, flagged=(5, 6, 7, 8))[-1] == pytest.approx(np.log(1.5) / LOG_FLOOR)
    assert abs(z(calm + off)[-1]) < abs(z(calm + off, flagged=(5, 6, 7, 8))[-1])


def test_zero_and_what_is_not_finite_are_far_off():
    assert z([1.0] * 8 + [0.0])[-1] < -1000 and z([0.0] * 8 + [1.0])[-1] > 1000
    assert z([0.0] * 9)[-1] == 0
    assert z([1.0] * 8 + [np.nan])[-1] == np.inf == z([1.0] * 8 + [np.inf])[-1]
    assert z([np.nan] + [1.0] * 8)[0] == np.inf  # that needs no neighbour
    assert np.isnan(z([1.0] * 8 + [np.nan], kind="update", statistic="ratio")[-1])  # undefined, not broken
    assert z([1.0] * 3 + [np.inf] + [1.0] * 4 + [2.0])[-1] == pytest.approx(np.log(2) / LOG_FLOOR)


def test_numbers_that_stand_side_by_side_do_not_mix():
    both = pd.concat([series(VALUES), series([5.0] * 9).assign(layer="b", path="b")], ignore_index=True)
    found = scored(both)
    assert found[found["layer"] == "a"]["z"].tolist()[4:] == pytest.approx(z(VALUES)[4:])
    assert found[found["layer"] == "b"]["z"].tolist()[4:] == [0] * 5
    assert found.columns.tolist() == [*COLUMNS, "healthy", "z"] and len(found) == len(both)


def test_notices():
    assert neighbours_notice(20, 8, range(12, 20), []) == []
    (few,) = neighbours_notice(6, 8, range(1, 6), [])
    assert few == "step 6 has 5 steps before it on this way, not 8: these were used"
    spikes = neighbours_notice(20, 8, range(12, 20), [13])
    assert spikes == ["spikes among the neighbours were measured, and are no yardstick: [13]"]
    early = neighbours_notice(3, 8, range(1, 3), [])
    assert early[1] == "no finite number was scored: that takes 4 healthy steps before step 3, and there are 2"


# ------------------------------------------------------------------------------------------------------------ of a run

STEPS, ODD = 14, 12


class Odd(Tokens):
    """From a step on, each batch asks for a steeper gradient of one layer's weight, at the same loss."""

    def __next__(self):
        x, y = super().__next__()
        return x, y, np.float32(1000 if self.number >= ODD - 2 else 0)


def steeper(model, inputs, targets, factor):
    value, extras = loss(model, inputs, targets)
    extra = mx.sum(model.blocks[1].mlp.up.weight) * factor
    return value + extra - mx.stop_gradient(extra), extras


def make():
    mx.random.seed(2)
    one = job(loss_fn=steeper)
    one.sampler = Odd()
    return one


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    one = make()
    path = tmp_path_factory.mktemp("neighbours") / "run"
    with Recorder(
        path, one.model, one.optimizer, one.loss_fn, one.sampler, compile=False, clip=1.0, save_every=5, spikes=None
    ) as recorder:
        for batch in recorder.batches(STEPS):
            recorder.step(batch)
    return open_run(path)


@pytest.fixture(scope="module")
def context(run):
    return run.context(ODD, experiment=make())


def test_the_step_and_eight_before_it_are_replayed_exactly(context):
    assert context.steps == list(range(ODD - 8, ODD + 1)) and context.trace.step == ODD
    assert all(trace.exact and trace.record.certified_probe for trace in context.traces)
    assert context.notices == [] and context.flagged == []
    assert repr(context) == "Context(step=12, before=8)"


def test_only_the_step_itself_is_repeated_and_written(run, context):
    badges = [dict((name, verdict) for name, verdict, _ in trace.badges()) for trace in context.traces]
    assert [one["repeatable"] for one in badges] == ["unverified"] * 8 + ["exact"]
    assert context.traces[0].badges()[0][2] == "not repeated"
    assert [trace.path is not None for trace in context.traces] == [False] * 8 + [True]
    assert [path.name for path in (run.path / "traces").iterdir()] == ["00000012.json"]


def test_a_step_measures_the_same_alone_and_among_its_neighbours(run, context):
    alone = run.replay(ODD, experiment=make())
    assert alone.record.rows == context.trace.record.rows and alone.record.updates == context.trace.record.updates
    assert alone.record.attention == context.trace.record.attention
    assert alone.record.items == context.trace.record.items and alone.record.gates == context.trace.record.gates


def test_the_frame_is_tidy_and_holds_everything(context):
    frame = context.frame
    assert frame.columns.tolist() == ["step", "layer", "path", "kind", "statistic", "value", "healthy", "z"]
    assert not frame.duplicated(["step", "path", "kind", "statistic"]).any()
    assert set(frame["kind"]) == {
        *("activation", "activation_gradient", "gradient", "weight", "adam_m", "adam_v", "update"),
        *("attention", "step"),
    }
    assert {"l2", "rms", "max_abs", "mean", "zero_fraction", "nonfinite"} <= set(frame["statistic"])
    assert {"ratio", "cosine", "staleness_rms", "eps_fraction", "stuck_fraction"} <= set(frame["statistic"])
    one = frame[(frame["step"] == ODD) & (frame["kind"] == "attention") & (frame["statistic"] == "entropy")]
    assert one["path"].tolist() == [f"blocks.{n}.attention[{head}]" for n in (0, 1) for head in (0, 1)]
    logged = frame[(frame["step"] == ODD) & (frame["kind"] == "gradient") & (frame["statistic"] == "l2")]
    assert logged["value"].astype("float32").tolist() == np.float32(context.trace.record.per_layer_grad_norms).tolist()
    whole = frame[(frame["step"] == ODD) & (frame["kind"] == "step")].set_index("statistic")["value"]
    assert whole["loss"] == context.trace.loss and whole["log_z_mean"] == context.trace.record.logits.log_z_mean


def test_the_order_of_onset_names_layer_kind_and_step(context):
    """The gradient of one layer departs two steps before, and its moments with it."""
    onset = context.onset()
    assert onset.columns.tolist() == ["step", "layer", "kind", "z"]
    assert not onset.duplicated(["layer", "kind"]).any() and onset["step"].is_monotonic_increasing
    assert (onset["z"].abs() > THRESHOLD).all()
    for step in onset["step"].unique():
        kinds = onset.loc[onset["step"] == step, "kind"].tolist()
        assert kinds == sorted(kinds, key=KINDS.index)
    began = onset[(onset["layer"] == "blocks.1.mlp.up") & onset["kind"].isin(("gradient", "adam_m", "adam_v"))]
    assert began["step"].tolist() == [ODD - 2] * 3 and (began["z"] > 0).all()
    steepest = context.onset(threshold=0.9 * began["z"].max())
    assert steepest.iloc[0].tolist()[:3] == [ODD - 2, "blocks.1.mlp.up", "gradient"]
    assert len(context.onset(threshold=1e9)) == 0


def test_scores_are_of_the_step_alone_the_farthest_first(context):
    scores = context.scores
    assert scores.columns.tolist() == ["layer", "path", "kind", "statistic", "value", "median", "z"]
    assert scores["z"].abs().is_monotonic_decreasing and scores["z"].notna().all()
    row = scores[(scores["path"] == "blocks.1.mlp.up") & (scores["kind"] == "gradient") & (scores["statistic"] == "l2")]
    own = context.frame[
        (context.frame["path"] == "blocks.1.mlp.up")
        & (context.frame["kind"] == "gradient")
        & (context.frame["statistic"] == "l2")
        & (context.frame["step"] < ODD)
    ]
    assert row["median"].item() == own["value"].median() and row["z"].item() > THRESHOLD
    assert "numbers stand beyond 6 robust deviations; the first norm to leave its usual range was the " in (
        context.sentence()
    )


def test_fewer_steps_before_are_used_and_that_is_said(run):
    early = run.context(6, experiment=make())
    assert early.steps == [1, 2, 3, 4, 5, 6] and early.scores["z"].notna().all() and len(early.scores)
    assert early.notices == ["step 6 has 5 steps before it on this way, not 8: these were used"]
    first = run.context(3, experiment=make())
    assert first.steps == [1, 2, 3] and len(first.notices) == 2 and first.scores.empty
    assert first.sentence() == "Step 3 can't be compared: it has fewer than 4 healthy neighbours before it."
    late = run.context(ODD, before=6, checkpoint=10, experiment=make())
    assert late.steps == [11, 12] and "has 1 steps before it" in late.notices[0]


def test_neighbours_that_are_spikes_are_named(run, context):
    marked = Context(ODD, context.traces, [6, 7, 8, 9, 10, 11])
    assert marked.scores.empty and "can't be compared" in marked.sentence()
    some = Context(ODD, context.traces, [4])
    frame = some.frame
    assert np.isnan(frame.loc[frame["step"] == 8, "z"]).all()  # only 5, 6, 7 are healthy before it


def test_what_is_not_exact_is_said(run, tmp_path):
    import shutil

    import runs

    path = shutil.copytree(run.path, tmp_path / "run")
    line = next(line for line in runs.lines(path) if line["type"] == "step" and line["step"] == 9)
    runs.edit_line(path, 9, loss=line["loss"] * 2, loss_bits=...)
    found = open_run(path).context(ODD, experiment=make(), fresh_process=False)
    # Step 11 starts from checkpoint 10.
    assert found.notices[-1] == "not replayed exactly, so not what the run computed: steps [9, 10]"


def test_the_numbers_of_a_trace_without_attention_or_logits(context):
    bare = msgspec.structs.replace(context.trace.record, attention=None, logits=None, updates=[], rows=[])
    found = numbers(type(context.trace)(bare))
    assert set(found["kind"]) == {"activation", "gradient", "adam_m", "adam_v", "step"}
    assert found["step"].unique().tolist() == [ODD]


def test_gradients_are_computed_from_the_last_layer_to_the_first(context):
    """As the panel says, too, which layer left its usual range first."""
    onset, layers = context.onset(threshold=2.0), context.trace.record.layers
    for (_, kind), rows in onset.groupby(["step", "kind"], sort=False):
        places = [layers.index(layer) for layer in rows["layer"]]
        assert places == sorted(places, reverse=kind in ("gradient", "activation_gradient")), kind
    assert onset.groupby(["step", "kind"]).size().max() > 1
