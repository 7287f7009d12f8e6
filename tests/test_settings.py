"""What a recorder is told: other types are refused by name before a step is performed, and numpy's numbers are numbers;
whatever is recorded can be opened again."""

from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest
from helpers import Points, mlp, mse

import workbench as wb
from workbench import manifest as manifests
from workbench.errors import ExperimentError, RunError, WorkbenchError
from workbench.experiment import StepOptions
from workbench.recording.terms import copy_file, refuse_out_of_range, validation_loss
from workbench.recovery import Recovery

NO_NUMBERS = ("2", 2.0, True, np.bool_(True), [2], None)


def recorded(path, *, model=None, optimizer=None, loss_fn=mse, **options):
    performed = []

    def counted(model, *batch):
        performed.append(1)
        return loss_fn(model, *batch)

    options = {"compile": False, "self_check": False} | options
    try:
        optimizer = optim.SGD(0.1) if optimizer is None else optimizer
        with wb.Recorder(path, mlp() if model is None else model, optimizer, counted, Points(), **options) as recorder:
            for batch in recorder.batches(3):
                recorder.step(batch)
    except WorkbenchError:
        assert not performed and not path.exists()
        raise
    return wb.open_run(path)


@pytest.mark.parametrize("name", ["save_every", "keep_last", "keep_every", "accumulate", "black_box"])
@pytest.mark.parametrize("value", NO_NUMBERS, ids=repr)
def test_what_is_no_whole_number_is_refused(tmp_path, name, value):
    if value is None and name.startswith("keep"):
        return
    with pytest.raises(ExperimentError, match=rf"^{name} is .*; expected "):
        recorded(tmp_path / "run", **{name: value})


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("clip", True, "clip is True; expected a positive gradient norm"),
        ("clip", "1", "clip is '1'; expected a positive gradient norm"),
        ("clip", np.longdouble(1) / 3, r"clip is np.longdouble\(.*; expected a positive"),
        ("clip", Decimal(1), r"clip is Decimal\('1'\); expected a positive"),
        ("compile", 1, "compile is 1; expected True or False"),
        ("deterministic", 0, "deterministic is 0; expected True or False"),
        ("data", ["x"], r"data\[0\] is of type str; expected a DataFile"),
        ("factory", 3, 'factory is 3; expected text, "module:function"'),
        ("factory", Path("a.py"), r"factory is .*Path\('a.py'\); expected text"),
        ("spikes", {}, "spikes is of type dict; expected SpikeSettings"),
        ("extra", [1], "extra is of type list; expected a dict"),
        ("extra", {1: {"a": mx.zeros(2)}}, "extra has the name 1; expected text"),
        ("ignore", 3, "ignore is 3; expected names"),
        ("resume", "3", "resume is '3'; expected True.* or the step of a checkpoint as a number, resume=3"),
        ("resume", 1.0, "resume is 1.0; expected True"),
        ("rebuild", {"kind": object()}, "rebuild can't be kept in the manifest, which is JSON"),
        ("rebuild", {"kind": "\ud800"}, "rebuild can't be kept in the manifest, which is JSON"),
        ("rebuild", ["factory"], r"the manifest of this run could not be read again: .*\$\.rebuild"),
        ("model", lambda x: x, "the model is of type function; expected an mlx.nn.Module"),
        ("optimizer", optim.SGD, "the optimizer is the class SGD; expected one of mlx.optimizers"),
        ("optimizer", 3, "the optimizer is of type int; expected one of mlx.optimizers"),
    ],
)
def test_other_types_are_refused_by_name(tmp_path, name, value, words):
    with pytest.raises(ExperimentError, match=words):
        recorded(tmp_path / "run", **{name: value})


def test_arguments_of_a_factory_are_json(tmp_path):
    with pytest.raises(ExperimentError, match=r"arguments\.sizes\.1 is object; expected a JSON value"):
        recorded(tmp_path / "run", factory="a:b", arguments={"sizes": [1, object()]})
    with pytest.raises(ExperimentError, match="arguments is of type list; expected a dict"):
        recorded(tmp_path / "run", factory="a:b", arguments=[1])
    given = {"rate": np.float32(0.5), "sizes": (np.int64(1), 2), "on": np.bool_(True)}
    run = recorded(tmp_path / "run", factory="a:b", arguments=given)
    assert run.manifest.rebuild["arguments"] == {"rate": 0.5, "sizes": [1, 2], "on": True}


def test_numbers_of_numpy_are_numbers(tmp_path):
    options = {"accumulate": np.int64(3), "clip": np.float32(0.1), "compile": np.bool_(False)}
    options |= {
        "save_every": np.int64(2),
        "keep_last": np.uint8(2),
        "keep_every": np.int16(4),
        "black_box": np.int64(1),
    }
    spikes = wb.SpikeSettings(window=np.int64(20), factor=np.float32(2.5), z=np.float64(5))
    recovery = Recovery(rate=np.float64(0.5), back=np.int32(3), factor=np.float32(2.5), skip_batch=np.bool_(True))
    run = recorded(tmp_path / "run", spikes=spikes, auto_rollback=recovery, **options)
    plain = recorded(
        tmp_path / "plain",
        spikes=wb.SpikeSettings(window=20, factor=2.5, z=5.0),
        auto_rollback=Recovery(rate=0.5, back=3, factor=2.5, skip_batch=True),
        accumulate=3,
        clip=float(np.float32(0.1)),
        save_every=2,
        keep_last=2,
        keep_every=4,
        black_box=1,
    )
    for name in ("options", "save_every", "keep_last", "keep_every", "spikes", "recovery"):
        assert repr(getattr(run.manifest, name)) == repr(getattr(plain.manifest, name))
    losses = [[run.line(step, 0).loss_bits for step in (1, 2, 3)] for run in (run, plain)]
    assert losses[0] == losses[1]


def test_whole_numbers_and_fractions_stay_what_they_are():
    options = [StepOptions(clip=clip).clip for clip in (1, np.int64(1), Fraction(1, 4), 2**70)]
    assert list(map(repr, options)) == ["1", "1", "0.25", repr(float(2**70))]


@pytest.mark.parametrize("name", ["rate", "factor", "back", "window", "limit", "skip_batch"])
def test_settings_of_a_rollback_are_of_their_types(name):
    with pytest.raises(ExperimentError, match=f"{name} of auto_rollback is '1'; expected"):
        Recovery(**{name: "1"})


def test_a_budget_of_bytes_is_a_whole_number():
    for value in (-1, 2.5, True):
        with pytest.raises(ExperimentError, match=f"batch_budget is {value}; expected a whole number"):
            refuse_out_of_range(1, 0, None, None, value)
    refuse_out_of_range(1, 0, None, None, np.int64(5))


def test_a_validation_loss_is_one_number():
    given = (1.5, np.float32(1.5), mx.array(1.5), mx.array([1.5]), np.array([[1.5]]))
    assert [validation_loss(loss) for loss in given] == [1.5] * 5
    assert np.isnan(validation_loss(float("nan"))) and validation_loss(2) == 2.0
    for loss, words in (("x", "'x'"), (None, "None"), (mx.ones(2), r"an array of shape \(2,\)"), (True, "True")):
        with pytest.raises(ExperimentError, match=f"the validation loss is {words}; expected one number"):
            validation_loss(loss)


def test_the_copy_of_the_telemetry_is_a_file(tmp_path):
    assert copy_file(None) is None and copy_file(str(tmp_path / "lines")) == tmp_path / "lines"
    with pytest.raises(ExperimentError, match="copy_telemetry_to is .*, a folder; expected the path of a file in it"):
        copy_file(tmp_path)
    with pytest.raises(ExperimentError, match="copy_telemetry_to is 3; expected the path of a file, or none"):
        copy_file(3)


def test_a_manifest_that_could_not_be_read_is_not_written(tmp_path):
    run = recorded(tmp_path / "run")
    before = (run.path / manifests.NAME).read_bytes()
    run.manifest.save_every = 2.0
    with pytest.raises(RunError, match=r"damaged: Expected `int`, got `float` - at `\$.save_every`"):
        manifests.write(run.manifest, run.path)
    assert (run.path / manifests.NAME).read_bytes() == before and wb.open_run(run.path).last_step == 3
