"""Rehearse gpu.sh without a GPU, with the versions of a bare GPU machine: benchmarks/rehearsal.py FOLDER

Makes FOLDER/venv from rehearsal.txt (Python 3.12, torch built for CUDA: 6 GB) and a clone of this checkout
with the wheels that gpu.sh brings along. There: runs of launch/train.py, tests of what a GPU computes (those
that need one are skipped), and `gpu.sh first` and `second`. It prints the time of each part.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
REQUIREMENTS = REPOSITORY / "benchmarks" / "rehearsal.txt"
TAGS = ["manylinux_2_17_x86_64", "manylinux_2_24_x86_64", "manylinux_2_28_x86_64"]
TARGET = ["--only-binary=:all:", "--python-version", "3.12", *(f"--platform={tag}" for tag in TAGS)]
BROUGHT = ["pydantic", "xxhash"]
BROUGHT_ALONE = ["transformers>=5.23", "liger-kernel", "torchao>=0.18,<0.19"]
BUILT = ["deepspeed>=0.19.8,<0.20", "hjson"]
PARTS = ["train", "tests", "first", "second"]


class Rehearsal:
    """Runs commands in the environment of the bare machine, and keeps which of them failed."""

    def __init__(self, folder: Path):
        self.python = folder / "venv" / "bin" / "python"
        self.tree = folder / "tree"
        self.failed: list[str] = []
        self._variables = {
            "PATH": os.pathsep.join([str(self.python.parent), os.environ["PATH"]]),
            "PYTHONPATH": os.pathsep.join([str(self.tree), str(self.tree / ".site")]),
            "PYTHON": str(self.python),
            "OUT": str(folder / "out"),
            "HF_HUB_OFFLINE": "1",
            "TINY": "1",
        }

    def run(self, name: str, *command: str | Path) -> None:
        """Run one part; its output goes to this process's."""
        print(f"=== {name}: {' '.join(map(str, command))}", flush=True)
        start = time.monotonic()
        done = subprocess.run(command, cwd=self.tree, env=os.environ | self._variables, check=False)
        how = "ended" if done.returncode == 0 else f"failed with {done.returncode}"
        print(f"=== {name} {how} after {time.monotonic() - start:.0f} s", flush=True)
        if done.returncode != 0:
            self.failed.append(name)


def install(folder: Path, python: str) -> None:
    """Make the environment, the clone and its wheels, as far as they are not there."""
    pip = [folder / "venv" / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "-q"]
    mark = folder / "venv" / REQUIREMENTS.name
    if not mark.exists() or mark.read_text() != REQUIREMENTS.read_text():
        subprocess.run([python, "-m", "venv", folder / "venv"], check=True)
        subprocess.run([*pip, "install", "-r", REQUIREMENTS], check=True)
        mark.write_text(REQUIREMENTS.read_text())
    tree = folder / "tree"
    if not tree.exists():
        subprocess.run(["git", "clone", "-q", REPOSITORY, tree], check=True)
    subprocess.run(["git", "-C", tree, "pull", "-q"], check=True)
    wheels = ["-d", tree / ".whl"]
    if not (tree / ".whl").exists():
        built = ["wheel", "--no-deps", "--no-build-isolation", *BUILT, "-w", tree / ".whl"]
        subprocess.run([*pip, *built], check=True)
        subprocess.run([*pip, "download", *TARGET, *BROUGHT, *wheels], check=True)
        subprocess.run([*pip, "download", *TARGET, "--no-deps", *BROUGHT_ALONE, *wheels], check=True)
    site = ["install", "--no-index", "--no-deps", "--upgrade", "--target", tree / ".site"]
    subprocess.run([*pip, *site, *sorted((tree / ".whl").glob("*.whl"))], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where the environment is made, or was")
    parser.add_argument("--python", default="python3.12", help="Python 3.12 of this machine")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    install(folder, arguments.python)
    rehearsal = Rehearsal(folder)
    parts = arguments.parts
    if "train" in parts:
        rehearsal.run("train", rehearsal.python, "launch/train.py", "max_steps=3")
        zero = ["--deepspeed", "ds_configs/zero2.json", "max_steps=3"]
        rehearsal.run("train, ZeRO 2", rehearsal.python, "launch/train.py", *zero)
    if "tests" in parts:
        tests = [
            "tests/gpu",
            "tests/engine/test_fake_cuda.py",
            "tests/objectives/test_fused_loss.py",
            "tests/models/test_document_attention.py",
        ]
        rehearsal.run("tests", rehearsal.python, "-m", "pytest", "-q", *tests, "-m", "not nightly")
    for part in ("first", "second"):
        if part in parts:
            rehearsal.run(f"gpu.sh {part}", "bash", "benchmarks/gpu.sh", part)
    print("failed: " + (", ".join(rehearsal.failed) or "nothing"))
    return 1 if rehearsal.failed else 0


if __name__ == "__main__":
    sys.exit(main())
