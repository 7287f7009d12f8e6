"""One backend for all tests but those marked `cuda`: bits are compared, and only the CPU's are promised everywhere.

Files of tests are run by several processes at once, those that take longest first.
"""

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("steady", deadline=None, derandomize=True)  # a busy machine is no failure
settings.load_profile("steady")

BROWSER = "tests/browser/"
LONGEST = (
    BROWSER,
    "notebooks/",
    "tests/test_ranks.py",
    "tests/test_crashes.py",
    "tests/test_exactness.py",
    "tests/test_cli.py",
    "tests/test_panel_work.py",
    "tests/test_many.py",
    "tests/test_damaged.py",
    "tests/test_bench_suite.py",
    "tests/test_cases_of_notebooks.py",
    "tests/test_mlx_lm.py",
    "tests/test_operations.py",
)


def pytest_configure(config):
    """Gives every process but the first its own folder for temporary files. MLX keeps compiled kernels there, and two
    processes that compile the same one at once would overwrite each other's file.
    """
    worker = getattr(config, "workerinput", {}).get("workerid", "gw0")
    if worker != "gw0":
        folder = Path(tempfile.gettempdir()) / f"workbench-tests-{os.getuid()}-{worker}"
        folder.mkdir(exist_ok=True)
        os.environ["TMPDIR"] = tempfile.tempdir = str(folder)


def pytest_collection_modifyitems(items):
    ranks = {start: rank for rank, start in enumerate(LONGEST)}
    items.sort(key=lambda item: min((ranks[one] for one in LONGEST if item.nodeid.startswith(one)), default=len(ranks)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """As many as there are cores, up to 4; none for files by name: starting them would take longer than they save."""
    if not any(Path(one).is_dir() for one in config.args):
        return 0
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return min(4, len(cores))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadFileScheduling

    class OneBrowser(LoadFileScheduling):
        """Tests with a browser share a server and a page, in one process."""

        def _split_scope(self, nodeid):
            return BROWSER if nodeid.startswith(BROWSER) else super()._split_scope(nodeid)

    return OneBrowser(config, log)


def pytest_terminal_summary(terminalreporter):
    """Here, because the process that prints it has collected none of the tests with a browser."""
    reports = (one for some in terminalreporter.stats.values() for one in some)
    if any(getattr(one, "nodeid", "").startswith(BROWSER) for one in reports):
        from browser import conftest, servers

        if reason := servers.missing():
            terminalreporter.write_line(f"Browser tests were skipped: {reason}")
        else:
            terminalreporter.write_line(f"Pictures of the browser tests: {conftest.screenshots()}")


@pytest.fixture(autouse=True)
def device(request):
    import mlx.core as mx

    before = mx.default_device()
    mx.set_default_device(mx.gpu if request.node.get_closest_marker("cuda") else mx.cpu)
    yield
    mx.set_default_device(before)
    try:
        mx.eval(mx.random.state)
    except RuntimeError:  # a compiled function drew from it without having it among its inputs and outputs
        mx.random.seed(0)
