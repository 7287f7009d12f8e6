"""Tokens as people read them: each as it is, where it is, with the loss of predicting it."""

import msgspec
import numpy as np
import pytest
import runs
from hypothesis import example, given
from hypothesis import strategies as st

from workbench.errors import DataError, ReplayError
from workbench.run import Run
from workbench.screen.tokens import COLUMNS, readable, token_table, visible
from workbench.trace import Trace
from workbench.trainer.corpus import Corpus

STEP = 5


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    return Run(runs.recorded(tmp_path_factory.mktemp("tokens")))


@pytest.fixture(scope="module")
def trace(run) -> Trace:
    return run.replay(STEP)


def test_a_row_is_its_window_of_the_corpus(run):
    table = token_table(run, STEP)
    assert table.dtypes.astype(str).tolist() == [str(np.dtype(t)) if t != "string" else t for t in COLUMNS.values()]
    assert table.attrs["known"] is False and table["loss"].isna().all()
    content, ctx = Corpus.open(runs.corpus()).tokens, runs.SMALL["ctx"]
    from workbench.batches.batch import batch_table

    for row in batch_table(run, STEP).itertuples():
        own = table[table["row"] == row.row]
        assert own["token"].tolist() == content[row.offset : row.offset + ctx + 1].tolist()
        assert own["position"].tolist() == list(range(ctx + 1))
        assert own["counted"].tolist() == [False] + [True] * ctx
        assert "".join(own["text"]) == row.text.replace("␊", r"\n")


def test_a_trace_adds_the_loss_of_each_token(run, trace):
    table = token_table(run, STEP, trace)
    assert table.attrs["known"] is True and table.loc[table["position"] == 0, "loss"].isna().all()
    losses = table[table["position"] > 0].pivot(index="row", columns="position", values="loss")
    assert losses.to_numpy().tolist() == trace.record.token_loss
    assert losses.to_numpy().mean() == pytest.approx(trace.loss, rel=1e-6)


def with_batch(trace, inputs, targets, losses):
    record = msgspec.structs.replace(trace.record, token_loss=losses)
    return Trace(record, batch=(np.array(inputs), np.array(targets)))


@pytest.fixture
def own_loop(tmp_path) -> Run:
    """The same run, if only its loop knew its batches."""
    path = runs.recorded(tmp_path)
    runs.edit_json(path / "run.json", lambda m: m.update(rebuild={"kind": "factory", "factory": "runs:build"}))
    return Run(path)


def test_targets_stand_where_they_were_asked_for(own_loop, trace):
    """Row 0 is ordinary, in row 1 the targets are others, and in row 2 two of them do not count."""
    inputs = [[1, 2, 3], [1, 2, 3], [1, 2, 3]]
    targets = [[2, 3, 4], [9, 8, 7], [2, -1, -1]]
    losses = [[0.5, 1.0, 1.5], [2.0, None, 3.0], [4.0, 0.0, 0.0]]
    table = token_table(own_loop, STEP, with_batch(trace, inputs, targets, losses))
    rows = [table[table["row"] == number] for number in range(3)]
    assert [row["token"].tolist() for row in rows] == [[1, 2, 3, 4], [1, 9, 8, 7], [1, 2, 3]]
    assert rows[1]["text"].tolist() == ["⟨1⟩", "⟨9⟩", "⟨8⟩", "⟨7⟩"]
    assert rows[2]["counted"].tolist() == [False, True, False]
    found = [row["loss"].to_numpy()[1:].tolist() for row in rows]
    assert found[0] == losses[0] and found[2][0] == 4.0 and np.isnan(found[2][1])
    assert found[1][0] == 2.0 and np.isnan(found[1][1]) and rows[1]["counted"].tolist() == [False] + [True] * 3


def test_losses_of_another_shape_are_not_shown(own_loop, trace):
    one_a_row = with_batch(trace, [[1, 2]], [[2, 3]], [[1.0]])
    table = token_table(own_loop, STEP, one_a_row)
    assert table.attrs["known"] is False and table["loss"].isna().all() and len(table) == 3


@pytest.mark.parametrize(
    "batch",
    [([[1.0, 2.0]], [[1, 2]]), ([[1, 2]], [[1]]), ([1, 2], [1, 2]), ([[1, -2]], [[1, 2]])],
    ids=["floats", "two shapes", "one axis", "negative"],
)
def test_what_is_no_batch_of_tokens_is_an_error(own_loop, trace, batch):
    with pytest.raises(DataError, match="is not one of tokens: it has .* expected inputs and targets"):
        token_table(own_loop, STEP, with_batch(trace, *batch, None))
    with pytest.raises(DataError, match="only that loop knows its batches"):
        token_table(own_loop, STEP)


def test_the_trace_of_another_step_is_refused(run, trace):
    with pytest.raises(ReplayError, match=f"the trace is of step {STEP}; expected one of step 6"):
        token_table(run, 6, trace)


@given(st.binary(max_size=40))
@example("\n\t\r\0\x7f\\é\u200b\u202e\u00a0\u2028𝄞".encode())
@example(b"\xc3(\xa9\xf0\x9f\x92")
def test_bytes_can_be_told_apart_again(content):
    """Every piece is the text of its own bytes, or an escape that names them."""
    pieces = readable(np.frombuffer(content, np.uint8), "bytes")
    assert len(pieces) == len(content) and (not pieces or pieces[0])
    starts = [place for place, piece in enumerate(pieces) if piece]
    for start, end in zip(starts, [*starts, len(pieces)][1:], strict=True):
        own, piece = content[start:end], pieces[start]
        try:
            text = own.decode()
        except UnicodeDecodeError:
            assert len(own) == 1 and piece == f"\\x{own[0]:02x}"
            continue
        named = {f"\\x{ord(text):02x}", f"⟨U+{ord(text):04X}⟩", {"\n": "\\n", "\t": "\\t", "\r": "\\r"}.get(text)}
        assert piece in (named if text != " " and not text.isprintable() else {text})


def test_other_tokens_are_their_numbers():
    assert readable([0, 17, 65535], "uint16") == ["⟨0⟩", "⟨17⟩", "⟨65535⟩"] and readable([], "bytes") == []


def test_what_can_not_be_seen_is_named():
    assert [visible(one) for one in "a \u202e\ufeff\x00"] == ["a", " ", "⟨U+202E⟩", "⟨U+FEFF⟩", "\\x00"]
