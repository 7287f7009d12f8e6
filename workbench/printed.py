"""What the command line prints. Names, tokens and sentences may come from files that someone sent: on a terminal they
must not move the cursor, clear the screen, set a title or hide themselves.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import shutil
import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click

# Control characters of both sets, and those that turn the direction of writing (Unicode's UAX 9) or break a line. Each
# could make the shown text lie; line ends and tabs are text.
_UNSAFE = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_BEYOND = re.compile("[^\0-\x7f]")


@contextlib.contextmanager
def printing() -> Iterator[None]:
    """Within: a character that a stream's encoding lacks is written as a backslash and its number, for "…" is no reason
    to say nothing at all on a terminal of another time. And warnings, which libraries make of any text, are printable.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(OSError, ValueError):  # closed
                stream.reconfigure(errors="backslashreplace")
    usual = warnings.formatwarning
    warnings.formatwarning = lambda *given, **more: printable(usual(*given, **more))
    try:
        yield
    finally:
        warnings.formatwarning = usual


def called() -> str:
    """How this command line was called, to begin a line that can be typed: `workbench`, where the shell finds that;
    else the path of the script, or the interpreter with -m."""
    script = Path(sys.argv[0])
    if script.parts[-2:] == ("workbench", "__main__.py"):
        return f"{shlex.quote(sys.executable)} -m workbench"
    found = shutil.which("workbench")
    if script.name != "workbench" or not script.is_file():
        return "workbench"
    return "workbench" if found is not None and Path(found).samefile(script) else shlex.quote(sys.argv[0])


def printable(text: str) -> str:
    """The text with a visible sign in place of each character that a terminal would obey: ␛ for the escape."""
    return _UNSAFE.sub(_visible, text)


def _visible(found: re.Match[str]) -> str:
    code = ord(found.group())
    if code < 32:
        return chr(0x2400 + code)
    return "␡" if code == 127 else f"⟨U+{code:04X}⟩"


def echo(text: Any = "", err: bool = False, nl: bool = True) -> None:
    """`click.echo` of printable text."""
    click.echo(printable(text.decode() if isinstance(text, bytes) else str(text)), err=err, nl=nl)


def echo_json(document: bytes | str) -> None:
    """Prints JSON. What a terminal would obey, or the stream's encoding lacks, stands in strings only, and is escaped
    there: no value changes."""
    text = _UNSAFE.sub(_escaped, document.decode() if isinstance(document, bytes) else document)
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        text = _BEYOND.sub(_escaped, text)
    click.echo(text)


def _escaped(found: re.Match[str]) -> str:
    """A character as JSON writes it in ASCII: one or two units of UTF-16."""
    units = found.group().encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))


def terminal(**settings: Any) -> Any:
    """A console of rich that prints printable text as it is (no markup), and leaves a broken pipe to the command."""
    from rich.console import Console
    from rich.segment import Segment

    class Plain(Console):
        def render_str(self, text: str, **settings: Any) -> Any:
            return super().render_str(printable(text), **settings)  # before rich drops some of it, or measures it

        def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
            for text, style, control in super().render(renderable, options):
                yield Segment(text if control else printable(text), style, control)

        def on_broken_pipe(self) -> None:  # rich would exit with 1, which means "not exact"
            raise BrokenPipeError

    return Plain(markup=False, emoji=False, **settings)
