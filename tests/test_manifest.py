"""The manifest: strict on reading, atomic on writing, and the way that leads through several segments."""

import json

import msgspec
import pytest
import runs

from workbench import manifest as manifests
from workbench.errors import RunError


def segment(number, start=0, parent=None):
    return manifests.Segment(segment=number, start=start, parent=parent, t=0.0, environment={})


@pytest.fixture
def run(tmp_path):
    return runs.recorded(tmp_path)


@pytest.fixture
def manifest():
    return manifests.read(runs.recorded_read_only())


def refused(run, *words):
    before = runs.digest(run)
    with pytest.raises(RunError) as caught:
        manifests.read(run)
    assert [word for word in (str(run), *words) if word not in str(caught.value)] == [], str(caught.value)
    assert runs.digest(run) == before


def test_round_trip(tmp_path, manifest):
    manifests.write(manifest, tmp_path)
    assert manifests.read(tmp_path) == manifest
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]  # no temporary file is left
    runs.strict((tmp_path / "run.json").read_bytes())


def test_it_says_what_a_replay_needs(manifest):
    assert manifest.rebuild["kind"] == "trainer" and manifest.rebuild["config"]["steps"] == runs.STEPS
    assert manifest.options == {"clip": 1.0, "accumulate": 1, "compile": True, "deterministic": True}
    assert manifest.optimizer["class"] == "AdamW" and manifest.optimizer["bias_correction"] is True
    (data,) = manifest.data
    assert data.path == str(runs.corpus()) and data.bytes == runs.corpus().stat().st_size
    assert manifest.layers[0] == "embedding" and set(manifest.layers) == set(manifest.owned)
    assert {p.path for p in manifest.parameters} == {path for paths in manifest.owned.values() for path in paths}
    assert manifest.segments[0].environment["mlx"] and manifest.save_every == runs.SAVE_EVERY


def test_a_folder_that_does_not_exist_and_one_that_is_no_run(tmp_path):
    with pytest.raises(RunError, match="nowhere does not exist; expected the folder that a run was recorded in"):
        manifests.read(tmp_path / "nowhere")
    with pytest.raises(RunError, match=r"is not a run folder \(no run.json in it\)"):
        manifests.read(tmp_path)
    (tmp_path / "run.json").mkdir()
    with pytest.raises(RunError, match="can't be read"):
        manifests.read(tmp_path)


@pytest.mark.parametrize("keep", [0, 1, 100, -1])
def test_a_truncated_manifest_is_damaged(run, keep):
    path = run / "run.json"
    path.write_bytes(path.read_bytes()[:keep] if keep >= 0 else path.read_bytes().rstrip()[:-1])
    refused(run, "damaged")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[]", ("damaged", "object")),
        (b"null", ("damaged",)),
        (b"{}", ("damaged", "format_version")),
        (b'{"format_version": "1"}', ("damaged", "format_version")),
        (b'{"format_version": 1}', ("damaged", "run")),
        (b'{"format_version": 2, "something": "new"}', ("format_version 2", "reads 1")),
        (b"\xff\xfe{", ("damaged",)),
        (b'{"a":' * 100_000, ("damaged",)),
    ],
)
def test_what_is_no_manifest(run, content, words):
    (run / "run.json").write_bytes(content)
    refused(run, *words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.update(colour="red"), ("damaged", "colour")),
        (lambda d: d["data"][0].update(url="x"), ("damaged", "url")),
        (lambda d: d.pop("layers"), ("damaged", "layers")),
        (lambda d: d.update(created="today"), ("damaged", "$.created")),
        (lambda d: d.update(segments=[]), ("damaged", "no segment")),
        (lambda d: d["segments"][0].update(parent=0), ("damaged", "segment 0")),
        (lambda d: d["segments"][0].update(segment=1), ("damaged", "segment 0")),
        (lambda d: d["segments"][0].update(start=-1), ("damaged", "segment 0")),
        (lambda d: d["owned"].pop("embedding"), ("damaged", "'embedding'", "owned")),
        (lambda d: d["layers"].append("ghost"), ("damaged", "'ghost'", "layers")),
        (lambda d: d.update(spikes={"height": 3}), ("damaged", "spikes", "height")),
        (lambda d: d.update(spikes={"window": 1}), ("damaged", "spikes", "window")),
    ],
)
def test_damage_is_named(run, change, words):
    runs.edit_json(run / "run.json", change)
    refused(run, *words)


@pytest.mark.parametrize("parent", [None, -1, 1, 2])
def test_a_segment_must_descend_from_an_earlier_one(run, parent):
    """A segment that were its own ancestor would have no beginning."""
    entry = {"segment": 1, "start": 4, "parent": parent, "t": 0.0, "environment": {}}
    runs.edit_json(run / "run.json", lambda d: d["segments"].append(entry))
    refused(run, "damaged", "segment 1")


def test_a_failed_write_leaves_the_old_manifest(run, manifest, monkeypatch):
    before = runs.digest(run)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("workbench.files.os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        manifests.write(msgspec.structs.replace(manifest, run="another"), run)
    assert runs.digest(run) == before


# -------------------------------------------------------------------------------------------------------------- lineage

# segment 0: steps 1 …; 1 starts from step 8 of 0; 2 from step 10 of 1; 3 from step 4 of 0
BRANCHES = [segment(0), segment(1, 8, 0), segment(2, 10, 1), segment(3, 4, 0)]


@pytest.mark.parametrize(
    ("to", "expected"),
    [
        (0, {0: 0, 1: 0, 8: 0, 9: 0, 99: 0}),
        (1, {0: 0, 8: 0, 9: 1, 10: 1, 99: 1}),
        (2, {0: 0, 8: 0, 9: 1, 10: 1, 11: 2, 99: 2}),
        (3, {0: 0, 4: 0, 5: 3, 9: 3}),
    ],
)
def test_which_segment_performed_a_step_on_the_way(manifest, to, expected):
    branched = msgspec.structs.replace(manifest, segments=BRANCHES)
    assert {step: branched.lineage(to, step) for step in expected} == expected


@pytest.mark.parametrize("number", [-1, 4])
def test_a_segment_that_does_not_exist(manifest, number):
    branched = msgspec.structs.replace(manifest, segments=BRANCHES)
    with pytest.raises(RunError, match=f"segment {number} does not exist; the run has segments 0 to 3"):
        branched.lineage(number, 1)


def test_ways_agree_with_lineage(manifest):
    """The stretches cover every step of the way once, each with the segment that performed it."""
    branched = msgspec.structs.replace(manifest, segments=[*BRANCHES, segment(4, 8, 2)])  # 4 goes back before 2 began
    for to in range(5):
        stretches = branched.ways(to)
        for step in range(1, 20):
            holding = [number for number, low, high in stretches if low < step <= high]
            assert holding == [branched.lineage(to, step)], (to, step, stretches)


def test_segments_of_a_resumed_run(tmp_path):
    run = runs.segmented(tmp_path)
    first, second = manifests.read(run).segments
    assert (first.parent, first.start) == (None, 0)
    assert (second.segment, second.parent, second.start) == (1, 0, 8)
    assert json.loads((run / "run.json").read_text())["format_version"] == 1
