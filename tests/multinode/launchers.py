"""Starts a job on nodes by each launcher, with the commands that a user types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from multinode.cluster import Cluster, NodeCommand
from support.launch import BIN, ROOT, TRAIN

START_FOLDER = ROOT / "tests"
"""Working directory of jobs, from which they can import the modules of the tests."""
PYTHON = str(BIN / "python")
PORT = "29511"
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


class Launcher(Protocol):
    """Starts launch/train.py with one rank on each host, and returns the commands that it started."""

    def __call__(
        self, cluster: Cluster, hosts: Sequence[str], *arguments: str, **environment: str
    ) -> list[NodeCommand]: ...


def deepspeed(
    cluster: Cluster, hosts: Sequence[str], *arguments: str, **environment: str
) -> list[NodeCommand]:
    """Start DeepSpeed's own launcher, unchanged, over pdsh."""
    command = ["deepspeed", "--hostfile", str(cluster.hostfile(*hosts)), "--force_multi", TRAIN]
    return [cluster.start(hosts[0], *command, *arguments, cwd=START_FOLDER, **environment)]


def multi_node(
    cluster: Cluster, hosts: Sequence[str], *arguments: str, **environment: str
) -> list[NodeCommand]:
    """Start launch/multi_node.sh, which uses pdsh."""
    command = [str(ROOT / "launch" / "multi_node.sh"), str(cluster.hostfile(*hosts))]
    return [cluster.start(hosts[0], *command, *arguments, cwd=START_FOLDER, **environment)]


def multi_node_openmpi(
    cluster: Cluster, hosts: Sequence[str], *arguments: str, **environment: str
) -> list[NodeCommand]:
    """Start launch/multi_node.sh with mpirun instead of pdsh."""
    environment = AS_ROOT | environment
    return multi_node(cluster, hosts, "--launcher", "openmpi", *arguments, **environment)


def openmpi(cluster: Cluster, hosts: Sequence[str], *arguments: str, **environment: str) -> list[NodeCommand]:
    """Start launch/train.py with mpirun."""
    command = ["mpirun", "--hostfile", str(cluster.hostfile(*hosts)), "-n", str(len(hosts))]
    command += ["--bind-to", "none", "--mca", "oob_tcp_if_include", "eth0", PYTHON, TRAIN]
    return [cluster.start(hosts[0], *command, *arguments, cwd=START_FOLDER, **AS_ROOT, **environment)]


def srun(cluster: Cluster, hosts: Sequence[str], *arguments: str, **environment: str) -> list[NodeCommand]:
    """Start launch/train.py with srun."""
    command = ["srun", "--nodelist", ",".join(hosts), "--nodes", str(len(hosts)), "--ntasks-per-node", "1"]
    return [cluster.start(hosts[0], *command, PYTHON, TRAIN, *arguments, cwd=START_FOLDER, **environment)]


def sbatch(cluster: Cluster, hosts: Sequence[str], *arguments: str, **environment: str) -> list[NodeCommand]:
    """Submit a job with sbatch; the command waits for the job, and has its exit code and output."""
    output = cluster.shared / "slurm.out"
    command = ["sbatch", "--wait", "--output", str(output), "--nodelist", ",".join(hosts)]
    command += ["--nodes", str(len(hosts)), "--ntasks-per-node", "1", "launch/slurm.sbatch"]
    submit = f'"$@"; code=$?; cat {output}; exit $code'
    words = ["bash", "-c", submit, "submit", *command, *arguments]
    return [cluster.start(hosts[0], *words, **environment)]


def torchrun(
    cluster: Cluster,
    hosts: Sequence[str],
    *arguments: str,
    nodes: str | None = None,
    endpoint: str | None = None,
    **environment: str,
) -> list[NodeCommand]:
    """Start launch/torchrun.sh on each host.

    Args:
        nodes: MIN:MAX for an elastic job; `None`: the number of hosts.
        endpoint: Host of the rendezvous; `None`: the first host.
    """
    address = f"{endpoint or hosts[0]}:{PORT}"
    command = [str(ROOT / "launch" / "torchrun.sh"), "--nnodes", nodes or str(len(hosts))]
    command += ["--rdzv-endpoint", address]
    if nodes == "1:2":
        # After the loss of one host, torchrun would wait half a minute for it to return.
        command.append("--rdzv-conf=last_call_timeout=10")
    return [cluster.start(host, *command, *arguments, cwd=START_FOLDER, **environment) for host in hosts]


LAUNCHERS: dict[str, Launcher] = {
    "deepspeed": deepspeed,
    "multi_node": multi_node,
    "multi_node_openmpi": multi_node_openmpi,
    "openmpi": openmpi,
    "srun": srun,
    "sbatch": sbatch,
    "torchrun": torchrun,
}
