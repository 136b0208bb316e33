"""The `train` command as users start it: by hand, under `deepspeed --module`, under `torchrun -m`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.launch import BIN, ROOT, TORCHRUN, CompletedCommand, make_environment, run_python
from support.rank_pool import free_port

PORT = "{port}"
STARTS = {
    "python": [sys.executable, "-m", "pipeline", "train"],
    "deepspeed": [
        *(str(BIN / "deepspeed"), "--num_gpus", "2", "--master_port", PORT),
        *("--module", "pipeline", "train"),
    ],
    "torchrun": [*TORCHRUN, "--nproc-per-node", "2", "--master-port", PORT, "-m", "pipeline", "train"],
    "multi_gpu.sh": [str(ROOT / "launch" / "multi_gpu.sh"), "--num_gpus", "2"],
}


def start(name: str, folder: Path, *words: str) -> CompletedCommand | subprocess.CompletedProcess[str]:
    """The command in this folder, to its end."""
    command = [word.replace(PORT, str(free_port())) for word in STARTS[name]]
    if name != "multi_gpu.sh":
        return run_python(*command, *words, cwd=folder, PYTHONPATH=str(ROOT))
    return subprocess.run(
        [*command, *words],
        cwd=folder,
        env=make_environment(PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )


@pytest.mark.slow
@pytest.mark.daily("python", "deepspeed")
@pytest.mark.parametrize("name", STARTS)
def test_train_is_started_by_names_from_an_empty_folder(name, tmp_path):
    words = ("--deepspeed", "zero2", "--config", "digits_cnn", "max_steps=2", "log.every=1")
    done = start(name, tmp_path, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2/2  loss" in done.stdout
    assert f"; {1 if name == 'python' else 2} rank" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


@pytest.mark.slow
@pytest.mark.daily("deepspeed")
@pytest.mark.parametrize("name", STARTS)
def test_a_mistake_is_told_once_and_leaves_nothing(name, tmp_path):
    done = start(name, tmp_path, "--deepspeed", "zero4")
    assert done.returncode == (1 if name == "torchrun" else 2)  # torchrun's own for a rank that failed
    assert done.stderr.count('error: --deepspeed zero4: no such file (did you mean "zero3"?)') == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_program_is_named_in_usage_and_errors(tmp_path):
    done = start("python", tmp_path, "--dry-rnu")
    assert done.returncode == 2
    assert done.stderr.startswith("usage: python -m pipeline train ")
    assert done.stderr.endswith("error: unrecognized argument --dry-rnu; did you mean --dry-run?\n")
