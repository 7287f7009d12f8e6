"""A fuzzer of everything that reads a run's files, guided by coverage. Long version of what `test_damaged.py` does.

    python tests/fuzz.py --inputs 1000000

Each input is a real file with some bytes, tokens or keys changed. The reader must give the right value, which a plain
parser confirms, or raise an error of ours that names the file: no traceback, hang or gigabyte. An input that makes the
readers execute a line, or say a sentence, that none before it did is kept and changed further.
"""

import argparse
import faulthandler
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import psutil

from workbench import manifest, snapshot, telemetry, trace, verdict
from workbench.checkpoints import checkpoint_reader, checkpoint_writer
from workbench.errors import WorkbenchError
from workbench.files import sha256
from workbench.host import raw_views
from workbench.interventions import whatif
from workbench.pairs.paired import compare_runs
from workbench.recorded.first_sign import first_sign
from workbench.run import Run
from workbench.trainer import training

PATIENCE = 10, 600  # seconds for one input, of the processor and of the clock: on a busy machine a slow one is no hang
ALLOWANCE = 1 << 30  # bytes beyond what the process has before the first input
PACKAGE = str(Path(manifest.__file__).parent)

# ------------------------------------------------------------------------------------------------------------ mutations

TOKENS = (
    *(b"NaN", b"-Infinity", b"Infinity", b"1e999", b"-1", b"0", b"-0", b"1.5", b"1e-999", b"true", b"null", b'""'),
    *(b"9" * 30, b"-" + b"9" * 400, b"9" * 5000, b"9223372036854775808", b"18446744073709551616", b"2147483648"),
    *(b"[]", b"{}", b"[" * 3000, b'{"a":' * 3000, b"[" * 200 + b"]" * 200, b'"\\ud800"', b'"\xff"', b'"\\u0000"'),
    *(b'"../../../../etc/passwd"', b'"0x7fc00000"', b'"0xFFFFFFFF"', b'"<script>"', b'"{0}%s"', b'"\x1b[2J"'),
)
BYTES = (
    b"\0",
    b"\xff",
    b"\n",
    b'"',
    b"\\",
    b",",
    b":",
    b"{",
    b"}",
    b"[",
    b"]",
    b" ",
    b"\xef\xbb\xbf",
    b"\xc3",
    b"\r\n",
)
TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|-?\d[\d.eE+-]*|true|false|null')
PAIR = re.compile(rb'"(?:[^"\\]|\\.)*"\s*:\s*(?:"(?:[^"\\]|\\.)*"|-?\d[\d.eE+-]*|true|false|null)')


def mutated(content, draw, others):
    """The content after one to three changes."""
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        content = draw.choice(CHANGES)(content, draw, others)
    return content


def _place(content, draw):
    return draw.randrange(len(content)) if content else 0


def _flip(content, draw, others):
    at, changed = _place(content, draw), bytearray(content or b"\0")
    changed[at] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _replace(content, draw, others):
    at = _place(content, draw)
    return content[:at] + draw.choice((*BYTES, bytes([draw.randrange(256)]))) + content[at + 1 :]


def _insert(content, draw, others):
    at = _place(content, draw)
    return content[:at] + draw.choice((*BYTES, draw.choice(TOKENS))) + content[at:]


def _cut(content, draw, others):
    return content[: _place(content, draw)]


def _remove(content, draw, others):
    at = _place(content, draw)
    return content[:at] + content[at + draw.choice((1, 2, 8, 40)) :]


def _repeat(content, draw, others):
    at, length = _place(content, draw), draw.choice((1, 2, 8, 40, 400))
    return content[: at + length] + content[at:]


def _token(content, draw, others):
    found = list(TOKEN.finditer(content, 0, 20000))
    if not found:
        return _insert(content, draw, others)
    one = draw.choice(found)
    return content[: one.start()] + draw.choice((*TOKENS, draw.choice(found).group())) + content[one.end() :]


def _digit(content, draw, others):
    """Another value of the same kind, so that what is read on is still right."""
    found = list(re.finditer(rb"[0-9a-f]", content[:20000]))
    at = draw.choice(found).start() if found else 0
    return content[:at] + draw.choice((b"0", b"1", b"5", b"9", b"a")) + content[at + 1 :]


def _key_twice(content, draw, others):
    found = list(PAIR.finditer(content, 0, 20000))
    if not found:
        return _repeat(content, draw, others)
    one = draw.choice(found)
    again = draw.choice((one.group(), one.group().partition(b":")[0] + b":" + draw.choice(TOKENS)))
    return content[: one.end()] + b"," + again + content[one.end() :]


def _splice(content, draw, others):
    other = draw.choice(others)
    return content[: _place(content, draw)] + other[_place(other, draw) :]


def _sizes(content, draw, others):
    """Another length of the header of a safetensors file."""
    size = draw.choice((0, 1, 2**31, 2**63, 2**64 - 1, len(content), max(len(content) - 8, 0), draw.randrange(4096)))
    return size.to_bytes(8, "little") + content[8:]


def _encoded(content, draw, others):
    text = content.decode("utf-8", errors="replace")
    return text.encode(draw.choice(("utf-16", "utf-16-le", "utf-8-sig", "utf-32")))


CHANGES = (
    *(_flip, _flip, _replace, _insert, _cut, _remove, _repeat, _splice),
    *(_token, _token, _token, _token, _digit, _digit, _key_twice, _key_twice, _sizes, _encoded),
)

# ------------------------------------------------------------------------------------------- what a plain parser says


class Twice(ValueError):
    pass


def _pairs(pairs):
    if len({key for key, _ in pairs}) != len(pairs):
        raise Twice
    return dict(pairs)


def _integer(digits):
    """Python refuses to read more than 4,300 digits, which are JSON all the same."""
    return int(digits) if len(digits) < 4000 else float(digits)


def plain(content):
    """JSON by the standard library, as strict as it gets. Raises ValueError."""

    def refuse(constant):
        raise ValueError(constant)

    return json.loads(content, object_pairs_hook=_pairs, parse_constant=refuse, parse_int=_integer)


def agrees(found, said):
    """Whether what a reader found is what the plain parser said; what a file may leave out, the reader may add."""
    if isinstance(said, dict):
        return isinstance(found, dict) and all(key not in found or agrees(found[key], said[key]) for key in said)
    if isinstance(said, list):
        return len(found) == len(said) and all(map(agrees, found, said))
    if isinstance(said, bool) or said is None or isinstance(said, str):
        return found is said or (isinstance(said, str) and found == said)
    return (
        not isinstance(found, (bool, str))
        and found is not None
        and found == (float(said) if isinstance(found, float) else said)
    )


def strict_json(text):
    """Our own output: NaN and Infinity are no JSON."""

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def damaged(line):
    """Whether a line is none at all: what is left of one after a crash."""
    try:
        return not isinstance(plain(line), dict)
    except ValueError:
        return True


def agree_json(found, content):
    assert agrees(msgspec.to_builtins(found), plain(content)), "it is not what the file says"


# -------------------------------------------------------------------------------------------------------------- readers


@dataclass
class Reader:
    """One way in. `read(content)` writes it under the file's name and reads it as a user's call would."""

    name: str
    seeds: list
    read: object
    names: str  # what an error must name
    share: int = 1  # of the inputs
    slow: bool = False  # gets a tenth of its share
    pool: list = field(default_factory=list)


def readers(folder, run, checkpoint, with_replays=False):
    """Every reader, over copies in a folder of its own.

    Args:
        run: a recorded run with traces, a verdict, an experiment's file and labels in it.
        checkpoint: folder with the small checkpoint 4 of segment 0 in it, and nothing else.
    """
    found = []
    whole = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    state = checkpoint_reader.read(checkpoint, 4, 0)

    def document(name, path, read, share, file="given.json"):
        place = folder / name
        shutil.copytree(run, place)

        def once(content):
            (place / file).write_bytes(content)
            result = read(place / file)
            if result is not None:
                agree_json(result, content)

        found.append(Reader(name, [path.read_bytes() for path in path], once, file, share))

    document("manifest", [run / "run.json"], lambda path: manifest.read(path.parent), 6, "run.json")
    document("trace", sorted((run / "traces").glob("????????.json"))[:1], lambda path: trace.read(path).record, 1)
    document("verdict", sorted((run / "traces").glob("*.autopsy.json"))[:1], verdict.read, 2)
    document("experiment", sorted((run / "traces").glob("*.whatif-*.json"))[:1], whatif.read, 2)
    document("labels", [run / "planted.json"], lambda path: training._refuse_unplanted(path.parent), 1, "planted.json")

    lines = folder / "telemetry.jsonl"
    content = (run / "telemetry.jsonl").read_bytes()
    few = b"".join(content.splitlines(keepends=True)[:4])

    def stream(content):
        lines.write_bytes(content)
        result = telemetry.read(lines)
        kept = [line for line in content.split(b"\n") if line.strip()]
        said = [line for line in kept if not damaged(line)]
        assert len(result.lines) == len(said) and bool(result.notices) == (len(said) < len(kept)), "a line was dropped"
        for line, text in zip(result.lines, said, strict=True):
            agree_json(line, text)
            line.evidence()
        steps = [line for line in map(plain, said) if line["type"] == "step"]
        frame = result.frame()
        assert frame["step"].tolist() == [line["step"] for line in steps], "a step was dropped"
        for name in ("loss", "lr"):  # by the quick reader
            numbers = [line.get(name) for line in steps]
            for value, number in zip(frame[name].tolist(), numbers, strict=True):
                with np.errstate(over="ignore"):
                    known = number is not None and (name != "loss" or abs(number) < 3.4e38)
                    assert not known or value in (float(np.float32(number)), float(number)), f"{name} is {value}"
        result.last_step(), result.meta(0)

    found.append(Reader("telemetry", [few], stream, lines.name, 6))

    def in_checkpoint(suffix, repaired, share):
        """Of one file of a checkpoint; `repaired`: its commit record agrees with it again."""
        place = folder / f"checkpoint{suffix}{repaired}"
        shutil.copytree(checkpoint, place)
        file, record = f"00000004{suffix}", json.loads(whole["00000004.json"])

        def once(content):
            (place / file).write_bytes(content)
            if repaired:
                record["files"][file] = {"bytes": len(content), "sha256": sha256(content)}
                record["seal"] = None
                (place / "00000004.json").write_text(json.dumps(record))
            back = checkpoint_reader.read(place, 4, 0)
            if not repaired or suffix == ".json":
                assert snapshot.first_difference(back, state) is None, "another state came back"
            elif suffix == ".rng":
                agree_json({"key": list(back.rng)}, content)
            elif suffix == ".cursor":
                agree_json(back.cursor, content)
            else:
                agree_tensors(back.weights if suffix == ".safetensors" else back.optimizer, content)

        found.append(
            Reader(f"{suffix[1:]}{', digests agree' if repaired else ''}", [whole[file]], once, "00000004", share)
        )

    for suffix, repaired, share in (
        *((".json", False, 4), (".rng", True, 2), (".cursor", True, 2), (".rng", False, 1)),
        *((".safetensors", True, 5), (".optimizer.safetensors", True, 3), (".safetensors", False, 1)),
    ):
        in_checkpoint(suffix, repaired, share)

    opened = Path(shutil.copytree(run, folder / "opened"))

    def looked_at(name):
        original = (opened / name).read_bytes()

        def once(content):
            try:
                (opened / name).write_bytes(content)
                one = Run(opened)
                one.steps, one.spikes(), one.checkpoints, one._repr_html_(), one.norms(6), one.plan(6)
                compare_runs(opened, unchanged)._repr_html_()
            finally:
                (opened / name).write_bytes(original)

        found.append(Reader(f"opened run, {name}", [original], once, "", 1))

    looked_at("run.json")
    looked_at("telemetry.jsonl")
    unchanged = Path(shutil.copytree(run, folder / "unchanged"))
    whole_run = Path(shutil.copytree(run, folder / "verified"))

    def verified(name):
        original = (whole_run / name).read_bytes()

        def once(content):
            try:
                (whole_run / name).write_bytes(content)
                one = Run(whole_run)
                found = one.verify()  # of what can be opened it says what is wrong, and raises nothing
                assert found.sentence() and found.limits() and strict_json(found.to_json())["checks"]
                if name.startswith("checkpoints/") and not _same_json(content, original):
                    assert not found.whole, "a changed checkpoint is whole"
                if name == "run.json" and not _same_json(content, original):
                    unread = any((one.kind, one.verdict) == ("data", "unverified") for one in found.checks)
                    elsewhere = unread and _but_for_data_paths(content, original)
                    assert elsewhere or not found.whole, "a changed manifest is whole"
                if name == "telemetry.jsonl" and content.removesuffix(b"\n") != original.removesuffix(b"\n"):
                    assert not found.whole, "changed telemetry is whole"
                if not any(check.verdict == "mismatch" and check.kind == "telemetry" for check in found.checks):
                    first_sign(one, one.manifest.segments[-1].segment, 10**6)
            finally:
                (whole_run / name).write_bytes(original)

        found.append(Reader(f"verified run, {name}", [original], once, "", 1, slow=True))

    verified("run.json")
    verified("telemetry.jsonl")
    verified("checkpoints/00000008.json")
    original = (opened / "run.json").read_bytes()

    def replayed(content):
        try:
            (opened / "run.json").write_bytes(content)
            one = Run(opened)
            one.replay(6, with_probe=False, fresh_process=False, trace_dir=folder / "replays", other_environment=True)
            one.batch_facts(6)
        finally:
            (opened / "run.json").write_bytes(original)

    if with_replays:
        found.append(Reader("replayed run, run.json", [original], replayed, "", 1, slow=True))
    for reader in found:
        reader.pool = list(reader.seeds)
    return found


def agree_tensors(arrays, content):
    """The arrays are the bytes that the header says, in the plainest reading of the format."""
    size = int.from_bytes(content[:8], "little")
    header = {name: entry for name, entry in plain(content[8 : 8 + size]).items() if name != "__metadata__"}
    assert arrays.keys() == header.keys()
    for name, view in zip(arrays, raw_views(list(arrays.values())), strict=True):
        first, last = header[name]["data_offsets"]
        assert list(arrays[name].shape) == header[name]["shape"]
        assert np.ascontiguousarray(view).tobytes() == content[8 + size + first : 8 + size + last]


# ------------------------------------------------------------------------------------------------------------- the loop


class Hang(BaseException):
    pass


def _hang(number, frame):
    """Shows what each thread does and has taken: the time may be that of one which an earlier input left behind."""
    faulthandler.dump_traceback(all_threads=True)
    taken = [one.user_time + one.system_time for one in psutil.Process().threads()]
    print(f"signal {number}; seconds of the processor, by thread: {taken}", file=sys.stderr, flush=True)
    raise Hang


@dataclass
class Figures:
    inputs: int = 0
    values: int = 0
    refused: int = 0
    kept: int = 0
    seconds: float = 0.0
    findings: dict = field(default_factory=dict)  # what went wrong: the first input that did it


def try_one(reader, content, figures):
    """Reads one input. Returns what to tell inputs apart by: the sentence without its numbers and names."""
    figures.inputs += 1
    try:
        reader.read(content)
    except WorkbenchError as error:
        figures.refused += 1
        said = str(error)
        if reader.names not in said or len(said) > 20000:
            figures.findings.setdefault(f"an error that does not name the file: {said[:200]}", content)
        return re.sub(r"\d+|'[^']*'|`[^`]*`|\$[^ ]*", "#", said)[:200]
    except (Exception, Hang) as error:
        where = traceback.extract_tb(error.__traceback__)
        last = next((f for f in reversed(where) if f.filename.startswith(PACKAGE)), where[-1])
        what = f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}: {str(error)[:150]}"
        figures.findings.setdefault(re.sub(r"\d{3,}", "#", what), content)
        return what
    figures.values += 1
    return "value"


def fuzz(reader, inputs, draw, figures):
    """Tries so many inputs."""
    seen_lines, seen_sayings = set(), set()

    def tracer(frame, event, argument):
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        name = frame.f_code

        def line(frame, event, argument):
            new.add((name, frame.f_lineno))
            return line

        return line

    began, signals = time.monotonic(), (signal.SIGALRM, signal.SIGPROF)
    before = [signal.signal(one, _hang) for one in signals]
    for number in range(inputs):
        base = draw.choice(reader.pool) if draw.random() < 0.6 else draw.choice(reader.seeds)
        content = mutated(base, draw, reader.pool)
        new = set()
        traced = number % 4 == 0 or number < 200  # tracing takes more than reading
        signal.setitimer(signal.ITIMER_PROF, PATIENCE[0])
        signal.setitimer(signal.ITIMER_REAL, PATIENCE[1])
        if traced:
            sys.settrace(tracer)
        try:
            said = try_one(reader, content, figures)
        finally:
            sys.settrace(None)
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
        if (new - seen_lines or said not in seen_sayings) and len(content) < 4 * max(map(len, reader.seeds)):
            seen_lines |= new
            seen_sayings.add(said)
            if len(reader.pool) < 2000:
                reader.pool.append(content)
                figures.kept += 1
    for one, handler in zip(signals, before, strict=True):
        signal.signal(one, handler)
    figures.seconds += time.monotonic() - began


def every_bit(checkpoint):
    """Flips each bit of each file of the checkpoint, alone. Returns how many, and those that went unnoticed."""
    count, unnoticed = 0, []
    for path in sorted(checkpoint.iterdir()):
        content = path.read_bytes()
        for at in range(8 * len(content)):
            changed = bytearray(content)
            changed[at // 8] ^= 1 << at % 8
            path.write_bytes(changed)
            count += 1
            try:
                checkpoint_reader.read(checkpoint, 4, 0, "r")
                unnoticed.append(f"bit {at} of {path.name}")
            except WorkbenchError:
                pass
        path.write_bytes(content)
    return count, unnoticed


def limited():
    """Memory beyond what the process has is an error: a reader that asks for a gigabyte is found."""
    if not sys.platform.startswith("linux"):
        return
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + ALLOWANCE
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def prepared(folder):
    """A run with every kind of file in it, and a small checkpoint."""
    import helpers
    import runs

    run = runs.recorded(folder)
    (run / "planted.json").write_text('[{"fault": "lr", "step": 5}]')
    opened = Run(run)
    opened.replay(6, with_probe=True)
    opened.whatif(6, ["lr=0.5x"], next_steps=1)
    opened.autopsy(6)
    job = helpers.experiment()
    helpers.advance(job, 4)
    (folder / "checkpoint").mkdir()
    checkpoint_writer.write(helpers.state_of(job, 4), folder / "checkpoint", run="r", segment=0, t=0.0)
    return run, folder / "checkpoint"


def _same_json(one, other):
    """Whether only white space differs, which the seal of a commit record leaves out."""
    try:
        return json.loads(one) == json.loads(other)
    except (ValueError, RecursionError):
        return False


def _but_for_data_paths(one, other):
    """Whether two manifests differ only in where their data files lie, which is no evidence: that is their digests."""
    one, other = json.loads(one), json.loads(other)
    for file, original in zip(one["data"], other["data"], strict=False):
        file["path"] = original["path"]
    return one == other


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--inputs", type=int, default=10**6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="Only readers with this in their name.")
    parser.add_argument("--keep", type=Path, help="Folder for the inputs that were found.")
    given = parser.parse_args()
    os.environ["PYTHONWARNINGS"] = "ignore"
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else None) as scratch:
        folder = Path(scratch)
        run, checkpoint = prepared(folder)
        chosen = [r for r in readers(folder, run, checkpoint, with_replays=True) if (given.only or "") in r.name]
        limited()
        total, draw, table = sum(reader.share for reader in chosen), random.Random(given.seed), []
        for reader in chosen:
            figures = Figures()
            inputs = given.inputs * reader.share // total
            fuzz(reader, inputs // 10 if reader.slow else inputs, draw, figures)
            table.append((reader.name, figures))
            print(
                f"{reader.name:38} {figures.inputs:8} inputs, {figures.values:7} right values, "
                f"{figures.refused:8} refused, {figures.kept:4} kept, {figures.seconds:6.1f} s, "
                f"{len(figures.findings)} findings",
                flush=True,
            )
            for number, (what, content) in enumerate(figures.findings.items()):
                print(f"    {what}\n      {content[:120]!r}")
                if given.keep is not None:
                    given.keep.mkdir(parents=True, exist_ok=True)
                    (given.keep / f"{reader.name.replace('/', '-')}-{number}").write_bytes(content)
        flipped, unnoticed = every_bit(checkpoint)
        print(f"each of the {flipped} bits of a checkpoint flipped: {len(unnoticed)} unnoticed {unnoticed[:5]}")
    sums = Counter(found=len(unnoticed))
    for _, figures in table:
        sums.update(inputs=figures.inputs, values=figures.values, refused=figures.refused, found=len(figures.findings))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(
        f"{sums['inputs']} inputs: {sums['values']} right values, {sums['refused']} refused by a sentence that names "
        f"the file, {sums['found']} findings; peak memory {peak} MB"
    )
    return 1 if sums["found"] else 0


if __name__ == "__main__":
    sys.exit(main())
