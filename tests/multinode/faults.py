"""Real faults of the second of two nodes, and the outcome of the job."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from multinode.cluster import Cluster, Launched, wait_until
from multinode.launchers import Launcher
from support.launch import ROOT, write_recipe

HANG_SECONDS = 10
PATIENCE = 60
"""Seconds until a job that does not end is given up."""
VICTIM = "node2"


def kill_rank(cluster: Cluster, job: Launched) -> None:
    _the(cluster.ranks(VICTIM)).kill()


def freeze_rank(cluster: Cluster, job: Launched) -> None:
    _the(cluster.ranks(VICTIM)).send_signal(signal.SIGSTOP)


def sleep_in_a_step(cluster: Cluster, job: Launched) -> None:
    cluster.path(VICTIM, cluster.private / "asleep").touch()


def kill_agent(cluster: Cluster, job: Launched) -> None:
    _the(cluster.pythons(VICTIM, "deepspeed.launcher.launch")).kill()


def kill_launcher(cluster: Cluster, job: Launched) -> None:
    job.command.kill()


def cut_link(cluster: Cluster, job: Launched) -> None:
    cluster.cut(VICTIM)


def lose_node(cluster: Cluster, job: Launched) -> None:
    cluster.lose(VICTIM)


def stop_sshd(cluster: Cluster, job: Launched) -> None:
    cluster.stop_sshd(VICTIM)


Fault = Callable[[Cluster, Launched], None]
FAULTS: dict[str, Fault] = {
    "kill -9 of a rank": kill_rank,
    "kill -9 of launch.py": kill_agent,
    "kill -9 of the launcher": kill_launcher,
    "a rank asleep in a step": sleep_in_a_step,
    "a rank stopped (SIGSTOP)": freeze_rank,
    "link cut": cut_link,
    "power off": lose_node,
    "sshd stopped": stop_sshd,
}


@dataclass(frozen=True)
class Outcome:
    """Outcome of a fault."""

    code: int | None
    """Exit code of the launcher; None: it was still there when patience ended."""
    seconds: float
    """Seconds from the fault to the end of the job's last process on any node."""
    left: dict[str, list[str]]
    """Processes that still ran when the time was over, by node."""
    text: str


def _the(processes: Sequence[psutil.Process]) -> psutil.Process:
    (process,) = processes
    return process


def start(cluster: Cluster, launcher: Launcher, run: Path, **environment: str) -> list[Launched]:
    """Start a job of hours on two nodes, and return while it trains. `run` is shared or private."""
    recipe = write_recipe(
        cluster.shared,
        max_steps=100_000,
        model={"kind": "multinode.paced:paced", "args": {"seconds": 0.05, "folder": str(cluster.private)}},
        data={"kind": "support.faults:points"},
        objective={"kind": "classification"},
        eval={"max_samples": 2},
        checkpoint={"every": 20},
        distributed={"hang_seconds": HANG_SECONDS},
        wandb={"mode": "offline"},
    )
    split = ["--deepspeed", str(ROOT / "ds_configs" / "zero2.json")]
    jobs = launcher(
        cluster, cluster.hosts[:2], "--config", str(recipe), *split, f"run_dir={run}", **environment
    )
    rows = cluster.path("node1", run) / "metrics.jsonl"

    def trains() -> bool:
        lines = str(cluster.remaining_commands())
        assert not [name for name, value in environment.items() if value in lines]
        for job in jobs:
            assert job.process.poll() is None, job.text
        return rows.exists() and rows.read_text().count("\n") > 10

    wait_until(trains, 300, "ten steps")
    return jobs


def suffer(cluster: Cluster, launcher: Launcher, fault: Fault, **environment: str) -> Outcome:
    """Train on two nodes, cause the fault, and wait for the end.

    Values of the launch's `environment` must show on no command line of any node.
    """
    run = cluster.shared / "run"
    jobs = start(cluster, launcher, run, **environment)
    began = time.monotonic()
    fault(cluster, jobs[0])

    def over() -> bool:
        return all(job.process.poll() is not None for job in jobs) and not cluster.remaining_commands()

    while not over() and time.monotonic() - began < PATIENCE:
        time.sleep(0.1)
    seconds = time.monotonic() - began
    text = "\n".join(job.text for job in jobs)
    return Outcome(jobs[0].process.poll(), seconds, cluster.remaining_commands(), text)


def endure(cluster: Cluster, launcher: Launcher) -> dict[str, str]:
    """Return the console's lines about faults of the second node that a job survives."""
    run = cluster.private / "run"
    said = {}
    with cluster.small_disk(VICTIM, run, "1m"):
        (job,) = start(cluster, launcher, run)
        filling = run / "filling"
        cluster.run(VICTIM, "dd", "if=/dev/zero", f"of={filling}", "bs=4k")
        said["disk full"] = job.wait_for(f"step .* is not saved: .* on {VICTIM} has 0 KiB free.*")
        cluster.path(VICTIM, filling).unlink()
        already = job.text.count("saved ")
        wait_until(lambda: job.text.count("saved ") > already, 60, "a checkpoint once there is room")
        cluster.limit_cpu(VICTIM, 0.05)
        said["5 % of a core"] = job.wait_for(rf"rank 1 on {VICTIM} \(pid \d+\) is slow: .*")
        cluster.kill("node1")
    return said
