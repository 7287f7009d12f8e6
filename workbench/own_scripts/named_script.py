"""What a user names to have a run rebuilt: a script, a module that is run as `python -m` does, or a function of one.

Imports nothing: naming is consent, but the file is looked for first. Knows the forms; nothing of MLX.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import ExperimentError


class Script(NamedTuple):
    """
    Attributes:
        path: the file.
        module: the name by which it is run, as `python -m` does; empty: as a file.
        root: the folder that its imports start from.
    """

    path: Path
    module: str
    root: Path


def named(factory: str, rebuild: Mapping[str, Any]) -> Script | None:
    """The script that is named; None: it is a function, `module:function`.

    Args:
        rebuild: the manifest's, which says whether it was run as a module.

    Raises:
        ExperimentError: it is neither, or there is none.
    """
    if factory.endswith(".py"):
        path = Path(factory)
        parts = str(rebuild.get("module", "")).split(".")
        full = path.resolve()
        if parts != [""] and full.with_suffix("").parts[-len(parts) :] == tuple(parts):
            return Script(path, ".".join(parts), full.parents[len(parts) - 1])
        return Script(path, "", full.parent)
    if factory.endswith(".ipynb"):
        raise ExperimentError(
            f"{factory} is a notebook, and a replay runs no notebook; pass the experiment there: "
            "run.replay(step, experiment=…), or write a function that builds it, in a module beside it: --factory "
            "module:function (factory=)"
        )
    if ":" in factory or rebuild.get("kind") == "factory":
        return None
    for name in (f"{factory}.__main__", factory):
        if (path_of := _file_of(name)) is not None:
            return Script(path_of, name, path_of.parents[name.count(".")])
    raise ExperimentError(
        f"the factory {factory!r} is no module that is found from {Path.cwd()}; expected module:function, a script "
        "(train.py), or a module that is run as `python -m package.train` is"
    )


def module_of(path: Path) -> str:
    """The name by which `python -m` would run a script that lies in a package; empty: it lies in none."""
    full = path.resolve()
    parts, folder = [full.stem], full.parent
    while (folder / "__init__.py").is_file():
        parts.insert(0, folder.name)
        folder = folder.parent
    return ".".join(parts) if len(parts) > 1 else ""


def _file_of(name: str) -> Path | None:
    path: Any = [str(Path.cwd())]
    spec = None
    for part in name.split("."):
        if not part or (spec := PathFinder.find_spec(part, path)) is None:
            return None
        path = spec.submodule_search_locations or []
    file = Path(spec.origin) if spec is not None and spec.origin else None
    return file if file is not None and file.suffix == ".py" and file.name != "__init__.py" else None
