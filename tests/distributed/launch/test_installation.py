"""Installing a clone and training: under a path with a space, and with every promised Python."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from support.launch import DIGITS, ROOT, make_environment, write_recipe

MADE_HERE = (".git", ".venv", "runs", "build", "*.egg-info", "__pycache__", ".*_cache", "wandb")


@pytest.fixture
def clone(tmp_path) -> Path:
    """The project in a folder whose name a shell would take for two, and which is not ASCII."""
    clone = tmp_path / "a b" / "ü" / "clone"
    shutil.copytree(ROOT, clone, ignore=shutil.ignore_patterns(*MADE_HERE))
    return clone


def run(clone: Path, *words: str) -> str:
    """Its stdout; this test's own environment does not reach it."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    result = subprocess.run(
        words,
        cwd=clone,
        env=inherited | {"PATH": f"{clone}/.venv/bin:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=3000,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def train_one_step(clone: Path, *options: str) -> None:
    """The clone trains by `make train`, and on two ranks."""
    recipe = write_recipe(clone.parent, max_steps=1, **DIGITS)
    given = f"--config '{recipe}' checkpoint.resume=never"
    assert "1/1  loss" in run(clone, "make", "train", f"ARGS={given}", *options)
    split = ("--deepspeed", "ds_configs/zero2.json", *shlex.split(given))
    assert "1/1  loss" in run(clone, "launch/multi_gpu.sh", "--num_gpus", "2", *split)


@pytest.fixture
def installed(tmp_path) -> Path:
    """A folder that the project's wheel was installed into, without its dependencies."""
    source = tmp_path / "source"
    wheels = tmp_path / "wheels"
    target = tmp_path / "target"
    left_out = shutil.ignore_patterns(*MADE_HERE, "tests", "docs", "benchmarks")
    shutil.copytree(ROOT, source, symlinks=True, ignore=left_out)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(tmp_path, *pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(wheels), str(source))
    (wheel,) = wheels.glob("*.whl")
    shutil.rmtree(source)
    run(tmp_path, *pip, "install", "-q", "--no-deps", "--no-index", "--target", str(target), str(wheel))
    return target


@pytest.mark.slow
def test_a_wheel_plans_and_trains_by_names_from_an_empty_folder(installed, tmp_path):
    """Its command and its files are all there is: no clone, no folder of the user's."""
    here = tmp_path / "empty"
    here.mkdir()
    imported = make_environment(PYTHONPATH=str(installed))

    def say(*words: str) -> str:
        done = subprocess.run(words, cwd=here, env=imported, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    script = str(installed / "bin" / "ds-pipeline")
    assert "Memory of the fullest rank" in say(
        script, "plan", "--deepspeed", "zero3", "--gpu", "h100", "--gpus", "8"
    )
    assert list(here.iterdir()) == []
    named = ("--config", "digits_cnn", "--deepspeed", "zero2.json", "max_steps=2", "wandb.mode=disabled")
    assert f"# recipe ({installed}/pipeline/config/shipped/launch/recipes/digits_cnn.yaml" in say(
        sys.executable, "-m", "pipeline", "train", "--dry-run", *named
    )
    assert list(here.iterdir()) == []
    assert "2/2  loss" in say(script, "train", *named)
    assert [path.name for path in here.iterdir()] == ["runs"]
    tasks = {path.name for path in (installed / "pipeline" / "evaluation" / "tasks").iterdir()}
    assert tasks >= {path.name for path in (ROOT / "pipeline" / "evaluation" / "tasks").glob("*.*")}
    assert os.access(installed / "pipeline" / "config" / "shipped" / "launch" / "multi_gpu.sh", os.X_OK)


@pytest.mark.parametrize(
    ("folder", "python", "reason"),
    [
        ("a$b", sys.executable, "a$b holds $, with which programs in .venv do not start; move the folder"),
        ("old", "old", "old is Python 3.10; 3.11 to 3.14 have a build of the pinned torch"),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_installed(tmp_path, folder, python, reason):
    clone = tmp_path / folder
    clone.mkdir()
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, clone)
    if python == "old":
        stand_in = tmp_path / "bin-old"
        code = "import sys; sys.version_info = (3, 10, 13); exec(sys.argv[1])"
        stand_in.write_text(f"#!/bin/sh\nexec '{sys.executable}' -c '{code}' \"$2\"\n")
        stand_in.chmod(0o755)
        python = str(stand_in)
    before = sorted(clone.iterdir())
    made = subprocess.run(
        ["make", "setup", f"PYTHON={python}"], cwd=clone, capture_output=True, text=True, check=False
    )
    assert made.returncode == 2
    assert reason in made.stderr
    assert sorted(clone.iterdir()) == before


PROMISED = ("3.11", "3.12", "3.13", "3.14")


def find_python(version: str) -> str | None:
    """One that runs: a shim of pyenv may be there and not."""
    pyenv = sorted(Path("~/.pyenv/versions").expanduser().glob(f"{version}.*/bin/python"))
    names = [Path(sys.base_prefix) / "bin" / f"python{version}", *pyenv, f"python{version}"]
    for python in filter(None, map(shutil.which, names)):
        tried = subprocess.run([python, "-c", "import venv"], capture_output=True, check=False)
        if tried.returncode == 0:
            return python
    return None


def test_the_promise_is_the_same_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["requires-python"] == f">={PROMISED[0]}"
    assert project["tool"]["ruff"]["target-version"] == f"py{PROMISED[0].replace('.', '')}"
    assert project["tool"]["mypy"]["python_version"] == PROMISED[0]
    for name in ("README.md", "Makefile"):
        assert f"{PROMISED[0]} to {PROMISED[-1]}" in (ROOT / name).read_text()


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("version", PROMISED)
def test_every_python_that_is_promised_installs_and_trains(clone, version):
    """`make train` itself, with the pinned packages."""
    python = find_python(version)
    if python is None:
        pytest.skip(f"no Python {version} on this machine")
    try:
        train_one_step(clone, f"PYTHON={python}")
        there = run(clone, ".venv/bin/python", "-c", "import sys; print('%d.%d' % sys.version_info[:2])")
        assert there.strip() == version
    finally:
        shutil.rmtree(clone / ".venv", ignore_errors=True)  # gigabytes


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_what_only_a_gpu_runs_is_run_by_a_build_of_torch_for_cuda(clone):
    """Training runs in fake tensors (tests/engine/test_fake_cuda.py). Gigabytes are downloaded."""
    if torch.version.cuda is not None:
        pytest.skip("torch is built for CUDA here: `make test` has run them")
    try:
        run(clone, sys.executable, "-m", "venv", ".venv")
        # Of a pinned version pip takes a build that lies on the disk before the index's.
        pip = ("env", "PIP_FIND_LINKS=", ".venv/bin/python", "-m", "pip", "install", "-q", "--no-compile")
        run(clone, *pip, "-c", "constraints.txt", "-e", ".[dev]")
        cuda = run(clone, ".venv/bin/python", "-c", "import torch; print(torch.version.cuda)").strip()
        if cuda == "None":
            pytest.skip("pip brings no build of torch for CUDA here")
        said = run(clone, ".venv/bin/python", "-m", "pytest", "-q", "tests/engine/test_fake_cuda.py")
        assert " passed" in said
        assert "skipped" not in said
    finally:
        shutil.rmtree(clone / ".venv", ignore_errors=True)
