"""What the doctor found, as a record: JSON, one sentence, a table for the terminal and one for a notebook.

Knows the numbers only; runs nothing and imports no MLX.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from ..enumeration import listed

if TYPE_CHECKING:
    from rich.console import RenderableType

SUFFIX = " (deterministic)"  # names the row of the workbench's own replacement of an operation
MOST = 40  # rows of a table in the terminal


class OperationRow(msgspec.Struct, frozen=True):
    """An operation, or for a run the gradient of a parameter. `distinct` 0: MLX can't run it here."""

    name: str
    dtype: str
    repeats: int
    distinct: int
    remedy: str | None  # null: nothing to remedy


class StepRow(msgspec.Struct, frozen=True):
    """A whole step, or several in a row, in one setting.

    Attributes:
        compile, deterministic: how it was performed.
        steps: performed in a row, each time from the same state.
        repeats: times in this process.
        processes: further times, each in a fresh process.
        distinct: different results, of all tensors together.
        first: the first tensor that varies, in order of execution.
        module: the module that owns it, if any does.
    """

    dtype: str
    compile: bool
    deterministic: bool
    steps: int
    repeats: int
    processes: int
    distinct: int
    first: str | None = None
    module: str | None = None

    @property
    def mode(self) -> str:
        return "compiled" if self.compile else "eager"

    @property
    def operations(self) -> str:
        return "deterministic" if self.deterministic else "stock"


class SelfTest(msgspec.Struct, frozen=True):
    planted: int  # one-bit changes
    found: int


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What `examine` and `examine_run` return.

    Attributes:
        run: name of the examined run; None: the machine was examined.
        environment: as in a run's manifest.
        gflops: speed of a float32 matrix product.
        operations, step, self_test: what was counted.
        notes: what the user should know beside it.
        sentence: the answer.
        seconds: how long it took.
    """

    run: str | None
    environment: dict[str, Any]
    gflops: float
    operations: list[OperationRow]
    step: list[StepRow]
    self_test: SelfTest
    notes: list[str]
    sentence: str
    seconds: float

    def to_json(self) -> str:
        return msgspec.json.format(msgspec.json.encode(self)).decode()

    def __repr__(self) -> str:
        return f"Report({self.sentence!r})"

    def _repr_html_(self) -> str:
        operations = _html_table(("operation", "dtype", "repeats", "distinct", "remedy"), map(_cells, self.operations))
        rows = (
            [
                row.dtype,
                row.mode,
                row.operations,
                str(row.repeats),
                str(row.processes),
                str(row.distinct),
                row.first or "",
            ]
            for row in self.step
        )
        steps = _html_table(("step", "", "operations", "here", "fresh processes", "distinct", "first to vary"), rows)
        said = "".join(f"<p>{html.escape(text)}</p>" for text in (self_test_sentence(self.self_test), *self.notes))
        return f"<p><b>{html.escape(self.sentence)}</b></p>{steps}{operations}{said}"

    def __rich__(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        said = [self_test_sentence(self.self_test), *self.notes, f"{self.seconds:.0f} s"]
        return Group(
            self._facts(),
            *self._operation_table(),
            *self._step_table(),
            *(Text(text) for text in said),
            Text(f"\n{self.sentence}", style="bold"),
        )

    def _facts(self) -> RenderableType:
        from rich.table import Table

        grid = Table.grid(padding=(0, 2))
        for name, value in facts(self.environment, self.gflops).items():
            grid.add_row(name, value)
        return grid

    def _operation_table(self) -> Iterator[RenderableType]:
        from rich.text import Text

        rows = self.operations
        if self.run is not None:
            rows = [row for row in rows if row.distinct > 1]
            same = len(self.operations) - len(rows)
            yield Text(f"\n{same} of {len(self.operations)} gradients came out the same each time.")
        if not rows:
            return
        dtypes = list(dict.fromkeys(row.dtype for row in rows))
        what = "Operations on fixed inputs" if self.run is None else "Gradients that vary"
        yield Text(f"\n{what}, {rows[0].repeats} times each; different results:")
        table = _table()
        for column in ("operation" if self.run is None else "gradient", *dtypes):
            table.add_column(column)
        found = {(row.name, row.dtype): row for row in rows}
        names = list(dict.fromkeys(row.name for row in rows))
        for name in names[:MOST]:
            table.add_row(name, *(_verdict(found.get((name, dtype))) for dtype in dtypes))
        yield table
        if len(names) > MOST:
            yield Text(f"and {len(names) - MOST} more; --json lists all")
        for remedy in dict.fromkeys(row.remedy for row in rows if row.remedy is not None):
            meant = "What to do"
            if self.run is None:
                meant = named([row for row in rows if row.remedy == remedy], rows)
            yield Text(f"{meant}: {remedy}.")

    def _step_table(self) -> Iterator[RenderableType]:
        from rich.text import Text

        what = "One step of this run" if self.run is not None else f"{self.step[0].steps} steps of a small transformer"
        yield Text(f"\n{what} from one state, repeats here + in fresh processes; different results:")
        table = _table()
        varies = any(row.first for row in self.step)
        for column in ("dtype", "step", "operations", "repeats", "results", *(["first to vary"] if varies else [])):
            table.add_column(column)
        for row in self.step:
            repeats = f"{row.repeats} + {row.processes}"
            cells = (row.dtype, row.mode, row.operations, repeats, _verdict(row), row.first or "")
            table.add_row(*cells[: len(table.columns)])
        yield table


def _table() -> Any:
    from rich import box
    from rich.table import Table

    return Table(box=box.SIMPLE_HEAD, pad_edge=False)


def _cells(row: OperationRow) -> list[str]:
    return [row.name, row.dtype, str(row.repeats), str(row.distinct), row.remedy or ""]


def _verdict(row: OperationRow | StepRow | None) -> Any:
    from rich.text import Text

    if row is None or row.distinct == 0:
        return Text("" if row is None else "not here", style="dim")
    return Text("1  pass", style="green") if row.distinct == 1 else Text(f"{row.distinct}  FAIL", style="bold red")


def _html_table(names: Sequence[str], rows: Any) -> str:
    head = "".join(f"<th style='text-align:left'>{name}</th>" for name in names)
    cell = "<td style='text-align:left'>{}</td>".format
    body = "".join(f"<tr>{''.join(cell(html.escape(text)) for text in row)}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def facts(environment: dict[str, Any], gflops: float) -> dict[str, str]:
    """The numeric environment in words."""
    blas, jit = environment.get("blas"), environment.get("jit_compiler")
    found = {
        "backend": f"{environment['backend']}, {environment['device']}",
        "mlx": f"{environment['mlx']} on {environment['system']} {environment['machine']}",
    }
    if blas is not None:
        threads = f", {blas['num_threads']} threads" if blas.get("num_threads") else ""
        version = f" ({blas['internal_api']} {blas['version']}{threads})" if blas.get("internal_api") else ""
        found["BLAS"] = f"{blas['library']}{version}"
    if jit is not None:
        found["compiler"] = jit
    if environment.get("tf32") is not None:
        found["TF32"] = "on: float32 matrix products round their inputs" if environment["tf32"] else "off"
    found["float32 matmul"] = f"{gflops:,.0f} GFLOP/s"
    found["variables"] = " ".join(f"{k}={v}" for k, v in environment.get("variables", {}).items()) or "none set"
    return found


def self_test_sentence(test: SelfTest) -> str:
    return f"Self-test: {test.found} of {test.planted} planted one-bit changes were found."


def named(rows: Sequence[OperationRow], among: Sequence[OperationRow] = ()) -> str:
    """Names, each with the dtypes that it stands there for, unless these are all in which it was tried."""
    found: dict[str, list[str]] = {}
    for row in rows:
        found.setdefault(row.name, []).append(row.dtype)
    tried = {name: sum(row.name == name for row in among) for name in found}
    return ", ".join(
        name if len(dtypes) == tried[name] else f"{name} ({listed(dtypes)})" for name, dtypes in found.items()
    )
