"""Damaged files: the right value or a sentence that names file and place, and never a traceback, a hang or a gigabyte.

The long version is `python tests/fuzz.py`.
"""

import json
import os
import random
import shutil
import tracemalloc

import fuzz
import mlx.core as mx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench import manifest, snapshot, telemetry, trace, verdict
from workbench.checkpoints import checkpoint_reader
from workbench.errors import CheckpointError, RunError, TelemetryError, WorkbenchError
from workbench.interventions import whatif
from workbench.untrusted import decode

INPUTS = 150  # a reader


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A run with every kind of file in it, and a small checkpoint."""
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield fuzz.prepared(tmp_path_factory.mktemp("prepared"))
    mx.set_default_device(before)


@pytest.fixture
def run(prepared, tmp_path):
    return shutil.copytree(prepared[0], tmp_path / "run")


@pytest.fixture
def checkpoint(prepared, tmp_path):
    return shutil.copytree(prepared[1], tmp_path / "checkpoint")


# --------------------------------------------------------------------------------------------------------- every byte


def test_every_flipped_byte_of_a_checkpoint_is_noticed(checkpoint):
    """One bit of each byte, the bit in turn; `t`, `run` and the digests of the commit record are bytes too."""
    state, flipped = checkpoint_reader.read(checkpoint, 4, 0, "r"), 0
    for path in sorted(checkpoint.iterdir()):
        content = path.read_bytes()
        for at in range(len(content)):
            changed = bytearray(content)
            changed[at] ^= 1 << at % 8
            path.write_bytes(changed)
            with pytest.raises(CheckpointError, match="00000004"):
                checkpoint_reader.read(checkpoint, 4, 0, "r")
            flipped += 1
        path.write_bytes(content)
    assert flipped > 2500
    assert snapshot.first_difference(checkpoint_reader.read(checkpoint, 4, 0, "r"), state) is None


def test_a_checkpoint_cut_off_anywhere_is_noticed(checkpoint):
    for path in sorted(checkpoint.iterdir()):
        content = path.read_bytes()
        for length in range(0, len(content.rstrip()), 11):
            path.write_bytes(content[:length])
            with pytest.raises(CheckpointError, match="00000004"):
                checkpoint_reader.read(checkpoint, 4, 0)
        path.write_bytes(content)


# ----------------------------------------------------------------------------------------------------------- fuzzing


def test_no_input_brings_a_reader_down(prepared, tmp_path):
    found = {}
    for reader in fuzz.readers(tmp_path, *prepared):
        figures = fuzz.Figures()
        inputs = INPUTS // 10 if reader.slow else INPUTS
        fuzz.fuzz(reader, inputs, random.Random(reader.name), figures)
        assert figures.inputs == inputs and (figures.refused > inputs / 3 or reader.slow)
        found |= {f"{reader.name}: {what}": content for what, content in figures.findings.items()}
    assert found == {}


def test_the_fuzzer_finds_what_a_careless_reader_lets_pass(prepared, tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "decode", lambda content, kind: msgspec.json.decode(content, type=kind))
    reader = fuzz.readers(tmp_path, *prepared)[0]
    figures = fuzz.Figures()
    fuzz.fuzz(reader, 400, random.Random(0), figures)
    assert any("Twice" in what for what in figures.findings)


# ---------------------------------------------------------------------------------------------------- one key, twice

READERS = {
    "run.json": (lambda run: manifest.read(run), RunError),
    "traces/00000006.json": (lambda run: trace.read(run / "traces/00000006.json"), WorkbenchError),
    "traces/00000006.autopsy.json": (lambda run: verdict.read(run / "traces/00000006.autopsy.json"), WorkbenchError),
    "traces/00000006.whatif-lr=0.5x.json": (
        lambda run: whatif.read(run / "traces/00000006.whatif-lr=0.5x.json"),
        WorkbenchError,
    ),
    "checkpoints/00000004.json": (lambda run: checkpoint_reader.read(run / "checkpoints", 4, 0), CheckpointError),
    "checkpoints/00000004.rng": (lambda run: checkpoint_reader.read(run / "checkpoints", 4, 0), CheckpointError),
    "checkpoints/00000004.cursor": (lambda run: checkpoint_reader.read(run / "checkpoints", 4, 0), CheckpointError),
    "telemetry.jsonl": (lambda run: telemetry.read(run / "telemetry.jsonl"), TelemetryError),
}


def repaired(run):
    """The commit record of checkpoint 4 agrees with its files, as if damage and digests came from one hand."""
    import helpers

    helpers.repair_commit(run, "00000004")


@pytest.mark.parametrize("name", READERS)
def test_a_key_that_stands_twice_is_refused_by_name(run, name):
    read, kind = READERS[name]
    path = run / name
    content = path.read_bytes()
    key = json.loads(content.splitlines()[0] if name == "telemetry.jsonl" else content).__iter__().__next__()
    head, _, rest = content.partition(b"{")
    path.write_bytes(head + b'{"' + key.encode() + b'": 1, ' + rest)
    if ".rng" in name or ".cursor" in name:
        repaired(run)
    with pytest.raises(kind) as caught:
        read(run)
    assert key in str(caught.value) and path.stem.partition(".")[0] in str(caught.value)


def test_a_tensor_that_stands_twice_is_refused_by_name(run):
    path = run / "checkpoints/00000004.safetensors"
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + size].rstrip()
    name, entry = next((n, e) for n, e in json.loads(header).items() if n != "__metadata__")
    twice = header[:-1] + f',"{name}":{json.dumps(entry)}}}'.encode()
    path.write_bytes(len(twice).to_bytes(8, "little") + twice + content[8 + size :])
    repaired(run)
    with pytest.raises(CheckpointError, match=f"can't be decoded: the key '{name}' stands twice"):
        checkpoint_reader.read(run / "checkpoints", 4, 0)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


@given(values)
def test_json_is_read_as_the_standard_library_reads_it(value):
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False, indent=2)):
        assert decode(text.encode(), object) == json.loads(text)


@given(st.dictionaries(st.text(max_size=5), values, min_size=1, max_size=4), st.data())
def test_a_repeated_key_is_found_wherever_it_stands_and_however_it_is_spelled(value, data):
    key = data.draw(st.sampled_from(sorted(value)))
    spelled = data.draw(st.sampled_from([json.dumps(key), json.dumps(key, ensure_ascii=False), _escaped(key)]))
    space = data.draw(st.sampled_from(["", " ", "\n\t"]))
    text = json.dumps(value)[:-1] + f", {spelled}{space}: 0}}"
    nested = data.draw(st.sampled_from(["{}", "[{}]", '{{"other": {}}}', '[1, {{"a": [{}]}}]'])).format(text)
    with pytest.raises(ValueError, match="stands twice in one object"):
        decode(nested.encode(), object)


def _escaped(key):
    units = key.encode("utf-16-be")
    return '"' + "".join(f"\\u{units[i] << 8 | units[i + 1]:04x}" for i in range(0, len(units), 2)) + '"'


# ------------------------------------------------------------------------------------------------ sizes and encodings


@pytest.mark.parametrize(
    "token", ["NaN", "Infinity", "1e999", "[" * 10**5, '{"a":' * 10**5, "9" * 5000, '"\\ud800"', "tru"]
)
@pytest.mark.parametrize("name", ["run.json", "checkpoints/00000004.cursor", "telemetry.jsonl", "traces/00000006.json"])
def test_tokens_that_are_no_json_or_too_much_of_it(run, name, token):
    read, kind = READERS[name]
    path = run / name
    first, _, rest = path.read_bytes().partition(b":")
    path.write_bytes(first + b": " + token.encode() + b", " + rest)
    if ".cursor" in name:
        repaired(run)
    with pytest.raises(kind, match=path.stem.partition(".")[0]):
        read(run)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-8-sig", "latin-1"])
@pytest.mark.parametrize("name", ["run.json", "checkpoints/00000004.json", "traces/00000006.json", "telemetry.jsonl"])
def test_other_encodings(run, name, encoding):
    read, kind = READERS[name]
    path = run / name
    text = path.read_text()
    path.write_bytes(
        text.replace('"run"', '"rün"', 1).encode(encoding) if encoding == "latin-1" else text.encode(encoding)
    )
    with pytest.raises(kind, match=path.stem.partition(".")[0]):
        read(run)


@pytest.mark.parametrize("name", ["run.json", "traces/00000006.json", "checkpoints/00000004.json"])
def test_a_file_of_a_terabyte_is_refused_unread(run, name):
    """A sparse file takes no room on the disk, and would take all memory."""
    read, kind = READERS[name]
    os.truncate(run / name, 1 << 40)
    tracemalloc.start()
    try:
        with pytest.raises(kind, match=f"{1 << 40} bytes"):
            read(run)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("suffix", ["safetensors", "optimizer.safetensors", "rng", "cursor"])
def test_a_part_of_a_checkpoint_that_has_grown_to_a_terabyte(run, suffix):
    os.truncate(run / f"checkpoints/00000004.{suffix}", 1 << 40)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=f"{1 << 40} bytes, expected"):
            checkpoint_reader.read(run / "checkpoints", 4, 0)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_whole_last_line_with_half_a_surrogate_pair_is_no_unfinished_one(run):
    """msgspec calls both "truncated"."""
    path = run / "telemetry.jsonl"
    path.write_bytes(path.read_bytes() + b'{"type": "step", "step": 13, "spike_rule": "\\ud800"}')
    with pytest.raises(TelemetryError, match=r"line \d+: not a telemetry line"):
        telemetry.read(path)


def test_a_line_without_end(run, monkeypatch):
    from workbench.lines import scan, strict

    for module in (scan, strict):
        monkeypatch.setattr(module, "LINE", 1 << 16)
    with open(run / "telemetry.jsonl", "ab") as file:
        file.write(b'{"type": "step", "step": 13, "note": "' + b"x" * (3 << 20) + b'"}\n{"type": "done"}\n')
    with pytest.raises(TelemetryError, match=r"line \d+: .*65536 bytes long"):
        telemetry.read(run / "telemetry.jsonl")


@pytest.mark.parametrize("name", ["run.json", "telemetry.jsonl", "traces/00000006.json", "checkpoints/00000004.cursor"])
def test_a_pipe_in_place_of_a_file_keeps_nobody_waiting(run, name):
    read, kind = READERS[name]
    (run / name).unlink()
    os.mkfifo(run / name)
    with pytest.raises(kind, match="no regular file"):
        read(run)


HEADERS = {
    "an offset before the data": (lambda e: e.update(data_offsets=[-8, 4]), "Expected `int` >= 0"),
    "an offset behind the data": (lambda e: e.update(data_offsets=[0, 2**62]), "expected 32 bytes from"),
    "ends before it starts": (lambda e: e.update(data_offsets=[8, 0]), "expected 32 bytes from"),
    "a negative size": (lambda e: e.update(shape=[-1]), "Expected `int` >= 0"),
    "a size beyond any": (lambda e: e.update(shape=[2**31]), "Expected `int` <"),
    "sizes whose product is beyond any": (lambda e: e.update(shape=[2**30] * 40), "expected .* bytes from"),
    "a size of zero": (lambda e: e.update(shape=[0, 8]), "expected 0 bytes from"),
    "a field that is not of the format": (lambda e: e.update(more=1), "unknown field"),
}


@pytest.mark.parametrize("what", HEADERS)
def test_a_header_of_tensors_that_do_not_fill_the_data_once(checkpoint, what):
    change, sentence = HEADERS[what]
    path = checkpoint / "00000004.safetensors"
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    change(header["layers.0.bias"])
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])
    (checkpoint / "checkpoints").symlink_to(checkpoint)
    repaired(checkpoint)
    with pytest.raises(CheckpointError, match=sentence):
        checkpoint_reader.read(checkpoint, 4, 0)


@pytest.mark.parametrize("size", [0, 1, 2**20, 2**31, 2**63, 2**64 - 1])
def test_a_header_of_another_length(checkpoint, size):
    path = checkpoint / "00000004.safetensors"
    path.write_bytes(size.to_bytes(8, "little") + path.read_bytes()[8:])
    (checkpoint / "checkpoints").symlink_to(checkpoint)
    repaired(checkpoint)
    with pytest.raises(CheckpointError, match="can't be decoded"):
        checkpoint_reader.read(checkpoint, 4, 0)


def test_bytes_that_belong_to_no_tensor(checkpoint):
    path = checkpoint / "00000004.safetensors"
    path.write_bytes(path.read_bytes() + b"hidden")
    (checkpoint / "checkpoints").symlink_to(checkpoint)
    repaired(checkpoint)
    with pytest.raises(CheckpointError, match=r"its tensors end at byte \d+ of \d+"):
        checkpoint_reader.read(checkpoint, 4, 0)


def test_a_commit_record_without_a_seal_is_one_from_before(checkpoint):
    state = checkpoint_reader.read(checkpoint, 4, 0)
    path = checkpoint / "00000004.json"
    record = json.loads(path.read_text())
    assert len(record.pop("seal")) == 64
    path.write_text(json.dumps(record))
    assert snapshot.first_difference(checkpoint_reader.read(checkpoint, 4, 0), state) is None


@pytest.mark.parametrize(
    ("path", "value"),
    [("model.depth", 10**6), ("model.width", 2**40), ("model.vocabulary", 10**12), ("model.mlp", 10**9)],
)
def test_a_model_of_another_size_than_the_manifest_lists_is_not_built(run, path, value):
    import helpers

    from workbench.run import Run

    part, name = path.split(".")
    helpers.edit_json(run / "run.json", lambda document: document["rebuild"]["config"][part].update({name: value}))
    with pytest.raises(WorkbenchError, match="config of this run is damaged: it describes a model of"):
        Run(run).replay(6, fresh_process=False, with_probe=False)
