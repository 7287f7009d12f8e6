"""Files of tensors that others saved: norms, comparison, what is missing; formats that run code are never opened."""

import json
import math
import pickle
import zipfile

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from click.testing import CliRunner
from mlx.utils import tree_flatten

from workbench import compare_checkpoints, open_checkpoint
from workbench.cli import main
from workbench.errors import CheckpointError

DTYPES = [mx.float32, mx.float16, mx.bfloat16, mx.int32, mx.uint8, mx.bool_, mx.int64]


def trained():
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    optimizer = optim.AdamW(1e-3)
    optimizer.init(model.trainable_parameters())
    gradients = {path: mx.ones_like(array) for path, array in tree_flatten(model.trainable_parameters())}
    optimizer.update(model, nn.utils.tree_unflatten(list(gradients.items())))
    mx.eval(model.parameters(), optimizer.state)
    return dict(tree_flatten(model.parameters())), dict(tree_flatten(optimizer.state))


@pytest.fixture(params=["safetensors", "npz"])
def save(request, tmp_path):
    """Saves arrays in either format, with MLX, and returns the path."""

    def save_as(name, arrays):
        path = tmp_path / f"{name}.{request.param}"
        mx.save_safetensors(str(path), arrays) if request.param == "safetensors" else mx.savez(str(path), **arrays)
        return path

    return save_as


def test_norms_of_every_dtype(save):
    values = mx.array([[1.5, -2.0, 0.0], [3.0, 0.25, 1.0]])
    path = save("w", {str(dtype): values.astype(dtype) for dtype in DTYPES} | {"scalar": mx.array(2.0)})
    frame = open_checkpoint(path).frame().set_index("tensor")
    for dtype in DTYPES:
        row = frame.loc[str(dtype)]
        expected = np.abs(np.array(values.astype(dtype).astype(mx.float32), np.float64))
        assert row["dtype"] in str(dtype) and row["shape"] == "2×3" and row["nonfinite"] == 0
        assert row["l2"] == math.sqrt((expected**2).sum()) and row["max_abs"] == expected.max()
        assert row["rms"] == math.sqrt((expected**2).sum() / 6)
    assert frame.loc["scalar", "shape"] == "scalar" and frame.loc["scalar", "l2"] == 2.0


def test_values_that_are_not_finite_are_counted_and_hide_in_no_norm(save):
    path = save("w", {"a": mx.array([3.0, float("nan"), 4.0, float("inf")]), "b": mx.array([float("nan")])})
    frame = open_checkpoint(path).frame().set_index("tensor")
    assert frame.loc["a", ["l2", "max_abs", "nonfinite"]].tolist() == [5.0, 4.0, 2]
    assert frame.loc["b", "nonfinite"] == 1 and math.isnan(frame.loc["b", "rms"])


def test_what_is_missing_for_a_replay_is_named(save):
    weights, state = trained()
    alone = open_checkpoint(save("weights", weights))
    assert alone.missing() == [
        *("the optimizer's moments", "the optimizer's step", "the optimizer's learning_rate", "the random state"),
        *("the data cursor", "the optimizer's settings"),
    ]
    assert set(alone.frame()["part"]) == {"weight"}
    optimizer = open_checkpoint(save("optimizer", state))
    assert optimizer.missing()[0] == "weights" and optimizer.frame()["part"].value_counts().to_dict() == {
        **{"m": 4, "v": 4},
        **{"step": 1, "learning_rate": 1},
    }
    both = {f"model.{path}": array for path, array in weights.items()}
    both |= {f"optimizer.{path}": array for path, array in state.items()}
    found = open_checkpoint(save("both", both))
    assert found.missing() == ["the random state", "the data cursor", "the optimizer's settings"]
    assert "Not a replayable state: it lacks the random state" in found.sentence()
    del both["optimizer.layers.0.weight.v"]
    lacking = open_checkpoint(save("lacking", both)).missing()
    assert lacking[0] == "v of 1 of 4 weights (model.layers.0.weight)"


def test_a_weight_may_be_called_v(save):
    frame = open_checkpoint(save("w", {"norm.v": mx.ones(3), "norm.g": mx.ones(1), "lora.u": mx.ones(2)})).frame()
    assert frame["part"].tolist() == ["weight"] * 3


def test_two_files_are_compared_bit_for_bit(save):
    weights, _ = trained()
    other = dict(weights)
    other["layers.0.weight"] = weights["layers.0.weight"] + mx.array([[0.5, 0, 0]] + [[0.0] * 3] * 3)
    other["layers.0.bias"] = weights["layers.0.bias"].astype(mx.float16)
    other["layers.1.bias"] = mx.ones(5)
    other["more"] = mx.ones(1)
    del other["layers.1.weight"]
    frame = compare_checkpoints(save("a", weights), save("b", other)).set_index("tensor")
    assert frame["verdict"].to_dict() == {
        **{"layers.0.weight": "differs", "layers.0.bias": "other dtype", "layers.1.bias": "other shape"},
        **{"layers.1.weight": "only in a", "more": "only in b"},
    }
    row = frame.loc["layers.0.weight"]
    before, after = (np.array(arrays["layers.0.weight"], np.float64) for arrays in (weights, other))
    assert row["differing"] == 1 and row["max_abs"] == np.abs(after - before).max()
    assert row["relative"] == pytest.approx(np.linalg.norm(after - before) / np.linalg.norm(before), rel=1e-12)


def test_one_bit_and_the_sign_of_zero_are_differences(save):
    a = save("a", {"x": mx.array([1.0, 0.0]), "y": mx.array([1.0], dtype=mx.bfloat16), "z": mx.array([float("nan")])})
    b = save(
        "b", {"x": mx.array([1.0, -0.0]), "y": mx.array([1.0078125], dtype=mx.bfloat16), "z": mx.array([float("nan")])}
    )
    frame = compare_checkpoints(a, b).set_index("tensor")
    assert frame["verdict"].to_dict() == {"x": "differs", "y": "differs", "z": "equal"}
    assert frame.loc["y", ["differing", "max_ulp"]].tolist() == [1, 1] and frame.loc["x", "max_abs"] == 0.0


@pytest.mark.parametrize("swap", [False, True])
def test_a_prefix_is_named_and_seen_through(save, swap):
    weights, _ = trained()
    paths = save("a", weights), save("b", {f"model.{path}": array for path, array in weights.items()})
    frame = compare_checkpoints(*(paths[::-1] if swap else paths))
    assert set(frame["verdict"]) == {"equal"} and len(frame) == 4
    assert "begins with 'model.'" in frame.attrs["notices"][0]


# ------------------------------------------------------------------------------------------------------------- refused


class Trap:
    """Unpickling it would write a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_pickles_are_refused_and_never_loaded(tmp_path):
    sprung = tmp_path / "sprung"
    plain = tmp_path / "model.bin"
    plain.write_bytes(pickle.dumps({"w": Trap(sprung)}))
    torch = tmp_path / "model.pt"
    with zipfile.ZipFile(torch, "w") as archive:
        archive.writestr("model/data.pkl", pickle.dumps(Trap(sprung)))
    objects = tmp_path / "objects.npz"
    np.savez(objects, w=np.array([Trap(sprung)], object))
    disguised = tmp_path / "model.safetensors"
    disguised.write_bytes(plain.read_bytes())
    for path, words in ((plain, "pickle"), (torch, "PyTorch"), (objects, "Python objects"), (disguised, "pickle")):
        with pytest.raises(CheckpointError, match=words):
            open_checkpoint(path)
    assert not sprung.exists()


def test_other_formats_are_refused_by_name(tmp_path):
    (tmp_path / "m.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + b"\0" * 64)
    (tmp_path / "m.gguf").write_bytes(b"GGUF\x03\0\0\0" + b"\0" * 64)
    (tmp_path / "orbax").mkdir()
    (tmp_path / "orbax" / "_METADATA").write_text("{}")
    (tmp_path / "empty.safetensors").write_bytes(b"")
    (tmp_path / "text.npz").write_text("hello, this is text")
    (tmp_path / "folder").mkdir()
    for name, words in (
        *(("m.h5", "HDF5"), ("m.gguf", "GGUF"), ("orbax", "orbax"), ("empty.safetensors", "it is empty")),
        *(("text.npz", "it begins with 'hello"), ("folder", "without model.safetensors.index.json")),
        ("nothing.npz", "can't be read"),
    ):
        with pytest.raises(CheckpointError, match=words):
            open_checkpoint(tmp_path / name)


def test_a_file_that_was_cut_off_or_changed_is_damaged(tmp_path):
    path = tmp_path / "w.safetensors"
    mx.save_safetensors(str(path), {"a": mx.ones((20, 20)), "b": mx.ones(3)})
    whole = path.read_bytes()
    for length in (7, 9, 60, len(whole) - 1000, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            open_checkpoint(path)
    path.write_bytes(whole + b"x")
    with pytest.raises(CheckpointError, match="header speaks of"):
        open_checkpoint(path)
    path.write_bytes(whole.replace(b"[20,20]", b"[21,20]"))
    with pytest.raises(CheckpointError, match="a of shape"):
        open_checkpoint(path)


def test_shards_are_read_by_their_index(tmp_path):
    for number in (1, 2):
        mx.save_safetensors(str(tmp_path / f"model-{number}.safetensors"), {f"w{number}": mx.full((2,), number)})
    index = {"weight_map": {"w1": "model-1.safetensors", "w2": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert open_checkpoint(tmp_path).frame()["max_abs"].tolist() == [1.0, 2.0]
    index["weight_map"]["w3"] = "../elsewhere.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="expected a file beside it"):
        open_checkpoint(tmp_path)


def test_on_the_command_line(save, tmp_path):
    a, b = save("a", {"w": mx.ones(3)}), save("b", {"w": mx.zeros(3)})
    shown = CliRunner().invoke(main, ["checkpoint", str(a)])
    assert shown.exit_code == 0 and "it lacks the optimizer's moments" in shown.output
    shown = CliRunner().invoke(main, ["checkpoint", str(a), str(b)])
    assert shown.exit_code == 0 and "1 differs" in shown.output
    (row,) = json.loads(CliRunner().invoke(main, ["checkpoint", str(a), str(b), "--json"]).output)
    assert row["verdict"] == "differs" and row["differing"] == 3
    (tmp_path / "m.bin").write_bytes(pickle.dumps(5))
    refused = CliRunner().invoke(main, ["checkpoint", str(tmp_path / "m.bin")])
    assert refused.exit_code == 2 and "pickle" in refused.output
