"""Step lines of one form read at once say what the strict reader says of them, whatever was changed in them."""

import json
import re
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scans import outcome

from workbench.bits import float_bits
from workbench.lines import alike, numbers, scan
from workbench.lines.alike import AlikeReader
from workbench.lines.columns import Odd
from workbench.lines.scan import Scan

if numbers.simdjson is None:
    pytest.skip("pysimdjson has no wheel for this Python", allow_module_level=True)

ARRAYS = ("per_layer_act_norms", "adam_v_norms")


def single(random):
    """A float32 in its shortest decimals, as a recorder writes them, or any other number."""
    value = np.float32(random.choice([random.lognormvariate(0, 3), random.lognormvariate(0, 15), 0.0, 5.0, -2.5]))
    return random.choice([float(str(value))] * 8 + [0, -0.0, 7, 1e300, 2**53 + 1, 5e-324, 0.1 + 0.2])


def plain(random, number):
    return {"type": "step", "step": number, "loss": single(random), "lr": single(random), ARRAYS[0]: _norms(random, 3)}


def recorded(random, number):
    """A line with all that a recorder writes."""
    loss = np.float32(random.lognormvariate(0, 3))
    state = {lane: f"{random.getrandbits(64):016x}" for lane in ("weights", "rng")}
    spike = random.random() < 0.1
    return {
        **{"type": "step", "t": 1e9 + number / 8, "segment": 0, "step": number},
        **{"loss": float(str(loss)), "loss_bits": float_bits(loss), "lr": 0.001, "grad_norm": single(random)},
        **{ARRAYS[0]: _norms(random, 2), ARRAYS[1]: _norms(random, 3), "batch_hash": f"{random.getrandbits(64):016x}"},
        **{"state": state, "step_per_s": single(random), "spike": spike, "spike_rule": "loss_z" if spike else None},
        "seal": f"{random.getrandbits(128):032x}",
    }


def foreign(random, number):
    """With keys of another writer."""
    return {
        "tokens": number * 512,
        "step": number,
        "type": "step",
        "many": [1, 2.5],
        "loss": single(random),
        "ok": True,
    }


def scalars(random, number):
    return {"step": number, "grad_norm": single(random), "ma": single(random), "type": "step"}


def _norms(random, count):
    return [single(random) for _ in range(count)]


SHAPES = (plain, recorded, foreign, scalars)
SEPARATORS = ((",", ":"), (", ", ": "), (",", ": "))


def regular(random, shape):
    """Lines of one shape, and sometimes others between them."""
    separators = random.choice(SEPARATORS)
    lines = []
    for number in range(1, random.randint(3, 12)):
        if random.random() < 0.08:
            other = {"type": "val", "step": number, "val_loss": 1.5}
            lines.append(random.choice([other, {"type": "meta", "step": number, "segment": 0}]))
        lines.append(shape(random, number))
    return [json.dumps(line, separators=separators).encode() for line in lines]


TOKEN = re.compile(rb'"[^"]*"|-?\d[\d.eE+-]*|true|false|null')
TOKENS = (
    *(b"NaN", b"1e999", b"-0", b"-0.0", b"1e2", b"5.0", b"01", b"1.", b".5", b"+1", b"1e-400", b"null", b"true", b'""'),
    *(b"9" * 30, b"9" * 400, b"9007199254740993", b"18446744073709551616", b"[1]", b"[]", b"{}", b'{"a":1}', b"1 2"),
    *(b"1,2", b"", b" 3 ", b"-9e307", b"-9.0e307", b"-9e307,-9e307", b'"0x7fc00000"', b'"\\u0061"', b'"a:b"', b'"["'),
    *(b"1],[2", b'1,"loss":2', b"1\t", b"2\n", b'"\xc3\xa4"', b'"\xff"', b'"' + b"0" * 16 + b'"', b"1e-5", b"2E+3"),
)
BYTES = (b"\0", b"\xff", b"\n", b'"', b"\\", b",", b":", b"{", b"}", b"[", b"]", b" ", b"e", b"-", b"0", b"\r\n", b"\t")


def another_token(random, lines):
    place = random.randrange(len(lines))
    found = random.choice([*TOKEN.finditer(lines[place])])
    lines[place] = lines[place][: found.start()] + random.choice(TOKENS) + lines[place][found.end() :]


def exchanged_tokens(random, lines):
    """Two of the same line or of two: also a key for a number."""
    for _ in range(2):
        first, second = random.randrange(len(lines)), random.randrange(len(lines))
        one, other = (random.choice([*TOKEN.finditer(lines[place])]) for place in (first, second))
        lines[first] = lines[first][: one.start()] + other[0] + lines[first][one.end() :]


def another_byte(random, lines):
    place = random.randrange(len(lines))
    line, at = lines[place], random.randrange(len(lines[place]) + 1)
    lines[place] = line[:at] + random.choice(BYTES) + line[at + random.randint(0, 1) :]


def moved_number(random, lines):
    """From one array or line to another: in all as many as before."""
    places = [place for place, line in enumerate(lines) if b"]" in line]
    if len(places) > 1:
        one, other = random.sample(places, 2)
        lines[one] = re.sub(rb"(\[[^\]]*),[^,\]]*\]", rb"\1]", lines[one], count=1)
        lines[other] = lines[other][::-1].replace(b"]", b"]5.1,", 1)[::-1]


def moved_byte(random, lines):
    """One byte behind another place: a line as long as before."""
    place = random.randrange(len(lines))
    line = bytearray(lines[place])
    line.insert(random.randrange(len(line)), line.pop(random.randrange(len(line))))
    lines[place] = bytes(line)


def joined_or_cut(random, lines):
    place = random.randrange(len(lines))
    if random.random() < 0.5 and place + 1 < len(lines):
        lines[place : place + 2] = [lines[place] + random.choice([b"", b",", b" "]) + lines[place + 1]]
    else:
        lines[place] = lines[place][: random.randrange(len(lines[place]))]


def twice_or_exchanged(random, lines):
    one, other = random.randrange(len(lines)), random.randrange(len(lines))
    if random.random() < 0.5:
        lines.insert(one, lines[other])
    else:
        lines[one], lines[other] = lines[other], lines[one]


CHANGES = (another_token, exchanged_tokens, another_byte, moved_number, moved_byte, joined_or_cut, twice_or_exchanged)


def changed(random):
    """A file of regular lines after none to two changes."""
    lines = regular(random, random.choice(SHAPES))
    for _ in range(random.choice([0, 1, 1, 1, 2])):
        random.choice(CHANGES)(random, lines)
        if not (lines := [line for line in lines if TOKEN.search(line)]):
            return b""
    return b"\n".join(lines) + random.choice([b"\n", b"\n", b"", b"\r\n"])


def compared(path, random):
    """Whether lines were read at once, and whether there was an error."""
    path.write_bytes(changed(random))
    found, expected = outcome(path, Scan), outcome(path, Scan.strictly)
    assert found == expected, path.read_bytes()
    return isinstance(found, str)


def test_any_changed_lines_read_as_the_strict_reader_reads_them(tmp_path, monkeypatch):
    said = {"at once": 0, "in part": 0, "refused": 0}
    real = AlikeReader.read

    def read(self, body):
        found = real(self, body)
        said["in part" if found.rest else "at once"] += 1
        return found

    monkeypatch.setattr(AlikeReader, "read", read)

    @settings(max_examples=1500, deadline=None, derandomize=True, database=None)
    @given(st.integers(0, 2**40), st.sampled_from([400, 1 << 20]))
    def check(seed, block):
        monkeypatch.setattr(scan, "BLOCK", block)
        said["refused"] += compared(tmp_path / "telemetry.jsonl", Random(seed))

    check()
    assert min(said.values()) > 100  # all happened often


@pytest.mark.parametrize("shape", SHAPES)
def test_lines_of_one_form_are_read_at_once(tmp_path, monkeypatch, shape):
    lines = [shape(Random(number), number) for number in range(1, 200)]
    for line in lines:
        line |= {"spike": False, "spike_rule": None} if "spike" in line else {}
    path = tmp_path / "telemetry.jsonl"
    path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    expected = outcome(path, Scan.strictly)

    def never(*arguments):
        raise AssertionError("read otherwise")

    monkeypatch.setattr("workbench.lines.quick.QuickReader.read", never)
    assert outcome(path, Scan) == expected
    assert expected[2]["rows"] == 199


def test_lines_of_another_form_stand_where_they_stood(tmp_path, monkeypatch):
    """Spikes, validation and a resume among lines of one form: only they are read otherwise."""
    lines = [recorded(Random(number), number) for number in range(1, 100)]
    for number, line in enumerate(lines, 1):
        spiked = number in (1, 40, 41, 99)
        line |= {"spike": spiked, "spike_rule": "loss_z" if spiked else None}
    lines.insert(60, {"type": "val", "step": 60, "val_loss": 1.5})
    lines.insert(0, {"type": "meta", "step": 0})
    path = tmp_path / "telemetry.jsonl"
    path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    expected, taken = outcome(path, Scan.strictly), []
    real = alike.AlikeReader.read

    def read(self, body):
        taken.append(real(self, body))
        return taken[-1]

    monkeypatch.setattr(AlikeReader, "read", read)
    assert outcome(path, Scan) == expected
    (found,) = taken
    assert len(found.starts) == 95 and len(found.rest_starts) == found.rest.count(b"\n") == 6


@pytest.mark.parametrize("value", ["1e2", "5.0", "-0", "9007199254740992", "0", " 3", "1E0"])
def test_what_is_no_step_number_is_not_taken_for_one(value):
    lines = [f'{{"type":"step","step":{text},"loss":1.5}}\n' for text in ("1", value, "7")]
    with pytest.raises(Odd):
        alike.read(alike.Form(lines[0].encode()), "".join(lines).encode())


def test_a_number_too_many_is_not_one_too_few_elsewhere():
    start = '{"type":"step","step":%d,"adam_m_norms":[%s],"adam_v_norms":[%s]}\n'
    good = [start % (step, "1,2", "3,4") for step in (1, 2)]
    form = alike.Form(good[0].encode())
    assert alike.read(form, "".join(good).encode())[1]["adam_v_norms"].tolist() == [[3, 4]] * 2
    for one, other in (("1,2,3", "4"), ("1", "2,3,4"), ("1,2,-9e307", "3")):
        with pytest.raises(Odd):
            alike.read(form, (good[0] + start % (2, one, other)).encode())
    with pytest.raises(Odd):  # in two lines
        alike.read(form, (start % (1, "1,2", "3") + start % (2, "1,2", "3,4,5")).encode())


@pytest.mark.parametrize("value", ["[2.5]", "[[2.5]]", "{}", "null", "2.5,2.5", "", '"2.5"', "true", "2.5]", "1e999"])
def test_what_is_no_number_is_not_taken_for_one(value):
    lines = [f'{{"type":"step","step":{step},"loss":{text}}}\n' for step, text in enumerate(("1.5", value, "7"), 1)]
    with pytest.raises(Odd):
        alike.read(alike.Form(lines[0].encode()), "".join(lines).encode())


@pytest.mark.parametrize("text", [b"ab\x01d", b"a\\nd", b"ab\xe4d", b'ab"d', b"abc", b"abcd5", b"a\nbd", b"ab\x7fd"])
def test_a_text_that_has_to_be_decoded_or_has_another_length_is_left_to_others(text):
    lines = [b'{"type":"step","step":%d,"batch_hash":"%s","loss":1.5}\n' % pair for pair in ((1, b"ab[d"), (2, text))]
    form = alike.Form(lines[0])
    assert alike.read(form, lines[0] * 2)[1]["loss"].tolist() == [1.5, 1.5]
    with pytest.raises(Odd):
        alike.read(form, b"".join(lines))


def test_a_file_whose_lines_all_differ_is_not_tried_for_ever(monkeypatch):
    tried = []
    monkeypatch.setattr(alike, "_split", lambda form, body, mixed: tried.append(len(body)) or _odd())
    reader = AlikeReader()
    for number in range(1, 50):
        body = f'{{"type":"step","step":{number},"key_{number}":1}}\n'.encode()
        with pytest.raises(Odd):
            reader.read(body)
    assert len(tried) == alike._HOPE


def _odd():
    raise Odd
