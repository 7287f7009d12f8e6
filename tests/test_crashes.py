"""The short version of `crashes.py`: real kills, full disks, lost power; in a process without threads, to be forked."""

import re
from pathlib import Path

from helpers import python


def test_nothing_is_lost_and_nothing_half_is_taken_for_whole():
    done = python(Path(__file__).with_name("crashes.py"), "--short")
    assert done.returncode == 0, done.stdout + done.stderr
    counted = {name: int(count) for count, name in re.findall(r"^ *(\d+)  (.*)$", done.stdout, re.MULTILINE)}
    assert counted["kills at a random moment"] >= 12 and counted["kills at a disk operation"] >= 14
    assert counted["power losses"] == 24 and counted["resumed to the same final bits"] >= 20
    assert counted["trainings that went on to their end"] >= 3
