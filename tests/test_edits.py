"""`workbench verify` notices what was edited in a run: a share of what `edits.py` tries, and each kind by name."""

import json
import random
import shutil

import edits
import helpers
import pytest
import runs

from workbench.run import open_run

SHARE = 0.015  # of the edits of a run, drawn by chance; `python tests/edits.py` tries all


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("edits")


@pytest.fixture(scope="module")
def of(folder):
    made = {}

    def get(maker):
        if maker not in made:
            (made[maker],) = edits.recorded(folder, [maker])
        return made[maker]

    return get


@pytest.fixture
def copied(of, tmp_path):
    return lambda maker: shutil.copytree(of(maker), tmp_path / maker.__name__)


def said(path):
    """The mismatches: kind, what and detail, in one text each."""
    checks = open_run(path).verify().checks
    return [f"{one.kind} {one.what}: {one.detail}" for one in checks if one.verdict == "mismatch"]


@pytest.mark.parametrize("maker", [one for one in edits.RUNS if one is not edits.of_ranks])
def test_every_edit_is_noticed(of, folder, maker):
    run, draw, tried = of(maker), random.Random(maker.__name__), 0
    other = of(edits.plain) if maker is not edits.plain else of(edits.resumed)
    for file, what, noticed in edits.tried(run, [other], lambda file, what: draw.random() < SHARE):
        tried += 1
        assert noticed or edits.free(file, what), f"{file}: {what} passes"
    assert tried > 10


def test_an_edit_that_changes_nothing_is_none(of):
    content = (of(edits.plain) / "run.json").read_bytes()
    changed = [json.loads(value) for _, value in edits.of_json(content)]
    assert len(changed) > 200 and json.loads(content) not in changed


# ------------------------------------------------------------------------------------------------------------ the lines


@pytest.mark.parametrize("name", ["t", "peak_rss_mb", "val_loss", "adam_v_norms", "lr"])
def test_a_field_of_a_line_that_was_changed_is_named_with_its_line(copied, name):
    path = copied(edits.plain)
    lines = (path / "telemetry.jsonl").read_text().splitlines()
    number = next(n for n, line in enumerate(lines) if f'"{name}":' in line and n > 2)
    document = json.loads(lines[number])
    document[name] = [2 * one for one in document[name]] if isinstance(document[name], list) else document[name] * 2
    lines[number] = json.dumps(document, separators=(",", ":"))
    (path / "telemetry.jsonl").write_text("\n".join(lines) + "\n")
    (found,) = said(path)
    assert found.startswith(
        f"telemetry seals: telemetry.jsonl is not what was written: line {number + 1} ({document['type']} "
    )
    assert runs.here("verify", path).code == 1


def test_a_changed_manifest_is_noticed_and_what_a_crash_leaves_is_not(copied):
    path = copied(edits.plain)
    document = json.loads((path / "run.json").read_text())
    document["options"]["clip"] = 1.0
    (path / "run.json").write_text(json.dumps(document))
    assert said(path) == [
        "manifest run.json: run.json was changed since the process that wrote the last lines began, which logged its "
        "SHA-256"
    ]
    document["options"]["clip"] = None
    document["segments"].append(document["segments"][0] | {"segment": 1, "start": 7, "parent": 0})
    (path / "run.json").write_text(json.dumps(document))
    assert said(path) == []


def test_who_moves_the_corpus_may_say_so(copied, tmp_path):
    path = copied(edits.trained)
    corpus = shutil.copy(runs.corpus(), tmp_path / "moved.txt")
    document = json.loads((path / "run.json").read_text())
    document["data"][0]["path"] = str(corpus)
    (path / "run.json").write_text(json.dumps(document))
    assert open_run(path).verify().whole
    document["data"][0]["bytes"] += 1
    (path / "run.json").write_text(json.dumps(document))
    assert [one.partition(":")[0] for one in said(path)] == [f"data {corpus}", "manifest run.json"]


@pytest.mark.parametrize("segment", [3, -1])
def test_a_start_of_a_segment_that_the_manifest_lacks_is_said_without_seals_too(copied, segment):
    path = copied(edits.resumed)
    helpers.edit_line(path, 3, lambda line: line.update(segment=segment), "meta")
    assert f"telemetry telemetry.jsonl: a line says that segment {segment} starts, which the manifest lacks" in said(
        path
    )


@pytest.mark.parametrize("lane", ["weights", "rng"])
def test_a_fingerprint_that_is_gone_is_noticed_without_seals_too(copied, lane):
    path = copied(edits.plain)
    helpers.edit_line(path, 4, lambda line: line["state"].pop(lane))
    assert said(path) == [
        f"telemetry state.{lane}: its fingerprint is missing from the line of step 4, and run.json says that each has "
        "one, xxh3_128"
    ]
    helpers.edit_line(path, 0, lambda line: line["state"].pop(lane), "meta")
    assert f"lacks the fingerprint of {lane}" in said(path)[1]


def test_no_line_has_a_fingerprint(copied):
    path = copied(edits.plain)
    for step in range(1, 8):
        helpers.edit_line(path, step, lambda line: line.pop("state"))
    assert "missing from the line of steps 1, 2, 3, 4, 5 and 2 more" in said(path)[0]


@pytest.mark.parametrize("left", [b'{"type":"step","st', b'{"type":"meta"}', b"\0\0\0", b'{"type":"st\n{"ty'])
def test_what_a_crash_left_of_a_line_is_covered_by_the_next_seal(of, tmp_path, left):
    path = shutil.copytree(of(edits.plain), tmp_path / "run")
    content = (path / "telemetry.jsonl").read_bytes()
    (path / "telemetry.jsonl").write_bytes(
        content.removesuffix(b"\n") if left == b'{"type":"meta"}' else content + left
    )
    edits.own(path, 9, resume=True)
    assert open_run(path).verify().whole
    resumed = (path / "telemetry.jsonl").read_bytes()
    changed = resumed.replace(b"\n" + left + b"\n", b"\n" + left[:-1] + b"?\n")
    if changed != resumed:
        (path / "telemetry.jsonl").write_bytes(changed)
        assert any("telemetry" in one for one in said(path))


# -------------------------------------------------------------------------------------------------------------- the end


def test_the_end_that_was_cut_off_telemetry_and_checkpoints_is_remembered(copied):
    path = copied(edits.plain)
    lines = (path / "telemetry.jsonl").read_bytes().splitlines(keepends=True)
    (path / "telemetry.jsonl").write_bytes(b"".join(line for line in lines if json.loads(line)["step"] <= 4))
    for step in (6, 7):
        for file in (path / "checkpoints").glob(f"{step:08d}.*"):
            file.unlink()
    found, missing = said(path)
    assert missing.startswith(
        "checkpoint at the end: checkpoints 6, 7 are missing, and run.json says that the run had 4 "
    )
    assert found.startswith("telemetry end: run.json says that the run was done at step 7, and the last line is not ")


def test_a_resume_whose_lines_are_all_gone_is_said(of, tmp_path):
    path = shutil.copytree(of(edits.plain), tmp_path / "run")
    before = (path / "telemetry.jsonl").read_bytes()
    assert open_run(path).manifest.end.step == 7
    with (
        pytest.raises(KeyboardInterrupt),
        edits.Recorder(
            path, *helpers.parts(helpers.experiment()), compile=False, save_every=3, resume=True
        ) as recorder,
    ):
        for batch in recorder.batches(9):
            recorder.step(batch)
        raise KeyboardInterrupt
    assert open_run(path).verify().exact and "did not end" in open_run(path).verify().sentence()
    (path / "telemetry.jsonl").write_bytes(before)
    for file in (path / "checkpoints").glob("00000009.*"):
        file.unlink()
    found = open_run(path).verify()
    assert found.exact and not found.whole and "run.json does not: a process had begun to go on" in found.sentence()


# ------------------------------------------------------------------------------------------------------------ files


def test_a_checkpoint_that_was_there_when_the_run_was_done(copied):
    path = copied(edits.rolled_back)
    extra = next((step, segment) for step, segment in open_run(path).checkpoints if step % 4)
    for file in (path / "checkpoints").glob(f"{extra[0]:08d}" + (f".s{extra[1]}" if extra[1] else "") + ".*"):
        file.unlink()
    assert any(one.startswith("checkpoint at the end: ") for one in said(path))


def test_a_commit_record_without_its_seal(copied):
    path = copied(edits.plain)
    record = json.loads((path / "checkpoints" / "00000003.json").read_text())
    del record["seal"]
    (path / "checkpoints" / "00000003.json").write_text(json.dumps(record))
    assert said(path) == ["checkpoint 00000003: its commit record 00000003.json has lost its own digest, the seal"]


def test_the_header_of_a_shared_file(copied):
    path = copied(edits.deduplicated)
    file = sorted((path / "checkpoints").glob("shared-*"))[0]
    content = file.read_bytes()
    file.write_bytes(content.replace(b'{"format":"mlx"}', b'{"format":"MLX"}', 1))
    (found,) = said(path)
    assert found.startswith(f"checkpoint {file.name}: it was changed: its SHA-256 is ")


# ------------------------------------------------------------------------------------------------ runs from before


def old(path):
    """The run as it would have been recorded before there were seals."""
    lines = [json.loads(line) for line in (path / "telemetry.jsonl").read_text().splitlines()]
    for line in lines:
        line.pop("seal"), line.pop("manifest", None)
    (path / "telemetry.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    document = json.loads((path / "run.json").read_text())
    for name in ("sealed", "end", "numbers"):
        del document[name]
    (path / "run.json").write_text(json.dumps(document))
    for file in (path / "checkpoints").glob("????????*.json"):
        record = json.loads(file.read_text())
        record["seal"] = None
        file.write_text(json.dumps(record))
    return path


@pytest.mark.parametrize("maker", [edits.plain, edits.resumed, edits.rolled_back, edits.storing])
def test_a_run_from_before_is_whole_and_says_that_edits_are_not_seen(copied, maker):
    found = open_run(old(copied(maker))).verify()
    assert found.whole and not found.sealed
    assert "an edit of these is not seen" in " ".join(found.limits())


def test_a_run_from_before_that_was_gone_on_with_is_whole_and_sealed_from_there(copied):
    path = old(copied(edits.plain))
    edits.own(path, 9, resume=True)
    found = open_run(path).verify()
    assert found.whole and found.sealed and not open_run(path).manifest.sealed
    lines = (path / "telemetry.jsonl").read_text().splitlines()
    document = json.loads(lines[-2])
    document["t"] += 1
    (path / "telemetry.jsonl").write_text("\n".join([*lines[:-2], json.dumps(document), lines[-1]]) + "\n")
    assert [one.split(":")[0] for one in said(path)] == ["telemetry seals"]
