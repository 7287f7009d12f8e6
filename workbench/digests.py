"""Digests of bytes as they pass: SHA-256 and XXH3-128, here or by a thread beside whoever writes or reads them.

XXH3-128 (xxHash 0.8, https://xxhash.com) notices what goes wrong, at memory speed; it is not cryptographic. Knows bytes
and threads; nothing of files, checkpoints or MLX.
"""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import xxhash

SHA256, XXH3 = "sha256", "xxh3"
NAMES = {SHA256: "SHA-256", XXH3: "XXH3-128"}
BOTH = (SHA256, XXH3)
STRETCH = 1 << 18  # bytes hashed in turn by each: a core's cache holds them, and hashing them lets other threads run
LONG = 1 << 20  # bytes: for less, a thread is not worth it
_WAITING = 64  # stretches handed over and not yet hashed: a writer is far ahead, and what it had to copy is held

_MAKERS: dict[str, Callable[[], Hash]] = {SHA256: hashlib.sha256, XXH3: xxhash.xxh3_128}


class Hash(Protocol):
    def update(self, data: Any, /) -> None: ...

    def hexdigest(self) -> str: ...


class Digests:
    """The digests of the bytes handed over so far, in their order.

    Args:
        kinds: which, of `BOTH`.
    """

    def __init__(self, kinds: tuple[str, ...] = BOTH) -> None:
        self._hashes = {kind: _MAKERS[kind]() for kind in kinds}

    def update(self, content: bytes | memoryview) -> None:
        view = memoryview(content)
        for start in range(0, len(view), STRETCH):
            for one in self._hashes.values():
                one.update(view[start : start + STRETCH])

    def found(self) -> dict[str, str]:
        """In hexadecimal, by kind."""
        return {kind: one.hexdigest() for kind, one in self._hashes.items()}


def of(content: bytes | memoryview, kinds: tuple[str, ...] = BOTH) -> dict[str, str]:
    """The digests of bytes, in hexadecimal, by kind."""
    digests = Digests(kinds)
    digests.update(content)
    return digests.found()


def unlike(found: Mapping[str, str], expected: Mapping[str, str]) -> tuple[str, str, str] | None:
    """A digest that is not as expected, SHA-256 first: its name, what it is, what it should be; None: all agree."""
    for kind in BOTH:
        if kind in expected and found.get(kind, expected[kind]) != expected[kind]:
            return NAMES[kind], found[kind], expected[kind]
    return None


class Beside:
    """`Digests` taken by a thread, where there is enough to hash: neither hashing nor writing a file needs the
    interpreter. What is handed over must not change until `found` returns.

    As a context manager, it leaves no thread behind.

    Args:
        size: bytes that are to come, if that is known.
    """

    def __init__(self, size: int = 0) -> None:
        self._digests = Digests()
        self._waiting: queue.Queue[bytes | memoryview | None] = queue.Queue(_WAITING)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._size = size

    def __enter__(self) -> Beside:
        return self

    def __exit__(self, *exception: object) -> None:
        self._end()

    def update(self, content: bytes | memoryview) -> None:
        if self._thread is None and max(self._size, len(content)) >= LONG:
            self._thread = started(self._run)
        if self._thread is None:
            self._digests.update(content)
        else:
            self._waiting.put(content)

    def found(self) -> dict[str, str]:
        """Of all that was handed over; nothing may be after it."""
        self._end()
        if self._error is not None:
            raise self._error
        return self._digests.found()

    def _end(self) -> None:
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (content := self._waiting.get()) is not None:
            try:
                if self._error is None:
                    self._digests.update(content)
            except BaseException as error:  # belongs to whoever asks for the result
                self._error = error


def started(work: Callable[[], object]) -> threading.Thread | None:
    """A thread that does something; None: the system gives no more, or the interpreter is about to end."""
    thread = threading.Thread(target=work, name="workbench-beside", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return None
    return thread
