"""Situations that users met with notebooks, an experiment each: group N of the cases. Others: `test_panel_work`."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import numpy as np
import pytest
import runs
from IPython.core.interactiveshell import InteractiveShell
from nbformat.v4 import new_code_cell, new_notebook

import notebooks
import workbench as wb
from workbench.panel import Panel

pytest_plugins = ["panel_fixtures"]
pytestmark = pytest.mark.usefixtures("closed")

TESTS = Path(__file__).parent


def executed(path, *cells):
    """A notebook of these cells at this path, executed and in normal form, as those in the repository are."""
    nbformat.write(new_notebook(cells=[new_code_cell(source) for source in cells]), path)
    path.write_text(notebooks.text(notebooks.normal(notebooks.execute(path))), "utf-8")
    assert notebooks.problems(path) == []
    return path


def nbval(*paths, **variables):
    """What pytest says of the notebooks, as the repository's CI runs it: passed and failed cells."""
    options = ["--nbval", "--nbval-current-env", "--nbval-sanitize-with", str(TESTS / "sanitize.cfg")]
    rules = ["-p", "no:cacheprovider", "-p", "conftest", "-c", os.devnull]
    command = [sys.executable, "-m", "pytest", "-q", *rules, *options]
    done = subprocess.run(
        [*command, "--nbval-cell-timeout", "300", *map(str, paths)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(TESTS.parent)} | variables,
        timeout=200,
    )
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed)", done.stdout)}
    return counts.get("passed", 0), counts.get("failed", 0), done.stdout


# N2: a callback that raises makes the cell fail under nbval. N3: run twice passes; noise leaves CI unaffected.

NOISE = """
import os, sys, time, warnings
if os.environ.get("NOISY"):
    warnings.warn("soon to go", DeprecationWarning)
    print("\\r 40% |####      | 3.1 s", file=sys.stderr)
    time.sleep(8)
f"table: {3 if os.environ.get('NOISY') else 1.25:.2f} s"
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    return runs.recorded(tmp_path_factory.mktemp("n"))


def test_n2_n3_what_a_callback_raises_fails_the_cell_and_noise_does_not(tmp_path, own):
    opened = f"import os, workbench as wb; panel = wb.Panel(run={str(own)!r}); panel"
    raising = "if os.environ.get('NOISY'): panel._boundary.on_press(panel.refresh, lambda: 1 / 0)"
    healthy = opened, NOISE, "panel.step.value = 7; panel", "wb.open_run(panel.opened.path).steps.shape"
    path = executed(tmp_path / "some.ipynb", *healthy, raising, "panel.refresh.click()", "panel")
    passed, failed, said = nbval(path, NOISY="1")
    assert (passed, failed) == (6, 1), said
    assert "error=ZeroDivisionError" in said and "::Cell 6" in said


def test_n2_a_panel_and_a_dashboard_with_an_error_say_so_as_text(own):
    panel = Panel(run=str(own))
    assert "error" not in repr(panel)
    panel._boundary.on_press(panel.refresh, lambda: 1 / 0)
    panel.refresh.click()
    assert repr(panel).endswith(", error=ZeroDivisionError)") and 'role="alert"' in panel.error.value
    panel.step.value = 4
    assert "error" not in repr(panel)
    dashboard = wb.Dashboard(own.parent)
    assert "error" not in repr(dashboard)
    dashboard.zoom.value = "from here on"
    assert repr(dashboard).endswith(", error=WorkbenchError)")
    dashboard.close()


# N4: a trace with NaN, shown and saved: the .ipynb parses strictly.


def test_n4_what_is_shown_of_a_step_with_nan_is_saved_as_strict_json(tmp_path):
    class Broken(runs.Numbers):
        def __next__(self):
            x, y = super().__next__()
            return x, y * np.float32(np.nan if self.position == 4 else np.inf if self.position == 6 else 1)

    def build():
        job = runs.build()
        job.sampler = Broken()
        return job

    with wb.Recorder(tmp_path / "run", *runs.parts(build()), compile=False, save_every=2) as recorder:
        for batch in recorder.batches(6):
            recorder.step(batch)
    run = wb.open_run(recorder.path)
    trace = run.replay(4, experiment=build())
    assert trace.exact
    panel = Panel(run=str(run.path))
    panel.step.value = 4
    facts = run.batch_facts(4, experiment=build())
    shown = (run, run.steps, run.spikes(), trace, trace.layers, trace.rows, trace.updates, facts, panel)
    formatter, notebook = InteractiveShell.instance().display_formatter, new_notebook()
    for view in ("Timeline", "Step", "Batch", "Cause"):
        panel.view.value = view
        assert panel.last_error is None
        for thing in shown:
            data, metadata = formatter.format(thing)
            assert data["text/plain"]
            data = {kind: value for kind, value in data.items() if not isinstance(value, bytes)}
            output = nbformat.v4.new_output("display_data", data, metadata=metadata)
            notebook.cells.append(new_code_cell(outputs=[output]))
    notebook.metadata["widgets"] = {"application/vnd.jupyter.widget-state+json": type(panel).get_manager_state()}
    nbformat.write(notebook, tmp_path / "shown.ipynb")
    saved = (tmp_path / "shown.ipynb").read_text("utf-8")
    runs.strict(saved)
    assert "NaN" in saved or "nan" in saved
    assert json.loads(saved)["cells"][0]["outputs"]
