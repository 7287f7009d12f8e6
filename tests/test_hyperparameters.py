"""What an optimizer was told, in full: MLX's defaults differ from most people's, and the saved state has none of it."""

import inspect
import json
import shutil

import mlx.core as mx
import mlx.optimizers as optim
import msgspec
import numpy as np
import pytest
import runs

from workbench import Recorder, open_run
from workbench.errors import ExperimentError
from workbench.hyperparameters import describe_optimizer, other_optimizer

CLASSES = [
    cls
    for _, cls in inspect.getmembers(optim, inspect.isclass)
    if issubclass(cls, optim.Optimizer) and cls not in (optim.Optimizer, optim.MultiOptimizer)
]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_argument_of_every_optimizer_is_described(cls):
    described = describe_optimizer(cls(learning_rate=1e-3))
    assert json.loads(json.dumps(described)) == described and described["class"] == cls.__name__
    arguments = set(inspect.signature(cls.__init__).parameters) - {"self", "learning_rate", "kwargs"}
    assert arguments <= described.keys() | {"betas"} and arguments & described.keys() == arguments


@pytest.mark.parametrize(
    "changed",
    [{"eps": 1e-6}, {"betas": [0.9, 0.98]}, {"weight_decay": 0.0}, {"bias_correction": True}],
    ids=lambda changed: next(iter(changed)),
)
def test_a_changed_argument_changes_the_description(changed):
    assert describe_optimizer(optim.AdamW(1e-3)) != describe_optimizer(optim.AdamW(1e-3, **changed))


def test_equal_optimizers_are_described_equally_however_written():
    assert describe_optimizer(optim.AdamW(1e-3, betas=(0.9, 0.95))) == describe_optimizer(
        optim.AdamW(2e-3, betas=[0.9, 0.95])
    )  # the rate is state, and comes from the checkpoint


def test_a_schedule_and_a_compound_are_described():
    plain, scheduled = optim.AdamW(1e-3), optim.AdamW(optim.cosine_decay(1e-3, 10))
    assert describe_optimizer(scheduled) == describe_optimizer(plain) | {"schedules": ["learning_rate"]}
    both = optim.MultiOptimizer([scheduled, optim.SGD(1e-2, momentum=0.9)], [lambda path, weight: weight.ndim > 1])
    described = describe_optimizer(both)
    assert [member["class"] for member in described["members"]] == ["AdamW", "SGD"]
    assert described["members"][1]["momentum"] == 0.9 and json.loads(json.dumps(described)) == described


def test_an_array_or_function_kept_as_attribute_is_described():
    class Odd(optim.SGD):
        def __init__(self):
            super().__init__(1e-3)
            self.scale, self.rule = mx.array([1.0, 2.0]), max

    described = describe_optimizer(Odd())
    assert described["scale"] == [1.0, 2.0] and described["rule"] == "max"


def test_numbers_of_numpy_are_described_by_their_values():
    class Odd(optim.SGD):
        def __init__(self):
            super().__init__(1e-3, momentum=np.int64(0), weight_decay=np.float64(0.1), nesterov=np.bool_(False))
            self.steps, self.most, self.limit = np.arange(2), np.float32("inf"), mx.array([float("nan")])
            self.large, self.text = 2**70, "\ud800"

    described = describe_optimizer(Odd())
    assert json.loads(json.dumps(described)) == described
    assert msgspec.json.decode(msgspec.json.encode(described)) == described
    values = {"momentum": 0, "weight_decay": 0.1, "nesterov": False, "steps": [0, 1], "most": "inf", "limit": ["nan"]}
    assert {name: described[name] for name in values} == values
    assert [type(described[name]) for name in ("momentum", "weight_decay", "nesterov")] == [int, float, bool]


def test_only_what_differs_is_named():
    found, recorded = (describe_optimizer(optim.AdamW(1e-3, weight_decay=decay)) for decay in (0.2, 0.1))
    assert other_optimizer(found, recorded) == ["optimizer AdamW: weight_decay is 0.2, recorded 0.1"]
    assert other_optimizer(found, found) == []
    assert other_optimizer(describe_optimizer(optim.SGD(1e-3)), found) == ["optimizer is SGD, recorded AdamW"]
    halves = [lambda path, weight: weight.ndim > 1]
    both = [
        describe_optimizer(optim.MultiOptimizer([optim.AdamW(1e-3), optim.SGD(1e-2, momentum=momentum)], halves))
        for momentum in (0.9, 0.8)
    ]
    assert other_optimizer(*both) == ["optimizers[1]: optimizer SGD: momentum is 0.9, recorded 0.8"]
    described = describe_optimizer(optim.SGD(1e-2, momentum=np.int64(0)))
    assert other_optimizer(described, described | {"momentum": "<class 'numpy.int64'>"}) == []  # of a run of before
    assert other_optimizer(described, described | {"momentum": 1}) == ["optimizer SGD: momentum is 0, recorded 1"]


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("betas", [[np.float64(0.9), 0.99], (0.9, np.float32(0.5))], ids=repr)
def test_betas_of_numpy_are_refused(tmp_path, betas, compiled):
    job = runs.build()
    with (
        pytest.raises(ExperimentError, match=r"betas of the optimizer AdamW are numbers of numpy; .*: betas=\(0.9, 0."),
        Recorder(
            tmp_path / "run", job.model, optim.AdamW(1e-3, betas=betas), job.loss_fn, job.sampler, compile=compiled
        ),
    ):
        pass


def test_moments_that_become_numpys_are_named(tmp_path):
    job = runs.build()
    optimizer = optim.SGD(1e-3, momentum=np.float64(0.9))
    with (
        pytest.raises(ExperimentError, match=r"\.v has become an array of numpy in the step"),
        Recorder(tmp_path / "run", job.model, optimizer, job.loss_fn, job.sampler, compile=False) as recorder,
    ):
        for batch in recorder.batches(2):
            recorder.step(batch)


def test_a_resume_with_others_names_only_these(run, tmp_path):
    path = shutil.copytree(run.path, tmp_path / "run")
    with pytest.raises(ExperimentError, match="this is not the experiment that .* recorded: ") as caught:
        Recorder(path, *runs.parts(runs.build(eps=1e-6)), compile=False, clip=1.0, resume=True)
    said = str(caught.value).partition("recorded: ")[2]
    assert said.startswith(
        "optimizer AdamW: eps is 1e-06, recorded 1e-08; clip is 1.0, recorded None. Go on with what it"
    )
    assert "betas" not in said and "accumulate" not in said


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("hyperparameters") / "run"
    with Recorder(out, *runs.parts(runs.build()), compile=False, save_every=2) as recorder:
        for batch in recorder.batches(4):
            recorder.step(batch)
    return open_run(out)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"eps": 1e-6}, ("optimizer", "1e-06", "1e-08")),
        ({"betas": (0.9, 0.99)}, ("optimizer", "0.99", "0.95")),
        ({"bias_correction": False}, ("optimizer", "False", "True")),
        ({"weight_decay": 0.5}, ("optimizer", "0.5", "0.01")),
        ({"clip": 1.0}, ("clip is 1.0, recorded None",)),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_replay_with_other_hyperparameters_is_refused(run, changed, words):
    before = runs.digest(run.path)
    with pytest.raises(ExperimentError, match="this is not the experiment that run recorded") as caught:
        run.replay(3, experiment=runs.build(**changed))
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)
    assert runs.digest(run.path) == before


def test_another_learning_rate_is_taken_from_the_run(run, tmp_path):
    """A constant rate is state: the checkpoint's is restored over whatever the experiment was built with."""
    trace = run.replay(3, experiment=runs.build(lr=5.0), with_probe=False, trace_dir=tmp_path)
    assert trace.exact and trace.record.lr == pytest.approx(1e-2)
