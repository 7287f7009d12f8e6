"""The verdict card and the table of experiments: everything that was found is there, and nothing of it is markup."""

import html
import re

import msgspec
import numpy as np
import pandas as pd
import pytest

from workbench.screen import cause_view
from workbench.screen.markup import copied
from workbench.verdict import CAUSES, Evidence, Numbers, Outlier, Refuted, Remedy, Unchecked, Verdict

NAN = float("nan")
EVIL = '<script>alert("1")</script>'


def plain(markup):
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", markup))).replace(" ,", ",").strip()


def remedy(change, helps, command="", **more):
    values = {"loss": 4.1, "loss_untouched": 4.1, "next_mean": 2.812, "next_mean_untouched": 2.8}
    values |= {"next_max": 2.9, "next_max_untouched": 2.91} | more.pop("numbers", {})
    numbers = Numbers.of(values)
    return Remedy(change=change, state=71, numbers=numbers, steps=[73, 74, 75], helps=helps, command=command, **more)


def verdict(**changed):
    values = {
        "run": "id",
        "name": "mine",
        "step": 72,
        "segment": 0,
        "began": 72,
        "flagged": "loss_z",
        "exact": True,
        "first_difference": None,
        "verdict": "data",
        "reason": "The batch of step 72 carries it: row 2.",
        "culprit": {"step": 72, "rows": [{"row": 2, "source": "1.bytes", "offset": 1051, "loss": 6.3}]},
        "would_refute": "batch 72 without the rise",
        "evidence": [
            Evidence(name="alarm", sentence="Loss 4.1 is far off.", supports="unknown"),
            Evidence(name="square", sentence="State 71 has loss 4.1.", supports="data"),
            Evidence(name="odd", sentence="The rate was high.", supports="schedule"),
        ],
        "refuted": [
            Refuted(cause="optimizer", sentence="State 71 is healthy."),
            Refuted(cause="curvature", sentence="State 71 is healthy."),
            Refuted(cause="resume", sentence="No segment starts here."),
        ],
        "unchecked": [Unchecked(what="precision", why="no time was left")],
        "outliers": [Outlier(name="layer", sentence="Layer 3 is loud.")],
        "remedies": [
            remedy("batch=skip", True, "workbench train --fork runs/mine --from 71", numbers={"loss": None}),
            remedy("lr=0.1x", False, "workbench train --never", note="of no use"),
        ],
        "seconds": 5.5,
        "step_times": 31.0,
        "checkpoint": 60,
        "rolled": 11,
        "environment": {},
        "environment_differences": [],
        "notices": ["step 70 was odd too"],
    }
    return Verdict(**(values | changed))


def test_the_card_has_everything_that_was_found():
    card = cause_view.verdict_card(verdict())
    text = plain(card)
    assert text.startswith("data The batch of step 72 carries it: row 2.")
    assert "Culprit: row 2 (1.bytes, offset 1,051) · step 72" in text
    assert "Evidence Loss 4.1 is far off. State 71 has loss 4.1. The rate was high. (speaks for schedule)" in text
    assert "It would have been refuted by batch 72 without the rise" in text
    assert "Ruled out optimizer, curvature : State 71 is healthy. resume : No segment starts here." in text
    assert "Also out of the ordinary Layer 3 is loud." in text and "Not checked precision : no time was left" in text
    assert "To be known step 70 was odd too" in text and text.endswith(verdict().footer())
    assert "<details style" in card and "<details open" in cause_view.verdict_card(verdict(verdict="no-spike"))
    assert 'role="region" aria-label="Verdict on step 72"' in card


def test_ways_out_stand_beside_the_untouched_step():
    card = cause_view.verdict_card(verdict())
    lines = [re.findall(r"<td[^>]*>(.*?)</td>", line) for line in re.findall(r"<tr>(.*?)</tr>", card)[1:]]
    cells = [[plain(cell) for cell in line] for line in lines]
    assert cells == [
        ["untouched", "4.100", "2.800", "2.910", ""],
        ["batch=skip", "left out", "2.812", "2.900", "✓ yes"],
        ["lr=0.1x of no use", "4.100", "2.812", "2.900", "no"],
    ]
    assert "interventions, not what the run did" in card
    assert re.findall(r"<code[^>]*>(.*?)</code>", card) == ["workbench train --fork runs/mine --from 71"]
    assert "<button" not in card and cause_view.verdict_card(verdict(), button=True).count("<button") == 1
    assert verdict()._repr_html_() == card


def test_where_nothing_helps_there_is_no_command():
    card = cause_view.verdict_card(verdict(remedies=[remedy("lr=0.1x", False, "workbench train --never")]))
    assert "<code" not in card and "To go on" not in card
    assert "Tried" not in cause_view.verdict_card(verdict(remedies=[]))


def test_a_spike_that_began_earlier_and_another_machine_are_told():
    card = plain(cause_view.verdict_card(verdict(began=70, environment_differences=["mlx: 1 against 2"])))
    assert "Step 72 stands in a spike that began at step 70: this is of that one." in card
    assert "(informational: this machine differs from the run's)" in card
    assert "began" not in cause_view.verdict_card(verdict())


@pytest.mark.parametrize("cause", CAUSES)
def test_every_verdict_has_a_card(cause):
    empty = dict.fromkeys(("evidence", "refuted", "unchecked", "outliers", "remedies", "notices"), [])
    card = cause_view.verdict_card(verdict(verdict=cause, culprit={}, would_refute="", **empty))
    assert plain(card).startswith(cause) and "<ul" not in card and "<table" not in card and "Culprit" not in card


def test_every_kind_of_culprit_is_named():
    named = {"rows": [3], "layer": "blocks.1", "lanes": ["adam_m", "adam_v"], "ratio": 0.123456, "usual_lr": 1e-5}
    text = plain(cause_view.verdict_card(verdict(culprit=named)))
    assert "Culprit: row 3 · layer blocks.1 · lanes adam_m, adam_v · ratio 0.1235 · usual lr 1e-5" in text


def test_nothing_of_a_verdict_is_markup():
    def spoiled(value):
        if isinstance(value, str):
            return EVIL
        if isinstance(value, list):
            return [spoiled(one) for one in value]
        if isinstance(value, dict):
            return {key: spoiled(one) for key, one in value.items()}
        return value

    built = msgspec.to_builtins(verdict())
    names = ("reason", "culprit", "would_refute", "unchecked", "outliers", "notices")
    built |= {name: spoiled(built[name]) for name in names}
    for part in (*built["evidence"], *built["refuted"]):
        part["sentence"] = EVIL
    for part in built["remedies"]:
        part |= {"change": EVIL, "command": EVIL, "note": EVIL}
    card = cause_view.verdict_card(msgspec.convert(built, Verdict))
    assert "<script" not in card and card.count("&lt;script&gt;") >= 12


def test_a_command_is_copied_by_a_button_that_holds_nothing_of_it():
    code = copied(f"workbench {EVIL}")
    assert "<script" not in code and f"workbench {EVIL}" in html.unescape(
        re.search(r"<code[^>]*>(.*?)</code>", code)[1]
    )
    handler = re.search(r'onclick="(.*?)"', code)[1]
    assert "workbench" not in handler and "alert" not in handler and "user-select:all" in code


def experiments(*rows, **attrs):
    names = ("change", "loss", "grad_norm", "update_norm", "worst", "worst_ratio", "next_mean", "next_max", "notes")
    frame = pd.DataFrame(rows, columns=names).assign(steps=9, compiled=True)
    frame.attrs |= {"sentence": "The untouched replay has the run's bits.", "notices": []} | attrs
    return frame


UNTOUCHED = ("untouched", 4.1, 1.8, 0.036, "head", 0.0055, 2.81, 2.92, "")


def shown(frame, step=72):
    lines = re.findall(r"<tr>(.*?)</tr>", cause_view.experiments(frame, step))
    return [[plain(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", line)] for line in lines[1:]]


def test_experiments_stand_beside_the_untouched_step():
    rows = shown(
        experiments(
            UNTOUCHED,
            ("lr=0.5x", 4.1, 1.8, 0.018, "head", 0.0028, 2.8102, 2.95, "eager"),
            ("drop-row=2", 3.8, 2.2, 0.036, "head", 0.0058, 2.8, np.inf, ""),
        )
    )
    assert rows[0] == ["untouched", "4.100", "1.800", "0.03600", "2.810", "2.920", "0.0055 head"]
    assert rows[1] == ["lr=0.5x", "4.100 ±0", "1.800", "0.01800", "2.810 ≈ 0", "2.950 +0.030", "0.0028 head"]
    assert rows[2][1] == "3.800 \N{MINUS SIGN}0.300" and rows[2][5] == "inf"


def test_a_note_of_several_experiments_is_said_once_below_them():
    eager = [(change, 4.1, 1.8, 0.018, "head", 0.0028, 2.81, 2.95, "performed eagerly") for change in ("eps=1", "lr=1")]
    frame = experiments(UNTOUCHED, *eager, ("batch=skip", NAN, NAN, NAN, "", NAN, 2.8, 2.9, "not performed"))
    said = plain(cause_view.experiments(frame, 72)).split()
    assert " ".join(said).endswith("eps=1, lr=1: performed eagerly. batch=skip: not performed.")


def test_a_step_that_was_left_out_has_no_numbers_and_one_that_is_nan_says_so():
    left_out = ("batch=skip", NAN, NAN, NAN, "", NAN, 2.8, 2.9, "not performed")
    broken = ("eps=1e-30", NAN, NAN, NAN, "head", NAN, NAN, NAN, "")
    rows = shown(experiments(UNTOUCHED, left_out, broken))
    assert (
        rows[1][:4] == ["batch=skip", "left out", "", ""]
        and rows[1][6] == ""
        and rows[2][:4] == ["eps=1e-30", "NaN", "NaN", "NaN"]
    )


def test_experiments_are_labelled_and_escaped():
    evil = (EVIL, 4.1, 1.8, 0.018, EVIL, 0.0028, 2.81, 2.95, EVIL)
    markup = cause_view.experiments(experiments(UNTOUCHED, evil, sentence=EVIL, notices=[EVIL]), 1072)
    assert "<script" not in markup and markup.count("&lt;script&gt;") == 6  # the change twice: its note names it
    assert "Interventions: each is a replay of step 1,072 with exactly one thing changed" in plain(markup)
    assert "mean loss of the 8 steps after" in plain(markup).replace("\N{NO-BREAK SPACE}", " ")
