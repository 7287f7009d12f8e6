"""One reading of an array against numpy in float64."""

import numpy as np
import pytest

from workbench.probes.quantities import STRETCH
from workbench.probes.summary import summarise


@pytest.mark.parametrize("size", [1, 5, 4096, STRETCH, 2 * STRETCH + 777])
def test_it_is_numpy_s(size):
    values = np.random.default_rng(size).standard_normal(size).astype(np.float32)
    values[::4] = 0
    values[1::8] = -0.0
    found = summarise(values)
    assert found.total == pytest.approx(values.astype(float).sum(), rel=1e-5, abs=1e-5 * size**0.5)
    assert found.zeros == np.count_nonzero(values == 0) and found.nonfinite == 0
    assert found.max_abs == np.abs(values).max()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_counted_and_the_rest_still_measured(bad):
    values = np.linspace(-3, 2, 2 * STRETCH, dtype=np.float32)
    values[[5, STRETCH + 1]] = bad
    found = summarise(values)
    assert found.nonfinite == 2 and found.max_abs == 3 and not np.isfinite(found.total)


def test_both_infinities_hide_from_no_sum():
    found = summarise(np.array([np.inf, -np.inf, 0, 1], np.float32))
    assert (found.nonfinite, found.zeros, found.max_abs) == (2, 1, 1)


def test_a_sum_that_overflows_is_no_infinite_element():
    found = summarise(np.full(100, 3e38, np.float32))
    assert found.nonfinite == 0 and found.total == pytest.approx(3e40, rel=1e-6) and found.max_abs > 2.9e38


def test_nothing_and_nothing_finite():
    empty, nan = summarise(np.zeros(0, np.float32)), summarise(np.array([np.nan], np.float32))
    assert (empty.total, empty.zeros, empty.max_abs) == (0, 0, None)
    assert (nan.nonfinite, nan.max_abs) == (1, None)
