"""Data-parallel runs under MLX's launcher, measured: `tests/data_parallel.py FOLDER --backend nccl --device gpu`.

Trains the built-in model on several ranks, compiled and eager, replays steps of it under the same launcher, kills a
rank and resumes, and asks whether all_sum has the same bits on each rank and each time. Prints a JSON document;
exits with 0 only if all of it is exact.
"""

import argparse
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}


def launched(asked, *command, until=lambda: False):
    """Runs a command in every rank; returns what was printed, and the seconds.

    Args:
        until: when all ranks are to be killed.
    """
    from workbench.ranks.launching import launch_command
    from workbench.ranks.rank_setup import RankSetup

    setup = RankSetup(size=asked.ranks, backend=asked.backend, hosts=[socket.gethostname()] * asked.ranks)
    began = time.perf_counter()
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    whole = [*launch_command(setup), *map(str, command)]
    with subprocess.Popen(whole, env=ENVIRONMENT, start_new_session=True, **streams) as child:
        keep, child.stdin = child.stdin, None  # open to the end: the launcher would ask a closed one without a pause
        while True:
            try:
                out, errors = child.communicate(timeout=0.05)
                break
            except subprocess.TimeoutExpired:
                if until() or time.perf_counter() - began > asked.timeout:
                    os.killpg(child.pid, signal.SIGKILL)
        keep.close()
    return out, errors, time.perf_counter() - began


def workbench(asked, *command, **more):
    return launched(asked, sys.executable, "-m", "workbench", *command, **more)


def trained(asked, out, *more, **until):
    shape = ["--preset", asked.preset, "--dtype", asked.dtype, "--device", asked.device, "--dropout", "0.1"]
    corpus = ["--corpus", ROOT / "data" / "shakespeare.txt", "--seed", "42", "--save-every", "10"]
    corpus += ["--lr-schedule", "constant", "--warmup", "3"]
    how = ["--out", out, "--resume"] if "--resume" in more else [*corpus, *shape, "--out", out]
    rest = [one for one in more if one != "--resume"]
    return workbench(asked, "train", *how, "--steps", asked.steps, *rest, "--print-fingerprint", **until)


def last_state(run):
    lines = [json.loads(line) for line in (Path(run) / "telemetry.jsonl").read_text().splitlines()]
    last = [line for line in lines if line["type"] == "step"][-1]
    return last["step"], last["state"], last["ranks"], last["loss_bits"]


def document(out):
    """What rank 0 printed, after what NCCL's ranks print of themselves."""
    return json.loads(out[out.index("{") :])


def steps_of(run):
    path = Path(run) / "telemetry.jsonl"
    return path.read_text().count('"type":"step"') if path.exists() else 0


def sums():
    """In each rank: whether all_sum repeats itself, as a hash a dtype and size."""
    import mlx.core as mx
    import numpy as np

    from workbench.ranks.world import exchange_json, world

    found = {}
    for dtype in (mx.float32, mx.bfloat16):
        for size in (1_000, 1_000_003, 1 << 24):
            mine = mx.array(np.random.default_rng(world().rank).standard_normal(size, np.float32)).astype(dtype)
            for _ in range(5):
                total = mx.distributed.all_sum(mine, group=world().group).astype(mx.float32)
                name = f"{str(dtype).removeprefix('mlx.core.')} {size}"
                found.setdefault(name, []).append(hashlib.sha256(np.asarray(total).tobytes()).hexdigest()[:16])
    told = exchange_json(found)
    if world().rank == 0:
        distinct = {name: len({bits for one in told for bits in one[name]}) for name in found}
        print(json.dumps({"distinct": distinct, "first": {name: found[name][0] for name in found}}))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--backend", default="nccl")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="gpu")
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--timeout", type=int, default=300)
    both = {"compiled": "--compile", "eager": "--no-compile"}
    parser.add_argument("--mode", choices=both, dest="modes", help="Only this one, of both.")
    parser.add_argument("--only-sums", action="store_true", help="Ask only whether all_sum repeats itself.")
    asked = parser.parse_args()
    asked.modes = [both[asked.modes]] if asked.modes else list(both.values())
    sys.path.insert(0, str(ROOT))
    found, wrong = {"ranks": asked.ranks, "backend": asked.backend, "dtype": asked.dtype}, []

    found["all_sum"] = []
    for _ in range(2):
        out, errors, _ = launched(asked, sys.executable, __file__, "--sums")
        found["all_sum"].append(document(out) if "{" in out else errors.strip().splitlines()[-3:])
    if found["all_sum"][0] != found["all_sum"][1] or "distinct" not in found["all_sum"][0]:
        wrong.append("all_sum")
    elif set(found["all_sum"][0]["distinct"].values()) != {1}:
        wrong.append("all_sum")

    for how in () if asked.only_sums else asked.modes:
        runs = {name: asked.folder / f"{name}{how}" for name in ("whole", "again", "killed")}
        row = found[how] = {}
        for name in ("whole", "again"):
            _, errors, row[f"seconds to train {name}"] = trained(asked, runs[name], how)
            if not (runs[name] / "run.json").exists():
                raise SystemExit(f"{name}{how} was not recorded:\n{errors}")
        states = {name: last_state(runs[name]) for name in ("whole", "again")}
        row["two runs have the same bits"] = states["whole"] == states["again"]
        for step in (1, asked.steps // 2 + 3, asked.steps):
            out, errors, seconds = workbench(asked, "replay", runs["whole"], "--step", step, "--json")
            try:
                trace = document(out)
                row[f"replay {step}"] = {
                    "exact": trace["exact"],
                    "ranks": [one["exact"] for one in trace["ranks"]],
                    "badges": {name: gate["verdict"] for name, gate in trace["gates"].items()},
                    "certified_probe": trace["certified_probe"],
                    "first_difference": trace["first_difference"],
                    "carried": trace["carried"],
                    "seconds": round(seconds, 2),
                }
            except ValueError:
                row[f"replay {step}"] = {"exact": False, "said": errors.strip().splitlines()[-5:]}
        trained(asked, runs["killed"], how, until=lambda run=runs["killed"]: steps_of(run) > asked.steps // 2)
        row["killed after step"] = steps_of(runs["killed"])
        trained(asked, runs["killed"], "--resume")
        row["resumed to the same bits"] = last_state(runs["killed"])[:4] == states["whole"]
        if not row["two runs have the same bits"] or not row["resumed to the same bits"]:
            wrong.append(how)
        wrong += [f"{how} {name}" for name, one in row.items() if name.startswith("replay") and not one["exact"]]
    found["wrong"] = wrong
    print(json.dumps(found, indent=1))
    return 1 if wrong else 0


if __name__ == "__main__":
    if sys.argv[1:] == ["--sums"]:
        sys.path.insert(0, str(ROOT))
        sums()
    else:
        sys.exit(main())
