"""Starts a real Slurm on the nodes: munge and slurmd on each, slurmctld on the first."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from multinode.cluster import Cluster, wait_until

# A requeued job waits until its credentials expire, which takes two minutes by default.
CONFIG = """\
ClusterName=nodes
SlurmctldHost={first}
SlurmUser=root
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile=/var/log/slurmctld.log
SlurmdLogFile=/var/log/slurmd.log
AuthType=auth/munge
AuthInfo=cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
MpiDefault=none
ReturnToService=2
KillWait=5
SlurmdParameters=config_overrides
NodeName={hosts} CPUs={cores} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def start_slurm(cluster: Cluster) -> None:
    """Start Slurm, and return when all nodes are idle. Its services run until the nodes end."""
    key = os.urandom(128)
    config = CONFIG.format(first=cluster.hosts[0], hosts=",".join(cluster.hosts), cores=os.cpu_count())
    for node in cluster.hosts:
        path = cluster.path(node, "/etc/munge/munge.key")
        path.unlink(missing_ok=True)
        path.write_bytes(key)
        path.chmod(0o600)
        folders = [cluster.path(node, f"/{where}/munge") for where in ("etc", "run", "var/log", "var/lib")]
        for name in (path, *folders):
            shutil.chown(name, "munge", "munge")
        cluster.path(node, "/etc/slurm/slurm.conf").write_text(config)
        _start_service(cluster, node, "runuser", "-u", "munge", "--", "munged")
    _start_service(cluster, cluster.hosts[0], "slurmctld")
    for node in cluster.hosts:
        _start_service(cluster, node, "slurmd")

    def are_idle() -> bool:
        states = cluster.run(cluster.hosts[0], "sinfo", "--noheader", "--Node", "--format=%t").stdout
        return states.split() == ["idle"] * len(cluster.hosts)

    wait_until(are_idle, 300, "every node idle in sinfo")


def _start_service(cluster: Cluster, node: str, *command: str) -> None:
    """Start a service that moves itself to the background."""
    result = cluster.run(node, *command, cwd=Path("/"))
    assert result.returncode == 0, f"{command} on {node}: {result.stdout}"
