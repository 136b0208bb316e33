"""This process's rank, read from the launcher's environment. No torch."""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pipeline.distributed.waiting import find_free_port
from pipeline.errors import LaunchError
from pipeline.files import replace_file

ENVIRONMENT_FILE = "PIPELINE_ENVIRONMENT"
"""Set by our launch scripts: a file in a folder of the launch, where each rank writes its exit code."""


@dataclass(frozen=True)
class Ranks:
    """This process's place in the job."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int

    @property
    def is_main_process(self) -> bool:
        """Return whether this is rank 0."""
        return self.rank == 0


OPEN_MPI_VARIABLES = (
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
"""Open MPI's names of rank, local rank, world size and local world size."""
OTHER_MPI_VARIABLES = {"MPI_LOCALRANKID", "PALS_LOCAL_RANKID"}
"""Set by the mpirun of MPICH, Intel and Cray; srun may set PMI_RANK and the like, but none of these."""
WHOLE_NUMBER = re.compile(r"-?[0-9]{1,9}")
SLURM_RESERVED_STEPS = 0xFFFFFFF0  # the batch script's own step, and an interactive shell's: one process


def read_ranks(environment: Mapping[str, str]) -> Ranks:
    """Return this process's place by RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, else by mpirun or srun.

    Without any of them it is one process alone. mpirun goes before srun, which may start mpirun's daemons.

    Raises:
        LaunchError: Some are set and others are missing, a value is no number or does not fit the others.
    """
    check_accelerator_variable(environment)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    given = {name: environment[name] for name in names if name in environment}
    if not given:
        ranks = _read_scheduler(environment)
        if ranks.world_size > 1:
            check_master_variables(environment)
        return ranks
    check_master_variables(environment)
    missing = [name for name in names if name not in given]
    if missing == ["LOCAL_RANK"] and _in_slurm_step(environment):
        ranks = _read_slurm(environment)
        if (str(ranks.rank), str(ranks.world_size)) == (given["RANK"], given["WORLD_SIZE"]):
            return ranks  # a script that exports SLURM_PROCID and SLURM_NTASKS under these names
    if missing:
        cure = "start with deepspeed or torchrun, or unset them for one process"
        if missing == ["LOCAL_RANK"]:
            cure += "; under srun: export LOCAL_RANK=$SLURM_LOCALID in each task"
        raise LaunchError(f"the environment sets {', '.join(given)} but not {', '.join(missing)}; {cure}")
    # LOCAL_SIZE is the deepspeed launcher's name for it.
    local = environment.get("LOCAL_WORLD_SIZE") or environment.get("LOCAL_SIZE") or given["WORLD_SIZE"]
    ranks = _checked(given | {"LOCAL_WORLD_SIZE": local})
    if not 1 <= ranks.local_world_size <= ranks.world_size:
        raise LaunchError(
            f"LOCAL_WORLD_SIZE={ranks.local_world_size} ranks on this machine do not fit into a job of "
            f"WORLD_SIZE={ranks.world_size}"
        )
    if not 0 <= ranks.local_rank < ranks.local_world_size:
        raise LaunchError(
            f"LOCAL_RANK={ranks.local_rank} is outside the LOCAL_WORLD_SIZE={ranks.local_world_size} ranks "
            "of this machine"
        )
    return ranks


def check_accelerator_variable(environment: Mapping[str, str]) -> None:
    """Check that DS_ACCELERATOR is a device that the trainer knows.

    Raises:
        LaunchError: It is npu, xpu or another.
    """
    accelerator = environment.get("DS_ACCELERATOR", "cpu")
    if accelerator not in ("cpu", "cuda"):
        raise LaunchError(f"DS_ACCELERATOR={accelerator}: expected cuda or cpu; unset it")


def _read_scheduler(environment: Mapping[str, str]) -> Ranks:
    if OPEN_MPI_VARIABLES[0] in environment:
        missing = [name for name in OPEN_MPI_VARIABLES if name not in environment]
        if missing:
            raise LaunchError(
                f"the environment sets {OPEN_MPI_VARIABLES[0]} but not {', '.join(missing)}; start with "
                f"mpirun, srun, torchrun or deepspeed, or unset {OPEN_MPI_VARIABLES[0]} for one process"
            )
        return _checked({name: environment[name] for name in OPEN_MPI_VARIABLES})
    in_slurm = _in_slurm_step(environment)
    by_pmi = (environment.get("PMI_RANK", "0"), environment.get("PMI_SIZE", "1")) != ("0", "1")
    if OTHER_MPI_VARIABLES & environment.keys() or (by_pmi and not in_slurm):
        raise LaunchError(
            f"PMI_RANK={environment.get('PMI_RANK')}: of all mpirun only Open MPI's is known; start with it, "
            "with srun, torchrun or deepspeed, or unset PMI_RANK, PMI_SIZE and the like for one process"
        )
    return _read_slurm(environment) if in_slurm else Ranks(0, 0, 1, 1)


def _in_slurm_step(environment: Mapping[str, str]) -> bool:
    """Return whether srun started this process; a batch script, or an allocation's shell, is one process."""
    step = environment.get("SLURM_STEP_ID", environment.get("SLURM_STEPID", ""))
    if not step.isdecimal() or int(step) >= SLURM_RESERVED_STEPS:
        return False
    return environment.get("SLURM_STEP_NUM_TASKS", "1") != "1"


def _read_slurm(environment: Mapping[str, str]) -> Ranks:
    names = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS")
    missing = [n for n in (*names, "SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE") if n not in environment]
    if missing:
        raise LaunchError(
            f"srun started {environment.get('SLURM_STEP_NUM_TASKS')} tasks, but {', '.join(missing)} is not "
            "set; start with srun, and pass its variables on"
        )
    counts = parse_tasks_per_node(environment["SLURM_STEP_TASKS_PER_NODE"])
    node = environment["SLURM_NODEID"]
    local = str(counts[int(node)]) if node.isdecimal() and int(node) < len(counts) else "unknown"
    return _checked(
        {name: environment[name] for name in names} | {f"SLURM_STEP_TASKS_PER_NODE[{node}]": local}
    )


def _checked(given: Mapping[str, str]) -> Ranks:
    """Return the ranks from rank, local rank, world size and local world size by their names."""
    if not all(WHOLE_NUMBER.fullmatch(value.strip()) for value in given.values()):
        raise LaunchError(f"the environment's {dict(given)} are not all whole numbers")
    rank, local_rank, world_size, local_world_size = (int(value) for value in given.values())
    if not 0 <= rank < world_size:
        name_of_rank, _, name_of_size, _ = given
        raise LaunchError(f"{name_of_rank}={rank} is outside a job of {name_of_size}={world_size}")
    return Ranks(rank, local_rank, world_size, local_world_size)


def check_master_variables(environment: Mapping[str, str]) -> None:
    """Check MASTER_ADDR and MASTER_PORT, if they are set.

    Raises:
        LaunchError: One of them cannot be a host or a port.
    """
    host, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    if port is not None and not is_port(port):
        raise LaunchError(
            f"MASTER_PORT={port}: a port is a whole number from 1 to 65535; give one that is free on rank "
            "0's machine, the same on every rank"
        )
    if host is not None and re.fullmatch(r"[\w.:%-]{1,253}", host) is None:
        raise LaunchError(
            f"MASTER_ADDR={host!r} is no name or address of a machine; give rank 0's, the same on every rank"
        )


def is_port(text: str) -> bool:
    """Return whether a text is a port number from 1 to 65535."""
    return re.fullmatch(r"[0-9]{1,5}", text) is not None and 1 <= int(text) <= 65535


def find_master_address(ranks: Ranks, environment: Mapping[str, str]) -> tuple[str, int]:
    """Return address and port of rank 0: the same on every rank, without asking any of them.

    Raises:
        LaunchError: The launcher does not say where rank 0 is.
    """
    if ranks.world_size == 1:
        return "127.0.0.1", find_free_port("127.0.0.1")
    address, job = None, None
    if OPEN_MPI_VARIABLES[0] in environment:
        address, job = _open_mpi_master(ranks, environment)
    elif "SLURM_STEP_NODELIST" in environment:
        address = parse_first_host(environment["SLURM_STEP_NODELIST"])
        job = f"{environment.get('SLURM_JOB_ID')}.{environment.get('SLURM_STEP_ID')}"
    if ranks.local_world_size == ranks.world_size:
        address = "127.0.0.1"
    if address is None or job is None:
        raise LaunchError(
            f"no launcher says where rank 0 of {ranks.world_size} ranks is: set MASTER_ADDR to its host and "
            "MASTER_PORT to a free port there, the same on every rank (mpirun -x NAME=value)"
        )
    # Below the ports of outgoing connections; jobs that share a machine differ in it.
    return address, 12_000 + zlib.crc32(job.encode()) % 20_000


def _open_mpi_master(ranks: Ranks, environment: Mapping[str, str]) -> tuple[str | None, str | None]:
    """Return address and job. Rank 0 is on mpirun's machine if the hostfile begins with that; it can tell."""
    job = environment.get("OMPI_MCA_ess_base_jobid")
    uri = environment.get("OMPI_MCA_orte_hnp_uri", "")
    match = re.search(r"tcp://([^,:;]+)", uri)
    elsewhere = ranks.is_main_process and environment.get("OMPI_MCA_orte_local_daemon_uri") != uri
    return (match[1] if match is not None and not elsewhere else None), job


def parse_first_host(nodelist: str) -> str:
    """Return the first name of Slurm's short form: rack2-node01 of `rack[2-3]-node[01-16,20],login`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodelist)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0] if first is not None else "")


def parse_tasks_per_node(text: str) -> list[int]:
    """Return the numbers of Slurm's short form: 2, 2, 2, 1 of `2(x3),1`."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    return counts


def complete_launcher_environment(ranks: Ranks) -> None:
    """Set what torch and DeepSpeed look for and the launcher did not set, so that neither asks mpi4py.

    Raises:
        LaunchError: It cannot be known where rank 0 is, or a value cannot be.
    """
    check_master_variables(os.environ)
    address = {}
    if "MASTER_ADDR" not in os.environ or "MASTER_PORT" not in os.environ:
        host, port = find_master_address(ranks, os.environ)
        address = {"MASTER_ADDR": host, "MASTER_PORT": port}
    place = {
        "RANK": ranks.rank,
        "LOCAL_RANK": ranks.local_rank,
        "WORLD_SIZE": ranks.world_size,
        "LOCAL_WORLD_SIZE": ranks.local_world_size,
        # Without it DeepSpeed on a CPU starts a numactl process each time it counts devices: at ZeRO-3
        # fifty times a step.
        "LOCAL_SIZE": ranks.local_world_size,
    }
    for name, value in (address | place).items():
        os.environ.setdefault(name, str(value))


def write_exit_code(rank: int, world_size: int, code: int) -> None:
    """Write this rank's exit code for the launch script, which trusts no launcher's.

    Under another launcher nothing is written. The first code of a process stays: later ones follow from it.
    """
    handed_over = os.environ.get(ENVIRONMENT_FILE)
    if handed_over is None:
        return
    word = {"code": code, "world_size": world_size, "pid": os.getpid()}
    path = Path(handed_over).parent / f"rank-{rank}"
    with suppress(OSError, ValueError):  # a full disk: a missing code counts as a failure
        if path.exists() and json.loads(path.read_text())["pid"] == word["pid"]:
            return
        replace_file(path, json.dumps(word))


def choose_num_threads(num_cores: int, num_sharers: int, environment: Mapping[str, str]) -> int:
    """Return this rank's threads: OMP_NUM_THREADS if the user set it, else cores / ranks that share them.

    Two ranks with every core each run at half the speed of one. The user did not set what torchrun sets by
    itself: OMP_NUM_THREADS=1.
    """
    stated = environment.get("OMP_NUM_THREADS", "")
    by_torchrun = "TORCHELASTIC_RUN_ID" in environment and stated == "1"
    if stated.isdigit() and int(stated) > 0 and not by_torchrun:
        return int(stated)
    return max(1, num_cores // num_sharers)
