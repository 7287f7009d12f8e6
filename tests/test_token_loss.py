"""What a loss function gives as the loss of each row: used if it is one, said at the first step if it is not."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from helpers import Numbered, experiment, parts

from workbench import Recorder, open_run

ROWS, TOKENS, VOCABULARY = 4, 6, 11


class Sentences(Numbered):
    def batch(self, number):
        tokens = np.random.default_rng(number).integers(0, VOCABULARY, (ROWS, TOKENS)).astype(np.int32)
        return tokens, np.roll(tokens, -1, axis=1)


def job(given, **options):
    def loss(model, x, y):
        losses = nn.losses.cross_entropy(model(x), y)
        return losses.mean(), {"token_loss": given(losses)}

    mx.random.seed(1)
    made = experiment(
        model=nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)), loss_fn=loss, **options
    )
    made.sampler = Sentences()
    return made


def record(path, made):
    with Recorder(path, *parts(made), compile=made.options.compile) as recorder:
        for batch in recorder.batches(2):
            recorder.step(batch)
    return open_run(path)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            lambda losses: losses.mean(),
            r"gives an array of shape \(\) as \"token_loss\", of which a replay tells no row",
        ),
        (lambda losses: [0.5] * ROWS, r"gives a list as \"token_loss\", of which a replay tells no row"),
    ],
    ids=["number", "list"],
)
def test_what_tells_of_no_row_is_said_and_the_run_replays_without_rows(tmp_path, given, said):
    """The replay of such a run ended in an IndexError or ValueError, whatever step was asked for."""
    with pytest.warns(UserWarning, match=said):
        run = record(tmp_path / "run", job(given))
    trace = run.replay(2, experiment=job(given), fresh_process=False)
    assert trace.exact and trace.record.certified_probe and trace.rows.empty and trace.record.token_loss is None


def test_losses_that_are_flattened_are_said(tmp_path):
    flat = job(lambda losses: losses.reshape(-1))
    with pytest.warns(
        UserWarning, match=r"of shape \(24,\) as \"token_loss\", and the batch has 4 rows: .* \(rows, …\)"
    ):
        record(tmp_path / "run", flat)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("given", [lambda losses: losses, lambda losses: losses.mean(axis=1)], ids=["tokens", "rows"])
def test_losses_of_rows_or_tokens_are_used_without_a_word(tmp_path, given, compiled):
    run = record(tmp_path / "run", job(given, compile=compiled))
    trace = run.replay(2, experiment=job(given, compile=compiled), fresh_process=False)
    assert trace.exact and sorted(trace.rows["row"]) == list(range(ROWS))
