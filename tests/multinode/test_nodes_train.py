"""Two and four nodes train through every launcher, stop, and go on, all on the loss curve of one process."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from multinode.cluster import Cluster, Launched, wait_until
from multinode.launchers import LAUNCHERS, torchrun
from support.launch import ROOT, launch, numbers, write_recipe
from support.wandb_rows import of_record, of_server
from support.wandb_server import STANDIN, read_lines

pytestmark = pytest.mark.slow
STEPS = 60
WANDB_PORT = "8713"
ALL = [pytest.param(*pair, id="-".join(map(str, pair))) for pair in itertools.product(LAUNCHERS, (2, 4))]
SECRETS = {
    "WANDB_API_KEY": "c0ffee" * 6 + "aaaa",
    "HF_TOKEN": "hf_canaryCANARYcanary",
    "MLFLOW_TRACKING_PASSWORD": "canary of MLflow",
    "WANDB_BASE_URL": "http://user:canary-in-a-url@127.0.0.1:9",
}


def arguments(cluster: Cluster, run: Path, *more: str) -> list[str]:
    """A language model on text that every node prepares for itself, in fp32."""
    recipe = write_recipe(
        cluster.shared,
        max_steps=STEPS,
        optimizer={"learning_rate": 1e-3},
        schedule={"kind": "constant"},
        eval={"max_samples": 16},
        checkpoint={"every": 4},
    )
    # Both: a CPU with instructions for fp16 would take that.
    fp32 = ["ds.bf16.enabled=false", "ds.fp16.enabled=false"]
    split = ["--deepspeed", str(ROOT / "ds_configs" / "zero2.json"), *fp32]
    private = f"data.cache_dir={cluster.private / 'cache'}"
    return ["--config", str(recipe), *split, f"run_dir={run}", private, *more]


@pytest.fixture(scope="module")
def curve(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The loss of each step of one process: plain PyTorch, fp32."""
    folder = tmp_path_factory.mktemp("alone")
    recipe = write_recipe(
        folder,
        max_steps=STEPS,
        optimizer={"learning_rate": 1e-3},
        schedule={"kind": "constant"},
        eval={"max_samples": 16},
    )
    done = launch("--config", str(recipe), f"run_dir={folder / 'alone'}", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    return losses(folder / "alone")


def losses(run: Path) -> list[float]:
    """Of steps 1, 2, 3, ...: none is missing, none comes twice."""
    rows = [row for row in numbers(run) if "train/loss" in row]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return [row["train/loss"] for row in rows]


def finish(jobs: list[Launched], cluster: Cluster, run: Path, curve: list[float]) -> None:
    for job in jobs:
        assert job.wait(500) == 0, job.text
        assert "Traceback" not in job.text
    cluster.wait_until_idle()
    assert losses(run) == pytest.approx(curve, rel=1e-5)


def wait_for_rows(run: Path, jobs: list[Launched], look: Callable[[], None] = lambda: None) -> None:
    """In the middle of the training, with a checkpoint; looks again and again meanwhile."""

    def written() -> bool:
        look()
        for job in jobs:
            assert job.process.poll() is None, job.text
        return (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").read_text().count("\n") > 8

    wait_until(written, 300, "eight rows")


def over(cluster: Cluster, jobs: list[Launched], seconds: float) -> int | None:
    """Waits until nothing runs on any node; the exit code of the first command."""
    wait_until(lambda: not cluster.left(), seconds, "nothing runs")
    return jobs[0].wait(100)


@pytest.mark.nightly
@pytest.mark.parametrize(("launcher", "count"), ALL)
def test_every_launcher(cluster, slurm, curve, launcher, count):
    run = cluster.shared / "run"
    jobs = LAUNCHERS[launcher](cluster, cluster.hosts[:count], *arguments(cluster, run))
    finish(jobs, cluster, run, curve)


def test_four_nodes_lose_their_launcher_and_two_go_on_without_it(cluster, curve):
    """A shared file system; kill -9 of the launch script; then mpirun on half of the nodes.

    Canaries in the environment of the launch show on no command line of any node, in no output and no file.
    """
    run = cluster.shared / "run"
    shown: set[str] = set()

    def look() -> None:
        lines = str(cluster.left())
        shown.update(name for name, secret in SECRETS.items() if secret in lines)

    more = arguments(cluster, run, "wandb.mode=offline")
    jobs = LAUNCHERS["multi_node"](cluster, cluster.hosts, *more, **SECRETS)
    wait_for_rows(run, jobs, look)
    jobs[0].command.kill()
    assert over(cluster, jobs, 60) == -9
    assert not shown
    assert list((run / "wandb").rglob("*.wandb"))
    for file in [jobs[0].log, *(path for path in cluster.shared.rglob("*") if path.is_file())]:
        data = file.read_bytes()
        assert not [name for name, secret in SECRETS.items() if secret.encode() in data], file
    assert losses(run) == pytest.approx(curve[: len(losses(run))], rel=1e-5)

    jobs = LAUNCHERS["openmpi"](cluster, cluster.hosts[2:], *arguments(cluster, run))
    finish(jobs, cluster, run, curve)
    assert f"going on with {run} from step-" in jobs[0].text


def test_a_preempted_job_goes_on_by_itself(cluster, slurm, curve):
    """sbatch, private file systems; SIGUSR1, as before a preemption or a time limit; it is queued again.

    To W&B, whose server only rank 0's node can reach, that is one run with every row once.
    """
    folder = cluster.shared / "server"
    server = cluster.start("node1", sys.executable, STANDIN, WANDB_PORT, str(folder))
    online = {"WANDB_BASE_URL": f"http://127.0.0.1:{WANDB_PORT}", "WANDB_API_KEY": "0" * 40}
    inside = cluster.private / "run"
    run = cluster.path("node1", inside)
    more = arguments(cluster, inside, "wandb.mode=online")
    jobs = LAUNCHERS["sbatch"](cluster, cluster.hosts[:2], *more, **online)
    wait_for_rows(run, jobs)
    cluster.run("node1", "bash", "-c", "scancel --signal USR1 $(squeue --noheader --format %A)")
    for job in jobs:
        assert job.wait(500) == 0, job.text
    server.command.kill()
    finish(jobs, cluster, run, curve)
    assert f"going on with {inside} from step-" in jobs[0].text
    (history,) = folder.glob("history-*.jsonl")
    assert of_server(read_lines(history)) == of_record(run)


@pytest.mark.nightly  # each day test_nodes_return.py loses one, and has it come back
def test_a_lost_node_leaves_the_job_to_the_other(cluster, curve):
    """torchrun 1:2; node2 loses power; node1 goes on alone: the same global batch, the very next sample."""
    run = cluster.shared / "run"
    more = ["distributed.hang_seconds=20"]
    jobs = torchrun(cluster, cluster.hosts[:2], *arguments(cluster, run, *more), nodes="1:2")
    wait_for_rows(run, jobs)
    cluster.lose("node2")
    finish(jobs[:1], cluster, run, curve)
    assert f"going on with {run} from step-" in jobs[0].text
