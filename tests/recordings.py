"""Recorded loops of one's own, for several test modules, and what their files hold."""

import runs

from workbench import Recorder, open_run
from workbench.spikes import SpikeSettings

SPIKES = SpikeSettings(window=4)
WINDOWED = {"spikes": SPIKES, "save_every": 4}


def recorder(path, experiment=None, **settings):
    experiment = experiment or runs.build()
    return Recorder(path, *runs.parts(experiment), compile=False, **(WINDOWED | settings))


def record(path, steps, experiment=None, **settings):
    with recorder(path, experiment, **settings) as recording:
        for batch in recording.batches(steps):
            recording.step(batch)
    return open_run(path)


def steps_of(run, segment=0):
    """Per step what the run logged, without the times."""
    moving = ("t", "elapsed_s", "step_per_s", "peak_rss_mb", "segment", "seal")
    return {
        line["step"]: {key: value for key, value in line.items() if key not in moving}
        for line in runs.lines(run.path)
        if line["type"] == "step" and line["segment"] == segment
    }


def checkpoint_bytes(run, step, segment=0):
    stem = f"{step:08d}" + (f".s{segment}" if segment else "")
    suffixes = (".safetensors", ".optimizer.safetensors", ".rng", ".cursor")
    return [(run.path / "checkpoints" / (stem + suffix)).read_bytes() for suffix in suffixes]


def exact(run, step, **options):
    trace = run.replay(step, experiment=runs.build(), with_probe=False, **options)
    assert trace.exact, trace.sentence()
    return trace
