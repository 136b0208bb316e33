"""The hosts' view of each other: names, ports and their direction, interfaces, folders, links."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.distributed.doctor.all_reduce import RankMeasurements, check_all_reduce, plan_ring_transfers
from pipeline.distributed.doctor.network import (
    Link,
    Network,
    check_interfaces,
    check_names,
    check_ports,
    check_sharing,
    choose_address,
    choose_interfaces,
    connect_to,
    list_peers,
    open_greeting_port,
    read_network,
)

LO = {"lo": ["127.0.0.1"]}
DOCKER = {"docker0": ["172.17.0.1"]}


def well(hosts, **changes):
    """Hosts 10.0.0.1, 10.0.0.2, ... on eth0, who know each other's names; `changes` are of host b."""
    addresses = {host: f"10.0.0.{number}" for number, host in enumerate(hosts, 1)}
    networks = {
        host: Network(
            hostname=host,
            boot_id=f"boot of {host}",
            interfaces=LO | {"eth0": [address]} | DOCKER,
            resolved_names={other: [there] for other, there in addresses.items()},
            own_address=address,
            ssh_address=address,
            port=4000,
        )
        for host, address in addresses.items()
    }
    return networks | ({"b": replace(networks["b"], **changes)} if changes else {})


def links(networks, *closed):
    """Every way is open, but for those in `closed`: (source, target address)."""
    return {
        source: [
            Link(
                name,
                address,
                "no answer" if (source, address) in closed else None,
                networks[source].ssh_address,
            )
            for name, address, _ in list_peers(source, networks)
        ]
        for source in networks
    }


def bad(rows):
    return [row for row in rows if row.status != "ok"]


def test_all_is_well():
    networks = well("abc")
    open_links = links(networks)
    rows = check_names(networks) + check_ports(networks, open_links) + check_interfaces(networks, open_links)
    rows += check_sharing({host: list("abc") for host in "abc"}, "runs")
    assert not bad(rows)
    assert {row.text for row in rows} >= {"all 6 connections succeed", "eth0", "shared by all hosts"}


def test_a_closed_way_is_named_with_its_direction():
    networks = well("abc")
    (row,) = check_ports(networks, links(networks, ("a", "10.0.0.3")))
    assert (row.text, row.hosts) == ("a -> c: no answer", ("a", "c"))
    assert "TCP from a to 10.0.0.3" in row.fix
    (row,) = check_ports(networks, links(networks, ("a", "10.0.0.3"), ("b", "10.0.0.3")))
    assert row.text.startswith("every other host -> c")


@pytest.mark.parametrize(
    ("name", "known", "status", "found"),
    [
        ("a", [], "fail", "the name a does not resolve"),
        ("a", ["127.0.1.1"], "fail", "a resolves to 127.0.1.1, which is b itself"),
        ("a", ["10.0.0.9"], "fail", "a resolves to 10.0.0.9, which is not an address of a"),
        ("c", [], "warning", "the name c does not resolve"),
        ("b", ["127.0.1.1"], None, ""),  # check_interfaces judges it
    ],
)
def test_names(name, known, status, found):
    rows = bad(check_names(well("abc", resolved_names=well("abc")["b"].resolved_names | {name: known})))
    assert [(row.status, row.hosts, row.text) for row in rows] == (
        [(status, ("b",), found)] if status else []
    )
    assert all(f"10.0.0.{1 + 'abc'.index(name)} {name}" in row.fix for row in rows)


def test_two_names_of_one_machine():
    (row,) = bad(check_names(well("ab", hostname="a", boot_id="boot of a")))
    assert (row.text, row.hosts) == ("a and b are the same machine", ("a", "b"))


@pytest.mark.parametrize(
    ("own", "given", "closed", "status", "found"),
    [
        # Debian writes 127.0.1.1 beside a machine's own name.
        ("127.0.1.1", {}, [], "fail", "gloo would advertise 127.0.1.1 (lo), which other"),
        ("127.0.1.1", {"GLOO_SOCKET_IFNAME": "eth0"}, [], None, ""),
        (
            "127.0.1.1",
            {"GLOO_SOCKET_IFNAME": "eth1"},
            [],
            "fail",
            "GLOO_SOCKET_IFNAME=eth1: no interface of this name is up",
        ),
        ("172.17.0.1", {}, [], "warning", "gloo would use docker0 (172.17.0.1); the first host is reached"),
        ("172.17.0.1", {}, [("a", "172.17.0.1")], "fail", "gloo would use docker0 (172.17.0.1)"),
    ],
)
def test_the_interface_that_gloo_would_take(own, given, closed, status, found):
    networks = well("ab", own_address=own, environment=given)
    open_links = links(networks, *closed)
    rows = bad(check_interfaces(networks, open_links))
    assert [(row.status, row.hosts) for row in rows] == ([(status, ("b",))] if status else [])
    assert all(found in row.text and "export GLOO_SOCKET_IFNAME=eth0" in row.fix for row in rows)
    assert not bad(check_ports(networks, open_links))


@pytest.mark.parametrize(
    ("rule", "interface"),
    [
        ("", "eth0"),
        ("eth1", "eth1"),
        ("eth", "eth0"),
        ("^eth0", "lo"),
        ("^lo,eth0", "docker0"),
        ("=eth", "=eth"),
        ("=eth1,x", "eth1"),
        ("ib0", "ib0"),
    ],
)
def test_nccl_chooses_by_its_own_grammar(rule, interface):
    network = well("ab", has_gpus=True, environment={"NCCL_SOCKET_IFNAME": rule} if rule else {})["b"]
    network = replace(network, interfaces=network.interfaces | {"eth1": ["10.1.0.1"]})
    assert choose_interfaces(network)["NCCL_SOCKET_IFNAME"][0] == interface


def test_the_address_of_a_host():
    networks = well("abc", interfaces=LO | {"eth0": ["10.0.0.2", "10.5.0.2"]}, ssh_address="10.5.0.2")
    assert choose_address("b", networks) == "10.0.0.2"
    # A name of ~/.ssh/config that only ssh knows.
    networks |= {other: replace(networks[other], resolved_names={"b": []}) for other in "ac"}
    assert choose_address("b", networks) == "10.5.0.2"
    assert choose_address("b", networks | {"b": replace(networks["b"], ssh_address=None)}) == "10.0.0.2"


def test_run_folders():
    (row,) = check_sharing({"a": ["a"], "b": ["b"], "c": ["c"]}, "runs")
    assert (row.status, "its own" in row.text) == ("ok", True)
    (row,) = check_sharing({"a": ["a", "b"], "b": ["a", "b"], "c": ["c"]}, "runs")
    assert (row.status, row.hosts) == ("warning", ("c",))
    assert "mount it on c" in row.fix


@pytest.mark.slow
def test_real_ports():
    port = open_greeting_port("token", "b")
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.create_server(("127.0.0.1", 0)) as closed:
        ports = {"b": port, "other": port, "silent": silent.getsockname()[1]}
        ports["closed"] = closed.getsockname()[1]
        closed.close()
        peers = [(name, "127.0.0.1", number) for name, number in ports.items()]
        found = {link.name: link for link in connect_to(peers, "token", 3.0)}
    assert (found["b"].problem, found["b"].source) == (None, "127.0.0.1")
    assert found["other"].problem == "another machine or program answers there"
    assert found["silent"].problem == "no answer within 3 s"
    assert found["closed"].problem == "connection refused"


def test_what_this_machine_knows():
    network = read_network(["localhost", "no.such.name.invalid"])
    assert network.resolved_names["localhost"]
    assert network.resolved_names["no.such.name.invalid"] == []
    assert network.interfaces["lo"]


def measured(speeds):
    """Results of ranks, one a host: the speed from each to the next."""
    count = len(speeds)
    return [
        RankMeasurements(
            rank,
            step="the large all-reduce",
            links=[[(rank - 1) % count, rank, speeds[(rank - 1) % count] * 1e6]],
            bandwidth=5e8,
            size=1 << 24,
        )
        for rank in range(count)
    ]


@pytest.mark.parametrize(
    ("speeds", "hosts"),
    [
        ([900, 1000, 1100, 950], ()),
        ([900, 100, 1100, 950], ("b", "c")),  # one link
        ([900, 100, 100, 950], ("c",)),  # both links of a host
        ([100, 1000], ("a", "b")),
    ],
)
def test_the_slow_link_or_host_is_named(speeds, hosts):
    names = list("abcd")[: len(speeds)]
    reduced, row = check_all_reduce(names, measured(speeds), "", has_gpus=False)
    assert reduced.text == f"16 MiB over {len(speeds)} ranks, 4 Gbit/s per rank"
    assert (row.hosts, row.status) == (hosts, "warning" if hosts else "ok")
    slowest = speeds.index(min(speeds))
    assert f"{names[slowest]} -> {names[(slowest + 1) % len(names)]}" in row.text


def test_who_is_furthest_behind_is_named():
    results = measured([1, 1, 1])
    for rank, step in enumerate(["transfers", "joining", "transfers"]):
        results[rank] = RankMeasurements(rank, step, f"still at {step} after 40 s")
    (row,) = check_all_reduce("abc", results, "", has_gpus=True)
    assert (row.status, row.hosts) == ("fail", ("b",))
    assert row.text == "stopped at joining: still at joining after 40 s"
    assert "NCCL_DEBUG=INFO" in row.fix


@given(st.integers(1, 9))
def test_transfers_go_once_round_and_no_host_is_in_two_at_once(count):
    rounds = plan_ring_transfers(count)
    for pairs in rounds:
        busy = [host for pair in pairs for host in pair]
        assert len(busy) == len(set(busy))
    every = {tuple(pair) for pairs in rounds for pair in pairs}
    assert every == ({(n, (n + 1) % count) for n in range(count)} if count > 1 else set())
