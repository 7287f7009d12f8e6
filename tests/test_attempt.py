"""Each change, against the same steps done by a plain MLX loop (`experiments.plain_steps`)."""

from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from experiments import batch_of, moved, plain_steps, scene_of
from helpers import experiment, mlp, mse, parts, state_of
from mlx.utils import tree_map

from workbench import Recorder
from workbench.cause.counterfactual import Trials
from workbench.errors import ExperimentError, ReplayError
from workbench.experiment import as_batch
from workbench.interventions.intervene import intervene
from workbench.interventions.scene import Scene
from workbench.run import Run
from workbench.snapshot import restore
from workbench.step import Stepper

N, NEXT, CLIP = 12, 3, 0.3
BATCHES = [batch_of(step) for step in range(N, N + NEXT + 1)]


@pytest.fixture(scope="module")
def scene(tmp_path_factory):
    """AdamW with bias correction, clipped at a norm that step 12 exceeds."""
    found = scene_of(tmp_path_factory.mktemp("own"), N, clip=CLIP, opening={"next_steps": NEXT})
    assert found.exact and found.result.grad_norm > CLIP
    return found


def adamw(**changed):
    return optim.AdamW(**({"learning_rate": 1e-2, "bias_correction": True} | changed))


def agrees(scene, change, reference):
    """The effect has the reference's losses, gradient norm and updates. Not their bits: another order of adding."""
    effect = intervene(scene, change)
    losses, norms, weights, before = reference
    assert [effect.loss, *effect.next_losses] == pytest.approx(losses, rel=2e-5)
    assert effect.grad_norm == pytest.approx(norms[0], rel=1e-5)
    assert effect.updates == pytest.approx(moved(before, weights[0]), rel=2e-4)
    assert effect.update_norm == pytest.approx(np.linalg.norm(list(moved(before, weights[0]).values())), rel=2e-4)
    return effect


def reference(state, optimizer, batches=BATCHES, clip=CLIP, model=None, **options):
    losses, norms, weights = plain_steps(state, batches, optimizer, model or mlp(), clip=clip, **options)
    return losses, norms, weights, state


def with_moments(state, change):
    """The state with `change(leaf, path, array)` in place of every moment."""
    moments = {
        path: mx.array(change(path.rpartition(".")[2], path.rpartition(".")[0], np.array(array)))
        if path.rpartition(".")[2] in ("m", "v") and "." in path
        else array
        for path, array in state.optimizer.items()
    }
    return replace(state, optimizer=moments)


# ------------------------------------------------------------------------------------------------------------- settings


def test_the_untouched_step_is_the_plain_one(scene):
    agrees(scene, None, reference(scene.state(N - 1), adamw()))


def test_half_the_learning_rate_halves_the_update_and_holds(scene):
    effect = agrees(scene, "lr=0.5x", reference(scene.state(N - 1), adamw(), scale_lr=0.5))
    assert effect.loss == scene.result.loss and effect.grad_norm == scene.result.grad_norm
    assert effect.updates == pytest.approx({k: v / 2 for k, v in scene.baseline.updates.items()}, rel=1e-4)


def test_another_learning_rate(scene):
    agrees(scene, "lr=3e-3", reference(scene.state(N - 1), adamw(), scale_lr=0.3))


def schedule(scale=1.0):
    return lambda step: scale * optim.cosine_decay(1e-2, 20)(step)


def test_a_scheduled_learning_rate_is_scaled_at_every_step(tmp_path):
    build = {"build": lambda: experiment(optimizer=adamw(learning_rate=schedule()))}
    scene = scene_of(tmp_path, N, **build, opening={"next_steps": NEXT})
    assert scene.exact
    expected = reference(scene.state(N - 1), adamw(learning_rate=schedule(0.25)), clip=None)
    agrees(scene, "lr=0.25x", expected)
    expected = reference(scene.state(N - 1), adamw(learning_rate=2e-3), clip=None, scale_lr=1.0)
    state = scene.state(N - 1)
    constant = replace(state, optimizer=state.optimizer | {"learning_rate": mx.array(2e-3)})
    agrees(scene, "lr=0.002", reference(constant, adamw(), clip=None))


def test_clipping_off_and_at_another_norm(scene):
    agrees(scene, "clip=off", reference(scene.state(N - 1), adamw(), clip=None))
    effect = agrees(scene, "clip=0.05", reference(scene.state(N - 1), adamw(), clip=0.05))
    assert effect.grad_norm == scene.result.grad_norm  # the norm is the one before clipping


def test_beta2_and_epsilon(scene):
    agrees(scene, "beta2=0.5", reference(scene.state(N - 1), adamw(betas=[0.9, 0.5])))
    agrees(scene, "eps=0.01", reference(scene.state(N - 1), adamw(eps=0.01)))


def test_float32_casts_weights_moments_and_activations(tmp_path):
    opening = {"next_steps": NEXT}
    scene = scene_of(tmp_path, N, dtype="bfloat16", opening=opening)
    state = scene.state(N - 1)
    assert scene.exact and {str(array.dtype) for array in state.weights.values()} == {"mlx.core.bfloat16"}
    effect = intervene(scene, "dtype=float32")

    def cast(arrays):
        return {path: array if array.dtype == mx.uint64 else array.astype(mx.float32) for path, array in arrays.items()}

    wide = replace(state, weights=cast(state.weights), optimizer=cast(state.optimizer))
    losses, norms, weights = plain_steps(wide, BATCHES, adamw(), mlp())
    assert [effect.loss, *effect.next_losses] == pytest.approx(losses, rel=2e-5)
    assert effect.updates == pytest.approx(moved(wide, weights[0]), rel=2e-4)
    assert effect.loss != scene.result.loss and not any("casts them itself" in note for note in effect.notes)
    # Nothing of it stays: the experiment is in its own dtype again, and gives its own bits.
    again = intervene(scene, None)
    assert (again.loss, again.next_losses) == (scene.result.loss, scene.baseline.next_losses)


def test_a_model_that_casts_by_itself_is_said_to(tmp_path):
    def half(model, x, y):
        return mse(model, x.astype(mx.float16), y)

    class Halving(type(mlp().layers[0])):
        def __call__(self, x):
            return super().__call__(x.astype(mx.bfloat16)).astype(mx.bfloat16)

    def build():
        model = mlp(dtype=mx.bfloat16)
        model.layers[0].__class__ = Halving
        return experiment(model=model)

    effect = intervene(scene_of(tmp_path, 6, build=build, steps=7), "dtype=float32", 0)
    assert any("1 of 2 layers are still not float32 (first layers.0)" in note for note in effect.notes)


# ---------------------------------------------------------------------------------------------------------------- state


@pytest.mark.parametrize("leaves", ["m", "v", "m,v"])
def test_moments_reset(scene, leaves):
    zeroed = with_moments(scene.state(N - 1), lambda leaf, path, a: a * 0 if leaf in leaves.split(",") else a)
    effect = agrees(scene, f"reset={leaves}", reference(zeroed, adamw()))
    assert effect.compiled is False and "counter stays" in effect.notes[0]


def test_v_raised_to_the_square_of_the_clipped_gradient(scene):
    scale = min(1.0, CLIP / (float(scene.result.grad_norm) + 1e-6))
    square = {path: (np.array(g) * np.float32(scale)) ** 2 for path, g in scene.result.gradients.items()}
    raised = with_moments(scene.state(N - 1), lambda leaf, path, a: np.maximum(a, square[path]) if leaf == "v" else a)
    effect = agrees(scene, "v=max", reference(raised, adamw()))
    assert effect.update_norm < scene.baseline.update_norm


def test_an_earlier_state_takes_the_batch(scene):
    agrees(scene, "state=7", reference(scene.state(7), adamw()))


def test_a_state_that_is_not_earlier_is_refused(scene):
    with pytest.raises(ExperimentError, match="state=11 is not earlier.*at most 10"):
        intervene(scene, "state=11")
    with pytest.raises(ReplayError, match="state 2 is not in this scene, which has states 3 to 12; open it with more"):
        intervene(scene, "state=2")


def test_other_random_numbers_for_this_step_alone(tmp_path):
    scene = scene_of(tmp_path, N, dropout=0.5, opening={"next_steps": 1})
    effect = intervene(scene, "rng=77")
    model = mlp(0.5)
    mx.random.seed(77)
    losses, _, weights = plain_steps(scene.state(N - 1), BATCHES[:1], adamw(), model)
    assert effect.loss == pytest.approx(losses[0], rel=2e-5) and effect.loss != scene.result.loss
    assert effect.updates == pytest.approx(moved(scene.state(N - 1), weights[0]), rel=2e-4)
    high, low = scene.moment(N).key
    same = intervene(scene, f"rng={(high << 32) | low}")
    assert (same.loss, same.next_losses) == (scene.result.loss, scene.baseline.next_losses)


# ---------------------------------------------------------------------------------------------------------------- batch


def test_a_dropped_row_is_a_plain_step_on_the_others(scene):
    first = tuple(mx.array(np.delete(np.array(array), 4, axis=0)) for array in BATCHES[0])
    agrees(scene, "drop-row=4", reference(scene.state(N - 1), adamw(), [first, *BATCHES[1:]]))


def test_a_dropped_row_leaves_the_bits_of_the_runs_own_step_on_the_others(scene):
    alone = experiment(clip=CLIP)
    restore(alone, scene.state(N - 1))
    result = Stepper(alone)(tuple(mx.array(np.delete(np.array(array), 4, axis=0)) for array in BATCHES[0]))
    effect = intervene(scene, "drop-row=4")
    assert (effect.loss, effect.grad_norm, effect.steps) == (result.loss, result.grad_norm, 1 + NEXT)


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("beyond", [True, False])
def test_a_step_that_reads_beyond_a_smaller_batch_is_refused(tmp_path, beyond, compile):
    """Gradients accumulated by hand over a fixed number of micro-batches. MLX raises nothing, and reads on."""

    def build():
        made = experiment(compile=compile)

        def step(x, y):
            count = 12 if beyond else len(x)
            pairs = [nn.value_and_grad(made.model, made.loss_fn)(made.model, x[k], y[k]) for k in range(count)]
            gradients = tree_map(lambda *all: sum(all) / count, *(found for _, found in pairs))
            made.optimizer.update(made.model, gradients)
            return sum(loss for loss, _ in pairs) / count

        return replace(made, step_fn=step)

    made, path = build(), tmp_path / "run"
    with Recorder(path, *parts(made), step_fn=made.step_fn, compile=compile, spikes=None) as recorder:
        for batch in recorder.batches(4):
            recorder.step(batch)
    scene = Scene.open(Run(path), 3, experiment=build(), next_steps=1)
    if not beyond:
        assert intervene(scene, "drop-row=4").loss != scene.result.loss
        return
    for perform in (
        lambda: intervene(scene, "drop-row=4"),
        lambda: Trials(scene).redo(3, "drop-row=11"),
        lambda: Trials(scene).without_row(0),
    ):
        with pytest.raises(ExperimentError, match=r"drop-row can't be tried: two .* differ \(loss .* reads beyond"):
            perform()
    assert intervene(scene, None).loss == scene.result.loss


def test_a_row_that_is_not_there_is_refused(scene):
    with pytest.raises(ExperimentError, match="row 12 can't be dropped: the batch of step 12 has rows 0 to 11"):
        intervene(scene, "drop-row=12")


def test_with_accumulation_the_rest_is_one_micro_batch(tmp_path):
    scene = scene_of(tmp_path, N, accumulate=3, opening={"next_steps": NEXT})
    first = tuple(mx.array(np.delete(np.array(array), 0, axis=0)) for array in BATCHES[0])
    effect = agrees(scene, "drop-row=0", reference(scene.state(N - 1), adamw(), [first, *BATCHES[1:]], clip=None))
    assert effect.notes == ["11 rows can't be cut into 3 micro-batches, so they are one"]
    alone = experiment(accumulate=1)
    restore(alone, scene.state(N - 1))
    Stepper(alone)(first)
    after = experiment(accumulate=3)  # the steps after it are the run's own again
    restore(after, state_of(alone, N))
    stepper = Stepper(after)
    assert effect.next_losses == [stepper(as_batch(batch)).loss for batch in BATCHES[1:]]


def test_dropping_a_row_where_random_numbers_are_drawn_says_so(tmp_path):
    scene = scene_of(tmp_path, 4, dropout=0.2, steps=5, opening={"next_steps": 0})
    assert "other ones for each row" in intervene(scene, "drop-row=1").notes[0]


def test_the_only_row_and_batches_without_rows_are_refused(tmp_path):
    scene = scene_of(tmp_path, 4, rows=1, steps=5)
    with pytest.raises(ExperimentError, match="row 0 can't be dropped.*only one row"):
        intervene(scene, "drop-row=0")
    state, moment = scene.before()
    odd = replace(moment, batch=(mx.zeros((3, 4)), mx.zeros((2, 1))))
    scene._moments[4] = odd
    with pytest.raises(ExperimentError, match=r"leading axes \[2, 3\]"):
        intervene(scene, "drop-row=0")


@pytest.mark.parametrize("other", [9, 14, 2, 16])
def test_the_batch_of_another_step(scene, other):
    """Within the scene, after its step, before its first state, and after its last step."""
    batches = [batch_of(other), *BATCHES[1:]]
    agrees(scene, f"batch={other}", reference(scene.state(N - 1), adamw(), batches))


def test_a_skipped_step_leaves_the_state_to_the_next_batch(scene):
    effect = intervene(scene, "batch=skip")
    losses, _, _ = plain_steps(scene.state(N - 1), BATCHES[1:], adamw(), mlp(), clip=CLIP)
    assert effect.next_losses == pytest.approx(losses, rel=2e-5)
    assert (effect.loss, effect.grad_norm, effect.update_norm, effect.worst, effect.steps) == (None,) * 4 + (NEXT,)


# ------------------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("lr=1x", "the learning rate of step 12 is that already"),
        ("lr=0.01", "is that already"),
        ("clip=0.3", "clips at 0.3 already"),
        ("beta2=0.999", "beta2 is 0.999 already"),
        ("eps=1e-8", "epsilon is 1e-08 already"),
        ("dtype=float32", "every weight is float32 already"),
        ("rng=1", "step 12 draws no random numbers"),
        ("batch=12", "batch 12 is its own"),
        ("compile=off", "not compiled already"),
        ("deterministic=off", "on the CPU the stock operations are used either way"),
    ],
)
def test_what_would_change_nothing_is_refused(scene, change, words):
    with pytest.raises(ExperimentError, match=f"this would change nothing in the run: .*{words}"):
        intervene(scene, change)


def test_no_clipping_is_off_already(tmp_path):
    with pytest.raises(ExperimentError, match="clips nothing already"):
        intervene(scene_of(tmp_path, 3, steps=4), "clip=off")


@pytest.mark.parametrize("change", ["reset=m", "reset=v", "reset=m,v", "v=max", "beta2=0.9", "eps=1e-4"])
def test_an_optimizer_other_than_adam_is_named(tmp_path_factory, change, _sgd=[]):  # noqa: B006 - one scene for all
    if not _sgd:
        build = {"build": lambda: experiment(optimizer=optim.SGD(1e-2, momentum=0.9))}
        _sgd.append(scene_of(tmp_path_factory.mktemp("sgd"), 6, steps=8, **build))
    with pytest.raises(ExperimentError, match="SGD is not Adam, AdamW or Adamax: it has no"):
        intervene(_sgd[0], change)
    assert intervene(_sgd[0], "lr=0.5x", 0).update_norm == pytest.approx(_sgd[0].baseline.update_norm / 2, rel=1e-4)


def test_adamax_has_no_mean_of_squares(tmp_path):
    scene = scene_of(tmp_path, 6, build=lambda: experiment(optimizer=optim.Adamax(1e-2)), steps=7)
    with pytest.raises(ExperimentError, match="Adamax keeps a maximum"):
        intervene(scene, "v=max")
    assert intervene(scene, "reset=m", 0).update_norm < scene.baseline.update_norm


def test_an_optimizer_without_a_learning_rate_is_named(tmp_path):
    scene = scene_of(tmp_path, 6, build=lambda: experiment(optimizer=optim.Adafactor()), steps=7)
    with pytest.raises(ExperimentError, match="Adafactor has no learning rate in its state"):
        intervene(scene, "lr=0.5x")
    assert intervene(scene, "drop-row=1", 0).loss != scene.result.loss


# ------------------------------------------------------------------------------------------------------ several in one


def pair(second):
    def build():
        weights = optim.AdamW(schedule(), bias_correction=True)
        return experiment(optimizer=optim.MultiOptimizer([weights, second()], [lambda path, w: "weight" in path]))

    return build


def test_a_multi_optimizer_takes_what_does_not_ask_for_adam(tmp_path):
    scene = scene_of(tmp_path, N, build=pair(lambda: optim.SGD(1e-2)), opening={"next_steps": 2})
    assert scene.exact
    half = intervene(scene, "lr=0.5x")
    assert half.updates == pytest.approx({k: v / 2 for k, v in scene.baseline.updates.items()}, rel=1e-4)
    clipped = intervene(scene, "clip=0.01")
    biases = [path for path in clipped.updates if path.endswith("bias")]  # plain SGD's: as long as the gradient
    scale = 0.01 / float(scene.result.grad_norm)
    for path in biases:
        assert clipped.updates[path] == pytest.approx(scene.baseline.updates[path] * scale, rel=1e-2)  # few bits move
    assert intervene(scene, "drop-row=3").loss != scene.result.loss != intervene(scene, "batch=3").loss
    with pytest.raises(ExperimentError, match="MultiOptimizer of AdamW and SGD is not Adam"):
        intervene(scene, "reset=m")


def test_a_multi_optimizer_of_adams_takes_the_rest_too(tmp_path):
    scene = scene_of(tmp_path, N, build=pair(lambda: optim.Adam(1e-2)), opening={"next_steps": 2})
    state = scene.state(N - 1)
    leaves = {path for path in state.optimizer if path.endswith(".v")}
    assert len(leaves) == 4 and all(path.startswith("states.") for path in leaves)
    effect = intervene(scene, "v=max")
    for path, update in effect.updates.items():  # raised second moments only ever shorten Adam's steps
        assert update <= scene.baseline.updates[path] * 1.0001
    assert effect.update_norm < scene.baseline.update_norm
    for change in ("reset=m,v", "beta2=0.5", "eps=0.1"):
        assert intervene(scene, change).update_norm != scene.baseline.update_norm
