"""Arrays of numpy in a batch: a step of one's own gets them as such, in the run and in its replays."""

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from helpers import Numbered

from workbench import Experiment, Recorder, open_run
from workbench.errors import DataError
from workbench.experiment import as_batch, batch_hash
from workbench.numbered_batch import arguments, lent
from workbench.snapshot import capture
from workbench.stored_batches import BatchStore

STEPS = 3


def mean_of_columns(x):
    return (x - x.mean(0)) / (x.std(0) + 1e-6)


def in_place(x):
    x *= np.float32(1.01)
    return x


def by_a_scalar(x, scale):
    return (mx.array(x).astype(mx.float16) * scale).astype(mx.float32)


POOL = np.random.default_rng(7).normal(size=(64, 8))
CASES = {
    "float64": (lambda rows: (POOL[rows],), mean_of_columns),
    "complex128": (lambda rows: (POOL[rows] * (1 + 1e-9j),), lambda x: (x * x).real + x.imag * 1e6),
    "big-endian": (lambda rows: (POOL[rows].astype(">f4"),), lambda x: x.mean(0) + np.frombuffer(x.tobytes(), "u1")[0]),
    "uint8": (
        lambda rows: ((np.abs(POOL[rows]) * 80).astype(np.uint8),),
        lambda x: (x / 255.0 - 0.485) / 0.229,
    ),
    "no axes": (lambda rows: (POOL[rows].astype(np.float32), np.array(0.1, np.float32)), by_a_scalar),
    "columns first": (lambda rows: (np.asfortranarray(POOL[rows].astype(np.float32)),), lambda x: x * x.mean()),
    "backwards": (lambda rows: (POOL[rows].astype(np.float32)[::-1, ::-1],), lambda x: x * x.mean()),
}


def batches(case):
    generator = np.random.default_rng(3)
    for _ in range(STEPS):
        yield CASES[case][0](generator.permutation(64)[:16])


def job(how, sampler=None):
    mx.random.seed(0)
    model, optimizer = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)), optim.AdamW(1e-2)

    def loss_fn(model, x):
        return mx.mean(mx.square(model(x) - 0.3))

    def step(*batch):
        loss, gradients = nn.value_and_grad(model, loss_fn)(model, mx.array(how(*batch)).astype(mx.float32))
        optimizer.update(model, gradients)
        return loss

    return Experiment(model, optimizer, loss_fn, sampler, step_fn=step)


def begun(path, job, sampler=None, **options):
    return Recorder(path, job.model, job.optimizer, job.loss_fn, sampler, step_fn=job.step_fn, **options)


def left(job):
    state = capture(job, 0, {})
    return [np.asarray(array).tobytes() for array in (*state.weights.values(), *state.optimizer.values())]


def bare(case, data):
    alone = job(CASES[case][1])
    for batch in data:
        mx.eval(alone.step_fn(*batch), alone.model.parameters(), alone.optimizer.state)
    return left(alone)


@pytest.mark.parametrize("case", CASES)
def test_numpy_in_the_step_has_the_bits_that_it_has_without_a_recorder(tmp_path, case):
    watched = job(CASES[case][1])
    with begun(tmp_path / "run", watched, save_every=1) as recorder:
        for batch in batches(case):
            recorder.step(batch)
    assert left(watched) == bare(case, batches(case))
    run = open_run(tmp_path / "run")
    assert all(trace.exact for trace in run.replay(range(1, STEPS + 1), experiment=job(CASES[case][1])))


def test_an_array_of_mlx_in_the_place_of_one_of_numpy_moves_bits():
    """Or the test above could not fail."""
    for case in ("float64", "uint8", "no axes"):
        as_mlx = ([mx.array(part) if part.ndim else mx.array(part)[None] for part in batch] for batch in batches(case))
        assert bare(case, as_mlx) != bare(case, batches(case)), case


def test_a_step_changes_the_arrays_of_the_loop_as_it_does_without_a_recorder(tmp_path):
    pools, results = [POOL[:16].astype(np.float32) for _ in range(2)], []
    for watch, pool in zip((False, True), pools, strict=True):
        one = job(in_place)
        if watch:
            with begun(tmp_path / "run", one, save_every=1) as recorder:
                for _ in range(STEPS):
                    recorder.step(pool)
        else:
            for _ in range(STEPS):
                mx.eval(one.step_fn(pool), one.model.parameters(), one.optimizer.state)
        results.append(left(one))
    assert results[0] == results[1] and pools[0].tobytes() == pools[1].tobytes()
    assert open_run(tmp_path / "run").replay(STEPS, experiment=job(in_place)).exact


class Cursored(Numbered):
    def batch(self, number):
        return CASES["uint8"][0](np.random.default_rng(number).permutation(64)[:16])


def test_a_sampler_that_gives_arrays_of_numpy(tmp_path):
    how = CASES["uint8"][1]
    with begun(tmp_path / "run", watched := job(how), Cursored(), save_every=1) as recorder:
        for batch in recorder.batches(STEPS):
            recorder.step(batch)
    assert left(watched) == bare("uint8", [Cursored().batch(number) for number in range(1, STEPS + 1)])
    run = open_run(tmp_path / "run")
    assert all(trace.exact for trace in run.replay(range(1, STEPS + 1), experiment=job(how, Cursored())))
    with begun(tmp_path / "run", job(how), Cursored(), resume=True) as recorder:
        for batch in recorder.batches(STEPS + 1):
            recorder.step(batch)
    assert open_run(tmp_path / "run").replay(STEPS + 1, experiment=job(how, Cursored())).exact


def test_a_run_recorded_before_arrays_of_numpy_were_kept_goes_on_and_replays_as_it_was_recorded(tmp_path):
    how, data = CASES["uint8"][1], [Cursored().batch(number) for number in range(1, STEPS + 2)]
    with begun(tmp_path / "run", job(how), Cursored(), save_every=1) as recorder:
        recorder.experiment.numpy = False
        for batch in recorder.batches(STEPS):
            recorder.step(batch)
    run = open_run(tmp_path / "run")
    assert not run.manifest.numpy and run.replay(2, experiment=job(how, Cursored())).exact
    with begun(tmp_path / "run", resumed := job(how), Cursored(), resume=True) as recorder:
        for batch in recorder.batches(STEPS + 1):
            recorder.step(batch)
    as_mlx = [[mx.array(part) for part in batch] for batch in data]
    assert left(resumed) == bare("uint8", as_mlx) != bare("uint8", data)
    assert open_run(tmp_path / "run").replay(STEPS + 1, experiment=job(how, Cursored())).exact


def test_a_step_that_takes_no_numpy_gets_arrays_of_mlx_and_leaves_no_trace_of_the_attempt(tmp_path):
    calls, seen = [], []

    def how(x):
        calls.append(type(x))
        x[0, 0] += 1
        mx.random.uniform()
        seen.append(len(calls))
        mx.mean(x)  # which takes none
        return x

    pool = POOL[:16].astype(np.float32)
    with pytest.warns(UserWarning, match="calls is a list of 2 items"):
        with begun(tmp_path / "run", job(how), self_check=False) as recorder:
            for _ in range(2):
                recorder.step(pool)
    assert calls == [mx.array, mx.array] and seen == [1, 2]
    assert pool.tobytes() == POOL[:16].astype(np.float32).tobytes()
    run = open_run(tmp_path / "run")
    assert not run.manifest.numpy
    calls.clear()
    assert run.replay(2, experiment=job(how)).exact and set(calls) == {mx.array}


def layouts():
    whole = POOL.astype(np.float32)
    yield from (whole, whole[3:7], whole[:, ::3], whole[::-2], whole.T, np.broadcast_to(whole[0], (4, 8)), whole[:0])
    yield from (POOL[:, 2], POOL[::-1].T, POOL.astype(">f8"), POOL.astype(">i4")[:, 1:], np.array(0.1), whole > 0)
    yield from (POOL.astype(np.float16), (POOL * 1j)[:, :2], POOL.astype(np.int64), np.zeros((0, 3)))


@pytest.mark.parametrize("array", list(layouts()), ids=lambda array: f"{array.dtype.str}{array.shape}{array.strides}")
def test_an_array_is_stored_with_its_dtype_values_and_strides(tmp_path, array):
    batch = as_batch((mx.ones((2, 3)), array, 0.5), numpy=True)
    store = BatchStore(tmp_path)
    store.put(batch_hash(batch), batch)
    for made in (store.get(batch_hash(batch)), batch):
        found = arguments(made)[1].array
        assert type(found) is np.ndarray and found.dtype == array.dtype and found.tobytes() == array.tobytes()
        assert found.strides == array.strides or not array.size
        assert not np.shares_memory(found, array)
        assert arguments(made, compiled=True)[1] is made[1] and arguments(made)[2] == 0.5
    assert arguments(lent(batch, (0, array, 0)))[1].array is array


def test_the_hash_of_a_batch_is_that_of_its_content(tmp_path):
    x = POOL[:4].astype(np.float32)
    assert batch_hash(as_batch((x,), numpy=True)) == batch_hash(as_batch((mx.array(x),)))
    one, other = POOL[:4], POOL[:4] * (1 + 1e-12)  # one float32
    assert batch_hash(as_batch((one,))) == batch_hash(as_batch((other,)))
    assert batch_hash(as_batch((one,), numpy=True)) != batch_hash(as_batch((other,), numpy=True))


def test_one_content_in_two_forms_is_told(tmp_path):
    x = POOL[:16].astype(np.float32)
    with begun(tmp_path / "run", job(lambda x: x)) as recorder:
        recorder.step(x)
        with pytest.warns(UserWarning, match="step 2 can't be replayed: an earlier batch of the same content"):
            recorder.step(mx.array(x))


def test_an_array_of_a_derived_class_is_refused_by_name(tmp_path):
    with (
        begun(tmp_path / "run", job(lambda x: x)) as recorder,
        pytest.raises(Exception, match="holds a numpy.ma.MaskedArray"),
    ):
        recorder.step(np.ma.masked_array(POOL[:16], POOL[:16] > 0))


def test_a_stored_array_of_other_strides_than_axes_is_refused(tmp_path):
    batch = as_batch((POOL[:, 2],), numpy=True)
    batch.numpy[0] = batch.numpy[0]._replace(strides=(8, 8))
    store = BatchStore(tmp_path)
    store.put(batch_hash(batch), batch)
    with pytest.raises(DataError, match="strides"):
        store.get(batch_hash(batch))


def test_a_dropped_row_leaves_numpy_what_it_is(tmp_path):
    how, kinds = CASES["float64"][1], []
    with begun(tmp_path / "run", job(how)) as recorder:
        for batch in batches("float64"):
            recorder.step(batch)

    def noting(x):
        kinds.append((type(x), str(x.dtype), x.shape))
        return how(x)

    open_run(tmp_path / "run").whatif(2, "drop-row=1", experiment=job(noting))
    assert {kind for kind, *_ in kinds} == {np.ndarray} and {dtype for _, dtype, _ in kinds} == {"float64"}
    assert (np.ndarray, "float64", (15, 8)) in kinds
