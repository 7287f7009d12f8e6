"""The committed notebooks: executed, in normal form, thin. Whether they still hold is nbval's part:

pytest --nbval --nbval-current-env --nbval-sanitize-with tests/sanitize.cfg --nbval-cell-timeout 300 notebooks
"""

import re
import statistics
from pathlib import Path

import nbformat
import pytest

import notebooks
from workbench.share import shared

PATHS = sorted(notebooks.FOLDER.glob("*.ipynb"))
LOGIC = re.compile(r"^\s*(def|class|for|while|try|except|with|import mlx|from mlx)\b", re.MULTILINE)
UNSTABLE = re.compile(
    r"/tmp/|/home/|/root/|/Users/|0x[0-9a-f]{8}|\d\d:\d\d:\d\d|\b20\d\d-\d\d-\d\d\b|\bmlx\b", re.IGNORECASE
)


def code(path: Path) -> list[nbformat.NotebookNode]:
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def shown(cell: nbformat.NotebookNode) -> str:
    """Its text outputs."""
    parts = [output.get("text", "") for output in cell.outputs]
    for output in cell.outputs:
        parts += [text for kind, text in output.get("data", {}).items() if kind.startswith("text/")]
    return "\n".join(parts)


def test_the_notebooks_are_there():
    assert [path.name for path in PATHS] == ["determinism.ipynb", "investigate.ipynb", "runbook.ipynb", "runs.ipynb"]
    assert shared("notebooks") == notebooks.FOLDER


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
class TestEach:
    def test_it_is_executed_and_in_normal_form(self, path):
        assert notebooks.problems(path) == []
        counts = [cell.execution_count for cell in code(path)]
        assert counts == list(range(1, len(counts) + 1))

    def test_it_is_thin(self, path):
        sources = [cell.source for cell in code(path)]
        assert statistics.median(len(source.splitlines()) for source in sources) <= 3
        assert max(len(source.splitlines()) for source in sources) <= 8
        for source in sources:
            assert not LOGIC.search(source), source
            assert not re.search(r"\bW\.|Output\(|interact|pyplot|open\(\"", source), source

    def test_what_it_shows_holds_on_any_machine(self, path):
        for cell in code(path):
            assert not UNSTABLE.search(shown(cell)), shown(cell)
            compared = "nbval-ignore-output" not in cell.metadata.get("tags", [])
            long = re.findall(r"\d+\.\d{4,}", shown(cell)) if compared else []
            assert not long, f"not rounded: {long}"

    def test_a_reader_without_a_kernel_sees_the_panel(self, path):
        kinds = [set(output.get("data", {})) for cell in code(path) for output in cell.outputs]
        assert {"image/png", "text/plain"} in kinds
        assert not any("widget" in kind for seen in kinds for kind in seen)
        assert "widgets" not in nbformat.read(path, as_version=4).metadata


def test_the_check_can_fail(tmp_path):
    notebook = nbformat.read(PATHS[0], as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    cells[0].execution_count = None
    cells[1].outputs = [nbformat.v4.new_output("error", ename="ValueError", evalue="no", traceback=[])]
    cells[2].outputs = [nbformat.v4.new_output("stream", name="stderr", text="a warning")]
    cells[3].source = ""
    notebook.metadata["language_info"]["version"] = "3.99"
    path = tmp_path / "bad.ipynb"
    nbformat.write(notebook, path)
    found = "; ".join(notebooks.problems(path))
    for phrase in (
        "normal form",
        "1 was never run",
        "2 shows an error: ValueError",
        "3 writes to stderr",
        "4 is empty",
    ):
        assert phrase in found
    assert notebooks.main(["check", str(path)]) == 1 and notebooks.main(["check"]) == 0
