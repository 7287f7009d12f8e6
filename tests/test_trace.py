"""The trace file: valid against its own schema, strict JSON, read back as written, refused when damaged."""

import json
import subprocess
import sys

import jsonschema
import mlx.core as mx
import mlx.nn as nn
import msgspec
import numpy as np
import pytest
from helpers import Points, edit_json, experiment, parts
from panels import plain

from workbench import Recorder, open_run, trace
from workbench.bits import bits_float
from workbench.compare import ITEMS, Item
from workbench.errors import WorkbenchError
from workbench.screen.views import badges
from workbench.trace import Difference, Gate, Gates, Row, Trace, TraceRecord, difference_at

SCHEMA = jsonschema.Draft202012Validator(trace.schema())


def strict(content):
    return json.loads(content, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


class Poisoned(Points):
    """The third batch holds a NaN, and an infinity that reaches the forward pass only."""

    def __next__(self):
        x, y = super().__next__()
        if self.number == 3:
            y[0] = np.inf
        return x, y


def losses(model, x, y):
    per_row = ((model(x) - y) ** 2)[:, 0]
    return per_row.mean(), {"token_loss": per_row}


def make(**options):
    job = experiment(loss_fn=losses, **options)
    job.sampler = Poisoned()
    return job


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "run"
    with Recorder(path, *parts(make()), compile=False, save_every=2) as recorder:
        for batch in recorder.batches(4):
            recorder.step(batch)
    return open_run(path)


@pytest.fixture(scope="module")
def traces(run):
    """Steps 1 to 4 with a probe, and step 2 without; from step 3 on everything is NaN or infinite."""
    found = run.replay(range(1, 5), experiment=make())
    without = run.replay(2, experiment=make(), with_probe=False, trace_dir=run.path.parent / "without")
    return [*found, without]


# ---------------------------------------------------------------------------------------------------------------- files


def test_the_schema_is_one():
    jsonschema.Draft202012Validator.check_schema(trace.schema())
    assert trace.schema()["$schema"].endswith("2020-12/schema")
    assert json.loads(json.dumps(trace.schema())) == trace.schema()


def test_every_trace_is_strict_json_that_validates(traces):
    for one in traces:
        document = strict(one.path.read_bytes())
        SCHEMA.validate(document)
        assert document["replay_trace_version"] == 1 and document["exact"] is True
        assert tuple(document["items"]) == ITEMS


def test_the_schema_refuses_what_the_reader_refuses(traces, tmp_path):
    document = strict(traces[0].path.read_bytes())
    damages = {
        "another version": lambda d: d.update(replay_trace_version=2),
        "a field missing": lambda d: d.pop("loss_bits"),
        "a field too many": lambda d: d.update(extra=1),
        "another type": lambda d: d.update(step="1"),
        "another verdict": lambda d: d["items"]["loss"].update(verdict="close"),
        "a gate missing": lambda d: d["gates"].pop("sensitive"),
        "another provenance": lambda d: d.update(provenance="guess"),
        "a row without a size": lambda d: d["rows"][0].pop("size"),
        "text for a number": lambda d: d["per_layer_act_norms"].__setitem__(0, "NaN"),
    }
    for name, damage in damages.items():
        path = tmp_path / "trace.json"
        path.write_text(json.dumps(document))
        edit_json(path, damage)
        assert not SCHEMA.is_valid(json.loads(path.read_text())), name
        with pytest.raises(WorkbenchError, match="is not a trace of version 1") as error:
            trace.read(path)
        assert str(path) in str(error.value), name


class CalledThrice(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.shared, self.leave = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def last_output(self, x):
        return self.shared(mx.tanh(self.shared(mx.tanh(self.shared(mx.tanh(self.enter(x)))))))

    def from_last_output(self, z):
        return self.leave(10 * mx.tanh(z))

    def __call__(self, x):
        return self.from_last_output(self.last_output(x))


def shared_layer():
    mx.random.seed(5)
    return experiment(model=CalledThrice())


def test_activation_and_gradient_of_a_layer_called_several_times_are_of_the_same_call_the_last(tmp_path):
    """The backward pass comes to the last call first, so that its row is not the last one."""
    with Recorder(tmp_path / "run", *parts(shared_layer()), compile=False) as recorder:
        for batch in recorder.batches(1):
            recorder.step(batch)
    found = open_run(tmp_path / "run").replay(1, experiment=shared_layer(), fresh_process=False)
    job = shared_layer()
    x, y = map(mx.array, next(job.sampler))
    z = job.model.last_output(x)
    gradient = mx.grad(lambda z: nn.losses.mse_loss(job.model.from_last_output(z), y))(z)
    norms = found.layers.set_index(["layer", "kind"])["l2"]
    for kind, array in (("activation", z), ("activation_gradient", gradient)):
        assert norms["shared", kind] == pytest.approx(np.linalg.norm(np.array(array)), rel=1e-5), kind
    calls = [row.l2 for row in found.record.rows if row.kind == "activation_gradient" and row.path[:6] == "shared"]
    assert len({round(norm, 4) for norm in calls}) == 3  # of which one is shown


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe{}", b"[" * 100_000, b'{"step": 1e999}'])
def test_files_that_are_no_trace_are_refused(tmp_path, content):
    path = tmp_path / "00000001.json"
    path.write_bytes(content)
    with pytest.raises(WorkbenchError, match="is not a trace"):
        trace.read(path)


def test_a_trace_that_is_cut_off_anywhere_is_refused(traces, tmp_path):
    content = traces[0].path.read_bytes()
    path = tmp_path / "cut.json"
    for size in [0, 1, *range(2, len(content) - 2, len(content) // 40), len(content) - 2]:
        path.write_bytes(content[:size])
        with pytest.raises(WorkbenchError):
            trace.read(path)


def test_a_missing_trace_is_a_sentence(tmp_path):
    with pytest.raises(WorkbenchError, match="00000009.json can't be read.*expected a trace"):
        trace.read(tmp_path / "00000009.json")


def test_reading_gives_what_was_written(traces, tmp_path):
    for one in traces:
        back = trace.read(one.path)
        assert back.record == one.record and back.batch is None
        for name in ("items", "layers", "parameters", "rows"):
            assert getattr(back, name).equals(getattr(one, name)), name
        again = trace.write(back.record, tmp_path)
        assert again.read_bytes() == one.path.read_bytes()


def test_file_names_carry_step_and_segment(traces, tmp_path):
    record = traces[0].record
    assert trace.write(record, tmp_path).name == "00000001.json"
    assert trace.write(msgspec.structs.replace(record, segment=3), tmp_path).name == "00000001.s3.json"


def test_what_would_not_be_read_is_not_written(traces, tmp_path):
    bad = msgspec.structs.replace(traces[0].record, provenance="guess")
    with pytest.raises(msgspec.ValidationError):
        trace.write(bad, tmp_path)
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------------------------------------- values and tables


def test_non_finite_numbers_are_null_with_their_bits(traces):
    finite, infinite, undefined = (strict(traces[n].path.read_bytes()) for n in (1, 2, 3))
    assert finite["loss"] is not None and "per_layer_grad_norms_bits" not in finite
    assert (infinite["loss"], infinite["loss_bits"]) == (None, "0x7f800000")
    assert undefined["loss"] is None and np.isnan(bits_float(undefined["loss_bits"]))
    assert undefined["per_layer_grad_norms"] == [None, None]
    assert len(undefined["per_layer_grad_norms_bits"]) == 2
    assert traces[2].loss == np.inf and np.isnan(traces[3].loss)


def test_layers_have_one_row_a_layer_and_kind_with_the_recorded_value_beside(traces):
    frame = traces[1].layers
    assert list(frame.columns) == [
        "layer",
        "kind",
        "l2",
        "rms",
        "max_abs",
        "mean",
        "zero_fraction",
        "nonfinite",
        "recorded",
    ]
    assert frame["layer"].tolist() == ["layers.0"] * 7 + ["layers.3"] * 7
    assert frame["kind"].tolist() == list(trace.KINDS) * 2
    logged = frame[frame["kind"].isin(["activation", "gradient", "adam_m", "adam_v"])]
    assert (logged["l2"] == logged["recorded"]).all() and len(logged) == 8
    assert frame[~frame.index.isin(logged.index)]["recorded"].isna().all()
    assert (frame["nonfinite"] == 0).all() and frame["rms"].notna().all()


def test_a_layer_s_norm_is_joint_over_its_parameters(traces):
    layers = traces[1].layers.set_index(["layer", "kind"])
    rows = traces[1].parameters.set_index(["path", "kind"])
    for kind in ("gradient", "weight", "update", "adam_m"):
        weight, bias = (rows.loc[(f"layers.0.{name}", kind)] for name in ("weight", "bias"))
        joint = layers.loc[("layers.0", kind)]
        assert joint["l2"] == pytest.approx(np.hypot(weight["l2"], bias["l2"]), rel=1e-6)
        assert joint["rms"] == pytest.approx(np.hypot(weight["l2"], bias["l2"]) / np.sqrt(40), rel=1e-6)
        assert joint["max_abs"] == max(weight["max_abs"], bias["max_abs"])
        for name in ("mean", "zero_fraction"):
            assert joint[name] == pytest.approx((32 * weight[name] + 8 * bias[name]) / 40, rel=1e-6)


def test_nan_is_a_number_in_the_tables_and_counted(traces):
    for one in traces[2:4]:
        gradient = one.layers.set_index(["layer", "kind"]).loc[("layers.0", "gradient")]
        assert not np.isfinite(gradient["l2"]) and not np.isfinite(gradient["recorded"]) and gradient["nonfinite"] > 0


def test_without_a_probe_only_what_was_logged_is_there(traces):
    without = traces[4]
    assert without.record.certified_probe is None and len(without.parameters) == 0
    assert sorted(set(without.layers["kind"])) == ["activation", "adam_m", "adam_v", "gradient"]
    assert without.layers["rms"].isna().all()
    both = without.layers.merge(traces[1].layers, on=["layer", "kind"])
    assert len(both) == 8 and (both["l2_x"] == both["l2_y"]).all()


def test_a_layer_called_twice_has_a_row_for_each_call(traces):
    record = traces[1].record
    first = next(row for row in record.rows if row.kind == "activation")
    extra = msgspec.structs.replace(first, path="layers.0#1", max_abs=9.0)
    twice = Trace(msgspec.structs.replace(record, rows=[*record.rows, extra]))
    assert twice.layers.set_index(["layer", "kind"]).loc[("layers.0", "activation"), "max_abs"] == 9.0  # the last call
    assert "layers.0#1" in set(twice.parameters["path"])


def test_rows_are_sorted_by_their_share_of_the_loss(traces):
    rows = traces[1].rows
    assert list(rows.columns) == ["row", "loss", "share", "targets"]
    assert rows["share"].is_monotonic_decreasing and rows["share"].sum() == pytest.approx(1)
    assert rows["loss"].mean() == pytest.approx(traces[1].loss, rel=1e-6)
    assert sorted(rows["row"]) == list(range(12))
    silent = Trace(msgspec.structs.replace(traces[1].record, row_loss=None, token_loss=None))
    assert silent.rows.empty and list(silent.rows.columns) == ["row", "loss", "share", "targets"]


def test_a_norm_that_is_not_finite_comes_from_its_bits():
    def row(l2, bits=None):
        measured = {"path": "w", "kind": "weight", "dtype": "float32", "size": 1, "rms": None, "max_abs": None}
        return Row(**measured, l2=l2, nonfinite=0, l2_bits=bits)

    assert row(2.5).norm() == 2.5 and row(None, "0x7f800000").norm() == np.inf
    assert np.isnan(row(None, "0x7fc00000").norm()) and np.isnan(row(None).norm())


# ------------------------------------------------------------------------------------------------------------- verdicts


def test_the_sentence_counts_what_was_compared(traces):
    assert traces[0].sentence() == "Step 1 is exact: all 14 recorded items have the run's bits."
    assert traces[1].sentence() == "Step 2 is exact: all 15 recorded items have the run's bits."  # it has a checkpoint


def changed(record, **fields):
    return Trace(msgspec.structs.replace(record, **fields))


def test_a_difference_is_told_with_step_place_and_both_values(traces):
    difference = Difference(step=3, where="roll-forward", item="loss", detail="recorded 1, replayed 2", consequences=[])
    one = changed(traces[0].record, exact=False, first_difference=difference)
    assert one.sentence() == (
        "Step 1 is not exact: the first difference is loss at step 3 (roll-forward): recorded 1, replayed 2."
    )


def test_nothing_to_compare_with_is_never_exact(traces):
    one = changed(traces[0].record, exact=False)
    assert "is unverified" in one.sentence() and not one.exact


def test_another_machine_makes_any_verdict_informational(traces):
    one = changed(traces[0].record, environment_differences=["mlx: recorded 1, here 2"])
    assert "informational: this machine differs" in one.sentence() and one.informational
    for shown in (one._repr_html_(), plain(badges(one))):
        assert shown.count("exact, informational") == 3
    assert repr(one).endswith(", sensitive: exact, informational)")
    assert not traces[0].informational and "informational" not in traces[0]._repr_html_() + badges(traces[0])


def test_badges_and_html_show_each_gate_and_escape_what_comes_from_outside(traces):
    gate = Gate(verdict="mismatch", explanation="<script>")
    item = Item("0x3f800000", "0x3f800001", "mismatch", "<b>detail</b>")
    record = traces[0].record
    one = changed(
        record,
        gates=Gates(repeatable=gate, faithful=record.gates.faithful, sensitive=record.gates.sensitive),
        items=record.items | {"loss": item},
    )
    assert [(name, verdict) for name, verdict, _ in one.badges()] == [
        ("repeatable", "mismatch"),
        ("faithful", "exact"),
        ("sensitive", "exact"),
    ]
    shown = one._repr_html_()
    assert "<script>" not in shown and "<b>" not in shown
    assert "&lt;b&gt;detail" in shown and "repeatable: mismatch" in shown
    assert repr(one) == "Trace(step=1, repeatable: mismatch, faithful: exact, sensitive: exact)"
    frame = one.items.set_index("item")
    assert frame.loc["loss", "verdict"] == "mismatch" and list(frame.index) == list(ITEMS)


def test_the_first_difference_is_the_earliest_and_the_rest_are_consequences():
    def items(*red):
        return {name: Item(1, 2, "mismatch" if name in red else "exact", name) for name in reversed(ITEMS)}

    found = difference_at(items("state.weights", "loss", "grad_norm"), 7, "step")
    assert (found.step, found.where, found.item, found.detail) == (7, "step", "loss", "loss")
    assert found.consequences == ["grad_norm", "state.weights"]
    assert difference_at(items(), 7, "step") is None


def test_reading_traces_needs_no_mlx(traces):
    code = (
        "import sys; from workbench import trace; t = trace.read(sys.argv[1]); t.layers, t.items, t._repr_html_();"
        "sys.exit('mlx' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(traces[0].path)]).returncode == 0


def test_a_record_of_the_least_possible_content_validates():
    gate = Gate(verdict="unverified", explanation="")
    record = TraceRecord(
        run="r",
        step=1,
        segment=0,
        exact=False,
        first_difference=None,
        gates=Gates(repeatable=gate, faithful=gate, sensitive=gate),
        certified_probe=None,
        items={},
        batch_hash="",
        loss=None,
        loss_bits="0x7fc00000",
        grad_norm=None,
        grad_norm_bits="0xff800000",
        lr=None,
        layers=[],
        per_layer_act_norms=[],
        per_layer_grad_norms=[],
        adam_m_norms=[],
        adam_v_norms=[],
        state={},
        owned={},
        checkpoint=0,
        rolled=0,
        environment={},
        environment_differences=[],
        options={},
        wall_s=0.0,
    )
    SCHEMA.validate(strict(msgspec.json.encode(record)))
    one = Trace(record)
    assert one.layers.empty and one.items.empty and one.rows.empty and one.grad_norm == -np.inf
