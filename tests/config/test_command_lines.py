"""Commands that messages give to a user: each is taken from the message and run, from an empty folder."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from support.launch import BIN, ROOT, launch, make_environment, write_recipe

from pipeline.__main__ import main
from pipeline.config import command_lines
from pipeline.config.command_lines import format_pipeline_command, format_train_command
from pipeline.monitoring.report import page

WANDB_OFFLINE = ["wandb={mode: offline}"]


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory) -> Path:
    """A run of two steps of a language model, offline for W&B, started in its folder with relative paths."""
    folder = tmp_path_factory.mktemp("a folder")
    write_recipe(folder)
    words = ["--config", "recipe.yaml", "max_steps=2", "runs_dir=runs", "run_dir=runs/tiny", *WANDB_OFFLINE]
    done = launch(*words, cwd=folder, WANDB_MODE="offline")
    assert done.returncode == 0, done.stderr
    (folder / "said.txt").write_text(done.stderr)
    return folder / "runs" / "tiny"


@pytest.fixture
def run_elsewhere(tmp_path_factory):
    """`run_elsewhere(command, *more)`: how the command ended in an empty folder, with words behind it."""

    def function(command: str, *more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            f"{command} {shlex.join(more)}",
            shell=True,
            cwd=tmp_path_factory.mktemp("elsewhere"),
            env=make_environment(PYTHONPATH=str(ROOT), PATH=f"{BIN}{os.pathsep}{os.environ['PATH']}"),
            capture_output=True,
            text=True,
            check=False,
            timeout=900,
        )

    return function


def one(pattern: str, text: str) -> str:
    (command,) = re.findall(pattern, text)
    return command


@pytest.mark.slow
def test_suggest_prints_a_command_that_trains(tmp_path, monkeypatch, capsys, run_elsewhere):
    monkeypatch.chdir(tmp_path)
    write_recipe(tmp_path, max_steps=2)
    assert main(["plan", "--config=recipe.yaml", "--gpu-memory", "8", "--suggest"]) == 0
    done = run_elsewhere(one(r"To train with it: (.*)", capsys.readouterr().out))
    assert done.returncode == 0, done.stderr
    assert "2/2  loss" in done.stdout


@pytest.mark.slow
def test_a_model_without_weights_prints_a_command_that_exports_it(
    run_directory, monkeypatch, capsys, run_elsewhere
):
    monkeypatch.chdir(run_directory.parents[1])
    model = "model={kind: causal_lm, pretrained: runs/tiny/model}"
    train = ["train", "--config", "recipe.yaml", model, "run_dir=runs/other"]
    assert main(train) == 2
    done = run_elsewhere(one(r"if it has an adapter\): (.*)", capsys.readouterr().err))
    assert done.returncode == 0, done.stderr
    assert "OUT" in done.stdout


@pytest.mark.slow
def test_a_report_that_takes_too_long_prints_the_command_for_it(
    run_directory, monkeypatch, caplog, run_elsewhere
):
    monkeypatch.chdir(run_directory.parents[1])
    monkeypatch.setattr(page, "REPORT_TIMEOUT", 0.0)
    page.write_final_report(Path("runs/tiny"))
    done = run_elsewhere(one(r"to write it, run: (.*)", caplog.text))
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_an_offline_run_prints_the_command_that_uploads_it(run_directory, run_elsewhere):
    """There is no network: W&B's own command says that no key is there, of files that it has found."""
    said = (run_directory.parents[1] / "said.txt").read_text()
    command = one(r"to upload: (.*)", said)
    folder = Path(shlex.split(command)[-1])
    assert folder.is_absolute()
    assert list(folder.glob("*.wandb"))
    assert "no such" not in run_elsewhere(command).stderr.lower()


@pytest.mark.nightly
def test_a_gpu_that_is_not_there_prints_the_command_that_looks(tmp_path, run_elsewhere):
    said = launch(
        "--config", str(write_recipe(tmp_path)), DS_ACCELERATOR="cuda", CUDA_VISIBLE_DEVICES=""
    ).stderr
    done = run_elsewhere(one(r"find the cause with (.*)", said), "--quick")
    assert done.stdout.startswith("project "), done.stderr


def test_a_path_is_absolute_and_quoted(tmp_path, monkeypatch):
    folder = tmp_path / "a folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    assert shlex.split(format_pipeline_command("report", Path("runs/x")))[-2:] == [
        "report",
        f"{folder}/runs/x",
    ]
    words = shlex.split(
        format_train_command(2, "--deepspeed", "zero2", "--config", Path("my.yaml"), "data.paths=[a b]")
    )
    assert words[-8:] == [
        *("--module", "pipeline", "train", "--deepspeed", "zero2"),
        *("--config", f"{folder}/my.yaml", "data.paths=[a b]"),
    ]


def test_the_script_of_this_installation_is_what_is_named(tmp_path, monkeypatch):
    """The command is named if PATH leads to it, else its path is printed; without it `python -m`."""
    mine = tmp_path / "mine"
    others = tmp_path / "others"
    for folder, names in ((mine, ("python", "ds-pipeline")), (others, ("python", "ds-pipeline"))):
        folder.mkdir()
        for name in names:
            (folder / name).write_text("#!/bin/sh\n")
            (folder / name).chmod(0o755)
    monkeypatch.setattr("sys.executable", str(mine / "python"))
    monkeypatch.setenv("PATH", f"{mine}:{others}")
    assert format_pipeline_command("doctor") == "ds-pipeline doctor"
    monkeypatch.setenv("PATH", f"{others}:{mine}")
    assert format_pipeline_command("doctor") == f"{mine}/ds-pipeline doctor"
    (mine / "ds-pipeline").unlink()
    assert format_pipeline_command("doctor") == f"{mine}/python -m pipeline doctor"
    monkeypatch.setenv("PATH", str(mine))
    assert format_pipeline_command("doctor") == "python -m pipeline doctor"


COMMAND = re.compile(r"-m pipeline |(python|deepspeed|start with|start) \S*launch/|ds-pipeline |wandb sync ")
PAGES = {"cli/plan.py", "cli/import_configs/writing.py"}
"""Texts for a page or a file: the end of `plan --help`, an imported recipe."""


@pytest.mark.slow
def test_no_message_has_a_command_of_its_own_making():
    """`format_pipeline_command` and its neighbours know what works from any folder."""
    for path in (ROOT / "pipeline").rglob("*.py"):
        tree = ast.parse(path.read_text())
        texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
        for node in ast.walk(tree):
            is_text = isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts
            if is_text and str(path.relative_to(ROOT / "pipeline")) not in PAGES:
                assert not COMMAND.search(node.value), f"{path}:{node.lineno}: {node.value!r}"


def test_the_name_of_the_script_is_that_of_the_installation():
    project = (ROOT / "pyproject.toml").read_text()
    assert f'\n{command_lines.SCRIPT} = "pipeline.__main__:run_script"\n' in project
