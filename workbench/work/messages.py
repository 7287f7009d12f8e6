"""What crosses the pipes between a notebook and the process that works for it: JSON, one object a line, never pickle.

    to the process    {"do": "replay", "run": path, "step": 18, "segment": 0, "options": {…},
                       "variables": os.environ, "path": sys.path, "folder": working folder}
    from it           {"progress": [done, total, what]}     any number of times
                      {"writes": [folder, existed]}         before the work may write into that folder
                      {"result": …} or {"error": {…}}       once

Results are the records that files hold too (trace, verdict, what-if, report), in their own JSON form. Imports no MLX.
"""

from __future__ import annotations

import base64
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pandas as pd

from .. import errors
from ..errors import WorkbenchError
from ..examination.diagnosis import Report
from ..interventions import whatif
from ..probes.neighbours import COLUMNS, Context
from ..trace import Trace, TraceRecord
from ..verdict import Verdict
from .work_error import WorkError as WorkError

REPLAY, CONTEXT, AUTOPSY, WHATIF = "replay", "context", "autopsy", "whatif"
DOCTOR, ENVIRONMENT = "doctor", "environment"


# ---- results


def pack(result: Any) -> Any:
    """A result as what JSON can hold."""
    if isinstance(result, Trace):
        batch = None if result.batch is None else [_packed(array) for array in result.batch]
        path = None if result.path is None else str(result.path)
        return {"record": result.record, "path": path, "batch": batch, "notices": result.notices}
    if isinstance(result, Context):
        traces = [pack(trace) for trace in result.traces]
        logged = None if result.logged is None else _packed_norms(result.logged)
        found = {"step": result.step, "traces": traces, "flagged": result.flagged, "notices": result.notices}
        return found | {"logged": logged}
    if isinstance(result, tuple):  # of `whatif.experiments`
        records, files, notices = result
        return {"records": records, "files": [str(path) for path in files], "notices": notices}
    return result


def unpack(task: str, packed: Any) -> Any:
    """The same object as in the process that made it: a `Trace`, `Context`, `Verdict`, table of experiments, `Report`,
    or numeric environment."""
    if task == REPLAY:
        return _trace(packed)
    if task == CONTEXT:
        traces = [_trace(one) for one in packed["traces"]]
        logged = None if packed["logged"] is None else _unpacked_norms(packed["logged"])
        return Context(packed["step"], traces, packed["flagged"], packed["notices"], logged)
    if task == AUTOPSY:
        return msgspec.convert(packed, Verdict)
    if task == WHATIF:
        frame = whatif.table(msgspec.convert(packed["records"], list[whatif.WhatIfRecord]))
        frame.attrs |= {"notices": packed["notices"], "files": packed["files"]}
        return frame
    return msgspec.convert(packed, Report) if task == DOCTOR else packed


def _trace(packed: Mapping[str, Any]) -> Trace:
    batch = None if packed["batch"] is None else tuple(_unpacked(one) for one in packed["batch"])
    path = None if packed["path"] is None else Path(packed["path"])
    return Trace(msgspec.convert(packed["record"], TraceRecord), path, batch, packed["notices"])


def _packed_norms(frame: pd.DataFrame) -> dict[str, Any]:
    """The numbers as bytes: JSON has no NaN."""
    return {"rows": frame.drop(columns="value").to_numpy().tolist(), "value": _packed(frame["value"].to_numpy())}


def _unpacked_norms(packed: Mapping[str, Any]) -> pd.DataFrame:
    names = [name for name in COLUMNS if name != "value"]
    return pd.DataFrame(packed["rows"], columns=names).assign(value=_unpacked(packed["value"]))[list(COLUMNS)]


def _packed(array: np.ndarray) -> dict[str, Any]:
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode("ascii")
    return {"dtype": array.dtype.str, "shape": list(array.shape), "data": data}


def _unpacked(packed: Mapping[str, Any]) -> np.ndarray:
    flat = np.frombuffer(base64.b64decode(packed["data"]), np.dtype(packed["dtype"]))
    return flat.reshape(packed["shape"]).copy()


# ---- errors


def pack_error(error: BaseException) -> dict[str, str]:
    details = "".join(traceback.format_exception(error))
    return {"name": type(error).__name__, "message": str(error), "details": details}


def unpack_error(packed: Mapping[str, str]) -> Exception:
    """An error of the workbench is itself again; any other is a `WorkError`, which tells its name and traceback."""
    own = getattr(errors, packed["name"], None)
    if isinstance(own, type) and issubclass(own, WorkbenchError):
        return own(packed["message"])
    return WorkError(packed["message"], packed["name"], packed["details"])
