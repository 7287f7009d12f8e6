"""The doctor: is replay bit-exact on this very machine, and if not, which operation or which gradient varies?

Nothing is looked up in a list of known hardware: each operation of a training step is repeated and its bits counted,
then whole steps are, here and in fresh processes; and the counting is shown changes of one bit, which it must see.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx

from . import cuda
from .enumeration import listed
from .environment import differences, no_gpu, numeric_environment, on_device
from .errors import ReplayError
from .examination.catalogue import BY_DEFAULT, CATALOGUE, FLOATS
from .examination.conclusion import conclude, conclude_run
from .examination.diagnosis import OperationRow, Report, StepRow
from .examination.operations import REPEATS, Operation, disturbance
from .examination.repeats import (
    STEPS,
    Digests,
    Job,
    Setting,
    Subject,
    Tally,
    fresh_experiments,
    in_fresh_processes,
    one_process_each,
    repeat,
    run_experiment,
    small_transformer,
    tally,
)
from .examination.selftest import self_test
from .examination.shards import SETTINGS, count, examine_shards, process_count, shards
from .examination.speed import advice, matmul_gflops
from .experiment import Experiment, random_key, set_random_key
from .replay import Progress
from .replaying.as_found import left_as_found
from .replaying.preparation import refuse_another
from .run import Run


@dataclass(frozen=True)
class _Effort:
    """How often, in each setting: `steps` in a row, `repeats` times here and once in each of `processes` fresh ones. No
    further repetition is begun after `seconds`, all settings together: a step of a big run takes many."""

    steps: int
    repeats: int
    processes: int
    seconds: float


_MACHINE, _RUN = _Effort(STEPS, 3, 2, 60.0), _Effort(1, REPEATS, 1, 30.0)


def examine(
    progress: Progress = lambda done, total, what: None,
    *,
    device: str | None = None,
    operations: Sequence[Operation] | None = None,
    build: Callable[[Setting], Experiment] | None = None,
) -> Report:
    """Examines this machine: about 20 s on two CPU cores, and 60 s the first time, when MLX compiles its kernels; on an
    H200 with 16 cores 51 s, and 151 s the first time.

    Args:
        progress: called as `progress(done, total, what)`; an exception that it raises stops the examination.
        device: "cpu" or "gpu"; None: MLX's default one.
        operations: instead of the catalogue, such as `[*CATALOGUE, Operation("my kernel", "float32", make)]`.
        build: instead of the small transformer, an experiment for each setting; fresh processes can't have it.

    Raises:
        ReplayError: there is no such device.
    """
    began = time.monotonic()
    rows = CATALOGUE if operations is None else operations
    settings = SETTINGS
    total = len(rows) + 4 * len(settings)
    with _on(device), _same_random_state():
        environment = numeric_environment()
        disturb = disturbance()
        counted: list[OperationRow] = []
        already: list[list[Digests]] = []
        if cuda.available() and operations is None and build is None:
            given = shards(_device(), STEPS, process_count())
            counted, digests = examine_shards(given, lambda what: progress(0, total, what))
            already = [digests]
        else:
            for number, operation in enumerate(rows):
                progress(number, total, f"{operation.name}, {operation.dtype}")
                counted.append(count(operation, disturb))
        progress(len(rows), total, "matrix product")
        gflops = matmul_gflops()
        subject = fresh_experiments(build or small_transformer)
        job = None if build else Job(device=_device(), settings=settings, steps=STEPS)
        examined = _examine_steps(
            *(subject, settings, _MACHINE, job, disturb),
            lambda done, what: progress(len(rows) + done, total, what),
            already,
        )
        test = self_test(*subject(settings[0]))
    progress(total, total, "done")
    elsewhere = {operation.name for operation in rows if operation.elsewhere}
    return Report(
        run=None,
        environment=environment,
        gflops=gflops,
        operations=counted,
        step=examined.rows,
        self_test=test,
        notes=[*examined.notes, *_eager_against_compiled(settings, examined), *advice(environment, gflops)],
        sentence=conclude(
            counted, examined.rows, test, elsewhere=elsewhere, fresh=all(row.processes for row in examined.rows)
        ),
        seconds=round(time.monotonic() - began, 1),
    )


def examine_run(
    run: Run,
    *,
    experiment: Experiment | None = None,
    factory: str | None = None,
    progress: Progress = lambda done, total, what: None,
) -> Report:
    """Examines this machine with a run's own model, optimizer and batch: its first step from its earliest checkpoint.

    In the run's own setting; on a GPU also with stock operations if it has deterministic ones, and the other way round.

    Args:
        experiment: for a run of your own loop: the experiment, built as for recording. At the end it has the state
            again that it had.
        factory: instead of it, the "module:function" that the manifest names: passing it is consent to import it.
        progress: as for `examine`.

    Raises:
        ReplayError, CheckpointError, DataError, ExperimentError: the step can't be rebuilt here.
    """
    began = time.monotonic()
    recorded = run.manifest.segments[0].environment
    progress(0, 1, "rebuilding the run's experiment")
    with on_device(recorded.get("backend", "cpu")), _same_random_state(), left_as_found(experiment):
        built, subject = run_experiment(run, experiment, factory)
        environment = numeric_environment()  # of which a script may have set some
        refuse_another(run, built)
        dtype = _dtypes(run)
        own = Setting(dtype, built.options.compile, built.options.deterministic)
        settings = [own]
        if _device() == "gpu":  # on the CPU nothing is replaced, so that the other setting is the same computation
            settings.append(Setting(dtype, own.compile, not own.deterministic))
        total = 3 * len(settings)
        gflops = matmul_gflops()
        job = None
        if experiment is None:
            job = Job(device=_device(), settings=settings, steps=1, run=str(run.path), factory=factory)
        examined = _examine_steps(
            subject, settings, _RUN, job, disturbance(), lambda done, what: progress(done, total, what)
        )
        test = self_test(*subject(own))
    progress(total, total, "done")
    gradients = _gradients(run, settings, examined)
    varying = sum(row.distinct > 1 for row in gradients[: len(gradients) // len(settings)])
    unlike = [f"This machine differs from the run's: {phrase}." for phrase in differences(recorded, environment)]
    return Report(
        run=run.name,
        environment=environment,
        gflops=gflops,
        operations=gradients,
        step=examined.rows,
        self_test=test,
        notes=[*examined.notes, *unlike, *advice(environment, gflops)],
        sentence=conclude_run(run.name, examined.rows, varying, test),
        seconds=round(time.monotonic() - began, 1),
    )


# ---- whole steps


@dataclass(frozen=True)
class _Examined:
    rows: list[StepRow]
    tallies: list[Tally]
    samples: list[Digests]  # one repetition of each setting
    notes: list[str]


def _examine_steps(
    subject: Subject,
    settings: Sequence[Setting],
    effort: _Effort,
    job: Job | None,
    disturb: Callable[[int], None],
    say: Callable[[int, str], None],
    already: Sequence[list[Digests]] = (),
) -> _Examined:
    """Each setting here, then all of them in fresh processes: by then the kernels are compiled, and two processes don't
    write the same one at once.

    Args:
        already: what fresh processes have found before: digests of each setting. Then kernels are compiled, so that
            more fresh processes can work at the same time as this one.
    """
    here: list[list[Digests]] = []
    owners: list[dict[str, str]] = []
    notes: list[str] = []
    fresh = list(already)
    with contextlib.ExitStack() as stack:
        beside = stack.enter_context(one_process_each(job)) if job is not None and already else None
        for number, setting in enumerate(settings):
            how = "compiled (slow the first time)" if setting.compile else "eager"
            which = "deterministic" if setting.deterministic else "stock"
            say(3 * number, f"{setting.dtype}, {which} operations, {how}")
            stepper, start = subject(setting)
            here.append(repeat(stepper, start, effort.steps, effort.repeats, effort.seconds / len(settings), disturb))
            owners.append({path: layer for layer, paths in stepper.owned.items() for path in paths})
        if job is not None and effort.processes > len(fresh):
            say(3 * len(settings), "the same in fresh processes")
            try:
                fresh += [beside()] if beside else in_fresh_processes(job, effort.processes - len(fresh))
            except ReplayError as error:
                notes.append(f"Fresh processes could not be tried: {error}.")
    tallies = [tally(found + [one[number] for one in fresh]) for number, found in enumerate(here)]
    rows = [
        StepRow(
            *(setting.dtype, setting.compile, setting.deterministic, effort.steps, len(found), len(fresh)),
            *(one.distinct, one.first, _module(one.first, owned)),
        )
        for setting, found, one, owned in zip(settings, here, tallies, owners, strict=True)
    ]
    return _Examined(rows, tallies, [found[0] for found in here], notes)


def _module(first: str | None, owners: dict[str, str]) -> str | None:
    parameter = (first or "").partition("gradient of ")[2].partition(" (step ")[0]
    return owners.get(parameter)


def _dtypes(run: Run) -> str:
    return "+".join(sorted({parameter.dtype.removeprefix("mlx.core.") for parameter in run.manifest.parameters}))


def _gradients(run: Run, settings: Sequence[Setting], examined: _Examined) -> list[OperationRow]:
    """A row for each gradient in each setting, in order of execution, the run's own setting first."""
    dtypes = {parameter.path: parameter.dtype.removeprefix("mlx.core.") for parameter in run.manifest.parameters}
    found = []
    for setting, row, one in zip(settings, examined.rows, examined.tallies, strict=True):
        other = "" if setting == settings[0] else f", with {row.operations} operations"
        remedy = BY_DEFAULT
        if setting.deterministic:
            remedy = "workbench doctor, without a run, says which operations vary on this machine"
        for name, distinct in one.counts.items():
            if path := name.partition("gradient of ")[2]:
                told, repeats = remedy if distinct > 1 else None, row.repeats + row.processes
                found.append(OperationRow(path + other, dtypes[path], repeats, distinct, told))
    return found


def _eager_against_compiled(settings: Sequence[Setting], examined: _Examined) -> list[str]:
    found = dict(zip(settings, zip(examined.rows, examined.samples, strict=True), strict=True))
    same: list[str] = []
    other: list[str] = []
    for dtype in FLOATS:
        (eager, ours), (compiled, theirs) = (found[Setting(dtype, one, True)] for one in (False, True))
        if eager.distinct == compiled.distinct == 1:
            (same if ours == theirs else other).append(dtype)
    notes = [f"Eager and compiled steps have the same bits here in {listed(same)}."] if same else []
    if other:
        notes.append(
            f"Eager and compiled steps differ in bits here in {listed(other)}; a replay uses the run's setting."
        )
    return notes


def _device() -> str:
    return "cpu" if mx.default_device().type == mx.DeviceType.cpu else "gpu"


@contextlib.contextmanager
def _on(device: str | None) -> Iterator[None]:
    if device not in (None, "", "cpu", "gpu"):
        raise ReplayError(f"the device is {device!r}; expected cpu or gpu")
    before = mx.default_device()
    chosen = before if not device else mx.Device(mx.DeviceType.cpu if device == "cpu" else mx.DeviceType.gpu)
    if not mx.is_available(chosen):
        raise ReplayError(f"{no_gpu()}; expected --device cpu")
    mx.set_default_device(chosen)
    try:
        yield
    finally:
        mx.set_default_device(before)


@contextlib.contextmanager
def _same_random_state() -> Iterator[None]:
    """Leaves MLX's random state as it was: an examination in a notebook must not move what comes after it."""
    key = random_key()
    try:
        yield
    finally:
        set_random_key(key)
