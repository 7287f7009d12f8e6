"""The beginning of the command line. A Ctrl-C while it is still being loaded ends it with a line, as later."""

import os
import signal
from typing import Any


def main() -> Any:
    """What the command `workbench` calls."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # and nobody else's
        signal.signal(signal.SIGINT, _leave)
    from .cli import main as command_line

    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return command_line()


def _leave(number: int, frame: Any) -> None:
    os.write(2, b"workbench: interrupted\n")
    os._exit(128 + number)


if __name__ == "__main__":
    main()
