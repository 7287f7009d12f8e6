"""What a panel remembers of steps."""

from pathlib import Path

import pandas as pd

from workbench.screen.results import KEPT, Found, Made, Results


def made(*changes, **attrs):
    frame = pd.DataFrame({"change": ["untouched", *changes], "loss": [1.0, *(2.0 + len(one) for one in changes)]})
    frame.attrs |= {"sentence": "exact", "notices": [], "files": []} | attrs
    return frame


def test_experiments_add_up_below_the_untouched_step():
    found = Found()
    found.add(made("lr=0.5x", files=["a"]))
    found.add(made("clip=off", "v=max", sentence="again", notices=["n"], files=["b"]))
    found.add(made("lr=0.5x").assign(loss=[1.0, 9.0]))
    assert found.experiments["change"].tolist() == ["untouched", "clip=off", "v=max", "lr=0.5x"]
    assert found.experiments["loss"].tolist() == [1.0, 10.0, 7.0, 9.0]
    assert found.experiments.attrs == {"sentence": "exact", "notices": ["n"], "files": ["a", "b"]}


def test_the_last_steps_are_kept():
    results = Results()
    assert results.of(("run", 1, 0)).trace is None
    for step in range(KEPT):
        results.change(("run", step, 0)).trace = step
    results.change(("run", 0, 0)).context = "more"
    results.change(("other", 0, 0)).trace = "other"
    assert results.of(("run", 1, 0)).trace is None  # the one that was changed longest ago
    assert results.of(("run", 0, 0)) == Found(trace=0, context="more")
    assert results.of(("run", 0, 1)) == Found() and results.of(("other", 0, 0)).trace == "other"


def test_files_are_read_again_beside_what_was_computed_here():
    results, key = Results(), ("run", 1, 0, "here")

    def read():
        return Found(trace="of a file", made={"trace": Made(1.0, file=Path("trace.json"))})

    found = results.look_up(key, read)
    found.verdict, found.made["verdict"] = "computed", Made(2.0)
    results.forget_files()
    assert results.of(key).trace is None
    again = results.look_up(key, read)
    assert (again.trace, again.verdict, set(again.made)) == ("of a file", "computed", {"trace", "verdict"})
    assert results.look_up(key, lambda: Found()) is again
