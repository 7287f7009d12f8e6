"""The first non-finite tensor is placed where it arises, forward or backward, in any micro-batch."""

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from helpers import Points, advance, assert_same_state, experiment, mse, state_of
from models import VOCABULARY, ByHand, Decoder, Tokens, classes_of, job, seeded, token_loss, transformer

from workbench.experiment import as_batch
from workbench.probe import certified_probe
from workbench.probes.measure import parameter_rows
from workbench.probes.nonfinite import first_nonfinite
from workbench.snapshot import restore
from workbench.step import Stepper
from workbench.trainer.model import loss


def found(one, batch=None, steps=0, edit=None):
    """What is said of the step after `steps` healthy ones, as the replay asks for it."""
    stepper = Stepper(one)
    advance(one, steps, stepper)
    if edit is not None:
        edit(one)
    before = state_of(one, steps)
    batch = as_batch(next(one.sampler)) if batch is None else as_batch(batch)
    result = stepper(batch)
    after = state_of(one, steps + 1)
    probe = certified_probe(stepper, before, batch, result)
    rows = probe.rows + parameter_rows(before, after, result.gradients)
    return first_nonfinite(stepper, before, after, batch, result, rows)


def place(one):
    return one.kind, one.path, one.call, one.micro_batch


@pytest.mark.parametrize("name", ["transformer", "grouped", "by hand"])
def test_a_healthy_step_has_none(name):
    assert found(job(name), steps=1) is None


def test_nothing_but_a_look_is_done_for_a_healthy_step(monkeypatch):
    monkeypatch.setattr("workbench.probes.nonfinite.forward_backward", lambda *a: pytest.fail("a pass was made"))
    assert found(job(), steps=1) is None


class Breaking(nn.Module):
    """A layer between two others that breaks in one way."""

    def __init__(self, how):
        super().__init__()
        self.first, self.broken, self.last = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 1)
        self._how = how

    def __call__(self, x):
        x = self.first(x)
        if self._how == "between":
            return self.last(self.broken(mx.log(-mx.abs(x) - 1)))
        x = self.broken(x)
        if self._how == "forward":
            x = x * mx.array([1.0, mx.nan] + [1.0] * 6)
        if self._how == "backward":  # the derivative of |x|^0.5 at 0 is infinite, its value is not
            x = mx.sqrt(mx.abs(x * 0.0)) + x
        return self.last(x)


def breaking(how):
    return experiment(model=seeded(lambda: Breaking(how)))


def test_between_two_layers():
    """What no module returned was computed in the module around."""
    one = found(breaking("between"))
    assert place(one) == ("intermediate", "", 0, 0) and one.count == 12 * 8
    assert one.sentence == (
        "The first non-finite tensor is what the model hands to broken: 96 NaN of 96 elements; all before it is finite."
    )
    assert found(breaking("forward")).sentence.count("hands to last: 12 NaN of 96 elements") == 1


def test_in_the_backward_pass():
    one = found(breaking("backward"))
    assert place(one) == ("activation_gradient", "broken", 0, 0)
    assert "the gradient of the output of broken: 96 NaN of 96 elements" in one.sentence


class Overflowing(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = mx.ones(4)

    def __call__(self, x):
        return x * self.weight * 1e38 * 1e38


def test_in_the_output_of_a_layer():
    model = nn.Sequential(nn.Linear(4, 4), Overflowing(), nn.Linear(4, 1))
    one = found(experiment(model=seeded(lambda: model)))
    assert place(one) == ("activation", "layers.1", 0, 0)
    assert "the output of layers.1" in one.sentence and "inf" in one.sentence


def test_in_the_second_call_of_a_shared_layer():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.last = nn.Linear(4, 4), nn.Linear(4, 1)
            self.layer.weight = mx.eye(4) * 1e30

        def __call__(self, x):
            return self.last(self.layer(self.layer(x)))

    one = found(experiment(model=seeded(Twice)))
    assert place(one) == ("activation", "layer", 1, 0) and "the output of layer in call 1" in one.sentence


def test_a_fully_masked_attention_row():
    """Case S3: finite forward, NaN in the gradient of that attention layer."""
    one = found(job("by hand", model=seeded(lambda: Decoder([ByHand(), ByHand(hide=[3])]))))
    assert place(one) == ("attention_gradient", "blocks.1", 0, 0)
    assert "the gradient of the attention scores in blocks.1" in one.sentence


def test_fused_attention_is_seen_too():
    def blow_up(one):
        one.model.blocks[1].attention.query.weight = one.model.blocks[1].attention.query.weight * 1e30
        one.model.blocks[1].attention.key.weight = one.model.blocks[1].attention.key.weight * 1e30

    one = found(job(), steps=1, edit=blow_up)
    assert one.kind == "attention" and one.path == "blocks.1.attention"
    assert "the output of attention in blocks.1.attention" in one.sentence


def test_a_weight_that_was_broken_before():
    """Case S7: with the tensor named."""

    def break_one(one):
        weight = np.array(one.model.blocks[1].mlp.up.weight)
        weight[0, 0] = np.nan
        one.model.blocks[1].mlp.up.weight = mx.array(weight)

    one = found(job(), steps=1, edit=break_one)
    assert place(one) == ("weight_before", "blocks.1.mlp.up.weight", 0, 0) and one.count == 1
    assert "the weight blocks.1.mlp.up.weight of state N-1: 1 NaN of 1,024 elements" in one.sentence


def test_a_frozen_weight_and_a_moment_that_were_broken_before():
    def freeze(one):
        one.model.norm.freeze()
        one.model.norm.weight = mx.full(one.model.norm.weight.shape, mx.inf)

    frozen = job()
    freeze(frozen)
    assert place(found(frozen))[:2] == ("weight_before", "norm.weight")

    def infinite_moment(one):
        one.optimizer.state["norm"]["weight"]["m"] = mx.full((16,), mx.nan)

    assert place(found(job(), steps=1, edit=infinite_moment))[:2] == ("optimizer_before", "norm.weight.m")


def test_a_batch_that_holds_it():
    x, y = Points().__next__()
    x[3, 1] = np.inf
    one = found(experiment(), batch=(x, y))
    assert place(one) == ("batch", "0", 0, 0) and "1 inf of 48 elements" in one.sentence


def masked(model, inputs, targets, keep):
    losses = nn.losses.cross_entropy(model(inputs).astype(mx.float32), targets)
    return mx.sum(losses * keep) / mx.sum(keep)


def test_no_target_that_counts():
    """Case S2: the loss is the first."""
    x, y = next(Tokens())
    one = found(job(loss_fn=masked), batch=(x, y, np.zeros(y.shape, np.float32)))
    assert place(one) == ("loss", "", 0, 0) and "the loss: NaN" in one.sentence and one.count == 1


def test_in_the_micro_batch_in_which_it_happened():
    x, y = next(Tokens())
    keep = np.ones(y.shape, np.float32)
    keep[2:4] = 0  # the second of three parts
    one = found(job(loss_fn=masked, accumulate=3), batch=(x, y, keep))
    assert place(one) == ("loss", "", 0, 1)


def test_an_additive_mask_of_minus_infinity_is_no_finding():
    """It enters modules as it should; the NaN comes later."""

    class WithMask(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.attention = nn.Embedding(VOCABULARY, 16), nn.MultiHeadAttention(16, 2)
            self.head = nn.Linear(16, VOCABULARY)

        def __call__(self, tokens):
            x = self.embedding(tokens)
            mask = mx.where(mx.arange(tokens.shape[1])[None] > mx.arange(tokens.shape[1])[:, None], -mx.inf, 0.0)
            return self.head(self.attention(x, x, x, mask)) * mx.nan

    one = found(job(loss_fn=token_loss, model=seeded(WithMask)))
    assert place(one)[:2] == ("activation", "") and "the output of the model" in one.sentence


class Hiding(nn.Module):
    """A layer whose output is a mask: -inf is meant."""

    def __init__(self, value=-mx.inf):
        super().__init__()
        self.weight, self._value = mx.ones(VOCABULARY), value

    def __call__(self, x):
        return mx.where(mx.arange(VOCABULARY) == 3, self._value, x * self.weight)


def test_a_layer_that_hides_logits_is_healthy():
    def kept(model, inputs, targets):
        return mx.mean(nn.losses.cross_entropy(model(inputs), mx.where(targets == 3, 4, targets)))

    def make(value):
        return job(
            loss_fn=kept, model=seeded(lambda: nn.Sequential(nn.Embedding(VOCABULARY, VOCABULARY), Hiding(value)))
        )

    assert found(make(-mx.inf)) is None
    assert place(found(make(mx.inf)))[:2] == ("activation", "layers.1")
    assert place(found(job(loss_fn=token_loss, model=make(-mx.inf).model)))[:2] == ("loss", "")  # a target was hidden


def test_logits_that_no_module_returned():
    def scaled(model, inputs, targets):
        return mx.mean(nn.losses.cross_entropy(model(inputs) * mx.inf, targets))

    assert found(job(loss_fn=scaled)).kind == "logits"


def test_a_gradient_norm_that_overflows_while_every_gradient_is_finite():
    def steep(model, x, y):
        return mse(model, x, y) * 1e25

    one = found(experiment(loss_fn=steep, clip=1.0))
    assert place(one)[:2] == ("grad_norm", "") and "the global gradient norm: inf" in one.sentence


def test_a_gradient_alone():
    """float16: the gradient of a weight leaves the range; what flows back, and that of the bias, does not."""

    def steep(model, x, y):
        return mx.sum(model(x.astype(mx.float16)).astype(mx.float32)) * 1000

    model = nn.Sequential(nn.Linear(4, 1))
    model.set_dtype(mx.float16)
    one = found(
        experiment(model=model, loss_fn=steep, optimizer=optim.SGD(1e-6)),
        batch=(np.full((12, 4), 100.0, np.float32), np.zeros((12, 1), np.float32)),
    )
    assert place(one)[:2] == ("gradient", "layers.0.weight") and "4 inf of 4 elements" in one.sentence


def test_an_update_that_divides_zero_by_zero():
    """ε = 0 and no gradient: m/√v is 0/0 in a state that was finite."""

    def still(model, x, y):
        return mx.mean(model(x) * 0.0) + 1

    one = found(experiment(loss_fn=still, optimizer=optim.AdamW(1e-2, eps=0.0, bias_correction=True)))
    assert one.kind == "weight" and "of state N: " in one.sentence


@pytest.mark.parametrize("compiled", [True, False])
def test_it_leaves_no_trace(compiled):
    def run(look):
        mx.random.seed(9)
        one = job(model=transformer(dropout=0.1), loss_fn=loss, compile=compiled)
        stepper = Stepper(one)
        advance(one, 1, stepper)
        before, classes = state_of(one, 1), classes_of(one.model)
        batch = as_batch(next(one.sampler))
        result = stepper(batch)
        after = state_of(one, 2)
        if look:
            broken = parameter_rows(before, after, {path: g * mx.nan for path, g in result.gradients.items()})
            first_nonfinite(stepper, before, after, batch, result, broken)
            assert classes_of(one.model) == classes
            restore(one, after)
        advance(one, 2, stepper)
        return state_of(one, 4)

    assert_same_state(run(True), run(False))
