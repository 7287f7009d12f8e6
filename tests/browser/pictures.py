"""Takes the README's pictures: a run with a planted spike, the panel on it, JupyterLab in a real browser.

    python tests/browser/pictures.py                     every picture that README.md shows, into notebooks/
    python tests/browser/pictures.py --to shots          all that there are, elsewhere
    python tests/browser/pictures.py --to shots batch

A picture of a panel in which text overlaps, is cut off or is faint is called NAME-wrong.png, and the exit code is 1.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests"))

import click  # noqa: E402

from browser import driving, looks, servers  # noqa: E402
from browser.desks import PanelPage, record  # noqa: E402

SHARP = 1.7  # pixels of a picture for one of the page
EDGE = 4  # pixels of the page around the panel


def cause(panel: PanelPage) -> str:
    panel["cause"].click()
    panel.await_status("replayed with the steps before it", seconds=120)
    panel.turn_to("Cause")
    return "onset"


def timeline(panel: PanelPage) -> str:
    panel.turn_to("Timeline")
    panel["timeline"].get_by_role("img").wait_for()
    return "zoom"


def step(panel: PanelPage) -> str:
    panel["replay"].click()
    panel.await_status("replayed", seconds=120)
    panel.turn_to("Step")
    return "layers"


def batch(panel: PanelPage) -> str:
    panel["replay"].click()
    panel.await_status("replayed", seconds=120)
    panel.turn_to("Batch")
    return "batch"


def environment(panel: PanelPage) -> str:
    panel.turn_to("Environment")
    panel["environment"].locator("table").first.wait_for()
    panel["doctor"].click()
    panel.await_status("examined", seconds=300)
    return "doctor"


# What is done for each, up to the widget with which the picture ends.
SCENES: dict[str, Callable[[PanelPage], str]] = {
    "panel": cause,
    "timeline": timeline,
    "step": step,
    "batch": batch,
    "environment": environment,
}


def shown_by_readme() -> list[str]:
    return sorted(set(re.findall(r"\(notebooks/(\w+)\.png\)", (ROOT / "README.md").read_text())))


def take(names: list[str], to: Path) -> list[str]:
    """Takes them; returns what is wrong with how the panel looks."""
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        # As `workbench demo` trains it: checkpoints along the way, so that earlier states can be examined too.
        recorded = record(root / "recorded" / "mine", "--save-every", 20)
        driving.empty_notebook(root / "panel.ipynb")
        with servers.lab_server(root, None) as lab, servers.browser(device_scale_factor=SHARP) as context:
            for name in names:
                shutil.rmtree(root / "runs", ignore_errors=True)  # with what was found for the picture before
                shutil.copytree(recorded, root / "runs" / "mine")
                with driving.Desk(context, lab, name) as desk:
                    wrong += [f"{name}: {found}" for found in _take_one(desk, name, to / f"{name}.png")]
    return wrong


def _take_one(desk: driving.Desk, name: str, path: Path) -> list[str]:
    notebook = desk.open("panel.ipynb")
    notebook.write('import workbench as wb\n\npanel = wb.Panel("runs", "mine")\npanel')
    notebook.run_all()
    panel = PanelPage(notebook)
    panel.itself.wait_for()
    last = SCENES[name](panel)
    with notebook.at_full_height():
        panel.page.mouse.move(0, 0)
        found = looks.overlaps(panel.itself) + looks.cut_off(panel.itself) + looks.faint(panel.itself)
        whole, end = panel.itself.bounding_box(), panel[last].bounding_box()
        clip = {"x": whole["x"] - EDGE, "y": whole["y"] - EDGE, "width": whole["width"] + 2 * EDGE}
        clip["height"] = end["y"] + end["height"] - whole["y"] + 2 * EDGE
        path = path.with_stem(f"{name}-wrong") if found else path
        panel.page.screenshot(path=path, clip=clip, animations="disabled")
    desk.check()
    return found


@click.command()
@click.option("--to", type=click.Path(file_okay=False, path_type=Path), help="A folder; notebooks/ if it is left out.")
@click.argument("names", nargs=-1, type=click.Choice(list(SCENES)))
def main(to: Path | None, names: tuple[str, ...]) -> None:
    """Takes pictures of the panel in JupyterLab."""
    if reason := servers.missing():
        raise click.ClickException(reason)
    wanted = list(names) or (shown_by_readme() if to is None else list(SCENES))
    folder = to or ROOT / "notebooks"
    folder.mkdir(parents=True, exist_ok=True)
    wrong = take(wanted, folder)
    click.echo("\n".join([*wrong, f"{len(wanted)} pictures in {folder}, {len(wrong)} problems"]))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
