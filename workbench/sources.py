"""The source code that performs a run's steps: a digest of each file, so that a change is named before a replay.

Of the script that recorded a run, which is edited all the time, also a digest of each definition that its steps reach.
Comments, docstrings and layout do not count. Knows experiments and Python modules; nothing of runs.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import io
import sys
import tokenize
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from .experiment import Experiment
from .own_scripts.users_code import bare, is_users
from .script_code import parts_of

# Of this package: what has a part in the arithmetic of a step, or in which data it gets.
OURS = ("step", "deterministic")
TRAINERS = ("trainer.model", "trainer.schedule", "trainer.data", "trainer.permutation", "trainer.recipe")
RUNNING = Path("__main__")
PART = "script:"  # and the name of a definition
MOST = 200  # files: more are not looked into

_SKIPPED = ("COMMENT", "NL", "ENCODING", "ENDMARKER")


def code_of(experiment: Experiment, rebuild: Mapping[str, Any], script: Path | None = RUNNING) -> dict[str, str]:
    """A digest of each source file that the experiment is made of, by the name of its module.

    Of the user: the modules of the model's, optimizer's and sampler's classes, of the loss and step functions and of
    the factory, and what these import from outside of installed packages, whose versions are known otherwise. Of this
    package: what performs a step and, for a run of its own trainer, the trainer.

    Args:
        rebuild: how the manifest says to rebuild it.
        script: that built the experiment (`RUNNING`: the one that this process runs, if any). Of what its steps reach
            each definition has a digest, too.
    """
    ours = OURS + (TRAINERS if rebuild.get("kind") == "trainer" else ())
    found = {name: digest_of_file(Path(__file__).parent / f"{name.replace('.', '/')}.py") for name in ours}
    todo = [module for name in _modules(experiment) if (module := sys.modules.get(name)) is not None]
    factory = str(rebuild.get("factory", "")).partition(":")[0]
    paths = {_name(module): path for module in todo if (path := _own_file(module)) is not None}
    if factory and (place := _located(factory)) is not None:
        paths.setdefault(factory, place)
    parts: dict[str, str] = {}
    if script is RUNNING:
        script = running_script()
        name = "" if script is None else script.stem
    else:
        name = Path(str(rebuild.get("script", ""))).stem  # wherever it lies now, it is that one
    if script is not None:
        parts = _parts(script, experiment)
        if name and (parts or name in paths):
            paths[name] = script.resolve()
        if (module := rebuild.get("module")) and script is not None and script.stem == name:
            paths[str(module)] = script.resolve()  # as it is known where it was run by `python -m`
    seen: dict[str, str] = {}
    queue = list(paths.items())
    while queue and len(seen) < MOST:
        name, path = queue.pop()
        if name in seen:
            continue
        try:
            seen[name] = digest_of_file(path)
            queue += _imported(path, name)
        except (OSError, ValueError, SyntaxError):  # gone, or no source
            continue
    return {name: found[name] for name in sorted(found)} | {f"user:{name}": seen[name] for name in sorted(seen)} | parts


def changed(recorded: Iterable[Mapping[str, str] | None], here: Mapping[str, str]) -> list[str]:
    """A phrase for each file, and each definition of the script, that has changed; one that either side lacks says
    nothing."""
    phrases = [
        f"the code of {_shown(name)}: recorded {digest}, here {here[name]}"
        for one in recorded
        for name, digest in (one or {}).items()
        if here.get(name, digest) != digest
    ]
    return list(dict.fromkeys(phrases))


def beside_the_step(
    recorded: Sequence[Mapping[str, str] | None], here: Mapping[str, str], rebuild: Mapping[str, Any]
) -> tuple[list[dict[str, str]], list[str]]:
    """Tells what has to be as it was from the rest of a script, which may be edited.

    Returns:
        What was recorded, without the digest of the whole script; and a sentence, if that is another now.
    """
    stem = Path(str(rebuild.get("script", ""))).stem
    whole = f"user:{stem}"
    names = {whole, f"user:{rebuild.get('module', '')}"}
    rest = [{name: digest for name, digest in (one or {}).items() if name not in names} for one in recorded]
    if not stem or not any(here.get(whole, digest) != digest for one in recorded if (digest := (one or {}).get(whole))):
        return (rest if stem else [dict(one or {}) for one in recorded]), []
    if all(any(name.startswith(PART) for name in one) for one in rest):
        known = "what its steps are made of is unchanged"
    else:
        known = "whether that touches its steps was not noted then"
    return rest, [f"the script {stem}.py is not as it was when it recorded; {known}"]


def _shown(name: str) -> str:
    return name.removeprefix("user:").removeprefix(PART)


def running_script() -> Path | None:
    """The script of the user's that this process runs."""
    main = sys.modules.get("__main__")
    return None if main is None else _own_file(main)


def _parts(script: Path, experiment: Experiment) -> dict[str, str]:
    """A digest of each definition of the script that a step reaches."""
    functions = [_unwrapped(one) for one in (experiment.loss_fn, getattr(experiment, "step_fn", None))]
    kinds = [kind for module in experiment.model.modules() for kind in type(module).__mro__]
    own = [one for one in (*functions, *kinds) if getattr(one, "__module__", "") == "__main__"]
    names = {str(getattr(one, "__name__", "")) for one in own}
    try:
        found = parts_of(script.read_text(encoding="utf-8"), names - {"", "<lambda>"}, digest_of)
    except (OSError, ValueError, SyntaxError):  # gone, or no source
        return {}
    return {f"{PART}{name}": found[name] for name in sorted(found)}


@functools.lru_cache(maxsize=1024)
def _digest(path: Path, size: int, mtime: int) -> str:
    return digest_of(path.read_bytes())


def digest_of_file(path: Path) -> str:
    """`digest_of` a file. Raises OSError."""
    status = path.stat()
    return _digest(path, status.st_size, status.st_mtime_ns)


def digest_of(source: bytes) -> str:
    """SHA-256 of what Python would execute, 16 hexadecimal digits: tokens and indentation, without comments and
    docstrings. Of a file that Python can't read, its bytes."""
    try:
        content = "\n".join(_executed(source)).encode()
    except (tokenize.TokenError, SyntaxError, UnicodeDecodeError):
        content = source
    return hashlib.sha256(content).hexdigest()[:16]


def _executed(source: bytes) -> Iterator[str]:
    statement: list[str] = []
    for token in tokenize.tokenize(io.BytesIO(source).readline):
        kind = tokenize.tok_name[token.type]
        if kind in _SKIPPED:
            continue
        if kind in ("INDENT", "DEDENT"):
            yield kind
        elif kind == "NEWLINE":
            if not all(part[:1] in "\"'rRuU" and part[-1:] in "\"'" for part in statement):  # a docstring
                yield "".join(f"{part} " for part in statement)
            statement = []
        else:
            statement.append(token.string)


def _modules(experiment: Experiment) -> Iterator[str]:
    """Names of the modules in which the experiment's classes and functions are defined."""
    optimizer = experiment.optimizer
    parts = [*experiment.model.modules(), optimizer, *getattr(optimizer, "optimizers", ()), bare(experiment.sampler)]
    kinds = {base for part in parts for base in type(part).__mro__}
    yield from sorted({kind.__module__ for kind in kinds})
    for given in (experiment.loss_fn, getattr(experiment, "step_fn", None)):
        function = _unwrapped(given)
        yield getattr(function, "__module__", None) or type(function).__module__


def _unwrapped(function: Any) -> Any:
    while hasattr(function, "func") or hasattr(function, "__wrapped__"):  # partial, decorated
        function = getattr(function, "func", None) or function.__wrapped__
    return function


def _name(module: ModuleType) -> str:
    """As another process would import it: a script that is run is `__main__` only to itself."""
    if module.__name__ != "__main__":
        return module.__name__
    spec = getattr(module, "__spec__", None)
    return spec.name if spec is not None else Path(str(getattr(module, "__file__", "__main__"))).stem


def _own_file(module: ModuleType) -> Path | None:
    """The file of a module of the user's."""
    file = getattr(module, "__file__", None)
    return Path(file).resolve() if file and str(file).endswith(".py") and is_users(Path(file).resolve()) else None


def _located(name: str) -> Path | None:
    """The file of a module, without importing anything."""
    if (module := sys.modules.get(name)) is not None:
        return _own_file(module)
    path: Any = [str(Path.cwd()), *sys.path]
    for part in name.split("."):
        spec = PathFinder.find_spec(part, path)
        if spec is None:
            return None
        path = spec.submodule_search_locations or []
    file = Path(spec.origin).resolve() if spec is not None and spec.origin else None
    return file if file is not None and file.suffix == ".py" and is_users(file) else None


def _imported(path: Path, name: str) -> list[tuple[str, Path]]:
    """The user's modules that a file imports, of those that are loaded."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    wanted: set[str] = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            wanted |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".") if node.level else []
            base = ".".join(parts[: len(parts) - node.level + 1] if node.level else [])
            start = ".".join(part for part in (base, node.module or "") if part)
            wanted |= {start} | {f"{start}.{alias.name}" for alias in node.names}
    loaded = [(one, sys.modules[one]) for one in sorted(wanted) if isinstance(sys.modules.get(one), ModuleType)]
    return [(one, file) for one, module in loaded if (file := _own_file(module)) is not None]
