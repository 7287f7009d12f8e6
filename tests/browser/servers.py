"""Servers and a browser, for tests: JupyterLab, or Voilà, on a port of its own."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INSTALL = "apt-get install --no-install-recommends chromium fonts-dejavu-core && pip install playwright"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WIDTH, HEIGHT = 1280, 900
PATIENCE = 20.0  # seconds for what takes tenths of one on a quiet machine


def missing() -> str:
    """Why no browser can be driven here, with what to install; empty where one can."""
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        return f"Playwright for Python is not installed; install it and a browser: {INSTALL}"
    if find_browser() is None and (named := os.environ.get("WORKBENCH_BROWSER")):
        return f"WORKBENCH_BROWSER names {named}, which is no program; name one, or install a browser: {INSTALL}"
    if find_browser() is None:
        return f"none of {', '.join(BROWSERS)} is installed; install one, or name it in WORKBENCH_BROWSER: {INSTALL}"
    return ""


def voila_missing() -> str:
    """Why the panel can't be tried in Voilà here, with what to install; empty where it can."""
    if importlib.util.find_spec("voila") is None:
        return "Voilà is not installed; install it: pip install voila"
    return missing()


def find_browser() -> str | None:
    named = os.environ.get("WORKBENCH_BROWSER")
    return next((path for name in ([named] if named else BROWSERS) if (path := shutil.which(name))), None)


@dataclass(frozen=True)
class Server:
    """Attributes:
    url, token: where it listens, and what it asks for.
    root: the folder that it shows.
    pid: of its process.
    """

    url: str
    token: str
    root: Path
    pid: int


@contextlib.contextmanager
def lab_server(root: Path, run: Path | None) -> Iterator[Server]:
    """`workbench lab RUN` on a free port of this machine, with settings and a token that are its own.

    Args:
        root: the folder into which it copies the notebooks.
        run: as on its command line.
    """
    home = Path(tempfile.mkdtemp(prefix="workbench-lab-"))
    command = [sys.executable, "-m", "workbench", "lab", *([] if run is None else [str(run)]), "--dir", str(root), "--"]
    command += ["--no-browser", "--ip=127.0.0.1", "--ServerApp.port_retries=0"]
    command += ["--LabApp.expose_app_in_browser=True"]  # window.jupyterapp: commands, notebooks, kernels
    command += ["--LabApp.news_url=None", "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"]
    command += ["--LabApp.extension_manager=readonly"]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        command += ["--allow-root"]
    with _serving(command, home, root, "api", secrets.token_hex(16)) as server:
        yield server


@contextlib.contextmanager
def voila_server(notebook: Path) -> Iterator[Server]:
    """`voila NOTEBOOK` on a free port of this machine, with a token of its own."""
    home, token = Path(tempfile.mkdtemp(prefix="workbench-voila-")), secrets.token_hex(16)
    command = [sys.executable, "-m", "voila", str(notebook), "--no-browser", "--Voila.ip=127.0.0.1"]
    command += ["--Voila.port_retries=0", f"--Voila.token={token}"]  # it doesn't read JUPYTER_TOKEN
    with _serving(command, home, notebook.parent, "voila/templates/lab/static/voila.js", token) as server:
        yield server


@contextlib.contextmanager
def _serving(command: list[str], home: Path, root: Path, sign: str, token: str) -> Iterator[Server]:
    """Args:
    home: an empty folder for its settings; removed at the end.
    sign: what it answers to, once it serves.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [*command, f"--port={port}"]
    with (home / "server.log").open("w+") as log:
        process = subprocess.Popen(command, env=_variables(home, token), stdout=log, stderr=subprocess.STDOUT)
        try:
            url = f"http://127.0.0.1:{port}"
            _await_server(f"{url}/{sign}", process, log)
            yield Server(url, token, root, process.pid)
        finally:
            process.terminate()  # the server ends its kernels
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    shutil.rmtree(home, ignore_errors=True)


def _variables(home: Path, token: str) -> dict[str, str]:
    """The environment, without what would change what the server or its kernels do."""
    note = home / "settings" / "@jupyterlab" / "apputils-extension" / "notification.jupyterlab-settings"
    note.parent.mkdir(parents=True)  # else a question whether to fetch news lies over every picture
    note.write_text(json.dumps({"fetchNews": "false", "checkForUpdates": False, "doNotDisturbMode": True}))
    kept = {
        name: value for name, value in os.environ.items() if not re.match("JUPYTER|PYTHONWARNINGS|WORKBENCH_", name)
    }
    folders = (
        "JUPYTER_CONFIG_DIR",
        "JUPYTER_DATA_DIR",
        "JUPYTER_RUNTIME_DIR",
        "JUPYTERLAB_WORKSPACES_DIR",
        "IPYTHONDIR",
    )
    own = {name: str(home / name.lower()) for name in folders}
    own |= {"XDG_CACHE_HOME": str(home / "cache"), "JUPYTERLAB_SETTINGS_DIR": str(home / "settings")}
    return kept | own | {"JUPYTER_TOKEN": token, "JUPYTER_PLATFORM_DIRS": "1"}


def _await_server(url: str, process: subprocess.Popen[Any], log: Any, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            urllib.request.urlopen(url, timeout=2).read()
            return
        except OSError:
            if process.poll() is not None or time.monotonic() > end:
                log.seek(0)
                raise RuntimeError(f"The server did not start:\n{log.read()[-4000:]}") from None
            time.sleep(0.1)


def descendants(pid: int) -> list[Any]:
    """The processes that a process started, and those that they did."""
    import psutil

    return psutil.Process(pid).children(recursive=True)


@contextlib.contextmanager
def held(processes: list[Any]) -> Iterator[None]:
    """Inside, these processes stand still."""
    for one in processes:
        one.suspend()
    try:
        yield
    finally:
        for one in processes:
            one.resume()


def still_running(processes: list[Any], seconds: float = 10) -> list[Any]:
    """Those that have not ended after so long."""
    import psutil

    return psutil.wait_procs(processes, timeout=seconds)[1]


@contextlib.contextmanager
def browser(**options: Any) -> Iterator[Any]:
    """A fresh browser profile: a Playwright context. Options are those of `Browser.new_context`."""
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=PATIENCE * 1000)
    with sync_playwright() as playwright:
        program = playwright.chromium.launch(executable_path=find_browser(), args=["--disable-dev-shm-usage"])
        try:
            context = program.new_context(viewport={"width": WIDTH, "height": HEIGHT}, **options)
            context.set_default_timeout(PATIENCE * 1000)
            yield context
        finally:
            program.close()
