"""Tensors that did not change since the checkpoint before are stored once: later ones name the place of their bytes.

Whether one changed is decided by its bytes, compared with those on the disk: no hash is trusted, nothing has to be
remembered, and a damaged file is not relied on. What several checkpoints have in common stands in shared files, beside
them: a hard link to a file that stays in any case, or, where thinning will remove that, a copy of what did not change,
written once. A shared file goes with the last commit record that names it. Knows arrays and files; nothing of states.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import mlx.core as mx
import msgspec

from . import digests, tensor_file
from .digests import SHA256, XXH3
from .files import discard, temporary_beside, write_flushed
from .hashed_file import Room
from .tensor_file import HostArray
from .tensor_places import Place, is_shared, tensors_in
from .untrusted import open_regular, read_file

LEAST = 1 << 14  # bytes: for smaller tensors, their place in the commit record (some 250 bytes) is not worth it
_FIRST, _STRETCH = 1 << 12, 1 << 20  # bytes compared at first, which nearly every changed tensor fails, and then

T = TypeVar("T", bound=mx.array | HostArray)


@dataclass(frozen=True)
class Earlier:
    """A part (weights, optimizer state) of an earlier checkpoint.

    Attributes:
        own: its file's name.
        sha256: of that file.
        taken: what it has elsewhere, by path.
        lasts: thinning will not remove it.
    """

    own: str
    sha256: str
    taken: Mapping[str, Place]
    lasts: bool


def split(folder: Path, earlier: Earlier, arrays: Mapping[str, T]) -> tuple[dict[str, T], dict[str, Place]]:
    """The arrays that changed, which have to be written, and where the others stand: in files that are durable once
    the folder is synced.

    Whatever can't be read or linked counts as changed: then it is written again.

    Raises:
        OSError: a shared file can't be written.
    """
    changed, taken, still = dict(arrays), dict[str, Place](), dict[str, Place]()
    places = _places(folder, earlier)
    with contextlib.ExitStack() as stack:
        files: dict[str, int | None] = {}
        for path in sorted(arrays.keys() & places.keys()):
            array, place = arrays[path], places[path]
            if array.nbytes < LEAST or (place.dtype, place.shape) != _kind(array):
                continue
            if place.file not in files:
                files[place.file] = _opened(stack, folder / place.file)
            if not _same(files[place.file], place.start, _bytes_of(array)):
                continue
            if place.file == earlier.own:
                still[path] = place
            else:
                taken[path] = place
    if still and earlier.lasts:
        taken |= _linked(folder, earlier, still, arrays)
    elif still:
        taken |= _copied(folder, {path: arrays[path] for path in still})
    for path in taken:
        del changed[path]
    return changed, taken


def _places(folder: Path, earlier: Earlier) -> dict[str, Place]:
    """Where an earlier checkpoint has its tensors; the digests of those in its own file are not known."""
    try:
        own = tensors_in(folder / earlier.own)
    except (OSError, ValueError):
        own = {}
    found = {
        path: Place(earlier.own, start, one.data_offsets[1] - one.data_offsets[0], "", one.dtype, tuple(one.shape))
        for path, (start, one) in own.items()
    }
    return found | dict(earlier.taken)


def _linked(folder: Path, earlier: Earlier, still: Mapping[str, Place], arrays: Mapping[str, Any]) -> dict[str, Place]:
    """Gives the file a second name, which no later checkpoint of the same step can take from it."""
    name = f"shared-{earlier.sha256}.safetensors"
    try:
        os.link(folder / earlier.own, folder / name)
    except FileExistsError:
        pass  # as its name says, of the same bytes; each tensor's are verified when they are read
    except OSError:  # a file system without such links
        return {}
    there = os.stat(folder / name)
    if not os.path.samestat(there, os.stat(folder / earlier.own)):  # the run was copied, or this is an earlier twin
        with contextlib.ExitStack() as stack:
            file = _opened(stack, folder / name)
            still = {path: one for path, one in still.items() if _same(file, one.start, _bytes_of(arrays[path]))}
    return {
        path: msgspec.structs.replace(place, file=name, **digests.of(_bytes_of(arrays[path])))
        for path, place in still.items()
    }


def _copied(folder: Path, arrays: dict[str, Any]) -> dict[str, Place]:
    temporary = temporary_beside(folder / "shared.safetensors")
    try:
        digest = write_flushed(temporary, tensor_file.chunks("shared.safetensors", arrays)).sha256
        found = tensors_in(temporary)
        name = f"shared-{digest}.safetensors"
        os.replace(temporary, folder / name)
    except BaseException:
        discard(temporary)
        raise
    places = dict[str, Place]()
    for path, (start, one) in found.items():
        content = _bytes_of(arrays[path])
        both = digests.of(content)
        places[path] = Place(name, start, len(content), both[SHA256], one.dtype, tuple(one.shape), both[XXH3])
    return places


def contents(
    folder: Path, places: Mapping[str, Place], *, thorough: bool = False
) -> Iterator[tuple[str, Place, memoryview]]:
    """The verified bytes of each tensor, which last until the next, in the order in which they stand on the disk.

    Args:
        thorough: all their digests are verified, not only the one that is fastest to verify.

    Raises:
        OSError: a file can't be read.
        ValueError: a file is cut off, or the bytes are not those that were committed. The message names the tensor.
    """
    with contextlib.ExitStack() as stack:
        files: dict[str, BinaryIO] = {}
        room = Room()
        for path, place in sorted(places.items(), key=lambda one: (one[1].file, one[1].start)):
            if place.file not in files:
                files[place.file] = stack.enter_context(open_regular(folder / place.file))
            hashed = digests.Digests(tuple(place.digests(thorough)))
            content = room.filled(files[place.file], place.start, place.bytes, hashed)
            if len(content) < place.bytes:
                raise ValueError(
                    f"{path} should end at byte {place.start + place.bytes} of {folder / place.file}, which ends "
                    f"at {place.start + len(content)}: it was cut off or replaced"
                )
            if hashed.found() != place.digests(thorough):
                raise ValueError(_changed(folder / place.file, path, place, content))
            yield path, place, content


def _changed(file: Path, path: str, place: Place, content: memoryview) -> str:
    kind, found, expected = digests.unlike(digests.of(content), place.digests(thorough=True)) or ("", "", "")
    return f"{file} was changed: the {kind} of {path} in it is {found}, expected {expected}"


class _Listing(msgspec.Struct):
    taken: dict[str, dict[str, Place]] = {}


def collect(folder: Path) -> None:
    """Removes the shared files that no commit record names; none if a record can't be read.

    Raises:
        OSError: one can't be removed.
    """
    shared = {path.name for path in folder.glob("shared-*.safetensors") if is_shared(path.name)}
    if not shared:
        return
    try:
        shared -= set(named(read_file(path) for path in folder.glob("*.json")))
    except (OSError, ValueError):
        return
    for name in shared:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(folder / name)


def named(records: Iterable[bytes]) -> Iterator[str]:
    """The shared files that commit records name.

    Raises:
        ValueError: one is damaged.
    """
    for record in records:
        if b'"taken"' in record:
            for places in msgspec.json.decode(record, type=_Listing).taken.values():
                yield from (place.file for place in places.values())


def _opened(stack: contextlib.ExitStack, path: Path) -> int | None:
    try:
        return stack.enter_context(open_regular(path)).fileno()
    except OSError:
        return None


def _kind(array: Any) -> tuple[str | None, tuple[int, ...]]:
    return tensor_file.TYPES.get(array.dtype), tuple(array.shape)


def _bytes_of(array: mx.array | HostArray) -> memoryview:
    return tensor_file.bits_of(array).reshape(-1).data.cast("B")


def _same(file: int | None, start: int, content: memoryview) -> bool:
    """Whether a file has these bytes from `start` on."""
    if file is None:
        return False
    done, stretch = 0, _FIRST
    while done < len(content):
        ours = content[done : done + stretch]
        try:
            theirs = os.pread(file, len(ours), start + done)
        except OSError:
            return False
        if theirs != bytes(ours):
            return False
        done, stretch = done + len(ours), _STRETCH
    return True
