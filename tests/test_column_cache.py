"""The cache of columns: the same answers as without it, and never trusted over the telemetry itself."""

import json
import os
import shutil

import pytest

from workbench.lines import column_cache
from workbench.lines.scan import Scan
from workbench.telemetry import read


def text(numbers, **fields):
    lines = [{"type": "meta", "step": 0}]
    lines += [
        {"type": "step", "step": n, "loss": 2.0 + n, "adam_v_norms": [0.5, None], "spike_rule": None} for n in numbers
    ]
    lines.append({"type": "val", "step": numbers[-1], "val_loss": 1.5})
    return "".join(json.dumps(line | fields) + "\n" for line in lines).encode()


@pytest.fixture
def path(tmp_path, monkeypatch):
    """A telemetry file that is worth a cache."""
    monkeypatch.setattr(column_cache, "WORTH", 100)
    monkeypatch.setattr(column_cache, "folder", lambda: tmp_path / "cache")
    (tmp_path / "run").mkdir()
    found = tmp_path / "run" / "telemetry.jsonl"
    found.write_bytes(text(range(1, 50)))
    return found


@pytest.fixture
def taken(monkeypatch):
    """How many bytes of telemetry were parsed."""
    found = []
    real = Scan._take
    monkeypatch.setattr(Scan, "_take", lambda self, body, *more: found.append(len(body)) or real(self, body, *more))
    return found


def said(telemetry):
    names = ("loss", "loss.kind", "adam_v_norms", "offset", "spike_rule")
    columns = [None if (column := telemetry.column(name)) is None else column.tobytes() for name in names]
    frame = telemetry.frame()
    return columns, frame.to_json(), frame.dtypes.tolist(), telemetry.lines, telemetry.notices, telemetry.metas


def the_cache(path):
    (found,) = (path.parent.parent / "cache").iterdir()
    return found


def test_the_second_time_nothing_is_parsed_and_all_is_the_same(path, taken):
    first = said(read(path))
    assert sum(taken) == path.stat().st_size
    taken.clear()
    assert said(read(path)) == first and taken == []
    assert os.listdir(path.parent) == ["telemetry.jsonl"]  # nothing is written into the run


def test_a_small_file_has_no_cache(path, monkeypatch):
    monkeypatch.setattr(column_cache, "WORTH", 10**6)
    read(path)
    assert not (path.parent.parent / "cache").exists()


def test_a_file_that_grew_is_read_on_from_the_cache(path, taken):
    read(path)
    taken.clear()
    more = text(range(50, 60))
    with open(path, "ab") as file:
        file.write(more + b'{"type": "st')
    grown = read(path)
    assert sum(taken) == len(more) and grown.last_step() == 59 and len(grown.notices) == 1
    path.with_name("copy.jsonl").write_bytes(path.read_bytes())
    assert grown.frame().equals(read(path.with_name("copy.jsonl")).frame())
    taken.clear()
    assert read(path).last_step() == 59 and taken == []  # what was new is in the cache too


@pytest.mark.parametrize("times", [False, True])
@pytest.mark.parametrize("where", [b'"loss": 27.0', b'"loss": 3.0', b'"loss": 51.0'])
def test_a_file_that_was_changed_is_read_anew(path, where, times):
    """Also in the middle, at the same length, with its time of change put back."""
    read(path)
    status = path.stat()
    content = path.read_bytes()
    assert content.count(where) == 1
    path.write_bytes(content.replace(where, where[:-1] + b"5"))
    if times:
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    losses = read(path).frame()["loss"].tolist()
    assert float(where[8:-1] + b"5") in losses and float(where[8:]) not in losses


def test_a_file_that_was_replaced_by_a_shorter_or_another_one_is_read_anew(path):
    read(path)
    path.write_bytes(text(range(1, 9)))
    assert read(path).last_step() == 8
    other = path.with_name("other")
    other.write_bytes(text(range(100, 150)))
    os.replace(other, path)
    assert read(path).frame()["step"].tolist() == list(range(100, 150))


def test_a_cache_that_is_damaged_anywhere_is_as_if_there_were_none(path):
    expected = said(read(path))
    whole = the_cache(path).read_bytes()
    for place in range(0, len(whole), 23):
        the_cache(path).write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert said(read(path)) == expected, place
    for length in (0, 4, 100, len(whole) - 1):
        the_cache(path).write_bytes(whole[:length])
        assert said(read(path)) == expected, length


def test_a_cache_of_another_version_is_not_used(path, taken, monkeypatch):
    read(path)
    taken.clear()
    monkeypatch.setattr(column_cache, "VERSION", column_cache.VERSION + 1)
    read(path)
    assert sum(taken) == path.stat().st_size


def test_a_copy_of_a_run_has_its_own_cache(path, taken):
    read(path)
    shutil.copytree(path.parent, path.parent.with_name("copy"))
    taken.clear()
    read(path.parent.with_name("copy") / "telemetry.jsonl")
    assert sum(taken) == path.stat().st_size


def test_a_cache_folder_that_can_not_be_written_only_costs_time(path, tmp_path):
    (tmp_path / "cache").write_text("in the way")
    assert read(path).last_step() == 49 and read(path).last_step() == 49


def test_the_caches_that_were_not_used_for_longest_go_first(path, tmp_path, monkeypatch):
    paths = [path]
    for number in range(1, 4):
        paths.append(path.with_name(f"{number}.jsonl"))
        paths[-1].write_bytes(path.read_bytes())
    for age, one in enumerate(paths[:3]):
        read(one)
        os.utime(column_cache._place(one), (1000 - age, 1000 - age))
    size = column_cache._place(path).stat().st_size
    monkeypatch.setattr(column_cache, "LIMIT", 2 * size + size // 2)
    read(paths[3])
    assert [column_cache._place(one).exists() for one in paths] == [True, False, False, True]
