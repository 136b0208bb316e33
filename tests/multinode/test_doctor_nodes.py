"""The doctor on four machines: green where all is well; each fault, planted on one, is named there."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import util
from pathlib import Path

import pytest
from multinode.cluster import Cluster
from multinode.launchers import LAUNCHERS
from support.launch import ROOT, run_directories, write_recipe

pytestmark = pytest.mark.slow


class Report:
    """Rows that `python -m pipeline doctor` printed, each with its fix behind it."""

    def __init__(self, code: int, said: str):
        self.code = code
        self.said = said
        self.rows: list[str] = []
        for line in said.splitlines():
            if line.lstrip().startswith("->") and self.rows:
                self.rows[-1] += " " + line.strip()
            else:
                self.rows.append(re.sub(r" {2,}", "  ", line.rstrip()))

    def row(self, *words: str) -> str:
        """The one row that holds all the words."""
        found = [row for row in self.rows if all(word in row for word in words)]
        assert len(found) == 1, f"{words}:\n{self.said}"
        return found[0]

    def count(self, status: str) -> int:
        return sum(row.split("  ")[1:2] == [status] for row in self.rows)


def doctor(cluster: Cluster, *arguments: str | Path, hosts=None, cwd=ROOT, **environment: str) -> Report:
    """Run the doctor on node1, about all nodes, with native ops and runs in empty folders."""
    hostfile = cluster.hostfile(*(hosts or cluster.hosts))
    folders = (f"runs_dir={cluster.private / 'runs'}", f"data.cache_dir={cluster.private / 'cache'}")
    command = ("python", "-m", "pipeline", "doctor", "--hostfile", hostfile, *arguments, *folders)
    environment = {"TORCH_EXTENSIONS_DIR": str(cluster.private / "ops")} | environment
    done = cluster.run("node1", *command, timeout=300, cwd=cwd, **environment)
    print(done.stdout)
    return Report(done.returncode, done.stdout)


@contextmanager
def changed(cluster: Cluster, node: str, path: str | Path, text: str) -> Iterator[None]:
    """A file of one node with other content, for a while."""
    file = cluster.path(node, path)
    before = file.read_bytes() if file.exists() else None
    file.write_text(text)
    try:
        yield
    finally:
        if before is None:
            file.unlink()
        else:
            file.write_bytes(before)


def torch_version() -> Path:
    """The file that says which version torch is."""
    spec = util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).with_name("version.py")


def older(version: Path) -> str:
    return version.read_text().replace("__version__ = '2", "__version__ = '1")


def test_well_machines_are_green_and_left_as_they_were(cluster):
    report = doctor(cluster)
    assert report.code == 0, report.said
    assert report.count("fail") == 0
    report.row("links  ", "slowest node", "Gbit/s")  # how fast each is, is this machine's affair
    report.row("all-reduce  ok", "over 4 ranks")
    report.row("ports  ok", "all 12 connections")
    report.row("run folder  ok", "each host has its own")
    report.row("interface  ok  eth0")
    cluster.wait_until_idle()
    for node in cluster.hosts:
        assert list(cluster.path(node, cluster.private).rglob(".doctor-*")) == []


def test_each_machine_with_a_fault_of_its_own(cluster):
    """Another commit, other sources or torch, a wrong clock, no memory, a full disk."""
    version = torch_version()
    clock = Path(version).parents[1] / "sitecustomize.py"
    source = ROOT / "pipeline/errors.py"
    with ExitStack() as stack:
        # Namespaces share the machine's clock: Python's is changed instead.
        late = "import time\nreal = time.time\ntime.time = lambda: real() - 5\n"
        stack.enter_context(changed(cluster, "node2", clock, late))
        stack.enter_context(changed(cluster, "node2", ROOT / ".git/HEAD", "1" * 40 + "\n"))
        stack.enter_context(changed(cluster, "node3", source, source.read_text() + "\n"))
        stack.enter_context(changed(cluster, "node3", version, older(version)))
        memory = re.sub(r"MemAvailable: .*", "MemAvailable: 400000 kB", Path("/proc/meminfo").read_text())
        cluster.path("node3", cluster.private / "meminfo").write_text(memory)
        bind = ("mount", "--bind", cluster.private / "meminfo", "/proc/meminfo")
        assert cluster.run("node3", *bind).returncode == 0
        stack.callback(cluster.run, "node3", "umount", "/proc/meminfo")
        stack.enter_context(cluster.small_disk("node4", cluster.private / "runs", "2m"))
        report = doctor(cluster, "--quick")
    assert report.code == 2
    report.row("clock  fail  node2: 5.0 s behind", "ssh node2 timedatectl set-ntp true")
    report.row("project  fail  node2: commit 1111111111, but the launching machine has ", "rsync", "node2:")
    report.row("project  fail  node3: source files differ")
    report.row("versions  fail  node3: torch 1.", "ssh node3", "-m pip install torch==")
    report.row("memory  fail  node3: 391 MiB free for 1 rank")
    report.row("disk  fail  node4: ", "runs: 2 MiB free", "ssh node4 df -h")
    assert report.count("fail") == 6
    assert "node2, node3, node4: 6 failed" in report.said


def test_machines_that_cannot_be_reached(cluster):
    """Unknown, refused, a password asked for, no project there."""
    keys = "/root/.ssh/authorized_keys"
    only_here = cluster.path("node1", cluster.private / "project")
    only_here.mkdir()
    inside = cluster.private / "project"
    cluster.stop_sshd("node2")
    with changed(cluster, "node3", keys, ""):
        report = doctor(cluster, hosts=["node1", "node2", "node3", "node4", "nowhere"], cwd=inside)
    assert report.code == 2
    report.row("ssh  fail  node2: no ssh server answers", "systemctl start ssh")
    report.row("ssh  fail  node3: asks for a password", "ssh-copy-id node3")
    report.row("folder  fail  node4: no folder", "rsync -a")
    report.row("ssh  fail  nowhere: unknown host", "hostfile")
    report.row("all-reduce  warning  skipped", "first: folder, ssh")


@pytest.mark.nightly
def test_a_machine_without_the_python_and_one_that_is_not_this(cluster):
    python = cluster.path("node4", sys.executable)
    config = "Host node3\n StrictHostKeyChecking yes\n UserKnownHostsFile /dev/null\n"
    config += cluster.path("node1", "/root/.ssh/config").read_text()
    python.rename(python.with_name("python-gone"))
    try:
        with changed(cluster, "node1", "/root/.ssh/config", config):
            report = doctor(cluster, "--quick")
    finally:
        python.with_name("python-gone").rename(python)
    assert report.code == 2
    report.row("python  fail  node4: no program", "the same environment on node4")
    report.row("ssh  fail  node3: its host key is not known", "ssh-keyscan")
    assert report.count("fail") == 2

    report = doctor(cluster, "--quick", "--include", "node3")
    assert report.code == 2
    report.row("hosts  fail  node3: node3 is the only host", "--force_multi")
    assert doctor(cluster, "--quick", "--include", "node3", "--force_multi").code == 0


@pytest.mark.nightly
def test_a_network_with_traps(cluster):
    """A closed port, one way; an own name that is loopback; one that leads to another network."""
    hosts = cluster.path("node3", "/etc/hosts").read_text()
    loopback = hosts.replace("10.77.0.13 node3", "127.0.1.1 node3")
    other = hosts.replace("10.77.0.14 node4", "192.168.9.4 node4")
    assert loopback != hosts != other
    rule = "ip saddr 10.77.0.14 tcp flags & (syn|ack) == syn tcp dport 1024-65535 drop"
    chain = "add table ip t; add chain ip t in { type filter hook input priority 0 ; }; add rule ip t in "
    with ExitStack() as stack:
        stack.enter_context(changed(cluster, "node3", "/etc/hosts", loopback))
        stack.enter_context(changed(cluster, "node4", "/etc/hosts", other))
        for command in (
            "ip link add br9 type bridge",
            "ip addr add 192.168.9.4/24 dev br9",
            "ip link set br9 up",
        ):
            assert cluster.run("node4", *command.split()).returncode == 0
        stack.callback(cluster.run, "node4", "ip", "link", "del", "br9")
        assert cluster.run("node2", "nft", chain + rule).returncode == 0
        stack.callback(cluster.run, "node2", "nft", "flush ruleset")
        report = doctor(cluster, "--quick")
        repaired = doctor(cluster, "--quick", GLOO_SOCKET_IFNAME="eth0")
        wrong = doctor(cluster, "--quick", GLOO_SOCKET_IFNAME="eth7")
    assert report.code == 2
    report.row("ports  fail", "node4 -> node2: no answer within 10 s", "10.77.0.12", "ssh node2 iptables")
    report.row("interface  fail  node3: gloo would advertise 127.0.1.1", "export GLOO_SOCKET_IFNAME=eth0")
    report.row("interface  fail  node4: gloo would use br9 (192.168.9.4)", "export GLOO_SOCKET_IFNAME=eth0")
    assert report.count("fail") == 3
    repaired.row("interface  ok  eth0")
    assert repaired.count("fail") == 1
    wrong.row("interface  fail  node1, node2, node3, node4: GLOO_SOCKET_IFNAME=eth7")


@pytest.mark.nightly
def test_a_slow_link_is_named(cluster):
    limit = "tc qdisc add dev eth0 root tbf rate 200mbit burst 256kbit latency 100ms"
    assert cluster.run("node3", *limit.split()).returncode == 0
    try:
        report = doctor(cluster)
    finally:
        cluster.run("node3", *["tc", "qdisc", "del", "dev", "eth0", "root"])
    assert report.code == 0
    report.row("links  warning  node3", "slowest node3 -> node4 0.")


def test_under_srun(cluster, slurm):
    """Every task looks at its own machine; the first one tells."""
    command = ["srun", "--nodes=4", "--ntasks-per-node=1", "python", "-m", "pipeline", "doctor", "--quick"]
    command += [f"runs_dir={cluster.private / 'runs'}", f"data.cache_dir={cluster.private / 'cache'}"]
    ops = {"TORCH_EXTENSIONS_DIR": str(cluster.private / "ops")}
    version = torch_version()
    with changed(cluster, "node3", version, older(version)):
        done = cluster.run("node1", *command, timeout=300, **ops)
    print(done.stdout)
    report = Report(done.returncode, done.stdout)
    report.row("versions  fail  node3: torch 1.", "-m pip install torch==")
    assert report.count("fail") == 1
    assert report.code == 2
    cluster.wait_until_idle()


@pytest.mark.daily("multi_node")
@pytest.mark.parametrize("launcher", ["multi_node", "sbatch"])
def test_a_launch_looks_first(cluster, slurm, launcher):
    """A red node is named and nothing starts."""
    recipe = write_recipe(cluster.shared)
    version = torch_version()
    with changed(cluster, "node2", version, older(version)):
        (job,) = LAUNCHERS[launcher](cluster, cluster.hosts[:2], "--config", str(recipe))
        assert job.wait(300) == 2, job.text
    Report(2, job.text).row("versions  fail  node2: torch 1.")
    assert run_directories(cluster.shared) == []
    cluster.wait_until_idle()
