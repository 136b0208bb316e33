"""`cluster`: four nodes on this machine (node1 to node4), as they were at the start for each test.

cluster.run("node2", "hostname").stdout       a command to its end: both streams in stdout; .returncode
job = cluster.start("node1", "deepspeed")     a command that goes on: job.wait_for("step 3", 60), job.text,
                                              job.wait(30) -> exit code, job.command: its psutil process;
                                              keyword arguments are its environment
cluster.shared, cluster.private               folders, new for each test: one on all nodes (and outside, by
                                              the same path), and one of one path on each node alone
cluster.path("node2", "/etc/hosts")           a file of a node, from outside: read it, write it
cluster.hostfile("node1", "node2", slots=1)   a hostfile in the shared folder
cluster.processes("node2", "train.py")        psutil processes, without services
cluster.remaining_commands()                  command lines of all processes without services, by node
cluster.kill("node2", "train.py")             SIGKILL by words of the command line; cluster.ranks("node2")
cluster.cut("node2"), cluster.heal()          the network; cluster.lose: power off; cluster.stop_sshd
cluster.small_disk("node2", folder, "2m")     a context: a small file system on a folder

Every node sees this machine's files (the project, the venv) and writes to its own copy. Ssh goes between all
of them as root without a question, by names of /etc/hosts; their network has no way out. Skipped, with the
reason, without root or without the packages of install.sh.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from multinode.cluster import Cluster, what_is_missing
from multinode.slurm import start_slurm


@pytest.fixture(scope="session")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    reason = what_is_missing()
    if reason is not None:
        pytest.skip(reason)
    with Cluster(4, tmp_path_factory.mktemp("nodes")) as four:
        yield four


@pytest.fixture(scope="session")
def slurm(nodes: Cluster) -> None:
    """A Slurm over the four of them."""
    start_slurm(nodes)


@pytest.fixture
def cluster(nodes: Cluster) -> Iterator[Cluster]:
    nodes.begin()
    yield nodes
    nodes.restore()
