"""The cause of a spike and experiments about it, in the panel."""

import re
import threading

import pytest
from panels import EVIL, SPIKE, look, plain, press, seen

from workbench.errors import WorkbenchError
from workbench.panel import Panel
from workbench.screen.performing import Cancelled

pytest_plugins = ["panel_fixtures"]
pytestmark = pytest.mark.usefixtures("closed", "quick")


def test_the_cause_by_the_button(panel):
    assert "replays step 18 and the steps before it" in plain(look(panel, "Cause"))
    panel.view.value = "Batch"
    press(panel, panel.cause_button)
    verdict, context = panel.found.verdict, panel.found.context
    assert panel.last_error is None and verdict.step == context.step == panel.trace.step == SPIKE
    assert repr(panel) == f"Panel(run='spiked', step=18, replayed, verdict={verdict.verdict!r})"
    assert panel.view.value == "Cause" and "steps before it in" in panel.status.value
    text = plain(panel.verdict.value)
    assert verdict.reason in text and all(one.sentence in text for one in (*verdict.evidence, *verdict.refuted))
    assert 'aria-label="Verdict on step 18"' in panel.verdict.value
    assert "Step 18 is exact" in seen(panel) and context.sentence() in plain(panel.onset.value)
    assert re.search(r'<img[^>]* alt="How far each layer', panel.onset.value)
    assert panel.measure_button.layout.display == "none"
    panel.step.value = 3
    assert panel.found.verdict is None and "wb-verdict" not in panel.verdict.value
    assert panel.measure_button.layout.display is None
    panel.step.value = SPIKE
    assert panel.found.verdict is verdict and verdict.reason in plain(panel.verdict.value)


def test_the_steps_before_are_measured_by_themselves_and_once(panel):
    look(panel, "Cause")
    press(panel, panel.measure_button)
    measured = panel.found.context
    assert panel.found.context.step == SPIKE and panel.found.verdict is None and panel.trace.exact
    assert "<img" in panel.onset.value and panel.last_error is None
    press(panel, panel.cause_button)
    assert panel.found.verdict.step == SPIKE and panel.found.context is measured


def test_too_few_steps_before_are_a_sentence(panel):
    look(panel, "Cause")
    panel.context(2)
    assert "fewer than 4 healthy neighbours" in panel.onset.value and "<img" not in panel.onset.value


def test_an_experiment_by_its_button(panel):
    look(panel, "Cause")
    names = [button.description for button in panel.try_buttons if button.layout.display is None]
    assert names[:4] == ["lr=0.5x", "batch=skip", "reset=m,v", "v=max"] and names[4].startswith("clip=")
    panel.replay(SPIKE)
    top = panel.trace.rows["row"].iloc[0]
    assert [button.description for button in panel.try_buttons][2] == f"drop-row={top}"
    press(panel, panel.try_buttons[0])
    assert panel.last_error is None and panel.found.experiments["change"].tolist() == ["untouched", "lr=0.5x"]
    text = plain(panel.experiments.value)
    assert "Interventions: each is a replay of step 18 with exactly one thing changed" in text
    assert "The untouched replay of step 18 has the run's bits" in text
    press(panel, panel.try_buttons[2])
    made = panel.found.experiments
    assert made["change"].tolist() == ["untouched", "lr=0.5x", f"drop-row={top}"]
    cells = re.findall(r"<tr><td[^>]*>(.*?)</td><td[^>]*>(.*?)</td>", panel.experiments.value)
    assert [plain(name) for name, _ in cells] == made["change"].tolist()
    assert [plain(loss).split()[0] for _, loss in cells] == [f"{loss:#.4g}" for loss in made["loss"]]
    assert "±0" in cells[1][1] and "\N{MINUS SIGN}" in cells[2][1]  # a rate moves no loss of its own step
    panel.step.value = 3
    assert "<table" not in panel.experiments.value
    panel.step.value = SPIKE
    assert "<table" in panel.experiments.value


def test_an_experiment_of_ones_own(panel):
    look(panel, "Cause")
    press(panel, panel.try_button)
    assert "no change is given" in plain(panel.error.value)
    for text, said in (
        ("faster", "is malformed"),
        ("speed=2", "is unknown"),
        ("lr=fast", "has the value"),
        (EVIL, "is"),
    ):
        panel.change.value = text
        press(panel, panel.try_button)
        assert said in plain(panel.error.value) and "<script" not in panel.error.value
        assert panel.found.experiments is None
    panel.change.value = "drop-row=99"  # well formed, and not of this batch
    press(panel, panel.try_button)
    assert "99" in plain(panel.error.value) and "failed" in panel.status.value
    panel.change.value = " lr=2x  clip=off "
    press(panel, panel.try_button)
    assert (
        panel.found.experiments["change"].tolist() == ["untouched", "lr=2.0x", "clip=off"] and panel.error.value == ""
    )


def test_work_from_python_is_shown_and_returned(panel):
    table = panel.whatif(10, "lr=0.5x", next_steps=2)
    assert panel.step.value == 10 and table.equals(panel.found.experiments) and table["steps"].tolist() == [3, 3]
    verdict = panel.autopsy(10)
    assert verdict is panel.found.verdict and verdict.verdict == "no-spike"
    assert verdict.reason in plain(panel.verdict.value) and panel.view.value == "Cause"
    with pytest.raises(WorkbenchError, match="is unknown"):
        panel.whatif(10, "speed=2")
    assert "is unknown" in plain(panel.error.value) and panel.found.verdict is verdict


def test_cancelling_ends_all_that_was_asked_for(panel, monkeypatch):
    arrived, may_go = threading.Event(), threading.Event()
    tell = panel._performer.progress

    def wait_first(*what):
        arrived.set()
        assert may_go.wait(60)
        tell(*what)

    monkeypatch.setattr(panel._performer, "progress", wait_first)
    panel.cause_button.click()
    assert arrived.wait(60)
    look(panel, "Cause")
    buttons = (panel.replay_button, panel.cause_button, panel.measure_button, *panel.try_buttons, panel.try_button)
    assert all(button.disabled for button in buttons) and not panel.cancel_button.disabled
    panel.cancel_button.click()
    may_go.set()
    panel.wait(60)
    assert "cancelled; nothing was changed" in panel.status.value and isinstance(panel.last_error, Cancelled)
    assert panel.found.verdict is None and panel.found.context is None
    assert not any(button.disabled for button in buttons) and panel.cancel_button.disabled
    assert not (panel.opened.path / "traces").exists()


def test_what_is_done_after_the_verdict_says_what_for_and_the_badges_stay(panel, folder, monkeypatch):
    panel.replay(SPIKE)
    later = Panel(folder, "spiked")  # which has the replay from the run's files
    assert "Step 18 is exact" in plain(later.badges.value)
    told, tell = [], later._performer.progress

    def note(*what):
        tell(*what)
        told.append((plain(later.status.value).strip(), plain(later.badges.value), later.found.verdict is not None))

    monkeypatch.setattr(later._performer, "progress", note)
    press(later, later.cause_button)
    assert later.last_error is None and later.found.context is not None
    after = [(status, badges) for status, badges, verdict in told if verdict]
    assert after and all(status.startswith("The verdict is there. Measuring the steps before") for status, _ in after)
    assert not any("The verdict is there" in status for status, _, verdict in told if not verdict)
    assert all("Step 18 is exact" in badges for _, badges, _ in told)
