"""What the README tells people to do works as it stands."""

import os
import re
import subprocess
import sys
from pathlib import Path

README = (Path(__file__).resolve().parent.parent / "README.md").read_text()


def python(*args, cwd):
    done = subprocess.run([sys.executable, *args], cwd=cwd, capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_ones_own_loop(tmp_path):
    (tmp_path / "my_loop.py").write_text(next(b for b in blocks("python") if "step_fn=step" in b))
    commands = next(b for b in blocks("console") if "my_loop" in b)
    python("my_loop.py", cwd=tmp_path)
    replay = re.search(r"workbench (replay .*)", commands).group(1).split()
    assert "is exact" in python("-m", "workbench", *replay, cwd=tmp_path)


def test_every_command_of_the_readme_exists():
    from workbench.cli import main

    named = set(re.findall(r"workbench (?=[a-z])([a-z-]+)", " ".join(blocks("console")))) | {"demo", "doctor", "bench"}
    assert named <= set(main.commands), named - set(main.commands)


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)
