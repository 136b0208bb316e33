"""RankProcess a process is, from the launcher's environment alone."""

from __future__ import annotations

import json
import os
import socket

import pytest

from pipeline.distributed.ranks import (
    Ranks,
    complete_environment,
    cpu_threads,
    find_master,
    first_host,
    read_ranks,
    write_exit_code,
)
from pipeline.errors import LaunchError

PLACE = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_ess_base_jobid": "401276929",
    "OMPI_MCA_orte_hnp_uri": "401276928.0;tcp://10.0.0.1,192.168.0.1:51241",
    "OMPI_MCA_orte_local_daemon_uri": "401276928.1;tcp://10.0.0.2:51242",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "gpu[07,09]",
}
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


@pytest.fixture
def environment(monkeypatch):
    """os.environ without a trace of a launcher; restored after the test."""
    for name in (*PLACE, "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # remembered, so that what the test sets is taken away again
        monkeypatch.delenv(name)
    return os.environ


def test_no_launcher_means_one_process():
    assert read_ranks({}) == Ranks(0, 0, 1, 1)
    assert read_ranks({"PATH": "/bin", "LOCAL_WORLD_SIZE": "8"}) == Ranks(0, 0, 1, 1)


def test_a_launchers_word_is_taken():
    assert read_ranks(PLACE) == Ranks(rank=3, local_rank=1, world_size=4, local_world_size=2)
    assert not read_ranks(PLACE).is_main_process
    assert read_ranks(PLACE | {"RANK": "0"}).is_main_process


def test_without_a_local_world_size_all_ranks_are_on_this_machine():
    place = {name: value for name, value in PLACE.items() if name != "LOCAL_WORLD_SIZE"}
    assert read_ranks(place).local_world_size == 4


@pytest.mark.parametrize("missing", [("RANK",), ("LOCAL_RANK",), ("WORLD_SIZE",), ("RANK", "WORLD_SIZE")])
def test_half_an_environment_is_refused_by_name(missing):
    place = {name: value for name, value in PLACE.items() if name not in missing}
    given = [name for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE") if name in place]
    with pytest.raises(LaunchError) as caught:
        read_ranks(place)
    start = f"the environment sets {', '.join(given)} but not {', '.join(missing)}; "
    assert str(caught.value).startswith(start)


def test_a_script_under_srun_may_leave_the_local_rank_out():
    """It exports what torch's own examples do; Slurm knows the rest."""
    exported = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "gpu07", "MASTER_PORT": "29500"}
    assert read_ranks(SLURM | exported) == Ranks(rank=3, local_rank=1, world_size=4, local_world_size=2)
    for place in (exported, SLURM | exported | {"RANK": "2"}):  # without srun, or another's rank
        with pytest.raises(LaunchError, match=r"under srun: export LOCAL_RANK=\$SLURM_LOCALID in each task$"):
            read_ranks(place)
    advised = SLURM | exported | {"LOCAL_RANK": SLURM["SLURM_LOCALID"]}
    assert read_ranks(advised).local_rank == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": "three"}, "are not all whole numbers"),
        ({"WORLD_SIZE": ""}, "are not all whole numbers"),
        ({"LOCAL_WORLD_SIZE": "two"}, "are not all whole numbers"),
        ({"RANK": "4"}, "RANK=4 is outside a job of WORLD_SIZE=4"),
        ({"RANK": "-1"}, "RANK=-1 is outside a job of WORLD_SIZE=4"),
        ({"WORLD_SIZE": "0"}, "RANK=3 is outside a job of WORLD_SIZE=0"),
    ],
)
def test_values_that_describe_no_job_are_refused(change, message):
    with pytest.raises(LaunchError, match=message):
        read_ranks(PLACE | change)


def test_an_environment_without_a_launcher_is_completed(environment):
    complete_environment(Ranks(0, 0, 1, 1))
    place = {name: environment[name] for name in PLACE}
    assert place == {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    assert environment["MASTER_ADDR"] == "127.0.0.1"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", int(environment["MASTER_PORT"])))  # nobody has it


def test_what_a_launcher_set_stays(environment):
    given = PLACE | {"MASTER_ADDR": "node-0", "MASTER_PORT": "29500"}
    environment.update(given)
    complete_environment(read_ranks(environment))
    assert {name: environment[name] for name in given} == given


def test_two_processes_without_a_launcher_get_ports_of_their_own(environment):
    ports = set()
    for _ in range(2):
        complete_environment(Ranks(0, 0, 1, 1))
        ports.add(environment.pop("MASTER_PORT"))
    assert all(1024 <= int(port) < 65536 for port in ports)


@pytest.mark.parametrize(
    "environment",
    [
        OPEN_MPI,
        MPICH,
        SLURM,
        SLURM | {"PMI_RANK": "3", "PMI_SIZE": "4"},  # srun --mpi=pmi2
        # mpirun in an allocation: srun has started its daemons, one a node.
        SLURM | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"} | OPEN_MPI,
        SLURM | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"} | MPICH,
        OPEN_MPI | SLURM | {"SLURM_PROCID": "0"} | PLACE,  # torchrun, whatever it was started by
    ],
)
def test_mpirun_and_srun_say_who_a_rank_is(environment):
    assert read_ranks(environment) == Ranks(rank=3, local_rank=1, world_size=4, local_world_size=2)


@pytest.mark.parametrize(
    "change",
    [
        {"SLURM_STEP_NUM_TASKS": "1"},  # srun --pty bash
        {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"},  # salloc's shell
        {"SLURM_STEP_ID": "4294967291"},  # the batch script itself
    ],
)
def test_a_shell_in_an_allocation_is_one_process(change):
    assert read_ranks(SLURM | {"SLURM_PROCID": "0"} | change) == Ranks(0, 0, 1, 1)
    assert read_ranks({"SLURM_JOB_ID": "77", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}) == Ranks(0, 0, 1, 1)


@pytest.mark.parametrize(
    ("per_node", "node", "expected"), [("4", "0", 4), ("2(x3),1", "2", 2), ("2(x3),1", "3", 1)]
)
def test_tasks_of_this_node(per_node, node, expected):
    place = SLURM | {"SLURM_STEP_TASKS_PER_NODE": per_node, "SLURM_NODEID": node}
    assert read_ranks(place).local_world_size == expected


@pytest.mark.parametrize(
    ("environment", "missing", "message"),
    [
        (OPEN_MPI, "OMPI_COMM_WORLD_SIZE", "sets OMPI_COMM_WORLD_RANK but not OMPI_COMM_WORLD_SIZE; start"),
        (MPICH, "MPI_LOCALRANKID", "but not MPI_LOCALRANKID or PALS_LOCAL_RANKID or PMI_LOCAL_RANK; start"),
        (SLURM, "SLURM_LOCALID", "srun started 4 tasks, but SLURM_LOCALID is not set"),
    ],
)
def test_half_a_schedulers_environment_is_refused(environment, missing, message):
    with pytest.raises(LaunchError) as caught:
        read_ranks({name: value for name, value in environment.items() if name != missing})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_scheduler_that_describes_no_job_is_refused():
    with pytest.raises(LaunchError, match="SLURM_PROCID=4 is outside a job of SLURM_STEP_NUM_TASKS=4"):
        read_ranks(SLURM | {"SLURM_PROCID": "4"})
    with pytest.raises(LaunchError, match="not all whole numbers"):
        read_ranks(SLURM | {"SLURM_NODEID": "2"})  # of two


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("login", "login"),
        ("a,b", "a"),
        ("gpu[07,09]", "gpu07"),
        ("rack[2-3]-node[01-16,20]-ib,login", "rack2-node01-ib"),
        ("n[1-3].cluster.org", "n1.cluster.org"),
        ("node[03-07,9],big1", "node03"),
        ("gpu-a[7,9-11]-ib,x", "gpu-a7-ib"),
        ("r[1-2]n[5-6]", "r1n5"),
        ("a,b[1-2]", "a"),
    ],
)
def test_the_first_host_of_slurms_short_form(nodelist, host):
    assert first_host(nodelist) == host


def test_every_rank_finds_the_same_master():
    for given, host in ((OPEN_MPI, "10.0.0.1"), (SLURM, "gpu07")):
        rank_key = "OMPI_COMM_WORLD_RANK" if given is OPEN_MPI else "SLURM_PROCID"
        first = given | {rank_key: "0"}
        if given is OPEN_MPI:
            first["OMPI_MCA_orte_local_daemon_uri"] = given["OMPI_MCA_orte_hnp_uri"]
        places = [find_master(read_ranks(each), each) for each in (given, given | {rank_key: "1"}, first)]
        assert len(set(places)) == 1
        assert places[0][0] == host
        assert 12_000 <= places[0][1] < 32_000
    other = SLURM | {"SLURM_JOB_ID": "78"}
    assert find_master(read_ranks(other), other) != find_master(read_ranks(SLURM), SLURM)
    alone = SLURM | {"SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_NODEID": "0"}
    assert find_master(read_ranks(alone), alone)[0] == "127.0.0.1"


@pytest.mark.parametrize(
    "environment",
    [
        PLACE,
        MPICH,
        OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "0"},  # mpirun runs on another machine than rank 0
        {n: v for n, v in OPEN_MPI.items() if not n.startswith("OMPI_MCA")},  # Open MPI 5
    ],
)
def test_a_master_that_nobody_names_is_asked_for(environment):
    with pytest.raises(LaunchError, match="set MASTER_ADDR to its host and MASTER_PORT to a free port there"):
        find_master(read_ranks(environment), environment)


def test_a_rank_tells_its_end_once(tmp_path, environment, monkeypatch):
    ranks = Ranks(3, 1, 4, 2)
    write_exit_code(ranks.rank, ranks.world_size, 1)
    monkeypatch.setenv("PIPELINE_ENVIRONMENT", str(tmp_path / "environment.json"))
    write_exit_code(ranks.rank, ranks.world_size, 124)
    write_exit_code(ranks.rank, ranks.world_size, 1)  # what came of it
    assert [path.name for path in tmp_path.iterdir()] == ["rank-3"]
    word = json.loads((tmp_path / "rank-3").read_text())
    assert (word["code"], word["world_size"]) == (124, 4)
    (tmp_path / "rank-3").write_text(json.dumps(word | {"pid": 0}))  # before a restart
    write_exit_code(ranks.rank, ranks.world_size, 0)
    assert json.loads((tmp_path / "rank-3").read_text())["code"] == 0


@pytest.mark.parametrize(
    ("stated", "local_world_size", "expected"),
    [
        ({}, 1, CORES),
        ({}, 2, max(1, CORES // 2)),
        ({}, 4096, 1),
        ({"OMP_NUM_THREADS": "3"}, 2, 3),
        ({"OMP_NUM_THREADS": "0"}, 1, CORES),
        ({"OMP_NUM_THREADS": "4,2"}, 1, CORES),
        ({"OMP_NUM_THREADS": "1"}, 1, 1),
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x"}, 1, CORES),  # torchrun's own word
        ({"OMP_NUM_THREADS": "2", "TORCHELASTIC_RUN_ID": "x"}, 1, 2),
    ],
)
def test_ranks_share_the_cores_unless_the_user_says_otherwise(stated, local_world_size, expected):
    assert cpu_threads(CORES, local_world_size, stated) == expected


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"MASTER_PORT": "abc"}, "^MASTER_PORT=abc: a port is a whole number from 1 to 65535"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000: a port"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT=0: a port"),
        ({"MASTER_PORT": "-1"}, "MASTER_PORT=-1: a port"),
        ({"MASTER_PORT": ""}, "MASTER_PORT=: a port"),
        ({"MASTER_PORT": "9" * 5000}, "a port is a whole number"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR='' is no name or address"),
        ({"MASTER_ADDR": "node 1"}, "MASTER_ADDR='node 1' is no name or address"),
        ({"MASTER_ADDR": "tcp://node1"}, "is no name or address"),
        ({"RANK": ""}, "are not all whole numbers"),
        ({"RANK": "1.0"}, "are not all whole numbers"),
        ({"WORLD_SIZE": "9" * 5000}, "are not all whole numbers"),
        ({"RANK": "4"}, "^RANK=4 is outside a job of WORLD_SIZE=4"),
        ({"RANK": "-1"}, "^RANK=-1 is outside"),
        ({"WORLD_SIZE": "0"}, "^RANK=3 is outside a job of WORLD_SIZE=0"),
        ({"LOCAL_RANK": "-1"}, "^LOCAL_RANK=-1 is outside the LOCAL_WORLD_SIZE=2 ranks of this machine"),
        ({"LOCAL_RANK": "2"}, "^LOCAL_RANK=2 is outside"),
        ({"LOCAL_WORLD_SIZE": "0"}, "^LOCAL_WORLD_SIZE=0 ranks on this machine do not fit"),
        (
            {"LOCAL_WORLD_SIZE": "5"},
            "^LOCAL_WORLD_SIZE=5 ranks on this machine do not fit into .* WORLD_SIZE=4",
        ),
    ],
)
def test_an_environment_that_cannot_be_is_refused(changes, words):
    with pytest.raises(LaunchError, match=words) as caught:
        read_ranks(PLACE | {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"} | changes)
    assert len(str(caught.value)) < 600
