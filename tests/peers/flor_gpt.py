"""FlorDB on the problem that `workbench bench suite` gives: a log of every gradient's norm each step, and hindsight.

python flor_gpt.py serve PROBLEM    # answers requests; see serve.py
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from gpt import Training, read_problem
from serve import seconds, serve, turns

HERE = Path(__file__).resolve().parent
QUESTION = 'flor.log("gradient_norm", torch.nn.utils.clip_grad_norm_(training.model.parameters(), 1e9).item())'
STEP = ("epoch=2", "step=2")  # which step is asked for: the 13th of 15


def repository(folder, problem):
    """A new git repository with the script, as FlorDB needs one."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shutil.copy(problem, folder / "problem.json")
    shutil.copy(HERE / "gpt.py", folder)
    shutil.copy(HERE / "flor_train.py", folder / "train.py")
    (folder / ".gitignore").write_text("__pycache__\n*.pt\n")
    for command in (
        ("init", "-q", "-b", "main"),
        ("config", "user.email", "peer@example.org"),
        ("config", "user.name", "peer"),
        ("add", "."),
        ("commit", "-q", "-m", "the script"),
    ):
        subprocess.run(["git", *command], check=True, stdout=sys.stderr, cwd=folder)
    return folder


class Peer:
    def __init__(self, path):
        self.path, self.problem = path, read_problem(path)
        self.variants = {}

    def prepare(self, names):
        os.chdir(repository(Path(self.problem["scratch"]) / "flor-logs", self.path))  # it works in the one around it
        import flordb as flor

        plain, logged = Training(self.problem), Training(self.problem)

        def step():
            loss = logged.backward()
            for name, parameter in logged.model.named_parameters():
                flor.log(name, parameter.grad.norm().item())
            logged.update()
            flor.log("loss", loss.item())

        makers = {"plain": plain.step, "control": plain.step, "FlorDB": step}
        self.variants = {name: makers[name] for name in names}
        for perform in self.variants.values():
            perform()
        return {"variants": names, "failed": {}}

    def steps(self, rounds, burst, first=0):
        return {"times": turns(self.variants, rounds, burst, first)}

    def hindsight(self):
        """Trains with the loss logged; then asks for a gradient norm of a past step, and times the answer."""
        folder = repository(Path(self.problem["scratch"]) / "flor-hindsight", self.path)
        self._run(folder, "train.py")
        script = folder / "train.py"
        script.write_text(script.read_text().replace("# hindsight", QUESTION))
        ask = ["-m", "flordb", "replay", "--apply", "gradient_norm"]
        ask += [word for one in STEP for word in ("--iter", one)]
        return {"seconds": seconds(lambda: self._run(folder, *ask))}

    def _run(self, folder, *arguments):
        command = [sys.executable, *arguments]
        # It calls the interpreter of a replay by the name `python`.
        variables = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
        how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "input": "y\n"}
        done = subprocess.run(command, cwd=folder, env=variables, **how)
        print(done.stdout, file=sys.stderr)
        if done.returncode or "no rows recorded" in done.stdout:
            raise RuntimeError(f"{' '.join(arguments[:3])} ended with {done.returncode}: {done.stdout.strip()[-200:]}")


if __name__ == "__main__":
    peer = Peer(sys.argv[2])
    serve({name: getattr(peer, name) for name in ("prepare", "steps", "hindsight")})
