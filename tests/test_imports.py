"""Arrows point one way: reading and drawing need no MLX, and the core knows no model, data, trainer or screen."""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "workbench"


def known_as(path):
    """A module's name; that of a command after "commands.", for it has the name of what it calls."""
    return f"commands.{path.stem}" if path.parent.name == "commands" else path.stem


FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.stem not in ("__init__", "__main__")]
MODULES = {known_as(path): path for path in FILES}
COMMANDS = {name for name in MODULES if name.startswith("commands.")}
LIGHT = (
    *("telemetry", "trace", "compare", "spikes", "plots", "run", "manifest", "cli", "bits", "files", "errors"),
    *("changes", "rowfacts", "batchfacts", "traces", "whatif"),
    *("paired", "logged", "ladder"),
    *("verdict", "alarm", "suspects", "kind_names"),
    *("quantities", "summary", "measured", "trace_tables", "findings", "neighbours", "context_tables", "heatmap"),
    *("window", "spike_table"),
    *("rolling", "cusum", "rules", "detecting", "shared_spikes", "thinning", "curve", "curves", "curves_figure"),
    "dashboard",
    *("timeline_figure", "tokens", "markup", "views", "layer_view", "batch_view", "cause_view", "looking", "results"),
    *("norm_chart", "departure", "environment_view", "code_view", "here", "stored", "surroundings", "step_report"),
    *("onset_view", "logged_norms", "onsets", "untrained", "number_text"),
    *("messages", "child"),
    *("untrusted", "printed", "interpreter", "read_ahead", "kernel_cache", "fresh_replay"),
    *("short_lived", "warm_heap", "plain_numbers", "enumeration"),
    *("casebook", "outcome", "baselines", "scores", "spikebench", "spikebench_report"),
    *("suite_table", "peer", "growth", "scaling_figure"),
    *("line", "strict", "further", "quick", "form", "alike", "scan", "seal", "column_cache", "writer"),
    *("logged_run", "recognise", "state_file", "loose_checkpoint"),
    *("layout", "listing", "plan", "recorded_run", "judged"),
    *("completeness", "first_sign", "seals", "spike_marks", "stretches"),
    *("checkpoint_sizes", "tensor_places", "digests", "hashed_file", "reserving", "early_flush", "linux_call"),
    *("own_line", "rank_run", "rank_setup", "rank_parts", "rank_trace", "carrier", "signs", "told_apart"),
    *("guard", "places", "scratch_files", "stopped", "named_script", "users_code", "wanted", "script_place"),
)
CORE = (
    "step",
    "snapshot",
    "replay",
    "experiment",
    "capture",
    "observe",
    "fingerprint",
    "host",
    "gates",
    "probe",
    "compare",
    *("attempt", "making"),
    "effect",
    "intervene",
    "difference",
    "tensors",
    "ways",
    *("measure", "second_moment", "attention", "watch", "nonfinite", "streamed"),
    "state_edits",
    *("counterfactual", "damage"),
    *("batch_arrays", "random_state", "cursors", "plain_numbers", "token_loss"),
    *("extras", "own_step", "trees", "frozen", "plain_batches", "reachable", "redrawing", "selfcheck", "ignored"),
    "second_performance",
    "rebinding",
    "library_functions",
    *("object_graph", "contents", "deep_snapshot", "standins", "outside_state", "objections"),
    *("bare_objects", "buffers", "code_names", "watched_numbers", "report_branches", "files_read"),
    *("tensor_file", "readings", "numbered_batch", "rate_scale", "blackbox", "recovery", "saving"),
    *("numpy_parts", "side_effects", "shared_settings"),
    *("tensor_places", "deduplication", "commit", "checkpoint_reader", "checkpoint_writer", "checkpoint_comparison"),
    "alongside",
    *("digests", "hashed_file", "reserving", "early_flush", "linux_call", "checkpoint_names"),
    *("world", "rank_parts"),
    *("enumeration", "users_code"),
)
ABOVE = {"model", "data", "train", "training", "faults", "cli", "demo", "lab", "run", "record", "session", "manifest"}
ABOVE |= {"context", "neighbours", "inquiry", "autopsy", "fresh_replay"}
ABOVE |= {"casebook", "outcome", "trial", "baselines", "scores", "spikebench", "spikebench_report"}
ABOVE |= {"checkpointer", "journal", "locking"}
ABOVE |= {"run_writer", "run_manifest", "logbook", "saves", "saved_state", "continuation", "rollback", "telemetry_copy"}
ABOVE |= {"layout", "listing", "plan", "recorded_run", "completeness", "first_sign", "spike_marks", "stretches"}
ABOVE |= {"judged", "seals", "rank_checks", "checkpoint_checks"}
ABOVE |= {"checkpoint_sizes", "many"}
ABOVE |= {"verification", "verifying", "proving", "batch_files", "own_batches", "example_lines", "printed"} | COMMANDS
ABOVE |= {"crew", "rank_writer", "rank_run", "attendance", "launching", "joined", "carrier", "shard"}
ABOVE |= {"alterations", "recipe", "planting", "planters", "saboteur", "seams", "forks", "forking"}
ABOVE |= {"preparation", "legs", "fallback", "second_process", "trace_assembly", "suspicion", "by_hand"}
ABOVE |= {"dropped", "modes", "names_read", "unkept", "standing", "cut_off", "keeper", "segments", "retreat"}
ABOVE |= {"start_values", "hash_order", "reasons", "process_settings"}
ABOVE |= {"python_values", "name_uses", "held_marks", "outer_modes", "terms"}
ABOVE |= {"first_steps", "beginning", "new_run", "resumed_run", "step_log", "untied"}
ABOVE |= {"options", "asked_recipe", "asked_recording"}
SCREEN = {"ipywidgets", "matplotlib", "IPython", "rich", "click"}


def loaded_after(statement):
    """Top-level names of the modules that a fresh interpreter has loaded after a statement."""
    code = f"import sys\n{statement}\nprint(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def dotted(name):
    return ".".join(MODULES[name].relative_to(PACKAGE.parent).with_suffix("").parts)


def test_the_package_imports_next_to_nothing():
    loaded = loaded_after("import workbench")
    assert not {"mlx", "numpy", "pandas", "matplotlib", "ipywidgets", "msgspec", "click"} & loaded


def test_what_reads_and_draws_imports_no_mlx():
    loaded = loaded_after("import " + ", ".join(dotted(name) for name in LIGHT))
    assert "mlx" not in loaded and "pandas" in loaded


def test_asking_for_help_loads_little():
    assert not {"mlx", "pandas", "numpy", "rich"} & loaded_after("import workbench.cli")


def test_public_names_of_reading_import_no_mlx():
    loaded = loaded_after(
        "from workbench import open_run, list_runs, find_spikes, compare_runs\n"
        "from workbench import Run, Trace, SpikeSettings, WorkbenchError"
    )
    assert "mlx" not in loaded


def test_looking_at_a_run_imports_no_mlx():
    import runs

    path = str(runs.recorded_read_only())
    loaded = loaded_after(
        f"from workbench import open_run; run = open_run({path!r}); run.spikes(), run.norms(5), run.plan(6), repr(run)"
    )
    assert "mlx" not in loaded
    loaded = loaded_after(
        f"import sys; sys.argv = ['workbench', 'spikes', {path!r}]\nfrom workbench.cli import main\n"
        "try:\n    main(standalone_mode=False)\nexcept SystemExit:\n    pass\nprint()"
    )
    assert "mlx" not in loaded and "click" in loaded


def test_comparing_runs_imports_no_mlx():
    import runs

    path = str(runs.recorded_read_only())
    loaded = loaded_after(
        f"from workbench import compare_runs; found = compare_runs({path!r}, {path!r})\n"
        "found.to_json(), found._repr_html_(), found.figure()"
    )
    assert "mlx" not in loaded and "matplotlib" in loaded


@pytest.mark.parametrize("name", ["Recorder", "Experiment", "train_run"])
def test_the_tests_above_can_fail(name):
    assert "mlx" in loaded_after(f"from workbench import {name}")


def test_every_public_name_resolves_and_nothing_else_does():
    import workbench

    for name in workbench.__all__:
        assert getattr(workbench, name) is not None
    assert dir(workbench) == sorted(workbench.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'latest_run'"):
        workbench.latest_run  # noqa: B018


def test_what_a_recorder_is_given_can_be_made_of_public_names():
    """`Recovery` was named by its docstring, and was none."""
    import workbench
    from workbench import record

    asked = re.findall(r"[A-Z]\w+", " ".join(record.Recorder.__init__.__annotations__.values()))
    ours = {name for name in asked if str(getattr(vars(record).get(name), "__module__", "")).startswith("workbench.")}
    assert {"Recovery", "SpikeSettings", "DataFile"} <= ours
    assert ours - {"Sampler", "LossFunction"} <= set(workbench.__all__)  # which are forms, not classes to be made


# -------------------------------------------------------------------------------------------------------------- arrows


def imports_of(source, folder=PACKAGE):
    """(own modules, other packages) that code in a folder imports anywhere, but not for type checking only."""
    own, others = set(), set()
    skipped = {
        id(inner)
        for node in ast.walk(source)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(source):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.ImportFrom):
            if node.level:
                start = [folder, *folder.parents][node.level - 1]
                target = start.joinpath(*(node.module or "").split("."))
                files = [target.with_suffix(".py"), *(target / f"{alias.name}.py" for alias in node.names)]
                own |= {known_as(file) for file in files if MODULES.get(known_as(file)) == file}
            else:
                others.add(node.module.partition(".")[0])
        elif isinstance(node, ast.Import):
            others |= {alias.name.partition(".")[0] for alias in node.names}
    return own, others


@functools.cache
def imports_of_module(name):
    return imports_of(ast.parse(MODULES[name].read_text()), MODULES[name].parent)


def reach(module):
    """Everything that a module imports, directly or through others."""
    seen, others, todo = set(), set(), [module]
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        own, foreign = imports_of_module(name)
        others |= foreign
        todo += own
    return seen, others


@pytest.mark.parametrize("module", CORE)
def test_the_core_knows_no_model_data_trainer_folder_or_screen(module):
    own, others = reach(module)
    assert own & ABOVE == set() and others & SCREEN == set()


@pytest.mark.parametrize(
    "module", ["model", "data", "schedule", "spikes", "spike_table", "faults", "alterations", "rules"]
)
def test_what_stands_beside_the_core_knows_it_not(module):
    own, others = reach(module)
    assert own & {"step", "replay", "snapshot", "record", "session", "run", "train", "cli"} == set()
    assert own & {"commit", "checkpoint_reader", "checkpoint_writer", "preparation"} == set()
    assert others & SCREEN == set()


@pytest.mark.parametrize(
    "module",
    [
        *("data", "spikes", "telemetry", "manifest", "trace", "plots", "compare", "changes", "rowfacts", "traces"),
        *("difference", "ladder", "knobs", "comparison", "pair_figure"),
        *("window", "spike_table", "rules", "detecting", "thinning", "curves_figure"),
        *("timeline_figure", "markup", "batch_view", "cause_view", "results"),
        *("norm_chart", "code_view", "work_error"),
        *("alterations", "faults", "seams"),
        *("samplers", "plain_batches", "plain_json", "enumeration"),
        *("journal", "locking", "saving", "failed_writes", "telemetry_copy"),
        *("untrusted", "interpreter", "verification", "read_ahead", "kernel_cache"),
        *("verdict", "alarm", "suspects"),
        *("casebook", "outcome", "baselines", "scores", "spikebench", "spikebench_report"),
        *("suite_table", "peer", "growth", "scaling_figure"),
        *("line", "strict", "further", "quick", "form", "alike", "scan", "seal", "column_cache", "writer"),
        *("recognise", "entries", "state_file", "loose_checkpoint"),
        *("layout", "listing", "plan", "recorded_run", "judged", "checkpoint_names"),
        *("completeness", "first_sign", "seals", "spike_marks", "stretches"),
        *("checkpoint_sizes", "tensor_places", "digests", "hashed_file", "reserving", "early_flush", "linux_call"),
        *("own_line", "rank_setup", "rank_parts", "rank_trace", "carrier", "signs", "told_apart"),
    ],
)
def test_without_mlx_all_the_way_down(module):
    assert "mlx" not in reach(module)[1]


def test_a_module_is_known_by_its_name_alone():
    assert len(MODULES) == len(FILES)


def test_nobody_imports_the_command_line():
    assert {name for name in MODULES if "cli" in imports_of_module(name)[0]} == set()
    assert {name for name in MODULES if imports_of_module(name)[0] & COMMANDS} <= {"cli", *COMMANDS}


def test_the_arrows_can_be_broken():
    """The reach of the trainer holds what that of the core must not."""
    own, others = reach("train")
    assert {"model", "data", "record", "step"} <= own and "mlx" in others
    assert "matplotlib" in reach("plots")[1] and "rich" in reach("cli")[1]
    source = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .train import x\n"
    source += "def f():\n    from .cli import y\n"
    assert imports_of(ast.parse(source)) == ({"cli"}, {"typing"})
    source = ast.parse("from .replay import replay\nfrom ..replay import Replayed\nfrom .. import doctor")
    assert imports_of(source, PACKAGE / "commands")[0] == {"commands.replay", "replay", "doctor"}
    assert "commands.replay" in reach("cli")[0]
