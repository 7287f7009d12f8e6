"""workbench.screen.thinning: what the thinned curve draws is what the whole would draw."""

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from workbench.screen.thinning import outlined, thinned, thinned_marks


def long(count=60_000, seed=0):
    draw = np.random.default_rng(seed)
    return np.cumsum(draw.integers(1, 4, count)), 2 + draw.standard_normal(count)


def pixels(x, y, low, high, width=400, area=False):
    """The rows that each column of a picture has ink in."""
    figure = Figure(figsize=(width / 100, 3), dpi=100)
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    if area:
        axes.fill(x, y, color="black", lw=0.72, antialiased=False, snap=False)
    else:
        axes.plot(x, y, color="black", lw=0.72, antialiased=False, snap=False)
    axes.set(xlim=(low, high), ylim=(-4, 12))
    canvas.draw()
    ink = np.asarray(canvas.buffer_rgba())[:, :, 0] < 128
    return [np.flatnonzero(column) for column in ink.T]


@pytest.mark.parametrize("place", [0, 1, 777, 31_003, 59_999])
def test_a_spike_of_one_step_never_vanishes(place):
    steps, values = long()
    for spike in (11.0, -11.0):
        values[place] = spike
        x, y = thinned(steps, values, steps[0], steps[-1], 400)
        assert len(x) <= 1604 and spike in y
        (at,) = x[y == spike][:1]
        assert abs(at - steps[place]) <= (steps[-1] - steps[0]) / 400


def test_every_column_shows_its_extremes():
    steps, values = long()
    low, high = int(steps[100]), int(steps[-100])
    x, y = thinned(steps, values, low, high, 300)
    width = (high - low) / 300
    for column in range(300):
        inside = (steps >= low + column * width) & (steps < low + (column + 1) * width)
        shown = (x >= low + column * width) & (x < low + (column + 1) * width)
        assert (y[shown].min(), y[shown].max()) == (values[inside].min(), values[inside].max())
    assert (np.diff(x) >= 0).all()


def noise(count):
    return 2 + np.random.default_rng(0).standard_normal(count)


def steep(count):
    """Neighbouring columns of pixels share no value."""
    return 4 + 7 * np.sin(np.linspace(0, 40, count))


def walk(count):
    return np.clip(np.cumsum(noise(count) - 2) / 20, -3.5, 11)


def stairs(count):
    return np.repeat(np.random.default_rng(1).uniform(-3, 11, count // 70 + 1), 70)[:count]


def flat(count):
    return np.full(count, 2.5)


def gap(count):
    """A quarter of the steps were not logged: see below."""
    return noise(count)


@pytest.mark.parametrize("shape", [noise, steep, walk, stairs, flat, gap])
def test_the_picture_is_that_of_the_whole_curve(shape):
    steps, values = long(20_000)[0], shape(20_000)
    values[9000] = 11
    if shape is gap:
        steps, values = (np.delete(array, slice(10_000, 15_000)) for array in (steps, values))
    low, high = steps[0], steps[-1]
    x, y = thinned(steps, values, low, high, 400)
    assert (x[0], y[0], x[-1], y[-1]) == (steps[0], values[0], steps[-1], values[-1])
    whole, part = pixels(steps, values, low, high), pixels(x, y, low, high)
    area = pixels(*outlined(steps, values, low, high, 400), low, high, area=True)
    for column in range(1, 399):  # a point on the border of two columns has ink in either
        for a, b in ((whole, part), (part, whole), (whole, area), (area, whole)):
            near = np.concatenate(b[column - 1 : column + 2])
            assert near.min() - 1 <= a[column].min() and a[column].max() <= near.max() + 1, column


def test_a_dense_curve_is_drawn_from_extreme_to_extreme():
    """A line through all four points of each column is twice as long, and takes twice as long to draw."""
    steps, values = np.arange(40_000), noise(40_000)
    x, y = thinned(steps, values, 0, 39_999, 400)
    columns = values.reshape(400, -1)
    ranges = columns.max(axis=1) - columns.min(axis=1)
    assert len(x) < 2.1 * 400 and np.abs(np.diff(y)).sum() < 1.2 * ranges.sum()


def test_the_outline_of_a_dense_curve_is_a_fraction_of_its_line():
    steps, values = np.arange(40_000), noise(40_000)
    values[7000] = 30.0
    (_, outline), (_, line) = outlined(steps, values, 0, 39_999, 400), thinned(steps, values, 0, 39_999, 400)
    assert np.abs(np.diff(outline)).sum() < 0.3 * np.abs(np.diff(line)).sum()
    assert (outline.min(), outline.max()) == (values.min(), 30.0)
    assert outlined(steps[:1000], values[:1000], 0, 39_999, 400) is None


def test_few_points_stay_as_they_are_with_their_neighbours():
    steps, values = np.arange(1, 101), np.arange(100.0)
    x, y = thinned(steps, values, 10.5, 20)
    assert x.tolist() == list(range(10, 22)) and y.tolist() == [float(step - 1) for step in x]
    x, y = thinned(steps[:0], values[:0], 1, 5)
    assert len(x) == len(y) == 0
    assert thinned(steps, values, 200, 300)[0].tolist() == [100]


def test_marks_are_thinned_to_the_highest_of_a_column():
    steps = np.arange(1000)
    values = np.zeros(1000)
    values[501] = 9.0
    kept = thinned_marks(steps, values, 0, 999, 100)
    assert len(kept) <= 101 and 501 in kept
    values[507] = np.nan
    assert 507 in thinned_marks(steps, values, 0, 999, 100), "what is not finite is above all"
    assert thinned_marks(steps, values, 2000, 3000).tolist() == []
