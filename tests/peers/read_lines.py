"""Table libraries on a long telemetry file: every column as arrays, in a process of its own.

python read_lines.py serve           # answers requests; see serve.py
python read_lines.py read LIBRARY FILE
"""

import json
import resource
import subprocess
import sys
import time

from serve import serve

UNIT = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, in bytes
LIST = "per_layer_act_norms"


def duckdb(path):
    import duckdb

    connection = duckdb.connect()
    yield
    table = connection.sql(f"select * from read_ndjson('{path}')").to_arrow_table()
    for name in table.column_names:
        column = table.column(name)
        (column.combine_chunks().flatten() if name == LIST else column).to_numpy(zero_copy_only=False)


def polars(path):
    import polars

    yield
    frame = polars.read_ndjson(path)
    for name in frame.columns:
        (frame[name].explode() if name == LIST else frame[name]).to_numpy()


def pandas(path):
    import numpy
    import pandas

    yield
    frame = pandas.read_json(path, lines=True)
    for name in frame.columns:
        numpy.array(frame[name].tolist()) if name == LIST else frame[name].to_numpy()


LIBRARIES = {"DuckDB": duckdb, "Polars": polars, "pandas": pandas}


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * UNIT


def read(library, path):
    work = LIBRARIES[library](path)
    next(work)  # imports
    before, began = peak(), time.perf_counter()
    for _ in work:
        pass
    return {"seconds": time.perf_counter() - began, "peak_mb": (peak() - before) / 1e6}


def every(path):
    """Each library in a fresh process."""
    found = {}
    for name in LIBRARIES:
        command = [sys.executable, __file__, "read", name, path]
        done = subprocess.run(command, capture_output=True, text=True)
        found[name] = json.loads(done.stdout) if done.returncode == 0 else {"error": done.stderr.splitlines()[-1]}
    return found


if __name__ == "__main__":
    if sys.argv[1] == "read":
        print(json.dumps(read(sys.argv[2], sys.argv[3])))
    else:
        serve({"read": every})
