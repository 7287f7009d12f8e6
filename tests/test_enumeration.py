"""Names in sentences: all of them, or the first few and how many more there are."""

import pytest

from workbench.enumeration import SHOWN, listed, some


@pytest.mark.parametrize(
    ("words", "said"), [(["a"], "a"), (["a", "b"], "a and b"), (["a", "b", "c"], "a, b and c"), ([""], "")]
)
def test_all_of_them(words, said):
    assert listed(words) == said


@pytest.mark.parametrize(
    ("names", "most", "said"),
    [([], 2, ""), ([4], 2, "4"), ([4, 5], 2, "4, 5"), ([4, 5, 6], 2, "4, 5 and 1 more"), ("abcdef", 1, "a and 5 more")],
)
def test_the_first_of_them(names, most, said):
    assert some(names, most) == said
    assert some(iter(names), most) == said


def test_no_more_than_a_person_reads():
    assert some(range(SHOWN)) == ", ".join(map(str, range(SHOWN)))
    assert some(range(SHOWN + 7)).endswith(f"{SHOWN - 1} and 7 more")


def test_the_first_of_many_that_are_only_counted():
    assert some([3, 5], 2, total=10**12) == "3, 5 and 999999999998 more"
    assert some([3, 5], 2, total=2) == "3, 5"


def test_clauses():
    assert some(["x is 1", "y is 2", "z is 3"], 2, joint=";") == "x is 1; y is 2; and 1 more"
    assert some(["x is 1", "y is 2"], 2, joint=";") == "x is 1; y is 2"
