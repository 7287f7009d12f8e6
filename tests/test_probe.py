"""The probe measures the very step, proves it by the bits of loss and gradients, and changes nothing."""

import dataclasses

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import models
import numpy as np
import pytest
from helpers import advance, assert_same_state, experiment, flipped, mse, state_of, tensor_bytes
from mlx.utils import tree_flatten

from workbench.bits import bits_float
from workbench.experiment import as_batch
from workbench.probe import certified_probe, probe
from workbench.probes.measure import measure, parameter_rows
from workbench.snapshot import restore
from workbench.step import Stepper, StepResult


def performed(job, steps=3):
    """A stepper, the state before its last step, that step's batch and result; the experiment is back at N-1."""
    stepper, _ = advance(job, steps - 1)
    before = state_of(job, steps - 1)
    batch = as_batch(next(job.sampler))
    result = stepper(batch)
    after = state_of(job, steps)
    restore(job, before)
    return stepper, before, after, batch, result


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_it_is_certified_and_measures_the_exact_pass(dtype, compiled):
    optimizer = optim.AdamW(1e-2, eps=1e-4)
    job = experiment(dtype=dtype, dropout=0.2, clip=0.5, accumulate=3, compile=compiled, optimizer=optimizer)
    stepper, _, _, batch, result = performed(job)
    found = probe(stepper, batch, result, compiled=compiled)
    assert found.certified and found.compiled == compiled
    by_key = {(row.path, row.kind): row for row in found.rows}
    assert set(by_key) == {(f"layers.{n}", kind) for n in (0, 3) for kind in ("activation", "activation_gradient")}
    for path, activation in result.activations.items():
        (expected,) = measure("activation", {path: activation})
        assert by_key[path, "activation"] == expected


def test_activation_gradients_are_plain_autograd_s():
    job = experiment()
    stepper, _, _, batch, result = performed(job)
    found = probe(stepper, batch, result, compiled=False)
    first, last = job.model.layers[0], job.model.layers[3]

    def loss(offsets):
        hidden = mx.tanh(first(batch[0]) + offsets["layers.0"])
        return nn.losses.mse_loss(last(hidden) + offsets["layers.3"], batch[1])

    expected = mx.grad(loss)({"layers.0": mx.zeros((12, 8)), "layers.3": mx.zeros((12, 1))})
    rows = {row.path: row for row in found.rows if row.kind == "activation_gradient"}
    assert [rows[path] for path in expected] == measure("activation_gradient", expected)


@pytest.mark.parametrize("what", ["loss", "gradient", "grad_order"])
def test_another_bit_of_loss_or_gradient_is_not_certified(what):
    stepper, _, _, batch, result = performed(experiment())
    gradients = dict(result.gradients)
    if what == "gradient":
        gradients["layers.3.bias"] = flipped(gradients["layers.3.bias"])
    if what == "grad_order":
        gradients = {path: value[::-1] for path, value in gradients.items()}
    loss = np.nextafter(result.loss, np.float32(9)) if what == "loss" else result.loss
    other = StepResult(loss, result.grad_norm, gradients, result.activations, None)
    assert not probe(stepper, batch, other, compiled=False).certified


def test_a_step_on_another_state_is_not_certified():
    job = experiment()
    stepper, _, after, batch, result = performed(job)
    restore(job, after)
    assert not probe(stepper, batch, result, compiled=False).certified


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_training_goes_on_from_a_probed_state_as_from_an_unprobed_one(compiled):
    def make():
        return experiment(dropout=0.2, compile=compiled)

    plain = make()
    advance(plain, 6)
    job = make()
    stepper, before, after, batch, result = performed(job)
    probe(stepper, batch, result, compiled=compiled)
    restore(job, before)
    advance(job, 4, stepper)
    assert_same_state(state_of(job, 6), state_of(plain, 6))


def test_it_leaves_weights_and_optimizer_alone_by_itself():
    job = experiment(dropout=0.2)
    stepper, before, _, batch, result = performed(job)
    probe(stepper, batch, result, compiled=False)
    now = state_of(job, 2)
    assert tensor_bytes(now.weights) == tensor_bytes(before.weights)
    assert tensor_bytes(now.optimizer) == tensor_bytes(before.optimizer)


# ------------------------------------------------------------------------------------------------------------- measured


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_statistics_are_numpy_s(dtype):
    array = (mx.random.normal((70, 90), key=mx.random.key(1)) * 3).astype(dtype)
    exact = np.array(array.astype(mx.float32)).astype(np.float64)
    (row,) = measure("weight", {"w": array})
    assert (row.path, row.kind, row.size, row.nonfinite, row.l2_bits) == ("w", "weight", 6300, 0, None)
    assert row.dtype == str(dtype).removeprefix("mlx.core.")
    assert row.l2 == pytest.approx(np.sqrt(np.sum(exact**2)), rel=2e-6)
    assert row.rms == pytest.approx(np.sqrt(np.mean(exact**2)), rel=2e-6)
    assert np.float32(row.max_abs) == np.max(np.abs(exact))


def test_non_finite_elements_are_counted_and_the_rest_still_measured():
    (row,) = measure("gradient", {"g": mx.array([1.0, mx.nan, -3.0, mx.inf, -mx.inf])})
    assert (row.l2, row.rms, row.max_abs, row.nonfinite) == (None, None, 3.0, 3)
    assert np.isnan(bits_float(row.l2_bits)) and np.isnan(row.norm())
    (row,) = measure("gradient", {"g": mx.array([mx.inf, 1.0])})
    assert row.norm() == np.inf and row.nonfinite == 1


def test_a_finite_tensor_whose_norm_overflows_has_no_non_finite_element():
    (row,) = measure("weight", {"w": mx.full((100,), 3e38)})
    assert row.nonfinite == 0 and row.norm() == np.inf and row.max_abs == pytest.approx(3e38, rel=1e-6)
    assert row.rms == pytest.approx(3e38, rel=1e-6)


def test_tensors_of_nan_only_of_nothing_and_of_zeros():
    rows = measure("weight", {"nan": mx.array([mx.nan]), "none": mx.zeros((0, 2)), "zero": mx.zeros(3)})
    assert [(row.l2, row.max_abs, row.nonfinite) for row in rows] == [(None, None, 1), (0, None, 0), (0, 0, 0)]
    assert str(rows[2].max_abs) == "0.0"


def test_every_parameter_has_its_rows_before_and_after():
    job = experiment()
    _, before, after, _, result = performed(job)
    rows = {(row.path, row.kind): row for row in parameter_rows(before, after, result.gradients)}
    kinds = {"gradient", "update", *(f"{k}{s}" for k in ("weight", "adam_m", "adam_v") for s in ("", "_before"))}
    assert set(rows) == {(path, kind) for path, _ in tree_flatten(job.model.parameters()) for kind in kinds}
    path = "layers.0.weight"
    moved = np.array(after.weights[path]).astype(np.float64) - np.array(before.weights[path])
    assert rows[path, "update"].l2 == pytest.approx(np.sqrt(np.sum(moved**2)), rel=1e-5)
    for kind, tensors in (("adam_m", after), ("adam_m_before", before)):
        assert rows[path, kind].l2 == measure(kind, {path: tensors.optimizer[f"{path}.m"]})[0].l2
    assert rows[path, "weight_before"].l2 == measure("weight", {path: before.weights[path]})[0].l2


def test_rows_of_a_multi_optimizer_have_the_parameters_paths():
    optimizer = optim.MultiOptimizer([optim.AdamW(1e-2), optim.Lion(1e-3)], [lambda path, weight: weight.ndim == 2])
    _, before, after, _, result = performed(experiment(optimizer=optimizer))
    rows = parameter_rows(before, after, result.gradients)
    assert {row.path for row in rows if row.kind == "adam_m"} == set(result.gradients)
    assert {row.path for row in rows if row.kind == "adam_v"} == {"layers.0.weight", "layers.3.weight"}


def test_frozen_parameters_have_no_rows():
    job = experiment()
    job.model.layers[0].freeze()
    _, before, after, _, result = performed(job)
    assert {row.path for row in parameter_rows(before, after, result.gradients)} == {"layers.3.weight", "layers.3.bias"}


def test_updates_in_half_precision_are_the_change_really_applied():
    """A bfloat16 weight near 1 does not move by 1e-4."""
    job = experiment(dtype="bfloat16", optimizer=optim.SGD(1e-9), loss_fn=mse)
    job.model.layers[0].weight = mx.ones((8, 4), dtype=mx.bfloat16)
    _, before, after, _, result = performed(job)
    rows = {(row.path, row.kind): row for row in parameter_rows(before, after, result.gradients)}
    assert rows["layers.0.weight", "update"].l2 == 0 and rows["layers.0.weight", "gradient"].l2 > 0


def test_stepper_of_another_layer_list_probes_those_layers():
    job = experiment()
    stepper = Stepper(job, ["layers.3", "layers.0"])
    batch = as_batch(next(job.sampler))
    before = state_of(job)
    result = stepper(batch)
    restore(job, before)
    assert [row.path for row in probe(stepper, batch, result, compiled=False).rows[:2]] == ["layers.0", "layers.3"]


# ------------------------------------------------------------------------------------------ every model, with its watch

CASES = [
    ("transformer", {"accumulate": 3}),
    ("transformer", {"compile": True, "accumulate": 3}),
    ("bfloat16", {"compile": True}),
    ("grouped", {"compile": True}),
    ("shared", {}),
    ("by hand", {"accumulate": 2}),
]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_any_model_is_certified_with_attention_and_logits_watched(name, options):
    one = models.job(name, **options)
    stepper, before, _, batch, result = performed(one)
    found = certified_probe(stepper, before, batch, result)
    assert found.certified and found.certified_forward and not found.compiled
    assert found.forward.attention and found.forward.logits.tokens == models.ROWS * models.CTX
    assert {one.queries for one in found.forward.attention} <= {models.ROWS * models.CTX * heads for heads in (2, 4)}
    restore(one, before)
    compiled = probe(stepper, batch, result, compiled=True)
    assert compiled.certified and compiled.compiled and compiled.forward == found.forward


@pytest.mark.parametrize("watched", [True, False])
@pytest.mark.parametrize(("name", "options"), [*CASES, ("mlp", {})])
def test_it_leaves_no_trace_in_classes_functions_or_the_run(name, options, watched):
    """Cases M5 and D2: twice in a row, and the steps after are those of a run that was never probed."""

    def run(probes):
        mx.random.seed(4)
        one = experiment(dropout=0.2) if name == "mlp" else models.job(name, **options)
        classes = models.classes_of(one.model)
        stepper, before, after, batch, result = performed(one)
        for _ in range(probes):
            restore(one, before)
            assert probe(stepper, batch, result, compiled=False, watched=watched).certified
            assert models.classes_of(one.model) == classes
        restore(one, after)
        advance(one, 2, stepper)
        return state_of(one, 5)

    probed, plain = run(2), run(0)
    assert_same_state(probed, plain)
    assert probed.lanes() == plain.lanes()


def test_watching_moves_no_bit_of_what_is_measured():
    one = models.job(compile=True)
    stepper, before, _, batch, result = performed(one)
    rows = []
    for watched in (True, False):
        restore(one, before)
        found = probe(stepper, batch, result, compiled=False, watched=watched)
        rows.append(found.rows)
        assert (found.forward is not None) == watched == (found.certified_forward is not None)
    assert rows[0] == rows[1]


@pytest.mark.parametrize("fails", ["compiled", "eager", "all"])
def test_where_watching_moves_bits_the_pass_is_made_once_more_without(fails, monkeypatch):
    """As on a GPU may happen; the order is eager, compiled, compiled and not watched."""
    one = models.job(compile=True)
    stepper, before, _, batch, result = performed(one)
    tried, real = [], probe

    def sometimes(*arguments, compiled, watched=True, **options):
        tried.append((compiled, watched))
        found = real(*arguments, compiled=compiled, watched=watched, **options)
        certified = {"compiled": not watched, "eager": compiled, "all": False}[fails]
        return dataclasses.replace(found, certified=certified, certified_forward=certified if watched else None)

    monkeypatch.setattr("workbench.probe.probe", sometimes)
    found = certified_probe(stepper, before, batch, result)
    steps = [(False, True), (True, True), (True, False)]
    assert tried == {"compiled": steps, "eager": steps[:2], "all": steps}[fails]
    assert found.forward.attention and len(found.forward.attention) == 2
    expected = {"compiled": (True, True, False), "eager": (True, True, True), "all": (False, False, False)}[fails]
    assert (found.certified, found.compiled, found.certified_forward) == expected


def test_a_loss_under_vmap_is_probed_all_the_same():
    def by_row(model, inputs, targets):
        return mx.mean(mx.vmap(lambda x, y: nn.losses.cross_entropy(x, y))(model(inputs), targets))

    for compiled in (False, True):
        one = models.job(loss_fn=by_row, compile=compiled)
        stepper, before, _, batch, result = performed(one)
        assert probe(stepper, batch, result, compiled=compiled).forward.logits is None
        restore(one, before)
        assert certified_probe(stepper, before, batch, result).certified
