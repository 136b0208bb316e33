"""What a machine knows of the network: names, interfaces, and which other machines it can connect to."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypedDict

import psutil


class Interface(TypedDict):
    """A network interface that is up, in the kernel's order."""

    name: str
    addresses: list[str]


class Network(TypedDict):
    """What this machine would tell others, and how it sees them."""

    hostname: str
    boot_id: str
    """With the host name: which machine it is, whatever it is called."""
    interfaces: list[Interface]
    names: dict[str, list[str]]
    """Every host's name -> its addresses as seen from here; none: unknown."""
    own_address: str | None
    """What the host's own name means here, as gloo reads it; None: nothing of this machine."""


class Peer(TypedDict):
    """Where another host listens."""

    name: str
    address: str
    port: int


class Connection(TypedDict):
    """An attempt to reach a peer."""

    name: str
    address: str
    problem: str | None
    source: str | None
    """This machine's address on the way there."""


def read_network(names: Sequence[str]) -> Network:
    """Resolves every name, in parallel: a name server that does not answer takes seconds."""
    with ThreadPoolExecutor(max_workers=32) as pool:
        found = list(pool.map(resolve, names))
    is_up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    families = (socket.AF_INET, socket.AF_INET6)
    interfaces = [
        Interface(name=name, addresses=[a.address.partition("%")[0] for a in known if a.family in families])
        for name, known in psutil.net_if_addrs().items()
        if name in is_up
    ]
    boot_id = ""
    with contextlib.suppress(OSError):
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return Network(
        hostname=socket.gethostname(),
        boot_id=boot_id,
        interfaces=[each for each in interfaces if each["addresses"]],
        names=dict(zip(names, found, strict=True)),
        own_address=_own_address(),
    )


def resolve(name: str) -> list[str]:
    """The addresses of a name, the preferred one first; none: it is unknown."""
    try:
        answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(answer[4][0]) for answer in answers))


def _own_address() -> str | None:
    """gloo's choice where GLOO_SOCKET_IFNAME is unset: the first address of its own name that binds."""
    for address in resolve(socket.gethostname()):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
            return address
    return None


def listen(token: str, name: str) -> int:
    """Opens a port that says who answers, until the process ends; its number."""
    greeting = f"{token} {name}\n".encode()
    if socket.has_dualstack_ipv6():
        server = socket.create_server(("", 0), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
    else:
        server = socket.create_server(("", 0), backlog=1024)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                with connection, contextlib.suppress(OSError):
                    connection.sendall(greeting)

    threading.Thread(target=serve, name="listener", daemon=True).start()
    port: int = server.getsockname()[1]
    return port


def connect_to(peers: Sequence[Peer], token: str, seconds: float) -> list[Connection]:
    """Tries every peer at once, for so many seconds. Who answers is the peer if it says token and name."""

    def attempt(peer: Peer) -> Connection:
        problem, source = None, None
        try:
            with socket.create_connection((peer["address"], peer["port"]), seconds) as connection:
                source = str(connection.getsockname()[0]).removeprefix("::ffff:")
                said = _first_line(connection, seconds)
                if said != f"{token} {peer['name']}":
                    problem = "another machine or program answers there"
        except TimeoutError:
            problem = f"no answer within {seconds:g} s"
        except OSError as error:
            problem = (error.strerror or str(error)).lower()
        return Connection(name=peer["name"], address=peer["address"], problem=problem, source=source)

    with ThreadPoolExecutor(max_workers=256) as pool:
        return list(pool.map(attempt, peers))


def _first_line(connection: socket.socket, seconds: float) -> str:
    deadline = time.monotonic() + seconds
    received = b""
    while not received.endswith(b"\n") and len(received) < 1000:
        connection.settimeout(max(0.01, deadline - time.monotonic()))
        part = connection.recv(100)
        if not part:
            break
        received += part
    return received.decode(errors="replace").rstrip("\n")
