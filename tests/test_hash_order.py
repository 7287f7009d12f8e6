"""Whether a step goes by how Python hashes texts, as its names show it; and what is said of that."""

import helpers
import mlx.optimizers as optim
import pytest

from workbench.experiment import Experiment, StepOptions
from workbench.replaying.hash_order import by_hash
from workbench.surroundings import compared, differences, other_hashes

NAMES = {"math", "code", "web"}
NUMBERS = {1, 2, 3}


def asked(step):
    model = helpers.mlp(0.1)
    return by_hash(Experiment(model, optim.SGD(0.1), helpers.mse, helpers.Points(), StepOptions(compile=False), step))


def goes_through(x, y):
    return sum(len(name) for name in NAMES)


def makes_one(x, y):
    return [name for name in set("abc")]


def hashes(x, y):
    return hash("layer1") % 7


def looks_up(x, y):
    return "math" in NAMES


def sorts(x, y):
    return [len(NAMES), *sorted(NAMES), *sorted(set("abc"))]


def numbers(x, y):
    return sum(NUMBERS)


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (goes_through, "uses the set step_fn.NAMES"),
        (makes_one, "makes a set in makes_one"),
        (hashes, "calls hash() in hashes"),
        (looks_up, None),
        (sorts, None),
        (numbers, None),
    ],
)
def test_only_what_the_names_show_is_said(step, said):
    assert asked(step) == said


def test_another_way_of_hashing_is_named_and_no_reason_to_refuse():
    fixed, free = {"hash_seed": "3"}, {"hash_seed": "random"}
    assert differences(fixed, free) == []
    assert "PYTHONHASHSEED was 3 when this was recorded, and is unset here" in other_hashes(fixed, free)
    assert "was unset when this was recorded, and is 3 here" in other_hashes(free, fixed)
    assert other_hashes(free, free) is other_hashes(fixed, fixed) is other_hashes({}, free) is None
    (row,) = compared(fixed, free).to_dict("records")
    assert row == {"item": "hash_seed", "recorded": "3", "here": "random", "same": False}


def test_what_older_runs_did_not_record_is_no_difference():
    here = {"libc": "glibc 2.36", "hash_seed": "random"}
    assert differences({}, here) == [] and all(compared({}, here)["same"])
    assert differences({"libc": "glibc 2.35"}, here) == ["libc: recorded glibc 2.35, here glibc 2.36"]


def test_a_step_that_goes_by_it_is_named_where_its_replay_is_not_exact(tmp_path):
    import mlx.core as mx
    import mlx.nn as nn

    import workbench as wb

    def experiment(factor):
        model, optimizer = helpers.mlp(0.1), optim.AdamW(1e-2)

        def step(x, y):
            loss, gradients = nn.value_and_grad(model, helpers.mse)(model, x, y)
            scaled = nn.utils.tree_map(lambda one: one * mx.array(factor) * (1 + 0 * hash("a")), gradients)
            optimizer.update(model, scaled)
            return loss

        return Experiment(model, optimizer, helpers.mse, helpers.Points(), StepOptions(compile=False), step)

    job = experiment(1.0)
    options = {"step_fn": job.step_fn, "spikes": None}
    with wb.Recorder(tmp_path / "run", job.model, job.optimizer, helpers.mse, job.sampler, **options) as recorder:
        for batch in recorder.batches(2):
            recorder.step(batch)
    run = wb.open_run(tmp_path / "run")
    for segment in run.manifest.segments:
        segment.environment["hash_seed"] = "3"
    trace = run.replay(2, experiment=experiment(2.0), with_probe=False, repeat=False)
    said = [one for one in trace.notices if one.startswith("The step calls hash() in step, and Python hashes texts")]
    assert not trace.exact and len(said) == 1
    trace = run.replay(2, experiment=experiment(1.0), with_probe=False, repeat=False)
    assert trace.exact and not any(one.startswith("The step calls hash()") for one in trace.notices)
