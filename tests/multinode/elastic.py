"""Faults of machines in an elastic torchrun job, which trains on without them: `--nnodes MIN:MAX`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from multinode.cluster import Cluster, Launched, wait_until
from multinode.launchers import torchrun
from support.launch import ROOT, write_recipe

STEPS = 100
PATIENCE = 400
"""Seconds until a job that does not train is given up: torchrun's own waits add up to a minute and a half."""
GONE = r"(is gone|sends no heartbeat)"


def recipe(folder: Path, seconds: float) -> Path:
    """Points in the plane, by a model whose forward lasts so long; 12 samples a step, on 1 to 4 ranks."""
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
    # Both: a CPU with instructions for fp16 would take that.
    fp32 = ["ds.bf16.enabled=false", "ds.fp16.enabled=false"]
    split = ["--deepspeed", str(ROOT / "ds_configs" / "zero2.json"), *fp32]
    return ["--config", str(recipe(cluster.shared, seconds)), *split]


@dataclass
class Elastic:
    """A job that goes on while at least `least` of its hosts are left; they meet on `endpoint`."""

    cluster: Cluster
    hosts: list[str]
    least: int
    endpoint: str
    seconds: float
    """Seconds of a step; those of a whole run are enough for all faults."""
    jobs: dict[str, Launched] = field(default_factory=dict)
    """Jobs of the hosts that are there now."""
    lost: list[Launched] = field(default_factory=list)

    @property
    def run(self) -> Path:
        return self.cluster.shared / "run"

    def start(self, *hosts: str) -> None:
        """Start the same command on each of these hosts."""
        words = [*arguments(self.cluster, self.seconds), f"run_dir={self.run}"]
        for host in hosts:
            size = f"{self.least}:{len(self.hosts)}"
            self.jobs[host] = torchrun(self.cluster, [host], *words, nodes=size, endpoint=self.endpoint)[0]

    def lose(self, *hosts: str) -> None:
        """Their power goes."""
        for host in hosts:
            self.lost.append(self.jobs.pop(host))
            self.cluster.lose(host)

    def come_back(self, host: str) -> None:
        """Give the host power again, and start the same command on it."""
        self.cluster.heal()
        self.start(host)

    def wait_until_training(self, world_size: int) -> None:
        """Wait until so many ranks train, some steps after a checkpoint."""
        before = self._sizes()

        def trains() -> bool:
            self._look()
            return (
                self._sizes() != before and self._sizes()[-1] == world_size and self._steps_of_the_last() > 7
            )

        wait_until(trains, PATIENCE, f"training on {world_size} ranks; {self.text()}")

    def wait_for(self, pattern: str) -> None:
        """Wait until a job prints the pattern once more."""
        before = len(re.findall(pattern, self.text()))
        wait_until(lambda: len(re.findall(pattern, self.text())) > before, PATIENCE, pattern)

    def finish(self) -> None:
        """Wait for the end of the run."""
        for host, job in self.jobs.items():
            assert job.wait(PATIENCE) == 0, f"{host}: {self.text()}"

    def text(self) -> str:
        return "\n".join(job.text for job in [*self.lost, *self.jobs.values()])

    def _look(self) -> None:
        for host, job in self.jobs.items():
            assert job.process.poll() is None, f"{host}: {self.text()}"

    def _sizes(self) -> list[int]:
        """Return the number of ranks of each attempt that has begun to train."""
        return [int(count) for count in re.findall(r"(\d+) ranks? on cpu", self._log())]

    def _log(self) -> str:
        path = self.run / "logs" / "rank00000.log"
        return path.read_text() if path.exists() else ""

    def _steps_of_the_last(self) -> int:
        rows = (self.run / "metrics.jsonl").read_text().count("train/loss")
        begins = re.findall(r"resuming .* from step-0*(\d+)", self._log())
        return rows - int(begins[-1] if begins else 0)


def lose_all_but_one(job: Elastic) -> None:
    job.wait_until_training(2)
    job.lose("node2")
    job.wait_until_training(1)


def lose_one(job: Elastic) -> None:
    job.wait_until_training(3)
    job.lose("node3")
    job.wait_until_training(2)


def lose_rank_0(job: Elastic) -> None:
    """All machines need another address of rank 0 than before."""
    job.wait_until_training(3)
    job.lose("node1")
    job.wait_until_training(2)


def lose_two_after_each_other(job: Elastic) -> None:
    lose_one(job)
    job.lose("node2")
    job.wait_until_training(1)


def lose_one_while_restarting(job: Elastic) -> None:
    job.wait_until_training(4)
    job.lose("node4")
    job.wait_for(GONE)
    job.lose("node3")
    job.wait_until_training(2)


def lose_two_at_once(job: Elastic) -> None:
    job.wait_until_training(4)
    job.lose("node3", "node4")
    job.wait_until_training(2)


def come_back(job: Elastic) -> None:
    lose_one(job)
    job.come_back("node3")
    job.wait_until_training(3)


def come_back_as_rank_0(job: Elastic) -> None:
    lose_rank_0(job)
    job.come_back("node1")
    job.wait_until_training(3)


def come_back_while_restarting(job: Elastic) -> None:
    job.wait_until_training(3)
    job.lose("node3")
    job.wait_for(GONE)
    job.come_back("node3")
    job.wait_until_training(3)


Story = Callable[[Elastic], None]
STORIES: dict[str, tuple[Story, int, int, str]] = {
    # What happens, the least number of machines and the most, and the one where they meet.
    "lose all but one": (lose_all_but_one, 1, 2, "node1"),
    "lose two after each other": (lose_two_after_each_other, 1, 3, "node1"),
    "lose one while restarting": (lose_one_while_restarting, 2, 4, "node1"),
    "lose two at once": (lose_two_at_once, 2, 4, "node1"),
    "come back": (come_back, 2, 3, "node1"),
    "come back as rank 0": (come_back_as_rank_0, 2, 3, "node2"),
    "come back while restarting": (come_back_while_restarting, 2, 3, "node1"),
}


def tell(cluster: Cluster, story: str) -> Path:
    """Run the story and return the run's directory."""
    happens, least, most, endpoint = STORIES[story]
    # A machine that comes back starts while the others train.
    seconds = 0.2 if "come back" in story else 0.1
    job = Elastic(cluster, cluster.hosts[:most], least, endpoint, seconds)
    job.start(*job.hosts)
    happens(job)
    job.finish()
    return job.run
