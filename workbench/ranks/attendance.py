"""Whether those are here who are needed: the steps of a data-parallel run take all of its ranks, no more and no less.

Knows runs and the world; performs nothing.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from msgspec import UNSET

from ..errors import ExperimentError, ReplayError
from ..manifest import Manifest
from ..run import Run
from .rank_run import RankRun
from .rank_setup import RankSetup
from .world import World, barrier, world

LAUNCHER = "mlx.launch"


def setup_of(manifest: Manifest) -> RankSetup | None:
    """Who recorded a run together; None: one process."""
    return None if manifest.ranks is UNSET else manifest.ranks


def attended(run: Run) -> Run:
    """The run as this process is to look at it: of a run of several ranks, as the rank that it is. All of them ask
    together, and see the same folder.

    Raises:
        ExperimentError: other processes are here than recorded the run.
    """
    if said := absence(run.manifest, run.path):
        raise ExperimentError(said)
    if setup_of(run.manifest) is None:
        return run
    barrier()  # where they have recorded it just now, rank 0 may still be writing what the others are about to read
    return RankRun(run.path, world().rank)


def absence(manifest: Manifest, path: Path, here: World | None = None) -> str | None:
    """A sentence, where other processes are here than recorded a run; None: they are those."""
    setup, here = setup_of(manifest), here or world()
    size = 1 if setup is None else setup.size
    if here.size == size:
        return None
    began = "this process was started alone" if here.size == 1 else f"there are {here.size} ranks here"
    if setup is None:
        return f"{path} was recorded by one process, and {began}; start it without {LAUNCHER}"
    return (
        f"{path} was recorded by {size} ranks together, and {began}: gradients averaged over another number are "
        f"others. Start it with {shown(setup)} -- …"
    )


def other_wiring(manifest: Manifest) -> list[str]:
    """A phrase for what adds gradients in another way here than where the run was recorded."""
    setup, here = setup_of(manifest), world()
    if setup is None or here.size == 1:
        return []
    pairs = (("backend", setup.backend, here.backend), ("connections", setup.connections, here.connections))
    return [f"{name} between ranks: recorded {ours}, here {theirs}" for name, ours, theirs in pairs if ours != theirs]


def shown(setup: RankSetup) -> str:
    """The launcher's part of a command line."""
    more = f" --connections-per-ip {setup.connections}" if setup.connections > 1 else ""
    hosts = list(dict.fromkeys(setup.hosts))
    where = f"-n {setup.size}" if len(hosts) == 1 else f"--hosts {','.join(map(shlex.quote, setup.hosts))}"
    return f"{LAUNCHER} {where} --backend {setup.backend}{more}"


def refuse_ranks(manifest: Manifest, path: Path, what: str) -> None:
    """What one process does, to a run of one process.

    Args:
        what: it is, such as "an autopsy".

    Raises:
        ReplayError: the run is of several ranks.
        ExperimentError: several ranks are here to do it.
    """
    if (setup := setup_of(manifest)) is not None:
        raise ReplayError(
            f"{path} was recorded by {setup.size} ranks together, and {what} is made of steps of one process: all "
            "ranks would have to make them together, and do not. `workbench replay` proves a step on all ranks and "
            "says whose batch stands out; `workbench batch` shows the rows of each"
        )
    refuse_launched(what)


def refuse_launched(what: str) -> None:
    """
    Raises:
        ExperimentError: several ranks are here to do what only one process can.
    """
    if (here := world()).size > 1:
        raise ExperimentError(f"{what} is made by one process, and there are {here.size} ranks here; start it alone")
