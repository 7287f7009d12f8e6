"""Eyes and hands of the panel's tests: set what a person would set, read what they would see."""

import functools
import html
import os
import re
import subprocess
import sys
from pathlib import Path

import ipywidgets as W
import runs

from workbench.panel import Panel
from workbench.run import Run

SPIKE, STEPS = 18, 24
ALWAYS = ("facts", "step_facts", "estimate", "status", "error", "output", "badges", "code")
VIEWS = {"Timeline": ("timeline",), "Step": ("layers",), "Batch": ("batch",)}
VIEWS |= {"Cause": ("verdict", "onset", "experiments"), "Environment": ("environment", "examination")}
EVERY = (*ALWAYS, *(name for names in VIEWS.values() for name in names))
EVIL = "<script>alert(1)</script>"


@functools.cache
def spiked() -> Path:
    out = runs.scratch() / "spiked"
    said = runs.workbench(
        *("train", "--corpus", runs.corpus(), "--steps", STEPS, "--out", out, "--save-every", 8, *runs.FLAGS),
        *("--spike-window", 8, "--fault", f"garbage@{SPIKE}:rows=2", "--max-lr", "3e-3"),
    )
    assert said.code == 0, said.err
    return out


def seen(panel: Panel) -> str:
    """Everything that the panel shows, as text."""
    return "\n".join(plain(getattr(panel, name).value) for name in EVERY)


def look(panel: Panel, view: str) -> str:
    """Turns to a view; returns its HTML."""
    panel.view.value = view
    if view == "Environment":
        panel.wait(90)  # it asks which machine this is
    return "\n".join(getattr(panel, name).value for name in VIEWS[view])


def plain(markup: str) -> str:
    markup = re.sub(r"<style>.*?</style>", " ", re.sub(r'src="data:[^"]*"', "", markup))
    text = html.unescape(re.sub(r"</?(?:i|b|bdi|small)\b[^>]*>", "", markup))
    return re.sub(r"<[^>]+>", " ", text).replace("\N{NO-BREAK SPACE}", " ")


def loss(step: int) -> str:
    """As the panel shows it."""
    return f"{Run(spiked()).steps.set_index('step')['loss'][step]:.4g}"


def press(panel: Panel, button: W.Button | None = None) -> None:
    """Presses a button, the one to replay if none is given, and waits."""
    (panel.replay_button if button is None else button).click()
    panel.wait(90)


def in_a_process(code: str, *arguments: object) -> str:
    """What a fresh Python process prints, in which warnings are errors."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONWARNINGS": "error"},
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
