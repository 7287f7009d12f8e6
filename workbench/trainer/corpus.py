"""A file of tokens on disk: opened, described, verified, shown. Knows nothing of batches, models or MLX."""

import hashlib
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..errors import DataError


@dataclass(frozen=True, eq=False)
class Corpus:
    """A file of tokens, memory-mapped and read-only. Make one with `Corpus.open`.

    The suffix decides how the file is read: `.bin` is raw little-endian uint16 tokens, `.npy` a 1-D little-endian
    uint16 array, anything else bytes, each byte a token. The file must not change while it is mapped: `verify` tells.
    """

    path: Path
    tokens: np.ndarray  # (tokens,) uint8 or uint16, read-only
    kind: Literal["bytes", "uint16"]

    @classmethod
    def open(cls, path: str | Path) -> "Corpus":
        """Map the file at `path`. Raises DataError when it is missing, empty, or not what its suffix promises."""
        path = Path(path)
        suffix = path.suffix.lower()
        try:
            size = path.stat().st_size
            if size == 0 or not path.is_file():
                raise DataError(f"Corpus {path} is empty or no file; expected a file of tokens; give the path of one.")
            if suffix == ".npy":
                tokens = _map_npy(path)
            elif suffix == ".bin" and size % 2:
                raise DataError(
                    f"Corpus {path} has {size} bytes; expected an even number, as a .bin file holds uint16 tokens; "
                    "write it again, or rename it if its tokens are bytes."
                )
            else:
                tokens = np.memmap(path, dtype="<u2" if suffix == ".bin" else np.uint8, mode="r")
        except OSError as error:
            raise DataError(
                f"Corpus {path} cannot be read ({error.strerror}); expected a readable file of tokens; "
                "correct the path, or put the file back."
            ) from error
        # A plain array over the same mapping: slicing a memmap object costs several times as much.
        return cls(path, np.asarray(tokens), "uint16" if suffix in (".bin", ".npy") else "bytes")

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def vocabulary(self) -> int:
        """Number of token ids a model needs: 256 for bytes, else the largest id in the file + 1 (reads it once)."""
        # A reduction over the mapping streams: pages come in and go out again, no copy of the file is made.
        return 256 if self.kind == "bytes" else int(self.tokens.max()) + 1

    def describe(self) -> dict[str, Any]:
        """The file as a manifest records it: {"path": str, "bytes": int, "sha256": hex}. DataError if unreadable."""
        try:
            with self.path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                return {"path": str(self.path), "bytes": file.seek(0, 2), "sha256": digest}
        except OSError as error:
            raise DataError(
                f"Corpus {self.path} cannot be read ({error.strerror}); expected the file that was opened; "
                "put it back, or open the corpus again."
            ) from error

    def verify(self, description: Mapping[str, Any]) -> None:
        """Check that the file on disk is still the one of `description` (a `describe()`; its path may differ).

        Raises DataError with both sizes and digests if it is not, or with the expected ones if it cannot be read.
        """
        if not {"bytes", "sha256"} <= description.keys():
            raise DataError(
                f"The description of corpus {self.path} has the keys {sorted(description)}; "
                "expected bytes and sha256; take it from the run's manifest."
            )
        expected = f"{description['bytes']} bytes with sha256 {description['sha256']}"
        try:
            found = self.describe()
        except DataError as error:
            raise DataError(f"{error} The file had {expected}.") from error
        if (found["bytes"], found["sha256"]) != (description["bytes"], description["sha256"]):
            raise DataError(
                f"Corpus {self.path} has changed: found {found['bytes']} bytes with sha256 {found['sha256']}, "
                f"expected {expected}; put the original file back, or start a new run from this one."
            )

    def decode(self, tokens: Any) -> str:
        """Tokens (any integer array or sequence) as one line of text, for people: not reversible.

        Bytes are read as UTF-8, undecodable ones shown as U+FFFD and control characters as visible symbols (a line
        end as ␊). uint16 ids are listed: ⟨17⟩⟨403⟩. DataError if a token is no integer or out of the corpus's range.
        """
        ids = np.asarray(tokens).ravel()
        if ids.size == 0:
            return ""
        limit = 256 if self.kind == "bytes" else 65536
        if ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= limit:
            raise DataError(
                f"Tokens to decode are {ids.dtype} from {ids.min()} to {ids.max()}; expected integers from 0 to "
                f"{limit - 1} for {self.path}; pass tokens of this corpus."
            )
        if self.kind == "uint16":
            return "".join(f"⟨{token}⟩" for token in ids)
        return "".join(map(visible, ids.astype(np.uint8).tobytes().decode("utf-8", errors="replace")))


def _map_npy(path: Path) -> np.ndarray:
    try:
        # Not np.load: it also opens archives. This reads nothing but the .npy format, and never unpickles.
        tokens = np.lib.format.open_memmap(path, mode="r")
    except OSError:
        raise
    except Exception as error:  # on damaged headers numpy's parser raises nearly anything
        raise DataError(
            f"Corpus {path} is not a readable .npy file ({error}); expected a 1-D uint16 array; save it again with "
            "numpy.save."
        ) from error
    if tokens.ndim != 1 or tokens.dtype != np.dtype("<u2") or tokens.size == 0:
        raise DataError(
            f"Corpus {path} holds an array of {tokens.dtype.str} with shape {tokens.shape}; expected '<u2' (uint16) "
            "with one dimension and at least one token; convert it."
        )
    return tokens


def visible(character: str) -> str:
    """A character as it is shown to people: what can't be seen as a sign or a code point that can."""
    code = ord(character)
    if code < 32 or code == 127:
        return chr(0x2400 + code) if code < 32 else "\u2421"  # Unicode's own pictures of control characters
    # Invisible or direction-changing characters would make the shown text lie about the tokens.
    return f"⟨U+{code:04X}⟩" if unicodedata.category(character) in ("Cc", "Cf", "Zl", "Zp") else character
