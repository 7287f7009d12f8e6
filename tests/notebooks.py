"""Keeps the committed notebooks honest. They are committed executed: strict nbval compares with what they show.

    python tests/notebooks.py run [PATH ...]     execute in place, then bring into normal form
    python tests/notebooks.py check [PATH ...]   name what is wrong; needs no kernel

Normal form: nothing in the file that changes from run to run or from machine to machine, so that a diff shows what
changed. nbval passes a cell that was never run without comparing anything; here that is a problem.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import nbformat

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
WIDGET = "application/vnd.jupyter.widget-view+json"
ADDRESS = re.compile(r"\b0x[0-9a-f]{6,16}\b")
FOLDER_OF_RUNS = re.compile(r"(?:/\w+)*/tmp\w+(?=/)")  # made by tempfile.mkdtemp
SECONDS = re.compile(r"\b\d+\.\d+ s\b")
TIMEOUT = 300  # seconds a cell


def execute(path: Path) -> nbformat.NotebookNode:
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    os.environ.pop("WORKBENCH_RUN", None)  # or the first panel would open something else
    NotebookClient(
        notebook,
        timeout=TIMEOUT,
        kernel_name="python3",
        record_timing=False,
        store_widget_state=False,
        resources={"metadata": {"path": str(path.parent)}},
    ).execute()
    return notebook


def normal(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Brings a notebook into normal form, in place."""
    notebook.metadata = nbformat.from_dict({"kernelspec": KERNEL, "language_info": {"name": "python"}})
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    count = 0
    for index, cell in enumerate(notebook.cells):
        cell.id = f"cell-{index:02d}"
        tags = cell.metadata.get("tags")
        cell.metadata = nbformat.from_dict({"tags": tags} if tags else {})
        if cell.cell_type != "code":
            continue
        count += 1
        cell.execution_count = None if cell.execution_count is None else count
        for output in cell.outputs:
            if "execution_count" in output:
                output.execution_count = cell.execution_count
            data = output.get("data", {})
            if WIDGET in data and "image/png" in data:
                del data[WIDGET]  # a model that died with its kernel; the picture beside it is what a reader sees
            for kind in data.keys() & {"text/plain", "text/html"}:
                data[kind] = FOLDER_OF_RUNS.sub("runs", ADDRESS.sub("0xADDRESS", data[kind]))
                data[kind] = SECONDS.sub("some seconds", data[kind])
    return notebook


def text(notebook: nbformat.NotebookNode) -> str:
    nbformat.validate(notebook)
    return nbformat.writes(notebook, version=nbformat.NO_CONVERT) + "\n"


def problems(path: Path) -> list[str]:
    """What is wrong with a committed notebook, one phrase each."""
    content = path.read_text("utf-8")
    notebook = nbformat.reads(content, as_version=4)
    found = [] if text(normal(nbformat.reads(content, as_version=4))) == content else ["is not in normal form"]
    for number, cell in enumerate(cell for cell in notebook.cells if cell.cell_type == "code"):
        if not cell.source.strip():
            found.append(f"code cell {number + 1} is empty")
        elif cell.execution_count is None:
            found.append(f"code cell {number + 1} was never run")
        tagged = "raises-exception" in cell.metadata.get("tags", [])
        for output in cell.outputs:
            if output.output_type == "error" and not tagged:
                found.append(f"code cell {number + 1} shows an error: {output.ename}: {output.evalue}")
            if output.output_type == "stream" and output.name == "stderr":
                found.append(f"code cell {number + 1} writes to stderr: {output.text.strip()[:80]}")
    return found


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] not in ("run", "check"):
        print(__doc__)
        return 2
    paths = [Path(argument) for argument in arguments[1:]] or sorted(FOLDER.glob("*.ipynb"))
    if arguments[0] == "run":
        for path in paths:
            path.write_text(text(normal(execute(path))), "utf-8")
    wrong = [f"{path.name} {problem}" for path in paths for problem in problems(path)]
    print("\n".join([*wrong, f"{len(paths)} notebooks, {len(wrong)} problems"]))
    return 1 if wrong or not paths else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
