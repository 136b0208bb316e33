"""Causes real faults on the second of two nodes, and returns the outcome of the job."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from multinode.cluster import Cluster, NodeCommand, wait_until
from multinode.launchers import Launcher
from support.launch import ROOT, write_recipe

HANG_SECONDS = 10
PATIENCE = 60
"""Seconds to wait for the job to end."""
VICTIM = "node2"


def kill_rank(cluster: Cluster, job: NodeCommand) -> None:
    """Kill the rank of the second node."""
    _single(cluster.ranks(VICTIM)).kill()


def freeze_rank(cluster: Cluster, job: NodeCommand) -> None:
    """Stop the rank of the second node with SIGSTOP."""
    _single(cluster.ranks(VICTIM)).send_signal(signal.SIGSTOP)


def sleep_in_step(cluster: Cluster, job: NodeCommand) -> None:
    """Let the model of the second node sleep in a step."""
    cluster.path(VICTIM, cluster.private / "asleep").touch()


def kill_agent(cluster: Cluster, job: NodeCommand) -> None:
    """Kill DeepSpeed's launch.py on the second node."""
    _single(cluster.pythons(VICTIM, "deepspeed.launcher.launch")).kill()


def kill_launcher(cluster: Cluster, job: NodeCommand) -> None:
    """Kill the launcher on the first node."""
    job.command.kill()


def cut_link(cluster: Cluster, job: NodeCommand) -> None:
    """Take the second node off the network."""
    cluster.disconnect(VICTIM)


def lose_node(cluster: Cluster, job: NodeCommand) -> None:
    """Power off the second node."""
    cluster.power_off(VICTIM)


def stop_sshd(cluster: Cluster, job: NodeCommand) -> None:
    """End sshd on the second node."""
    cluster.stop_sshd(VICTIM)


Fault = Callable[[Cluster, NodeCommand], None]
FAULTS: dict[str, Fault] = {
    "kill -9 of a rank": kill_rank,
    "kill -9 of launch.py": kill_agent,
    "kill -9 of the launcher": kill_launcher,
    "a rank asleep in a step": sleep_in_step,
    "a rank stopped (SIGSTOP)": freeze_rank,
    "link cut": cut_link,
    "power off": lose_node,
    "sshd stopped": stop_sshd,
}


@dataclass(frozen=True)
class Outcome:
    """Outcome of a fault."""

    code: int | None
    """Exit code of the launcher; `None` if it still ran after PATIENCE seconds."""
    seconds: float
    """Seconds from the fault to the end of the job's last process on any node."""
    remaining_commands: dict[str, list[str]]
    """Command lines of processes that still ran after PATIENCE seconds, by node."""
    text: str
    """Output of the launcher."""


def _single(processes: Sequence[psutil.Process]) -> psutil.Process:
    (process,) = processes
    return process


def start(cluster: Cluster, launcher: Launcher, run: Path, **environment: str) -> list[NodeCommand]:
    """Start a job of hours on two nodes, and return once it has logged ten steps.

    Args:
        run: Run directory, in the shared or in the private folder.
        environment: Variables of the launch; none of their values may be on a node's command line.
    """
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
    words = ["--config", str(recipe), *split, f"run_dir={run}"]
    jobs = launcher(cluster, cluster.hosts[:2], *words, **environment)
    record = cluster.path("node1", run) / "metrics.jsonl"

    def is_training() -> bool:
        command_lines = str(cluster.remaining_commands())
        assert not [name for name, value in environment.items() if value in command_lines]
        for job in jobs:
            assert job.process.poll() is None, job.text
        return record.exists() and record.read_text().count("\n") > 10

    wait_until(is_training, 300, "ten steps")
    return jobs


def run_with_fault(cluster: Cluster, launcher: Launcher, fault: Fault, **environment: str) -> Outcome:
    """Train on two nodes, cause the fault, and wait for the end.

    Args:
        environment: Variables of the launch; none of their values may be on a node's command line.
    """
    run = cluster.shared / "run"
    jobs = start(cluster, launcher, run, **environment)
    start_time = time.monotonic()
    fault(cluster, jobs[0])

    def has_ended() -> bool:
        return all(job.process.poll() is not None for job in jobs) and not cluster.remaining_commands()

    while not has_ended() and time.monotonic() - start_time < PATIENCE:
        time.sleep(0.1)
    seconds = time.monotonic() - start_time
    text = "\n".join(job.text for job in jobs)
    return Outcome(jobs[0].process.poll(), seconds, cluster.remaining_commands(), text)


def collect_survived_faults(cluster: Cluster, launcher: Launcher) -> dict[str, str]:
    """Cause faults that a job survives on the second node.

    Returns:
        Fault -> line of the console about it.
    """
    run = cluster.private / "run"
    lines = {}
    with cluster.small_disk(VICTIM, run, "1m"):
        (job,) = start(cluster, launcher, run)
        filling = run / "filling"
        cluster.run(VICTIM, "dd", "if=/dev/zero", f"of={filling}", "bs=4k")
        lines["disk full"] = job.wait_for(f"step .* is not saved: .* on {VICTIM} has 0 KiB free.*")
        cluster.path(VICTIM, filling).unlink()
        num_saved = job.text.count("saved ")
        wait_until(lambda: job.text.count("saved ") > num_saved, 60, "a checkpoint after space was freed")
        cluster.limit_cpu(VICTIM, 0.05)
        lines["5 % of a core"] = job.wait_for(rf"rank 1 on {VICTIM} \(pid \d+\) is slow: .*")
        cluster.kill("node1")
    return lines
