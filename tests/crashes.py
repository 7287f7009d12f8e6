"""A campaign of crashes: real processes killed at any moment, full disks, lost power; and what is left of their runs.

    python tests/crashes.py              # the long version: some minutes; prints its figures
    python tests/crashes.py --short      # the one that the tests run

Each life of a run is a forked process. After each death: every checkpoint that was reported durable is there, every one
that counts as whole loads, verifies and is the state of an undisturbed run, bit for bit; the telemetry has each step
once in its segment, with the undisturbed run's bits; and a run that is resumed to its end has the same final state.
"""

import argparse
import contextlib
import errno
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from disk import Disk, Faults, power_loss
from helpers import config

from workbench import deduplication, digests, files, record
from workbench.checkpoints import checkpoint_reader, checkpoint_writer
from workbench.errors import CheckpointError, RunError, TelemetryError, WorkbenchError
from workbench.manifest import DataFile
from workbench.run import Run
from workbench.spikes import SpikeSettings
from workbench.trainer import train as trainer
from workbench.trainer.corpus import Corpus
from workbench.trainer.training import Quiet

PARTS = ("kills", "doomed", "signals", "power", "full_disks", "hindered")
STEPS, SAVE_EVERY, KEEP_LAST, SPIKE = 18, 3, 3, 11
# No operation of MLX is performed before the fork: its threads would not outlive it.


class Points:
    """Batches of a regression problem, each a function of its number; that of one step makes it a spike."""

    def __init__(self):
        self.number = 0

    def __iter__(self):
        return self

    def __next__(self):
        x = np.random.Generator(np.random.Philox(key=7, counter=self.number)).standard_normal((16, 4))
        self.number += 1
        scale = 50 if self.number == SPIKE else 1
        x[0, 0] = 9 if self.number in (4, SPIKE) else x[0, 0]
        return x.astype(np.float32), scale * np.sin(x.sum(axis=1, keepdims=True)).astype(np.float32)

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, cursor):
        self.number = cursor["number"]


class Net(nn.Module):
    """Its spare weights change at steps 4 and 11 only; a checkpoint that finds them unchanged stores them no more."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Tanh(), nn.Linear(8, 1))
        self.spare = nn.Linear(4, 1, bias=False)

    def __call__(self, x):
        return self.body(x) + self.spare(nn.relu(x - 6))


def recorder(path, resume, **settings):
    mx.set_default_device(mx.cpu)
    mx.random.seed(3)
    deduplication.LEAST = 1
    files.LARGE = digests.LONG = 1 if resume else 1 << 20  # threads flush and hash, as they do large files
    model = Net()
    settings = {"save_every": SAVE_EVERY, "keep_last": KEEP_LAST, "spikes": SpikeSettings(window=5)} | settings
    loss = lambda model, x, y: nn.losses.mse_loss(model(x), y)  # noqa: E731
    kinds = optim.SGD(1e-2), optim.AdamW(1e-2, bias_correction=True)
    job = model, optim.MultiOptimizer(kinds, [lambda path, _: path.startswith("spare")]), loss, Points()
    return record.Recorder(path, *job, compile=False, clip=1.0, resume=resume, **settings)


def live(path, resume, *, said=lambda text: None, between=lambda step: None, **settings):
    """One life of a run; returns the fingerprints of its last state. `said` is told what has become durable."""
    write, delete = checkpoint_writer.write, checkpoint_writer.delete

    def told_write(state, folder, **options):
        found = write(state, folder, **options)
        said(f"+{state.step}.{options['segment']}\n")
        return found

    def told_delete(folder, step, segment):
        said(f"-{step}.{segment}\n")
        delete(folder, step, segment)

    checkpoint_writer.write, checkpoint_writer.delete = told_write, told_delete
    try:
        with recorder(path, resume, **settings) as recording:
            for batch in recording.batches(STEPS):
                recording.step(batch)
                between(recording.step_number)
            lanes = recording._standing.at.lanes
        return lanes
    finally:
        checkpoint_writer.write, checkpoint_writer.delete = write, delete


def live_on(path, said, resume):
    """The same, or what a user would be told: without a checkpoint there is nothing to go on from."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return {"lanes": live(path, resume, said=said)}
        except WorkbenchError as error:
            return {"refused": f"{type(error).__name__}: {error}"}


# ------------------------------------------------------------------------------------------------------ what must hold


def faults_of(path, reference, durable=frozenset()):
    """What is wrong with what a crash left; empty if nothing.

    Args:
        reference: fingerprints of the states of an undisturbed run, by step.
        durable: checkpoints that were reported to be on the disk.
    """
    problems = []
    try:
        run = Run(path)
    except RunError as error:
        return [f"lost: {sorted(durable)}; {error}"] if durable else []
    try:
        telemetry = run.telemetry
        lines = telemetry.lines
    except TelemetryError as error:
        return [f"telemetry: {error}"] if durable or "can't be read" not in str(error) else []
    there = run.checkpoints
    problems += [f"lost: checkpoint {key}" for key in durable if key not in there]
    for step, segment in there:
        try:
            state = checkpoint_reader.read(path / "checkpoints", step, segment, run.manifest.run)
        except CheckpointError as error:
            problems.append(f"taken for whole: {error}")
            continue
        if state.lanes() != reference[step]:
            problems.append(f"another state: checkpoint {step}.{segment}")
    seen = {}
    for line in lines:
        if line.type == "step":
            seen.setdefault(line.segment, []).append(line.step)
            if line.state != reference[line.step]:
                problems.append(f"other bits: step {line.step} in segment {line.segment}")
    for segment, steps in seen.items():
        start = run.manifest.segments[segment].start
        if steps != list(range(start + 1, start + 1 + len(steps))):
            problems.append(f"steps of segment {segment} are {steps}, from {start}")
    return problems


def reference_of(folder):
    """Fingerprints by step of an undisturbed run."""
    live(folder, False, keep_last=None)
    run = Run(folder)
    found = {line.step: line.state for line in run.telemetry.lines if line.type == "step"}
    return found | {0: run.telemetry.metas[0].state}


# ------------------------------------------------------------------------------------------------------------ processes


class Child:
    """A forked process that performs a function and reports lines of text and at last a JSON value."""

    def __init__(self, function, *arguments):
        reading, writing = os.pipe()
        self.began = time.perf_counter()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(reading)
            with open(os.devnull, "wb") as nothing:
                os.dup2(nothing.fileno(), 2)
            try:
                result = function(*arguments, lambda text: os.write(writing, text.encode()))
                os.write(writing, ("=" + json.dumps(result) + "\n").encode())
            except BaseException:
                os.write(writing, ("!" + json.dumps(traceback.format_exc()) + "\n").encode())
            finally:
                os._exit(0)
        os.close(writing)
        self._pipe = reading

    def kill_after(self, seconds, *signals, gap=0.0):
        time.sleep(max(0.0, self.began + seconds - time.perf_counter()))
        for number in signals:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)
            time.sleep(gap)

    def wait(self):
        """(lines, result or None if it died, what it raised or None, seconds)."""
        with open(self._pipe, "rb") as pipe:
            lines = pipe.read().decode().split("\n")[:-1]
        os.waitpid(self.pid, 0)
        seconds = time.perf_counter() - self.began
        results = [json.loads(line[1:]) for line in lines if line.startswith("=")]
        raised = [json.loads(line[1:]) for line in lines if line.startswith("!")]
        return lines, (results or [None])[-1], (raised or [None])[-1], seconds


def ask(function, *arguments):
    """The result of a function in a process of its own, which ends as it should."""
    _, result, raised, _ = Child(lambda said: function(*arguments)).wait()
    if raised:
        raise RuntimeError(raised)
    return result


def durable_in(lines, before=()):
    """Checkpoints reported durable, without those whose removal had begun."""
    found = set(before)
    for line in lines:
        if line[:1] in "+-" and line[:1]:
            key = tuple(int(part) for part in line[1:].split("."))
            (found.add if line[0] == "+" else found.discard)(key)
    return found


class Campaign:
    def __init__(self, folder, seed):
        self.folder, self.random, self.counts, self.problems = Path(folder), random.Random(seed), Counter(), []
        self.places = Counter()  # of the kills at a disk operation
        found = ask(reference_of, self.folder / "reference")
        self.reference = {int(step): lanes for step, lanes in found.items()}
        begun = time.perf_counter()
        assert ask(live, self.folder / "timed", False) == self.reference[STEPS]
        self.seconds = time.perf_counter() - begun
        self.operations = ask(counted, self.folder / "counted")
        self._number = 0
        os.chmod(folder, 0o755)

    def new(self):
        self._number += 1
        return self.folder / f"run{self._number}"

    def check(self, what, path, durable=frozenset()):
        self.counts["checks"] += 1
        self.problems += [f"{what}: {path.name}: {one}" for one in ask(faults_of, path, self.reference, durable)]

    def finish(self, what, path, durable=frozenset()):
        """Resumes a run to its end, undisturbed."""
        result = ask(live_on, path, lambda text: None, True)
        if "refused" in result:
            self.counts["nothing committed yet"] += 1
            if durable or "Error: " not in result["refused"]:
                self.problems.append(f"{what}: {path.name}: not resumed: {result['refused']}")
        elif result["lanes"] != self.reference[STEPS]:
            self.problems.append(f"{what}: {path.name}: other final bits")
        else:
            self.counts["resumed to the same final bits"] += 1
            self.check(what, path, durable_in([], [key for key in durable if key[0] == 0]))

    # ---- kill -9

    def kills(self, count, at_operation):
        """Lives that end by SIGKILL, of runs that are resumed again and again, until so many were killed."""
        name = "kills at a disk operation" if at_operation else "kills at a random moment"
        path, durable, lives = self.new(), set(), 0
        while self.counts[name] < count:
            resume = lives > 0
            if at_operation:
                child = Child(doomed, path, resume, self.random.randrange(1, self.operations + 1), self.random.random())
            else:
                child = Child(live_killed, path, resume)
                child.kill_after(self.random.uniform(0, 1.1) * self.seconds, signal.SIGKILL)
            lines, result, raised, seconds = child.wait()
            if raised:
                self.problems.append(f"{name}: {path.name}: {raised}")
            durable = durable_in(lines, durable)
            lives += 1
            ended = result is not None
            self.counts[name] += not ended
            self.places.update(line[1:] for line in lines if line.startswith("@"))
            self.check(name, path, durable)
            if ended and "refused" in result:
                self.counts["nothing committed yet"] += 1
                if durable:
                    self.problems.append(f"{name}: {path.name}: not resumed: {result['refused']}")
            elif ended:
                self.counts["resumed to the same final bits"] += 1
                if result["lanes"] != self.reference[STEPS]:
                    self.problems.append(f"{name}: {path.name}: other final bits")
            if ended:
                shutil.rmtree(path, ignore_errors=True)
                path, durable, lives = self.new(), set(), 0
        self.finish(name, path, durable)

    # ---- signals

    def signals(self, count):
        """Runs of the trainer that get SIGTERM or SIGINT, once or twice."""
        corpus = self.folder / "corpus.txt"
        corpus.write_bytes(bytes(random.Random(1).choices(range(97, 123), k=4000)))
        wanted = ask(train_on, self.folder / "trained", corpus, False)
        begun = time.perf_counter()
        ask(train_on, self.folder / "trained2", corpus, False)
        seconds = time.perf_counter() - begun
        for number in range(count):
            path, kind = self.new(), [signal.SIGTERM, signal.SIGINT][number % 2]
            twice = number % 4 > 1
            child = Child(lambda said, path=path: train_on(path, corpus, False))
            child.kill_after(self.random.uniform(0.3, 1) * seconds, *[kind] * (1 + twice), gap=0.003)
            _, result, raised, _ = child.wait()
            ended = "Interrupted" in (raised or "") or "KeyboardInterrupt" in (raised or "")
            if raised and not ended and (path / "run.json").exists():
                self.problems.append(f"signal: {path.name}: {raised}")
            self.counts[f"{kind.name} {'twice' if twice else 'once'}"] += 1
            if not (path / "run.json").exists():
                self.counts["nothing committed yet"] += 1
                continue
            _, result, raised, _ = Child(lambda said, path=path: train_on(path, corpus, True)).wait()
            if result == wanted:
                self.counts["resumed to the same final bits"] += 1
            elif not twice or "Error" not in (raised or ""):
                self.problems.append(f"signal: {path.name}: {raised or 'other final bits'}")

    # ---- power loss

    def power(self, count):
        """Disks as a loss of power may leave them: see `disk.power_loss`."""
        for part in range(4):  # in several processes: each resumes many runs
            seed, folder = self.random.randrange(1 << 30), self.new()
            found = ask(power_losses, folder, self.reference, seed, -(-count // 4), part % 2 == 1)
            self.counts["power losses"] += found["count"]
            self.counts["resumed to the same final bits"] += found["resumed"]
            self.counts["nothing committed yet"] += found["nothing"]
            self.problems += found["problems"]

    # ---- disks that can't be written

    def full_disks(self, count):
        """A file system of a given size (where this may be mounted), or writes that fail from some point on."""
        mounted = os.geteuid() == 0 and _can_mount(self.folder)
        for number in range(count):
            kind = ["small file system", "limit of a file's size", "ENOSPC"][number % 3]
            if kind == "small file system" and not mounted:
                kind = "ENOSPC"
            path, room = self.new(), bool(number % 2)
            path.mkdir()
            run = path / "run"
            point = self.random.random()
            if kind == "small file system":
                size = int(16384 + point * 150_000)
                subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path], check=True)
            try:
                child = Child(lambda said, r=run, k=kind, p=point, more=room, m=path: on_full_disk(r, k, p, more, m))
                _, result, raised, _ = child.wait()
                self.counts[f"full disk ({kind})"] += 1
                if raised:
                    self.problems.append(f"full disk: {path.name}: {raised}")
                    continue
                if result.get("begun") and result["lanes"] != self.reference[STEPS]:
                    self.problems.append(f"full disk: {path.name}: other bits of the training itself")
                if result.get("begun"):
                    self.counts["trainings that went on to their end"] += 1
                    if not result["warned"] and result["failed"]:
                        self.problems.append(f"full disk: {path.name}: no warning")
                else:
                    self.counts["trainings that said at once that nothing can be recorded"] += 1
                self.check("full disk", run)
                if kind == "small file system":
                    subprocess.run(["mount", "-o", "remount,size=64m", path], check=True)
                if result.get("begun"):
                    self.finish("full disk", run)
            finally:
                if kind == "small file system":
                    subprocess.run(["umount", path], check=True)

    def hindered(self, count):
        """Read-only folders, permissions that change, a file system that is unmounted, errors of a network mount."""
        kinds = ["read-only", "stale"]
        if os.geteuid() == 0:
            kinds.append("permissions")
            kinds += ["unmounted"] if _can_mount(self.folder) else []
        for number in range(count):
            kind, path = kinds[number % len(kinds)], self.new()
            path.mkdir()
            os.chmod(path, 0o777)
            run, at = path / "run", self.random.randrange(2, STEPS - 1)
            places = path
            if kind == "unmounted":
                (path / "real").mkdir()
                run.mkdir()
                places = path / "real"
                subprocess.run(["mount", "--bind", places, run], check=True)
            try:
                _, result, raised, _ = Child(lambda said, r=run, k=kind, a=at: on_hindered(r, k, a)).wait()
            finally:
                subprocess.run(["umount", "-l", run], capture_output=True)
            self.counts[kind] += 1
            if raised:
                self.problems.append(f"{kind}: {path.name}: {raised}")
                continue
            if result["lanes"] != self.reference[STEPS]:
                self.problems.append(f"{kind}: {path.name}: other bits of the training itself")
            if not result["warned"]:
                self.problems.append(f"{kind}: {path.name}: no warning")
            if kind == "unmounted" and (left := sorted(os.listdir(run))):
                self.problems.append(f"{kind}: {path.name}: written where the run was mounted: {left}")
            kept = places if kind == "unmounted" else run
            self.check(kind, kept)
            self.finish(kind, kept)


# -------------------------------------------------------------------------------------------- what the children perform


def live_killed(path, resume, said):
    return live_on(path, said, resume)


def doomed(path, resume, operation, part, said):
    """Kills itself before, after or in the middle of one of its disk operations."""

    def struck(name, place):
        what = Path(place).name
        kind = next((word for word in ("telemetry", "run.json", "recorder.lock") if word in what), "checkpoint's part")
        if what.endswith(".json") and what.strip(".")[:1].isdigit():
            kind = "commit record"
        kind = "folder" if Path(place).is_dir() or name == "mkdir" else kind
        said(f"@{name} of {kind}{' after a resume' if resume else ''}\n")

    with Faults(path, lambda number, name: number == operation, part=part, kill=True, struck=struck):
        return live_on(path, said, resume)


def counted(path):
    """How many disk operations a life has."""
    with Faults(path, lambda number, name: False) as faults:
        live(path, False)
    return faults.number


def train_on(path, corpus, resume):
    settings = config(STEPS, compile=False, prefetch=2)
    data = [DataFile(**Corpus.open(corpus).describe())]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return trainer.train(settings, [corpus], path, Quiet(), data=data, resume=resume, save_every=4, spikes=None)[1]


def power_losses(folder, reference, seed, count, resumed):
    """Lives on a disk that is watched, and the states in which a loss of power may leave it."""
    draw = random.Random(seed)
    reference = {int(step): lanes for step, lanes in reference.items()}
    source = folder / "source"
    folder.mkdir()
    if resumed:  # a life before it, which was cut off: its end is on the disk for good

        class Cut(Exception):
            pass

        def cut(step):
            if step == 8:
                raise Cut

        with contextlib.suppress(Cut):
            live(source, False, between=cut)
    with Disk(folder) as disk:
        live(source, resumed, said=disk.note)
    found = {"count": count, "resumed": 0, "nothing": 0, "problems": []}
    for number in range(count):
        path = folder / f"left{number}"
        point = draw.randrange(1, len(disk.log) + 1)
        said = power_loss(disk, point, draw, path)
        durable, place = durable_in(said), path / "source"
        what = f"power loss {number} of seed {seed} at operation {point} of {len(disk.log)}"
        problems = faults_of(place, reference, durable)
        result = {"refused": "Error: no run"} if not place.exists() else live_on(place, lambda text: None, True)
        if "refused" in result:
            found["nothing"] += 1
            problems += [f"not resumed: {result['refused']}"] if durable else []
        elif result["lanes"] != reference[STEPS]:
            problems.append("other final bits")
        else:
            found["resumed"] += 1
            problems += faults_of(place, reference)
        found["problems"] += [f"{what}: {one}" for one in problems]
        shutil.rmtree(path, ignore_errors=True)
    return found


def told(run, **more):
    """A life in which nothing may be raised, but where the first step could not begin the run."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            lanes = live(run, False, **more)
        except OSError as error:
            begun = any("step" in line for line in _lines(run))
            if begun:
                raise
            return {"begun": False, "error": str(error)}
    texts = [str(one.message) for one in said]
    return {"begun": True, "lanes": lanes, "warned": bool(texts), "failed": any("not saved" in text for text in texts)}


def _lines(run):
    with contextlib.suppress(OSError):
        return [line for line in (run / "telemetry.jsonl").read_text().splitlines() if '"type":"step"' in line]
    return []


def on_full_disk(run, kind, point, more, mount):
    def between(step):
        if more and step == 12 and kind == "small file system":
            subprocess.run(["mount", "-o", "remount,size=64m", mount], check=True)

    if kind == "limit of a file's size":
        limit = int(300 + point * 14_000)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        return told(run)
    if kind == "ENOSPC":
        first = int(1 + point * 140)
        last = first + 30 if more else 10**9
        full = Faults(
            run, lambda number, name: first <= number < last and name in ("write", "open", "mkdir"), error=errno.ENOSPC
        )
        with full:
            return told(run)
    return told(run, between=between)


def on_hindered(run, kind, at):
    if kind in ("read-only", "stale"):
        began = []
        names = ("open", "replace", "unlink", "mkdir") + (("write", "fsync") if kind == "stale" else ())
        error = errno.EROFS if kind == "read-only" else errno.ESTALE
        faults = Faults(run, lambda number, name: bool(began) and name in names, error=error)
        with faults:
            return told(run, between=lambda step: step == at and began.append(step))
    if kind == "permissions":

        def between(step):
            if step == 1:  # root may write anywhere; and all that it must read has been read now
                for place in (run, *run.rglob("*")):
                    os.chown(place, 65534, 65534)
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            if step in (at, at + 6):
                os.chmod(run / "checkpoints", 0o555 if step == at else 0o755)

        found = told(run, between=between)
        os.chmod(run / "checkpoints", 0o755)
        return found

    def unmount(step):
        if step == at:
            subprocess.run(["umount", "-l", run], check=True)

    return told(run, between=unmount)


def _can_mount(folder):
    place = Path(folder) / "mounted"
    place.mkdir(exist_ok=True)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place], capture_output=True).returncode:
        return False
    subprocess.run(["umount", place], check=True)
    return True


def main(arguments=None):
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--short", action="store_true")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--only", nargs="*", default=PARTS, choices=PARTS, help="some of its parts")
    given = options.parse_args(arguments)
    sizes = (12, 14, 4, 24, 6, 4) if given.short else (260, 260, 24, 200, 60, 24)
    os.nice(10)
    with tempfile.TemporaryDirectory(prefix="workbench-crashes-") as folder:
        campaign = Campaign(folder, given.seed)
        began = time.perf_counter()
        for name, count in zip(PARTS, sizes, strict=True):
            if name not in given.only:
                continue
            if name in ("kills", "doomed"):
                campaign.kills(count, name == "doomed")
            else:
                getattr(campaign, name)(count)
            print(f"{time.perf_counter() - began:7.1f} s  {name}: {len(campaign.problems)} problems so far", flush=True)
        for name, count in campaign.counts.items():
            print(f"{count:7d}  {name}")
        print(f"{campaign.operations:7d}  disk operations in a life; kills at one, by what it was:")
        for name, count in sorted(campaign.places.items()):
            print(f"{count:11d}  {name}")
        for problem in campaign.problems[:40]:
            print(problem)
    print(f"{len(campaign.problems)} problems")
    return 1 if campaign.problems else 0


if __name__ == "__main__":
    sys.exit(main())
