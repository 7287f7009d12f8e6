"""workbench.spikes: each rule, its silence, and the detector against a slow reference."""

import math
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

from workbench.detection.spike_table import COLUMNS, find_spikes, recorded
from workbench.errors import WorkbenchError
from workbench.spikes import RULES, Reading, SpikeDetector, SpikeSettings

WINDOW = 50
NOISE = 0.06  # of the loss between batches of 8 rows, as on a small byte-level model
ONLY_Z = SpikeSettings(factor=1e9)
NAN, INF = float("nan"), float("inf")


def plateau(level=2.4, steps=WINDOW, seed=0):
    return level + NOISE * np.random.default_rng(seed).standard_normal(steps)


def run(losses, grad_norms=None, settings=None):
    """Readings of a fresh detector, steps counted from 1."""
    detector = SpikeDetector(settings)
    norms = [None] * len(losses) if grad_norms is None else grad_norms
    return [detector.update(step, loss, norm) for step, (loss, norm) in enumerate(zip(losses, norms, strict=True), 1)]


def fired(readings):
    return {step: reading.rule for step, reading in enumerate(readings, 1) if reading.rule}


# ---- each rule


def test_a_flat_line_is_silent_and_its_average_is_the_line():
    readings = run([2.5] * 200, [1.5] * 200)
    assert fired(readings) == {}
    assert readings[0] == Reading(None)
    assert {reading.moving_average for reading in readings[1:]} == {2.5}


def test_rounding_noise_on_a_flat_line_is_silent():
    flicker = np.random.default_rng(0).integers(0, 2, 400)
    assert fired(run([2.5] * 60 + [2.5 + 2.0**-6])) == {}, "one bfloat16 spacing"
    assert fired(run(2.5 + flicker * 2.0**-6)) == {}
    for level in (2.5, 0.01, -2.5):
        assert fired(run([level] * 60 + [level + 0.02 * abs(level)])) == {}
        assert fired(run([level] * 60 + [level + 0.04 * abs(level)])) == {61: "loss_z"}, "the floor stands for 3 %"


def test_a_step_fires_once_and_becomes_the_new_level():
    readings = run([*plateau(), *plateau(2.4 * 2, steps=400, seed=1)])
    assert fired(readings) == {WINDOW + 1: "loss_z"}
    assert readings[-1].moving_average == pytest.approx(4.8, abs=0.05)
    assert fired(run([*plateau(), *plateau(2.4 * 4, steps=400, seed=1)])) == {WINDOW + 1: "loss_factor"}


@pytest.mark.parametrize(("before", "after"), [(1.6, 5.5), (2.4, 5.6)])
@pytest.mark.parametrize("seed", range(20))
def test_a_batch_of_random_bytes_fires_in_one_step(before, after, seed):
    losses = [*plateau(before, seed=seed), after]
    (rule,) = fired(run(losses)).values()
    assert rule == ("loss_factor" if after > 3 * np.mean(losses[:WINDOW]) else "loss_z")
    assert fired(run(losses, settings=ONLY_Z)) == {WINDOW + 1: "loss_z"}, "the factor rule is not needed"


def test_one_garbage_row_of_eight():
    losses = [*plateau(seed=4), 2.83]
    reading = run(losses)[-1]
    assert reading.rule == "loss_z" and reading.value == 2.83
    assert reading.threshold < 2.83 < 3 * reading.moving_average
    # A rise of 0.4 is 6.7 standard deviations: with the noise of the step itself, and of a MAD over 50 steps, about
    # three in four are caught. A row of random bytes in a trained byte-level model costs more, a rise near 1.
    noise = np.random.default_rng(1).normal(0, NOISE, 200)
    caught = {
        rise: sum(bool(run([*plateau(seed=k), 2.4 + rise + noise[k]])[-1].rule) for k in range(200))
        for rise in (0.4, 0.6)
    }
    assert 120 < caught[0.4] < 180 and caught[0.6] > 190


def test_grad_norm_z_reports_the_norm_itself():
    norms = np.exp(0.3 * np.random.default_rng(0).standard_normal(WINDOW))
    reading = run([2.4] * (WINDOW + 1), [*norms, 30.0])[-1]
    assert reading.rule == "grad_norm_z" and reading.value == 30.0
    logs = np.log(norms)
    sigma = 1.4826 * np.median(np.abs(logs - np.median(logs)))
    assert reading.threshold == pytest.approx(np.exp(np.median(logs) + 6 * sigma))
    assert reading.explanation == (
        f"gradient norm 30 is {(np.log(30) - np.median(logs)) / sigma:.3g} robust standard deviations "
        f"(of its logarithm) above the median {np.exp(np.median(logs)):.4g} of the last 50 steps"
    )


def test_a_flat_gradient_norm_must_nearly_double():
    assert fired(run([None] * 51, [1.0] * 50 + [1.8])) == {}
    assert fired(run([None] * 51, [1.0] * 50 + [1.9])) == {51: "grad_norm_z"}


def test_zero_gradient_norms_are_skipped():
    norms = [1.0] * 50 + [0.0] * 200 + [1.1]
    assert fired(run([None] * len(norms), norms)) == {}


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_non_finite_fires_before_the_window_is_full(value):
    readings = run([5.0, 4.9, value, 4.8])
    assert fired(readings) == {3: "non_finite"}
    assert readings[2].threshold is None and readings[2].explanation == f"loss is {value}".replace("nan", "NaN")
    np.testing.assert_equal(readings[2].value, value)
    assert readings[3].moving_average == pytest.approx(4.95), "it did not enter the window"
    assert fired(run([2.0, 2.0], [1.0, value])) == {2: "non_finite"}


def test_non_finite_fires_at_every_step_and_names_both():
    readings = run([*plateau(), NAN, NAN, 2.4, INF], [*[1.0] * WINDOW, NAN, 1.0, 1.0, 1.0])
    assert fired(readings) == dict.fromkeys((51, 52, 54), "non_finite")
    assert readings[50].explanation == "loss is NaN and gradient norm is NaN"
    assert readings[53].explanation == "loss is inf"


def test_none_is_not_recorded():
    sparse = [value for loss in plateau() for value in (loss, None, None)]
    readings = run([*sparse, 5.6])
    assert fired(readings) == {len(sparse) + 1: "loss_z"}, "the window counts values, not steps"
    assert fired(run([None] * 100, [None] * 100)) == {}
    assert run([None] * 3)[-1] == Reading(None)


def test_silent_until_the_window_is_full():
    for steps in (0, 1, 10, WINDOW - 1):
        assert fired(run([*plateau(steps=steps), 100.0], [*[1.0] * steps, 100.0])) == {}
    assert fired(run([*plateau(steps=WINDOW), 100.0])) == {WINDOW + 1: "loss_factor"}


# ---- debounce, and what enters the window


@pytest.mark.parametrize("window", [50, 21])
def test_debounced_by_exactly_half_a_window(window):
    settings = SpikeSettings(window=window)
    half = window // 2
    first = window + 1
    for gap, expected in ((half, [first]), (half + 1, [first, first + half + 1])):
        losses = [*plateau(steps=window), 5.6, *plateau(steps=gap - 1, seed=1), 5.6]
        assert list(fired(run(losses, settings=settings))) == expected


def test_a_gradient_norm_alarm_does_not_hide_the_loss_spike_after_it():
    losses, norms = [*plateau(steps=60), 5.6, 2.4, 2.4], [*[1.0] * 55, 9.0, *[1.0] * 5, 9.0, 1.0]
    assert fired(run(losses, norms)) == {56: "grad_norm_z", 61: "loss_z"}


def test_non_finite_silences_the_rules_after_it():
    assert fired(run([*plateau(), NAN, 5.6, *plateau(steps=30), 5.6])) == {51: "non_finite", 83: "loss_z"}


def test_a_spike_does_not_poison_the_statistics():
    losses = [*plateau(steps=60), 1e4, *plateau(steps=26, seed=1), 9.0]
    readings = run(losses)
    assert fired(readings) == {61: "loss_factor", 88: "loss_factor"}
    assert readings[61].moving_average == readings[60].moving_average == pytest.approx(2.4, abs=0.05)


def test_a_debounced_spike_does_not_poison_them_either():
    losses = [*plateau(steps=60), 5.6, 5.0, 4.5, 4.0, *plateau(steps=30, seed=1)]
    assert max(reading.moving_average for reading in run(losses)[1:]) < 2.6


def test_a_new_level_is_accepted_after_more_than_half_a_window():
    losses = [*plateau(), *[4.8] * 25]
    assert run([*losses, 4.8])[-1].moving_average == pytest.approx(2.4, abs=0.05)
    assert run([*losses, 4.8, 4.8])[-1].moving_average == 4.8


# ---- healthy runs stay silent


def curve(steps, seed):
    """A loss falling from ln 256 by a power law to about 1.6, with batch noise."""
    step = np.arange(steps)
    return 1.5 + 4.0 * (1 + step / 20) ** -0.6 + NOISE * np.random.default_rng(seed).standard_normal(steps)


@pytest.mark.parametrize("seed", range(5))
def test_a_healthy_falling_loss_is_silent(seed):
    rng = np.random.default_rng(seed)
    norms = np.exp(1.5 * np.exp(-np.arange(1000) / 30) + 0.2 * rng.standard_normal(1000))
    assert fired(run(curve(1000, seed), norms)) == {}


@pytest.mark.parametrize("rate", [1e-4, 1e-2, 0.1])
def test_a_smooth_fall_and_a_rising_gradient_norm_in_warmup_are_silent(rate):
    step = np.arange(300)
    assert fired(run(1 + 5 * np.exp(-rate * step), np.exp(0.01 * step))) == {}


def test_false_alarms_on_noisy_plateaus():
    """Rates per step, over 8,000 steps: normal, skewed, and heavier tails than a batch mean has."""
    rng, steps = np.random.default_rng(7), 8000
    losses = {
        "normal": 2.4 + NOISE * rng.standard_normal(steps),
        "lognormal": 2.4 * np.exp(0.1 * rng.standard_normal(steps)),
        "student 5": 2.4 + NOISE * rng.standard_t(5, steps),
        "student 3": 2.4 + NOISE * rng.standard_t(3, steps),
    }
    norms = {
        "lognormal": np.exp(0.5 * rng.standard_normal(steps)),
        "wide": np.exp(rng.standard_normal(steps)),
        "gamma": rng.gamma(4, 1, steps),
    }
    rates = {name: len(fired(run(values))) / steps for name, values in losses.items()}
    assert rates["normal"] == rates["lognormal"] == 0, rates
    assert rates["student 5"] < 0.002 and rates["student 3"] < 0.006, rates
    for name, values in norms.items():
        assert fired(run([None] * steps, values)) == {}, name


def test_the_logarithm_is_what_keeps_skewed_gradient_norms_silent():
    skewed = np.exp(0.5 * np.random.default_rng(3).standard_normal(8000))
    assert fired(run([None] * 8000, skewed)) == {}
    assert len(fired(run(skewed, settings=ONLY_Z))) > 8, "the same values on the plain scale"


# ---- odd numbers


def test_a_negative_or_zero_loss_has_no_factor_but_a_z():
    negative = -plateau()
    assert fired(run([*negative, -2.3])) == {}
    assert fired(run([*negative, 5.0])) == {51: "loss_z"}
    assert fired(run([0.0] * 60 + [1e-9])) == {}, "no scale to judge by"


def test_huge_values_do_not_overflow():
    readings = run([1.7e308, -1.7e308] * 30 + [1e300], [1e308, 1e-300] * 30 + [1.0])
    assert all(reading.moving_average is None or math.isfinite(reading.moving_average) for reading in readings)


def test_float32_scalars_give_the_same_readings():
    losses = np.float32([*plateau(), 5.6])
    assert run(list(losses)) == run([float(loss) for loss in losses])


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ({"window": 3}, "Spike window is 3; expected a whole number of 4 or more."),
        ({"window": 50.0}, "Spike window is 50.0"),
        ({"window": True}, "Spike window is True"),
        ({"factor": 1.0}, "Spike factor is 1.0; expected a finite number above 1."),
        ({"factor": NAN}, "Spike factor is nan"),
        ({"factor": "3"}, "Spike factor is '3'"),
        ({"z": 0}, "Spike z is 0; expected a finite number above 0."),
        ({"z": INF}, "Spike z is inf"),
    ],
)
def test_settings_out_of_range(setting, sentence):
    with pytest.raises(WorkbenchError, match="^" + sentence.replace(".", r"\.")):
        SpikeSettings(**setting)


# ---- a slow reference, written from the docstring


def reference(losses, grad_norms, settings):
    """(step, rule, threshold, moving average) of every spike: numpy, everything recomputed at every step."""
    half, spikes = settings.window // 2, []
    kept = {"loss": [], "norm": []}
    held = {"loss": [], "norm": []}
    last = {"loss": -(10**9), "norm": -(10**9)}

    def enter(name, value, over):
        if not over:
            held[name] = []
            kept[name] = [*kept[name], value][-settings.window :]
        else:
            held[name] = [*held[name], value]
            if len(held[name]) > half:
                kept[name], held[name] = held[name], []

    for step, (loss, norm) in enumerate(zip(losses, grad_norms, strict=True), 1):
        average = np.mean(kept["loss"]) if kept["loss"] else None
        candidates = []
        for name, value, floor in (("loss", loss, None), ("norm", norm, 0.1)):
            if value is None or not np.isfinite(value):
                continue
            value = np.log(value) if name == "norm" else value
            over = False
            if len(kept[name]) == settings.window:
                median = np.median(kept[name])
                sigma = 1.4826 * np.median(np.abs(np.array(kept[name]) - median))
                limit = median + settings.z * max(sigma, floor or 0.005 * abs(median))
                if name == "loss" and value > settings.factor * average > 0:
                    candidates.append(("loss", "loss_factor", settings.factor * average))
                elif value > limit:
                    limit, rule = (limit, "loss_z") if name == "loss" else (np.exp(limit), "grad_norm_z")
                    candidates.append((name, rule, limit))
                over = bool(candidates) and candidates[-1][0] == name
            enter(name, value, over)
        if any(value is not None and not np.isfinite(value) for value in (loss, norm)):
            candidates = [("both", "non_finite", None)]
        else:
            candidates = [found for found in candidates if step > last[found[0]] + half]
        if candidates:
            name, rule, limit = candidates[0]
            spikes.append((step, rule, limit, average))
            last["norm"] = step
            if name != "norm":
                last["loss"] = step
    return spikes


def stormy(seed, steps=1500):
    """A run with single spikes, jumps, NaN, gaps and gradient-norm bursts."""
    rng = np.random.default_rng(seed)
    losses = 2 + 3 * np.exp(-np.arange(steps) / 100) + NOISE * rng.standard_t(3, steps)
    norms = np.exp(0.3 * rng.standard_normal(steps))
    losses[rng.integers(0, steps, 25)] *= rng.uniform(1.5, 5, 25)
    norms[rng.integers(0, steps, 25)] *= rng.uniform(3, 30, 25)
    losses[700:760] += 3
    losses[rng.integers(0, steps, 3)] = NAN
    norms[rng.integers(0, steps, 3)] = INF
    return losses.tolist(), [None if rng.random() < 0.1 else norm for norm in norms.tolist()]


@pytest.mark.parametrize(
    ("seed", "settings"), [(0, SpikeSettings()), (1, SpikeSettings(2.0, 21, 5.0)), (2, SpikeSettings())]
)
def test_against_the_reference(seed, settings):
    losses, norms = stormy(seed)
    expected = reference(losses, norms, settings)
    readings = run(losses, norms, settings)
    found = [(step, r.rule, r.threshold, r.moving_average) for step, r in enumerate(readings, 1) if r.rule]
    assert {rule for _, rule, _, _ in found} == set(RULES), "the run exercises every rule"
    assert [row[:2] for row in found] == [row[:2] for row in expected]
    for (_, _, threshold, average), (_, _, wanted, mean) in zip(found, expected, strict=True):
        assert threshold == (None if wanted is None else pytest.approx(wanted, rel=1e-12))
        assert average == (None if mean is None else pytest.approx(mean, rel=1e-12))


# ---- frames


def frame(losses, norms, **columns):
    numbers = {"loss": losses, "grad_norm": [NAN if norm is None else norm for norm in norms]}
    seen = {"grad_norm_recorded": [norm is not None for norm in norms]}
    return pd.DataFrame({"step": range(1, len(losses) + 1), "segment": 0} | numbers | seen | columns)


def test_find_spikes_is_the_streaming_detector():
    losses, norms = stormy(0)
    table = find_spikes(frame(losses, norms))
    readings = [(step, r) for step, r in enumerate(run(losses, norms), 1) if r.rule]
    assert list(table.columns) == list(COLUMNS)
    assert table["step"].tolist() == [step for step, _ in readings]
    for column in ("rule", "value", "threshold", "moving_average", "explanation"):
        expected = [getattr(r, column) for _, r in readings]
        np.testing.assert_equal(table[column].tolist(), [NAN if value is None else value for value in expected])


def test_the_explanation_is_a_sentence_fragment():
    table = find_spikes(pd.DataFrame({"step": range(61), "loss": [2.4, 2.5, 2.3] * 20 + [5.61]}))
    assert table.to_dict("records") == [
        {
            "step": 60,
            "segment": 0,
            "rule": "loss_z",
            "value": 5.61,
            "threshold": pytest.approx(2.4 + 6 * 0.14826),
            "moving_average": pytest.approx(2.4, abs=0.01),
            "explanation": "loss 5.61 is 21.7 robust standard deviations above the median 2.4 of the last 50 steps",
        }
    ]
    (text,) = find_spikes(pd.DataFrame({"step": range(61), "loss": [2.0] * 60 + [9.0]}))["explanation"]
    assert text == "loss 9 is 4.5 times the moving average 2 of the last 50 steps"


def test_the_window_starts_afresh_in_each_segment():
    losses = [*plateau(), *plateau(steps=40, seed=1), 5.6]
    assert find_spikes(frame(losses, [None] * 91))["step"].tolist() == [91]
    split = frame(losses, [None] * 91, segment=[0] * 50 + [1] * 41)
    assert find_spikes(split).empty
    for first in (45, 50):
        back = frame(losses, [None] * 91, step=[*range(1, 51), *range(first, first + 41)])
        assert find_spikes(back).empty, "a step that goes back, or stands twice, opens a new segment too"


def test_dtypes_hold_with_and_without_spikes():
    types = {
        "step": "int64",
        "segment": "int64",
        "value": "float64",
        "threshold": "float64",
        "moving_average": "float64",
    }
    for table in (find_spikes(frame([2.0, 2.0], [1.0, 1.0])), find_spikes(frame([NAN, 2.0], [1.0, 1.0]))):
        assert {name: str(table[name].dtype) for name in types} == types
    assert find_spikes(frame([], [])).shape == (0, len(COLUMNS))


def test_nan_is_a_value_unless_it_was_not_recorded():
    table = pd.DataFrame({"step": [1, 2], "loss": [2.0, NAN]})
    assert find_spikes(table)["rule"].tolist() == ["non_finite"]
    assert find_spikes(table.assign(loss_recorded=[True, False])).empty
    assert find_spikes(pd.DataFrame({"step": [1, 2], "loss": pd.array([2.0, None], dtype="Float64")})).empty
    assert find_spikes(pd.DataFrame({"step": [1, 2], "loss": pd.Series([2.0, None], dtype=object)})).empty
    assert recorded(table, "grad_norm").tolist() == [False, False]


def test_a_frame_without_losses_is_refused():
    with pytest.raises(WorkbenchError, match=r"The frame has no column 'loss'; it has \['step'\]"):
        find_spikes(pd.DataFrame({"step": [1]}))


# ---- cost and imports


def test_an_update_costs_no_more_however_many_there_were():
    """In calls of functions: a clock would measure the neighbours of a busy machine."""
    losses, norms = plateau(steps=2000).tolist(), np.exp(plateau(0.0, steps=2000)).tolist()
    detector, calls, counts = SpikeDetector(), 0, []

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    for step, (loss, norm) in enumerate(zip(losses, norms, strict=True), 1):
        calls = 0
        sys.setprofile(count)
        try:
            detector.update(step, loss, norm)
        finally:
            sys.setprofile(before)
        counts.append(calls)
    assert 0 < max(counts[1000:]) <= max(counts[200:1000]) < 300


def test_importing_it_imports_no_mlx():
    code = "import sys, workbench.spikes; assert not [name for name in sys.modules if name.split('.')[0] == 'mlx']"
    subprocess.run([sys.executable, "-c", code], check=True)
