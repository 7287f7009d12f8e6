"""Where a script was stopped, at its recorder; and what an exception of one of its functions has to do with that.

What the script binds after its recorder is not there in a replay, and a `with` or `try` around it has ended. Knows
Python's syntax; executes nothing.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from .users_code import is_users_file


class Stopped:
    """
    Args:
        frame: in which the recorder is being made.
        outer: the file of the code that runs the script.

    Attributes:
        lines: the lines of the user's that were being executed, innermost first, by file.
        ended: a phrase for each `with` and `try` that ended with it.
    """

    def __init__(self, frame: FrameType | None, outer: str) -> None:
        self.lines: dict[str, list[int]] = {}
        while frame is not None and frame.f_code.co_filename != outer:
            if is_users_file(frame.f_code.co_filename):
                self.lines.setdefault(frame.f_code.co_filename, []).append(frame.f_lineno)
            frame = frame.f_back
        self.ended = [phrase for file, lines in self.lines.items() for phrase in _ended(file, lines)]

    def on(self, error: BaseException) -> str:
        """A sentence, without its full stop, on how an exception came about; empty: nothing is known."""
        name = getattr(error, "name", None) if isinstance(error, (NameError, AttributeError)) else None
        if isinstance(name, str) and (found := self._bound_later(name)) is not None:
            file, line, itself = found
            where = f"line {line} of {os.path.basename(file)}"
            if itself:
                return (
                    f"{name} is what {where} makes of the Recorder, where a replay stops the script: there is none. A "
                    "step that needs its number counts for itself, in its state"
                )
            return (
                f"{name} is bound on {where}, after the Recorder, and a replay runs the script only up to that; bind "
                "it before"
            )
        return self.around()

    def around(self) -> str:
        """A sentence, without its full stop, on the `with` and `try` that have ended; empty: none has."""
        if not self.ended:
            return ""
        return (
            f"The Recorder is made inside {' and '.join(self.ended)}, which ended where a replay stops the script: "
            "what that closed, cleared or set back is so in each step here. Let it begin before the Recorder and end "
            "after recorder.close() without a `with` or `finally`, or give a function that builds a wb.Experiment"
        )

    def _bound_later(self, name: str) -> tuple[str, int, bool] | None:
        """File and line that bind a name after the script was stopped; and whether that is the very line."""
        for file, lines in self.lines.items():
            for first, last in sorted(_bindings(file, name)):
                if any(first <= line <= last for line in lines):
                    return file, first, True
                if first > min(lines):
                    return file, first, False
        return None


def _tree(file: str) -> ast.Module | None:
    try:
        return ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None


def _bindings(file: str, name: str) -> Iterator[tuple[int, int]]:
    """First and last line of each statement that binds a name or an attribute of that name."""
    for node in ast.walk(_tree(file) or ast.Module([], [])):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            if node.name == name:
                yield node.lineno, node.lineno
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            if any((one.asname or one.name.partition(".")[0]) == name for one in node.names):
                yield node.lineno, node.end_lineno or node.lineno
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(_is(name, inner) for target in targets for inner in ast.walk(target)):
                yield node.lineno, node.end_lineno or node.lineno
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            for one in node.items:
                if one.optional_vars is not None and any(_is(name, inner) for inner in ast.walk(one.optional_vars)):
                    yield node.lineno, one.context_expr.end_lineno or node.lineno


def _is(name: str, node: ast.AST) -> bool:
    return (isinstance(node, ast.Name) and node.id == name) or (isinstance(node, ast.Attribute) and node.attr == name)


def _ended(file: str, lines: list[int]) -> Iterator[str]:
    """Each `with`, and each `try` that has a `finally` or catches everything, in whose body a line is."""
    for node in ast.walk(_tree(file) or ast.Module([], [])):
        kind = "with" if isinstance(node, (ast.With, ast.AsyncWith)) else "try" if isinstance(node, ast.Try) else ""
        if not kind or (isinstance(node, ast.Try) and not (node.finalbody or any(map(_catches_all, node.handlers)))):
            continue
        body = node.body  # type: ignore[attr-defined]
        if any(body[0].lineno <= line <= (body[-1].end_lineno or 0) for line in lines):
            yield f"the `{kind}` of line {node.lineno}"  # type: ignore[attr-defined]


def _catches_all(handler: ast.ExceptHandler) -> bool:
    return handler.type is None or (isinstance(handler.type, ast.Name) and handler.type.id == "BaseException")
