"""The digest that each telemetry line carries of itself and of everything since the one before it.

A line ends with `,"seal":"<32 hexadecimal digits>"}`: XXH3-128 (https://xxhash.com) of the seal before it, of whatever
stands between the two lines (what a crash left of one), and of the line's own bytes up to that field. So a line that
was changed, dropped, doubled or moved contradicts its seal or the next. No key goes into it: whoever writes all lines
anew writes new seals, too. The first line with a seal covers itself only. Knows bytes.
"""

from __future__ import annotations

import re

import xxhash

_SEAL = re.compile(rb',"seal":"([0-9a-f]{32})"\}\Z')
_LENGTH = len(',"seal":""}') + 32  # bytes of what the pattern matches


class Chain:
    """The lines of one file, in order.

    Attributes:
        last: the seal of the last line that has one; None: none yet.
    """

    def __init__(self) -> None:
        self.last: bytes | None = None
        self._since = xxhash.xxh3_128()
        self._torn = False  # something stands after the last seal

    def sealed(self, line: bytes) -> bytes:
        """The line with its seal.

        Args:
            line: a JSON object that is not empty, without an end of line.
        """
        sealed, digest = self.next(line)
        self._begin(digest)
        return sealed

    def next(self, line: bytes) -> tuple[bytes, bytes]:
        """The line with its seal, and the seal, for `after`; the chain stays as it is. Argument as of `sealed`."""
        body, since = line[:-1], self._since.copy()
        since.update(body)
        digest = since.hexdigest().encode()
        return b'%b,"seal":"%b"}' % (body, digest), digest

    @staticmethod
    def after(seal: bytes) -> Chain:
        """The chain whose last line has this seal."""
        chain = Chain()
        chain._begin(seal)
        return chain

    def follow(self, raw: bytes) -> bool | None:
        """Takes the next line as it stands in a file, with its end if it has one.

        Returns:
            Whether its seal is that of these bytes; None: it has none.
        """
        line = raw[:-1] if raw.endswith(b"\n") else raw
        found = _SEAL.match(line, max(len(line) - _LENGTH, 0))
        if found is None:
            self.skip(raw)
            return None
        self._since.update(line[: found.start()])
        good = self._since.hexdigest().encode() == found[1]
        self._begin(found[1])
        return good

    def skip(self, raw: bytes) -> None:
        """Takes bytes that are no line with a seal."""
        if self.last is not None:
            self._since.update(raw)
            self._torn = True

    def end_line(self) -> None:
        """Takes the end of a line that a crash has cut off; a line with a seal covers what comes before its end."""
        if self._torn:
            self._since.update(b"\n")

    def _begin(self, seal: bytes) -> None:
        self.last, self._torn = seal, False
        self._since = xxhash.xxh3_128(seal)
