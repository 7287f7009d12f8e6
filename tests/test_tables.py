"""What the terminal shows of batches and experiments: the oddities in words, and numbers that are not finite."""

import io

import pandas as pd
from rich.console import Console

from workbench.batches.batchfacts import COLUMNS
from workbench.interventions.tables import batch_tables, oddities, whatif_table
from workbench.interventions.whatif import COLUMNS as EXPERIMENT


def facts(**given):
    row = {"step": 5, "row": 0, "source": "a.txt", "offset": 3, "text": "x", "follow": 1.0} | given
    return pd.DataFrame([row]).reindex(columns=list(COLUMNS)).astype(COLUMNS)


def words(**given):
    return oddities(facts(**given).to_dict("records")[0])


def printed(table, width=200):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(table)
    return console.export_text()


def test_an_ordinary_row_has_nothing_odd():
    assert words(distinct_z=1.0, compressed_z=-5.9, log_likelihood_z=5.0) == []


def test_each_oddity_has_its_words():
    assert words(period=1, repeats=40, position=2) == ["1 token repeated 40 times from token 2"]
    assert words(period=5, repeats=33, position=0) == ["5 tokens repeated 33 times from token 0"]
    assert words(distinct_z=7.25, compressed_z=6.0, log_likelihood_z=-40.0) == [
        "many different tokens (z 7.2)",
        "hard to compress (z 6.0)",
        "rare tokens (z -40.0)",
    ]
    assert words(distinct_z=-7.0, compressed_z=-9.0) == ["few different tokens (z -7.0)", "easy to compress (z -9.0)"]
    assert words(follow=0.25) == ["only 25% of the targets follow the inputs"]
    assert words(copy_of=0, seen_at=4) == ["same as row 0", "also in step 4"]


def test_a_table_shows_only_the_columns_that_are_known():
    (table,) = batch_tables(facts(outlier=2.0))
    text = printed(table)
    assert "share" not in text and "a.txt" in text and "Batch of step 5" in text
    (table,) = batch_tables(facts(loss=float("inf"), share=0.5, source=None, text=None))
    text = printed(table)
    assert "inf" in text and "50.0%" in text and "source" not in text


def test_the_order_of_the_rows_and_what_unlike_means_are_said():
    (table,) = batch_tables(facts(outlier=7.5))
    text = " ".join(printed(table).split())
    assert "Batch of step 5, the most unlike rows first" in text
    assert "in robust standard deviations (the largest |z|); what has 6 or more stands under odd" in text
    (table,) = batch_tables(facts(outlier=7.5, loss=1.0, share=1.0))
    assert "Batch of step 5, by share of its loss" in printed(table)
    (table,) = batch_tables(facts())
    assert "unlike" not in printed(table)


def test_text_that_looks_like_markup_is_shown_as_it_is():
    (table,) = batch_tables(facts(text="[bold]not bold[/bold]"))
    assert "[bold]not bold[/bold]" in printed(table)


def test_experiments_with_numbers_that_are_missing_or_not_finite():
    row = {"change": "batch=skip", "loss": float("nan"), "update_norm": float("inf"), "worst": "", "next_mean": 2.5}
    row["steps"] = 9
    text = printed(whatif_table(pd.DataFrame([row]).reindex(columns=list(EXPERIMENT)), 7))
    assert "batch=skip" in text and "inf" in text and "2.5000" in text and "nan" not in text
    assert "mean of next 8" in " ".join(text.split())


def test_a_batch_in_a_narrow_terminal_keeps_its_numbers_whole():
    odd = {"row": 123, "offset": 266921, "source": "a_rather_long_file_name.txt", "share": 0.191, "loss": 6.3}
    odd |= {"text": "many words " * 20, "outlier": 52.7, "distinct_z": 11.2, "log_likelihood_z": -52.7}
    for width in (80, 100, 120, 160):
        (table,) = batch_tables(facts(**odd), width)
        lines = printed(table, width).splitlines()
        assert max(map(len, lines)) <= width
        text = " ".join(" ".join(lines).replace("│", " ").split())
        assert all(number in text for number in ("123", "266921", "19.1%")), (width, text)
        assert all(head in text for head in ("row", "share", "source", "offset", "odd", "text")), (width, text)
        assert ("52.7 " in text.partition("many words")[0]) == ("unlike" in text) == (width >= 110)
    (table,) = batch_tables(facts(outlier=52.7), 80)
    assert "unlike" in printed(table, 80), "without a share the rows stand in its order"
