"""Facts of machines -> rows: what is wrong is red or yellow on its host, with what to do."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from distributed.doctor.machines import GIB, bad, here, seen, well

from pipeline.distributed.doctor.checks import check_clocks, check_machines, silence
from pipeline.distributed.doctor.rows import Row, is_red
from pipeline.distributed.doctor.session import SilentError
from pipeline.distributed.launch.ssh import NO_FOLDER, NO_PYTHON
from pipeline.distributed.op_builds import ASYNC_IO, CPU_ADAM, QUANTIZER


def test_well_machines_are_green():
    rows = check_machines(seen(well(["a", "b"])))
    assert not bad(rows)
    assert [row.check for row in rows] == [
        *(
            "project",
            "versions",
            "devices",
            "driver",
            "memory",
            "disk",
            "folders",
            "native ops",
            "build locks",
        )
    ]


def spoil(facts, path, value):
    *folders, last = path
    for key in folders:
        facts = facts[key]
    facts[last] = value


@pytest.mark.parametrize(
    ("path", "value", "check", "status", "found", "fix"),
    [
        (["project", "commit"], "b" * 40, "project", "fail", "commit bbbbbbbbbb, here aaaaaaaaaa", "b:"),
        (["project", "digest"], "e", "project", "fail", "other source files", "rsync"),
        (["versions", "python"], "3.12.1", "versions", "fail", "python 3.12.1, here 3.11.7", "Python 3.11.7"),
        (["versions", "python"], "3.11.9", "versions", "warning", "python 3.11.9", ""),
        (["versions", "torch"], "2.12.0", "versions", "fail", "torch 2.12.0, here 2.13.0", "torch==2.13.0"),
        (["versions", "torch"], None, "versions", "fail", "no torch", "ssh b "),
        (["versions", "NCCL"], "2.27", "versions", "fail", "NCCL 2.27, here None", "same torch"),
        (["memory"], GIB // 2, "memory", "fail", "512 MiB free for 1 rank", "ssh b ps"),
        (["memory"], 3 * GIB // 2, "memory", "warning", "1.50 GiB free for 1 rank", ""),
        (["disks", 0, "free"], 1 << 20, "disk", "fail", "runs: 1 MiB free", "ssh b df -h runs"),
        (["disks", 0, "free"], 5 * GIB, "disk", "warning", "runs: 5.00 GiB free", ""),
        (["disks", 2, "free"], 60 << 20, "disk", "fail", "/dev/shm: 60 MiB free", "--shm-size"),
        (["disks", 1, "files_left"], 3, "disk", "fail", "/tmp: room for 3 more files", "ssh b df"),
        (
            ["folders", 0, "problem"],
            "Read-only file system",
            "folders",
            "fail",
            "runs cannot be written",
            "ls -ld",
        ),
        (["ops", "compiler"], None, "native ops", "warning", "no C++ compiler", "apt-get install g++"),
        (["ops", "ninja"], None, "native ops", "warning", "no ninja", "pip install ninja"),
        (
            *(["ops", "locks"], [{"path": "/x/cpu_adam/lock", "is_held": False}]),
            *("build locks", "warning", "left /x/cpu_adam/lock", "ssh b rm /x/cpu_adam/lock"),
        ),
    ],
)
def test_one_fault_on_one_machine(path, value, check, status, found, fix):
    facts = well(["a", "b", "c"])
    spoil(facts["b"], path, value)
    (row,) = bad(check_machines(seen(facts)))
    assert (row.check, row.status, row.hosts) == (check, status, ("b",))
    assert found in row.found
    assert fix in row.fix
    assert row.fix


def test_a_build_that_runs_is_no_stale_lock():
    """On one host of several that share the folder: the others do not see its compiler."""
    facts = well(["a", "b"])
    for host, is_held in (("a", False), ("b", True)):
        facts[host]["ops"]["locks"] = [{"path": "/home/x/lock", "is_held": is_held}]
    assert not bad(check_machines(seen(facts)))


LOCKED = {"path": "/x/cpu_adam/lock", "is_held": False}


def test_a_run_that_needs_no_op_is_asked_for_none():
    facts = well(["a", "b", "c"])
    facts["a"]["ops"] |= {"locks": [LOCKED], "compiler": None, "ninja": None, "libaio": False}
    del facts["b"]["ops"]
    facts["b"]["unknown"] = {"ops": "no answer within 8 s"}
    rows = check_machines(seen(facts, ops=()))
    assert not bad(rows)
    assert not {"native ops", "build locks", "ops"} & {row.check for row in rows}


@pytest.mark.parametrize(
    ("ops", "statuses"),
    [
        ((CPU_ADAM,), {"native ops": "ok", "build locks": "warning"}),
        ((ASYNC_IO,), {"native ops": "fail", "build locks": "ok"}),
        ((CPU_ADAM, ASYNC_IO), {"native ops": "fail", "build locks": "warning"}),
        ((QUANTIZER,), {"native ops": "fail", "build locks": "ok"}),
    ],
)
def test_a_run_is_asked_for_the_ops_it_needs(ops, statuses):
    facts = well(["a", "b"])
    facts["b"]["ops"] |= {"locks": [LOCKED], "libaio": False, "nvcc": None}
    rows = {row.check: row for row in check_machines(seen(facts, ops=ops))}
    assert {check: rows[check].status for check in statuses} == statuses
    if ASYNC_IO in ops:
        assert rows["native ops"].fix == "ssh b apt-get install libaio-dev"
    if QUANTIZER in ops:
        assert rows["native ops"].found == "no nvcc: no quantised ZeRO++"


def test_what_a_machine_does_not_answer_is_red():
    facts = well(["a", "b"])
    del facts["b"]["disks"]
    facts["b"]["unknown"] = {"disks": "no answer within 8 s"}
    (row,) = bad(check_machines(seen(facts)))
    assert (row.check, row.hosts) == ("disks", ("b",))
    assert "no answer within 8 s" in row.found
    assert "file server" in row.fix


def test_the_same_fault_on_several_hosts_is_one_row():
    facts = well(["a", "b", "c"])
    for host in "bc":
        facts[host]["versions"]["torch"] = "2.12.0"
    (row,) = bad(check_machines(seen(facts)))
    assert row.hosts == ("b", "c")
    assert row.fix.startswith("ssh b ")
    assert row.fix.endswith("(the same for c)")


def test_without_git_files_decide():
    facts, of_here = well(["a"]), here()
    facts["a"]["project"]["commit"] = of_here["project"]["commit"] = None
    (row,) = [r for r in check_machines(seen(facts, here=of_here)) if r.check == "project"]
    assert (row.status, row.found) == ("ok", "the same files")


@pytest.mark.parametrize(
    ("wanted", "gpus", "status", "found"),
    [
        ([0, 1], 2, "ok", ""),
        ([0, 1, 2], 2, "fail", "device 2 is asked for and there are 2 GPUs"),
        ([5], 2, "fail", "device 5 is asked for"),
        (None, 2, "ok", ""),
        (list(range(8)), 0, "ok", ""),
        (list(range(9)), 0, "warning", "9 slots on 8 cores"),
    ],
)
def test_slots_and_devices(wanted, gpus, status, found):
    facts = well(["a", "b"], gpus)
    for each in [*facts.values(), (of_here := here())]:
        each["versions"]["CUDA"] = "13.0"
    rows = check_machines(seen(facts, here=of_here, devices={"a": None, "b": wanted}))
    (row,) = [row for row in rows if row.check == "devices"]
    assert row.status == status
    assert found in row.found
    assert row.hosts == (() if status == "ok" else ("b",))


def test_gpus_on_some_hosts_only_or_in_use():
    facts = well(["a", "b", "c"], 2)
    facts["b"]["devices"]["gpus"] = []
    facts["c"]["devices"]["gpus"][1]["used"] = 60 * GIB
    facts["a"]["devices"]["gpus"][0]["used"] = 10 * GIB
    rows = [row for row in check_machines(seen(facts)) if row.check == "devices"]
    found = {(row.hosts, row.status, row.found) for row in rows}
    assert found == {
        (("b",), "fail", "no GPU, where other hosts have some"),
        (("c",), "fail", "GPU 1: 60.00 GiB of 80.00 GiB is in use"),
        (("a",), "warning", "GPU 0: 10.00 GiB of 80.00 GiB is in use"),
    }


def test_clocks():
    rows = check_clocks(seen(well(["a", "b", "c", "d"]), offsets={"a": 0.01, "b": -2.5, "c": 0.7, "d": 2.1}))
    assert [(row.status, row.hosts, row.found) for row in rows] == [
        ("fail", ("b",), "2.5 s behind"),
        ("warning", ("c",), "0.7 s ahead"),
        ("fail", ("d",), "2.1 s ahead"),
    ]
    assert all("timedatectl" in row.fix for row in rows)


@pytest.mark.parametrize(
    ("code", "said", "check", "found", "fix"),
    [
        (
            255,
            "b: Permission denied (publickey).",
            "ssh",
            "asks for a password",
            "ssh-copy-id b",
        ),
        (255, "Host key verification failed.", "ssh", "host key is not known", "ssh-keyscan -H b"),
        (255, "ssh: Could not resolve hostname b: x", "ssh", "unknown host", "hostfile"),
        (255, "ssh: connect to host b port 22: Connection refused", "ssh", "no ssh server", "start ssh"),
        (255, "ssh: connect to host b port 22: Connection timed out", "ssh", "does not answer", "ping b"),
        (255, "ssh: connect to host b port 22: No route to host", "ssh", "no way to it", "ping b"),
        (255, "kex_exchange: read: reset\n", "ssh", "ended with code 255: kex_exchange", "by hand: ssh b"),
        (None, "no answer within 25 s", "ssh", "no answer within 25 s", "by hand"),
        (NO_FOLDER, "sh: 1: cd: can't cd to /w", "folder", "no folder /w", "rsync -a /w/ b:/w/"),
        (NO_PYTHON, "", "python", "no program /py", "same environment on b"),
        (
            1,
            "/py: No module named psutil",
            "python",
            "lacks a package of the project: psutil",
            "pip install -e .",
        ),
        (134, "", "python", "ended with code 134: it said nothing", "by hand"),
    ],
)
def test_a_host_that_does_not_answer(code, said, check, found, fix):
    row = silence("b", SilentError(code, said), Path("/w"), "/py")
    assert (row.check, row.status, row.hosts) == (check, "fail", ("b",))
    assert found in row.found
    assert fix in row.fix


def test_red():
    assert is_red([Row("a", "ok", ""), Row("b", "fail", "")])
    assert not is_red([Row("a", "ok", ""), Row("b", "warning", "")])


def test_alone_there_is_no_ssh_in_the_fixes():
    facts = well(["a"])
    facts["a"]["versions"]["torch"] = None
    (row,) = bad(check_machines(seen(facts, is_remote=False)))
    assert row.fix == f"{sys.executable} -m pip install torch==2.13.0"
