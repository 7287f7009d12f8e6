"""Reading many lines at once says what the strict reader says: the same columns, notices and errors, on any input."""

import json
import math
import struct
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET
from scans import outcome

from workbench.bench.telemetry_load import telemetry_load
from workbench.bits import array_bits, bits_float, float_bits
from workbench.errors import TelemetryError
from workbench.lines import columns, numbers, scan
from workbench.lines.line import ARRAYS, SCALARS
from workbench.lines.scan import Scan
from workbench.lines.table import MISSING, NON_FINITE, NULL, NUMBER
from workbench.telemetry import read

DOUBLES = ("lr", "ma", "step_per_s", "t", "elapsed_s", "peak_rss_mb")


NUMBERS = [0.1, -0.0, 0.0, 2.5, 1e-45, 3.4028234663852886e38, 3.4028235677973366e38, 1e300, -1e300, 5, -7, 0, 2**53 + 1]
NUMBERS += [2**63, 2**64 - 1, 2**64, -(2**63) - 1, 1e-320, 5e-324, 1.7976931348623157e308, 0.1 + 0.2]
TEXTS = ["1e5", "-0", "1E-400", "1e999", "0.1e+1", "01", "1.", ".5", "+1", "--1", "NaN", '"2.5"', "true", "[1]", "{}"]
TEXTS += ['{"a": 1}', "[]", "null", "[[1]]", "1797693134862315700e290", '"]"', '"0x3f800000"', "", "1 2", '"a:b"']
OTHERS = [1, "x", {"a": [1]}, [{"b": 2}], None, "ä", [1, 2, 3], {"a": {"a": 1}}]


def some_number(random):
    return random.choice(
        [random.choice(NUMBERS), random.random(), float(str(np.float32(random.lognormvariate(0, 20)))), None]
    )


def scalar(random, name, style):
    """A number, with or without bits."""
    if style == "plain":
        return {name: some_number(random)}
    if random.random() < 0.1:
        return {name: None, f"{name}_bits": random.choice(["0x7fc00000", "0x7f800000", "0xff800000", "0xffc12345"])}
    value = np.float32(random.choice([random.lognormvariate(0, 20), 0.0, -0.0, -3.5]))
    return {name: float(str(value)), f"{name}_bits": float_bits(value)}


def fields_of(random, shape, number):
    """An ordinary line of a file whose lines have these fields, as JSON texts by key."""
    fields = {"type": "step", "step": number}
    for name, style in shape["scalars"]:
        fields |= scalar(random, name, style)
    for name in shape["doubles"]:
        fields[name] = some_number(random)
    for name in shape["arrays"]:
        fields[name] = [some_number(random) for _ in range(shape["width"])]
    fields |= {name: random.choice(values) for name, values in shape["more"]}
    return {key: json.dumps(value) for key, value in fields.items()}


MORE = [("spike", [True, False]), ("spike_rule", [None, "loss_z", "ä"]), ("state", [{"weights": "ab", "rng": "c"}, {}])]
MORE += [("before", [{}, {"rng": [1, 2]}, {"learning_rate": ["0x0", None]}]), ("other", OTHERS), ("segment", [0])]
MORE += [("batch_hash", ["ab", "a{b"])]


def an_odd_value(random, lines):
    fields = random.choice(lines)
    fields[random.choice(list(fields))] = random.choice(TEXTS)


def an_odd_entry(random, lines):
    fields = random.choice(lines)
    for name in ARRAYS:
        if name in fields and json.loads(fields[name]):
            entries = [json.dumps(value) for value in json.loads(fields[name])]
            entries[random.randrange(len(entries))] = random.choice(TEXTS)
            fields[name] = "[" + random.choice([",", ", ", " , "]).join(entries) + "]"


def another_length(random, lines):
    """One array shorter, the next longer: in all as many numbers as before."""
    for name in ARRAYS:
        having = [fields for fields in lines if name in fields]
        for fields, change in zip(having, (-1, 1), strict=False):
            entries = json.loads(fields[name])
            fields[name] = json.dumps(entries[:-1] if change < 0 else [*entries, 1.5])


def other_bits(random, lines):
    fields = random.choice(lines)
    wrong = [
        f"0x{random.getrandbits(32):08x}",
        "0x7fc00000",
        "0x12",
        "0xABCDEF00",
        "0x1234567",
        "0x3f8000000",
        "é" * 10,
    ]
    fields[f"{random.choice(SCALARS)}_bits"] = json.dumps(random.choice(wrong))


def two_odd_lengths(random, lines):
    """Bits that are well formed only when they are joined."""
    name = f"{random.choice(SCALARS)}_bits"
    for fields, text in zip(lines, ("0x1234567", "00x12345678"), strict=False):
        fields[name] = json.dumps(text)


def bits_of_an_array(random, lines):
    fields = random.choice(lines)
    for name in ARRAYS:
        if name in fields:
            numbers_ = json.loads(fields[name])
            bits = [None if value is None else float_bits(float(value)) for value in numbers_]
            if numbers_ and random.random() < 0.7:
                numbers_[0], bits[0] = None, random.choice(["0x7fc00000", "0xff800000", "0x3f800000"])
            fields[name], fields[f"{name}_bits"] = json.dumps(numbers_), json.dumps(bits)


def another_type(random, lines):
    fields = random.choice(lines)
    fields["type"] = random.choice(['"val"', '"meta"', '"done"', '"rollback"', '"note"', "5"])
    fields["val_loss"] = json.dumps(some_number(random))


def another_step(random, lines):
    random.choice(lines)["step"] = random.choice(["1", "2", "0", "-3", "5.0", '"5"', "null", str(2**63), "1e3"])


def another_segment(random, lines):
    for fields in lines[random.randrange(len(lines)) :]:
        fields["segment"] = random.choice(["1", "1", "2", "-1", "0.5", str(-(2**63) - 1)])


def a_key_less(random, lines):
    fields = random.choice(lines)
    del fields[random.choice(list(fields))]


ODD_FIELDS = [an_odd_value, an_odd_entry, another_length, other_bits, two_odd_lengths, bits_of_an_array, another_type]
ODD_FIELDS += [another_step, another_segment, a_key_less]


def a_key_twice(random, texts):
    place = random.randrange(len(texts))
    key = random.choice([b'"step"', b'"loss"', b'"other"', b'"st\\u0065p"', b'"state"'])
    texts[place] = texts[place][:-1] + b", " + key + b": 1, " + key + b": 2}"


def a_key_twice_inside(random, texts):
    place = random.randrange(len(texts))
    inside = random.choice(
        [b'"other": {"a": 1, "a": 2}', b'"state": {"rng": "a", "rng": "b"}', b'"x": [{"k":1,"k":1}]']
    )
    inside = random.choice([inside, b'"before": {"rng": [1, 2], "rng": [1, 3]}'])
    texts[place] = texts[place][:-1] + b", " + inside + b"}"


def glued_and_split(random, texts):
    """Two objects on a line, and one over two lines: as many lines as objects."""
    if len(texts) >= 3:
        broken = texts[2].replace(b", ", b",\n", 1)
        texts[:3] = [texts[0] + texts[1], broken]


def odd_bytes(random, texts):
    place = random.randrange(len(texts))
    odd = random.choice([b"\xff", b"\xc3\xa4", b"\0", b"\t", b"}\n{"])
    texts[place] = texts[place][:-1] + b', "' + odd + b'": "' + odd + b'"}'


def odd_bytes_inside(random, texts):
    """In what a parser may skip."""
    place = random.randrange(len(texts))
    texts[place] = texts[place][:-1] + b', "other": ["\xff"]}'


def an_odd_line(random, texts):
    odd = [b"", b"{", b'{"type": "st', b"[]", b"\0\0\0", b"{}{}", b"\xff", b' {"type":"meta"} ', b"null", b"5"]
    texts.insert(random.randint(0, len(texts)), random.choice(odd))


def torn(random, texts):
    place = random.randrange(len(texts))
    texts[place] = texts[place][: random.randrange(len(texts[place]) + 1)]
    if random.random() < 0.5:
        texts.insert(place + 1, b'{"type": "meta", "torn_bytes": %d}' % (len(texts[place]) + random.choice([0, 0, 1])))


ODD_TEXTS = [a_key_twice, a_key_twice_inside, glued_and_split, odd_bytes, odd_bytes_inside, an_odd_line, torn]


def content(random):
    """A file of ordinary lines, and at most two odd things in it."""
    shape = {
        "scalars": [(name, random.choice(["plain", "bits"])) for name in SCALARS if random.random() < 0.7],
        "doubles": random.sample(DOUBLES, random.randint(0, 2)),
        "arrays": random.sample(ARRAYS, random.randint(0, 2)),
        "width": random.choice([1, 3, 3, 0]),
        "more": random.sample(MORE, random.randint(0, 2)),
    }
    lines = [fields_of(random, shape, number) for number in range(1, random.randint(2, 9))]
    odd = random.choice([*ODD_FIELDS, *[None] * 4])
    if odd is not None:
        odd(random, lines)
    texts = [("{" + ", ".join(f'"{key}": {text}' for key, text in fields.items()) + "}").encode() for fields in lines]
    odd = random.choice([*ODD_TEXTS, *[None] * 8])
    if odd is not None:
        odd(random, texts)
    end = random.choice([b"\n", b"\n", b"\n", b"\r\n"])
    return end.join(texts) + random.choice([end, end, b"", b"\n\n"])


@pytest.mark.parametrize("library", [True, False])
def test_any_file_reads_as_the_strict_reader_reads_it(tmp_path, monkeypatch, library):
    if not library:
        monkeypatch.setattr(numbers, "simdjson", None)
    elif numbers.simdjson is None:
        pytest.skip("pysimdjson has no wheel for this Python")
    path = tmp_path / "telemetry.jsonl"
    said = {"quickly": 0, "refused": 0}
    real = Scan._keep_quickly

    def keep_quickly(self, *arguments):
        number = real(self, *arguments)
        said["quickly"] += 1
        return number

    monkeypatch.setattr(Scan, "_keep_quickly", keep_quickly)

    @settings(max_examples=800, deadline=None, derandomize=True, database=None)
    @given(st.integers(0, 2**40), st.sampled_from([40, 300, 1 << 20]))
    def check(seed, block):
        monkeypatch.setattr(scan, "BLOCK", block)
        path.write_bytes(content(Random(seed)))
        found, expected = outcome(path, Scan), outcome(path, Scan.strictly)
        assert found == expected
        said["refused"] += isinstance(found, str)

    check()
    assert min(said.values()) > 200  # both happened often


def regular(number, **fields):
    values = [0.5 * number, 1.25, None]
    return json.dumps({"type": "step", "step": number, "loss": 2.0 + number, "per_layer_act_norms": values} | fields)


def test_the_quick_way_is_the_one_that_was_tried(tmp_path, monkeypatch):
    """Ordinary lines never reach the strict reader; nor do resumes, validation, or fields of other writers."""
    path = tmp_path / "telemetry.jsonl"
    lines = [json.dumps({"type": "meta", "step": 0, "state": {"weights": "ab"}})]
    lines += [regular(number, loss_bits=float_bits(2.0 + number)) for number in range(1, 40)]
    lines += [json.dumps({"type": "val", "step": 39, "val_loss": 1.5})]
    lines += [regular(number, segment=1, mine=[1, 2]) for number in range(20, 60)]
    path.write_text("\n".join(lines) + "\n")
    expected = outcome(path, Scan.strictly)

    def never(*arguments):
        raise AssertionError("read strictly")

    monkeypatch.setattr("workbench.lines.strict.StrictReader.feed", never)
    assert outcome(path, Scan) == expected
    assert len(expected[1]) == 1 and expected[2]["rows"] == 79 and expected[3]["rows"] == 1


def test_columns_say_what_the_lines_say(tmp_path):
    """Against a slow reference: each line's own evidence."""
    rng = np.random.default_rng(7)
    lines = []
    for number in range(1, 200):
        fields = {"type": "step", "step": number}
        value = [np.float32(rng.lognormal()), np.float32(np.nan), np.float32(np.inf), None][number % 4]
        if value is not None:
            finite = bool(np.isfinite(value))
            fields |= {"loss": float(str(value)) if finite else None, "loss_bits": float_bits(value)}
        if number % 5:
            fields["lr"] = None if number % 7 == 0 else float(rng.random())
        if number % 3:
            fields["adam_v_norms"] = [float(rng.random()), None]
        lines.append(json.dumps(fields))
    path = tmp_path / "telemetry.jsonl"
    path.write_text("\n".join(lines))
    telemetry = read(path)
    columns = {name: telemetry.column(name) for name in ("loss", "loss.kind", "lr", "lr.kind", "adam_v_norms")}
    for row, line in enumerate(telemetry.lines):
        bits = line.evidence().get("loss")
        assert columns["loss.kind"][row] == (
            MISSING if bits is None else NUMBER if math.isfinite(bits_float(bits)) else NON_FINITE
        )
        if bits is not None:
            assert float_bits(columns["loss"][row]) == bits
        assert columns["lr.kind"][row] == (MISSING if line.lr is UNSET else NULL if line.lr is None else NUMBER)
        if isinstance(line.lr, float):
            assert struct.pack("d", columns["lr"][row]) == struct.pack("d", line.lr)
        numbers_ = [None, None] if line.adam_v_norms is UNSET else line.adam_v_norms
        found = [None if math.isnan(value) else float_bits(value) for value in columns["adam_v_norms"][row]]
        assert found == array_bits(numbers_, None)
    assert telemetry.column("grad_norm") is None


def test_an_array_of_changing_length_is_no_column_and_its_lines_are_whole(tmp_path):
    path = tmp_path / "telemetry.jsonl"
    path.write_text("\n".join([regular(1), regular(2, per_layer_act_norms=[1.0]), regular(3)]))
    telemetry = read(path)
    with pytest.raises(TelemetryError, match="per_layer_act_norms has not the same length"):
        telemetry.column("per_layer_act_norms")
    assert [len(telemetry.at(step, 0).per_layer_act_norms) for step in (1, 2, 3)] == [3, 1, 3]
    assert telemetry.column("loss").tolist() == [3.0, 4.0, 5.0]


@pytest.mark.parametrize("library", [True, False])
@pytest.mark.parametrize(
    "texts",
    [
        ("5", "[[7], 8, 9]"),  # which have as many brackets, commas and numbers as two arrays of two
        ("[1, [2]]", "3"),
        ("[[1, 2]]", "[]"),
        ("[1]", "[2, 3, 4]"),
        ("[1, 2, 3]", "[4]"),
        ("[]", "[1, 2]"),
        ('"[1"', '"2]"'),
        ("[1, 2]", '[3, "]"]'),
        ("[1, 2]", "{}"),
        ("[1, 2]", "true"),
    ],
)
def test_no_two_wrong_arrays_make_right_ones(tmp_path, monkeypatch, library, texts):
    if not library:
        monkeypatch.setattr(numbers, "simdjson", None)
    path = tmp_path / "telemetry.jsonl"
    for tried in (texts, texts[::-1], ("[1, 2]", *texts), (*texts, "[1, 2]")):
        lines = [f'{{"type": "step", "step": {n}, "adam_m_norms": {text}}}' for n, text in enumerate(tried, 1)]
        path.write_text("\n".join(lines) + "\n")
        assert outcome(path, Scan) == outcome(path, Scan.strictly)


@pytest.mark.parametrize("width", [1, 2, 7, 64, 65])
@pytest.mark.parametrize("rows", [1, 2, 9, 130])
def test_arrays_of_any_width_keep_their_places(width, rows):
    values = np.random.default_rng(width).standard_normal((rows, width))
    texts = [json.dumps(row) for row in values.tolist()]
    np.testing.assert_array_equal(numbers.flat_numbers([text.encode() for text in texts]), values)
    for wrong in (0, rows // 2, rows - 1):
        other = [*texts]
        other[wrong] = json.dumps([*values[wrong].tolist(), 1.0])
        if rows > 1:
            with pytest.raises(columns.Odd):
                numbers.flat_numbers([text.encode() for text in other])


@pytest.mark.parametrize(
    "fields",
    [
        {"adam_m_norms": 1.5},
        {"adam_m_norms": ["a"]},
        {"adam_m_norms_bits": ["0x12"]},
        {"before": 5},
        {"ranks": 5},
        {"ranks": [5]},
    ],
)
@pytest.mark.parametrize("kind", ["step", "val", "meta"])
def test_a_wrong_type_in_what_is_read_later_is_an_error_of_any_line(tmp_path, kind, fields):
    path = tmp_path / "telemetry.jsonl"
    odd = {"type": kind, "step": 3, "val_loss": 1.5} | fields
    path.write_text("\n".join([regular(1), regular(2), json.dumps(odd), regular(4)]) + "\n")
    found = outcome(path, Scan)
    assert found == outcome(path, Scan.strictly) and "line 3" in found


def test_columns_are_read_only(tmp_path):
    path = tmp_path / "telemetry.jsonl"
    path.write_text(regular(1))
    with pytest.raises(ValueError, match="read-only"):
        read(path).column("loss")[0] = 1.0


# ------------------------------------------------------------------------------------------------------------- growing


def test_a_file_that_grows_is_read_on_from_where_it_ended(tmp_path):
    path = tmp_path / "telemetry.jsonl"
    text = "\n".join(regular(number) for number in range(1, 30)).encode()
    before = None
    for length in range(0, len(text), 97):
        path.write_bytes(text[:length])
        inode = path.stat().st_ino
        telemetry = read(path, since=before)
        fresh = read(path)
        assert telemetry.frame().equals(fresh.frame()) and telemetry.notices == fresh.notices
        assert path.stat().st_ino == inode
        before = telemetry
    assert len(before) >= 27


def test_what_was_read_is_not_read_again(tmp_path, monkeypatch):
    path = tmp_path / "telemetry.jsonl"
    path.write_text(regular(1) + "\n" + regular(2) + "\n")
    before = read(path)
    taken = []
    real = Scan._take
    monkeypatch.setattr(Scan, "_take", lambda self, body, *more: taken.append(body) or real(self, body, *more))
    with open(path, "a") as file:
        file.write(regular(3) + "\n")
    assert read(path, since=before).last_step() == 3
    assert taken == [(regular(3) + "\n").encode()]
    assert before.last_step() == 2  # what was read before is as it was


def test_a_file_that_was_replaced_or_shortened_is_read_anew(tmp_path):
    path = tmp_path / "telemetry.jsonl"
    path.write_text(regular(1) + "\n" + regular(2) + "\n")
    before = read(path)
    path.write_text(regular(1, loss=9.0) + "\n" + regular(2) + "\n" + regular(3) + "\n")  # in place, and longer
    assert read(path, since=before).frame()["loss"].tolist() == [9.0, 4.0, 5.0]
    path.write_text(regular(1) + "\n")
    assert read(path, since=before).frame()["loss"].tolist() == [3.0]


def test_a_line_that_moved_since_is_noticed(tmp_path):
    path = tmp_path / "telemetry.jsonl"
    path.write_text(regular(1) + "\n" + regular(2) + "\n")
    before = read(path)
    path.write_text(regular(1, more="x" * 50) + "\n" + regular(2) + "\n")
    with pytest.raises(TelemetryError, match="was changed after it was read: the line of step 2"):
        before.at(2, 0)


def test_a_step_beyond_64_bits_is_an_error_with_the_number(tmp_path):
    path = tmp_path / "telemetry.jsonl"
    path.write_text(regular(1) + "\n" + regular(2**63) + "\n")
    with pytest.raises(TelemetryError, match=r"line 2: .*step is 9223372036854775808; expected an integer of 64 bits"):
        read(path)


def test_the_bench_measures_each_way():
    own = np.ones(20_000_000)  # this process's own peak, 160 MB, is none of theirs
    found = telemetry_load(lines=300, repeats=1, strict=True)
    assert own.size and (found.set_index("way")["peak_mb"][["first time", "strict reader"]] > 0).all()
    assert found["way"].tolist() == ["bytes", "first time", "with cache", "strict reader"]
    assert (found["seconds"] > 0).all()
