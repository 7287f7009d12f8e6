"""Since when a norm is off, told from the scatter of norms that are not."""

import math

import numpy as np
import pandas as pd
import pytest

from workbench.probes.onsets import FALSE_ALARM, beyond_chance, freedom, onsets

LAST = 20
CALM = [0.5] * 9


def found(healthy=24, **series):
    """{(layer, kind): step} of z of the nine steps to `LAST`, by name `layer_kind`."""
    rows = []
    for name, values in series.items():
        layer, _, kind = name.partition("_")
        rows += [(LAST - 8 + place, layer, kind, z, healthy) for place, z in enumerate(values)]
    frame = pd.DataFrame(rows, columns=["step", "layer", "kind", "z", "healthy"])
    return {(row.layer, row.kind): row.step for row in onsets(frame, LAST, 6.0).itertuples()}


def others(kind, values=CALM):
    return {f"{layer}_{kind}": values for layer in "bcdef"}


def test_what_stays_off_began_where_it_left():
    assert found(a_gradient=[*CALM[:4], 7, 8, 7, 9, 8], **others("gradient")) == {("a", "gradient"): 16}
    assert found(a_gradient=[-7] * 9, **others("gradient")) == {("a", "gradient"): 12}


@pytest.mark.parametrize(
    ("values", "step"),
    [
        ([*CALM[:4], 8, *CALM[:4]], None),  # it came back
        ([*CALM[:3], 8, 8, 8, 8, 8, 1], None),
        ([*CALM[:4], 8, *CALM[:3], 9], LAST),
        ([*CALM[:7], 6.1, 9], LAST),  # one step before N is scatter
        ([*CALM[:7], 40, 9], LAST - 1),  # unless it is beyond chance
        ([*CALM[:4], math.inf, *CALM[:4]], 16),
        ([math.nan] * 9, None),
    ],
)
def test_scatter_is_no_onset(values, step):
    expected = {} if step is None else {("a", "gradient"): step}
    assert found(a_gradient=values, **others("gradient")) == expected


def test_what_most_layers_do_at_once_is_no_scatter():
    """As the updates of one step that was made at another rate: they are usual again when the loss is not."""
    event = [*CALM[:7], 30, 1]
    assert found(healthy=7, a_update=event, **others("update", event)) == dict.fromkeys(
        [(layer, "update") for layer in "abcdef"], LAST - 1
    )
    few = {name: event for name in ("b_update", "c_update")}
    assert found(healthy=7, a_update=CALM, **others("update") | few) == {}


def test_moments_that_stay_off_need_their_gradient():
    off, rest = [*CALM[:4], 6.1, 6.1, 6.1, 6.1, 6.1], others("gradient") | others("weight")
    assert found(a_adam_v=off, a_gradient=CALM, **rest) == {("a", "adam_v"): LAST}
    assert found(a_adam_v=off, a_gradient=[*CALM[:5], 7, 7, 7, 7], **rest)["a", "adam_v"] == 16
    assert found(a_adam_v=[*off[:-3], 30, 30, 30], a_gradient=CALM, **rest)["a", "adam_v"] == 16  # beyond chance
    assert found(a_adam_v=[30] * 9, a_gradient=CALM, **rest) == {}  # long before


@pytest.mark.parametrize(("numbers", "healthy"), [(648, 24), (648, 32), (40, 8), (5000, 24)])
def test_the_limit_is_a_quantile_of_students_t(numbers, healthy):
    """By the density of t, summed far out: the approximation is within a third of the probability, on the safe side."""
    nu = freedom(healthy)
    scale = math.exp(math.lgamma((nu + 1) / 2) - math.lgamma(nu / 2)) / math.sqrt(nu * math.pi)
    edges = np.geomspace(beyond_chance(numbers, healthy), 1e6, 200_001)
    density = scale * (1 + edges**2 / nu) ** (-(nu + 1) / 2)
    tail = 2 * float(np.trapezoid(density, edges))
    assert FALSE_ALARM * 0.65 < tail * numbers < FALSE_ALARM * 1.05
