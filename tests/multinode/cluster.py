"""Nodes on one machine: each with its own network, mounts, processes, host name, shared memory and sshd.

All of it hangs on pipes that this process holds: however it ends, the kernel takes the nodes away.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil
from support.launch import BIN, ROOT

NETWORK = "10.77.0"
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PROGRAMS = (
    *("ip", "nft", "sshd", "ssh-keygen", "nsenter", "unshare"),
    *("pdsh", "mpirun", "srun", "slurmctld", "slurmd", "munged"),
)
SPACES = ("--net", "--mount", "--pid", "--uts", "--ipc", "--fork")
PROBE = """
mount -t tmpfs tmpfs /mnt
mkdir /mnt/{upper,work,root}
mount -t overlay overlay -o lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/work /mnt/root
ip link add br0 type bridge
ip link add v0 type veth peer name v1
tc qdisc add dev v0 root tbf rate 200mbit burst 256kbit latency 100ms
nft add table ip t
"""
"""System calls that nodes, and the tests on them, need."""
SERVICES = ("sshd", "munged", "slurmctld", "slurmscriptd", "slurmd")


def what_is_missing() -> str | None:
    """Reason why there can be no nodes here; None if there can."""
    if os.geteuid() != 0:
        return "nodes need root"
    missing = [name for name in PROGRAMS if shutil.which(name, path=SYSTEM_PATH) is None]
    if missing:
        return f"nodes need {', '.join(missing)}: tests/multinode/install.sh installs them"
    probe = subprocess.run(
        ["unshare", *SPACES, "bash", "-ec", PROBE], capture_output=True, text=True, check=False
    )
    if probe.returncode:
        return f"nodes need namespaces, overlays and virtual networks: {probe.stderr.strip()}"
    try:
        group = _cgroups() / f"nodes-{os.getpid()}"
        group.mkdir()
        group.rmdir()
    except OSError as error:
        return f"nodes need control groups: {error}"
    return None


def _cgroups() -> Path:
    """Folder of the control group for processor shares: version 1 has a folder for each controller."""
    first = Path("/sys/fs/cgroup/cpu")
    return first if first.is_dir() else first.parent


def wait_until(done: Callable[[], object], seconds: float, what: str) -> None:
    """Poll until `done()`; raise an AssertionError with `what` when the time is over."""
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.05)


@dataclass
class Launched:
    """A command that runs on a node; both its streams go to a file."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def command(self) -> psutil.Process:
        """The command's own process: what was started here is nsenter, which waits for it."""
        (child,) = psutil.Process(self.process.pid).children()
        return child

    def wait(self, seconds: float) -> int:
        """Its exit code; -n: killed by signal n."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds} s:\n{self.text}") from None

    def wait_for(self, pattern: str, seconds: float = 400) -> str:
        """Wait until its output matches a regular expression, and return the match."""

        def said() -> bool:
            found = re.search(pattern, self.text) is not None
            assert found or self.process.poll() is None, f"ended ({self.process.returncode}):\n{self.text}"
            return found

        wait_until(said, seconds, f"{pattern!r} in {self.log}")
        match = re.search(pattern, self.text)
        assert match is not None
        return match[0]


class Node:
    """One of the machines: from outside its files lie under `root`, its processes are in `processes()`."""

    def __init__(self, name: str, address: str, folder: Path, hosts: Path, shared: Path):
        self.name, self.address = name, address
        self.log = folder / f"{name}.log"
        script = [Path(__file__).with_name("node.sh"), folder, name, hosts, shared]
        with self.log.open("wb") as log:
            self.holder = subprocess.Popen(
                ["unshare", *SPACES, "--kill-child", "--propagation", "private", *map(str, script)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={"PATH": SYSTEM_PATH, "HOME": "/root", "LANG": "C.UTF-8"},
            )
        wait_until(self._children, 100, f"{name} starts")
        (self.pid,) = self._children()

    def _children(self) -> list[int]:
        pid = self.holder.pid
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    @property
    def root(self) -> Path:
        """Its root directory as seen from outside."""
        return Path(f"/proc/{self.pid}/root")

    @property
    def _listens(self) -> Path:
        """sshd's process id: written once it listens, and left where it is killed."""
        return self.root / "run/node_sshd.pid"

    def wait_for_ssh(self) -> None:
        def serves() -> bool:
            assert self.holder.poll() is None, self.log.read_text()
            return self._listens.exists()

        wait_until(serves, 200, f"sshd on {self.name}; {self.log}")

    def stop_sshd(self) -> None:
        """End sshd and its connections, and wait until the port is free."""

        def is_gone() -> bool:
            left = self._running(lambda name: name == "sshd")
            for process in left:
                with suppress(psutil.Error):
                    process.kill()
            return not left

        wait_until(is_gone, 200, f"no sshd on {self.name}")
        self._listens.unlink(missing_ok=True)

    def processes(self, *words: str) -> list[psutil.Process]:
        """Return processes other than the services whose command line holds all of `words`."""
        return self._running(lambda name: name not in SERVICES, *words)

    def _running(self, is_meant: Callable[[str], bool], *words: str) -> list[psutil.Process]:
        space = os.readlink(f"/proc/{self.pid}/ns/pid")
        found = []
        for process in psutil.process_iter():
            with suppress(OSError, psutil.Error):
                mine = os.readlink(f"/proc/{process.pid}/ns/pid") == space and process.pid != self.pid
                if mine and is_meant(process.name()) and process.status() != psutil.STATUS_ZOMBIE:
                    line = " ".join(process.cmdline())
                    if all(word in line for word in words):
                        found.append(process)
        return found


class Cluster:
    """`count` nodes, node1 to nodeN, on one bridge with no way out. A context manager."""

    def __init__(self, count: int, folder: Path):
        self.folder = folder
        self.shared = self.common = folder / "shared"
        self.private = Path("/private")
        self.common.mkdir()
        self._launched: list[Launched] = []
        self._groups: list[Path] = []
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "key")], check=True)
        addresses = {f"node{i}": f"{NETWORK}.1{i}" for i in range(1, count + 1)}
        hosts = folder / "hosts"
        lines = [f"{address} {name}" for name, address in addresses.items()]
        hosts.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        hold = [
            "unshare",
            "--net",
            "bash",
            "-c",
            "ip link add br0 type bridge && ip link set br0 up; echo; read",
        ]
        self._switch = subprocess.Popen(hold, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._nodes: dict[str, Node] = {}
        try:
            assert self._switch.stdout is not None
            self._switch.stdout.readline()
            for name, address in addresses.items():
                self._nodes[name] = Node(name, address, folder, hosts, self.common)
            for node in self._nodes.values():
                self._connect(node)
                node.wait_for_ssh()
        except BaseException:
            self.close()
            raise

    def _connect(self, node: Node) -> None:
        def ip(pid: int, command: str) -> None:
            subprocess.run(["nsenter", "-t", str(pid), "-n", "ip", *command.split()], check=True)

        switch = self._switch.pid
        ip(switch, f"link add {node.name} type veth peer name eth0 netns {node.pid}")
        ip(switch, f"link set {node.name} master br0 up")
        ip(node.pid, f"addr add {node.address}/24 dev eth0")
        ip(node.pid, "link set eth0 up")

    @property
    def hosts(self) -> list[str]:
        return list(self._nodes)

    def path(self, node: str, inside: str | Path) -> Path:
        """Return the path of a node's file, as seen from outside."""
        return self._nodes[node].root / str(inside).lstrip("/")

    def hostfile(self, *hosts: str, slots: int = 1) -> Path:
        """Write a hostfile in the shared folder and return its path."""
        path = self.shared / "hostfile"
        path.write_text("".join(f"{host} slots={slots}\n" for host in hosts))
        return path

    def start(self, node: str, *command: str | Path, cwd: Path = ROOT, **environment: str) -> Launched:
        """Start a command on the node, with a log-in's environment, the venv first, and `environment`."""
        inside = ["nsenter", "-t", str(self._nodes[node].pid), "-n", "-m", "-p", "-u", "-i", "-r", "-w"]
        log = self.folder / f"output-{len(list(self.folder.glob('output-*')))}.log"
        base = {"PATH": f"{BIN}:{SYSTEM_PATH}", "HOME": "/root", "USER": "root", "LANG": "C.UTF-8"}
        base["OMP_NUM_THREADS"] = "1"  # the nodes share this machine's cores; sshd sets it too
        with log.open("wb") as file:
            process = subprocess.Popen(
                [*inside, "--", "env", "-C", str(cwd), *map(str, command)],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=base | environment,
                start_new_session=True,
            )
        self._launched.append(Launched(process, log))
        return self._launched[-1]

    def run(
        self, node: str, *command: str | Path, cwd: Path = ROOT, timeout: float = 300, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end; stdout is both its streams."""
        launched = self.start(node, *command, cwd=cwd, **environment)
        code = launched.wait(timeout)
        return subprocess.CompletedProcess(command, code, launched.text, "")

    def processes(self, node: str, *words: str) -> list[psutil.Process]:
        """Return the node's processes, without its services, by words of the command line."""
        return self._nodes[node].processes(*words)

    def pythons(self, node: str, *words: str) -> list[psutil.Process]:
        """Return only Python processes: not the shells above them, which have the same words."""
        return [process for process in self.processes(node, *words) if process.name().startswith("python")]

    def ranks(self, node: str) -> list[psutil.Process]:
        """Return the training processes of a node, by the variables that each launcher sets."""
        names = {"RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"}
        return [process for process in self.pythons(node, "train.py") if names & process.environ().keys()]

    def remaining_commands(self) -> dict[str, list[str]]:
        """Command lines of all that runs, by node; empty: nothing does."""
        found: dict[str, list[str]] = {}
        for node in self.hosts:
            for process in self.processes(node):
                with suppress(psutil.Error):  # one that has ended meanwhile
                    command = " ".join(process.cmdline())
                    found.setdefault(node, []).append(command)
        return found

    def wait_until_idle(self) -> None:
        """Wait up to a minute until nothing runs; Slurm's step daemons outlive srun by a moment."""
        with suppress(AssertionError):
            wait_until(lambda: not self.remaining_commands(), 60, "nothing runs")
        assert self.remaining_commands() == {}

    def kill(self, node: str, *words: str) -> None:
        """SIGKILL to each process of the node whose command line holds all of `words`; at least one."""
        processes = self.processes(node, *words)
        assert processes, f"no process with {words} on {node}: {self.remaining_commands()}"
        for process in processes:
            with suppress(psutil.Error):
                process.kill()

    def lose(self, node: str) -> None:
        """Cut the node's power: its link and its processes end together. Its files stay."""
        self.cut(node)
        self.kill(node)

    def cut(self, node: str) -> None:
        """Take the node off the network."""
        self._link(node, "down")

    def heal(self) -> None:
        """Every node is on the network again."""
        for node in self.hosts:
            self._link(node, "up")

    def _link(self, node: str, state: str) -> None:
        command = ["nsenter", "-t", str(self._switch.pid), "-n", "ip", "link", "set", node, state]
        subprocess.run(command, check=True)

    def stop_sshd(self, node: str) -> None:
        """No new connection is served, and those there are end."""
        self._nodes[node].stop_sshd()

    def begin(self) -> None:
        """Make new, empty folders."""
        name = f"{len(list(self.common.iterdir()))}"
        self.shared = self.common / name
        self.shared.mkdir()
        self.private = Path("/private") / name
        for host in self.hosts:
            self.path(host, self.private).mkdir(parents=True)

    def limit_cpu(self, node: str, share: float) -> None:
        """Limit the node's current processes to this share of one core, together; `restore` lifts it."""
        period = 100_000
        quota = int(share * period)
        group = _cgroups() / f"nodes-{os.getpid()}-{node}"
        group.mkdir()
        self._groups.append(group)
        if group.parent.name == "cpu":
            (group / "cpu.cfs_period_us").write_text(str(period))
            (group / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (group / "cpu.max").write_text(f"{quota} {period}")
        for process in self.processes(node):
            (group / "cgroup.procs").write_text(str(process.pid))

    def restore(self) -> None:
        """Restore the first state, but for written files: nothing runs, links are up, sshd serves."""
        self.heal()
        for launched in self._launched:
            launched.process.kill()
            launched.process.wait()
        self._launched.clear()
        for node in self.hosts:
            for process in self.processes(node):
                with suppress(psutil.Error):
                    process.kill()
            self.stop_sshd(node)
        for group in self._groups:
            wait_until(lambda group=group: not (group / "cgroup.procs").read_text(), 300, f"{group} empty")
            group.rmdir()
        self._groups.clear()
        for node in self.hosts:
            self.run(node, "/usr/sbin/sshd", "-f", "/etc/ssh/sshd_node", cwd=Path("/"))
            self._nodes[node].wait_for_ssh()  # it listens a moment after its start comes back
        self._launched.clear()

    def close(self) -> None:
        holders = [*(node.holder for node in self._nodes.values()), self._switch]
        for holder in holders:
            assert holder.stdin is not None
            holder.stdin.close()
        for holder in holders:
            try:
                holder.wait(10)
            except subprocess.TimeoutExpired:
                holder.kill()
                holder.wait()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def small_disk(self, node: str, folder: Path, size: str) -> Iterator[None]:
        """Mount a file system of so many bytes (`2m`) on the folder of this node."""
        self.run(node, "mkdir", "-p", folder)
        assert self.run(node, "mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder).returncode == 0
        try:
            yield
        finally:
            self.run(node, "umount", "-l", folder)
