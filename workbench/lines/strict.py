"""The strict reader: one line of telemetry after another, none dropped in silence, each damaged one named.

It decides what a file says. Faster ways of reading (`quick`) stand in for it only where they give what it gives.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import msgspec

from ..errors import TelemetryError
from ..untrusted import LINE, refuse_ambiguous
from .further import further_damage
from .line import Line

_DECODER = msgspec.json.Decoder(Line)


class StrictReader:
    """Args:
        number: how many lines of the file were read before.

    Attributes:
        number: of the line that was fed last, counted from 1.
        notices: what had to be tolerated.
    """

    def __init__(self, path: Path, number: int = 0) -> None:
        self.path, self.number = path, number
        self.notices: list[str] = []
        self._damaged: list[_Damaged] = []  # the lines before the next one that could not be read

    @property
    def pending(self) -> bool:
        """Whether it depends on what follows if the lines before are an error."""
        return bool(self._damaged)

    def feed(self, raw: bytes) -> Line | None:
        """Reads the next line, given with its line end if it has one; None for a blank line and for a damaged one.

        Raises:
            TelemetryError: the damaged line before it is not excused by this one, or it is longer than any of ours.
        """
        self.number += 1
        if len(raw) > LINE:
            raise TelemetryError(
                f"{self.path}, line {self.number}: more than {LINE} bytes long; expected one JSON object a line. "
                "Put the file back from a copy: without that line no replay passes its step."
            )
        if not raw.strip():
            return None
        try:
            line = decode(raw)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            if self._damaged and not self._damaged[-1].unfinished:
                raise self._damaged[0].error(self.path) from error
            self._damaged.append(_Damaged(self.number, raw, str(error)))
            return None
        if self._damaged:
            if line.torn_bytes != len(b"".join(one.raw for one in self._damaged).removesuffix(b"\n")):
                raise self._damaged[0].error(self.path)
            self._excuse()
        return line

    def finish(self) -> None:
        """The file ends here.

        Raises:
            TelemetryError: its last line is damaged, and is no unfinished one.
        """
        if not all(one.unfinished for one in self._damaged):  # a whole line that is wrong is not an unfinished one
            raise self._damaged[0].error(self.path)
        self._excuse()

    def _excuse(self) -> None:
        self.notices += [one.notice(self.path) for one in self._damaged]
        self._damaged = []


def decode(raw: bytes) -> Line:
    """One line, typed and checked.

    Raises:
        msgspec.MsgspecError, ValueError, RecursionError: it is not a line of telemetry.
    """
    line = _DECODER.decode(raw.rstrip(b"\r\n"))
    line.check()
    refuse_ambiguous(raw)
    return line


class _Damaged(NamedTuple):
    number: int
    raw: bytes
    reason: str

    @property
    def unfinished(self) -> bool:
        """Whether it is the beginning of an object, and the parser found fault with nothing but its end.

        Some file systems fill up with zeros what had not reached the disk when the power failed.
        """
        line, reason = self.raw.rstrip(b"\r\n"), self.reason
        text = line.rstrip(b"\0")
        if not text:
            return True
        if len(text) < len(line):
            try:
                decode(text)
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                reason = str(error)
            else:
                return True  # only the end of the line did not reach the disk
        cut = "truncated" in reason or reason.endswith(f"(byte {len(text)})")
        return text.startswith(b"{") and cut and not _is_whole(text)

    def error(self, path: Path) -> TelemetryError:
        return TelemetryError(
            f"{path}, line {self.number}: not a telemetry line ({self.reason}); expected one JSON object such as "
            '{"type": "step", "step": 5, "loss": 2.1}. Put the file back from a copy: without that line no replay '
            "passes its step." + further_damage(path, self.number, _readable)
        )

    def notice(self, path: Path) -> str:
        return f"{path.name}, line {self.number}: unfinished ({len(self.raw)} bytes), as a crash leaves it; not read"


def _readable(raw: bytes) -> bool:
    try:
        decode(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return False
    return True


def _is_whole(text: bytes) -> bool:
    """Whether it is a whole object to a more lenient parser: half of a surrogate pair, too, is "truncated" to ours."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def refuse_other_encodings(path: Path, start: bytes) -> None:
    """Args:
        start: the first bytes of the file.

    Raises:
        TelemetryError: they are not the beginning of UTF-8 text without a byte-order mark.
    """
    for mark, encoding in _MARKS.items():
        if start.startswith(mark):
            raise TelemetryError(
                f"{path} is in {encoding}; expected UTF-8 without a byte-order mark, as it was written. An editor or a "
                "shell may have saved it anew: put the original back, or convert it."
            )


_MARKS = {
    b"\xef\xbb\xbf": "UTF-8 with a byte-order mark",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
    b"{\0": "UTF-16",
    b"\0{": "UTF-16",
}
