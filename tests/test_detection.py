"""workbench.detection: each rule against a slow reference, planted departures and where they began, false alarms."""

import math
import statistics

import numpy as np
import pandas as pd
import pytest
import runs

import workbench as wb
from workbench.detection import cusum, rolling
from workbench.detection.detecting import ALL_RULES, FOUND, detect_spikes, first_departures
from workbench.detection.rules import DetectionSettings
from workbench.errors import WorkbenchError

NAN, INF = float("nan"), float("inf")


def noise(count, seed=0, level=2.4, width=0.06):
    return level + width * np.random.default_rng(seed).standard_normal(count)


def frame(losses=None, grad_norms=None, **more):
    columns = {"loss": losses, "grad_norm": grad_norms} | more
    columns = {name: values for name, values in columns.items() if values is not None}
    return pd.DataFrame({"step": np.arange(1, 1 + len(next(iter(columns.values())))), **columns})


def found(losses=None, grad_norms=None, rule=None, settings=None, **more):
    return detect_spikes(frame(losses, grad_norms, **more), None if rule is None else [rule], settings)


# ---- windows


@pytest.mark.parametrize("size", [4, 7, 50])
@pytest.mark.parametrize("count", [0, 3, 4, 5, 8, 9, 173])
def test_windows_agree_with_one_taken_at_a_time(size, count):
    values = noise(count, seed=size)
    mean, deviation = rolling.mean_and_deviation(values, size)
    middle, mad = rolling.median_and_mad(values, size)
    np.testing.assert_array_equal(rolling.median(values, size), middle)
    np.testing.assert_array_equal(rolling.mean(values, size), mean)
    for place in range(count):
        window = values[place - size : place].tolist()
        if place < size:
            assert np.isnan([mean[place], deviation[place], middle[place], mad[place]]).all()
            continue
        assert mean[place] == pytest.approx(statistics.fmean(window), rel=1e-12)
        assert deviation[place] == pytest.approx(statistics.stdev(window), rel=1e-9)
        assert middle[place] == statistics.median(window)
        assert mad[place] == statistics.median([abs(value - middle[place]) for value in window])


def test_a_huge_value_leaves_no_trace_once_it_has_left_the_window():
    values = noise(300)
    spiked = values.copy()
    spiked[100] = 1e30
    for clean, after in zip(
        rolling.mean_and_deviation(values, 50), rolling.mean_and_deviation(spiked, 50), strict=True
    ):
        np.testing.assert_allclose(after[151:], clean[151:], rtol=1e-12)
        assert (after[101:151] > 1e28).all()


def test_long_series_are_cut_into_chunks_that_do_not_show():
    values = noise(2 * rolling.CHUNK // 50 + 123)
    whole = rolling.median(values, 50)
    np.testing.assert_array_equal(whole[7000:], rolling.median(values[6950:], 50)[50:])


# ---- the rules, each against a port that takes one step at a time


def trainers_own(losses, window=50, factor=3.0):
    """The posttrainllm trainer's detector, for finite losses."""
    recent, last, fired = [], -1, []
    for step, loss in enumerate(losses):
        if len(recent) < window:
            recent.append(loss)
            continue
        average = sum(recent) / window
        recent = [*recent[1:], loss]
        if loss > factor * average and step - last > window // 2:
            last = step
            fired.append((step + 1, average))
    return fired


@pytest.mark.parametrize("seed", range(4))
def test_moving_average_fires_where_the_trainers_own_does(seed):
    draw = np.random.default_rng(seed)
    losses = np.abs(noise(900, seed))
    for place in draw.integers(20, 880, 25):
        losses[place : place + draw.integers(1, 40)] *= draw.uniform(2, 9)
    expected = trainers_own(losses.tolist())
    table = found(losses, rule="moving_average").sort_values("step")
    assert table["step"].tolist() == [step for step, _ in expected] and len(expected) > 3
    np.testing.assert_allclose(table["level"], [average for _, average in expected])
    np.testing.assert_allclose(table["threshold"], 3 * table["level"])


def slow(values, limit, quiet):
    """Positions at which a value is above `limit(values before it)`, and not within `quiet` of one that fired."""
    fired = []
    for place, value in enumerate(values):
        bound = limit(values[:place])
        if bound is not None and value > bound and not (fired and place - fired[-1] <= quiet):
            fired.append(place)
    return fired


def of_last(size, bound):
    return lambda before: None if len(before) < size else bound(before[-size:])


def robust_bound(window):
    median = statistics.median(window)
    return median + 6 * max(1.4826 * statistics.median([abs(v - median) for v in window]), 0.005 * abs(median))


LIMITS = {
    "loss_z": of_last(50, robust_bound),
    "six_sigma": of_last(128, lambda w: statistics.fmean(w) + 6 * statistics.stdev(w)),
    "grad_norm_median": of_last(50, lambda w: 3 * statistics.median(w)),
}


@pytest.mark.parametrize("rule", LIMITS)
def test_a_rule_fires_where_a_slow_reference_does(rule):
    draw = np.random.default_rng(5)
    values = noise(700, seed=5)
    for place in draw.integers(140, 690, 12):
        values[place] *= draw.uniform(1.05, 6)
    table = found(**{"grad_norms" if rule == "grad_norm_median" else "losses": values}, rule=rule)
    assert (table["step"] - 1).tolist() == slow(values.tolist(), LIMITS[rule], 25) and len(table) > 2
    assert (table["value"] > table["threshold"]).all() and (table["threshold"] > table["level"]).all()


def test_a_rule_says_value_threshold_and_why():
    losses = np.append(np.full(60, 2.0), 7.0)
    (row,) = found(losses, rule="moving_average").to_dict("records")
    assert (row["value"], row["threshold"], row["level"]) == (7.0, 6.0, 2.0)
    assert row["explanation"] == "loss 7 is 3.5 times the mean 2 of the last 50 values"
    (row,) = found(losses, rule="loss_z").to_dict("records")
    pd.testing.assert_frame_equal(found(losses, rule="robust_z"), found(losses, rule="loss_z"))  # its former name
    assert row["explanation"] == "loss 7 is 500 robust standard deviations above the median 2 of the last 50 values"
    (row,) = found(grad_norms=losses, rule="grad_norm_median").to_dict("records")
    assert row["explanation"] == "gradient norm 7 is 3.5 times the median 2 of the last 50 values"


def test_thresholds_can_be_set():
    losses = np.append(np.full(60, 2.0), 5.0)
    assert found(losses, rule="moving_average").empty
    assert len(found(losses, rule="moving_average", settings=DetectionSettings(factor=2))) == 1
    assert found(losses[-20:], rule="loss_z").empty
    assert len(found(losses[-20:], rule="loss_z", settings=DetectionSettings(window=10))) == 1


def test_flat_series_and_rounding_noise_are_silent():
    flicker = 2.5 + 2.0**-6 * np.random.default_rng(0).integers(0, 2, 2000)  # neighbours in bfloat16
    for values in (np.full(2000, 2.5), np.zeros(2000), flicker):
        assert found(values, values).empty
    assert found(-np.abs(noise(2000))).empty, "a factor of a negative mean means nothing"


# ---- where it began


def test_the_first_departure_is_found_not_the_largest_jump():
    losses = noise(200)
    losses[150:156] = [2.62, 2.7, 2.9, 3.4, 6.0, 2.9]
    (row,) = found(losses, rule="loss_z").to_dict("records")
    assert (row["onset"], row["peak"], row["last"]) == (151, 155, 156) and row["onset"] <= row["step"] < row["peak"]
    assert row["peak_value"] == 6.0 and row["value"] == losses[row["step"] - 1]


def test_a_gradient_norm_that_moves_first_is_the_first_departure():
    losses, norms = noise(300), np.exp(0.1 * np.random.default_rng(1).standard_normal(300))
    norms[190:206] *= 5
    losses[200:204] = [4.0, 7.0, 8.0, 4.0]
    table = found(losses, norms)
    (event,) = first_departures(table).to_dict("records")
    assert (event["first"], event["first_rule"], event["first_quantity"]) == (191, "grad_norm_median", "grad_norm")
    assert (
        event["rules"].split(", ") == ["grad_norm_median", "loss_z", "six_sigma"] or "moving_average" in event["rules"]
    )
    assert table.loc[table["quantity"] == "loss", "step"].min() == 201 and event["last"] >= 204
    assert event["explanation"].startswith("gradient norm")


def test_departures_far_apart_are_different_events():
    losses = noise(400)
    losses[[150, 160, 300]] = 5.0
    events = first_departures(found(losses, rule="loss_z"))
    assert events["first"].tolist() == [151, 301], "the second is within half a window of the first"


# ---- drifts


def slow_cusum(scores, k, h):
    """One score at a time: (onset, noticed, last above h) of each alarm; the sum stays below 2 h."""
    alarms, total, onset, current = [], 0.0, 0, None
    for place, score in enumerate(scores):
        total = max(0.0, min(total + score - k, 2 * h if current else INF))
        if total == 0.0:
            onset = place + 1
            if current:
                alarms.append(current)
            current = None
        elif total > h:
            current = [onset, place, place] if current is None else [*current[:2], place]
    return [tuple(alarm) for alarm in ([*alarms, current] if current else alarms)]


@pytest.mark.parametrize("seed", range(6))
def test_cumulative_sums_agree_with_one_score_at_a_time(seed):
    draw = np.random.default_rng(seed)
    scores = draw.standard_normal(30_000)
    for place in draw.integers(0, 29_000, 8):
        scores[place : place + draw.integers(20, 3000)] += draw.uniform(0.5, 2)
    alarms = cusum.alarms(scores, 0.5, 12.0)
    assert [alarm[:3] for alarm in alarms] == slow_cusum(scores.tolist(), 0.5, 12.0) and len(alarms) > 3
    assert all(alarm.total > 12 for alarm in alarms)
    assert cusum.alarms(-np.ones(9000), 0.5, 12.0) == [] == cusum.alarms(np.array([]), 0.5, 12.0)


@pytest.mark.parametrize("count", [0, 40, 41, 99, 430])
def test_the_reference_of_a_drift_is_of_the_values_before_its_block(count):
    values = noise(count)
    median, mad = cusum.reference(values, 40)
    for place in range(count):
        start = place // 4 * 4
        if place < 40:
            assert math.isnan(median[place]) and math.isnan(mad[place])
            continue
        window = values[start - 40 : start].tolist()
        assert median[place] == statistics.median(window)
        assert mad[place] == statistics.median([abs(value - median[place]) for value in window])


def test_a_slow_drift_is_found_where_no_jump_is():
    losses = noise(4000, seed=3)
    losses[2000:3500] += np.linspace(0, 0.4, 1500)  # a fifth of a thousandth a step, in noise of 0.06
    losses[3500:] += 0.4
    table = found(losses)
    assert table["rule"].unique().tolist() == ["drift"]
    first = table.iloc[0]
    assert 2000 <= first["onset"] <= 2400 and first["step"] <= 2600 and first["value"] > first["threshold"] == 20
    assert "drifted up" in first["explanation"] and first["level"] == pytest.approx(2.4, abs=0.05)


def test_falls_are_reported_only_if_asked_for():
    losses = noise(3000)
    losses[1500:] -= 0.2
    assert found(losses).empty, "learning is no spike"
    (row,) = found(losses, settings=DetectionSettings(falls=True)).to_dict("records")
    assert row["rule"] == "drift" and "drifted down" in row["explanation"] and 1480 <= row["onset"] <= 1510


def test_one_spike_is_no_drift():
    losses = noise(2000)
    losses[1000:1003] = 50.0
    assert "drift" not in set(found(losses)["rule"])


def test_a_drift_of_the_gradient_norm_is_of_its_logarithm():
    norms = np.exp(0.3 * np.random.default_rng(0).standard_normal(3000))
    norms[2000:] *= 1.8
    norms[[7, 8]] = 0.0
    table = found(grad_norms=norms, rule="drift")
    assert table["quantity"].tolist() == ["grad_norm"] and 1980 <= table["onset"][0] <= 2010
    assert table["level"][0] == pytest.approx(1.0, abs=0.1)


# ---- false alarms


def test_healthy_noise_raises_hardly_an_alarm():
    """The figures in the docstring of `rules` are for a million values and more; here 200,000 of each."""
    count = 200_000
    counted = found(noise(count, seed=11), np.exp(0.2 * np.random.default_rng(12).standard_normal(count)))["rule"]
    assert set(counted) <= {"loss_z", "six_sigma"} and len(counted) <= 4
    falling = noise(count, seed=13) + 3 * np.exp(-np.arange(count) / 3e4)
    assert len(found(falling)) <= 4


# ---- telemetry as it comes


def test_non_finite_values_are_one_row_a_stretch_and_leave_the_windows_alone():
    losses = noise(120)
    losses[[80, 81, 82, 100]] = [NAN, INF, NAN, -INF]
    losses[110] = 9.0
    table = found(losses)
    broken = table[table["rule"] == "non_finite"]
    assert broken[["onset", "step", "last"]].to_numpy().tolist() == [[81, 81, 83], [101, 101, 101]]
    assert broken["explanation"].tolist() == [
        "loss is NaN, the first of 3 in a row that are not finite",
        "loss is -inf",
    ]
    assert broken["threshold"].isna().all()
    rest = np.delete(losses, [80, 81, 82, 100])
    expected = found(rest, rule="loss_z")[["value", "threshold"]]
    pd.testing.assert_frame_equal(found(losses, rule="loss_z")[["value", "threshold"]], expected)


def test_what_was_not_recorded_is_not_non_finite():
    losses = noise(200)
    there = np.ones(200, bool)
    there[10:60] = False
    losses[10:60] = NAN
    losses[150] = 9.0
    table = found(losses, loss_recorded=there)
    assert set(table["rule"]) == {"loss_z", "moving_average"}, "150 - 50 values are too few for six_sigma"
    assert (table["step"] == 151).all()


def test_missing_steps_are_named_by_the_log():
    losses = noise(200)
    losses[150] = 9.0
    steps = np.cumsum(np.random.default_rng(0).integers(1, 9, 200))
    table = detect_spikes(pd.DataFrame({"step": steps, "loss": losses}), ["loss_z"])
    assert table["step"].tolist() == [steps[150]]


def test_a_mean_over_a_window_is_said_to_be_one_and_begins_with_it():
    losses = noise(30, width=0.02)
    losses[25] = 4.0
    step = 10 * np.arange(1, 31)
    table = detect_spikes(
        pd.DataFrame({"step": step, "first_step": step - 9, "loss": losses}), ["loss_z"], DetectionSettings(window=10)
    )
    (row,) = table.to_dict("records")
    assert (row["onset"], row["step"]) == (251, 260)
    assert row["explanation"].endswith("(a mean of steps 251 to 260)")


def test_rules_that_had_too_few_values_say_so():
    table = found(noise(100))
    assert table.empty and list(table.columns) == list(FOUND)
    assert table.attrs["notices"] == [
        "six_sigma is silent: the loss has 100 finite values, and it needs more than 128.",
        "grad_norm_median is silent: the gradient norm is not recorded, and it needs more than 50.",
        "drift is silent: the loss has 100 finite values, and it needs more than 500.",
    ]
    assert found(noise(600), noise(600)).attrs["notices"] == []


def test_each_segment_of_a_frame_stands_for_itself():
    losses = np.append(noise(100), noise(40, level=9.0))
    assert len(found(losses, rule="loss_z")) == 1
    assert found(losses, rule="loss_z", segment=np.repeat([0, 1], [100, 40])).empty


def test_a_segment_of_a_run_has_the_steps_that_led_to_it_as_its_past(tmp_path):
    run = wb.open_run(runs.segmented(tmp_path))  # segment 1 has steps 9 to 14
    short = DetectionSettings(window=4, z=1e-6, factor=1.000001)
    table = detect_spikes(run, ["loss_z", "moving_average"], short)
    frame = run.steps
    way = pd.concat([frame[(frame["segment"] == 0) & (frame["step"] <= 8)], frame[frame["segment"] == 1]])
    expected = detect_spikes(way.assign(segment=1), ["loss_z", "moving_average"], short)
    columns = ["step", "rule", "value", "threshold"]
    mine = table.loc[table["segment"] == 1, columns].reset_index(drop=True)
    pd.testing.assert_frame_equal(mine, expected.loc[expected["step"] > 8, columns].reset_index(drop=True))


def test_unknown_rules_and_bad_settings_are_named():
    with pytest.raises(WorkbenchError, match="'grad_norm_z' is no list of rules; expected some of non_finite"):
        found(noise(9), rule="grad_norm_z")
    with pytest.raises(WorkbenchError, match="'drift' is no list of rules"):
        detect_spikes(frame(noise(9)), "drift")
    with pytest.raises(WorkbenchError, match="no column 'step'"):
        detect_spikes(pd.DataFrame({"loss": [1.0]}))
    for name, value in (("window", 3), ("drift_window", 55), ("factor", 1), ("z", NAN), ("sigmas", 0), ("window", 9.5)):
        with pytest.raises(WorkbenchError, match=f"{name} is {value!r}|{name} is nan"):
            DetectionSettings(**{name: value})


def test_the_recorders_own_rules_are_as_they_were():
    run = wb.open_run(runs.recorded_read_only())
    assert "onset" not in run.spikes() and set(ALL_RULES) & set(wb.spikes.RULES) == {"non_finite", "loss_z"}
