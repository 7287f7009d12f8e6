"""Every small edit of a recorded run, one at a time: does `workbench verify` notice it? Long version of `test_edits`.

    python tests/edits.py

For each file of several runs (plain; resumed in another segment and in the same; rolled back; with deduplicated
tensors; with stored batches; of the trainer; of two ranks): each field of its JSON dropped, given another type, and
changed by one; each line of the telemetry dropped, doubled, swapped with the next, and the file cut there; bytes
flipped, cut off and added; the file removed, swapped with another, and replaced by that of another run; and the end cut
off telemetry and checkpoints alike. Noticed is what makes `verify` say "mismatch", or that the run is not whole, or
refuse to open it. What may pass stands in `FREE`, with the reason.
"""

import argparse
import json
import os
import random
import re
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path

import helpers
import numpy as np
import runs
import test_dedup
from helpers import experiment, mse, parts

from workbench.errors import WorkbenchError
from workbench.record import Recorder
from workbench.recovery import Recovery
from workbench.run import Run

# (file, edit), two patterns: why such an edit may pass.
FREE = {
    (r"run\.json", r"data\.\d+\.path .*"): "where a data file lies; its size and SHA-256 say whether it is that one",
    (r"traces/.*", r".*"): "what a replay measured is no part of the record: the same replay makes it again",
    (r"planted\.json", r".*"): "labels of planted faults, which no replay reads",
    (r"batches/.*", r"header .*"): "the spelling of a header, and metadata that nobody reads; the contents are hashed",
}


def free(file, edit):
    """Why an edit may pass; None: it must be noticed."""
    return next((why for (a, b), why in FREE.items() if re.fullmatch(a, file) and re.fullmatch(b, edit)), None)


# ----------------------------------------------------------------------------------------------------------------- runs


class Wild(helpers.Points):
    """A batch a thousand times as large, once."""

    def __next__(self):
        number = self.number
        x, y = super().__next__()
        return (x * 1000, y * 1000) if number == 9 else (x, y)


def own(path, steps, job=None, **options):
    with Recorder(path, *parts(job or experiment()), compile=False, **({"save_every": 3} | options)) as recorder:
        for batch in recorder.batches(steps):
            recorder.step(batch)
            if recorder.step_number % 4 == 0:
                recorder.log_validation(0.5)
    return path


def plain(folder):
    return own(folder / "plain", 7)


def resumed(folder):
    """Resumed twice: where it was done, in the same segment, and from an earlier state, in another."""
    own(folder / "resumed", 5)
    own(folder / "resumed", 7, resume=True)
    return own(folder / "resumed", 8, resume=3)


def rolled_back(folder):
    job = experiment()
    job.sampler = Wild()
    recovery = Recovery("on", window=5, back=3, skip_batch=True)
    return own(folder / "rolled_back", 12, job, save_every=4, auto_rollback=recovery)


def deduplicated(folder):
    return test_dedup.record(folder / "deduplicated", 6).path


def storing(folder):
    draw, job = np.random.default_rng(2), experiment()
    with Recorder(folder / "storing", job.model, job.optimizer, mse, compile=False, save_every=3) as recorder:
        for _ in range(5):
            x = draw.standard_normal((6, 4)).astype(np.float32)
            recorder.step((x, x.sum(axis=1, keepdims=True)))
    return folder / "storing"


def trained(folder):
    """Of the built-in trainer, with a trace."""
    run = Path(runs.recorded(folder)).rename(folder / "trained")
    Run(run).replay(6, with_probe=False, fresh_process=False)
    return run


def of_ranks(folder):
    import test_ranks

    found, said = test_ranks.launch("short", folder)
    assert None not in found, said
    return folder / "short"


RUNS = (plain, resumed, rolled_back, deduplicated, storing, trained, of_ranks)

# ---------------------------------------------------------------------------------------------------------------- edits


def other(value):
    """Values that are nearly the same: one more, the next float, another last letter, one entry less."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1]
    if isinstance(value, float):
        return [float(np.nextafter(value, np.inf)), helpers.next_up(value)]
    if isinstance(value, str):
        last = value[-1:]
        return [value[:-1] + ("0" if last != "0" else "1")]
    if isinstance(value, list):
        found = [value[:-1]] if value else [[0]]
        return found + ([[value[1], value[0], *value[2:]]] if len(value) > 1 and value[0] != value[1] else [])
    return [1] if value is None else [{**value, "further": 1}]


def retyped(value):
    if isinstance(value, str):
        return [0, None]
    if isinstance(value, (dict, list)):
        return ["", None]
    return [str(value), []] + ([None] if value is not None else [])


def documents(value, name="", deep=6):
    """What a JSON value becomes by one edit of one field: (what was done, value)."""
    for one in other(value):
        yield f"{name or 'all'} changed", one
    for one in retyped(value):
        yield f"{name or 'all'} of another type", one
    if not deep or not isinstance(value, (dict, list)):
        return
    keys = list(value) if isinstance(value, dict) else sorted({0, 1, len(value) - 1} & set(range(len(value))))
    for key in keys:
        inner = f"{name}.{key}" if name else str(key)
        if isinstance(value, dict):
            yield f"{inner} dropped", {k: v for k, v in value.items() if k != key}
        else:
            yield f"{inner} dropped", value[:key] + value[key + 1 :]
        for what, changed in documents(value[key], inner, deep - 1):
            if isinstance(value, dict):
                yield what, {**value, key: changed}
            else:
                yield what, [*value[:key], changed, *value[key + 1 :]]


def compact(value):
    return json.dumps(value, separators=(",", ":")).encode()


def of_json(content):
    """A document whose meaning is another one."""
    whole = json.loads(content)
    for what, value in documents(whole):
        if compact(value) != compact(whole):
            yield what, json.dumps(value, indent=1).encode() + b"\n"


def of_lines(content, lines_of_steps=2):
    lines = content.splitlines(keepends=True)
    kinds = Counter()
    for number, line in enumerate(lines):
        kind = json.loads(line)["type"]
        kinds[kind] += 1
        at = f"line {number + 1} ({kind})"
        before, after = b"".join(lines[:number]), b"".join(lines[number + 1 :])
        yield f"{at} dropped", before + after
        yield f"{at} doubled", before + line + line + after
        yield f"cut before {at}", before
        yield f"cut in {at}", before + line[: len(line) // 2]
        yield f"blank before {at}", before + b"\n" + line + after
        if number + 1 < len(lines):
            yield f"{at} swapped with the next", before + lines[number + 1] + line + b"".join(lines[number + 2 :])
        if kind == "step" and kinds[kind] not in (2, 2 + lines_of_steps):
            continue
        whole = json.loads(line)
        for what, value in documents(whole):
            if compact(value) != compact(whole):
                yield f"{at} {what}", before + compact(value) + b"\n" + after


def of_bytes(content):
    places = {"first byte": 0, "byte 8": 8, "middle": len(content) // 2, "last byte": len(content) - 1}
    for what, at in places.items():
        if 0 <= at < len(content):
            yield f"{what} flipped", content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
    yield "one byte less", content[:-1]
    yield "half", content[: len(content) // 2]
    yield "empty", b""
    yield "one byte more", content + b"\0"


def of_header(content):
    """A safetensors file with the same tensors, and another header."""
    size = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + size]), content[8 + size :]
    metadata = header.get("__metadata__") or {}
    for what, value in (
        ("header with metadata", {**header, "__metadata__": {**metadata, "further": "1"}}),
        ("header without metadata", {key: value for key, value in header.items() if key != "__metadata__"}),
    ):
        if value != header:
            text = compact(value)
            yield what, len(text).to_bytes(8, "little") + text + data
    text = content[8 : 8 + size] + b" " * 8
    yield "header with spaces", len(text).to_bytes(8, "little") + text + data


def edits(run, others):
    """Every edit of a run: (file, what is done, new contents by file; None: it is removed)."""
    files = sorted(str(path.relative_to(run)) for path in run.rglob("*") if path.is_file())
    content = {file: (run / file).read_bytes() for file in files}
    for file in files:
        suffix, own = Path(file).suffix, content[file]
        ways = [of_bytes(own)] if suffix == ".safetensors" else []
        ways += [of_header(own)] if suffix == ".safetensors" else []
        ways += [of_lines(own)] if suffix == ".jsonl" else []
        ways += [of_json(own)] if suffix in (".json", ".rng", ".cursor", ".ranks") else []
        for way in ways:
            for what, changed in way:
                if changed != own:
                    yield file, what, {file: changed}
        if suffix not in (".safetensors", ".jsonl"):
            yield file, "half", {file: own[: len(own) // 2]}
        yield file, "removed", {file: None}
        for twin in files:
            if twin > file and Path(twin).suffix == suffix and content[twin] != own:
                yield file, f"swapped with {twin}", {file: content[twin], twin: own}
        for name in others:
            theirs = name / file
            if theirs.exists() and theirs.read_bytes() != own:
                yield file, f"from {name.name}", {file: theirs.read_bytes()}
    yield from ends(content)


def ends(content):
    """The end cut off telemetry and checkpoints alike."""
    lines = content["telemetry.jsonl"].splitlines(keepends=True)
    whole = [json.loads(line) for line in lines]
    for number in range(2, len(lines)):
        left = {(line["segment"], line["step"]) for line in whole[:number] if line["type"] in ("step", "meta")}
        gone = {}
        for file in content:
            if (found := re.fullmatch(r"checkpoints/(\d{8})(?:\.s(\d+))?\..*", file)) is not None:
                if (int(found[2] or 0), int(found[1])) not in left:
                    gone[file] = None
        yield "telemetry.jsonl", f"end cut from line {number} on, and of checkpoints", {
            "telemetry.jsonl": b"".join(lines[:number]), **gone
        }  # fmt: skip


# -------------------------------------------------------------------------------------------------------------- judging


def noticed(run):
    """What `verify` says against a run; "" where it calls it whole."""
    try:
        found = Run(run).verify()
    except WorkbenchError as error:
        return f"{type(error).__name__}: {error}"
    assert found.sentence() and found.to_json()
    return "" if found.whole else found.sentence()


def tried(run, others, chosen=lambda file, what: True):
    """Tries the edits in a copy of a run: (file, what, what was said against it) of each that was chosen."""
    copy = Path(shutil.copytree(run, run.with_name(f"{run.name}-edited")))
    assert not noticed(copy), noticed(copy)
    for file, what, contents in edits(run, others):
        if not chosen(file, what):
            continue
        for name, content in contents.items():
            if content is None:
                (copy / name).unlink()
            else:
                (copy / name).write_bytes(content)
        yield file, what, noticed(copy)
        for name in contents:
            (copy / name).write_bytes((run / name).read_bytes())
    assert not noticed(copy)
    shutil.rmtree(copy)


def recorded(folder, makers=RUNS):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [maker(folder) for maker in makers]


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", help="Only runs with this in their name.")
    parser.add_argument("--share", type=float, default=1.0, help="Of the edits, drawn by chance. [default: all]")
    given = parser.parse_args()
    os.environ["PYTHONWARNINGS"] = "ignore"
    draw, sums = random.Random(0), Counter()
    with tempfile.TemporaryDirectory() as scratch:
        found = recorded(Path(scratch), [maker for maker in RUNS if (given.only or "") in maker.__name__])
        other = plain(Path(scratch, "another"))
        for run in found:
            counts = Counter()
            for file, what, said in tried(run, [other], lambda file, what: draw.random() < given.share):
                why = free(file, what)
                kind = "noticed" if said else "free" if why else "missed"
                counts[kind] += 1
                counts["edits"] += 1
                if kind == "missed":
                    print(f"    missed: {file}: {what}", flush=True)
            sums += counts
            told = ", ".join(f"{counts[kind]} {kind}" for kind in ("edits", "noticed", "free", "missed"))
            print(f"{run.name:14} {told}", flush=True)
    print(f"all: {sums['edits']} edits, {sums['noticed']} noticed, {sums['free']} free, {sums['missed']} missed")
    for (file, what), why in FREE.items():
        print(f"    free: {file}, {what}: {why}")
    return 1 if sums["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
