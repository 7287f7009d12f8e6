"""Fine-tuning with mlx-lm: the record has the bits of mlx-lm's own training, and every step of it replays exactly.

The reference is mlx-lm itself: `mlx_lm.lora.run` on the same configuration, model and data, all made on the spot.
"""

import datetime
import functools
import json
import re
import shutil
import subprocess
import sys
import types

import helpers
import mlx.core as mx
import numpy as np
import pytest
import runs
import small_llm

import workbench as wb
from workbench.errors import DataError, EnvironmentMismatch, ExperimentError

pytest.importorskip("mlx_lm", reason="mlx-lm is not installed: pip install 'spike-workbench[mlx-lm]'")

import mlx_lm.lora as lora  # noqa: E402
import mlx_lm.tuner.trainer as trainer  # noqa: E402
from mlx_lm.tuner.datasets import CacheDataset  # noqa: E402

from workbench.experiment import as_batch, batch_hash, state_arrays  # noqa: E402
from workbench.finetune.examples import Batches, ExampleSampler, unpacked  # noqa: E402
from workbench.finetune.settings import read_settings  # noqa: E402
from workbench.finetune.shuffles import Evaluations, Shuffles  # noqa: E402
from workbench.finetune.tuned import rebuilt  # noqa: E402
from workbench.rebuild import locate  # noqa: E402

DROPOUT = {"rank": 4, "dropout": 0.1, "scale": 10.0}
ACCUMULATION = {"grad_accumulation_steps": 3, "iters": 13, "optimizer": "adamw", "lora_parameters": DROPOUT}
WARMED = {"name": "cosine_decay", "warmup": 3, "arguments": [1e-3, 12, 1e-5]}
# By name: family of the model, quantised, data, whether steps are compiled (each new kernel takes the machine's C++
# compiler half a second), and what the configuration says.
JOBS = {
    "lora": ("qwen3", False, "text", True, {"iters": 52}),
    "full": ("qwen3", False, "text", False, {"iters": 52, "fine_tune_type": "full", "learning_rate": 1e-4}),
    "dora": ("qwen3", False, "text", False, {"fine_tune_type": "dora", "lr_schedule": WARMED}),
    "qlora": ("qwen3", True, "text", False, {"optimizer": "adafactor", "num_layers": 1}),
    "masked": ("llama", False, "chat", False, {"mask_prompt": True, "max_seq_length": 128, "lora_parameters": DROPOUT}),
    "accumulated": ("qwen3", False, "completions", True, ACCUMULATION | {"mask_prompt": True, "max_seq_length": 128}),
    "accumulated in full": ("qwen3", False, "text", False, {"grad_accumulation_steps": 2, "fine_tune_type": "full"}),
    "checkpointed": ("qwen3", False, "text", False, {"grad_checkpoint": True, "lora_parameters": DROPOUT}),
}


@functools.cache
def folder_of(*wanted):
    kind, *options = wanted
    path = runs.scratch() / "small-llm" / "-".join(map(str, wanted))
    if kind == "model":
        return small_llm.save_model(path, family=options[0], quantised=options[1])
    return small_llm.save_data(path, options[0], longest=40 if options[0] != "text" else 70)


@functools.cache
def configuration(name):
    family, quantised, data, _, changed = JOBS[name]
    return small_llm.settings(folder_of("model", family, quantised), folder_of("data", data), **changed)


@functools.cache
def recorded(name):
    """The shared run of a job, for tests that write nothing into it but traces."""
    out = runs.scratch() / f"mlx-lm-{name}"
    return wb.fine_tune(configuration(name), out, compile=JOBS[name][3])


class Kept(lora.TrainingCallback):
    """What mlx-lm reports of a training, step by step."""

    def __init__(self):
        self.losses, self.validations = [], []

    def on_train_loss_report(self, train_info):
        self.losses.append(train_info["train_loss"])

    def on_val_loss_report(self, val_info):
        self.validations.append((val_info["iteration"], val_info["val_loss"]))


def trained_by_mlx_lm(settings, folder, monkeypatch, *, compiled=True):
    """Losses and validation losses that `mlx_lm.lora` reports, and the weights that it writes."""
    kept = Kept()
    monkeypatch.setattr(lora, "get_reporting_callbacks", lambda *_, **__: kept)
    if not compiled:
        monkeypatch.setattr(mx, "compile", lambda function=None, **_: function or (lambda inner: inner))
    arguments = lora.CONFIG_DEFAULTS | settings | {"adapter_path": str(folder), "steps_per_report": 1}
    layer_calls = {}
    try:
        for family in ("qwen3", "llama"):
            layer = sys.modules.get(f"mlx_lm.models.{family}")
            if layer is not None:
                layer_calls[layer.TransformerBlock] = layer.TransformerBlock.__call__
        lora.run(types.SimpleNamespace(**arguments))
    finally:
        for layer, call in layer_calls.items():
            layer.__call__ = call  # which mlx-lm's gradient checkpointing replaces for good
    return kept, mx.load(str(folder / "adapters.safetensors"))


def float_bits(values):
    return [np.float32(value).tobytes() for value in values]


def logged(run, kind):
    return [line for line in runs.lines(run.path) if line["type"] == kind]


# ------------------------------------------------------------------------------------ the bits of mlx-lm's own training


@pytest.mark.parametrize("name", JOBS)
def test_a_record_has_the_bits_of_mlx_lms_own_training(name, tmp_path, monkeypatch):
    run, settings = recorded(name), configuration(name)
    with monkeypatch.context() as patch:
        theirs, weights = trained_by_mlx_lm(settings, tmp_path, patch, compiled=JOBS[name][3])
    parts = settings.get("grad_accumulation_steps", 1)
    micro = np.array(theirs.losses, np.float32)[: settings["iters"] // parts * parts].reshape(-1, parts)
    means = [functools.reduce(np.add, row) / np.float32(parts) for row in micro]
    assert float_bits(means) == float_bits(line["loss"] for line in logged(run, "step"))
    ours = mx.load(str(run.path / "adapters" / "adapters.safetensors"))
    assert helpers.tensor_bytes(ours) == helpers.tensor_bytes(weights)
    told = [(iteration // parts, loss) for iteration, loss in theirs.validations]  # the first before any step
    assert [step for step, _ in told] == [line["step"] for line in logged(run, "val")]
    assert float_bits(loss for _, loss in told) == float_bits(line["val_loss"] for line in logged(run, "val"))


def test_the_comparison_with_mlx_lm_can_fail(tmp_path, monkeypatch):
    settings = configuration("qlora") | {"seed": 1}
    theirs, _ = trained_by_mlx_lm(settings, tmp_path, monkeypatch, compiled=False)
    assert float_bits(theirs.losses) != float_bits(line["loss"] for line in logged(recorded("qlora"), "step"))


@pytest.mark.parametrize(
    ("examples", "size", "held_out", "every", "iters"),
    [(11, 2, 5, 4, 30), (8, 4, 4, 3, 9), (7, 7, 20, 1, 8), (12, 3, 0, 2, 21), (9, 2, 6, 100, 25)],
)
def test_batches_are_mlx_lms_whenever_it_evaluates(examples, size, held_out, every, iters):
    draw = np.random.default_rng(examples)

    class Data:
        def __init__(self, count):
            self.rows = []
            for _ in range(count):
                length = int(draw.integers(1, 90))
                more = {"tools": None} if length % 2 else {}  # mlx-lm sorts by the number of entries
                self.rows.append({"tokens": draw.integers(1, 99, length).tolist()} | more)

        def __len__(self):
            return len(self.rows)

        def __getitem__(self, index):
            return self.rows[index]

        def process(self, row):
            return row["tokens"], len(row["tokens"]) // 3

    training, validating = CacheDataset(Data(examples)), CacheDataset(Data(held_out))
    np.random.seed(7)
    stream, wanted = trainer.iterate_batches(training, size, 64, loop=True), []
    for iteration in range(1, iters + 1):  # as in mlx-lm's `train`
        wanted.append(next(stream))
        if held_out and (iteration == 1 or iteration % every == 0 or iteration == iters):
            next(iter(trainer.iterate_batches(validating, size, 64)))
    batches = Batches(training, size, 64)
    evaluations = Evaluations(held_out // size, every, iters)
    state = np.random.get_state()[1].tolist()
    sampler = ExampleSampler(batches, Shuffles(7, len(batches), evaluations), 1)
    assert [batch_hash(next(sampler)) for _ in range(iters)] == [batch_hash(batch) for batch in wanted]
    for iteration in (iters - 1, 0, iters // 2):  # any batch, without those before it
        epoch, index = divmod(iteration, len(batches))
        sampler.load_state_dict({"seed": 7, "epoch": epoch, "index": index})
        assert batch_hash(next(sampler)) == batch_hash(wanted[iteration])
    assert np.random.get_state()[1].tolist() == state  # numpy's global state is the user's own


def test_micro_batches_keep_their_width_in_one_batch():
    run = recorded("accumulated")
    sampler = rebuilt(run.manifest.rebuild, [locate(entry, run.path) for entry in run.manifest.data]).sampler
    widths = set()
    for step in range(1, 5):
        parts = [sampler.batches.batch(number) for number in sampler.numbers(3 * step - 2)]
        batch = as_batch(next(sampler))
        widths.add(len({tokens.shape for tokens, _ in parts}))
        assert [batch_hash(part) for part in unpacked(*batch)] == [batch_hash(part) for part in parts]
        assert batch_hash(batch) == run.evidence(step, 0)["batch_hash"]
    assert max(widths) > 1  # some step has micro-batches of different widths, or this would show nothing
    with pytest.raises(ExperimentError, match="5 rows can't be cut into the 3 micro-batches"):
        unpacked(batch[0][:5], batch[1][:5], batch[2][:5])


# --------------------------------------------------------------------------------------------------------- exact replay


@pytest.mark.parametrize("name", ["lora", "full"])
def test_steps_1_7_and_50_replay_exactly(name):
    for step in (1, 7, 50):
        trace = recorded(name).replay(step, fresh_process=False)
        assert trace.record.exact and trace.record.certified_probe, trace.record.first_difference
        assert {item.verdict for name, item in trace.record.items.items() if name != "checkpoint"} == {"exact"}


def test_a_step_replays_exactly_in_a_fresh_process():
    said = runs.workbench("replay", recorded("lora").path, "--step", 50, "--json")
    assert said.code == 0, said.err
    assert json.loads(said.out)["exact"]
    assert runs.workbench("replay", recorded("full").path, "--step", 7, "--json", "--no-probe").code == 0


@pytest.mark.parametrize("name", [name for name in JOBS if name not in ("lora", "full")])
def test_every_kind_of_job_replays_exactly(name):
    for step in (1, 4):
        trace = recorded(name).replay(step, fresh_process=False)
        assert trace.record.exact and trace.record.certified_probe, trace.record.first_difference


def test_a_trace_says_which_tokens_carried_the_loss():
    run = recorded("masked")
    trace = run.replay(2, fresh_process=False, with_probe=False)
    tokens, lengths = trace.batch
    losses = np.array(trace.record.token_loss, np.float32)
    place = np.arange(1, losses.shape[1] + 1)
    counted = (place >= lengths[:, :1]) & (place <= lengths[:, 1:])
    assert losses.shape == (2, tokens.shape[1] - 1) and (losses[~counted] == 0).all() and (losses[counted] > 0).all()
    assert losses.sum() / counted.sum() == pytest.approx(trace.record.loss, rel=1e-5)


@pytest.mark.parametrize("name", ["masked", "accumulated"])
def test_the_mean_loss_of_a_row_is_over_its_own_targets(name):
    """By mlx-lm's own loss of each row alone, on the state before the step."""
    run = recorded(name)
    trace = run.replay(3, fresh_process=False, with_probe=False)
    losses = np.array(trace.record.token_loss, np.float64)
    tokens, lengths, *widths = trace.batch
    each = widths[0].shape[2:] if widths else (tokens.shape[1],)
    counts = []
    for row, width in enumerate(np.repeat(each, len(tokens) // len(each)).tolist()):
        one = mx.array(tokens[row : row + 1, :width]), mx.array(lengths[row : row + 1])
        counts.append(int(trainer.default_loss(lambda x: mx.zeros((*x.shape, 3)), *one)[1].item()))
    rows = trace.rows.set_index("row").sort_index()
    assert rows["targets"].tolist() == counts and min(counts) < losses.shape[1] / 2
    assert rows["loss"].tolist() == pytest.approx(
        [row.sum() / count for row, count in zip(losses, counts, strict=True)]
    )
    if not widths:
        assert (rows["loss"] * rows["targets"]).sum() / sum(counts) == pytest.approx(trace.loss, rel=1e-5)


def test_a_batch_without_targets_is_a_nan_that_replays_exactly(tmp_path):
    """Prompts longer than max_seq_length leave mlx-lm's loss 0/0, a spike that people meet."""
    run = wb.fine_tune(configuration("masked") | {"max_seq_length": 8, "iters": 3}, tmp_path / "run", compile=False)
    assert [line["loss"] for line in logged(run, "step")] == [None] * 3
    trace = run.replay(1, fresh_process=False)
    assert trace.record.exact and sum(map(sum, trace.record.token_loss)) == 0


def test_a_resumed_run_reaches_the_same_bits(tmp_path):
    whole, settings = recorded("accumulated"), configuration("accumulated")
    out = tmp_path / "run"
    wb.fine_tune(settings, out, 2)
    assert [line["step"] for line in logged(wb.open_run(out), "step")] == [1, 2]
    resumed = wb.fine_tune(None, out, resume=True)
    ours, theirs = (mx.load(str(run.path / "adapters" / "adapters.safetensors")) for run in (resumed, whole))
    assert helpers.tensor_bytes(ours) == helpers.tensor_bytes(theirs)
    for step in range(1, 5):
        assert resumed.evidence(step, 0) == whole.evidence(step, 0)
    assert resumed.replay(4, fresh_process=False).record.exact


def test_gradient_checkpointing_leaves_the_class_as_it_was():
    from mlx_lm.models.qwen3 import TransformerBlock

    before = TransformerBlock.__call__
    run = recorded("checkpointed")
    model = rebuilt(run.manifest.rebuild, [locate(entry, run.path) for entry in run.manifest.data]).experiment.model
    assert TransformerBlock.__call__ is before
    assert {type(layer).__call__ is before for layer in model.layers} == {False}
    assert isinstance(model.layers[0], TransformerBlock) and type(model.layers[0]).__name__ == "TransformerBlock"


# ------------------------------------------------------------------------------------------------------ what is written


@pytest.mark.parametrize("name", ["dora", "qlora", "full"])
def test_mlx_lm_loads_the_adapters(name):
    from mlx_lm.utils import load

    run = recorded(name)
    model, _ = load(configuration(name)["model"], adapter_path=str(run.path / "adapters"))
    weights = helpers.tensor_bytes(state_arrays(model))
    saved = helpers.tensor_bytes(mx.load(str(run.path / "adapters" / "adapters.safetensors")))
    assert saved.items() <= weights.items() and saved


def test_adapters_go_where_the_configuration_says(tmp_path):
    settings = configuration("qlora") | {"iters": 2, "adapter_path": str(tmp_path / "mine")}
    run = wb.fine_tune(settings, tmp_path / "run", compile=False)
    assert {path.name for path in (tmp_path / "mine").iterdir()} == {"adapters.safetensors", "adapter_config.json"}
    assert not (run.path / "adapters").exists()
    assert json.loads((tmp_path / "mine" / "adapter_config.json").read_text())["fine_tune_type"] == "lora"


class Told(list):
    """A watcher that keeps what it is told."""

    def on_begin(self, step, steps):
        self.append(("begin", step, steps))

    def on_step(self, step, loss, reading):
        pass

    def on_validation(self, step, loss):
        self.append(("validation", step))

    def on_notice(self, text):
        self.append(text)


def test_what_a_configuration_asks_for_is_done_or_said(tmp_path):
    data, told = small_llm.save_data(tmp_path / "data", valid=0, test=4), Told()
    settings = small_llm.settings(configuration("lora")["model"], data, iters=3, test=True, report_to="wandb")
    wb.fine_tune(settings, tmp_path / "run", compile=False, watcher=told)
    assert told[0] == ("begin", 0, 3)
    assert "no validation set" in told[1] and "report_to (wandb) is not followed" in told[2]
    assert "of the examples used have more than max_seq_length (64) tokens" in told[3]
    assert "adapters" in told[4] and re.fullmatch(r"Test loss 5\.\d{3}, perplexity \d{3}\.\d{3}\.", told[5])
    assert len(told) == 6
    told = Told()
    wb.fine_tune(configuration("qlora") | {"iters": 4}, tmp_path / "other", compile=False, watcher=told)
    assert [step for kind, step, *_ in told if kind == "validation"] == [0, 3]  # before micro-batches 1 and 4


def test_training_goes_on_from_an_adapter_file(tmp_path, monkeypatch):
    first = recorded("qlora").path / "adapters" / "adapters.safetensors"
    adapter = shutil.copy(first, tmp_path / "first.safetensors")
    settings = configuration("qlora") | {"iters": 3, "resume_adapter_file": str(adapter)}
    run = wb.fine_tune(settings, tmp_path / "run", compile=False)
    with monkeypatch.context() as patch:
        theirs, _ = trained_by_mlx_lm(settings, tmp_path / "theirs", patch, compiled=False)
    assert float_bits(theirs.losses) == float_bits(line["loss"] for line in logged(run, "step"))
    assert run.replay(3, fresh_process=False).record.exact


# ---------------------------------------------------------------------------------------------- pinned, and nothing run


def pinned_run(tmp_path, **changed):
    """A short run on a model and data of its own."""
    model, data = tmp_path / "model", tmp_path / "data"
    shutil.copytree(configuration("lora")["model"], model)
    shutil.copytree(configuration("lora")["data"], data)
    settings = small_llm.settings(model, data, iters=3, steps_per_eval=100) | changed
    return wb.fine_tune(settings, tmp_path / "runs" / "run", compile=False), model, data


def test_what_is_added_beside_the_pinned_files_is_not_seen(tmp_path):
    run, model, data = pinned_run(tmp_path)
    (model / "added_tokens.json").write_text("{")
    (model / "model-extra.safetensors").write_bytes(b"no weights")
    (model / "generation_config.json").write_text("{")
    (data / "test.jsonl").write_text("no JSON")
    assert run.replay(2, fresh_process=False).record.exact


def test_a_changed_file_is_refused_by_name(tmp_path):
    run, model, data = pinned_run(tmp_path)
    with (data / "train.jsonl").open("a") as file:
        file.write(json.dumps({"text": "w1 w2"}) + "\n")
    with pytest.raises(DataError, match="train.jsonl has changed"):
        run.replay(2, fresh_process=False)
    (data / "train.jsonl").unlink()
    with pytest.raises(DataError, match="train.jsonl .* is missing"):
        run.replay(2, fresh_process=False)


def test_moved_files_are_found_beside_the_run(tmp_path):
    run, model, data = pinned_run(tmp_path)
    for path in (*model.iterdir(), *data.iterdir()):
        path.rename(run.path.parent / path.name)
    assert run.replay(3, fresh_process=False).record.exact


@pytest.mark.parametrize("name", ["../outside/config.json", "model/../../config.json", "/config.json", "model/run.py"])
def test_a_manifest_can_name_no_place_outside(name, tmp_path):
    run, _, _ = pinned_run(tmp_path)
    helpers.edit_json(run.path / "run.json", lambda value: value["rebuild"]["files"].__setitem__(0, name))
    with pytest.raises(DataError, match="names the place"):
        wb.open_run(run.path).replay(2, fresh_process=False)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("config", None, "manifest is damaged"),
        ("files", "model", "manifest is damaged"),
        ("began", "yesterday", "manifest is damaged"),
        ("options", {"compile": 1}, "manifest is damaged"),
    ],
)
def test_a_damaged_description_is_an_error(key, value, message):
    run = recorded("qlora")
    files = [locate(entry, run.path) for entry in run.manifest.data]
    with pytest.raises(ExperimentError, match=message):
        rebuilt(run.manifest.rebuild | {key: value}, files)


def test_code_beside_the_model_is_never_run(tmp_path):
    model = shutil.copytree(configuration("lora")["model"], tmp_path / "model")
    (model / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    helpers.edit_json(model / "config.json", lambda value: value.update(model_file="own.py"))
    with pytest.raises(ExperimentError, match="requires importing and running"):
        wb.fine_tune(small_llm.settings(model, configuration("lora")["data"]), tmp_path / "run")
    assert not (tmp_path / "ran").exists() and not (tmp_path / "run").exists()


def test_a_chat_template_that_prints_the_date_prints_that_of_the_recording(tmp_path):
    model = small_llm.save_model(tmp_path / "model", template=small_llm.DATED)
    settings = configuration("masked") | {"model": str(model), "iters": 3}
    run = wb.fine_tune(settings, tmp_path / "run", compile=False)
    today = datetime.datetime.fromisoformat(run.manifest.rebuild["began"])
    files = [locate(entry, run.path) for entry in run.manifest.data]
    other = run.manifest.rebuild | {"began": (today + datetime.timedelta(days=1)).isoformat()}
    assert recorded("masked").manifest.rebuild["began"] is None  # two runs that differ in nothing say so
    hashes = [batch_hash(as_batch(next(rebuilt(one, files).sampler))) for one in (run.manifest.rebuild, other)]
    assert hashes[0] == run.evidence(1, 0)["batch_hash"] != hashes[1]


def test_another_mlx_lm_is_named_before_a_replay(tmp_path):
    run, _, _ = pinned_run(tmp_path)
    helpers.edit_json(run.path / "run.json", lambda value: value["rebuild"]["versions"].update({"mlx-lm": "0.1"}))
    with pytest.raises(EnvironmentMismatch, match="mlx-lm: recorded 0.1, here "):
        wb.open_run(run.path).replay(2)
    trace = wb.open_run(run.path).replay(2, other_environment=True, fresh_process=False)
    assert any("mlx-lm" in phrase for phrase in trace.record.environment_differences)


def test_looking_at_a_run_imports_no_mlx_lm():
    code = (
        f"import sys, workbench as wb; run = wb.open_run({str(recorded('lora').path)!r}); run.spikes(); run.plan(7)\n"
        "repr(run); run.norms(5)\nimport workbench.cli, workbench.rebuild, workbench.session\n"
        "print(sorted({'mlx_lm', 'transformers', 'tokenizers', 'yaml'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_the_panel_says_where_the_batch_is_to_be_seen_and_shows_it_after_a_replay():
    """Which lines it had only mlx-lm's own tokenizer tells, and the panel's process loads neither that nor MLX."""
    run = recorded("lora")
    panel = wb.Panel(run=str(run.path))
    panel.step.value, panel.view.value = 3, "Batch"
    assert panel.last_error is None
    if panel.trace is None:  # no other test has replayed it
        assert "run.batch_facts(step)" in panel.batch.value and "a replay shows them here" in panel.batch.value
    panel.replay(3)
    shown = panel.batch.value.replace("&nbsp;", " ")
    assert panel.last_error is None and "share of the loss" in shown and "Not shown" not in shown
    lines = json.loads(runs.here("batch", run.path, "--step", 3, "--json").out)["rows"]
    assert {row["source"] for row in lines} == {"train.jsonl"} and all(row["line"] >= 1 for row in lines)


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"trust_remote_code": True}, "trust_remote_code is set"),
        ({"hf_dataset": {"path": "someone/data"}}, "hf_dataset names data that may change"),
        ({"train": False}, "train is false"),
        ({"fine_tune_type": "prefix"}, "fine_tune_type is 'prefix'; expected lora, dora or full"),
        ({"optimizer": "rmsprop"}, "optimizer is 'rmsprop'; expected one of adam"),
        ({"num_layers": 16}, "num_layers is 16, and the model has 2 layers"),
        ({"lora_parameters": DROPOUT | {"keys": []}}, "no parameter of this model is trained"),
        ({"batch_size": 12}, "batch_size is 12, and one of the files of data has only 11 examples"),
        ({"batch_size": True}, "batch_size is True; expected a whole number"),
        ({"iters": 2, "grad_accumulation_steps": 4}, "no optimizer update would be made"),
        ({"lora_parameters": {"rank": 4, "alpha": 8}}, "mlx-lm refuses this job: KeyError: .*scale"),
        ({"mask_prompt": True}, "mlx-lm refuses this job: ValueError: Prompt masking not supported"),
        ({"data": "someone/data"}, "data is someone/data, which is no folder here"),
        ({"model": "nobody/nothing-of-this-name"}, "not in the Hugging Face cache .*hf download"),
        ({"resume_adapter_file": "none.safetensors"}, "there is no such file"),
        ({"lr_schedule": {"name": "no_such", "arguments": [1]}}, "mlx-lm refuses this job: AttributeError"),
    ],
)
def test_what_can_t_be_recorded_is_refused_before_anything_is_written(changed, message, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ExperimentError, match=message):
        wb.fine_tune(configuration("lora") | changed, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_more_steps_than_the_job_has_are_refused(tmp_path):
    with pytest.raises(ExperimentError, match="steps is 5, and this job has 4"):
        wb.fine_tune(configuration("accumulated"), tmp_path / "run", 5)


def test_without_mlx_lm_the_sentence_names_the_extra(tmp_path, monkeypatch):
    run = recorded("qlora")
    for name in [name for name in sys.modules if name.partition(".")[0] == "mlx_lm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "mlx_lm", None)
    with pytest.raises(ExperimentError, match=r"pip install 'spike-workbench\[mlx-lm\]'"):
        run.replay(1, fresh_process=False)


def test_a_cursor_of_another_stream_is_refused():
    run = recorded("accumulated")
    sampler = rebuilt(run.manifest.rebuild, [locate(entry, run.path) for entry in run.manifest.data]).sampler
    for cursor, message in (
        ({"seed": 1, "epoch": 0, "index": 3}, "not one of this data"),
        ({"seed": 0, "epoch": 0, "index": 5}, "not one of this data"),
        ({"seed": 0, "epoch": 0}, "not one of this data"),
        ({"seed": 0, "epoch": 0, "index": 4}, "in the middle of a step of 3"),
    ):
        with pytest.raises(wb.WorkbenchError, match=message):
            sampler.load_state_dict(cursor)


# --------------------------------------------------------------------------------------------------------- command line


def test_the_command_takes_mlx_lms_file_and_goes_on_after_a_stop(tmp_path):
    file, out = tmp_path / "config.yaml", tmp_path / "run"
    settings = configuration("qlora") | {"learning_rate": "1e-3"}  # as people write it; mlx-lm reads a number
    lines = [f"{key}: {value if key == 'learning_rate' else json.dumps(value)}" for key, value in settings.items()]
    file.write_text("\n".join(lines))
    assert read_settings(file)["learning_rate"] == 1e-3
    said = runs.here("mlx-lm", file, "--out", out, "--steps", 5, "--no-compile")
    assert said.code == 0 and "step 3: validation loss" in said.err and "5 steps recorded, 0 spikes" in said.err
    said = runs.here("mlx-lm", "--out", out, "--resume")
    assert said.code == 0 and "7 steps recorded" in said.err
    whole = recorded("qlora")
    assert wb.open_run(out).evidence(12, 0) == whole.evidence(12, 0)
    assert "there was nothing to do" in runs.here("mlx-lm", "--out", out, "--resume").err
    assert "decided by the manifest" in runs.here("mlx-lm", file, "--out", out, "--resume").sentence
    assert "already" in runs.here("mlx-lm", file, "--out", out).sentence
    assert "leave the factory out" in runs.here("replay", out, "--step", 3, "--factory", "a:b").sentence


@pytest.mark.parametrize(
    ("content", "message"),
    [("[1, 2]", "holds a list"), ("a: [", "can't be read"), ("model: !!python/object:os.system x", "can't be read")],
)
def test_a_file_that_is_no_configuration_is_refused(content, message, tmp_path):
    (tmp_path / "config.yaml").write_text(content)
    assert message in runs.here("mlx-lm", tmp_path / "config.yaml", "--out", tmp_path / "run").sentence
