"""Code that only reports: loggers and progress bars, and a branch of a program that does nothing but print or log.

`if count % 100 == 0: print(loss.item())` chooses by a number what is printed, and nothing else. Knows Python's frames
and source text; runs nothing of either.
"""

from __future__ import annotations

import ast
import builtins
import functools
import itertools
import linecache
import types
from typing import Any

from .bare_objects import MISSING, attributes, is_a, module_of

BARS = {"tqdm", "rich", "progressbar", "alive_progress", "enlighten"}
REPORTERS = {
    *BARS,
    *("logging", "wandb", "tensorboardX", "tensorboard", "mlflow", "comet_ml", "neptune"),
    *("loguru", "structlog", "colorama", "click", "tabulate"),
    *("json", "csv", "string", "textwrap", "pprint", "traceback", "warnings", "reprlib"),
}
_READING = {"item", "tolist", "format", "time", "perf_counter", "monotonic", "process_time", "strftime"}
_PURE = {"float", "int", "round", "len", "str", "repr", "format", "abs", "sum", "min", "max", "bool"}


def only_reports(frame: types.FrameType) -> bool:
    """Whether the comparison at which a frame stands chooses only what is reported: a reporter's own code makes it, or
    it is the condition of an `if` without `else` in which nothing happens but calls of reporters and `print`."""
    if str(frame.f_globals.get("__name__")).partition(".")[0] in REPORTERS:
        return True
    place = next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), (None,) * 4)
    start, _, column, _ = place
    if start is None or column is None:
        return False
    for node in _branches("".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals))):
        if _holds(node.test, start, column):
            return (
                not node.orelse
                and _reads_only(node.test)
                and all(isinstance(one, ast.Expr) and _reporting(one.value, frame) for one in node.body)
            )
    return False


@functools.lru_cache(maxsize=64)
def _branches(text: str) -> list[ast.If]:
    """Those of a source text, inner ones first."""
    try:
        source = ast.parse(text)
    except (SyntaxError, ValueError):
        return []
    return [node for node in ast.walk(source) if isinstance(node, ast.If)][::-1]


def _holds(node: ast.expr, line: int, column: int) -> bool:
    end = node.end_lineno or 0, node.end_col_offset or 0
    return (node.lineno, node.col_offset) <= (line, column) < end


def _reporting(node: ast.expr, frame: types.FrameType) -> bool:
    """Whether an expression calls a reporter, or `print`, with arguments that only read."""
    if not isinstance(node, ast.Call):
        return False
    named = node.func
    called = _found(named.value if isinstance(named, ast.Attribute) else named, frame)
    known = called is print or _module(called).partition(".")[0] in REPORTERS
    return known and all(_reads_only(one) for one in (*node.args, *(word.value for word in node.keywords)))


def _module(called: Any) -> str:
    """The name of a module, or of the one that a function, a class or an object's class is of."""
    if is_a(called, types.ModuleType):
        name = (attributes(called) or {}).get("__name__")
    elif is_a(called, types.FunctionType):
        name = called.__module__
    else:
        name = module_of(called if is_a(called, type) else type(called))
    return name if type(name) is str else ""


def _found(node: ast.expr, frame: types.FrameType) -> Any:
    """What stands under a name, or a name's attribute, without asking any code for it."""
    if isinstance(node, ast.Name):
        spaces = frame.f_locals, frame.f_globals, vars(builtins)
        return next((space[node.id] for space in spaces if node.id in space), MISSING)
    if isinstance(node, ast.Attribute):
        return (attributes(_found(node.value, frame)) or {}).get(node.attr, MISSING)
    return MISSING


def _reads_only(node: ast.expr) -> bool:
    """Whether nothing is called in an expression but what reads a value or the clock, and nothing is assigned."""
    for one in ast.walk(node):
        if isinstance(one, (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)):
            return False
        if isinstance(one, ast.Call):
            by_name = isinstance(one.func, ast.Name) and one.func.id in _PURE
            if not by_name and not (isinstance(one.func, ast.Attribute) and one.func.attr in _READING):
                return False
    return True
