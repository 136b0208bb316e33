"""Simulates nodes on one machine, each with its own network, mounts, processes, host name, /dev/shm and sshd.

Each node ends when its standard input closes. This process holds the other ends of these pipes, so the kernel
removes the nodes however the process ends.
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
NAMESPACES = ("--net", "--mount", "--pid", "--uts", "--ipc", "--fork")
PROBE = """
mount -t tmpfs tmpfs /mnt
mkdir /mnt/{upper,work,root}
mount -t overlay overlay -o lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/work /mnt/root
ip link add br0 type bridge
ip link add v0 type veth peer name v1
tc qdisc add dev v0 root tbf rate 200mbit burst 256kbit latency 100ms
nft add table ip t
"""
"""Shell commands that succeed where nodes, and the tests on them, are possible."""
SERVICES = ("sshd", "munged", "slurmctld", "slurmscriptd", "slurmd")


def find_missing_requirement() -> str | None:
    """Return the reason why this machine cannot have nodes; `None` if it can."""
    if os.geteuid() != 0:
        return "nodes need root: run the tests as root"
    missing = [name for name in PROGRAMS if shutil.which(name, path=SYSTEM_PATH) is None]
    if missing:
        return f"nodes need {', '.join(missing)}: run tests/multinode/install.sh"
    probe = subprocess.run(
        ["unshare", *NAMESPACES, "bash", "-ec", PROBE], capture_output=True, text=True, check=False
    )
    if probe.returncode:
        return f"nodes need namespaces, overlays and virtual networks: {probe.stderr.strip()}"
    try:
        group = _find_cpu_cgroups() / f"nodes-{os.getpid()}"
        group.mkdir()
        group.rmdir()
    except OSError as error:
        return f"nodes need control groups: {error}"
    return None


def _find_cpu_cgroups() -> Path:
    """Return the folder of control groups for CPU limits; version 1 has a folder per controller."""
    version_1 = Path("/sys/fs/cgroup/cpu")
    return version_1 if version_1.is_dir() else version_1.parent


def wait_until(done: Callable[[], object], seconds: float, what: str) -> None:
    """Poll until `done()` is true.

    Raises:
        AssertionError: It is still false after so many seconds; the message names `what` was awaited.
    """
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, f"still waiting after {seconds} s for: {what}"
        time.sleep(0.05)


@dataclass
class NodeCommand:
    """Command that runs on a node; both its streams go to a file."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def text(self) -> str:
        """Output so far."""
        return self.log.read_text(errors="replace")

    @property
    def command(self) -> psutil.Process:
        """Process of the command. `process` is nsenter, which waits for it."""
        (child,) = psutil.Process(self.process.pid).children()
        return child

    def wait(self, seconds: float) -> int:
        """Wait for the end and return the exit code; -n if signal n ended the command."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds} s:\n{self.text}") from None

    def wait_for(self, pattern: str, seconds: float = 400) -> str:
        """Wait until the output matches a regular expression, and return the match."""

        def has_matched() -> bool:
            found = re.search(pattern, self.text) is not None
            assert found or self.process.poll() is None, f"ended ({self.process.returncode}):\n{self.text}"
            return found

        wait_until(has_matched, seconds, f"{pattern!r} in {self.log}")
        match = re.search(pattern, self.text)
        assert match is not None
        return match[0]


class Node:
    """Simulated machine. Outside of it, `root` is the path of its files.

    Args:
        name: Host name.
        address: IP address.
        folder: Folder for logs and for the file system of the node.
        hosts: File that becomes /etc/hosts.
        shared: Folder that all nodes share.
    """

    def __init__(self, name: str, address: str, folder: Path, hosts: Path, shared: Path):
        self.name = name
        self.address = address
        self.log = folder / f"{name}.log"
        script = [Path(__file__).with_name("node.sh"), folder, name, hosts, shared]
        with self.log.open("wb") as log:
            self.holder = subprocess.Popen(
                ["unshare", *NAMESPACES, "--kill-child", "--propagation", "private", *map(str, script)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={"PATH": SYSTEM_PATH, "HOME": "/root", "LANG": "C.UTF-8"},
            )
        wait_until(self._children, 100, f"the start of {name}")
        (self.pid,) = self._children()

    def _children(self) -> list[int]:
        pid = self.holder.pid
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    @property
    def root(self) -> Path:
        """Path of the node's root directory outside of the node."""
        return Path(f"/proc/{self.pid}/root")

    @property
    def _sshd_pid_file(self) -> Path:
        """File that sshd writes once it listens; a killed sshd leaves it behind."""
        return self.root / "run/node_sshd.pid"

    def wait_for_ssh(self) -> None:
        """Wait until sshd listens."""

        def is_listening() -> bool:
            assert self.holder.poll() is None, self.log.read_text()
            return self._sshd_pid_file.exists()

        wait_until(is_listening, 200, f"sshd on {self.name}; {self.log}")

    def stop_sshd(self) -> None:
        """End sshd and its connections, and wait until the port is free."""

        def has_stopped() -> bool:
            processes = self._find_processes(lambda name: name == "sshd")
            for process in processes:
                with suppress(psutil.Error):
                    process.kill()
            return not processes

        wait_until(has_stopped, 200, f"the end of sshd on {self.name}")
        self._sshd_pid_file.unlink(missing_ok=True)

    def processes(self, *words: str) -> list[psutil.Process]:
        """Return the node's processes without services whose command line contains all of `words`."""
        return self._find_processes(lambda name: name not in SERVICES, *words)

    def _find_processes(self, accepts: Callable[[str], bool], *words: str) -> list[psutil.Process]:
        """Return running processes of this node with an accepted name and all of `words`."""
        namespace = os.readlink(f"/proc/{self.pid}/ns/pid")
        found = []
        for process in psutil.process_iter():
            with suppress(OSError, psutil.Error):
                if os.readlink(f"/proc/{process.pid}/ns/pid") != namespace or process.pid == self.pid:
                    continue
                if accepts(process.name()) and process.status() != psutil.STATUS_ZOMBIE:
                    line = " ".join(process.cmdline())
                    if all(word in line for word in words):
                        found.append(process)
        return found


class Cluster:
    """Nodes node1 to nodeN on one network bridge with no way out. Context manager.

    Args:
        count: Number of nodes, at most 9.
        folder: Folder for logs, keys, the shared folder and the nodes' file systems.
    """

    def __init__(self, count: int, folder: Path):
        self.folder = folder
        self.shared = self.common = folder / "shared"
        self.private = Path("/private")
        self.common.mkdir()
        self._commands: list[NodeCommand] = []
        self._groups: list[Path] = []
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "key")], check=True)
        addresses = {f"node{i}": f"{NETWORK}.1{i}" for i in range(1, count + 1)}
        hosts = folder / "hosts"
        lines = [f"{address} {name}" for name, address in addresses.items()]
        hosts.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        bridge = [
            "unshare",
            "--net",
            "bash",
            "-c",
            "ip link add br0 type bridge && ip link set br0 up; echo; read",
        ]
        self._switch = subprocess.Popen(bridge, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
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
        """Names of all nodes."""
        return list(self._nodes)

    def path(self, node: str, inside: str | Path) -> Path:
        """Return the path of a node's file outside of the node."""
        return self._nodes[node].root / str(inside).lstrip("/")

    def hostfile(self, *hosts: str, slots: int = 1) -> Path:
        """Write a hostfile in the shared folder and return its path."""
        path = self.shared / "hostfile"
        path.write_text("".join(f"{host} slots={slots}\n" for host in hosts))
        return path

    def start(self, node: str, *command: str | Path, cwd: Path = ROOT, **environment: str) -> NodeCommand:
        """Start a command on the node.

        Args:
            environment: Variables beyond those of a login; PATH begins with the virtual environment.
        """
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
        self._commands.append(NodeCommand(process, log))
        return self._commands[-1]

    def run(
        self, node: str, *command: str | Path, cwd: Path = ROOT, timeout: float = 300, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end; stdout of the result has both streams."""
        running = self.start(node, *command, cwd=cwd, **environment)
        code = running.wait(timeout)
        return subprocess.CompletedProcess(command, code, running.text, "")

    def processes(self, node: str, *words: str) -> list[psutil.Process]:
        """Return the node's processes without services whose command line contains all of `words`."""
        return self._nodes[node].processes(*words)

    def pythons(self, node: str, *words: str) -> list[psutil.Process]:
        """Return the node's Python processes whose command line contains all of `words`.

        The shells that started them have the same words, and are left out.
        """
        return [process for process in self.processes(node, *words) if process.name().startswith("python")]

    def ranks(self, node: str) -> list[psutil.Process]:
        """Return the training processes of a node, which have a launcher's variable for the rank."""
        names = {"RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"}
        return [process for process in self.pythons(node, "train.py") if names & process.environ().keys()]

    def remaining_commands(self) -> dict[str, list[str]]:
        """Return the command lines of all running processes without services, by node."""
        found: dict[str, list[str]] = {}
        for node in self.hosts:
            for process in self.processes(node):
                with suppress(psutil.Error):  # the process may have ended meanwhile
                    command = " ".join(process.cmdline())
                    found.setdefault(node, []).append(command)
        return found

    def wait_until_idle(self) -> None:
        """Wait up to a minute until nothing runs; Slurm's step daemons end a moment after srun."""
        with suppress(AssertionError):
            wait_until(lambda: not self.remaining_commands(), 60, "the end of all processes")
        assert self.remaining_commands() == {}

    def kill(self, node: str, *words: str) -> None:
        """Send SIGKILL to each process of the node whose command line contains all of `words`.

        Raises:
            AssertionError: There is no such process.
        """
        processes = self.processes(node, *words)
        assert processes, f"no process with {words} on {node}: {self.remaining_commands()}"
        for process in processes:
            with suppress(psutil.Error):
                process.kill()

    def power_off(self, node: str) -> None:
        """End the node's link and its processes together; its files stay."""
        self.disconnect(node)
        self.kill(node)

    def disconnect(self, node: str) -> None:
        """Take the node off the network."""
        self._set_link(node, "down")

    def reconnect_all(self) -> None:
        """Connect every node to the network again."""
        for node in self.hosts:
            self._set_link(node, "up")

    def _set_link(self, node: str, state: str) -> None:
        command = ["nsenter", "-t", str(self._switch.pid), "-n", "ip", "link", "set", node, state]
        subprocess.run(command, check=True)

    def stop_sshd(self, node: str) -> None:
        """End sshd on the node with all its connections."""
        self._nodes[node].stop_sshd()

    def make_folders(self) -> None:
        """Make new, empty folders `shared` and `private`."""
        name = f"{len(list(self.common.iterdir()))}"
        self.shared = self.common / name
        self.shared.mkdir()
        self.private = Path("/private") / name
        for host in self.hosts:
            self.path(host, self.private).mkdir(parents=True)

    def limit_cpu(self, node: str, share: float) -> None:
        """Limit the node's current processes together to a share of one core, until `restore`."""
        period = 100_000
        quota = int(share * period)
        group = _find_cpu_cgroups() / f"nodes-{os.getpid()}-{node}"
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
        """Restore the first state except for files: end all processes, connect all nodes, restart sshd."""
        self.reconnect_all()
        for command in self._commands:
            command.process.kill()
            command.process.wait()
        self._commands.clear()
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
            self._nodes[node].wait_for_ssh()  # sshd listens a moment after its start command returns
        self._commands.clear()

    def close(self) -> None:
        """End all nodes and the network."""
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
        """Mount a file system of a size such as `2m` on the node's folder while the block runs."""
        self.run(node, "mkdir", "-p", folder)
        assert self.run(node, "mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder).returncode == 0
        try:
            yield
        finally:
            self.run(node, "umount", "-l", folder)
