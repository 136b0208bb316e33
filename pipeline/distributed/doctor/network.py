"""Reads each machine's view of the network, and compares the views of all machines.

`read_network`, `open_greeting_port` and `connect_to` run on every machine. The checks run on the machine
where the doctor was started, and use only the results of these functions.
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

from pipeline.distributed.doctor.rows import HOST, CheckRow, Fault, Status, group_faults, skip_check
from pipeline.distributed.waiting import find_own_address

CONNECT_TIMEOUT = 10.0
"""Seconds in which a connection must be open and its first line have arrived."""


@dataclass(frozen=True)
class Network:
    """Names and addresses of a machine, and the addresses of the other hosts as it resolves them."""

    hostname: str
    """Host name that the machine gives itself."""
    boot_id: str
    """Random id that the kernel drew when the machine was started; empty if there is none."""
    interfaces: dict[str, list[str]]
    """Name of each interface that is up -> its addresses, in the kernel's order."""
    resolved_names: dict[str, list[str]]
    """Name of each host of the job -> addresses to which it resolves here; empty if it does not resolve."""
    own_address: str | None
    """Address to which the host's own name resolves, which gloo would use; `None` if no interface has it."""
    ssh_address: str | None = None
    """Address of this machine to which ssh connected; `None` without ssh."""
    port: int = 0
    """Port of this machine's greeting (see `open_greeting_port`); 0 if there is no greeting."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that choose an interface, such as NCCL_SOCKET_IFNAME, and their values."""
    has_gpus: bool = False
    """Whether NVIDIA's driver is loaded."""

    @property
    def addresses(self) -> list[str]:
        """Addresses at which other machines may reach this one: neither loopback nor link-local."""
        all_addresses = [address for addresses in self.interfaces.values() for address in addresses]
        return [
            address
            for address in all_addresses
            if not is_loopback(address) and not ipaddress.ip_address(address).is_link_local
        ]

    def find_interface(self, address: str | None) -> str | None:
        """Return the interface that has an address; `None` if none has it."""
        return next((name for name, addresses in self.interfaces.items() if address in addresses), None)

    @property
    def identity(self) -> tuple[str, str]:
        """Host name and boot id, which two hosts have in common only if they are one machine."""
        return self.hostname, self.boot_id


@dataclass(frozen=True)
class Link:
    """Result of an attempt to connect to an address of another host."""

    name: str
    """Name of the other host."""
    address: str
    """Address of the other host to which this machine connected."""
    problem: str | None = None
    """Reason of a failure; `None` if the host answered."""
    source: str | None = None
    """Address of this machine from which the connection was opened; `None` if it was not opened."""


Networks = Mapping[str, Network]
"""Host -> its network, in the job's order. The first host is the master."""
Links = Mapping[str, Sequence[Link]]
"""Host -> results of its attempts to connect to the other hosts."""


def is_loopback(address: str) -> bool:
    """Return whether an address is a loopback address, which no other machine can reach."""
    return ipaddress.ip_address(address).is_loopback


def read_network(names: Sequence[str], port: int = 0) -> Network:
    """Read the interfaces of this machine, and resolve the names of all hosts.

    Names are resolved in parallel, since each takes seconds if the name server does not respond.

    Args:
        names: Names of all hosts of the job.
        port: Port of this machine's greeting; 0 if there is no greeting.
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
    # Address of the ssh client, its port, address of this machine, its port.
    connection = os.environ.get("SSH_CONNECTION", "").split()
    return Network(
        hostname=socket.gethostname(),
        boot_id=boot_id,
        interfaces={name: found for name, found in interfaces.items() if found},
        resolved_names=dict(zip(names, addresses, strict=True)),
        own_address=find_own_address(socket.gethostname()),
        ssh_address=connection[2] if len(connection) == 4 else None,
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
    """Open a port, and start a thread that sends this host's greeting over each connection to it.

    The greeting proves to another host that its connection has reached the doctor on this machine. The port
    is open until the process ends.

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
        deadline = time.monotonic() + seconds  # for the connection and the greeting together
        try:
            with socket.create_connection((address, port), seconds) as connection:
                source = str(connection.getsockname()[0]).removeprefix("::ffff:")  # IPv4 in IPv6
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
    """Return the address at which other hosts should reach a host; `None` if it has no usable address.

    This is the address to which most other hosts resolve the host's name. If none resolves the name to an
    address of the host, it is the address that ssh connected to. Without ssh, it is the host's first address.
    """
    own_addresses = networks[host].addresses
    preferred = [
        address
        for other, network in networks.items()
        for address in network.resolved_names.get(host, [])[:1]
        if other != host and address in own_addresses
    ]
    if preferred:
        return Counter(preferred).most_common(1)[0][0]
    ssh_address = networks[host].ssh_address
    return ssh_address if ssh_address in own_addresses else next(iter(own_addresses), None)


def choose_interfaces(network: Network) -> dict[str, tuple[str | None, str | None]]:
    """Return the interfaces that gloo and, on GPUs, NCCL would choose on a machine.

    Returns:
        Variable that sets the interface -> name and address of the interface. The name is `None` if no
        interface fits; the address is `None` if no interface of that name is up.
    """
    first_address = {name: addresses[0] for name, addresses in network.interfaces.items()}
    chosen: dict[str, tuple[str | None, str | None]] = {}
    requested = network.environment.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if requested:
        chosen["GLOO_SOCKET_IFNAME"] = (requested, first_address.get(requested))
    else:
        own_address = network.own_address
        chosen["GLOO_SOCKET_IFNAME"] = (network.find_interface(own_address), own_address)
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
    """Return name, address and port of each other host that a host should reach.

    A host has several entries if gloo or NCCL would advertise another address than `choose_address` returns.
    """
    peers = []
    for name, network in networks.items():
        if name == host:
            continue
        advertised = [address for _, address in choose_interfaces(network).values()]
        candidates = (choose_address(name, networks), *advertised)
        usable = dict.fromkeys(address for address in candidates if address in network.addresses)  # distinct
        peers += [(name, address, network.port) for address in usable if address is not None]
    return peers


def check_names(networks: Networks) -> list[CheckRow]:
    """Check that each host resolves the names of all hosts correctly, and that no machine has two names."""
    if not networks:
        return skip_check("names")
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
    """Yield each host with each name that it does not resolve, or resolves to a wrong address."""
    master = next(iter(networks), None)
    for host, network in networks.items():
        for name, target in networks.items():
            status: Status = "fail" if name == master else "warning"  # every rank connects to the master
            addresses = network.resolved_names.get(name, [])
            fix = f'write the line "{choose_address(name, networks)} {name}" in /etc/hosts on {HOST}'
            if not addresses:
                yield host, Fault(status, f"the name {name} does not resolve", fix)
            elif host == name:
                continue  # a host may resolve its own name to loopback
            elif is_loopback(addresses[0]):
                yield host, Fault(status, f"{name} resolves to {addresses[0]}, which is {host} itself", fix)
            elif addresses[0] not in target.addresses:
                text = f"{name} resolves to {addresses[0]}, which is not an address of {name}"
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
    expected_interfaces = set()
    master = next(iter(links), "")
    for host, attempts in links.items():
        sources = [link.source for link in attempts if link.name == master and link.problem is None]
        own_address = choose_address(host, networks) if host == master else next(iter(sources), None)
        expected = networks[host].find_interface(own_address)
        if expected is None:
            continue  # the host does not reach the master, which check_ports reports
        expected_interfaces.add(expected)
        for variable, (name, address) in choose_interfaces(networks[host]).items():
            if name == expected:
                continue
            successes = [
                link.problem is None
                for others in links.values()
                for link in others
                if (link.name, link.address) == (host, address)
            ]
            is_reachable = bool(successes) and all(successes)
            fix = f"export {variable}={expected}"
            value = networks[host].environment.get(variable)
            library = "gloo" if variable.startswith("GLOO") else "NCCL"
            if value and address is None:
                fault = Fault("fail", f"{variable}={value}: no interface of this name is up", fix)
            elif address is None or is_loopback(address):
                # gloo falls back to loopback if no interface has the address of the host's own name.
                advertised = f"{address or '127.0.0.1'} ({name or 'lo'})"
                description = f"{library} would advertise {advertised}, which other hosts cannot reach"
                if library == "gloo":
                    hostname = networks[host].hostname
                    own_line = f"{choose_address(host, networks)} {hostname}"
                    fix += f', or correct the line of {hostname} in /etc/hosts on {HOST}: "{own_line}"'
                fault = Fault("fail", description, fix)
            else:
                description = (
                    f"{library} would use {name} ({address}); the first host is reached through {expected}"
                )
                fault = Fault("warning" if is_reachable else "fail", description, fix)
            faults.append((host, fault))
    return group_faults("interface", faults, ", ".join(sorted(expected_interfaces)) or "unknown")


def check_sharing(visible_hosts: Mapping[str, Sequence[str]], folder: str) -> list[CheckRow]:
    """Check that all hosts share the folder of runs, or that each has its own.

    A folder that only some hosts share is most likely a mount that the others lack.

    Args:
        visible_hosts: Host -> hosts whose markers it sees in its folder of runs. Hosts that cannot write into
            the folder are left out.
        folder: Folder of runs, for the message.
    """
    if len(visible_hosts) < 2:
        return []
    # Distinct groups of hosts that share a folder, in the order of the hosts.
    groups = dict.fromkeys(frozenset(hosts) & frozenset(visible_hosts) for hosts in visible_hosts.values())
    if len(groups) == 1:
        return [CheckRow("run folder", "ok", "shared by all hosts")]
    if all(len(group) == 1 for group in groups):
        return [CheckRow("run folder", "ok", "each host has its own, with its part of a checkpoint")]
    largest = max(groups, key=len)
    other_hosts = tuple(host for host in visible_hosts if host not in largest)
    text = f"{', '.join(sorted(largest))} share {folder}; the other hosts do not see it"
    fix = f"mount it on {', '.join(other_hosts)} too"
    return [CheckRow("run folder", "warning", text, fix, other_hosts)]
