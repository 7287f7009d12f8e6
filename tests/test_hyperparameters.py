"""What an optimizer was told, in full: MLX's defaults differ from most people's, and the saved state has none of it."""

import inspect
import json

import mlx.core as mx
import mlx.optimizers as optim
import pytest
import runs

from workbench import Recorder, open_run
from workbench.errors import ExperimentError
from workbench.hyperparameters import describe_optimizer

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
