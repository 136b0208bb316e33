"""What the hosts know of each other -> rows: names, ports and their direction, interfaces, folders, links."""

from __future__ import annotations

import pytest
from distributed.doctor.machines import bad, here, seen, well
from hypothesis import given
from hypothesis import strategies as st

from pipeline.distributed.doctor.checks import (
    address_of,
    check_all_reduce,
    check_interfaces,
    check_names,
    check_ports,
    check_sharing,
    chosen_interfaces,
)
from pipeline.distributed.doctor.examination import ring

MILLION = 1e6


def close(state, source, target):
    """No connection from one host to another."""
    for link in state.links[source]:
        if link["name"] == target:
            link["problem"] = "no answer within 3 s"


def test_all_is_well():
    state = seen(well(["a", "b", "c"]), sees={host: ["a", "b", "c"] for host in "abc"})
    rows = check_names(state) + check_ports(state) + check_interfaces(state) + check_sharing(state)
    assert not bad(rows)
    assert {row.found for row in rows} >= {"all 6 ways are open", "eth0", "one for all hosts"}


def test_a_closed_way_is_named_with_its_direction():
    state = seen(well(["a", "b", "c"]))
    close(state, "a", "c")
    (row,) = check_ports(state)
    assert row.found == "a -> c: no answer within 3 s"
    assert row.hosts == ("a", "c")
    assert "TCP from a to 10.0.0.3" in row.fix
    close(state, "b", "c")
    (row,) = check_ports(state)
    assert row.found.startswith("every other host -> c")


@pytest.mark.parametrize(
    ("host", "name", "known", "status", "found"),
    [
        ("b", "a", [], "fail", "a is unknown"),
        ("b", "a", ["127.0.1.1"], "fail", "a is 127.0.1.1, which is b itself"),
        ("b", "a", ["10.0.0.9"], "fail", "a is 10.0.0.9, an address that a does not have"),
        ("b", "c", [], "warning", "c is unknown"),
        ("b", "b", ["127.0.1.1"], None, ""),  # the interfaces' check judges it
    ],
)
def test_names(host, name, known, status, found):
    facts = well(["a", "b", "c"])
    facts[host]["network"]["names"][name] = known
    rows = bad(check_names(seen(facts)))
    assert [(row.status, row.hosts, row.found) for row in rows] == (
        [(status, (host,), found)] if status else []
    )
    assert all(f"10.0.0.{1 + 'abc'.index(name)} {name}" in row.fix for row in rows)


def test_two_names_of_one_machine():
    facts = well(["a", "b"])
    facts["b"]["network"] |= {"hostname": "a", "boot_id": "boot of a"}
    (row,) = bad(check_names(seen(facts)))
    assert (row.found, row.hosts) == ("a and b are one machine", ("a", "b"))


def test_one_remote_host():
    facts = well(["a"])
    (row,) = bad(check_names(seen(facts)))
    assert "a alone is chosen" in row.found
    assert "--force_multi" in row.fix
    assert not bad(check_names(seen(facts, force_multi=True)))
    of_here = here()
    of_here["network"] = facts["a"]["network"]
    assert not bad(check_names(seen(facts, here=of_here)))


def test_the_own_name_is_loopback():
    """Debian writes 127.0.1.1 beside a machine's own name: gloo would offer that to the others."""
    facts = well(["a", "b"])
    facts["b"]["network"]["own_address"] = "127.0.1.1"
    (row,) = bad(check_interfaces(seen(facts)))
    assert (row.status, row.hosts) == ("fail", ("b",))
    assert "gloo would offer 127.0.1.1" in row.found
    assert "export GLOO_SOCKET_IFNAME=eth0" in row.fix
    assert "10.0.0.2" in row.fix
    facts["b"]["environment"] = {"GLOO_SOCKET_IFNAME": "eth0"}
    assert not bad(check_interfaces(seen(facts)))
    facts["b"]["environment"] = {"GLOO_SOCKET_IFNAME": "eth1"}
    (row,) = bad(check_interfaces(seen(facts)))
    assert "GLOO_SOCKET_IFNAME=eth1: there is no such interface" in row.found


@pytest.mark.parametrize(("is_open", "status"), [(True, "warning"), (False, "fail")])
def test_another_interface_than_the_one_that_leads_to_the_master(is_open, status):
    facts = well(["a", "b"])
    facts["b"]["network"]["own_address"] = "172.17.0.1"
    state = seen(facts)
    for link in state.links["a"]:
        if link["address"] == "172.17.0.1" and not is_open:
            link["problem"] = "no route to host"
    (row,) = bad(check_interfaces(state))
    assert row.status == status
    assert "gloo would use docker0 (172.17.0.1)" in row.found
    assert not bad(check_ports(state))


@pytest.mark.parametrize(
    ("rule", "interface"),
    [
        ("", "eth0"),
        ("eth1", "eth1"),
        ("eth", "eth0"),
        ("^eth0", "lo"),
        ("^lo,eth0", "docker0"),
        ("^lo,eth0,docker", "eth1"),
        ("=eth", "=eth"),
        ("=eth1,x", "eth1"),
        ("ib0", "ib0"),
    ],
)
def test_nccl_chooses_by_its_own_grammar(rule, interface):
    facts = well(["a"], gpus=1)["a"]
    facts["network"]["interfaces"].append({"name": "eth1", "addresses": ["10.1.0.1"]})
    facts["environment"] = {"NCCL_SOCKET_IFNAME": rule} if rule else {}
    assert chosen_interfaces(facts)["NCCL_SOCKET_IFNAME"][0] == interface


def test_the_address_of_a_host():
    facts = well(["a", "b", "c"])
    facts["b"]["network"]["interfaces"][1]["addresses"].append("10.5.0.2")
    assert address_of("b", facts) == "10.0.0.2"
    for other in "ac":  # a name of ~/.ssh/config, that only ssh knows
        facts[other]["network"]["names"]["b"] = []
    facts["b"]["address"] = "10.5.0.2"
    assert address_of("b", facts) == "10.5.0.2"
    facts["b"]["address"] = None
    assert address_of("b", facts) == "10.0.0.2"


def test_run_folders():
    def rows(sees):
        return check_sharing(seen(well(["a", "b", "c"]), sees=sees))

    (row,) = rows({"a": ["a"], "b": ["b"], "c": ["c"]})
    assert (row.status, "its own" in row.found) == ("ok", True)
    (row,) = rows({"a": ["a", "b"], "b": ["a", "b"], "c": ["c"]})
    assert (row.status, row.hosts) == ("warning", ("c",))
    assert "mount it on c" in row.fix


def measured(speeds, **more):
    """Results of ranks, one a host: the speed from each to the next."""
    count = len(speeds)
    return [
        {
            "rank": rank,
            "step": "the end",
            "links": [((rank - 1) % count, rank, speeds[(rank - 1) % count] * MILLION)],
            "bandwidth": 5e8,
            "size": 1 << 24,
        }
        | more
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
    reduced, links = check_all_reduce(seen(well(names)), names, measured(speeds), "")
    assert reduced.found == f"16.0 MiB over {len(speeds)} ranks, 4 Gbit/s a rank"
    assert links.hosts == hosts
    assert links.status == ("warning" if hosts else "ok")
    slowest = speeds.index(min(speeds))
    assert f"{names[slowest]} -> {names[(slowest + 1) % len(names)]}" in links.found


def test_who_is_furthest_behind_is_named():
    results = measured([1, 1, 1])
    for rank, step in enumerate(["transfers", "joining", "transfers"]):
        results[rank] = {"rank": rank, "step": step, "problem": f"still at {step} after 40 s"}
    (row,) = check_all_reduce(seen(well(["a", "b", "c"])), list("abc"), results, "")
    assert (row.status, row.hosts) == ("fail", ("b",))
    assert row.found == "stopped at joining: still at joining after 40 s"
    assert row.fix


@given(st.lists(st.integers(1, 8), min_size=1, max_size=9))
def test_transfers_go_once_round_and_no_host_is_in_two_at_once(slots):
    starts = [sum(slots[:n]) for n in range(len(slots))]
    host_of = {start + n: host for host, start in enumerate(starts) for n in range(slots[host])}
    rounds = ring(slots)
    for pairs in rounds:
        links = {(host_of[a], host_of[b]) for a, b in pairs}
        busy = [host for link in links for host in link]
        assert len(busy) == len(set(busy))
        ranks = [rank for pair in pairs for rank in pair]
        assert len(ranks) == len(set(ranks))
    every = {(host_of[a], host_of[b]) for pairs in rounds for a, b in pairs}
    count = len(slots)
    assert every == ({(n, (n + 1) % count) for n in range(count)} if count > 1 else set())
