"""The panel in JupyterLab, in a real browser: what a person does, and what is on the page then."""

import re

import pytest
import runs

from workbench.batches.batch import batch_table
from workbench.run import Run

from . import looks, servers
from .conftest import screenshots
from .desks import CORPUS, SPIKE, STEPS, PanelPage

expect = pytest.importorskip("playwright.sync_api", reason=servers.missing()).expect

EXACT = ["repeatable: exact", "faithful: exact", "sensitive: exact"]
LONG = SPIKE - 2  # no checkpoint but 0 before it: the longest replay


def test_a_run_a_step_and_a_replay(panel_on):
    panel = panel_on('wb.Panel("runs")')
    expect(panel["replay"]).to_be_disabled()
    panel.choose_run("mine")
    panel.await_step(SPIKE)  # the spike is where it begins
    expect(panel["facts"]).to_contain_text(f"{STEPS} steps · 1 spike")
    panel.type_step(30)
    panel.await_step(30)
    panel.slide("ArrowRight", 2)
    panel.await_step(32)
    panel.choose_spike(SPIKE)
    panel.await_step(SPIKE)
    expect(panel["step-facts"]).to_contain_text("robust standard deviations above the median")
    assert panel.badges() == []
    panel["replay"].click()
    panel.await_status(f"Step {SPIKE} replayed")
    assert panel.badges() == EXACT
    expect(panel["view"].get_by_role("button", name="Step")).to_have_class(re.compile("mod-active"))
    expect(panel["layers"].get_by_role("img", name=re.compile(f"Norms of each layer at step {SPIKE}"))).to_be_visible()
    assert panel.python("[panel.step.value, panel.trace.step, panel.trace.exact]") == [SPIKE, SPIKE, True]
    assert panel.python("repr(panel.last_error)") == "None"


def test_nothing_below_moves_when_a_step_is_replayed(panel):
    def place():
        return panel["view"].bounding_box()["y"] - panel.itself.bounding_box()["y"]

    panel.type_step(SPIKE + 1)  # of which nothing was computed yet
    panel.await_step(SPIKE + 1)
    before = place()
    panel["replay"].click()
    expect(panel["status"]).to_contain_text("Step")
    assert abs(place() - before) < 2
    panel.await_status(f"Step {SPIKE + 1} replayed")
    assert panel.badges() == EXACT and abs(place() - before) < 2
    expect(panel["status"].get_by_role("status")).to_contain_text("replayed")


CONTENT = {  # by what a view is told from an empty one: the widget, and words in it
    "Timeline": ("timeline", "Loss, gradient norm and learning rate"),
    "Step": ("layers", f"Norms of each layer at step {SPIKE}"),
    "Batch": ("batch", "share of the loss"),
    "Cause": ("verdict", f"Verdict on step {SPIKE}"),
    "Environment": ("environment", "jit_compiler"),
}


@pytest.fixture
def turn_to_theme(bench):
    yield bench.desk.turn_to_theme
    bench.desk.turn_to_theme("Light")


def test_every_view_is_readable(panel, bench, turn_to_theme):
    panel["cause"].click()
    panel.await_status("replayed with the steps before it")
    assert panel.badges() == EXACT and panel.views == list(CONTENT)
    for theme in ("Dark", "Light"):
        turn_to_theme(theme)
        for view in panel.views:
            panel.turn_to(view)
            expect(_content(panel, view).first).to_be_visible()
            with bench.at_full_height():
                bench.desk.take(screenshots() / f"{view.lower()}-{theme.lower()}.png")
                assert looks.overlaps(panel.itself) == [], (theme, view)
                assert looks.cut_off(panel.itself) == [], (theme, view)
                assert looks.faint(panel.itself) == [], (theme, view)
    for view in panel.views:  # as a projector has it
        panel.turn_to(view)
        with bench.at_full_height(width=1920):
            bench.desk.take(screenshots() / f"{view.lower()}-wide.png")
            assert looks.overlaps(panel.itself) == [] and looks.cut_off(panel.itself) == [], view
    for view in panel.views:  # beside something else: 520 pixels for the panel
        panel.turn_to(view)
        with bench.at_full_height(width=952):
            bench.desk.take(screenshots() / f"{view.lower()}-narrow.png")
            assert looks.overlaps(panel.itself) == [] and looks.cut_off(panel.itself) == [], view


def _content(panel, view):
    """What has the words, or is named so."""
    widget, words = CONTENT[view]
    return panel[widget].locator(f":text({words!r}), [alt*={words!r}], [aria-label*={words!r}]")


def test_what_is_wrong_with_a_look_is_seen(panel):
    """The other way round: each of these would be found."""
    panel["facts"].evaluate("facts => { facts.style.marginBottom = '-12px' }")
    panel["estimate"].locator("div").last.evaluate("text => { text.style.color = '#ccc'; text.style.width = '900px' }")
    panel["replay"].evaluate("button => { button.style.width = '40px' }")
    cell = "<td style='width:1em;white-space:normal;height:30em'>"
    table = f"<table><tr>{cell}7</td>{cell}{'a word ' * 20}</td></tr></table>"
    panel["estimate"].evaluate("(estimate, table) => estimate.insertAdjacentHTML('beforeend', table)", table)
    (squeezed,) = looks.squeezed(panel.itself)  # not the number, which is short
    assert "a word" in squeezed
    assert any("wb-facts" in found for found in looks.overlaps(panel.itself))
    assert any("wb-estimate" in found for found in looks.faint(panel.itself))
    found = " ".join(looks.cut_off(panel.itself))
    assert "wb-replay" in found and "wb-estimate" in found


def test_experiments_are_readable(panel):
    panel.turn_to("Cause")
    panel["change"].locator("input").fill("lr=0.5x")
    panel["try"].click()
    panel.await_status("replayed with a change")
    expect(panel["experiments"].locator("tbody tr")).to_have_count(2)
    assert looks.squeezed(panel.itself) == []


def test_the_timeline_is_clicked(panel):
    picture = panel["timeline"].get_by_role("img")
    box = picture.bounding_box()
    picture.click(position={"x": box["width"] / 2, "y": box["height"] / 3})
    expect(panel["step-facts"]).not_to_contain_text(f"Step {SPIKE}")
    assert abs(panel.python("panel.step.value") - STEPS / 2) < STEPS / 8


def test_a_damaged_checkpoint_is_named(panel):
    panel.choose_run("damaged")
    expect(panel["timeline"].get_by_role("img", name=re.compile("damaged"))).to_be_visible()
    panel["replay"].click()
    expect(panel.alert).to_contain_text(f"{SPIKE - 1:08d}.safetensors", timeout=60_000)
    expect(panel.alert).to_contain_text("SHA-256")
    expect(panel.alert).not_to_contain_text("Traceback")
    panel.await_status(f"Step {SPIKE}: failed")
    assert panel.badges() == []
    expect(panel["replay"]).to_be_enabled()
    panel.choose_run("mine")  # the next good action clears it
    panel.await_step(SPIKE)
    expect(panel.alert).to_have_count(0)


def test_a_run_that_cannot_be_replayed_here(panel, turn_to_theme):
    """It still shows what can be read, and says why not; and a person may insist."""
    panel.choose_run("elsewhere")
    expect(panel["facts"]).to_contain_text("MLX 0.1.0")
    panel["replay"].click()
    expect(panel.alert).to_contain_text("0.1.0", timeout=60_000)
    assert panel.badges() == []
    for view in panel.views:
        panel.turn_to(view)
        seen = panel.itself.inner_text()
        assert "0.1.0" in seen and f"Step {SPIKE}: loss" in seen, view
    panel.turn_to("Environment")
    expect(panel["environment"].get_by_text("differs")).to_be_visible()
    for theme in ("Dark", "Light"):
        turn_to_theme(theme)
        assert looks.faint(panel.itself) == [], theme
    panel.turn_to("Batch")
    expect(panel["batch"].locator("tbody tr").first).to_be_visible()
    panel["anyway"].locator("input").check()
    panel["replay"].click()
    expect(panel["status"]).not_to_contain_text("failed")  # as it did the time before
    panel.await_status(f"Step {SPIKE} replayed")
    assert len(panel.badges()) == 3
    expect(panel["badges"]).to_contain_text("informational")


def test_an_exception_in_a_callback_is_seen(panel, bench):
    bench.execute("panel._boundary.on_press(panel.refresh, lambda: 1 / 0)")
    panel["refresh"].click()
    expect(panel.alert).to_contain_text("ZeroDivisionError: division by zero")
    panel.alert.locator("summary").click()
    expect(panel.alert).to_contain_text("Traceback")
    panel.slide("ArrowLeft")  # and the panel goes on
    panel.await_step(SPIKE - 1)
    expect(panel.alert).to_have_count(0)


def test_a_long_replay_is_cancelled(panel, work):
    before, children = runs.digest(work / "mine"), panel.python(CHILDREN)
    panel.type_step(LONG)
    panel.await_step(LONG)
    panel["replay"].click()
    panel.await_status("olling forward")
    expect(panel["cause"]).to_be_disabled()
    panel.slide("ArrowLeft", 2)  # the rest of the panel goes on
    panel.await_step(LONG - 2)
    panel["cancel"].click()
    panel.await_status(f"Step {LONG}: cancelled; nothing was changed")
    expect(panel.alert).to_have_count(0)
    expect(panel["cancel"]).to_be_disabled()
    assert panel.badges() == [] and panel.python("panel.trace is None")
    assert runs.digest(work / "mine") == before
    assert set(panel.python(CHILDREN)) <= set(children)
    panel.choose_spike(SPIKE)  # and the next replay is as good as any
    panel["replay"].click()
    panel.await_status(f"Step {SPIKE} replayed")
    assert panel.badges() == EXACT


CHILDREN = "[child.pid for child in __import__('psutil').Process().children(recursive=True)]"


def test_a_page_that_is_loaded_again_goes_on(panel, bench):
    panel["replay"].click()
    panel.await_status(f"Step {SPIKE} replayed")
    bench.save()
    bench.desk.reload()
    bench.desk.open(bench.path)
    panel.itself.wait_for()
    assert panel.badges() == EXACT
    expect(_content(panel, "Step")).to_be_visible()
    panel.slide("ArrowLeft", 3)
    panel.await_step(SPIKE - 3)
    assert panel.python("panel.step.value") == SPIKE - 3
    panel.turn_to("Batch")
    expect(panel["batch"].locator("tbody tr").first).to_be_visible()


def test_the_keyboard_is_enough(panel, bench):
    """From the notebook's cell: Tab reaches every control, in the order of the page, and keys work them."""
    bench.panel.locator(".jp-CodeCell .cm-content").click()
    panel.page.keyboard.press("Escape")
    reached = []
    for _ in range(60):
        panel.page.keyboard.press("Tab")
        name = panel.page.evaluate(FOCUSED)
        if reached and name is None:
            break
        reached += [] if name is None else [name]
    views = [f"view {view}" for view in panel.views]
    always = ["folder", "run", "refresh", "spikes", "step", "slider", "replay", "cause"]
    assert [name for name in reached if name in always + views] == always + views
    assert set(panel.itself.evaluate(ENABLED)) <= set(reached)
    press = panel.page.keyboard.press
    _tab_to(panel, "step")
    press("ArrowUp")
    panel.await_step(SPIKE + 1)
    press("Tab")
    press("ArrowLeft")
    press("ArrowLeft")
    panel.await_step(SPIKE - 1)
    press("ArrowRight")
    panel.await_step(SPIKE)
    press("Tab")
    press("Enter")
    panel.await_status(f"Step {SPIKE} replayed")
    assert panel.badges() == EXACT
    _tab_to(panel, "view Batch")
    press("Space")
    expect(panel["batch"].locator("tbody tr").first).to_be_visible()
    _tab_to(panel, "cause")
    press("Space")
    expect(panel["verdict"].get_by_role("region")).to_be_visible(timeout=60_000)
    _tab_to(panel, "cancel")  # of the steps before it, which are measured next
    press("Space")
    panel.await_status("cancelled")
    _tab_to(panel, "try-one")
    assert len(bench.javascript("return open.content.widgets.map(String)")) == 1  # no key was taken for one of Lab's


FOCUSED = """() => {
    const widget = document.activeElement.closest('.wb-panel .jupyter-widgets');
    const name = widget && [...widget.classList].find(name => name.startsWith('wb-') && name !== 'wb-panel');
    const view = document.activeElement.closest('.wb-view');
    return view ? `view ${document.activeElement.innerText}` : name ? name.slice(3) : null;
}"""
ENABLED = """panel => [...panel.querySelectorAll('button,input,select,.noUi-handle')]
    .filter(one => !one.disabled && one.checkVisibility({visibilityProperty: true}))
    .map(one => one.closest('.wb-view') ? `view ${one.innerText}`
        : [...one.closest('.jupyter-widgets').classList].find(name => name.startsWith('wb-')).slice(3))"""


def test_arrow_keys_choose_in_a_list(panel):
    _tab_to(panel, "run")
    panel.page.keyboard.press("ArrowUp")
    expect(panel["facts"]).to_contain_text("recorded on cpu with MLX 0.1.0")


def _tab_to(panel, name):
    for _ in range(80):
        if panel.page.evaluate(FOCUSED) == name:
            return
        panel.page.keyboard.press("Tab")
    raise AssertionError(f"Tab never reaches {name}")


def test_two_hundred_moves_leave_nothing_behind(panel):
    there_and_back = (("ArrowLeft", 25), ("ArrowRight", 25))
    for view in ("Timeline", "Step"):
        panel.turn_to(view)
        panel.slide("ArrowLeft", 2)  # what is imported or drawn for the first time comes before the count
        panel.slide("ArrowRight", 2)
        panel.await_step(SPIKE)
        before = panel.python(HELD)
        for key, times in there_and_back * 2:
            panel.slide(key, times)
        panel.await_step(SPIKE)
        assert panel.python("panel.step.value") == SPIKE and panel.python("panel.last_error is None")
        after = panel.python(HELD)
        assert after["figures"] <= before["figures"] and after["widgets"] == before["widgets"], (before, after)
        assert after["threads"] <= before["threads"] and after["children"] <= before["children"], (before, after)
        assert after["bytes"] - before["bytes"] < 30e6, (before, after)


HELD = (
    "(lambda gc, psutil: (gc.collect(), {'figures': sum(type(one).__name__ == 'Figure' for one in gc.get_objects()),"
    " 'widgets': len(ipywidgets.widgets.widget._instances), 'threads': __import__('threading').active_count(),"
    " 'children': len(psutil.Process().children(recursive=True)), 'bytes': psutil.Process().memory_info().rss})[1])"
    "(__import__('gc'), __import__('psutil'))"
)


def test_the_cause_is_a_few_clicks_away(open_desk, work):
    """As `workbench lab RUN` opens it, up to the rows and where they stand in the corpus."""
    desk = open_desk(path="")
    notebook = desk.front()
    desk.page.evaluate("() => { window.made = 0; addEventListener('click', e => { made += e.isTrusted }, true) }")
    notebook.panel.locator(".jp-CodeCell .cm-content").first.click()
    notebook.panel.get_by_role("button", name=re.compile("Run this cell")).click()
    panel = PanelPage(notebook)
    panel.await_step(SPIKE)
    panel["cause"].click()
    card = panel["verdict"].get_by_role("region", name=f"Verdict on step {SPIKE}")
    expect(card).to_be_visible(timeout=60_000)
    words = card.inner_text()
    assert words.startswith("data") and f"The batch of step {SPIKE} carries it" in words
    rows = batch_table(Run(work / "mine"), SPIKE)
    planted = [row for row in rows.itertuples() if row.source != CORPUS.name]
    assert len(planted) == 3
    for row in planted:
        assert f"row {row.row} ({row.source}, offset {row.offset:,})" in words
    assert desk.page.evaluate("() => made") == 3
