"""Changes: every spelling, what it means, and what is refused."""

import pytest

from workbench.errors import ExperimentError
from workbench.interventions.changes import NAMES, Change, Times, parse_change

SPELLINGS = {
    "lr=0.5x": Change("lr", Times(0.5)),
    "lr=1e-4": Change("lr", 1e-4),
    "clip=1.0": Change("clip", 1.0),
    "clip=off": Change("clip", None),
    "reset=m": Change("reset", ("m",)),
    "reset=v": Change("reset", ("v",)),
    "reset=m,v": Change("reset", ("m", "v")),
    "v=max": Change("v", "max"),
    "beta2=0.95": Change("beta2", 0.95),
    "beta2=0": Change("beta2", 0.0),
    "eps=1e-6": Change("eps", 1e-6),
    "drop-row=3": Change("drop-row", 3),
    "batch=4100": Change("batch", 4100),
    "batch=skip": Change("batch", "skip"),
    "dtype=float32": Change("dtype", "float32"),
    "rng=18446744073709551615": Change("rng", 2**64 - 1),
    "deterministic=on": Change("deterministic", True),
    "compile=off": Change("compile", False),
    "state=0": Change("state", 0),
}


@pytest.mark.parametrize("text", SPELLINGS)
def test_each_spelling_has_one_meaning_and_is_printed_so_that_it_parses_again(text):
    change = parse_change(text)
    assert change == SPELLINGS[text] and type(change.value) is type(SPELLINGS[text].value)
    assert parse_change(str(change)) == change


def test_every_name_is_spelled_above():
    assert {change.name for change in SPELLINGS.values()} == set(NAMES)


def test_equal_changes_have_one_text():
    assert str(parse_change("lr=0.50x")) == "lr=0.5x" and str(parse_change("reset=v,m")) == "reset=m,v"
    assert str(parse_change("eps=0.000001")) == "eps=1e-06"


def test_settings_last_and_edits_do_not():
    lasting = {
        name for name, text in ((change.name, text) for text, change in SPELLINGS.items()) if parse_change(text).lasts
    }
    assert lasting == {"lr", "clip", "beta2", "eps", "dtype", "deterministic", "compile"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lr", "is malformed; expected NAME=VALUE, as in lr=0.5x"),
        ("momentum=0.9", "is unknown; expected NAME=VALUE.*one of lr, clip"),
        ("lr=", "expected a positive factor such as 0.5x"),
        ("lr=-1x", "has the value '-1x'"),
        ("lr=0", "has the value '0'"),
        ("lr=nan", "has the value 'nan'"),
        ("lr=inf", "has the value 'inf'"),
        ("lr=1_0", "has the value '1_0'"),
        ("clip=0", "expected a positive gradient norm, or off"),
        ("clip=none", "or off"),
        ("reset=w", "expected m, v, or m,v"),
        ("reset=m,m", "expected m, v, or m,v"),
        ("v=min", "expected max"),
        ("beta2=1", "expected a number from 0 to below 1"),
        ("beta2=-0.1", "from 0 to below 1"),
        ("eps=0", "expected a positive number"),
        ("drop-row=-1", "expected the number of a row, from 0"),
        ("drop-row=1.5", "the number of a row"),
        ("batch=0", "expected the number of a step, from 1, or skip"),
        ("batch=²", "the number of a step"),
        ("rng=18446744073709551616", "a seed from 0"),
        ("state=-1", "from 0"),
        ("dtype=bfloat16", "expected float32"),
        ("compile=yes", "expected on or off"),
        ("lr=0.5x+clip=1.0", "is more than one; expected exactly one"),
    ],
)
def test_anything_else_is_refused_with_what_is_expected(text, words):
    with pytest.raises(ExperimentError, match=words) as caught:
        parse_change(text)
    assert repr(text) in str(caught.value)
