"""Reads the network between machines, on each of them, and compares what they see.

The first half runs on each machine; the checks are pure and see all machines.
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

CONNECT_LIMIT = 10.0
"""Seconds for a connection and the first line over it."""


@dataclass(frozen=True)
class Network:
    """Names and addresses of a machine, and of the others as it sees them."""

    hostname: str
    boot_id: str
    """Identifies the machine together with its host name, whatever others call it."""
    interfaces: dict[str, list[str]]
    """Interfaces that are up, in the kernel's order -> their addresses."""
    names: dict[str, list[str]]
    """Each host's name -> its addresses as seen from here; empty if it is unknown."""
    own_address: str | None
    """Address that gloo would use for the host's own name; None if it is not one of this machine's."""
    by_ssh: str | None = None
    """Address at which ssh found this machine."""
    port: int = 0
    """Port on which it listens."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that choose the interface."""
    has_gpus: bool = False

    @property
    def addresses(self) -> list[str]:
        """Addresses that others may know this machine by."""
        found = [address for addresses in self.interfaces.values() for address in addresses]
        return [a for a in found if not is_loopback(a) and not ipaddress.ip_address(a).is_link_local]

    def interface_with(self, address: str | None) -> str | None:
        """Return the interface that has an address."""
        return next((name for name, found in self.interfaces.items() if address in found), None)

    @property
    def is_same_machine(self) -> tuple[str, str]:
        """Return what is equal for two names of one machine."""
        return self.hostname, self.boot_id


@dataclass(frozen=True)
class Link:
    """An attempt to connect to an address of another host."""

    name: str
    address: str
    problem: str | None = None
    source: str | None = None
    """This machine's address on the way there."""


Networks = Mapping[str, Network]
"""Host -> its network, in the job's order: the first is the master."""
Links = Mapping[str, Sequence[Link]]
"""Host -> the links that start there."""


def is_loopback(address: str) -> bool:
    """Return whether an address is of no use to another machine."""
    return ipaddress.ip_address(address).is_loopback


def read_network(names: Sequence[str], port: int = 0) -> Network:
    """Return what this machine knows. Names are resolved in parallel: a dead name server takes seconds."""
    with ThreadPoolExecutor(max_workers=32) as pool:
        addresses = list(pool.map(resolve, names))
    is_up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    families = (socket.AF_INET, socket.AF_INET6)
    interfaces = {
        name: [each.address.partition("%")[0] for each in known if each.family in families]
        for name, known in psutil.net_if_addrs().items()
        if name in is_up
    }
    boot_id = ""
    with contextlib.suppress(OSError):
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    way = os.environ.get("SSH_CONNECTION", "").split()
    return Network(
        hostname=socket.gethostname(),
        boot_id=boot_id,
        interfaces={name: found for name, found in interfaces.items() if found},
        names=dict(zip(names, addresses, strict=True)),
        own_address=find_own_address(socket.gethostname()),
        by_ssh=way[2] if len(way) == 4 else None,
        port=port,
        environment={k: v for k, v in os.environ.items() if k.endswith("_SOCKET_IFNAME")},
        has_gpus=Path("/proc/driver/nvidia/version").exists(),
    )


def resolve(name: str) -> list[str]:
    """Return the addresses of a name, the preferred one first; none if it is unknown."""
    try:
        answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(answer[4][0]) for answer in answers))


def open_greeting_port(token: str, name: str) -> int:
    """Open a port that says who answers, until the process ends. Returns its number."""
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
    peers: Sequence[tuple[str, str, int]], token: str, seconds: float = CONNECT_LIMIT
) -> list[Link]:
    """Try every peer at the same time: it must answer with the token and its name.

    Args:
        peers: Name, address and port of each.
        token: Secret of the examination, which the peer sends back.
        seconds: Time limit of each attempt.
    """

    def attempt(peer: tuple[str, str, int]) -> Link:
        name, address, port = peer
        source = problem = None
        deadline = time.monotonic() + seconds
        try:
            with socket.create_connection((address, port), seconds) as connection:
                source = str(connection.getsockname()[0]).removeprefix("::ffff:")
                connection.settimeout(max(0.01, deadline - time.monotonic()))
                said = connection.makefile("rb").readline(1000).decode(errors="replace").strip()
                if said != f"{token} {name}":
                    problem = "another machine or program answers there"
        except TimeoutError:
            problem = f"no answer within {seconds:g} s"
        except OSError as error:
            problem = (error.strerror or str(error)).lower()
        return Link(name, address, problem, source)

    with ThreadPoolExecutor(max_workers=256) as pool:
        return list(pool.map(attempt, peers))


def choose_address(host: str, networks: Networks) -> str | None:
    """Return where others find a host: as most resolve its name, else where ssh found it, else its first."""
    own = networks[host].addresses
    seen = (each.names.get(host, [])[:1] for other, each in networks.items() if other != host)
    counts = Counter(address for found in seen for address in found if address in own)
    if counts:
        return counts.most_common(1)[0][0]
    by_ssh = networks[host].by_ssh
    return by_ssh if by_ssh in own else next(iter(own), None)


def chosen_interfaces(network: Network) -> dict[str, tuple[str | None, str | None]]:
    """Return by variable the interface, and its address, that gloo would take and on GPUs NCCL."""
    first_address = {name: addresses[0] for name, addresses in network.interfaces.items()}
    wanted = network.environment.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    own = network.own_address
    by_gloo = (wanted, first_address.get(wanted)) if wanted else (network.interface_with(own), own)
    found: dict[str, tuple[str | None, str | None]] = {"GLOO_SOCKET_IFNAME": by_gloo}
    if network.has_gpus:
        rule = network.environment.get("NCCL_SOCKET_IFNAME", "")
        fitting = [name for name in first_address if _nccl_takes(name, rule)]
        name = min(fitting, key=lambda each: not each.startswith("ib"), default=rule or None)
        found["NCCL_SOCKET_IFNAME"] = (name, first_address.get(name or ""))
    return found


def _nccl_takes(name: str, rule: str) -> bool:
    """Follow NCCL's grammar: prefixes, `=` exact names, `^` all but these; by default no docker, no lo."""
    exclude, exact = rule.startswith("^"), rule.lstrip("^").startswith("=")
    words = [word for word in rule.lstrip("^=").split(",") if word]
    if not words:
        return not name.startswith(("lo", "docker"))
    fits = name in words if exact else name.startswith(tuple(words))
    return fits != exclude


def list_peers(host: str, networks: Networks) -> list[tuple[str, str, int]]:
    """Return name, address and port of all that a host should reach: also what gloo and NCCL would offer."""
    found = []
    for name, network in networks.items():
        offered = [address for _, address in chosen_interfaces(network).values()]
        usable = dict.fromkeys(
            a for a in (choose_address(name, networks), *offered) if a in network.addresses
        )
        found += [(name, address, network.port) for address in usable if name != host and address is not None]
    return found


def check_names(networks: Networks) -> list[CheckRow]:
    """Check what each host takes the others' names for, and that no two names are one machine."""
    machines: dict[tuple[str, str], list[str]] = {}
    for host, network in networks.items():
        machines.setdefault(network.is_same_machine, []).append(host)
    fix = "leave one line, with all slots"
    rows = [
        CheckRow("hosts", "fail", f"{' and '.join(names)} are one machine", fix, tuple(names))
        for names in machines.values()
        if len(names) > 1
    ]
    return rows + group_faults("names", _wrong_names(networks), "every host knows every other's")


def _wrong_names(networks: Networks) -> Iterator[tuple[str, Fault]]:
    master = next(iter(networks), None)
    for host, network in networks.items():
        for name, named in networks.items():
            status: Status = "fail" if name == master else "warning"  # all ranks meet on the master
            known = network.names.get(name, [])
            fix = f'put "{choose_address(name, networks)} {name}" into /etc/hosts of {HOST}'
            if not known:
                yield host, Fault(status, f"{name} is unknown", fix)
            elif host != name and is_loopback(known[0]):
                yield host, Fault(status, f"{name} is {known[0]}, which is {host} itself", fix)
            elif host != name and known[0] not in named.addresses:
                yield host, Fault(status, f"{name} is {known[0]}, an address that {name} does not have", fix)


def check_ports(networks: Networks, links: Links) -> list[CheckRow]:
    """Check that each host can open a connection to each other."""
    rows = []
    for target in links:
        address = choose_address(target, networks)
        failed = {
            source: link.problem
            for source, tried in links.items()
            for link in tried
            if (link.name, link.address) == (target, address) and link.problem is not None
        }
        if not failed:
            continue
        whom = "every other host" if 1 < len(failed) == len(links) - 1 else ", ".join(failed)
        fix = f"let TCP from {', '.join(failed)} to {address} through, ports 1024 and up"
        fix += f": ssh {target} iptables -S, and the network's own rules"
        reason = next(iter(failed.values()))
        rows.append(CheckRow("ports", "fail", f"{whom} -> {target}: {reason}", fix, (*failed, target)))
    return rows or [CheckRow("ports", "ok", f"all {len(links) * (len(links) - 1)} ways are open")]


def check_interfaces(networks: Networks, links: Links) -> list[CheckRow]:
    """Check that gloo and NCCL would take the interface that leads to the first host."""
    faults = []
    ways = set()
    master = next(iter(links), "")
    for host, tried in links.items():
        sources = [link.source for link in tried if link.name == master and link.problem is None]
        own = choose_address(host, networks) if host == master else next(iter(sources), None)
        way = networks[host].interface_with(own)
        if way is None:
            continue  # check_ports says so
        ways.add(way)
        for variable, (name, address) in chosen_interfaces(networks[host]).items():
            if name == way:
                continue
            reached = [
                link.problem is None
                for others in links.values()
                for link in others
                if (link.name, link.address) == (host, address)
            ]
            is_reached = bool(reached) and all(reached)
            fix = f"export {variable}={way}"
            given = networks[host].environment.get(variable)
            library = "gloo" if variable.startswith("GLOO") else "NCCL"
            if given and address is None:
                fault = Fault("fail", f"{variable}={given}: there is no such interface that is up", fix)
            elif address is None or is_loopback(address):
                # gloo falls back to loopback if the host's own name is no address of it.
                found = f"{library} would offer {address or '127.0.0.1'} ({name or 'lo'}) to the others"
                own_name = f"{fix}, or in its /etc/hosts give its own name {choose_address(host, networks)}"
                fault = Fault("fail", found, own_name)
            else:
                found = f"{library} would use {name} ({address}); the first host is reached by {way}"
                fault = Fault("warning" if is_reached else "fail", found, fix)
            faults.append((host, fault))
    return group_faults("interface", faults, ", ".join(sorted(ways)) or "unknown")


def check_sharing(sees: Mapping[str, Sequence[str]], folder: str) -> list[CheckRow]:
    """Check for one folder of runs for all hosts, or one for each, and not a mount that some lack.

    Args:
        sees: Each host with a folder that can be written -> hosts whose markers it sees there.
        folder: The folder of runs, for the message.
    """
    groups = Counter(frozenset(found) & frozenset(sees) for found in sees.values())
    if len(sees) < 2:
        return []
    if len(groups) == 1:
        return [CheckRow("run folder", "ok", "one for all hosts")]
    if all(len(group) == 1 for group in groups):
        return [CheckRow("run folder", "ok", "each host has its own: each keeps its part of a checkpoint")]
    largest = max(groups, key=len)
    apart = tuple(host for host in sees if host not in largest)
    found = f"{', '.join(sorted(largest))} share {folder}; the rest does not see it"
    return [CheckRow("run folder", "warning", found, f"mount it on {', '.join(apart)} too", apart)]
