"""From a manifest back to an experiment: code only with consent, data only if it is the same."""

import sys

import msgspec
import pytest
import runs

from workbench import manifest as manifests
from workbench import open_run
from workbench.errors import DataError, ExperimentError, WorkbenchError
from workbench.experiment import Experiment
from workbench.manifest import DataFile
from workbench.rebuild import locate, rebuild
from workbench.record import Recorder


@pytest.fixture
def manifest():
    return manifests.read(runs.recorded_read_only())


def with_factory(manifest, name, **arguments):
    description = {"kind": "factory", "factory": name, "arguments": arguments}
    return msgspec.structs.replace(manifest, rebuild=description, data=[])


def refused(manifest, folder, *words, factory=None):
    with pytest.raises(ExperimentError) as caught:
        rebuild(manifest, folder, factory)
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)


# ------------------------------------------------------------------------------------------------------------- factory


def test_a_factory_is_called_with_its_arguments(manifest, tmp_path):
    built = rebuild(with_factory(manifest, "runs:build", lr=0.5, clip=2.0), tmp_path, "runs:build")
    assert isinstance(built, Experiment) and built.options.clip == 2.0
    assert built.optimizer.learning_rate.item() == 0.5


def test_nothing_is_imported_without_consent(manifest, tmp_path, monkeypatch):
    """Opening, listing and refusing must not run the module; consent does."""
    (tmp_path / "intruder.py").write_text("import runs\nfrom runs import build\nrun = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "intruder", raising=False)
    out = tmp_path / "run"
    with Recorder(out, *runs.parts(runs.build()), compile=False, factory="intruder:build") as recorder:
        recorder.step(next(recorder.experiment.sampler))
    run = open_run(out)
    run.spikes(), run.plan(1), run._repr_html_()
    with pytest.raises(ExperimentError, match="only with your consent") as caught:
        run.replay(1)
    assert "--factory intruder:build" in str(caught.value) and "factory='intruder:build'" in str(caught.value)
    with pytest.raises(ExperimentError, match="names the factory 'intruder:build', not 'runs:build'"):
        run.replay(1, factory="runs:build")
    assert "intruder" not in sys.modules
    assert run.replay(1, factory="intruder:build", fresh_process=False).exact
    assert "intruder" in sys.modules


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_such_module:build", ("can't be imported", "no_such_module")),
        ("runs:no_such_function", ("can't be imported", "no_such_function")),
        ("runs", ("can't be imported",)),
        (":build", ("can't be imported",)),
        ("runs:build_nothing", ("returned a str; expected an Experiment",)),
        ("runs:build_badly", ("failed", "RuntimeError: the cluster is asleep")),
        ("runs:STEPS", ("failed", "not callable")),
    ],
)
def test_a_factory_that_does_not_work_is_a_sentence(manifest, tmp_path, name, words):
    refused(with_factory(manifest, name), tmp_path, repr(name), *words, factory=name)


def test_a_factory_whose_module_is_broken(manifest, tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text("def build(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    refused(
        with_factory(manifest, "broken:build"), tmp_path, "'broken:build' can't be imported", factory="broken:build"
    )


@pytest.mark.parametrize("arguments", [{"colour": "red"}, 5, None, ["x"]])
def test_arguments_that_do_not_fit(manifest, tmp_path, arguments):
    description = {"kind": "factory", "factory": "runs:build", "arguments": arguments}
    changed = msgspec.structs.replace(manifest, rebuild=description, data=[])
    refused(changed, tmp_path, "'runs:build' failed with the arguments", "TypeError", factory="runs:build")


def test_a_loop_that_named_no_factory_says_what_to_pass(manifest, tmp_path):
    for kind in ({"kind": "none"}, {}, {"kind": "magic"}, {"kind": ["trainer"]}):
        changed = msgspec.structs.replace(manifest, rebuild=kind, data=[])
        refused(changed, tmp_path, "named no factory; pass the experiment", "experiment=wb.Experiment(")


# ------------------------------------------------------------------------------------------------------------- trainer


def test_the_trainer_rebuilds_itself(manifest):
    built = rebuild(manifest, runs.recorded_read_only())
    assert msgspec.to_builtins(built.options) == manifest.options


def test_a_factory_given_for_a_run_of_the_trainer_is_not_imported(manifest, tmp_path, monkeypatch):
    (tmp_path / "intruder2.py").write_text("raise SystemExit\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ExperimentError, match="leave the factory out"):
        rebuild(manifest, runs.recorded_read_only(), "intruder2:build")
    assert "intruder2" not in sys.modules


def changed_config(manifest, path, value):
    config = msgspec.json.decode(msgspec.json.encode(manifest.rebuild))
    node = config
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    return msgspec.structs.replace(manifest, rebuild=config)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("config",), None),
        (("config",), []),
        (("config", "steps"), "many"),
        (("config", "steps"), 0),
        (("config", "batch"), 0),
        (("config", "colour"), "red"),
        (("config", "device"), "tpu"),
        (("config", "model", "heads"), 7),
        (("config", "adamw", "beta1"), 1.0),
        (("config", "adamw", "beta2"), -0.1),
        (("config", "adamw", "eps"), -1e-8),
        (("config", "adamw", "weight_decay"), -1.0),
        (("config", "schedule", "kind"), "sawtooth"),
        (("config", "seed"), -1),
        (("config", "seed"), 2**64),
        (("config", "val_split"), 1.5),
        (("config", "clip"), 0.0),
        (("config", "substitutions"), [{"step": 1, "rows": [0], "source": 5, "offsets": [0]}]),
    ],
)
def test_a_damaged_config_is_a_sentence(manifest, path, value):
    with pytest.raises(WorkbenchError) as caught:
        rebuild(changed_config(manifest, path, value), runs.recorded_read_only())
    assert len(str(caught.value)) > 20


def test_a_trainers_run_without_data(manifest, tmp_path):
    refused(msgspec.structs.replace(manifest, data=[]), tmp_path, "names no data file")


# ---------------------------------------------------------------------------------------------------------------- data


@pytest.fixture
def entry():
    """The shared corpus under a relative name."""
    from workbench.trainer.corpus import Corpus

    described = Corpus.open(runs.corpus()).describe()
    return lambda path: DataFile(path, described["bytes"], described["sha256"])


def test_where_a_data_file_is_looked_for(entry, tmp_path):
    folder = tmp_path / "runs" / "run"
    folder.mkdir(parents=True)
    gone = str(tmp_path / "gone" / "c.txt")
    for place in (folder.parent / "c.txt", folder / "c.txt"):  # the run's own comes first
        place.write_bytes(runs.corpus().read_bytes())
        assert locate(entry(gone), folder) == place
    assert locate(entry(str(runs.corpus())), folder) == runs.corpus()  # where it was comes before both
    (folder / "sources").mkdir()
    (folder / "sources" / "c.txt").write_bytes(runs.corpus().read_bytes())
    assert locate(entry("sources/c.txt"), folder) == folder / "sources" / "c.txt"


def test_what_stands_there_must_be_the_same(entry, tmp_path):
    content = runs.corpus().read_bytes()
    (tmp_path / "c.txt").write_bytes(content[:-1])
    with pytest.raises(DataError, match="has changed"):
        locate(entry("c.txt"), tmp_path)
    (tmp_path / "c.txt").write_bytes(b"?" + content[1:])
    with pytest.raises(DataError, match="has changed"):
        locate(entry("c.txt"), tmp_path)


@pytest.mark.parametrize("path", ["../c.txt", "sources/../../c.txt", "a/b/../../../c.txt"])
def test_a_relative_path_does_not_leave_the_run(entry, tmp_path, path):
    folder = tmp_path / "run"
    (folder / "sources").mkdir(parents=True)
    (tmp_path / "c.txt").write_bytes(runs.corpus().read_bytes())
    with pytest.raises(DataError, match="outside of the run"):
        locate(entry(path), folder)


def test_a_folder_in_place_of_a_data_file(entry, tmp_path):
    (tmp_path / "c.txt").mkdir()
    with pytest.raises(DataError, match="no file"):
        locate(entry("c.txt"), tmp_path)
