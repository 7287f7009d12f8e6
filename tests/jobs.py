"""Work for other processes. Each of them imports this module, so it imports next to nothing."""

import os
import signal
import time
from pathlib import Path


def double(number):
    if number < 0:
        raise ValueError(f"{number} is negative")
    return 2 * number


def die(number):
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def die_once(place):
    if not Path(place).exists():
        Path(place).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return "done"


def die_at_checkpoint_0(group):
    from workbench.many import performed

    if group.checkpoint == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return performed(group)


def sleep(place):
    Path(place, str(os.getpid())).touch()
    time.sleep(60)
