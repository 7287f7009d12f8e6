"""Ways of performing steps, and the search for the first step at which two of them part."""

import math
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import helpers
import mlx.core as mx
import mlx.nn as nn
import msgspec
import pytest

from workbench.divergence.tensors import differing
from workbench.divergence.ways import Way, first_departing_step
from workbench.errors import ReplayError

LAYERS = ["layers.0", "layers.3"]

# ------------------------------------------------------------------------------------------------------- the search


@dataclass
class Fake:
    """A state that is nothing but its history: whether a departure lies on the way to it."""

    step: int
    departed: bool = False

    def lanes(self):
        return {"weights": f"{self.step}{self.departed}"}


class Counted:
    """A way that departs at a step, and counts what it computes."""

    def __init__(self, departs=math.inf):
        self.departs, self.steps, self.rolls = departs, 0, 0

    def roll(self, start, step):
        assert step > start.step
        self.steps, self.rolls = self.steps + step - start.step, self.rolls + 1
        return Fake(step, start.departed or start.step < self.departs <= step)


@pytest.mark.parametrize("start", [0, 7])
@pytest.mark.parametrize("distance", [*range(1, 40), 63, 64, 65, 1000])
def test_the_first_departing_step_is_found_without_computing_all(start, distance):
    ways = Counted(), Counted(start + distance)
    found = first_departing_step(*ways, Fake(start), start + 1024)
    assert (found.step, found.before.step, found.before.departed) == (start + distance, start + distance - 1, False)
    assert found.computed == ways[0].steps + ways[1].steps
    assert found.computed < 6 * distance
    assert ways[0].rolls == ways[1].rolls <= 2 * math.log2(distance) + 2  # comparisons


@pytest.mark.parametrize("stop", [1, 2, 3, 4, 100])
def test_without_a_departure_each_way_is_rolled_once(stop):
    ways = Counted(), Counted(stop + 1)
    found = first_departing_step(*ways, Fake(0), stop)
    assert (found.step, found.before.step, found.computed) == (None, stop, 2 * stop)
    assert ways[0].rolls <= math.log2(stop) + 2


def test_progress_may_stop_the_search_and_a_stop_before_the_start_is_refused():
    told = []
    first_departing_step(Counted(), Counted(6), Fake(0), 20, told.append)
    assert told == [1, 3, 7, 5, 6]

    def stop(step):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        first_departing_step(Counted(), Counted(), Fake(0), 20, stop)
    with pytest.raises(ReplayError, match="step 4 can't be reached from state 4"):
        first_departing_step(Counted(), Counted(), Fake(4), 4)


# ------------------------------------------------------------------------------------------------------------ a way


class Contracted(nn.Linear):
    """A layer whose output is one ULP larger in a compiled step, once the batch is large enough: what a compiler that
    contracts a multiplication and an addition into one operation does now and then."""

    def __call__(self, x):
        y = super().__call__(x)
        try:
            mx.eval(y)
        except ValueError:  # not while a step is traced for compiling
            one_more = (y.view(mx.uint32) + 1).view(mx.float32)
            return y + mx.stop_gradient(mx.where(mx.max(mx.abs(x)) > 2.3, one_more - y, mx.zeros_like(y)))
        return y


def contracted(**options):
    mx.random.seed(3)
    model = nn.Sequential(Contracted(4, 8), nn.Dropout(0.1), nn.Tanh(), nn.Linear(8, 1))
    return helpers.experiment(model=model, **options)


def ways(job):
    """The job's own setting of compile, and the other."""
    flipped = replace(job, options=msgspec.structs.replace(job.options, compile=not job.options.compile))
    return [Way(one, LAYERS, backend="cpu") for one in (job, flipped)]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_way_rolls_and_performs_as_the_stepper_does(compiled):
    job = helpers.experiment(dropout=0.2, compile=compiled, clip=0.5)
    states, _, _ = helpers.remembered(job, 4)
    way = Way(job, LAYERS, backend="cpu")
    helpers.assert_same_state(way.roll(states[0], 4), states[4])
    tensors = way.perform(states[2])
    assert helpers.tensor_bytes({path: a for (kind, path), a in tensors.items() if kind == "weight"}) == (
        helpers.tensor_bytes(states[3].weights)
    )
    helpers.assert_same_state(way.roll(states[1], 2), states[2])  # each roll starts where it is told


def test_a_departure_on_the_way_is_found_and_its_first_tensor_named():
    """Against the slow way: both rolled side by side, every state compared."""
    job = contracted()
    eager, compiled = ways(job)
    start = helpers.state_of(job)
    left = right = start
    for expected in range(1, 25):
        left, right = eager.roll(left, expected), compiled.roll(right, expected)
        if left.lanes() != right.lanes():
            break
    assert 2 < expected < 24, "the planted difference must come on the way"
    found = first_departing_step(eager, compiled, start, 24)
    assert found.step == expected and found.before.step == expected - 1
    first, _ = differing(eager.perform(found.before), compiled.perform(found.before))
    assert (first.name, first.dtype, first.max_ulp) == ("activation of layers.0", "float32", 1)
    assert first.differing == first.size == 12 * 8


def test_two_ways_share_a_model_without_disturbing_each_other():
    job = contracted()
    eager, compiled = ways(job)
    start = helpers.state_of(job)
    alone = Way(contracted(), LAYERS, backend="cpu").roll(start, 6)
    eager.roll(start, 3), compiled.roll(start, 5), eager.perform(start)
    helpers.assert_same_state(eager.roll(start, 6), alone)


def test_what_the_loop_changed_between_steps_is_changed_again():
    from workbench.lines.line import Edits

    job = helpers.experiment(dropout=0.5)
    way = Way(job, LAYERS, backend="cpu")
    start = helpers.state_of(job)
    plain = way.roll(start, 3)
    edited = Way(job, LAYERS, backend="cpu", edits=lambda step: Edits(rng=(1, 2)) if step == 2 else None)
    found = edited.roll(start, 3)
    assert found.rng != plain.rng and found.lanes()["weights"] != plain.lanes()["weights"]
    helpers.assert_same_state(edited.roll(start, 1), way.roll(start, 1))


def test_a_sampler_that_runs_dry_is_named():
    job = helpers.experiment()
    job.sampler = Short()
    way = Way(job, LAYERS, backend="cpu")
    with pytest.raises(ReplayError, match="ran out before step 3"):
        way.roll(helpers.state_of(job), 5)


class Short(helpers.Points):
    """Two batches."""

    def __next__(self):
        if self.number == 2:
            raise StopIteration
        return super().__next__()


# ------------------------------------------------------------------------------------- a compiler that moves real bits

FUSED = """
import helpers, msgspec
from dataclasses import replace
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from workbench.divergence.tensors import differing
from workbench.divergence.ways import Way, first_departing_step

mx.set_default_device(mx.cpu)
job = helpers.experiment(model=nn.Linear(4, 1), optimizer=optim.SGD(1e-2, momentum=0.9))  # few kernels to compile
other = replace(job, options=msgspec.structs.replace(job.options, compile=True))
eager, compiled = (Way(one, [""], backend="cpu") for one in (job, other))
start = helpers.state_of(job)
found = first_departing_step(eager, compiled, start, 8)
first, count = differing(eager.perform(found.before), compiled.perform(found.before))
print(found.step, first.kind, first.max_ulp, differing(eager.perform(start), eager.perform(start))[1])
"""


@pytest.mark.skipif(
    shutil.which("g++") is None or " fma " not in Path("/proc/cpuinfo").read_text()
    if Path("/proc/cpuinfo").exists()
    else True,
    reason="needs g++ and a processor with fused multiply-add",
)
def test_compiled_against_eager_where_the_compiler_contracts(tmp_path):
    """MLX's own kernels, compiled with fused multiply-add, as CUDA's compiler does: eager and compiled steps differ."""
    shim = tmp_path / "bin" / "g++"
    shim.parent.mkdir()
    shim.write_text(f'#!/bin/sh\nexec {shutil.which("g++")} -mfma -mavx -ffp-contract=fast "$@"\n')
    shim.chmod(0o755)
    cache = tmp_path / "cache"  # of compiled kernels: by name only, so that another compiler's would be taken
    cache.mkdir()
    path = f"{shim.parent}:/usr/bin:/bin"
    done = helpers.python("-c", FUSED, PATH=path, TMPDIR=str(cache))
    assert done.returncode == 0, done.stderr
    step, kind, ulp, repeated = done.stdout.split()
    assert int(step) <= 8 and kind in ("adam_v", "weight", "gradient") and int(ulp) >= 1
    assert repeated == "0"
