"""Machines are lost and come back, a job is preempted: the run goes on, on the unbroken run's curve."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from multinode.cluster import Cluster, wait_until
from multinode.elastic import SCENARIOS, arguments, recipe, run_scenario
from multinode.launchers import LAUNCHERS, START_FOLDER
from support.launch import launch, read_reproducible_rows
from support.wandb_rows import extract_server_losses, read_recorded_losses
from support.wandb_server import STANDIN, read_lines

pytestmark = pytest.mark.slow
WANDB_PORT = "8713"


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The rows of one process that nothing happens to: plain PyTorch, fp32."""
    folder = tmp_path_factory.mktemp("alone")
    words = ["--config", str(recipe(folder, 0.0)), f"run_dir={folder / 'run'}"]
    # With this variable it is no fork: nothing else here needs the server of forks, whose start takes longer.
    done = launch(*words, PYTHONPATH=str(START_FOLDER), OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    return read_reproducible_rows(folder / "run")


def finish(cluster: Cluster, run: Path, unbroken: list[dict[str, Any]]) -> None:
    rows = read_reproducible_rows(run)
    assert [row["step"] for row in rows] == [row["step"] for row in unbroken]
    for row, expected in zip(rows, unbroken, strict=True):
        assert row == pytest.approx(expected, rel=1e-4, abs=1e-6), row["step"]
    cluster.wait_until_idle()


@pytest.mark.daily("lose-all-but-one")
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.replace(" ", "-"))
def test_the_run_is_the_unbroken_one(cluster, unbroken, scenario):
    finish(cluster, run_scenario(cluster, scenario), unbroken)


def test_a_preempted_job_goes_on_by_itself(cluster, slurm, unbroken):
    """sbatch, private file systems; SIGUSR1, as before a preemption or a time limit; it is queued again.

    To W&B, whose server only rank 0's node can reach, that is one run with every row once.
    """
    folder = cluster.shared / "server"
    server = cluster.start("node1", sys.executable, STANDIN, WANDB_PORT, str(folder))
    online = {"WANDB_BASE_URL": f"http://127.0.0.1:{WANDB_PORT}", "WANDB_API_KEY": "0" * 40}
    inside = cluster.private / "run"
    run = cluster.path("node1", inside)
    words = [*arguments(cluster, 0.05), f"run_dir={inside}", "wandb.mode=online"]
    (job,) = LAUNCHERS["sbatch"](cluster, cluster.hosts[:2], *words, PYTHONPATH=str(START_FOLDER), **online)

    def trains() -> bool:
        assert job.process.poll() is None, job.text
        return (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").read_text().count("\n") > 8

    wait_until(trains, 300, "eight rows")
    cluster.run("node1", "bash", "-c", "scancel --signal USR1 $(squeue --noheader --format %A)")
    assert job.wait(500) == 0, job.text
    assert f"resuming {inside} from step-" in job.text
    server.command.kill()
    finish(cluster, run, unbroken)
    (history,) = folder.glob("history-*.jsonl")
    assert extract_server_losses(read_lines(history)) == read_recorded_losses(run)
