"""The files that a fine-tuning job reads, pinned by content, and a folder that holds these and nothing else.

A loader that is handed a folder takes whatever it finds there: a file added later would change the model or the tokens
without a word. So the loader is handed links to the pinned files, while recording as in a replay.
Knows folders; nothing of MLX or mlx-lm's models.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import DataError, ExperimentError
from ..manifest import DataFile
from ..trainer.corpus import Corpus

MODEL, DATA, ADAPTER = "model", "data", "resume_adapter_file"
# What mlx-lm takes from a model's folder, but for code.
_MODEL_FILES = (
    *("*.json", "model*.safetensors", "tokenizer.model", "*.tiktoken", "*.txt", "*.jsonl", "*.jinja"),
    "additional_chat_templates/*.jinja",
)


def pin(settings: Mapping[str, Any]) -> tuple[list[str], list[DataFile]]:
    """The files of a job: the name of each below the folder that `linked` makes, and its size and digest.

    Raises:
        ExperimentError: the model or the data is not a folder here, or lacks what is needed.
        DataError: a file can't be read.
    """
    model, data = model_folder(settings["model"]), Path(settings["data"]).expanduser()
    if not data.is_dir():
        raise ExperimentError(
            f"data is {settings['data']}, which is no folder here; expected one with train.jsonl (and valid.jsonl, "
            "test.jsonl): data on a server may change, so save it as such files first"
        )
    found = {f"{MODEL}/{path.relative_to(model)}": path for pattern in _MODEL_FILES for path in model.glob(pattern)}
    for wanted, pattern in (("its configuration", "config.json"), ("weights", "model*.safetensors")):
        if not any(model.glob(pattern)):
            raise ExperimentError(f"the model folder {model} lacks {wanted} ({pattern}); expected a model of mlx-lm")
    parts = ("train", "valid", "test") if settings["test"] else ("train", "valid")
    found |= {f"{DATA}/{part}.jsonl": data / f"{part}.jsonl" for part in parts}
    if settings["resume_adapter_file"] is not None:
        found[ADAPTER] = Path(settings["resume_adapter_file"]).expanduser()
        if not found[ADAPTER].is_file():
            raise ExperimentError(f"resume_adapter_file is {found[ADAPTER]}, and there is no such file")
    if not found[f"{DATA}/train.jsonl"].is_file():
        raise ExperimentError(f"the data folder {data} lacks train.jsonl; expected one JSON object a line")
    # An empty file holds nothing to pin, and mlx-lm fails on one.
    names = sorted(name for name, path in found.items() if path.is_file() and path.stat().st_size)
    return names, [DataFile(**Corpus.open(found[name].absolute()).describe()) for name in names]


def model_folder(model: str) -> Path:
    """The folder of a model: a path, or a repository that the Hugging Face cache of this machine holds.

    Raises:
        ExperimentError: it is neither. Nothing is downloaded.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    from .settings import mlx_lm

    try:
        return Path(mlx_lm("utils").hf_repo_to_path(model))
    except Exception as error:  # of huggingface_hub, which has many
        raise ExperimentError(
            f"model is {model}, which is no folder here and not in the Hugging Face cache ({type(error).__name__}); "
            f"expected a model of mlx-lm; download it first: hf download {model}"
        ) from error


@contextmanager
def linked(names: Sequence[str], files: Sequence[Path]) -> Iterator[Path]:
    """A temporary folder with links to the files, under their names; removed at the end.

    Raises:
        DataError: there is not a file for each name, or a name leads out of the folder.
    """
    if len(names) != len(files) or len(set(names)) != len(names):
        raise DataError(
            f"the manifest names {len(files)} data files and {len(names)} places for them; expected as many"
        )
    with tempfile.TemporaryDirectory(prefix="workbench-mlx-lm-") as temporary:
        folder = Path(temporary)
        for name, file in zip(names, files, strict=True):
            parts = Path(name).parts
            if parts[:1] not in ((MODEL,), (DATA,), (ADAPTER,)) or ".." in parts or name.endswith(".py"):
                raise DataError(f"the manifest names the place {name!r} for a data file; expected none like it")
            place = folder / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(file.absolute())
        yield folder
