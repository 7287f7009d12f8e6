"""The scripts that recorded two runs, and what was said to them: option by option, and in one line.

A command line is read by the usual rules (`--name value`, `--name=value`, a name alone); what a script made of it, only
the script knows. Knows manifests and texts.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from ..manifest import Manifest

_NUMBER = re.compile(r"-\.?\d")  # a negative number is a value

Unlike = tuple[str, str, str | None, str | None]  # name, kind, of a, of b


def differing_scripts(a: Manifest, b: Manifest, folders: Sequence[str]) -> Iterator[Unlike]:
    """One line of what differs, at most, in how two runs of a loop of one's own were started.

    Of one script the options that differ are a knob, for a step may depend on them. Those that only name each run's own
    folder have no effect. Two scripts are other code, and their command lines belong to them.

    Args:
        folders: the names of the runs' folders.
    """
    sides = [(_script(one.rebuild), _argv(one.rebuild)) for one in (a, b)]
    (script_a, argv_a), (script_b, argv_b) = sides
    if (script_a or script_b) and _name(script_a) != _name(script_b):
        yield "script", "code", _line(script_a, argv_a), _line(script_b, argv_b)
        return
    if script_a != script_b:  # of one name in two folders: what it is, digests of the code say where steps are replayed
        alike = a.segments[-1].code is not None and a.segments[-1].code == b.segments[-1].code
        yield "script", "no effect" if alike else "code", script_a, script_b
    left, right = _options(argv_a), _options(argv_b)
    names = [name for name in dict.fromkeys((*left, *right)) if left.get(name) != right.get(name)]
    own = [name for name in names if _names_folder(left.get(name), folders[0], right.get(name), folders[1])]
    if names:
        kind = "no effect" if len(own) == len(names) else "knob"
        shown = names if kind == "no effect" else [name for name in names if name not in own]
        yield "argv", kind, _said(left, shown), _said(right, shown)


def fork_changes(a: Manifest, b: Manifest) -> list[str]:
    """What a fork noted that it changed, if one of two runs is a fork of the other: such as ``lr=0.002``."""
    for child, other in ((a, b), (b, a)):
        if child.parent is not None and child.parent.run == other.run:
            return [change.removeprefix("--set ") for change in child.parent.changes]
    return []


def _script(rebuild: Mapping[str, Any]) -> str | None:
    found = rebuild.get("script")
    return None if found is None else str(found)


def _argv(rebuild: Mapping[str, Any]) -> list[str]:
    found = rebuild.get("argv")
    return [str(one) for one in found] if isinstance(found, list) else []


def _name(script: str | None) -> str | None:
    return None if script is None else PurePath(script).name


def _line(script: str | None, argv: Sequence[str]) -> str | None:
    return None if script is None else shlex.join([PurePath(script).name, *argv])


def _options(argv: Sequence[str]) -> dict[str, str]:
    """By name; what has none, by its place. A name alone has no text; one that comes again, all of them."""
    found: dict[str, str] = {}
    rest, place = list(argv), 0
    while rest:
        one = rest.pop(0)
        if not one.startswith("-") or _NUMBER.match(one):
            place += 1
            name, value = f"argument {place}", one
        else:
            name, given, value = one.partition("=")
            if not given and rest and (not rest[0].startswith("-") or _NUMBER.match(rest[0])):
                value = rest.pop(0)
        found[name] = f"{found[name]} {value}" if name in found else value
    return found


def _names_folder(left: str | None, a: str, right: str | None, b: str) -> bool:
    return bool(left and right) and (PurePath(str(left)).name, PurePath(str(right)).name) == (a, b)


def _said(options: Mapping[str, str], names: Sequence[str]) -> str | None:
    """Such as "--at 130 --fault lr"; what has no name, without one."""
    said = [[name, options[name]] if name.startswith("-") else [options[name]] for name in names if name in options]
    return " ".join(shlex.join(part for part in one if part) for one in said) or None
