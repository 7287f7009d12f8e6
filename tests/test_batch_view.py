"""The batch as HTML: rows by share, tokens coloured by loss, text to take away; nothing from outside is markup."""

import html
import re

import numpy as np
import pandas as pd
import pytest

from workbench.screen import batch_view
from workbench.screen.batch_view import LEVELS, batch, characters, level

NAN = float("nan")
EVIL = "<img src=x onerror=alert(1)>"


def rows(losses=None, texts=("ab", "cd"), source="corpus.txt"):
    frame = pd.DataFrame({"row": range(len(texts)), "source": source, "offset": 7, "text": list(texts)})
    frame = frame.astype({"source": "string", "offset": "Int64", "text": "string"})
    if losses is None:
        return frame
    frame = frame.assign(loss=losses, share=np.array(losses) / np.nansum(losses))
    return frame.sort_values("share", ascending=False, na_position="first")


def tokens(*texts, losses=None, counted=None):
    """One row a text, a token a character; `losses` of those after the first, row by row."""
    parts = []
    for number, text in enumerate(texts):
        own = [NAN] * len(text) if losses is None else [NAN, *losses[number]]
        counts = [False, *([True] * (len(text) - 1) if counted is None else counted[number])]
        part = {"row": number, "position": range(len(text)), "token": 0, "text": list(text), "counted": counts}
        parts.append(pd.DataFrame(part | {"loss": own}))
    frame = pd.concat(parts, ignore_index=True)
    frame.attrs["known"] = losses is not None
    return frame


def cells(markup):
    """The text cells, as HTML."""
    return re.findall(r"<bdi>(.*?)</bdi>", markup, re.DOTALL)


def plain(markup):
    return html.unescape(re.sub(r"<[^>]+>", "", markup))


def test_rows_stand_by_share_and_tokens_have_the_colour_of_their_loss():
    markup = batch(rows([1.0, 3.0]), tokens("abc", "def", losses=[[0.5, 1.5], [2.0, 4.0]]), vocabulary=256)
    assert [plain(cell) for cell in cells(markup)] == ["def", "abc"]
    found = [re.findall(r'<i class="l(\d)" title="loss ([\d.]+)">(.)</i>', cell) for cell in cells(markup)]
    assert found == [[("4", "2", "e"), ("8", "4", "f")], [("1", "0.5", "b"), ("3", "1.5", "c")]]
    table, _, taken = markup.partition("<details>")
    assert re.findall(r"[\d.]+ %", table) == re.findall(r"[\d.]+ %", taken) == ["75.0 %", "25.0 %"]
    assert "from 0 " in plain(markup) and " to 4; an even guess among 256 would cost 5.55" in plain(markup)


def test_without_losses_there_is_text_and_no_colour():
    markup = batch(rows(texts=("abc",)), tokens("abc"))
    assert cells(markup) == ["abc"] and "<i " not in markup and "share" not in markup and "from 0" not in markup


def test_levels_are_equal_steps_of_loss():
    assert [level(loss, 8.0) for loss in (-1.0, 0.0, 0.01, 1.0, 1.01, 7.99, 8.0)] == [0, 0, 1, 1, 2, 8, 8]
    assert level(0.0, 0.0) == 0 and level(5.0, 5.0) == LEVELS


def test_what_is_not_finite_or_does_not_count_says_so():
    table = tokens("abcd", losses=[[2.0, NAN, NAN]], counted=[[True, True, False]])
    markup = batch(rows([NAN], texts=("abcd",)), table)
    assert '<i class="nan" title="loss not finite">c</i>' in markup
    assert '<i class="off" title="does not count">d</i>' in markup
    assert "Struck out: targets that the loss does not count, in 1 row." in markup
    assert "NaN" in plain(markup) and "<b>" not in cells(markup)[0]


def test_a_character_of_several_tokens_has_their_mean():
    table = tokens("a  b", losses=[[1.0, 3.0, 5.0]])
    table["text"] = ["a", "é", "", "b"]
    found = list(characters(table, known=True))
    assert [(one.text, one.loss) for one in found[1:]] == [("é", 2.0), ("b", 5.0)] and np.isnan(found[0].loss)
    table.loc[2, "loss"] = NAN
    assert [one.broken for one in characters(table, known=True)] == [False, True, False]


def test_what_can_not_be_seen_is_shown_and_taken_away_as_it_is():
    table = tokens("a b  c ")
    table.loc[table["text"] == "c", "text"] = r"\n"
    markup = batch(rows(texts=("a b  c ",)), table)
    assert cells(markup) == [r"a b<b>·</b><b>·</b><b>\n</b><b>·</b>"]
    taken = re.search(r"<pre[^>]*>(.*?)</pre>", markup, re.DOTALL)[1]
    assert taken == "row 0, corpus.txt offset 7\na b  \\n"
    literal = tokens("·")  # is not taken for a space
    assert cells(batch(rows(texts=("·",)), literal)) == ["·"]


def test_nothing_from_outside_is_markup():
    markup = batch(rows([1.0], texts=(EVIL,), source=EVIL), tokens(EVIL, losses=[[1.0] * (len(EVIL) - 1)]))
    assert (
        "<img" not in markup and plain(cells(markup)[0]) == EVIL and markup.count("&lt;img") == 3
    )  # source, and text to take away
    assert "<img" not in batch(rows(texts=(EVIL,), source=EVIL), None)


def test_a_large_batch_shows_its_costliest_rows(monkeypatch):
    many = rows([float(row + 1) for row in range(40)], texts=["ab"] * 40)
    table = tokens(*["ab"] * 40, losses=[[1.0]] * 40)
    markup = batch(many, table)
    assert len(cells(markup)) == 32 and "32 of 40 rows; batch_table(run, step, trace) has all." in markup
    assert re.search(r"<tbody><tr><td[^>]*>(\d+)</td>", markup)[1] == "39"
    monkeypatch.setattr(batch_view, "SHOWN_TOKENS", 9)
    assert len(cells(batch(many, table))) == 4
    monkeypatch.setattr(batch_view, "SHOWN_TOKENS", 1)
    assert len(cells(batch(many, table))) == 1


# JupyterLab's pages, their striped rows, and their text on it (87 % black or white).
THEMES = {"light": [(255, 255, 255), (245, 245, 245)], "dark": [(17, 17, 17), (33, 33, 33)]}


@pytest.mark.parametrize("theme", THEMES)
def test_text_is_readable_on_every_colour_in_both_themes(theme):
    """At least 4.5 to 1, as WCAG 2.1 asks of text; and each level stands out more from the page than the one before."""
    shades = re.findall(r"i\.l\d\{background:rgba\((\d+),(\d+),(\d+),([\d.]+)\)", batch_view._STYLE)
    assert len(shades) == LEVELS
    for page in THEMES[theme]:
        ink = 0.0 if theme == "light" else 255.0
        distances = []
        for *hue, opacity in shades:
            back = over(tuple(map(float, hue)), float(opacity), page)
            text = over((ink,) * 3, 0.87, back)
            assert contrast(text, back) >= 4.5
            distances.append(contrast(back, page))
        assert distances == sorted(distances) and len(set(distances)) == LEVELS


def over(front, opacity, back):
    return tuple(opacity * one + (1 - opacity) * other for one, other in zip(front, back, strict=True))


def contrast(one, other):
    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def luminance(colour):
    parts = [c / 255 / 12.92 if c / 255 <= 0.04045 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]
