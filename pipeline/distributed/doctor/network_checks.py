"""The network between the machines, judged: names, ports, interfaces, shared folders, speed. Pure."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from pipeline.distributed.doctor.network import Connection, Network
from pipeline.distributed.doctor.probe import Answered
from pipeline.distributed.doctor.rows import HOST, Fault, Row, Seen, Status, rows_of
from pipeline.distributed.doctor.session import STEPS, Measured

SLOW = 1 / 3
"""Share of the median below which a link is slow."""


def is_loopback(address: str) -> bool:
    """127.0.0.0/8 or ::1: of no use to another machine."""
    return ipaddress.ip_address(address).is_loopback


def addresses_of(network: Network) -> list[str]:
    """A machine's addresses that others may know it by."""
    found = [address for interface in network["interfaces"] for address in interface["addresses"]]
    return [a for a in found if not is_loopback(a) and not ipaddress.ip_address(a).is_link_local]


def address_of(host: str, facts: Mapping[str, Answered]) -> str | None:
    """Where others find a host: as most of them resolve its name; else where ssh found it; else its first."""
    own = addresses_of(facts[host]["network"])
    counts = Counter(
        address
        for other, each in facts.items()
        if other != host
        for address in each["network"]["names"].get(host, [])[:1]
        if address in own
    )
    if counts:
        return counts.most_common(1)[0][0]
    by_ssh = facts[host]["address"]
    return by_ssh if by_ssh in own else next(iter(own), None)


def chosen_interfaces(facts: Answered) -> dict[str, tuple[str | None, str | None]]:
    """Variable -> (interface, its address) that gloo, and on GPUs NCCL, would take. None: none of use."""
    network, set_by_user = facts["network"], facts["environment"]
    named = {each["name"]: each["addresses"][0] for each in network["interfaces"]}
    wanted = set_by_user.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    own = network["own_address"]
    found: dict[str, tuple[str | None, str | None]] = {
        "GLOO_SOCKET_IFNAME": (wanted, named.get(wanted)) if wanted else (interface_with(network, own), own)
    }
    if facts.get("devices", {"gpus": []})["gpus"]:
        rule = set_by_user.get("NCCL_SOCKET_IFNAME", "")
        fitting = sorted(
            (name for name in named if _nccl_takes(name, rule)), key=lambda n: not n.startswith("ib")
        )
        name = fitting[0] if fitting else rule or None
        found["NCCL_SOCKET_IFNAME"] = (name, named.get(name or ""))
    return found


def _nccl_takes(name: str, rule: str) -> bool:
    """NCCL's grammar: prefixes, `=` exact names, `^` all but these; else neither docker nor loopback."""
    exclude, exact = rule.startswith("^"), rule.lstrip("^").startswith("=")
    words = [word for word in rule.lstrip("^=").split(",") if word]
    if not words:
        return not name.startswith(("lo", "docker"))
    fits = name in words if exact else name.startswith(tuple(words))
    return fits != exclude


def interface_with(network: Network, address: str | None) -> str | None:
    """The interface that has an address."""
    return next((each["name"] for each in network["interfaces"] if address in each["addresses"]), None)


def check_names(seen: Seen) -> list[Row]:
    """What each host takes the others' names for, and whether two names are one machine."""
    facts = {host: each for host, each in seen.facts.items() if "network" in each}
    machines: dict[tuple[str, str], list[str]] = {}
    for host, each in facts.items():
        machines.setdefault((each["network"]["hostname"], each["network"]["boot_id"]), []).append(host)
    rows = [
        Row(
            "hosts",
            "fail",
            f"{' and '.join(names)} are one machine",
            "leave one line, with all slots",
            tuple(names),
        )
        for names in machines.values()
        if len(names) > 1
    ]
    rows += _only_another_machine(seen, facts)
    return rows + rows_of("names", _wrong_names(facts), "every host knows every other's")


def _only_another_machine(seen: Seen, facts: Mapping[str, Answered]) -> list[Row]:
    here = seen.here.get("network")
    if len(seen.wanted.devices) != 1 or here is None or seen.wanted.force_multi:
        return []
    for host, each in facts.items():
        there = each["network"]
        if (there["hostname"], there["boot_id"]) != (here["hostname"], here["boot_id"]):
            found = f"{host} alone is chosen and is not this machine: deepspeed would run its ranks here"
            return [Row("hosts", "fail", found, f"add --force_multi, or start on {host}", (host,))]
    return []


def _wrong_names(facts: Mapping[str, Answered]) -> Iterator[Fault]:
    """The first host is where all ranks meet: that one's is fatal."""
    master = next(iter(facts), None)
    for host, each in facts.items():
        for name, named in facts.items():
            status: Status = "fail" if name == master else "warning"
            known = each["network"]["names"].get(name, [])
            fix = f'put "{address_of(name, facts)} {name}" into /etc/hosts of {HOST}'
            if not known:
                yield Fault(host, status, f"{name} is unknown", fix)
            elif host != name and is_loopback(known[0]):
                yield Fault(host, status, f"{name} is {known[0]}, which is {host} itself", fix)
            elif host != name and known[0] not in addresses_of(named["network"]):
                found = f"{name} is {known[0]}, an address that {name} does not have"
                yield Fault(host, status, found, fix)


def check_ports(seen: Seen) -> list[Row]:
    """Whether each host can open a connection to each other."""
    failed = {
        (source, link["name"]): link["problem"]
        for source, links in seen.links.items()
        for link in links
        if link["problem"] is not None and link["address"] == address_of(link["name"], seen.facts)
    }
    hosts = list(seen.links)
    rows = []
    for target in hosts:
        sources = [source for source in hosts if (source, target) in failed]
        if not sources:
            continue
        whom = "every other host" if 1 < len(sources) == len(hosts) - 1 else ", ".join(sources)
        reason = failed[sources[0], target]
        address = address_of(target, seen.facts)
        fix = f"let TCP from {', '.join(sources)} to {address} through, ports 1024 and up"
        fix += f": {seen.on_host('iptables -S').replace(HOST, target)}, and the network's own rules"
        rows.append(Row("ports", "fail", f"{whom} -> {target}: {reason}", fix, (*sources, target)))
    pairs = len(hosts) * (len(hosts) - 1)
    return rows or [Row("ports", "ok", f"all {pairs} ways are open")]


def check_interfaces(seen: Seen) -> list[Row]:
    """Whether gloo and NCCL would take the interface that leads to the first host."""
    faults = []
    ways = set()
    master = next(iter(seen.links), None)
    for host, links in seen.links.items():
        facts = seen.facts[host]
        way = interface_with(facts["network"], _way_out(host, master, links, seen))
        if way is None:
            continue  # the ports' own rows say it
        ways.add(way)
        for variable, (name, address) in chosen_interfaces(facts).items():
            fault = _interface(host, variable, name, address, way, seen)
            if fault is not None:
                faults.append(fault)
    return rows_of("interface", faults, ", ".join(sorted(ways)) or "unknown")


def _way_out(host: str, master: str | None, links: Sequence[Connection], seen: Seen) -> str | None:
    """This host's address on the way to the first host; the first host's own, as others know it."""
    if host == master:
        return address_of(host, seen.facts)
    return next(
        (link["source"] for link in links if link["name"] == master and link["problem"] is None), None
    )


def _interface(
    host: str, variable: str, name: str | None, address: str | None, way: str, seen: Seen
) -> Fault | None:
    if name == way:
        return None
    library = "gloo" if variable.startswith("GLOO") else "NCCL"
    fix = f"export {variable}={way}"
    given = seen.facts[host]["environment"].get(variable)
    if given and address is None:
        return Fault(host, "fail", f"{variable}={given}: there is no such interface that is up", fix)
    if address is None or is_loopback(address):
        # gloo falls back to loopback where the host's own name is no address of it.
        name, address = name or "lo", address or "127.0.0.1"
        remedy = f", or in its /etc/hosts give its own name {address_of(host, seen.facts)}"
        return Fault(host, "fail", f"{library} would offer {address} ({name}) to the others", fix + remedy)
    reached = [
        link["problem"] is None
        for links in seen.links.values()
        for link in links
        if link["name"] == host and link["address"] == address
    ]
    status: Status = "warning" if reached and all(reached) else "fail"
    found = f"{library} would use {name} ({address}); the first host is reached by {way}"
    return Fault(host, status, found, fix)


def check_sharing(seen: Seen) -> list[Row]:
    """One run folder for all, one for each, or a mount that is missing on some."""
    hosts = [host for host in seen.sees if all(not f["problem"] for f in seen.facts[host].get("folders", []))]
    groups = Counter(frozenset(seen.sees[host]) & frozenset(hosts) for host in hosts)
    if len(hosts) < 2:
        return []
    if len(groups) == 1:
        return [Row("run folder", "ok", "one for all hosts")]
    if all(len(group) == 1 for group in groups):
        return [Row("run folder", "ok", "each host has its own: each keeps its part of a checkpoint")]
    largest = max(groups, key=len)
    apart = tuple(host for host in hosts if host not in largest)
    folder = seen.facts[hosts[0]]["folders"][0]["path"]
    found = f"{', '.join(sorted(largest))} share {folder}; the rest does not see it"
    return [Row("run folder", "warning", found, f"mount it on {', '.join(apart)} too", apart)]


def check_all_reduce(
    seen: Seen, places: Sequence[str], results: Sequence[Measured], problem: str
) -> list[Row]:
    """The rows of the all-reduce and of the links.

    Args:
        places: The host of each rank.
        problem: Why there are no results.
    """
    more = "NCCL_DEBUG=INFO" if seen.facts[places[0]]["devices"]["gpus"] else "TORCH_CPP_LOG_LEVEL=INFO"
    fix = f"look at the rows above; {more} in front of this command shows more"
    if problem:
        return [Row("all-reduce", "fail", problem, fix)]
    wrong = [each for each in results if "problem" in each]
    if wrong:
        # The others wait for the one that is furthest behind.
        first = min(wrong, key=lambda each: STEPS.index(each["step"]))
        behind = [each for each in wrong if each["step"] == first["step"]]
        hosts = tuple(dict.fromkeys(places[each["rank"]] for each in behind))
        return [Row("all-reduce", "fail", f"stopped at {first['step']}: {first['problem']}", fix, hosts)]
    size = min(each["size"] for each in results)
    bandwidth = min(each["bandwidth"] for each in results)
    ranks = f"{len(results)} rank{'s' * (len(results) > 1)}"
    over = f", {_speed(bandwidth)} a rank" if len(results) > 1 else ""
    rows = [Row("all-reduce", "ok", f"{size / (1 << 20):.1f} MiB over {ranks}{over}")]
    return rows + _links(places, results)


def _links(places: Sequence[str], results: Sequence[Measured]) -> list[Row]:
    speeds: dict[tuple[str, str], float] = {}
    for first, second, speed in (link for each in results for link in each["links"]):
        pair = places[first], places[second]
        speeds[pair] = min(speed, speeds.get(pair, speed))
    if not speeds:
        return []
    # Of two links the faster is what the slower is held against.
    usual = median(speeds.values()) if len(speeds) > 2 else max(speeds.values())
    slow = {pair for pair, speed in speeds.items() if speed < SLOW * usual}
    (source, target), least = min(speeds.items(), key=lambda item: item[1])
    found = f"slowest {source} -> {target} {_speed(least)}; usual {_speed(usual)}"
    if not slow:
        return [Row("links", "ok", found)]
    # All of a host's links: not the link is slow, but the host.
    guilty = [host for host in (source, target) if len({pair for pair in slow if host in pair}) > 1]
    hosts = tuple(guilty or (source, target))
    fix = f"on {', '.join(hosts)}: what else runs (top), the link's speed and errors (ip -s link; ethtool)"
    if len(guilty) == 1:
        found = f"{guilty[0]} is slow: {found}"
    return [Row("links", "warning", found, fix, hosts)]


def _speed(bytes_a_second: float) -> str:
    return f"{bytes_a_second * 8 / 1e9:.3g} Gbit/s"
