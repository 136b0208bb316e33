"""Two and four nodes train through every launcher on the loss curve of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from multinode.launchers import LAUNCHERS
from support.launch import ROOT, launch, read_reproducible_rows, write_recipe

# Each day test_nodes_fail.py has a job over ssh, test_nodes_return.py those of torchrun and sbatch.
pytestmark = [pytest.mark.slow, pytest.mark.nightly]


def recipe(folder: Path, **changes: Any) -> Path:
    """A language model that trains for 20 steps."""
    settings = {"optimizer": {"learning_rate": 1e-3}, "schedule": {"kind": "constant"}}
    return write_recipe(folder, max_steps=20, eval={"max_samples": 16}, **settings, **changes)


@pytest.fixture(scope="module")
def curve(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The loss of each step of one process: plain PyTorch, fp32."""
    folder = tmp_path_factory.mktemp("alone")
    done = launch("--config", str(recipe(folder)), f"run_dir={folder / 'run'}")
    assert done.returncode == 0, done.stderr
    return losses(folder / "run")


def losses(run: Path) -> list[float]:
    """Losses of steps 1, 2, 3, ...: none is missing, none comes twice."""
    rows = [row for row in read_reproducible_rows(run) if "train/loss" in row]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return [row["train/loss"] for row in rows]


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_launcher(cluster, slurm, curve, launcher, count):
    """Each node prepares the text for itself."""
    run = cluster.shared / "run"
    split = ["--deepspeed", str(ROOT / "ds_configs" / "zero2.json")]
    # Both: a CPU with instructions for fp16 would take that.
    fp32 = ["ds.bf16.enabled=false", "ds.fp16.enabled=false"]
    private = f"data.cache_dir={cluster.private / 'cache'}"
    words = ["--config", str(recipe(cluster.shared)), *split, *fp32, f"run_dir={run}", private]
    for job in LAUNCHERS[launcher](cluster, cluster.hosts[:count], *words):
        assert job.wait(500) == 0, job.text
        assert "Traceback" not in job.text
    cluster.wait_until_idle()
    assert losses(run) == pytest.approx(curve, rel=1e-5)
