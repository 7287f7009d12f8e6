"""The map of where it began, from what a run's folder holds."""

import re
import shutil

import pytest
import runs
from panels import EVIL, SPIKE, plain, spiked

from workbench.probes.neighbours import BEFORE
from workbench.run import Run
from workbench.screen import departure
from workbench.screen.heatmap import COLOURS
from workbench.screen.onset_view import onset, stored_context
from workbench.screen.opened import Opened
from workbench.step_report import report_html
from workbench.trace import read


@pytest.fixture(scope="module")
def replayed(tmp_path_factory):
    """A run of which the steps N-8 … N were replayed, each with its trace in the folder."""
    run = Run(shutil.copytree(spiked(), tmp_path_factory.mktemp("replayed") / "spiked"))
    run.replay(range(SPIKE - BEFORE, SPIKE + 1), repeat=False)
    return run


@pytest.fixture
def run(replayed, tmp_path):
    return Run(shutil.copytree(replayed.path, tmp_path / "spiked"))


def of(run, step=SPIKE):
    """What is said and shown of a step: text, and the pictures' descriptions."""
    path = run.path / "traces" / f"{step:08d}.json"
    said = onset(Opened(run.path), step, 0, read(path) if path.exists() else None)
    return plain(said), re.findall(r'alt="(.*?)"', said)


def test_replays_of_the_steps_before_are_put_beside_each_other(run):
    said, pictures = of(run)
    whole = run.context(SPIKE)
    assert departure.sentence(whole.frame, run.manifest.layers, SPIKE, "replay") in said
    assert f"steps {SPIKE - BEFORE} to {SPIKE}" in said and len(pictures) == 1
    assert f"from step {SPIKE - BEFORE} to {SPIKE}, by replay" in pictures[0]
    stored = stored_context(Opened(run.path), read(run.path / "traces" / f"{SPIKE:08d}.json"), 0, whole.flagged)
    assert stored.frame.equals(whole.frame)


def test_without_replays_the_telemetry_is_shown(run):
    shutil.rmtree(run.path / "traces")
    said, pictures = of(run)
    assert "by the telemetry of steps" in said and f"--step {SPIKE - BEFORE}..{SPIKE}" in said
    assert len(pictures) == 1 and "by telemetry" in pictures[0]


@pytest.mark.parametrize("what", ["missing", "elsewhere", "quick"])
def test_what_is_not_alike_is_not_put_beside(run, what):
    """A gap three steps before: too few are left to judge by, so telemetry is."""
    path = run.path / "traces" / f"{SPIKE - 3:08d}.json"
    if what == "missing":
        path.unlink()
    elif what == "elsewhere":
        runs.edit_json(path, lambda trace: trace["environment"].update(mlx="0.1.0"))
    else:
        path.unlink()  # a fuller one is kept
        run.replay(SPIKE - 3, with_probe=False, repeat=False)
    assert "by the telemetry of steps" in of(run)[0]


def test_what_is_not_exact_is_named(run):
    def depart(trace):
        trace["exact"] = False

    runs.edit_json(run.path / "traces" / f"{SPIKE - 2:08d}.json", depart)
    assert f"Not exact, so maybe not what the run computed: steps {SPIKE - 2}." in of(run)[0]


def test_a_first_step_has_nothing_to_be_read_against(run):
    said, pictures = of(run, 2)
    assert "can't be told" in said and pictures == []


def test_names_from_outside_are_escaped(run):
    def spoil(manifest):
        manifest["layers"] = [f"{EVIL}{layer}" for layer in manifest["layers"]]
        manifest["owned"] = {f"{EVIL}{layer}": paths for layer, paths in manifest["owned"].items()}

    shutil.rmtree(run.path / "traces")
    runs.edit_json(run.path / "run.json", spoil)
    assert "<script" not in onset(Opened(run.path), SPIKE, 0, None)


def test_it_is_part_of_the_report(run):
    text = report_html(run, SPIKE)
    assert "<h2>Where it began</h2>" in text and f"from step {SPIKE - BEFORE} to {SPIKE}, by replay" in text


def test_colours_survive_the_small_picture():
    """`figures.png` keeps four bits a channel: what is white between blue and vermilion must not turn yellow."""
    from workbench.figures import BLUE, VERMILION

    colours = [[round(255 * part) for part in colour] for colour in COLOURS(range(COLOURS.N))[:, :3]]
    for colour in colours[1:-1]:
        assert all(part % 17 == 0 for part in colour), colour
    hexadecimal = ["#{:02X}{:02X}{:02X}".format(*colour) for colour in colours]
    assert hexadecimal[0] == BLUE and hexadecimal[-1] == VERMILION and hexadecimal[COLOURS.N // 2] == "#FFFFFF"
    light = [sum(colour) for colour in colours]
    middle = COLOURS.N // 2
    assert light[: middle + 1] == sorted(light[: middle + 1]) and light[middle:] == sorted(light[middle:])[::-1]
