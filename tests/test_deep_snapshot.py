"""What a step may change is remembered, and put back into the same objects."""

import collections
import threading

import numpy as np
import pytest
from kept_values import plain, recorded

from workbench.deep_snapshot import DeepSnapshot
from workbench.standins import Touched, without_counting


def test_the_same_objects_get_what_they_held():
    inner = [1, 2]
    whole = {"inner": inner, "again": inner, "set": {1}, "array": np.arange(3), "deque": collections.deque([1], 4)}
    objects = dict(whole)
    before = DeepSnapshot([("whole", whole)])
    inner.append(3)
    whole["array"] += 1
    whole["set"].add(2)
    whole["deque"].extend([5, 6])
    whole["inner"] = []
    whole["new"] = 1
    assert sorted(one.path for one in before.changed()) == [
        "whole",
        "whole.array",
        "whole.deque",
        "whole.inner",
        "whole.set",
    ]
    assert before.put_back() == [] and before.changed() == []
    assert list(whole) == list(objects) and all(whole[key] is objects[key] for key in objects)
    assert inner == [1, 2] and whole["set"] == {1} and whole["array"].tolist() == [0, 1, 2]
    assert whole["deque"] == collections.deque([1]) and whole["deque"].maxlen == 4


def test_an_array_that_is_too_large_to_be_copied_can_not_be_written_to(monkeypatch):
    monkeypatch.setattr("workbench.deep_snapshot.BUDGET", 100)
    whole = {"large": np.zeros(100), "view": None, "small": np.zeros(2)}
    whole["view"] = whole["large"][3:]
    found = DeepSnapshot([("whole", whole)])
    assert found.large == ["whole.large", "whole.view"] and found.left_out == []
    with found.read_only():
        for name in ("large", "view"):
            with pytest.raises(ValueError, match="read-only"):
                whole[name][0] = 1
        whole["small"][0] = 1
    whole["large"][0] = whole["view"][0] = 1  # as before


def test_a_step_that_writes_to_such_an_array_is_unverified(tmp_path, monkeypatch):
    monkeypatch.setattr("workbench.deep_snapshot.BUDGET", 100)
    norms = np.zeros(100)

    def habit(norm):
        norms[int(norms[-1])] = norm
        norms[-1] += 1
        return 0.5

    losses, said = recorded(tmp_path / "run", lambda: habit)
    assert norms[-1] == 6 and "habit.norms, too large to be copied and put back" in said[0]
    assert losses == plain(lambda: lambda norm: 0.5)


def test_what_is_too_much_to_look_through_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr("workbench.deep_snapshot.ITEMS", 50)
    seen = list(range(100))
    losses, said = recorded(tmp_path / "run", lambda: lambda norm: seen.append(norm) or 0.5)
    assert len(seen) == 106 and losses == plain(lambda: lambda norm: 0.5)
    assert "unverified" in said[0] and "there is more in step_fn.habit.seen than can be looked through" in said[0]


def test_a_stand_in_tells_of_its_use_in_its_own_thread_only():
    holder = {"given": iter([1, 2])}
    original, got = holder["given"], []
    around = DeepSnapshot([("holder", holder)])
    with pytest.raises(Touched), without_counting(around, around.opaque.values()) as touched:
        assert isinstance(holder["given"], type(original)) and holder["given"] is not original
        thread = threading.Thread(target=lambda: got.append(next(holder["given"])))
        thread.start()
        thread.join()
        assert got == [1] and touched == []
        next(holder["given"])
    assert [one.path for one in touched] == ["holder.given"]
    assert holder["given"] is original and list(original) == [2]


def test_no_code_of_a_class_is_run_to_look_at_it():
    ran = []

    def noting(name, base):
        def method(self, *args):
            ran.append(name)
            return getattr(base, name)(self, *args)

        return method

    names = ["__iter__", "__len__", "__getattribute__"]
    kinds = [list, dict, set, tuple, frozenset, collections.deque, object]
    made = {
        base: type(f"Of{base.__name__}", (base,), {name: noting(name, base) for name in names if hasattr(base, name)})
        for base in kinds
    }
    inner = [1]
    whole = [made[list]([inner]), made[dict](a=inner), made[set]([1]), made[tuple]([inner]), made[frozenset]([1])]
    whole += [made[collections.deque]([inner]), made[object]()]
    object.__setattr__(whole[-1], "inner", inner)
    object.__setattr__(whole[-1], "number", 1)
    before = DeepSnapshot([("whole", whole)])
    list.append(whole[0], 2)
    dict.__setitem__(whole[1], "b", 2)
    set.add(whole[2], 2)
    object.__setattr__(whole[-1], "number", 2)
    inner.append(2)
    changed = [one.path for one in before.changed()]
    failed = before.put_back()
    assert ran == [] and failed == [] and len(changed) == 5
    assert inner == [1] and list.__len__(whole[0]) == dict.__len__(whole[1]) == set.__len__(whole[2]) == 1
    assert object.__getattribute__(whole[-1], "number") == 1
