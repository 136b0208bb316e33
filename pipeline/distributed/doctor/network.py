"""Reads each machine's view of the network, and compares the views of all machines.

`read_network`, `open_greeting_port` and `connect_to` run on every machine. The checks run on the doctor's
machine and compute only with what these returned.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from pipeline.distributed.doctor.rows import HOST, CheckRow, Fault, Status, group_faults
from pipeline.distributed.waiting import find_own_address

CONNECT_TIMEOUT = 10.0
"""Seconds for opening a connection and reading its first line."""


@dataclass(frozen=True)
class Network:
    """Names and addresses of a machine, and the addresses of the other hosts as it resolves them."""

    hostname: str
    """Host name that the machine gives itself."""
    boot_id: str
    """Random number that the kernel drew at this boot; empty if there is none."""
    interfaces: dict[str, list[str]]
    """Interfaces that are up -> their addresses, in the kernel's order."""
    names: dict[str, list[str]]
    """Name of each host of the job -> its addresses as resolved here; empty if it does not resolve."""
    own_address: str | None
    """Address that gloo would use for the host's own name; `None` if no interface has it."""
    by_ssh: str | None = None
    """Address of this machine to which ssh connected; `None` without ssh."""
    port: int = 0
    """Port of this machine's greeting (see `open_greeting_port`)."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that choose the interface, as NCCL_SOCKET_IFNAME."""
    has_gpus: bool = False
    """Whether NVIDIA's driver is loaded."""

    @property
    def addresses(self) -> list[str]:
        """Addresses at which other machines may reach this one: neither loopback nor link-local."""
        own = [address for addresses in self.interfaces.values() for address in addresses]
        return [
            address
            for address in own
            if not is_loopback(address) and not ipaddress.ip_address(address).is_link_local
        ]

    def interface_with(self, address: str | None) -> str | None:
        """Return the interface that has an address; `None` if none has it."""
        return next((name for name, addresses in self.interfaces.items() if address in addresses), None)

    @property
    def identity(self) -> tuple[str, str]:
        """Host name and boot id, which are equal for two names of one machine only."""
        return self.hostname, self.boot_id


@dataclass(frozen=True)
class Link:
    """Result of an attempt to connect to an address of another host."""

    name: str
    """Name of the other host."""
    address: str
    problem: str | None = None
    """Reason of a failure; `None` if the host answered."""
    source: str | None = None
    """Address of this machine from which the connection was opened; `None` if it was not opened."""


Networks = Mapping[str, Network]
"""Host -> its network, in the job's order. The first host is the master."""
Links = Mapping[str, Sequence[Link]]
"""Host -> its attempts to connect to the others."""


def is_loopback(address: str) -> bool:
    """Return whether an address is a loopback address, which no other machine can reach."""
    return ipaddress.ip_address(address).is_loopback


def read_network(names: Sequence[str], port: int = 0) -> Network:
    """Read the interfaces of this machine, and resolve the names of all hosts.

    Names are resolved in parallel, since each takes seconds if the name server does not respond.

    Args:
        names: Names of all hosts of the job.
        port: Port of this machine's greeting.
    """
    with ThreadPoolExecutor(max_workers=32) as pool:
        addresses = list(pool.map(resolve, names))
    is_up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    families = (socket.AF_INET, socket.AF_INET6)
    interfaces = {
        name: [entry.address.partition("%")[0] for entry in entries if entry.family in families]
        for name, entries in psutil.net_if_addrs().items()
        if name in is_up
    }
    boot_id = ""
    with contextlib.suppress(OSError):
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    connection = os.environ.get("SSH_CONNECTION", "").split()  # client, its port, this machine, its port
    return Network(
        hostname=socket.gethostname(),
        boot_id=boot_id,
        interfaces={name: own for name, own in interfaces.items() if own},
        names=dict(zip(names, addresses, strict=True)),
        own_address=find_own_address(socket.gethostname()),
        by_ssh=connection[2] if len(connection) == 4 else None,
        port=port,
        environment={name: value for name, value in os.environ.items() if name.endswith("_SOCKET_IFNAME")},
        has_gpus=Path("/proc/driver/nvidia/version").exists(),
    )


def resolve(name: str) -> list[str]:
    """Return the addresses of a name, the preferred one first; empty if the name does not resolve."""
    try:
        answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(answer[4][0]) for answer in answers))


def open_greeting_port(token: str, name: str) -> int:
    """Open a port that sends this host's greeting over each connection, until the process ends.

    The greeting proves to another host that its connection reached this machine, and no other program.

    Args:
        token: Secret of the examination.
        name: Name of this host.

    Returns:
        The port's number, which the system chose.
    """
    greeting = f"{token} {name}\n".encode()
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    server = socket.create_server(("", 0), family=family, backlog=1024, dualstack_ipv6=dual)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                with connection, contextlib.suppress(OSError):
                    connection.sendall(greeting)

    threading.Thread(target=serve, name="listener", daemon=True).start()
    port: int = server.getsockname()[1]
    return port


def connect_to(
    peers: Sequence[tuple[str, str, int]], token: str, seconds: float = CONNECT_TIMEOUT
) -> list[Link]:
    """Connect to every peer at the same time. Each must answer with the token and its name.

    Args:
        peers: Name, address and port of each.
        token: Secret of the examination, which the peer's greeting must contain.
        seconds: Time limit of each attempt.
    """

    def attempt(peer: tuple[str, str, int]) -> Link:
        name, address, port = peer
        source = None
        problem = None
        deadline = time.monotonic() + seconds
        try:
            with socket.create_connection((address, port), seconds) as connection:
                source = str(connection.getsockname()[0]).removeprefix("::ffff:")
                connection.settimeout(max(0.01, deadline - time.monotonic()))
                greeting = connection.makefile("rb").readline(1000).decode(errors="replace").strip()
                if greeting != f"{token} {name}":
                    problem = "another machine or program answers there"
        except TimeoutError:
            problem = f"no answer within {seconds:g} s"
        except OSError as error:
            problem = (error.strerror or str(error)).lower()
        return Link(name, address, problem, source)

    with ThreadPoolExecutor(max_workers=256) as pool:
        return list(pool.map(attempt, peers))


def choose_address(host: str, networks: Networks) -> str | None:
    """Return the address at which other hosts should reach a host; `None` if it has no usable one.

    This is the address to which most hosts resolve its name. If no host does, it is the one that ssh
    connected to, or else its first.
    """
    own = networks[host].addresses
    resolved = (network.names.get(host, [])[:1] for other, network in networks.items() if other != host)
    counts = Counter(address for preferred in resolved for address in preferred if address in own)
    if counts:
        return counts.most_common(1)[0][0]
    by_ssh = networks[host].by_ssh
    return by_ssh if by_ssh in own else next(iter(own), None)


def chosen_interfaces(network: Network) -> dict[str, tuple[str | None, str | None]]:
    """Return the interfaces that gloo and, on GPUs, NCCL would use.

    Returns:
        Variable that chooses the interface -> its name and its address. A name is `None` if no interface
        fits; an address is `None` if no interface of that name is up.
    """
    first_address = {name: addresses[0] for name, addresses in network.interfaces.items()}
    requested = network.environment.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    own = network.own_address
    of_gloo = (requested, first_address.get(requested)) if requested else (network.interface_with(own), own)
    chosen: dict[str, tuple[str | None, str | None]] = {"GLOO_SOCKET_IFNAME": of_gloo}
    if network.has_gpus:
        rule = network.environment.get("NCCL_SOCKET_IFNAME", "")
        fitting = [name for name in first_address if _fits_nccl_rule(name, rule)]
        # NCCL prefers InfiniBand.
        name = min(fitting, key=lambda interface: not interface.startswith("ib"), default=rule or None)
        chosen["NCCL_SOCKET_IFNAME"] = (name, first_address.get(name or ""))
    return chosen


def _fits_nccl_rule(name: str, rule: str) -> bool:
    """Return whether NCCL would use an interface under this value of NCCL_SOCKET_IFNAME.

    The value is a list of prefixes. A leading `=` makes them exact names, and a leading `^` excludes them.
    By default NCCL skips docker and loopback interfaces.
    """
    is_exclusion = rule.startswith("^")
    is_exact = rule.lstrip("^").startswith("=")
    words = [word for word in rule.lstrip("^=").split(",") if word]
    if not words:
        return not name.startswith(("lo", "docker"))
    is_listed = name in words if is_exact else name.startswith(tuple(words))
    return is_listed != is_exclusion


def list_peers(host: str, networks: Networks) -> list[tuple[str, str, int]]:
    """Return name, address and port of each peer that a host should reach.

    A peer has several entries if gloo or NCCL would advertise other addresses than `choose_address` returns.
    """
    peers = []
    for name, network in networks.items():
        advertised = [address for _, address in chosen_interfaces(network).values()]
        candidates = (choose_address(name, networks), *advertised)
        usable = dict.fromkeys(address for address in candidates if address in network.addresses)
        peers += [(name, address, network.port) for address in usable if name != host and address is not None]
    return peers


def check_names(networks: Networks) -> list[CheckRow]:
    """Check that each host resolves the names of all hosts correctly, and that no machine has two names."""
    machines: dict[tuple[str, str], list[str]] = {}
    for host, network in networks.items():
        machines.setdefault(network.identity, []).append(host)
    fix = "keep one line for this machine in the hostfile, with all its slots"
    rows = [
        CheckRow("hosts", "fail", f"{' and '.join(names)} are the same machine", fix, tuple(names))
        for names in machines.values()
        if len(names) > 1
    ]
    return rows + group_faults("names", _find_wrong_names(networks), "every host resolves all names")


def _find_wrong_names(networks: Networks) -> Iterator[tuple[str, Fault]]:
    master = next(iter(networks), None)
    for host, network in networks.items():
        for name, target in networks.items():
            status: Status = "fail" if name == master else "warning"  # every rank connects to the master
            resolved = network.names.get(name, [])
            fix = f'write the line "{choose_address(name, networks)} {name}" in /etc/hosts on {HOST}'
            if not resolved:
                yield host, Fault(status, f"the name {name} does not resolve", fix)
            elif host != name and is_loopback(resolved[0]):
                yield host, Fault(status, f"{name} resolves to {resolved[0]}, which is {host} itself", fix)
            elif host != name and resolved[0] not in target.addresses:
                text = f"{name} resolves to {resolved[0]}, which is not an address of {name}"
                yield host, Fault(status, text, fix)


def check_ports(networks: Networks, links: Links) -> list[CheckRow]:
    """Check that each host can connect to every other host."""
    rows = []
    for target in links:
        address = choose_address(target, networks)
        failed = {
            source: link.problem
            for source, attempts in links.items()
            for link in attempts
            if (link.name, link.address) == (target, address) and link.problem is not None
        }
        if not failed:
            continue
        sources = "every other host" if 1 < len(failed) == len(links) - 1 else ", ".join(failed)
        fix = f"allow TCP from {', '.join(failed)} to {address}, ports 1024 and up"
        fix += f"; see ssh {target} iptables -S, and the rules of the network"
        reason = next(iter(failed.values()))
        rows.append(CheckRow("ports", "fail", f"{sources} -> {target}: {reason}", fix, (*failed, target)))
    return rows or [CheckRow("ports", "ok", f"all {len(links) * (len(links) - 1)} connections succeed")]


def check_interfaces(networks: Networks, links: Links) -> list[CheckRow]:
    """Check that gloo and NCCL would use the interface that leads to the master.

    Another interface is a warning if all hosts reach its address, and a failure otherwise.
    """
    faults = []
    right_interfaces = set()
    master = next(iter(links), "")
    for host, attempts in links.items():
        sources = [link.source for link in attempts if link.name == master and link.problem is None]
        own = choose_address(host, networks) if host == master else next(iter(sources), None)
        right = networks[host].interface_with(own)
        if right is None:
            continue  # the host does not reach the master, which check_ports reports
        right_interfaces.add(right)
        for variable, (name, address) in chosen_interfaces(networks[host]).items():
            if name == right:
                continue
            successes = [
                link.problem is None
                for others in links.values()
                for link in others
                if (link.name, link.address) == (host, address)
            ]
            is_reachable = bool(successes) and all(successes)
            fix = f"export {variable}={right}"
            given = networks[host].environment.get(variable)
            library = "gloo" if variable.startswith("GLOO") else "NCCL"
            if given and address is None:
                fault = Fault("fail", f"{variable}={given}: no interface of this name is up", fix)
            elif address is None or is_loopback(address):
                # gloo falls back to loopback if no interface has the address of the host's own name.
                advertised = f"{address or '127.0.0.1'} ({name or 'lo'})"
                found = f"{library} would advertise {advertised}, which other hosts cannot reach"
                if library == "gloo":
                    hostname = networks[host].hostname
                    own_line = f"{choose_address(host, networks)} {hostname}"
                    fix += f', or correct the line of {hostname} in /etc/hosts on {HOST}: "{own_line}"'
                fault = Fault("fail", found, fix)
            else:
                found = f"{library} would use {name} ({address}); the first host is reached through {right}"
                fault = Fault("warning" if is_reachable else "fail", found, fix)
            faults.append((host, fault))
    return group_faults("interface", faults, ", ".join(sorted(right_interfaces)) or "unknown")


def check_sharing(sees: Mapping[str, Sequence[str]], folder: str) -> list[CheckRow]:
    """Check that all hosts share the folder of runs, or that each has its own.

    A folder that only some hosts share is most likely a mount that the others lack.

    Args:
        sees: Host -> hosts whose markers it sees in its folder. It lacks hosts that cannot write there.
        folder: Folder of runs, for the message.
    """
    groups = Counter(frozenset(visible) & frozenset(sees) for visible in sees.values())
    if len(sees) < 2:
        return []
    if len(groups) == 1:
        return [CheckRow("run folder", "ok", "shared by all hosts")]
    if all(len(group) == 1 for group in groups):
        return [CheckRow("run folder", "ok", "each host has its own, with its part of a checkpoint")]
    largest = max(groups, key=len)
    apart = tuple(host for host in sees if host not in largest)
    found = f"{', '.join(sorted(largest))} share {folder}; the other hosts do not see it"
    return [CheckRow("run folder", "warning", found, f"mount it on {', '.join(apart)} too", apart)]
