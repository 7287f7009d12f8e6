"""The recipe: an old one stays readable, what it freezes stays as it was, and what it can't freeze is said."""

import msgspec
import numpy as np
import pytest
from helpers import advance, config, write_corpus

from workbench import manifest as manifests
from workbench.errors import ExperimentError
from workbench.experiment import state_arrays
from workbench.share import shared
from workbench.trainer.model import loss, masked_loss
from workbench.trainer.recipe import build, config_from


@pytest.fixture
def corpus(tmp_path):
    return write_corpus(tmp_path)


def values(experiment):
    return {path: np.array(array) for path, array in state_arrays(experiment.model).items()}


def test_a_recipe_without_the_newer_fields_is_the_ordinary_one():
    """The shipped run was recorded before they existed."""
    found = config_from(manifests.read(shared("data") / "demo-run").rebuild["config"])
    assert (found.relabellings, found.repetitions, found.skipped, found.freeze) == ((), (), (), ())
    assert found.schedule.changes == ()


@pytest.mark.parametrize("freeze", [("blocks.0.mlp",), ("embedding", "blocks.0.attention.query")])
def test_frozen_parameters_stay_and_the_others_train(corpus, freeze):
    experiment = build(config(5, freeze=freeze), [corpus])
    before = values(experiment)
    stepper, _ = advance(experiment, 3)
    after = values(experiment)
    frozen = {path for path in before if path.startswith(tuple(f"{layer}." for layer in freeze))}
    assert frozen and {path for path in before if np.array_equal(before[path], after[path])} == frozen
    assert not frozen & {path for paths in stepper.owned.values() for path in paths}
    kept = {path.rpartition(".")[0] for path in state_arrays(experiment.optimizer.state) if path.endswith(".m")}
    assert kept == before.keys() - frozen


@pytest.mark.parametrize(
    ("freeze", "words"),
    [
        (("blocks.1",), ("'blocks.1'", "blocks.0.mlp.up")),
        (("blocks.0.dropout",), ("'blocks.0.dropout'", "expected a part of the model")),
        (("",), ("''",)),
        (("embedding", "blocks.0", "norm"), ("nothing to train",)),
    ],
)
def test_what_can_not_be_frozen(corpus, freeze, words):
    with pytest.raises(ExperimentError) as caught:
        build(config(5, freeze=freeze), [corpus])
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)


def test_the_loss_counts_targets_only_where_some_are_ignored(corpus):
    """Another function has other bits: a run that ignores nothing keeps its own."""
    ordinary = config(5)
    shifted = msgspec.structs.replace(ordinary, relabellings=config_from(relabelled("shift", 1)).relabellings)
    ignored = msgspec.structs.replace(ordinary, relabellings=config_from(relabelled("ignore", 0)).relabellings)
    assert [build(one, [corpus]).loss_fn for one in (ordinary, shifted, ignored)] == [loss, loss, masked_loss]


def relabelled(how, amount):
    entry = {"step": 2, "rows": [0], "how": how, "amount": amount}
    return msgspec.to_builtins(config(5)) | {"relabellings": [entry]}
