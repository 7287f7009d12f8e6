"""Installs what `workbench bench suite` compares with, each in a virtual environment of its own.

    python tests/peers/install.py --to FOLDER                # all of them: about 3 GB
    python tests/peers/install.py --to FOLDER --only tables

Writes FOLDER/peers.json, which `workbench bench suite --peers FOLDER` reads: for each environment its interpreter, the
script that measures there, and what is installed. One that can't be installed is named, and the others are kept.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Pinned: a figure belongs to a version. PyPI's wheels of torch for Linux bring CUDA along, several GB; a CPU build is
# taken wherever pip is configured to find one.
TORCH = (("torch==2.13.0+cpu",), ("torch==2.13.0",))
ENVIRONMENTS = {
    "torch": ("torch_gpt.py", TORCH, ("numpy==2.4.6", "safetensors==0.8.0")),
    "loggers": (
        "torch_gpt.py",
        TORCH,
        ("numpy==2.4.6", "safetensors==0.8.0", "wandb==0.31.0", "tensorboard==2.21.0", "trainscope==1.8.1"),
    ),
    "flor": ("flor_gpt.py", TORCH, ("numpy==2.4.6", "safetensors==0.8.0", "flordb==4.0.1", "pandas==2.3.3")),
    "cockpit": (
        "cockpit_mlp.py",
        TORCH,
        ("numpy==2.4.6", "safetensors==0.8.0", "cockpit-for-pytorch==1.0.2", "setuptools<81"),
    ),
    "tables": (
        "read_lines.py",
        ((),),
        ("numpy==2.4.6", "pandas==3.1.1", "polars==2.1.0", "duckdb==2.0.1", "pyarrow==26.0.1"),
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--to", type=Path, required=True, help="the folder that holds the environments")
    parser.add_argument("--only", choices=ENVIRONMENTS, action="append", help="one environment; may be repeated")
    given = parser.parse_args()
    folder = given.to.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    known = folder / "peers.json"
    found = json.loads(known.read_text()) if known.exists() else {}
    failed = []
    for name in given.only or ENVIRONMENTS:
        script, frameworks, packages = ENVIRONMENTS[name]
        print(f"{name}: {', '.join(packages)}", flush=True)
        python = _environment(folder / name)
        if not any(_installed(python, [*framework, *packages]) for framework in frameworks):
            failed.append(name)
            continue
        found[name] = {"python": str(python), "script": str(HERE / script), "versions": _versions(python)}
        known.write_text(json.dumps(found, indent=2) + "\n")
    if failed:
        print(f"not installed: {', '.join(failed)}; pip says why, above", file=sys.stderr)
    return 1 if failed else 0


def _environment(folder: Path) -> Path:
    python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    return python


def _installed(python: Path, requirements: list[str]) -> bool:
    command = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *requirements]
    return subprocess.run(command).returncode == 0


def _versions(python: Path) -> dict[str, str]:
    command = [str(python), "-m", "pip", "list", "--format", "json", "--disable-pip-version-check"]
    listed = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return {entry["name"].lower(): entry["version"] for entry in listed}


if __name__ == "__main__":
    sys.exit(main())
