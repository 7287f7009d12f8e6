"""Everything outside the code that can move a bit, as found on this machine."""

import json
import os
import shutil
import subprocess
import sys

import mlx.core as mx
import pytest

from workbench import environment
from workbench.environment import PROCESS, differences, numeric_environment, on_device
from workbench.errors import ReplayError

LOOK = (
    "import json; import mlx.core as mx; from workbench.environment import numeric_environment; "
    "mx.set_default_device(mx.cpu); print(json.dumps(numeric_environment()))"
)


def look(**variables):
    """The environment as another process finds it; None removes a variable."""
    environment = {k: v for k, v in (os.environ | variables).items() if v is not None}
    done = subprocess.run([sys.executable, "-W", "error", "-c", LOOK], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_it_names_what_the_contract_lists():
    found = numeric_environment()
    assert found["mlx"].count(".") >= 2 and found["backend"] == "cpu" and found["default_dtype"] == "float32"
    for key in ("device", "system", "machine", "numpy", "numpy_blas", "blas", "variables"):
        assert found[key] is not None
    assert json.loads(json.dumps(found)) == found == numeric_environment()
    assert all(
        not isinstance(inner, dict) for value in found.values() if isinstance(value, dict) for inner in value.values()
    )
    if sys.platform == "linux":
        assert "g++" in found["jit_compiler"] or "none" in found["jit_compiler"]
        assert len(found["blas"]["sha256"]) == 16


def test_two_processes_agree_on_all_of_it():
    assert differences(numeric_environment(), look()) == []


def test_variables_that_move_bits_are_captured_and_harmless_ones_not():
    there = look(
        MLX_ENABLE_TF32="0",
        OPENBLAS_NUM_THREADS="3",
        OMP_NUM_THREADS="2",
        MLX_MAX_OPS_PER_BUFFER="7",
        MLX_BFS_MAX_WIDTH="9",
        HOME="/nowhere",
    )["variables"]
    assert there["MLX_ENABLE_TF32"] == "0" and there["OPENBLAS_NUM_THREADS"] == "3" and there["OMP_NUM_THREADS"] == "2"
    assert not {"MLX_MAX_OPS_PER_BUFFER", "MLX_BFS_MAX_WIDTH", "HOME", "PATH"} & there.keys()


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("g++") is None, reason="needs Linux with g++")
def test_a_missing_compiler_is_named(tmp_path):
    """MLX runs uncompiled without a word, and uncompiled steps may have other bits."""
    there = look(PATH=str(tmp_path))
    assert there["jit_compiler"] == "none (MLX runs uncompiled)"
    (phrase,) = differences(numeric_environment(), there)
    assert phrase.startswith("jit_compiler: recorded g++ ") and phrase.endswith(", here none (MLX runs uncompiled)")


def test_differences_are_phrases_with_both_values_in_order():
    recorded = {"mlx": "0.1", "blas": {"library": "a", "version": "1"}, "gone": "x", "tf32": None, "same": [1]}
    here = {"mlx": "0.2", "blas": {"library": "a", "version": "2", "threads": 4}, "tf32": False, "same": [1]}
    assert differences(recorded, here) == [
        "blas.threads: recorded nothing, here 4",
        "blas.version: recorded 1, here 2",
        "gone: recorded x, here nothing",
        "mlx: recorded 0.1, here 0.2",
        "tf32: recorded nothing, here False",
    ]
    assert differences(recorded, recorded) == []


def test_a_section_that_one_side_lacks():
    assert differences({"blas": {"library": "a"}}, {"blas": None}) == ["blas.library: recorded a, here nothing"]
    assert differences({}, {"blas": {"library": "a"}}) == ["blas.library: recorded nothing, here a"]


def test_a_process_is_told_from_another():
    code = "from workbench.environment import PROCESS; print(PROCESS)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert len(done.stdout.strip()) == 32 and done.stdout.strip() != PROCESS


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux, which says how a process began")
def test_how_texts_are_hashed_is_what_the_process_began_with(monkeypatch):
    assert look(PYTHONHASHSEED="3")["hash_seed"] == "3" and look(PYTHONHASHSEED="0")["hash_seed"] == "0"
    assert look(PYTHONHASHSEED=None)["hash_seed"] == "random"
    here = numeric_environment()["hash_seed"]
    monkeypatch.setenv("PYTHONHASHSEED", "12345")
    assert numeric_environment()["hash_seed"] == here


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux's MLX")
def test_the_c_library_that_mlx_computes_with_is_named():
    found = numeric_environment()["libc"]
    assert found is None or found.split()[1][0].isdecimal()
    assert (found or "glibc ").startswith("glibc ") or shutil.which("ldd") is None


def test_a_variable_that_came_too_late_to_switch_compilation_off(monkeypatch):
    if (numeric_environment()["jit_compiler"] or "").startswith("none"):
        pytest.skip("nothing is compiled here")
    monkeypatch.delenv("MLX_DISABLE_COMPILE", raising=False)
    assert numeric_environment()["compile_disabled"] is None
    monkeypatch.setenv("MLX_DISABLE_COMPILE", "1")
    assert numeric_environment()["compile_disabled"] is False


def test_limits_of_threads_are_seen_whenever_they_are_set(monkeypatch):
    pool = {"user_api": "blas", "filepath": "/usr/lib/libx.so", "num_threads": 4}
    monkeypatch.setattr(environment, "_pools", lambda: [pool])
    assert environment._mlx_blas()["num_threads"] == 4 or sys.platform == "darwin"
    pool["num_threads"] = 1
    assert environment._mlx_blas()["num_threads"] == 1 or sys.platform == "darwin"


def test_on_device_restores_the_default_also_after_an_error():
    before = mx.default_device()
    with pytest.raises(KeyError), on_device("cpu"):
        assert mx.default_device().type == mx.DeviceType.cpu
        raise KeyError
    assert mx.default_device() == before


@pytest.mark.skipif(mx.is_available(mx.Device(mx.DeviceType.gpu)), reason="this machine has a GPU")
@pytest.mark.parametrize("backend", ["cuda", "metal"])
def test_a_device_that_is_not_there(backend):
    with (
        pytest.raises(ReplayError, match=f"recorded on {backend}, and this machine has no GPU"),
        on_device(backend),
    ):
        pass


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (["mlx", "mlx-cpu"], "this machine has no GPU that MLX can use"),
        (["mlx", "mlx-cuda-13"], "this machine has no GPU that MLX can use"),
        (["mlx", "mlx-cpu", "mlx-cuda-13"], "pip install --force-reinstall --no-deps mlx-cuda-13"),
    ],
)
def test_two_builds_of_mlx_in_one_place_are_named(monkeypatch, names, sentence):
    class Distribution:
        def __init__(self, name):
            self.metadata = {"Name": name}

    monkeypatch.setattr(environment.importlib.metadata, "distributions", lambda: [Distribution(name) for name in names])
    assert sentence in environment.no_gpu()
