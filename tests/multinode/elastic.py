"""Takes machines away from an elastic torchrun job (`--nnodes MIN:MAX`), which trains on without them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from multinode.cluster import Cluster, NodeCommand, wait_until
from multinode.launchers import torchrun
from support.launch import ROOT, write_recipe

STEPS = 100
PATIENCE = 400
"""Seconds to wait for a job to train; torchrun's own waits add up to a minute and a half."""
GONE = r"(is gone|sends no heartbeat)"


def recipe(folder: Path, seconds: float) -> Path:
    """Write a recipe whose model sleeps `seconds` in each forward pass.

    A step takes 12 samples, which 1 to 4 ranks can share evenly.
    """
    return write_recipe(
        folder,
        max_steps=STEPS,
        model={"kind": "multinode.paced:paced", "args": {"seconds": seconds, "folder": str(folder)}},
        data={"kind": "support.faults:points"},
        objective={"kind": "classification"},
        batch={"global_batch_size": 12},
        eval={"every": 25, "max_samples": 8},
        checkpoint={"every": 5},
    )


def arguments(cluster: Cluster, seconds: float) -> list[str]:
    """Write the recipe to the shared folder, and return the arguments of a ZeRO-2 run in fp32."""
    # Both are disabled, because a CPU with instructions for fp16 would use fp16 without bf16.
    fp32 = ["ds.bf16.enabled=false", "ds.fp16.enabled=false"]
    split = ["--deepspeed", str(ROOT / "ds_configs" / "zero2.json"), *fp32]
    return ["--config", str(recipe(cluster.shared, seconds)), *split]


@dataclass
class ElasticJob:
    """Elastic job that continues while at least `least` of its hosts remain."""

    cluster: Cluster
    hosts: list[str]
    least: int
    """Smallest number of hosts with which the job trains."""
    endpoint: str
    """Host of torchrun's rendezvous."""
    seconds: float
    """Seconds of a step, long enough for all faults to happen before the run ends."""
    jobs: dict[str, NodeCommand] = field(default_factory=dict)
    """Host -> torchrun on it, for hosts with power."""
    lost: list[NodeCommand] = field(default_factory=list)
    """Commands of hosts that lost their power."""

    @property
    def run(self) -> Path:
        """Run directory, on all nodes."""
        return self.cluster.shared / "run"

    def start(self, *hosts: str) -> None:
        """Start the same command on each of these hosts."""
        words = [*arguments(self.cluster, self.seconds), f"run_dir={self.run}"]
        for host in hosts:
            size = f"{self.least}:{len(self.hosts)}"
            self.jobs[host] = torchrun(self.cluster, [host], *words, nodes=size, endpoint=self.endpoint)[0]

    def lose(self, *hosts: str) -> None:
        """Power the hosts off."""
        for host in hosts:
            self.lost.append(self.jobs.pop(host))
            self.cluster.power_off(host)

    def come_back(self, host: str) -> None:
        """Connect the host again, and start the same command on it."""
        self.cluster.reconnect_all()
        self.start(host)

    def wait_until_training(self, world_size: int) -> None:
        """Wait until a new attempt of so many ranks has trained eight steps, and so saved a checkpoint."""
        before = self._read_world_sizes()

        def is_training() -> bool:
            self._check_jobs()
            sizes = self._read_world_sizes()
            return sizes != before and sizes[-1] == world_size and self._count_steps_of_last_attempt() > 7

        wait_until(is_training, PATIENCE, f"training on {world_size} ranks; {self.text()}")

    def wait_for(self, pattern: str) -> None:
        """Wait until a job prints the pattern once more."""
        before = len(re.findall(pattern, self.text()))
        wait_until(lambda: len(re.findall(pattern, self.text())) > before, PATIENCE, pattern)

    def finish(self) -> None:
        """Wait for the end of the run."""
        for host, job in self.jobs.items():
            assert job.wait(PATIENCE) == 0, f"{host}: {self.text()}"

    def text(self) -> str:
        """Return the output of all commands, those of lost hosts first."""
        return "\n".join(job.text for job in [*self.lost, *self.jobs.values()])

    def _check_jobs(self) -> None:
        """Assert that every job still runs."""
        for host, job in self.jobs.items():
            assert job.process.poll() is None, f"{host}: {self.text()}"

    def _read_world_sizes(self) -> list[int]:
        """Return the number of ranks of each attempt that has begun to train."""
        return [int(count) for count in re.findall(r"(\d+) ranks? on cpu", self._read_log())]

    def _read_log(self) -> str:
        path = self.run / "logs" / "rank00000.log"
        return path.read_text() if path.exists() else ""

    def _count_steps_of_last_attempt(self) -> int:
        num_rows = (self.run / "metrics.jsonl").read_text().count("train/loss")
        first_steps = re.findall(r"resuming .* from step-0*(\d+)", self._read_log())
        return num_rows - int(first_steps[-1] if first_steps else 0)


def lose_all_but_one(job: ElasticJob) -> None:
    """Power off one of two hosts."""
    job.wait_until_training(2)
    job.lose("node2")
    job.wait_until_training(1)


def lose_one(job: ElasticJob) -> None:
    """Power off one of three hosts."""
    job.wait_until_training(3)
    job.lose("node3")
    job.wait_until_training(2)


def lose_rank_0(job: ElasticJob) -> None:
    """Power off the host of rank 0, so that all others need a new address of rank 0."""
    job.wait_until_training(3)
    job.lose("node1")
    job.wait_until_training(2)


def lose_two_after_each_other(job: ElasticJob) -> None:
    """Power off two of three hosts, the second after the job has trained without the first."""
    lose_one(job)
    job.lose("node2")
    job.wait_until_training(1)


def lose_one_while_restarting(job: ElasticJob) -> None:
    """Power off a second host while the job restarts without the first."""
    job.wait_until_training(4)
    job.lose("node4")
    job.wait_for(GONE)
    job.lose("node3")
    job.wait_until_training(2)


def lose_two_at_once(job: ElasticJob) -> None:
    """Power off two of four hosts together."""
    job.wait_until_training(4)
    job.lose("node3", "node4")
    job.wait_until_training(2)


def come_back(job: ElasticJob) -> None:
    """Power off a host, and connect it again after the job has trained without it."""
    lose_one(job)
    job.come_back("node3")
    job.wait_until_training(3)


def come_back_as_rank_0(job: ElasticJob) -> None:
    """Power off the host of rank 0, and connect it again."""
    lose_rank_0(job)
    job.come_back("node1")
    job.wait_until_training(3)


def come_back_while_restarting(job: ElasticJob) -> None:
    """Connect a host again while the job restarts without it."""
    job.wait_until_training(3)
    job.lose("node3")
    job.wait_for(GONE)
    job.come_back("node3")
    job.wait_until_training(3)


Scenario = Callable[[ElasticJob], None]
SCENARIOS: dict[str, tuple[Scenario, int, int, str]] = {
    # Name -> (function, smallest number of hosts, largest number of hosts, host of the rendezvous).
    "lose all but one": (lose_all_but_one, 1, 2, "node1"),
    "lose two after each other": (lose_two_after_each_other, 1, 3, "node1"),
    "lose one while restarting": (lose_one_while_restarting, 2, 4, "node1"),
    "lose two at once": (lose_two_at_once, 2, 4, "node1"),
    "come back": (come_back, 2, 3, "node1"),
    "come back as rank 0": (come_back_as_rank_0, 2, 3, "node2"),
    "come back while restarting": (come_back_while_restarting, 2, 3, "node1"),
}


def run_scenario(cluster: Cluster, scenario: str) -> Path:
    """Run the scenario, and return the run directory."""
    play, least, most, endpoint = SCENARIOS[scenario]
    # The steps are longer where a host comes back, because it starts while the others train.
    seconds = 0.2 if "come back" in scenario else 0.1
    job = ElasticJob(cluster, cluster.hosts[:most], least, endpoint, seconds)
    job.start(*job.hosts)
    play(job)
    job.finish()
    return job.run
