"""Which part of a script has a part in a run's steps: a digest of each definition that these reach, by its name.

A script is edited all the time: more steps, another folder, resume=True. What its steps are made of is found from what
it hands to its Recorder (all but the folder and the options), and from there through each definition and each name
that is bound outside of loops, however often. Knows Python's syntax; imports and executes nothing of the script.
"""

from __future__ import annotations

import ast
import symtable
import textwrap
from collections.abc import Callable, Collection, Iterator

HANDED = ("model", "optimizer", "loss_fn", "sampler", "step_fn", "extra")  # keywords of a Recorder
MOST = 200  # definitions: more are not followed

_Binding = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign | ast.AugAssign
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def parts_of(source: str, names: Collection[str], digest: Callable[[bytes], str]) -> dict[str, str]:
    """A digest of each definition that the steps of a script reach.

    Args:
        names: of functions and classes that are known to be part of the step, besides what a Recorder is given.
        digest: of the source of all that binds a name.

    Returns:
        By name; empty where none is found.

    Raises:
        SyntaxError, ValueError: it is no Python.
    """
    tree = ast.parse(source)
    bound: dict[str, list[_Binding]] = {}
    for binding in _bindings(tree.body, names):
        for name in _bound(binding):
            bound.setdefault(name, []).append(binding)
    queue = sorted({name for call in _recorders(tree) for name in _handed(call)} | set(names))
    found: dict[str, str] = {}
    while queue and len(found) < MOST:
        name = queue.pop()
        if name in found or name not in bound:
            continue
        texts = [_text(source, binding) for binding in bound[name]]
        found[name] = digest("\n".join(texts).encode())
        queue += [other for text in texts for other in _reached(text)]
    return found


def _recorders(tree: ast.AST) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function = node.func
            named = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", None)
            if named == "Recorder":
                yield node


def _handed(call: ast.Call) -> Iterator[str]:
    given = [*call.args[1:], *(one.value for one in call.keywords if one.arg in HANDED)]
    yield from (node.id for one in given for node in ast.walk(one) if isinstance(node, ast.Name))


def _bindings(body: list[ast.stmt], names: Collection[str]) -> Iterator[_Binding]:
    """Definitions and assignments, in order: of the module, and of the functions in which the step is made."""
    for node in body:
        if isinstance(node, _DEFINITIONS):
            inner = [one for one in ast.walk(node) if isinstance(one, _DEFINITIONS) and one is not node]
            makes = any(True for _ in _recorders(node)) or any(one.name in names for one in inner)
            if isinstance(node, ast.ClassDef) or not makes:
                yield node
            else:
                yield from _bindings(node.body, names)
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            if not any(True for _ in _recorders(node)):
                yield node
        else:  # what a loop binds is of its rounds; a definition in one is of the step nevertheless
            loop = isinstance(node, (ast.For, ast.AsyncFor, ast.While))
            blocks = [getattr(node, name, []) for name in ("body", "orelse", "finalbody")]
            blocks += [handler.body for handler in getattr(node, "handlers", [])]
            for block in blocks:
                yield from (one for one in _bindings(block, names) if not loop or isinstance(one, _DEFINITIONS))


def _bound(binding: _Binding) -> Iterator[str]:
    if isinstance(binding, _DEFINITIONS):
        yield binding.name
        return
    targets = binding.targets if isinstance(binding, ast.Assign) else [binding.target]
    while targets:
        target = targets.pop()
        if isinstance(target, ast.Name):
            yield target.id
        elif isinstance(target, (ast.Tuple, ast.List)):
            targets = [*targets, *target.elts]
        elif isinstance(target, ast.Starred):
            targets = [*targets, target.value]


def _text(source: str, binding: _Binding) -> str:
    first = min([binding.lineno, *(one.lineno for one in getattr(binding, "decorator_list", []))])
    if isinstance(binding, _DEFINITIONS):
        return textwrap.dedent("\n".join(source.splitlines()[first - 1 : binding.end_lineno]))
    return ast.get_source_segment(source, binding) or ""


def _reached(text: str) -> Iterator[str]:
    """Names that it takes from outside of itself."""
    try:
        top = symtable.symtable(text, "<script>", "exec")
    except SyntaxError:  # a definition that begins within a line
        return
    yield from (one.get_name() for one in top.get_symbols() if one.is_referenced())
    tables = top.get_children()
    while tables:
        table = tables.pop()
        tables = [*tables, *table.get_children()]
        yield from (one.get_name() for one in table.get_symbols() if one.is_global())
