"""The ways to start a job on nodes, as a user types them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from multinode.cluster import Cluster, Launched
from support.launch import BIN, ROOT, TRAIN

HERE = ROOT / "tests"
"""Folder where jobs are started: the modules of the tests are found from there."""
PYTHON = str(BIN / "python")
PORT = "29511"
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


class Launcher(Protocol):
    """Starts launch/train.py with these arguments on these hosts, one rank on each: the commands it takes."""

    def __call__(
        self, cluster: Cluster, hosts: Sequence[str], *arguments: str, **environment: str
    ) -> list[Launched]: ...


def deepspeed(cluster: Cluster, hosts: Sequence[str], *arguments: str, **environment: str) -> list[Launched]:
    """Start DeepSpeed's own launcher, unchanged, over pdsh."""
    command = ["deepspeed", "--hostfile", str(cluster.hostfile(*hosts)), "--force_multi", TRAIN]
    return [cluster.start(hosts[0], *command, *arguments, cwd=HERE, **environment)]


def multi_node(cluster: Cluster, hosts: Sequence[str], *arguments: str, **environment: str) -> list[Launched]:
    command = [str(ROOT / "launch" / "multi_node.sh"), str(cluster.hostfile(*hosts))]
    return [cluster.start(hosts[0], *command, *arguments, cwd=HERE, **environment)]


def multi_node_openmpi(
    cluster: Cluster, hosts: Sequence[str], *arguments: str, **environment: str
) -> list[Launched]:
    """mpirun in pdsh's place."""
    environment = AS_ROOT | environment
    return multi_node(cluster, hosts, "--launcher", "openmpi", *arguments, **environment)


def openmpi(cluster: Cluster, hosts: Sequence[str], *arguments: str, **environment: str) -> list[Launched]:
    command = ["mpirun", "--hostfile", str(cluster.hostfile(*hosts)), "-n", str(len(hosts))]
    command += ["--bind-to", "none", "--mca", "oob_tcp_if_include", "eth0", PYTHON, TRAIN]
    return [cluster.start(hosts[0], *command, *arguments, cwd=HERE, **AS_ROOT, **environment)]


def srun(cluster: Cluster, hosts: Sequence[str], *arguments: str, **environment: str) -> list[Launched]:
    command = ["srun", "--nodelist", ",".join(hosts), "--nodes", str(len(hosts)), "--ntasks-per-node", "1"]
    return [cluster.start(hosts[0], *command, PYTHON, TRAIN, *arguments, cwd=HERE, **environment)]


def sbatch(cluster: Cluster, hosts: Sequence[str], *arguments: str, **environment: str) -> list[Launched]:
    """Submit a job with sbatch and wait for it; it gives the job's exit code and output."""
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
) -> list[Launched]:
    """`nodes`: MIN:MAX, where they are not all; `endpoint`: the host where they meet, else the first.

    Where all others are lost, torchrun's half a minute for them is cut short.
    """
    where = f"{endpoint or hosts[0]}:{PORT}"
    command = [str(ROOT / "launch" / "torchrun.sh"), "--nnodes", nodes or str(len(hosts))]
    command += ["--rdzv-endpoint", where, *(["--rdzv-conf=last_call_timeout=10"] if nodes == "1:2" else [])]
    return [cluster.start(host, *command, *arguments, cwd=HERE, **environment) for host in hosts]


LAUNCHERS: dict[str, Launcher] = {
    "deepspeed": deepspeed,
    "multi_node": multi_node,
    "multi_node_openmpi": multi_node_openmpi,
    "openmpi": openmpi,
    "srun": srun,
    "sbatch": sbatch,
    "torchrun": torchrun,
}
