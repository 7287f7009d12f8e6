"""What each rank does in the tests of data-parallel runs: `mlx.launch -n 2 -- python ranks_job.py WHAT FOLDER`.

Each rank leaves what it found in FOLDER/WHAT.RANK.json.
"""

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np

import workbench as wb
from workbench.errors import WorkbenchError
from workbench.ranks.world import anywhere, everywhere, exchange, first_signal, world

STEPS, SAVE_EVERY, SPIKE = 14, 4, 11  # rank 1's targets at step SPIKE are 40 times as large


class Waves:
    """Pairs (x, sin of a sum) of one rank, drawn anew for each batch from its number."""

    def __init__(self, rank, flip=None, infinite=None):
        self.rank, self.flip, self.infinite, self.drawn = rank, flip, infinite, 0

    def __iter__(self):
        return self

    def __next__(self):
        random = np.random.Generator(np.random.Philox(key=(11, self.rank), counter=self.drawn))
        self.drawn += 1
        x = random.standard_normal((8, 6), dtype=np.float32)
        y = np.sin(x.sum(axis=1, keepdims=True))
        if (self.rank, self.drawn) == (1, SPIKE):
            y *= 40
        if self.flip == (self.rank, self.drawn):
            x.view(np.uint32)[0, 0] ^= 1
        if self.infinite == (self.rank, self.drawn):
            x[0, 0] = np.inf
        return x, y

    def state_dict(self):
        return {"drawn": self.drawn}

    def load_state_dict(self, cursor):
        self.drawn = cursor["drawn"]


def loss_fn(model, x, y):
    return nn.losses.mse_loss(model(x), y)


def parts(seed=21, average=True):
    """Model, optimizer and step, at their initial state; the random state is the rank's own."""
    rank = mx.distributed.init().rank()
    mx.random.seed(seed)
    model = nn.Sequential(nn.Linear(6, 12), nn.Dropout(0.1), nn.ReLU(), nn.Linear(12, 1))
    mx.eval(model.parameters())
    mx.random.seed(100 + rank)
    optimizer = optim.AdamW(1e-2)

    def step(x, y):
        loss, gradients = nn.value_and_grad(model, loss_fn)(model, x, y)
        if average:
            gradients = nn.average_gradients(gradients)
        gradients, _ = optim.clip_grad_norm(gradients, 1.0)
        optimizer.update(model, gradients)
        return loss

    return model, optimizer, step


def build(flip=None, infinite=None):
    """The factory."""
    model, optimizer, step = parts()
    return wb.Experiment(model, optimizer, loss_fn, Waves(world().rank, flip, infinite), step_fn=step)


def plain():
    """That of a loop which hands over its batches, and whose step the recorder makes."""
    model, optimizer, _ = parts()
    return wb.Experiment(model, optimizer, loss_fn)


def record(folder, steps=STEPS, dies_before=None, **options):
    model, optimizer, step = parts()
    sampler = Waves(world().rank)
    given = {"factory": "ranks_job:build", "save_every": SAVE_EVERY, "spikes": wb.SpikeSettings(window=4)} | options
    with wb.Recorder(folder, model, optimizer, loss_fn, sampler, step_fn=step, **given) as recorder:
        for batch in recorder.batches(steps):
            if recorder.step_number + 1 == dies_before and world().rank == 1:
                end, first = time.monotonic() + 60, folder / "checkpoints" / f"{SAVE_EVERY:08d}.json"
                while not first.exists() and time.monotonic() < end:  # rank 0 writes it meanwhile
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)
            recorder.step(batch)
    weights = np.concatenate([np.asarray(model.layers[n].weight).ravel() for n in (0, 3)])
    return hashlib.sha256(weights.tobytes()).hexdigest()


def traced(trace):
    return {
        "exact": trace.exact,
        "sentence": trace.sentence(),
        "carried": trace.record.carried,
        "ranks": [[one.rank, one.exact, one.differing] for one in trace.record.ranks],
        "losses": [one.loss for one in trace.record.ranks],
        "loss": trace.record.loss,
        "badges": [verdict for _, verdict, _ in trace.badges()],
        "path": str(trace.path),
    }


def refused(perform):
    try:
        perform()
    except WorkbenchError as error:
        return f"{type(error).__name__}: {error}"
    return None


def unequal_run(folder, **given):
    model, optimizer, step = parts(**given)
    with wb.Recorder(folder, model, optimizer, loss_fn, Waves(world().rank), step_fn=step) as recorder:
        for batch in recorder.batches(2):
            recorder.step(batch)


def struck_run(folder):
    """One bit of one weight of rank 1 is flipped after step 3."""
    model, optimizer, step = parts()
    with wb.Recorder(folder, model, optimizer, loss_fn, Waves(world().rank), step_fn=step, save_every=2) as recorder:
        for batch in recorder.batches(6):
            if recorder.step_number == 3 and world().rank == 1:
                bits = np.array(model.layers[3].weight)
                bits.view(np.uint32)[0, 0] ^= 1
                model.layers[3].weight = mx.array(bits)
            recorder.step(batch)


def pruned_run(folder):
    """All ranks set some weights to zero after step 3."""
    model, optimizer, step = parts()
    given = {"factory": "ranks_job:build", "save_every": 0}
    with wb.Recorder(folder, model, optimizer, loss_fn, Waves(world().rank), step_fn=step, **given) as recorder:
        for batch in recorder.batches(5):
            recorder.step(batch)
            if recorder.step_number == 3:
                model.layers[3].weight[0, :4] = 0.0


def infinite_run(folder, of):
    """One number of the second batch of one rank is infinite; in the activations of that rank alone, it is seen."""
    made = build(infinite=(of, 2))
    given = (made.model, made.optimizer, made.loss_fn, made.sampler)
    with wb.Recorder(folder, *given, step_fn=made.step_fn, save_every=0, spikes=None) as recorder:
        for batch in recorder.batches(2):
            recorder.step(batch)
    trace = wb.open_run(folder).replay(2, experiment=build(infinite=(of, 2)), with_probe=False, repeat=False)
    return traced(trace)


def handed_over(folder):
    model, optimizer, _ = parts()
    with wb.Recorder(folder, model, optimizer, loss_fn, factory="ranks_job:plain", save_every=0) as recorder:
        sampler, returned = Waves(world().rank), []
        for _ in range(4):
            returned.append(float(recorder.step(next(sampler))))
    return returned


def everything(folder, corpus):
    here, found = world(), {}
    found["world"] = [here.rank, here.size, here.backend]
    found["told"] = [len(one) for one in exchange(b"x" * (3 + 90_000 * here.rank))]
    asked = everywhere(here.rank == 0), anywhere(here.rank == 0), everywhere(True), anywhere(False)
    found["asked"] = [*asked, first_signal(15 * here.rank)]
    found["sums"] = []
    for dtype in (mx.float32, mx.bfloat16):
        mine = mx.array(np.random.default_rng(here.rank).standard_normal(10_000, np.float32)).astype(dtype)
        for _ in range(3):
            total = mx.distributed.all_sum(mine).astype(mx.float32)
            found["sums"].append(hashlib.sha256(np.asarray(total).tobytes()).hexdigest())
    found["weights"] = record(folder / "own")
    found["resumed"] = record(folder / "killed", resume=True)
    run = wb.open_run(folder / "own")
    found["replay"] = traced(run.replay(SPIKE, factory="ranks_job:build"))
    elsewhere = folder / "elsewhere"
    found["range"] = [traced(one) for one in run.replay(range(5, 7), factory="ranks_job:build", trace_dir=elsewhere)]
    flipped = build(flip=(1, SPIKE))
    found["flipped"] = traced(run.replay(SPIKE, experiment=flipped, with_probe=False, trace_dir=elsewhere / "flipped"))
    found["returned"] = handed_over(folder / "handed")
    handed = wb.open_run(folder / "handed")
    found["handed"] = traced(handed.replay(3, factory="ranks_job:plain"))
    found["unaveraged"] = refused(lambda: unequal_run(folder / "unaveraged", average=False))
    found["unseeded"] = refused(lambda: unequal_run(folder / "unseeded", seed=21 + here.rank))
    found["elsewhere"] = refused(lambda: unequal_run(folder / f"of-rank-{here.rank}"))
    found["struck"] = refused(lambda: struck_run(folder / "struck"))
    pruned_run(folder / "pruned")
    found["pruned"] = traced(wb.open_run(folder / "pruned").replay(5, factory="ranks_job:build"))
    found["infinite"] = [infinite_run(folder / f"infinite-{rank}", rank) for rank in range(here.size)]
    found["rollback"] = refused(lambda: record(folder / "rollback", auto_rollback="on"))
    found["autopsy"] = refused(lambda: run.autopsy(SPIKE, factory="ranks_job:build"))
    trained = wb.train_run(folder / "trained", corpus, 6, ctx=16, batch=4, depth=1, dropout=0.1, device="cpu")
    found["trained"] = traced(trained.replay(5))
    return found


def main(what, folder, corpus=None):
    folder = Path(folder)
    if what == "everything":
        found = everything(folder, corpus)
    elif what == "killed":
        found = record(folder / "killed", dies_before=SAVE_EVERY * 2 + 2)
    elif what == "short":
        found = record(folder / "short", steps=SAVE_EVERY + 2)
    (folder / f"{what}.{world().rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
