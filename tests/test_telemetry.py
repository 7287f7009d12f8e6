"""Telemetry as evidence: every line kept or accounted for, and null, missing and non-finite never confused."""

import json
import math
import os

import msgspec
import numpy as np
import pandas as pd
import pytest
import runs
from msgspec import UNSET

from workbench.errors import TelemetryError
from workbench.lines.line import ARRAYS, LANES, Line, array_fields, scalar_fields
from workbench.lines.writer import Writer
from workbench.telemetry import read

NAN, INF, MINUS_INF = "0x7fc00000", "0x7f800000", "0xff800000"
OTHER_NAN = "0xffc12345"  # sign and payload are bits too
MAX = float(np.finfo(np.float32).max)


def step(number, **fields):
    return {"type": "step", "step": number} | fields


@pytest.fixture
def write(tmp_path):
    """Writes a telemetry file of objects (as JSON), strings and bytes, one a line, and returns its path."""

    def write_lines(*content, end=b"\n"):
        path = tmp_path / "telemetry.jsonl"
        raw = [
            part if isinstance(part, bytes) else (part if isinstance(part, str) else json.dumps(part)).encode()
            for part in content
        ]
        path.write_bytes(b"\n".join(raw) + end)
        return path

    return write_lines


def refused(path, number, *words):
    """The file is refused, with the line's number and the words; and is left as it was."""
    before = path.read_bytes()
    with pytest.raises(TelemetryError) as caught:
        read(path)
    message = str(caught.value)
    assert message.startswith(f"{path}, line {number}: "), message
    assert [word for word in words if word not in message] == [], message
    assert path.read_bytes() == before
    return message


# ------------------------------------------------------------------------------------------- null, missing, non-finite


def test_null_missing_and_each_non_finite_value_are_kept_apart(write):
    path = write(
        step(1, loss=2.5),
        step(2, loss=None),
        step(3),
        step(4, loss=None, loss_bits=NAN),
        step(5, loss=None, loss_bits=INF),
        step(6, loss=None, loss_bits=MINUS_INF),
        step(7, loss=None, loss_bits=OTHER_NAN),
    )
    telemetry = read(path)
    found = [telemetry.at(number, 0) for number in range(1, 8)]
    assert [line.loss for line in found] == [2.5, None, UNSET, None, None, None, None]
    assert [line.evidence().get("loss") for line in found] == [
        "0x40200000",
        None,
        None,
        NAN,
        INF,
        MINUS_INF,
        OTHER_NAN,
    ]
    frame = telemetry.frame()
    assert frame["loss_recorded"].tolist() == [True, False, False, True, True, True, True]
    losses = frame["loss"].tolist()
    assert losses[0] == 2.5 and losses[4] == math.inf and losses[5] == -math.inf
    assert [math.isnan(losses[i]) for i in (1, 2, 3, 6)] == [True] * 4


def test_array_entries_keep_undefined_and_non_finite_apart(write):
    path = write(
        step(1, per_layer_act_norms=[1.0, None, None, None], per_layer_act_norms_bits=["0x3f800000", None, NAN, INF]),
        step(2, per_layer_act_norms=[1.0, None]),
        step(3),
    )
    telemetry = read(path)
    evidence = [telemetry.at(number, 0).evidence() for number in (1, 2, 3)]
    assert evidence[0]["per_layer_act_norms"] == ["0x3f800000", None, NAN, INF]
    assert evidence[1]["per_layer_act_norms"] == ["0x3f800000", None]
    assert "per_layer_act_norms" not in evidence[2]


@pytest.mark.parametrize(
    ("number", "bits"),
    [(2.5, "0x40200001"), (2.5, NAN), (None, "0x40200000"), (0.0, "0x80000000"), (-0.0, "0x00000000")],
)
def test_a_number_that_contradicts_its_bits_is_an_error(write, number, bits):
    message = refused(write(step(1), step(2, loss=number, loss_bits=bits), step(3)), 2, bits)
    assert "loss" in message
    pairs = {"per_layer_grad_norms": [1.0, number], "per_layer_grad_norms_bits": ["0x3f800000", bits]}
    refused(write(step(1), step(2, **pairs), step(3)), 2, bits)


@pytest.mark.parametrize("bits", ["0x4020", "40200000", "0xABCDEF00", "", "0x4020000g"])
def test_malformed_bits_are_an_error(write, bits):
    refused(write(step(1), step(2, loss=None, loss_bits=bits), step(3)), 2, repr(bits))
    refused(write(step(1, adam_m_norms=[None], adam_m_norms_bits=[bits]), step(2)), 1, repr(bits))


def test_arrays_of_unequal_length_are_an_error(write):
    refused(write(step(1, adam_v_norms=[1.0], adam_v_norms_bits=["0x3f800000", NAN]), step(2)), 1, "1 numbers", "2")


def test_bits_decide_and_extremes_survive(write):
    """The largest float32 prints as a decimal that is larger still; it must not read as inf."""
    values = [np.float32(value) for value in (MAX, -MAX, 1e-45, 0.0, -0.0, 1 / 3)]
    fields = [scalar_fields("loss", value) for value in values]
    path = write(*(step(number, **entry) for number, entry in enumerate(fields, start=1)))
    assert [read(path).at(n, 0).evidence()["loss"] for n in range(1, 7)] == [entry["loss_bits"] for entry in fields]


def test_a_double_beyond_float32_without_bits_reads_as_inf_and_warns_of_nothing(write):
    assert read(write(step(1, loss=1e300), step(2, loss=-1e300))).frame()["loss"].tolist() == [math.inf, -math.inf]


# ----------------------------------------------------------------------------------------------------------- T2: damage


def test_a_line_cut_off_at_any_byte_is_tolerated_with_a_notice(write):
    whole = step(2, t=1.5, loss=2.125e-3, loss_bits="0x3b0b4396", spike=False, spike_rule=None, batch_hash='é"\\')
    text = json.dumps(whole, ensure_ascii=False).encode()
    for length in range(1, len(text)):
        for end in (b"", b"\n", b"\n\n", b"\r\n", b"\n \n"):
            telemetry = read(write(step(1, loss=2.0), text[:length], end=end))
            assert [line.step for line in telemetry.lines] == [1], text[:length]
            (notice,) = telemetry.notices
            assert "line 2" in notice and "telemetry.jsonl" in notice
    assert [line.step for line in read(write(step(1), text, end=b"")).lines] == [1, 2]  # only its line end is missing


def test_zeros_in_place_of_what_did_not_reach_the_disk_are_tolerated_wherever_they_begin(write):
    """Of the whole line too: then only its line end was lost, and it is not taken for written."""
    text = json.dumps(step(2, loss=2.125e-3, loss_bits="0x3b0b4396", spike=False)).encode()
    for length in range(len(text) + 1):
        torn = text[:length] + bytes(9)
        telemetry = read(write(step(1, loss=2.0), torn, end=b""))
        assert [line.step for line in telemetry.lines] == [1], torn
        assert "line 2" in telemetry.notices[0]
        declared = {"type": "meta", "segment": 1, "step": 1, "torn_bytes": len(torn)}
        telemetry = read(write(step(1, loss=2.0), torn, declared, step(2, segment=1, loss=2.0)))
        assert [(line.type, line.segment) for line in telemetry.lines] == [("step", 0), ("meta", 1), ("step", 1)], torn


def test_a_torn_line_in_the_middle_is_an_error(write):
    refused(write(step(1), '{"type": "step", "st', step(3)), 2)


def test_a_torn_line_that_the_next_meta_line_declares_is_tolerated(write):
    torn = b'{"type": "step", "step": 2, "loss": 2.'
    path = write(step(1), torn, {"type": "meta", "segment": 1, "step": 1, "torn_bytes": len(torn)}, step(2, segment=1))
    telemetry = read(path)
    assert [(line.type, line.segment) for line in telemetry.lines] == [("step", 0), ("meta", 1), ("step", 1)]
    assert len(telemetry.notices) == 1 and "line 2" in telemetry.notices[0]


def test_a_damaged_line_that_the_next_meta_line_does_not_declare_is_an_error(write):
    torn = b'{"type": "step", "step": 2, "loss": 2.'
    for declared in ({}, {"torn_bytes": len(torn) + 1}):
        refused(write(step(1), torn, {"type": "meta", "segment": 1, "step": 1} | declared, step(2, segment=1)), 2)
    # ... and a declaration excuses only the line right before it
    refused(write(torn, step(1), {"type": "meta", "step": 1, "torn_bytes": len(torn)}), 1)


def test_two_damaged_lines_in_a_row_are_an_error(write):
    torn = b'{"type": "st'
    refused(write(step(1), torn, torn, {"type": "meta", "step": 1, "torn_bytes": len(torn)}), 2)


@pytest.mark.parametrize("line", ["[]", "null", "5", '"x"', "xyz", "{}", '{"step": 5}', '{"type": "note", "step": 5}'])
@pytest.mark.parametrize("last", [False, True])
def test_a_whole_line_that_is_no_telemetry_is_an_error_with_its_number(write, line, last):
    content = [step(1), "", line] + ([] if last else [step(2)])
    for end in (b"\n", b"") if last else (b"\n",):
        message = refused(write(*content, end=end), 3)
        assert "expected" in message and "Put the file back" in message


def test_two_writers_interleaved_are_reported(write):
    glued = json.dumps(step(2)) + json.dumps(step(3))
    refused(write(step(1), glued, step(4)), 2)
    refused(write(step(1), glued), 2)  # the last line too: it is no unfinished one


def test_blank_lines_and_crlf_are_harmless(write):
    path = write(step(1), b"", json.dumps(step(2)).encode() + b"\r", b"  \t", step(3), end=b"\r\n")
    telemetry = read(path)
    assert [line.step for line in telemetry.lines] == [1, 2, 3] and telemetry.notices == []


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"])
def test_another_encoding_is_named(tmp_path, encoding):
    path = tmp_path / "telemetry.jsonl"
    path.write_bytes("".join(json.dumps(step(n)) + "\n" for n in (1, 2)).encode(encoding))
    with pytest.raises(TelemetryError, match="UTF-8 with a byte-order mark" if "8" in encoding else "UTF-16") as error:
        read(path)
    assert "expected UTF-8" in str(error.value)


def test_bytes_that_are_no_utf8_are_an_error_with_the_number(write):
    refused(write(step(1), b'{"type": "step", "step": 2, "batch_hash": "\xff"}', step(3)), 2)


def test_a_missing_file_and_a_folder_are_sentences(tmp_path):
    for path in (tmp_path / "telemetry.jsonl", tmp_path):
        with pytest.raises(TelemetryError, match=r"can't be read \(.+\); expected the run's telemetry"):
            read(path)


def test_an_empty_file_has_no_steps(write):
    telemetry = read(write(end=b""))
    assert telemetry.lines == [] and telemetry.last_step() == 0 and telemetry.frame().empty


# ------------------------------------------------------------------------------------------------------------ T3: types


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"loss": "2.1"}, ("loss", "str")),
        ({"loss": [2.1]}, ("loss", "array")),
        ({"loss": True}, ("loss", "bool")),
        ({"step": 5.0}, ("step", "float")),
        ({"step": "5"}, ("step", "str")),
        ({"step": None}, ("step", "null")),
        ({"step": 0}, ("step 0", "from 1")),
        ({"step": -3}, ("step -3", "from 1")),
        ({"segment": 0.5}, ("segment", "float")),
        ({"per_layer_act_norms": 2.0}, ("per_layer_act_norms",)),
        ({"per_layer_act_norms": ["2.0"]}, ("per_layer_act_norms[0]", "str")),
        ({"state": ["a"]}, ("state", "array")),
        ({"spike": 1}, ("spike", "int")),
        ({"batch_hash": None}, ("batch_hash", "null")),
    ],
)
def test_a_wrong_type_is_an_error_that_names_line_field_and_type(write, fields, words):
    refused(write(step(1), step(5) | fields, step(6)), 2, *words)


@pytest.mark.parametrize("kind", ["step", "val"])
def test_a_line_without_its_step_is_an_error(write, kind):
    refused(write(step(1), {"type": kind, "loss": 2.0}, step(2)), 2, "step", kind)
    refused(write(step(1), {"type": kind, "loss": 2.0}), 2, "step", kind)


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e999", '"NaN"'])
def test_constants_that_are_no_json_are_errors(write, value):
    refused(write(step(1), f'{{"type": "step", "step": 2, "loss": {value}}}', step(3)), 2)


def test_fields_of_other_trainers_are_let_through(write):
    assert read(write(step(1, loss=2.0, tokens_per_s=1e5, extra={"a": [1]}))).last_step() == 1


def test_deep_nesting_is_an_error_and_no_crash(write):
    refused(write(step(1), '{"x": ' + "[" * 100_000, step(2)), 2)


# ---------------------------------------------------------------------------------------------------- T4: several times


def test_the_same_step_twice_in_a_segment_is_an_error(write):
    path = write(step(1), step(2), step(2), step(3))
    with pytest.raises(TelemetryError, match="step 2 stands twice in segment 0"):
        read(path)


def test_segments_are_kept_apart_and_nothing_is_dropped(write):
    path = write(
        step(1, loss=1.0),
        step(2, loss=2.0),
        step(3, loss=3.0),
        step(2, loss=20.0, segment=1),
        step(3, loss=30.0, segment=1),
        step(4, loss=40.0, segment=1),
    )
    telemetry = read(path)
    assert len(telemetry.lines) == 6
    assert [telemetry.segments_with(n) for n in (1, 2, 4, 5)] == [[0], [0, 1], [1], []]
    assert (telemetry.at(3, 0).loss, telemetry.at(3, 1).loss, telemetry.at(1, 1)) == (3.0, 30.0, None)
    assert telemetry.last_step() == 4
    assert telemetry.frame()[["segment", "step"]].values.tolist() == [[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [1, 4]]


def test_which_process_wrote_a_step(write):
    """A segment may be written by several processes: one that resumes at its very end goes on with it."""
    meta = {"type": "meta", "segment": 0}
    path = write(meta | {"step": 0, "process": "a"}, step(1), meta | {"step": 1, "process": "b"}, step(2))
    telemetry = read(path)
    assert telemetry.meta(0).process == "a"
    assert [telemetry.meta_before(number, 0).process for number in (1, 2)] == ["a", "b"]
    assert telemetry.meta_before(1, 1) is None


def test_a_process_that_ended_before_its_first_step_opened_no_segment(write):
    meta = {"type": "meta", "segment": 1, "step": 1}
    path = write(
        *({"type": "meta", "segment": 0, "step": 0, "process": "a"}, step(1)),
        *(meta | {"process": "b"}, meta | {"process": "c"}, step(2, segment=1), meta | {"step": 2, "process": "d"}),
    )
    assert [read(path).meta(segment).process for segment in (0, 1)] == ["a", "c"]
    assert read(path).meta(2) is None


# -------------------------------------------------------------------------------------------------------------- writing


def whole_line(number, value):
    """A line with every kind of field, all floating-point values being `value`."""
    single = np.float32(value)
    arrays = [array_fields(name, [np.float32(1.5), single, None]) for name in ARRAYS]
    fields = scalar_fields("loss", single) | scalar_fields("grad_norm", single)
    for entry in arrays:
        fields |= entry
    return Line(
        type="step", t=1.0, step=number, lr=1e-3, state=dict.fromkeys(LANES, "ab"), batch_hash="cd", ma=None, **fields
    )


@pytest.mark.parametrize("value", [0.1, math.nan, math.inf, -math.inf, MAX, -0.0])
def test_what_is_written_is_strict_json_and_reads_back_bit_for_bit(tmp_path, value):
    path = tmp_path / "telemetry.jsonl"
    line = whole_line(1, value)
    writer = Writer(path)
    writer.append(line)
    writer.close()
    (raw,) = path.read_bytes().splitlines()
    assert b"NaN" not in raw and b"Infinity" not in raw
    runs.strict(raw)
    (found,) = read(path).lines
    assert found == line and found.evidence() == line.evidence()
    expected = f"0x{np.float32(value).view(np.uint32):08x}"
    assert found.evidence()["loss"] == expected
    assert found.evidence()["adam_v_norms"] == ["0x3fc00000", expected, None]


def test_the_strict_parser_of_these_tests_refuses_nan():
    for constant in ("NaN", "Infinity", "-Infinity"):
        with pytest.raises(ValueError, match="no JSON"):
            runs.strict(f'{{"loss": {constant}}}')


def test_the_writer_appends_and_never_rewrites(tmp_path):
    path = tmp_path / "telemetry.jsonl"
    before = b'{"type": "step", "step": 1}\n\n{"type":"step","step":2}\n'
    path.write_bytes(before)
    writer = Writer(path)
    assert writer.torn_bytes == 0
    writer.append(Line(type="step", step=3))
    writer.sync()
    writer.close()
    assert path.read_bytes().startswith(before)
    assert [line.step for line in read(path).lines] == [1, 2, 3]


@pytest.mark.parametrize("torn", [b"{", b'{"type":"step","step":2,"loss":2.', b"x" * 200_000])
def test_the_writer_starts_a_new_line_after_a_torn_one(tmp_path, torn):
    path = tmp_path / "telemetry.jsonl"
    before = b'{"type":"step","step":1}\n' + torn
    path.write_bytes(before)
    writer = Writer(path)
    assert writer.torn_bytes == len(torn)
    writer.append(Line(type="meta", step=1, torn_bytes=writer.torn_bytes))
    writer.append(Line(type="step", step=2))
    writer.close()
    assert path.read_bytes().startswith(before + b"\n")
    telemetry = read(path)
    assert [line.type for line in telemetry.lines] == ["step", "meta", "step"]
    assert len(telemetry.notices) == 1


def test_a_whole_line_that_only_lacks_its_end_is_kept_when_writing_goes_on(tmp_path):
    path = tmp_path / "telemetry.jsonl"
    path.write_bytes(b'{"type":"step","step":1}')
    writer = Writer(path)
    writer.append(Line(type="meta", step=1, torn_bytes=writer.torn_bytes))
    writer.close()
    telemetry = read(path)
    assert [line.type for line in telemetry.lines] == ["step", "meta"] and telemetry.notices == []


def test_each_line_is_one_write(tmp_path, monkeypatch):
    """So a reader, or a crash of the process, never finds half a line."""
    written = []
    path = tmp_path / "telemetry.jsonl"
    writer = Writer(path)
    real = os.write
    monkeypatch.setattr(
        "workbench.lines.writer.os.write", lambda fd, data: written.append(bytes(data)) or real(fd, data)
    )
    for number in (1, 2):
        writer.append(whole_line(number, 0.5))
    monkeypatch.undo()
    writer.close()
    assert [content.count(b"\n") for content in written] == [1, 1]


# ---------------------------------------------------------------------------------------------------------------- frame


def test_frame_has_these_columns_even_when_empty(write):
    columns = ["segment", "step", "loss", "loss_recorded", "grad_norm", "grad_norm_recorded", "lr", "ma"]
    columns += ["step_per_s", "spike", "spike_rule", "val_loss"]
    assert list(read(write(end=b"")).frame().columns) == columns
    assert list(read(write(step(1))).frame().columns) == columns


def test_frame_joins_validation_by_segment_and_step(write):
    path = write(
        step(1, loss=2.0, lr=1e-3, ma=None, step_per_s=3.0, spike=True, spike_rule="loss_z"),
        {"type": "val", "step": 1, "val_loss": 1.75},
        step(2, loss=2.5, ma=2.0, spike=False, spike_rule=None),
        {"type": "val", "step": 2, "segment": 1, "val_loss": 9.0},
    )
    first, second = read(path).frame().to_dict("records")
    assert (first["val_loss"], first["lr"], first["step_per_s"]) == (1.75, 1e-3, 3.0)
    assert first["spike"] is True and first["spike_rule"] == "loss_z" and math.isnan(first["ma"])
    assert math.isnan(second["val_loss"]) and math.isnan(second["lr"]) and second["ma"] == 2.0
    assert second["spike"] is False and pd.isna(second["spike_rule"])


def test_every_line_of_a_real_run_is_strict_json_and_typed():
    run = runs.recorded_read_only()
    kinds = [line["type"] for line in runs.lines(run)]
    assert kinds.count("step") == runs.STEPS and kinds[0] == "meta" and kinds[-1] == "done" and kinds.count("val") == 2
    for line in runs.lines(run):
        if line["type"] == "step":
            assert {*ARRAYS, "loss_bits", "grad_norm_bits", "lr", "t", "elapsed_s", "ma", "spike"} <= line.keys()
            assert set(line["state"]) == set(LANES) and len(line["batch_hash"]) == 64
            for raw in (line["loss_bits"], line["grad_norm_bits"]):
                assert len(raw) == 10
    assert msgspec.json.schema(Line)  # the published description of a line can be made
