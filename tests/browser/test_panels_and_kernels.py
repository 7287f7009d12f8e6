"""Two panels in one notebook, and a kernel that is restarted while one of them works: in JupyterLab, in a browser."""

import pytest

from . import servers
from .desks import SPIKE, PanelPage

expect = pytest.importorskip("playwright.sync_api", reason=servers.missing()).expect

EXACT = ["repeatable: exact", "faithful: exact", "sensitive: exact"]
LONG = SPIKE - 2  # no checkpoint but 0 before it: the longest replay


def test_two_panels_of_a_run(panel_on, bench):
    """Each is at a step of its own; they take turns at working, and the second sees what the first has found."""
    one = panel_on('ipywidgets.VBox([wb.Panel("runs", "mine"), wb.Panel("runs", "mine")])')
    two = PanelPage(bench, 1)
    two.type_step(LONG)
    two.await_step(LONG)
    expect(one["step-facts"]).to_contain_text(f"Step {SPIKE}")
    two["replay"].click()
    two.await_status("olling forward")
    with servers.held(servers.descendants(two.python("__import__('os').getpid()"))):  # so that it is not done before
        one["replay"].click()
        one.await_status("by another panel of this notebook")
    two["cancel"].click()
    two.await_status("cancelled")
    one["replay"].click()
    one.await_status(f"Step {SPIKE} replayed")
    assert one.badges() == EXACT and two.badges() == []
    two.type_step(SPIKE)
    two.await_step(SPIKE)
    expect(two["badges"]).to_contain_text("From the run's own files")
    assert two.badges() == EXACT and one.alert.count() == two.alert.count() == 0


def test_a_kernel_is_restarted_while_a_panel_works(panel, panel_on, bench, lab, work):
    panel.type_step(LONG)
    panel.await_step(LONG)
    panel["replay"].click()
    panel.await_status("olling forward")
    kernel = panel.python("__import__('os').getpid()")
    workers = servers.descendants(kernel)
    assert workers
    bench.javascript("await open.sessionContext.session.kernel.restart()")
    assert servers.still_running(workers) == []
    assert not (work / "mine" / "traces").exists() and not list((work / "mine").rglob(".*"))
    again = panel_on('wb.Panel("runs", "mine")')
    again["replay"].click()
    again.await_status(f"Step {SPIKE} replayed")
    assert again.badges() == EXACT
