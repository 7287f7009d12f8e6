"""Recording moves no bit: the same loop without a recorder, with nothing of the package, ends in the same state."""

import json
import logging

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from helpers import Numbered, assert_same_state, edit_json, mse, state_of, tensor_bytes
from mlx.utils import tree_flatten

from workbench import Recorder, open_run, snapshot
from workbench.checkpoints import checkpoint_reader, checkpoint_writer
from workbench.errors import CheckpointError, DataError, ExperimentError
from workbench.experiment import Experiment, StepOptions, as_batch, batch_hash, state_arrays
from workbench.numbered_batch import arguments, numbers_of
from workbench.stored_batches import BatchStore
from workbench.trees import laid_out, layout, settled

STEPS = 6


def batches(columns=8, outputs=4):
    rng = np.random.default_rng(5)
    for _ in range(STEPS):
        x = mx.array(rng.standard_normal((32, columns)).astype(np.float32))
        yield x, mx.sin(x[:, :outputs])


def turned(model):
    """Its matrices as a conversion from another framework may leave them: transposed views of their transposes."""
    for layer in (model.layers[0], model.layers[2]):
        layer.weight = mx.array(np.ascontiguousarray(np.array(layer.weight).T)).T
    return model


def network(outputs=4):
    mx.random.seed(4)
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, outputs))


def without_recorder(model, optimizer, compiled, loss_fn=mse, data=batches):
    def step(*batch):
        loss, gradients = nn.value_and_grad(model, loss_fn)(model, *batch)
        optimizer.update(model, gradients)
        return loss

    optimizer.init(model.trainable_parameters())
    state = [model.state, optimizer.state, mx.random.state]
    perform = mx.compile(step, inputs=state, outputs=state) if compiled else step
    for batch in data():
        mx.eval(perform(*batch), state)
    return tensor_bytes(dict(tree_flatten([model.parameters(), optimizer.state])))


def recorded(path, model, optimizer, compiled, loss_fn=mse, data=batches, **options):
    with Recorder(path, model, optimizer, loss_fn, compile=compiled, save_every=2, **options) as recorder:
        for batch in data():
            recorder.step(batch)
    return tensor_bytes(dict(tree_flatten([model.parameters(), optimizer.state])))


# ------------------------------------------------------------------------------------------- weights that are views

OPTIMIZERS = {"SGD": lambda: optim.SGD(0.05), "AdamW": lambda: optim.AdamW(1e-2), "Muon": lambda: optim.Muon(1e-2)}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_that_are_transposed_views_train_and_replay_as_without_a_recorder(tmp_path, name, compiled):
    make = OPTIMIZERS[name]
    expected = without_recorder(turned(network()), make(), compiled)
    assert recorded(tmp_path / "run", turned(network()), make(), compiled) == expected
    run = open_run(tmp_path / "run")
    for start in (turned, lambda model: model):  # however the model is laid out that a replay is given
        job = Experiment(start(network()), make(), mse, options=StepOptions(compile=compiled))
        for trace in run.replay(range(1, STEPS + 1), experiment=job):
            assert trace.exact and trace.record.certified_probe


def test_the_order_of_a_views_elements_moves_bits():
    """Or the test above could not fail."""
    make = OPTIMIZERS["SGD"]
    assert without_recorder(turned(network()), make(), False) != without_recorder(network(), make(), False)


def test_a_run_of_transposed_views_goes_on_to_the_same_bits(tmp_path):
    expected = without_recorder(turned(network()), optim.SGD(0.05), True)
    model, optimizer, stream = turned(network()), optim.SGD(0.05), list(batches())
    with Recorder(tmp_path / "run", model, optimizer, mse, save_every=0) as recorder:
        for batch in stream[:3]:
            recorder.step(batch)
    model, optimizer = network(), optim.SGD(0.05)
    with Recorder(tmp_path / "run", model, optimizer, mse, resume=True) as recorder:
        for batch in stream[3:]:
            recorder.step(batch)
    assert tensor_bytes(dict(tree_flatten([model.parameters(), optimizer.state]))) == expected


@pytest.mark.parametrize("shape, axes", [((3, 5), (1, 0)), ((2, 3, 4), (2, 0, 1)), ((2, 3, 4, 5), (3, 1, 0, 2))])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.uint64, mx.bool_], ids=str)
def test_an_array_is_laid_out_as_its_layout_says(shape, axes, dtype):
    array = (mx.arange(int(np.prod(shape))) % 7).reshape(shape).astype(dtype)
    view = laid_out(array, axes)
    mx.eval(view)
    expected = np.zeros([shape[axis] for axis in axes], np.int8).transpose(np.argsort(axes)).strides
    assert memoryview(view).strides == tuple(step * array.itemsize for step in expected)
    assert layout(view) == axes and tensor_bytes({"": view}) == tensor_bytes({"": array})
    assert layout(array) is None and memoryview(settled(view)).strides == memoryview(view).strides


@pytest.mark.parametrize(
    "array",
    [
        mx.zeros((4, 6)),
        mx.zeros((4, 6))[:, ::2],
        mx.zeros((4, 6))[:, :3].T,
        mx.broadcast_to(mx.zeros((4, 1)), (4, 6)),
        mx.zeros((6, 1, 4)).T,
        mx.zeros((1, 6)).T,
        mx.zeros((0, 6)).T,
        mx.zeros(6)[::-1],
        mx.array(1.0),
    ],
    ids=["row-major", "gaps", "gaps turned", "broadcast", "axis of 1", "column", "empty", "backwards", "scalar"],
)
def test_what_has_gaps_or_an_axis_of_length_1_becomes_row_major(array):
    mx.eval(array)
    assert layout(array) is None
    found = settled(array)
    mx.eval(found)
    assert array.size == 0 or memoryview(found).strides == np.zeros(array.shape, np.float32).strides


def test_a_checkpoint_says_which_arrays_were_laid_out_in_another_order_and_only_those(tmp_path):
    recorded(tmp_path / "turned", turned(network()), optim.AdamW(1e-2), True)
    recorded(tmp_path / "plain", network(), optim.AdamW(1e-2), True)
    at = {
        name: [json.loads((tmp_path / name / f"checkpoints/{step:08d}.json").read_text()) for step in (0, STEPS)]
        for name in ("turned", "plain")
    }
    order = {"layers.0.weight": [1, 0], "layers.2.weight": [1, 0]}
    assert at["turned"][0]["layouts"] == {"weights": order}
    # After a step of AdamW, whose moments are row-major, no weight is a view any more.
    assert not any("layouts" in commit for commit in (at["turned"][1], *at["plain"]))


def test_a_layout_stands_the_way_through_a_checkpoint(tmp_path):
    job = Experiment(turned(network()), optim.Muon(1e-2), mse)
    job.prepare()
    state = state_of(job)
    checkpoint_writer.write(state, tmp_path / "c", run="r", segment=0, t=0.0)
    found = checkpoint_reader.read(tmp_path / "c", state.step, 0)
    assert_same_state(found, state)
    other = Experiment(network(), optim.Muon(1e-2), mse)
    other.prepare()
    snapshot.restore(other, found)
    for one, two in zip(state_arrays(job.model).values(), state_arrays(other.model).values(), strict=True):
        assert memoryview(one).strides == memoryview(two).strides


@pytest.mark.parametrize(
    "layouts", [{"weights": {"layers.9.weight": [1, 0]}}, {"weights": {"layers.0.weight": [0, 2]}}]
)
def test_a_layout_of_what_is_not_there_is_refused(tmp_path, layouts):
    recorded(tmp_path / "run", turned(network()), optim.SGD(0.1), True)
    folder = tmp_path / "run" / "checkpoints"
    edit_json(folder / "00000000.json", lambda commit: commit.update(layouts=layouts))
    with pytest.raises(CheckpointError, match="layout"):
        checkpoint_reader.read(folder, 0, 0)


# ------------------------------------------------------------------------------------ strides that MLX leaves to chance


def single(outputs=1):
    """Its last weight is (1, 64)."""
    return network(outputs)


def few(columns=8):
    return batches(columns, 1)


def said_of_layouts(caplog):
    return [record.getMessage() for record in caplog.records if "row-major" in record.getMessage()]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("black_box", [0, 8])
@pytest.mark.parametrize("optimizer", [lambda: optim.SGD(0.05), lambda: optim.Adagrad(0.05)], ids=["SGD", "Adagrad"])
def test_a_parameter_whose_strides_mlx_leaves_to_chance_is_named_once(tmp_path, caplog, optimizer, black_box, compiled):
    recorded(tmp_path / "run", single(), optimizer(), compiled, data=few, black_box=black_box)
    (said,) = said_of_layouts(caplog)
    assert "layers.2.weight (1, 64)" in said and "layers.0" not in said and "without a recorder" in said
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_a_parameter_that_starts_with_strides_that_no_checkpoint_has_is_named(tmp_path, caplog):
    model = network()
    model.layers[0].weight = mx.concatenate([model.layers[0].weight, mx.zeros((64, 3))], axis=1)[:, :8]
    recorded(tmp_path / "gaps", model, optim.AdamW(1e-2), True)
    (said,) = said_of_layouts(caplog)
    assert "layers.0.weight (64, 8)" in said


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    "optimizer", [lambda: optim.AdamW(1e-2), lambda: optim.SGD(0.05, momentum=0.9)], ids=["AdamW", "SGD with momentum"]
)
def test_where_no_stride_is_left_to_chance_nothing_is_said_and_no_bit_moves(tmp_path, caplog, optimizer, compiled):
    expected = without_recorder(single(), optimizer(), compiled, data=few)
    assert recorded(tmp_path / "one", single(), optimizer(), compiled, data=few) == expected
    recorded(tmp_path / "two", turned(network()), optim.SGD(0.05), compiled)
    assert not caplog.records


# ----------------------------------------------------------------------------------------------- numbers in a batch


def half(outputs=4):
    model = network(outputs)
    model.set_dtype(mx.bfloat16)
    return model


def scaled(model, x, y, scale, power, flip):
    """Bits depend on the dtype of `scale` beside bfloat16, and on who divides by `power`: Python or MLX."""
    difference = (model(x.astype(mx.bfloat16)) * scale - y).astype(mx.float32)
    return mx.mean(mx.abs(difference) ** (1.7 + 0.1 / power)) * (-1 if flip else 1)


def numbered():
    for number, (x, y) in enumerate(batches()):
        kind = (float, np.float32, np.float64)[number % 3]
        yield x, y, kind(0.3 + 0.1 * number), 3 + number % 2, bool(number % 2)


def same_number():
    """A compiled step is compiled anew for each other one, and can't take numpy's."""
    return ((x, y, 0.3, 3, False) for x, y in batches())


NUMBERS = [0.1, -0.0, float("inf"), float("nan"), 7, -(2**62), True, False, np.float32(0.1), np.float64(0.1)]
NUMBERS += [np.float16(0.1), np.int8(-3), np.uint64(2**63), np.bool_(True)]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_numbers_in_a_batch_train_and_replay_as_without_a_recorder(tmp_path, compiled):
    data = same_number if compiled else numbered
    expected = without_recorder(half(), optim.AdamW(1e-2), compiled, scaled, data)
    assert recorded(tmp_path / "run", half(), optim.AdamW(1e-2), compiled, scaled, data) == expected
    job = Experiment(half(), optim.AdamW(1e-2), scaled, options=StepOptions(compile=compiled))
    for trace in open_run(tmp_path / "run").replay(range(1, STEPS + 1), experiment=job):
        assert trace.exact and trace.record.certified_probe


def test_an_array_in_place_of_a_number_moves_bits():
    """Or the test above could not fail."""

    def of_arrays():
        return ((x, y, mx.array(scale, mx.float32), power, flip) for x, y, scale, power, flip in numbered())

    one, two = (without_recorder(half(), optim.AdamW(1e-2), False, scaled, data) for data in (numbered, of_arrays))
    assert one != two


def test_a_step_of_ones_own_gets_the_numbers_as_they_are(tmp_path):
    model, optimizer = half(), optim.SGD(0.05)
    expected = [[type(part) for part in batch[2:]] for batch in numbered()]

    def step(*batch):
        assert [type(part) for part in batch[2:]] in expected
        loss, gradients = nn.value_and_grad(model, scaled)(model, *batch)
        optimizer.update(model, gradients)
        return loss

    with Recorder(tmp_path / "run", model, optimizer, scaled, step_fn=step) as recorder:
        for batch in numbered():
            recorder.step(batch)
    assert open_run(tmp_path / "run").telemetry.last_step() == STEPS


def test_a_compiled_step_takes_a_number_of_numpy_as_an_array_and_says_when_a_number_changes(tmp_path):
    def changing():
        return ((x, y, np.float32(0.3), 3, bool(number == 4)) for number, (x, y) in enumerate(batches()))

    with pytest.warns(UserWarning, match="argument 4 of the step is a number that changes") as told:
        recorded(tmp_path / "run", half(), optim.AdamW(1e-2), True, scaled, changing)
    assert len(told) == 1


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: f"{type(number).__name__} {number}")
def test_a_number_is_stored_to_the_last_bit_and_with_its_type(tmp_path, number):
    batch = as_batch((mx.ones((2, 3)), number))
    store = BatchStore(tmp_path)
    store.put(batch_hash(batch), batch)
    found = store.get(batch_hash(batch))
    (one,) = numbers_of(found).values()
    assert type(one) is type(number) and np.array(one).tobytes() == np.array(number).tobytes()
    assert arguments(found)[1] is one and [array.shape for array in found] == [(2, 3), ()]


def test_the_hash_of_a_batch_sees_type_and_every_bit_of_a_number():
    batches = [(0.1,), (np.nextafter(0.1, 1).item(),), (np.float64(0.1),), (np.float32(0.1),), (mx.array(0.1),)]
    batches += [(1,), (1.0,), (True,), (np.bool_(True),), (0.0,), (-0.0,), (1, 2), (2, 1)]
    assert len({batch_hash(as_batch(batch)) for batch in batches}) == len(batches)


@pytest.mark.parametrize(
    "numbers",
    ['{"1": ["complex", "1j"]}', '{"1": ["numpy.object", "00"]}', '{"1": ["bool", "1"]}', '{"x": ["int", "1"]}', "[]"],
)
def test_what_no_batch_has_is_refused_by_name(tmp_path, numbers):
    batch = as_batch((mx.ones(3), 1.5))
    store = BatchStore(tmp_path)
    store.put("0" * 64, batch)
    mx.save_safetensors(str(tmp_path / f"batches/{'0' * 64}.safetensors"), {"0": mx.ones(3)}, {"numbers": numbers})
    with pytest.raises(DataError, match="can't be read"):
        store.get("0" * 64)


class WithNumber(Numbered):
    """Batches that have a number in them."""

    def batch(self, number):
        x = mx.array(np.random.default_rng(number).standard_normal((8, 8)).astype(np.float32))
        return x, mx.sin(x[:, :4]), 0.3 * number, 3, False


class Arrays(WithNumber):
    def batch(self, number):
        return tuple(mx.array(np.asarray(part)) for part in super().batch(number))


def job_of(sampler):
    return Experiment(half(), optim.AdamW(1e-2), scaled, sampler, StepOptions(compile=False))


@pytest.mark.parametrize("sampler, as_it_was", [(WithNumber, False), (Arrays, True)], ids=["now", "before"])
def test_a_run_recorded_before_numbers_were_kept_replays_as_it_was_recorded(tmp_path, sampler, as_it_was):
    """Then a recorder made arrays of them, and said nothing of numbers in the manifest."""
    job = job_of(sampler())
    parts = job.model, job.optimizer, job.loss_fn, job.sampler
    with Recorder(tmp_path / "run", *parts, compile=False) as recorder:
        for batch in recorder.batches(STEPS):
            recorder.step(batch)
    if as_it_was:
        edit_json(tmp_path / "run" / "run.json", lambda manifest: manifest.pop("numbers"))
    for trace in open_run(tmp_path / "run").replay(range(1, STEPS + 1), experiment=job_of(WithNumber())):
        assert trace.exact


def test_a_batch_with_a_number_can_not_be_cut_into_micro_batches(tmp_path):
    with (
        pytest.raises(ExperimentError, match="micro-batches"),
        Recorder(tmp_path / "run", half(), optim.SGD(0.1), scaled, accumulate=2) as recorder,
    ):
        recorder.step(next(numbered()))
