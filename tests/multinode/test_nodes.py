"""The nodes themselves: apart where machines are apart, together where they are together."""

from __future__ import annotations

import pytest
from multinode.cluster import wait_until

pytestmark = pytest.mark.slow


def test_nodes_are_machines_of_their_own(cluster):
    everyone = cluster.run("node1", "pdsh", "-R", "ssh", "-w", "node[1-4]", "cat /proc/sys/kernel/hostname")
    assert sorted(everyone.stdout.splitlines()) == [f"{host}: {host}" for host in cluster.hosts]
    cluster.run("node1", "bash", "-c", f"echo mine > {cluster.private}/a; echo ours > {cluster.shared}/b")
    assert cluster.run("node2", "cat", cluster.private / "a").returncode == 1
    assert cluster.run("node2", "cat", cluster.shared / "b").stdout == "ours\n"
    assert cluster.path("node1", cluster.private / "a").read_text() == "mine\n"
    assert (cluster.shared / "b").read_text() == "ours\n"

    sleeper = cluster.start("node3", "bash", "-c", "sleep 1000 & (sleep 1001 &); wait")
    wait_until(lambda: len(cluster.processes("node3", "sleep 100")) == 3, 100, "the shell and its own two")
    assert list(cluster.left()) == ["node3"]
    cluster.cut("node3")
    assert cluster.run("node1", "ssh", "-o", "ConnectTimeout=2", "node3", "true").returncode == 255
    cluster.heal()
    assert cluster.run("node1", "ssh", "node3", "hostname").stdout == "node3\n"
    cluster.stop_sshd("node3")
    assert cluster.run("node1", "ssh", "node3", "hostname").returncode == 255
    cluster.kill("node3")
    assert sleeper.wait(100) == -9
    cluster.wait_until_idle()

    with cluster.small_disk("node3", cluster.private, "1m"):
        fill = ["dd", "if=/dev/zero", f"of={cluster.private}/x", "bs=1M", "count=2"]
        assert "No space left on device" in cluster.run("node3", *fill).stdout
    assert not list(cluster.path("node2", cluster.private).iterdir())


def test_each_test_finds_them_as_they_were(cluster):
    assert cluster.left() == {}
    assert not list(cluster.shared.iterdir())
    assert cluster.run("node1", "ssh", "node3", "hostname").stdout == "node3\n"
