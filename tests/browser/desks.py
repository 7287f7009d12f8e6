"""A run to look at, and the panel as a person handles it on the page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import runs

from .driving import Notebook
from .servers import PATIENCE

SPIKE, STEPS = 72, 90
CORPUS = Path(__file__).resolve().parents[2] / "data" / "shakespeare.txt"


def record(out: Path, *options: object) -> Path:
    """90 steps of the built-in trainer with three rows of garbage at step 72: some seven seconds."""
    out.parent.mkdir(parents=True, exist_ok=True)
    said = runs.workbench(
        *("train", "--corpus", CORPUS, "--steps", STEPS, "--out", out, "--save-every", STEPS, "--device", "cpu"),
        *("--spike-window", 30, "--fault", f"garbage@{SPIKE}:rows=3", "--max-lr", "2e-3", *options),
    )
    assert said.code == 0, said.err
    return out


class PanelPage:
    """The panel in a notebook, or one of several. What it does is what a person's hands do.

    Attributes:
        itself: the panel. Others are found by their CSS class: `page["replay"]`.
    """

    def __init__(self, notebook: Notebook, place: int = 0) -> None:
        self.notebook, self.page = notebook, notebook.page
        self.itself = notebook.panel.locator(".wb-panel").nth(place)

    def __getitem__(self, name: str) -> Any:
        """A widget by its CSS class, without its `wb-`."""
        return self.itself.locator(f".wb-{name}")

    @property
    def alert(self) -> Any:
        return self.itself.get_by_role("alert")

    @property
    def views(self) -> list[str]:
        return self["view"].get_by_role("button").all_inner_texts()

    def choose_run(self, name: str) -> None:
        self["run"].locator("select").select_option(label=name)

    def choose_spike(self, step: int) -> None:
        listed = self["spikes"].locator("option").filter(has_text=re.compile(rf"^\s*{step}\s"))
        self["spikes"].locator("select").select_option(value=listed.get_attribute("value"))

    def type_step(self, step: int) -> None:
        field = self["step"].locator("input")
        field.click()
        field.fill(str(step))
        field.press("Enter")

    def slide(self, key: str, times: int = 1) -> None:
        handle = self["slider"].locator(".noUi-handle")
        for _ in range(times):
            handle.press(key)

    def turn_to(self, view: str) -> None:
        self["view"].get_by_role("button", name=view, exact=True).click()

    def await_status(self, pattern: str, seconds: float = 60) -> None:
        """Until the status says so.

        Raises:
            RuntimeError: it says that the work failed, and that was not what is waited for.
        """
        self.page.wait_for_function(
            "([status, pattern]) => new RegExp(`${pattern}|failed[.]`).test(status.innerText)",
            arg=[self["status"].element_handle(), pattern],
            timeout=seconds * 1000,
        )
        if not re.search(pattern, self["status"].inner_text()):
            raise RuntimeError(f"{self['status'].inner_text()} {self.alert.all_inner_texts()}")

    def await_step(self, step: int, seconds: float = PATIENCE) -> None:
        """Until the facts of the step are on the page."""
        from playwright.sync_api import expect

        expect(self["step-facts"]).to_contain_text(f"Step {step}", timeout=seconds * 1000)

    def badges(self) -> list[str]:
        """The three, in words: "repeatable: exact"."""
        found = re.findall(r"\b(repeatable|faithful|sensitive): ([a-z ]+)", self["badges"].inner_text())
        return [f"{name}: {verdict.strip()}" for name, verdict in found]

    def python(self, expression: str) -> Any:
        return self.notebook.python(expression)
