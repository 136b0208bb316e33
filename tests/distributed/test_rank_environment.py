"""The rank of a process, from the launcher's environment alone."""

from __future__ import annotations

import json
import os
import socket

import pytest

from pipeline.distributed.ranks import (
    Ranks,
    choose_num_threads,
    complete_launcher_environment,
    find_master_address,
    parse_first_host,
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
# mpirun in an allocation: srun has started its daemons, one a node.
DAEMONS = SLURM | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}
EXPORTED = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "gpu07", "MASTER_PORT": "29500"}
"""The variables that torch's own examples export in a script under srun."""
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def without(environment, *names):
    return {name: value for name, value in environment.items() if name not in names}


@pytest.mark.parametrize(
    ("environment", "ranks"),
    [
        ({}, (0, 0, 1, 1)),
        ({"PATH": "/bin", "LOCAL_WORLD_SIZE": "8"}, (0, 0, 1, 1)),
        (PLACE, (3, 1, 4, 2)),
        (without(PLACE, "LOCAL_WORLD_SIZE"), (3, 1, 4, 4)),
        (OPEN_MPI, (3, 1, 4, 2)),
        (SLURM, (3, 1, 4, 2)),
        (SLURM | {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "1"}, (3, 1, 4, 2)),  # srun --mpi=pmi2
        (SLURM | EXPORTED, (3, 1, 4, 2)),  # Slurm knows the local rank
        (SLURM | EXPORTED | {"LOCAL_RANK": "1"}, (3, 1, 4, 4)),
        (DAEMONS | OPEN_MPI, (3, 1, 4, 2)),
        (OPEN_MPI | SLURM | {"SLURM_PROCID": "0"} | PLACE, (3, 1, 4, 2)),  # torchrun, whatever started it
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_NODEID": "3"}, (3, 1, 4, 1)),
        # A shell in an allocation is one process: srun --pty bash, salloc's, the batch script itself.
        (SLURM | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, (0, 0, 1, 1)),
        (SLURM | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}, (0, 0, 1, 1)),
        (SLURM | {"SLURM_STEP_ID": "4294967291"}, (0, 0, 1, 1)),
        ({"SLURM_JOB_ID": "77", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, (0, 0, 1, 1)),
    ],
)
def test_a_launchers_word_is_taken(environment, ranks):
    found = read_ranks(environment)
    assert found == Ranks(*ranks)
    assert found.is_main_process == (ranks[0] == 0)


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        (without(PLACE, "RANK"), "^the environment sets LOCAL_RANK, WORLD_SIZE but not RANK; start with"),
        (EXPORTED, r"under srun: export LOCAL_RANK=\$SLURM_LOCALID in each task$"),
        (SLURM | EXPORTED | {"RANK": "2"}, r"under srun: export LOCAL_RANK=\$SLURM_LOCALID"),
        (
            without(OPEN_MPI, "OMPI_COMM_WORLD_SIZE"),
            "sets OMPI_COMM_WORLD_RANK but not OMPI_COMM_WORLD_SIZE;",
        ),
        (without(SLURM, "SLURM_LOCALID"), "srun started 4 tasks, but SLURM_LOCALID is not set"),
        (
            SLURM | {"SLURM_PROCID": "4"},
            "^SLURM_PROCID=4: expected at least 0 and less than SLURM_STEP_NUM_TASKS=4;",
        ),
        (SLURM | {"SLURM_NODEID": "2"}, "expected whole numbers"),  # of two
        (MPICH, "^PMI_RANK=3: only Open MPI's mpirun is supported; start with it, with srun, torchrun"),
        (DAEMONS | MPICH, "^PMI_RANK=3: only Open MPI's mpirun"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "unset PMI_RANK"),
        (PLACE | {"MASTER_PORT": "abc"}, "^MASTER_PORT=abc: expected a port, a whole number from 1 to 65535"),
        (PLACE | {"MASTER_PORT": "70000"}, "MASTER_PORT=70000: expected a port"),
        (PLACE | {"MASTER_PORT": ""}, "MASTER_PORT=: expected a port"),
        (PLACE | {"MASTER_PORT": "9" * 5000}, "expected a port"),
        (PLACE | {"MASTER_ADDR": ""}, "MASTER_ADDR='': expected a host name or address"),
        (PLACE | {"MASTER_ADDR": "tcp://node1"}, "expected a host name or address"),
        (
            PLACE | {"LOCAL_RANK": "2"},
            "^LOCAL_RANK=2: expected at least 0 and less than LOCAL_WORLD_SIZE=2, ",
        ),
        (PLACE | {"LOCAL_WORLD_SIZE": "0"}, "^LOCAL_WORLD_SIZE=0 ranks on this machine: expected from 1 to"),
        (
            PLACE | {"LOCAL_WORLD_SIZE": "5"},
            "^LOCAL_WORLD_SIZE=5 ranks on this machine: expected from 1 to WORLD_SIZE=4",
        ),
    ],
)
def test_an_environment_that_cannot_be_is_refused(environment, words):
    """Others: tests/bad_inputs/environments.py."""
    with pytest.raises(LaunchError, match=words) as caught:
        read_ranks(environment)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.fixture
def environment(monkeypatch):
    """os.environ without a trace of a launcher; restored after the test."""
    for name in (*PLACE, "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # remembered, so that what the test sets is taken away again
        monkeypatch.delenv(name)
    return os.environ


def test_an_environment_without_a_launcher_is_completed(environment):
    complete_launcher_environment(Ranks(0, 0, 1, 1))
    place = {name: environment[name] for name in PLACE}
    assert place == {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    assert environment["MASTER_ADDR"] == "127.0.0.1"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", int(environment["MASTER_PORT"])))  # nobody has it


def test_what_a_launcher_set_stays(environment):
    given = PLACE | {"MASTER_ADDR": "node-0", "MASTER_PORT": "29500"}
    environment.update(given)
    complete_launcher_environment(read_ranks(environment))
    assert {name: environment[name] for name in given} == given


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("login", "login"),
        ("a,b[1-2]", "a"),
        ("gpu[07,09]", "gpu07"),
        ("rack[2-3]-node[01-16,20]-ib,login", "rack2-node01-ib"),
        ("n[1-3].cluster.org", "n1.cluster.org"),
        ("r[1-2]n[5-6]", "r1n5"),
    ],
)
def test_the_first_host_of_slurms_short_form(nodelist, host):
    assert parse_first_host(nodelist) == host


@pytest.mark.parametrize(
    ("given", "rank_key", "first", "host"),
    [
        (
            OPEN_MPI,
            "OMPI_COMM_WORLD_RANK",
            {"OMPI_MCA_orte_local_daemon_uri": OPEN_MPI["OMPI_MCA_orte_hnp_uri"]},
            "10.0.0.1",
        ),
        (SLURM, "SLURM_PROCID", {}, "gpu07"),
    ],
)
def test_every_rank_finds_the_same_master(given, rank_key, first, host):
    environments = [given, given | {rank_key: "1"}, given | {rank_key: "0"} | first]
    (place,) = {find_master_address(read_ranks(each), each) for each in environments}
    assert place[0] == host
    assert 12_000 <= place[1] < 32_000


def test_jobs_differ_in_their_port_and_one_machine_needs_no_name():
    other = SLURM | {"SLURM_JOB_ID": "78"}
    assert find_master_address(read_ranks(other), other) != find_master_address(read_ranks(SLURM), SLURM)
    alone = SLURM | {"SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_NODEID": "0"}
    assert find_master_address(read_ranks(alone), alone)[0] == "127.0.0.1"


@pytest.mark.parametrize(
    "environment",
    [
        PLACE,
        OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "0"},  # mpirun runs on another machine than rank 0
        {name: value for name, value in OPEN_MPI.items() if not name.startswith("OMPI_MCA")},  # Open MPI 5
    ],
)
def test_a_master_that_nobody_names_is_asked_for(environment):
    with pytest.raises(LaunchError, match="set MASTER_ADDR to its host and MASTER_PORT to a free port there"):
        find_master_address(read_ranks(environment), environment)


def test_a_rank_tells_its_end_once(tmp_path, environment, monkeypatch):
    write_exit_code(3, 4, 1)
    monkeypatch.setenv("PIPELINE_ENVIRONMENT", str(tmp_path / "environment.json"))
    write_exit_code(3, 4, 124)
    write_exit_code(3, 4, 1)  # what came of it
    assert [path.name for path in tmp_path.iterdir()] == ["rank-3"]
    word = json.loads((tmp_path / "rank-3").read_text())
    assert (word["code"], word["world_size"]) == (124, 4)
    (tmp_path / "rank-3").write_text(json.dumps(word | {"pid": 0}))  # before a restart
    write_exit_code(3, 4, 0)
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
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x"}, 1, CORES),  # torchrun's own word
        ({"OMP_NUM_THREADS": "2", "TORCHELASTIC_RUN_ID": "x"}, 1, 2),
    ],
)
def test_ranks_share_the_cores_unless_the_user_says_otherwise(stated, local_world_size, expected):
    assert choose_num_threads(CORES, local_world_size, stated) == expected
