"""Fixture `cluster`: four nodes on this machine (node1 to node4), in their first state for each test.

cluster.run("node2", "hostname").stdout       run a command to its end: stdout has both streams; .returncode
job = cluster.start("node1", "deepspeed")     start a command: job.wait_for("step 3", 60), job.text,
                                              job.wait(30) -> exit code, job.command: its psutil process;
                                              keyword arguments are its environment
cluster.shared, cluster.private               new folders for each test: `shared` is one folder on all nodes
                                              and outside of them, `private` a separate one on each node
cluster.path("node2", "/etc/hosts")           path of a node's file from outside, to read or write it
cluster.hostfile("node1", "node2", slots=1)   a hostfile in the shared folder
cluster.processes("node2", "train.py")        psutil processes, without services
cluster.remaining_commands()                  command lines of all processes without services, by node
cluster.kill("node2", "train.py")             SIGKILL by words of the command line; cluster.ranks("node2")
cluster.disconnect("node2")                   take a node off the network; cluster.reconnect_all()
cluster.power_off("node2")                    network and processes end together; cluster.stop_sshd("node2")
cluster.small_disk("node2", folder, "2m")     context manager: a small file system on a folder

Every node sees this machine's files (the project, the venv) and writes to its own copy. Root on each node can
log in to every other by ssh, by the names of /etc/hosts. The nodes' network has no way out. Without root or
the packages of install.sh, the tests are skipped with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from multinode.cluster import Cluster, find_missing_requirement
from multinode.slurm import start_slurm


@pytest.fixture(scope="session")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Start four nodes for all tests; skip the tests if this machine cannot have nodes."""
    reason = find_missing_requirement()
    if reason is not None:
        pytest.skip(reason)
    with Cluster(4, tmp_path_factory.mktemp("nodes")) as started:
        yield started


@pytest.fixture(scope="session")
def slurm(nodes: Cluster) -> None:
    """Start Slurm on the four nodes."""
    start_slurm(nodes)


@pytest.fixture
def cluster(nodes: Cluster) -> Iterator[Cluster]:
    """Give the nodes with new folders, and restore them after the test."""
    nodes.make_folders()
    yield nodes
    nodes.restore()
