"""workbench.detection.whole_series: `find_spikes` gives the bits of the detector that is asked step by step."""

import numpy as np
import pandas as pd
import pytest

from workbench.detection.spike_table import find_spikes
from workbench.spikes import SpikeDetector, SpikeSettings

NAN, INF = float("nan"), float("inf")
SETTINGS = (
    SpikeSettings(window=5),
    SpikeSettings(window=4, z=1),
    SpikeSettings(window=8, factor=1.2, z=2.5),
    SpikeSettings(window=21, factor=1.0001),
    SpikeSettings(),
)


def step_by_step(frame, settings):
    """What the detector says of each row: the slow way, and the one in which a run is recorded."""
    detector, found, previous = SpikeDetector(settings), [], None
    for row in frame.to_dict("records"):
        if row["segment"] != previous:
            detector.reset()
            previous = row["segment"]
        loss, norm = (row[name] if row[f"{name}_recorded"] else None for name in ("loss", "grad_norm"))
        said = detector.update(row["step"], loss, norm)
        if said.rule is not None:
            numbers = [NAN if number is None else number for number in (said.threshold, said.moving_average)]
            found.append((row["step"], row["segment"], said.rule, said.value, *numbers, said.explanation))
    return found


def assert_the_same(frame, settings):
    rows = list(find_spikes(frame, settings).itertuples(index=False, name=None))
    assert list(map(repr, rows)) == list(map(repr, step_by_step(frame, settings)))
    return {row[2] for row in rows}


def course(losses, norms, **columns):
    """A frame; None is not recorded."""
    given = {"loss": losses, "grad_norm": norms}
    numbers = {name: [NAN if value is None else float(value) for value in values] for name, values in given.items()}
    seen = {f"{name}_recorded": [value is not None for value in values] for name, values in given.items()}
    return pd.DataFrame({"step": range(1, len(losses) + 1), "segment": 0} | numbers | seen | columns)


def any_series(rng, count):
    """Noise about a level, a drift or nothing, with spikes, new levels, ties, NaN, gaps and huge values."""
    noise = rng.choice([0.0, 0.01, 0.05, 0.5])
    values = rng.choice([2.4, -1.0, 0.0, 1e-300]) * np.ones(count) + noise * rng.standard_t(3, count)
    values += rng.choice([0, 0, 3]) * np.linspace(rng.random(), 0, count) ** 2
    values += rng.choice([0, 0, 0.02]) * np.arange(count)
    if rng.random() < 0.5:
        values = np.round(values, int(rng.integers(0, 3)))  # ties
    for _ in range(rng.integers(0, 6)):
        place, length = rng.integers(0, count), rng.integers(1, rng.choice([2, 6, 40]))
        values[place : place + length] += rng.choice([0.3, 3, 30])
    special = [NAN, INF, -INF, 0.0, 1.7e308, -1.7e308, 1e30, None]
    values = values.tolist()
    for place in rng.integers(0, count, rng.choice([0, 0, 2, 8])):
        for other in range(place, min(count, place + int(rng.choice([1, 1, 7])))):
            values[other] = special[rng.integers(len(special))]
    return [None if value is None or rng.random() < 0.03 else value for value in values]


@pytest.mark.parametrize("seed", range(40))
def test_any_series(seed):
    rng = np.random.default_rng(seed)
    for settings in SETTINGS:
        count = int(rng.integers(1, 6 * settings.window))
        losses, norms = any_series(rng, count), any_series(rng, count)
        norms = [abs(norm) if rng.random() < 0.8 and norm is not None else norm for norm in norms]
        assert_the_same(course(losses, norms), settings)
        segment = np.sort(rng.integers(0, 3, count))
        step = np.arange(count) + 1 - rng.integers(0, count) * (np.arange(count) > rng.integers(0, count))
        assert_the_same(course(losses, norms, segment=segment, step=step), settings)


@pytest.mark.parametrize("settings", SETTINGS)
def test_every_rule_in_a_long_course(settings):
    """Longer than the blocks in which windows are made, with healthy stretches between departures."""
    rng, count = np.random.default_rng(0), 60_000
    losses = 2.4 + 0.02 * rng.standard_normal(count)
    norms = np.exp(0.2 * rng.standard_normal(count))
    for at in rng.integers(0, count, 30):
        losses[at] *= 5
        losses[(at + 300) % count] += 1.0
        norms[(at + 600) % count] *= 30
    losses[20_000:20_400] += 4  # a new level, and back
    losses[30_000:30_100] = NAN
    rules = assert_the_same(course(losses, norms), settings)
    assert rules >= {"non_finite", "grad_norm_z"} and rules & {"loss_z", "loss_factor"}


@pytest.mark.parametrize("least", [0.0, 1.0])
def test_thresholds_are_met_to_the_bit(least):
    """A value equal to the threshold is healthy, and the next float above it is not: the factor rule, whose mean is a
    sum that has to be rounded as the detector rounds it."""
    settings = SpikeSettings(window=7, factor=1.5, z=1e9)
    rng = np.random.default_rng(3)
    for _ in range(200):
        past = (least + rng.random(7)).tolist()
        detector = SpikeDetector(settings)
        for step, value in enumerate(past):
            detector.update(step, value, None)
        limit = settings.factor * detector.update(7, 0.0, None).moving_average
        for value, over in ((limit, False), (np.nextafter(limit, INF), True)):
            frame = course([*past, value], [None] * 8)
            assert_the_same(frame, settings)
            assert (len(find_spikes(frame, settings)) == 1) is over
