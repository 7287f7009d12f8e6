"""A person at JupyterLab, for tests: a page in a real browser, and a notebook in it.

with lab_server(work, run) as lab, browser() as context, Desk(context, lab, "first") as desk:
    notebook = desk.open("investigate.ipynb")
    notebook.run_all()
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .servers import HEIGHT, WIDTH, Server


def empty_notebook(path: Path, code: str = "") -> None:
    """Writes a notebook with one code cell."""
    import nbformat

    kernel = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
    notebook = nbformat.v4.new_notebook(metadata={"kernelspec": kernel}, cells=[nbformat.v4.new_code_cell(code)])
    nbformat.write(notebook, path)


class Desk:
    """JupyterLab in a page.

    Args:
        name: of a Lab workspace that is new, and so empty.
        path: what to open in place of it; "" is what the server shows first.

    Attributes:
        console: what the browser's console called an error.
        abroad: what was asked of other machines.
    """

    def __init__(self, context: Any, server: Server, name: str, path: str | None = None) -> None:
        self.server = server
        self.console: list[str] = []
        self.abroad: list[str] = []
        self.page = context.new_page()
        self.page.on("console", lambda said: self.console.append(said.text) if said.type == "error" else None)
        self.page.on("pageerror", lambda error: self.console.append(str(error)))
        self.page.on("request", self._note_request)
        path = f"lab/workspaces/{name}" if path is None else path
        self.page.goto(f"{server.url}/{path}?token={server.token}")
        self._await_lab()

    def _note_request(self, request: Any) -> None:
        if not re.match(rf"{re.escape(self.server.url)}/|data:|blob:", request.url):
            self.abroad.append(request.url)

    def _await_lab(self) -> None:
        self.page.wait_for_function("() => window.jupyterapp")
        self.page.evaluate("() => window.jupyterapp.restored.then(() => null)")

    def __enter__(self) -> Desk:
        return self

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        """Ends the kernels of the page's notebooks, too: they pile up on a small machine. Not those of other pages, as
        the session manager's `shutdownAll` would."""
        self.page.evaluate(
            """async () => {
                const shown = [...window.jupyterapp.shell.widgets('main')];
                const own = shown.map(one => one.context && one.context.sessionContext).filter(one => one);
                await Promise.all(own.map(one => one.shutdown()));
            }"""
        )
        self.page.close()

    def check(self) -> None:
        """Raises:
        AssertionError: the browser's console has errors (a widget whose view breaks says so only there), or something
            was asked of another machine. Both are forgotten then.
        """
        console, abroad = self.console.copy(), self.abroad.copy()
        self.console.clear()
        self.abroad.clear()
        assert console == [] and abroad == [], (console, abroad)

    def take(self, path: Path) -> None:
        """A picture of the page."""
        self.page.screenshot(path=path, animations="disabled")

    def reload(self) -> None:
        self.page.reload()
        self._await_lab()

    def command(self, name: str, **arguments: Any) -> None:
        """A command of Lab's menus."""
        self.page.evaluate(
            "([name, given]) => window.jupyterapp.commands.execute(name, given).then(() => null)", [name, arguments]
        )

    def turn_to_theme(self, name: str) -> str:
        """Lab's own, "Light" or "Dark"; returns the name."""
        self.command("apputils:change-theme", theme=f"JupyterLab {name}")
        self.page.wait_for_selector(f"body[data-jp-theme-name='JupyterLab {name}']", state="attached")
        # Lab covers the page meanwhile. Asked for another theme before it has taken the cover off, it does that twice,
        # of which the second fails.
        self.page.wait_for_selector("#jupyterlab-splash", state="detached")
        return name

    def front(self) -> Notebook:
        """The notebook that is in front, once its kernel answers."""
        front = "window.jupyterapp.shell.currentWidget"
        self.page.wait_for_function(f"() => {front} && {front}.context && {front}.sessionContext")
        return self.open(self.page.evaluate(f"() => {front}.context.path"))

    def open(self, path: str) -> Notebook:
        """A notebook, once its kernel answers."""
        self.page.evaluate(
            """async path => {
                const lab = window.jupyterapp;
                const opened = await lab.commands.execute('docmanager:open', {path, factory: 'Notebook'});
                await opened.context.ready; await opened.revealed; await opened.sessionContext.ready;
                await opened.sessionContext.session.kernel.info;
                lab.shell.activateById(opened.id);
            }""",
            path,
        )
        return Notebook(self, path)


class Notebook:
    """A notebook that is open in a page. `panel` is its part of the page."""

    def __init__(self, desk: Desk, path: str) -> None:
        self.desk, self.page, self.path = desk, desk.page, path
        self.panel = self.page.locator(".jp-NotebookPanel:not(.lm-mod-hidden)")
        self._found = (
            "const open = [...window.jupyterapp.shell.widgets('main')]"
            f".find(one => one.context && one.context.path === {json.dumps(path)});"
        )

    def javascript(self, body: str, given: Any = None) -> Any:
        """Runs code in the page, in which `open` is the notebook and `given` the argument."""
        return self.page.evaluate(f"async given => {{ {self._found} {body} }}", given)

    def show(self) -> None:
        """Brings it to the front."""
        self.javascript("window.jupyterapp.shell.activateById(open.id)")

    def write(self, code: str) -> None:
        """Replaces the first code cell."""
        self.javascript(
            "[...open.content.model.cells].find(cell => cell.type === 'code').sharedModel.setSource(given)", code
        )

    def start_all(self) -> None:
        """Run All. Outputs are cleared first, or what is committed would satisfy a test."""
        self.show()
        self.desk.command("notebook:clear-all-cell-outputs")
        self.javascript("window.jupyterapp.commands.execute('notebook:run-all-cells')")

    def run_all(self, seconds: float = 120) -> None:
        """Run All, until every cell has run.

        Raises:
            AssertionError: a cell raised.
        """
        self.start_all()
        self.finish(seconds)

    def finish(self, seconds: float = 120) -> None:
        # Neither Lab's promise nor the kernel's status says that all is done: the promise settles early where a cell
        # raises, and the kernel is idle for a moment between two cells.
        try:
            self.page.wait_for_function(
                f"""() => {{ {self._found}
                    const cells = [...open.content.model.cells].filter(
                        cell => cell.type === 'code' && cell.sharedModel.getSource().trim());
                    const done = cell => cell.executionState === 'idle' && cell.executionCount !== null;
                    const failed = cell => cell.outputs.toJSON().some(output => output.output_type === 'error');
                    return (cells.every(done) || cells.some(failed))
                        && open.sessionContext.session.kernel.status === 'idle' }}""",
                timeout=seconds * 1000,
            )
        except Exception as error:  # playwright need not be there to import its own from
            if type(error).__name__ != "TimeoutError":
                raise
            raise AssertionError(f"{self.path} has not run after {seconds} s: {self.states()}") from error
        assert self.errors() == [], f"{self.path}: {self.errors()}"

    def states(self) -> dict[str, Any]:
        """Of the kernel, and of each cell with code: what there is to say when they don't end."""
        return self.javascript(
            """const session = open.sessionContext.session;
            return {kernel: session && session.kernel ? session.kernel.status : 'none',
                cells: [...open.content.model.cells].filter(cell => cell.type === 'code')
                    .map(cell => [cell.executionState, cell.executionCount, cell.outputs.length])}"""
        )

    def errors(self) -> list[str]:
        """Of cells."""
        return self.javascript(
            """return [...open.content.model.cells].flatMap((cell, place) => cell.type !== 'code' ? [] :
                cell.outputs.toJSON().filter(output => output.output_type === 'error')
                .map(output => `cell ${place}: ${output.ename}: ${output.evalue}`))"""
        )

    def python(self, expression: str) -> Any:
        """The value of an expression in the kernel, where it is one that JSON has. To look only, never to act."""
        text = self.javascript(
            """const asked = open.sessionContext.session.kernel.requestExecute({code: '', store_history: false,
                user_expressions: {value: given}});
            const value = (await asked.done).content.user_expressions.value;
            if (value.status !== 'ok') throw new Error(value.ename + ': ' + value.evalue);
            return value.data['text/plain']""",
            f"__import__('json').dumps({expression})",
        )
        return json.loads(text[1:-1].encode().decode("unicode_escape") if "\\" in text else text[1:-1])

    def execute(self, code: str) -> None:
        """Runs code in the kernel, not in a cell: to break something on purpose.

        Raises:
            Exception: it raised.
        """
        self.javascript(
            """const asked = open.sessionContext.session.kernel.requestExecute({code: given, store_history: false});
            const {status, ename, evalue} = (await asked.done).content;
            if (status !== 'ok') throw new Error(ename + ': ' + evalue)""",
            code,
        )

    @contextlib.contextmanager
    def at_full_height(self, limit: int = 9000, width: int = WIDTH) -> Iterator[None]:
        """Inside, the page is as tall as the notebook, so that a picture has all of it, and so wide."""
        self.panel.locator(".jp-WindowedPanel-outer").evaluate("outer => { outer.scrollTop = 0 }")
        for _ in range(2):  # twice: of cells out of sight the height is a guess
            height = self.panel.evaluate(
                """panel => { const cells = [...panel.querySelectorAll('.jp-Cell')].map(c => c.getBoundingClientRect());
                return Math.max(...cells.map(c => c.bottom)) - Math.min(...cells.map(c => c.top)) }"""
            )
            self.page.set_viewport_size({"width": width, "height": min(int(height) + 200, limit)})
            self.page.wait_for_timeout(100)
        try:
            yield
        finally:
            self.page.set_viewport_size({"width": WIDTH, "height": HEIGHT})

    def save(self) -> None:
        self.javascript("await open.context.save()")

    def find(self, name: str) -> Any:
        """A widget of the workbench's panel by its CSS class, without its `wb-`."""
        return self.panel.locator(f".wb-{name}")
