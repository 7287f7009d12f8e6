"""Whether a value that a program asks for is only shown: printed, logged, displayed by a notebook, or asserted.

Then nothing that the program does later depends on it. It is read off the source of the line that asks; where that
can't be had, or is anything else than what is listed here, the answer is no. Knows Python's frames and its grammar.
"""

from __future__ import annotations

import ast
import builtins
import functools
import linecache
import logging
from collections.abc import Iterator
from itertools import islice
from types import FrameType
from typing import Any

_SHOW = ("print", "str", "repr", "format")
_LOG = ("debug", "info", "warning", "error", "critical", "log")
_TEXT = (ast.FormattedValue, ast.JoinedStr, ast.Compare, ast.keyword)

Span = tuple[int | None, int | None, int | None, int | None]


def shown_only(frame: FrameType) -> bool:
    """Whether the attribute that the code of a frame is just asking for is only shown."""
    span = next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), None)
    if span is None or None in span:
        return False
    source = "".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals))
    ways = _ways(source, span)
    return bool(ways) and all(_shows(way, frame) for way in ways)


@functools.lru_cache(maxsize=8)
def _ways(source: str, span: Span) -> list[list[ast.AST]]:
    """The nodes around the attribute at a place, from itself to the statement."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return []
    return list(_found(tree, [], span))


def _found(node: ast.AST, above: list[ast.AST], span: Span) -> Iterator[list[ast.AST]]:
    for child in ast.iter_child_nodes(node):
        around: list[ast.AST] = [child, *([] if isinstance(child, ast.stmt) else above)]
        if isinstance(child, ast.Attribute) and _span(child) == span:
            yield around
        yield from _found(child, around, span)


def _span(node: ast.expr) -> Span:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


def _shows(way: list[ast.AST], frame: FrameType) -> bool:
    *inner, statement = way
    held = [*inner[1:], statement]
    return isinstance(statement, (ast.Expr, ast.Assert)) and all(
        _passes(part, around, frame) for part, around in zip(inner, held, strict=True)
    )


def _passes(part: ast.AST, around: ast.AST, frame: FrameType) -> bool:
    """Whether what `around` makes of the value of its `part` is shown, too, or is thrown away."""
    if isinstance(around, (ast.Expr, *_TEXT)):
        return True
    if isinstance(around, ast.Assert):
        return part is around.test
    if isinstance(around, ast.BinOp):  # f"{n + 1}", "%d" % n
        other = around.left if part is around.right else around.right
        return isinstance(other, ast.Constant)
    if not isinstance(around, ast.Call) or part is around.func:
        return False
    called = around.func
    if isinstance(called, ast.Name):
        return called.id in _SHOW and _value(called.id, frame) is getattr(builtins, called.id)
    if not isinstance(called, ast.Attribute):
        return False
    if isinstance(called.value, ast.Constant):
        return called.attr == "format" and isinstance(called.value.value, str)
    owner = _value(called.value.id, frame) if isinstance(called.value, ast.Name) else None
    return called.attr in _LOG and (owner is logging or type(owner) is logging.Logger)


def _value(name: str, frame: FrameType) -> Any:
    return frame.f_locals.get(name, frame.f_globals.get(name, getattr(builtins, name, None)))
