"""Reads this process's rank from the launcher's environment, and sets the variables that are missing.

Imports no torch.
"""

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

ENVIRONMENT_FILE_VARIABLE = "PIPELINE_ENVIRONMENT"
"""Name of the environment variable in which our launch scripts pass the path of a file to their ranks.

The file has environment variables and arguments for the ranks. Each rank writes its exit code into the same
folder.
"""


@dataclass(frozen=True)
class Ranks:
    """Rank of this process and number of ranks, in the job and on this machine."""

    rank: int
    """Number of this process in the job, from 0."""
    local_rank: int
    """Number of this process among those of the job on this machine, from 0."""
    world_size: int
    """Number of ranks in the job."""
    local_world_size: int
    """Number of the job's ranks on this machine."""

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
"""Variables in which Open MPI gives rank, local rank, world size and local world size, in this order."""
OTHER_MPI_VARIABLES = {"MPI_LOCALRANKID", "PALS_LOCAL_RANKID"}
"""Variables that the mpirun of MPICH, Intel or Cray sets. srun sets none of these, but may set PMI_RANK."""
WHOLE_NUMBER = re.compile(r"-?[0-9]{1,9}")
FIRST_RESERVED_SLURM_STEP = 0xFFFFFFF0
"""Lowest of the step ids that Slurm reserves for batch scripts and interactive shells."""
LAUNCHER_ADVICE = "correct these variables, or let torchrun, deepspeed, srun or Open MPI's mpirun set them"
"""Advice for variables that are malformed or contradict each other."""


def read_ranks(environment: Mapping[str, str]) -> Ranks:
    """Return this process's ranks from the variables of torchrun or deepspeed, else of mpirun or srun.

    torchrun and deepspeed set RANK, LOCAL_RANK and WORLD_SIZE. The variables of mpirun take precedence over
    those of srun, because srun may have started mpirun's daemons. Without variables of any launcher, the
    process is a job of one rank.

    Raises:
        LaunchError: Some variables are set and others are missing, a value is not a number, two values
            contradict each other, or DS_ACCELERATOR, MASTER_ADDR or MASTER_PORT is wrong.
    """
    check_accelerator_variable(environment)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    variables = {name: environment[name] for name in names if name in environment}
    if not variables:
        ranks = _read_mpi_or_slurm(environment)
        if ranks.world_size > 1:
            check_master_variables(environment)
        return ranks
    check_master_variables(environment)
    missing = [name for name in names if name not in variables]
    if missing == ["LOCAL_RANK"] and _is_slurm_task(environment):
        ranks = _read_slurm_task(environment)
        if (str(ranks.rank), str(ranks.world_size)) == (variables["RANK"], variables["WORLD_SIZE"]):
            return ranks  # the user's script exports SLURM_PROCID and SLURM_NTASKS under these names
    if missing:
        set_names = ", ".join(variables)
        advice = f"start with deepspeed or torchrun, or unset {set_names} for one process"
        if missing == ["LOCAL_RANK"]:
            advice += "; under srun: export LOCAL_RANK=$SLURM_LOCALID in each task"
        raise LaunchError(f"the environment sets {set_names} but not {', '.join(missing)}; {advice}")
    # The deepspeed launcher sets LOCAL_SIZE instead of LOCAL_WORLD_SIZE.
    local_size = environment.get("LOCAL_WORLD_SIZE") or environment.get("LOCAL_SIZE")
    ranks = _parse_ranks(variables | {"LOCAL_WORLD_SIZE": local_size or variables["WORLD_SIZE"]})
    if not 1 <= ranks.local_world_size <= ranks.world_size:
        raise LaunchError(
            f"LOCAL_WORLD_SIZE={ranks.local_world_size} ranks on this machine: expected from 1 to "
            f"WORLD_SIZE={ranks.world_size}; {LAUNCHER_ADVICE}"
        )
    if not 0 <= ranks.local_rank < ranks.local_world_size:
        raise LaunchError(
            f"LOCAL_RANK={ranks.local_rank}: expected at least 0 and less than "
            f"LOCAL_WORLD_SIZE={ranks.local_world_size}, the ranks on this machine; {LAUNCHER_ADVICE}"
        )
    return ranks


def check_accelerator_variable(environment: Mapping[str, str]) -> None:
    """Check that DS_ACCELERATOR, if set, is a type of device that the trainer supports.

    Raises:
        LaunchError: DS_ACCELERATOR is neither cpu nor cuda.
    """
    accelerator = environment.get("DS_ACCELERATOR", "cpu")
    if accelerator not in ("cpu", "cuda"):
        raise LaunchError(f"DS_ACCELERATOR={accelerator}: expected cuda or cpu; correct or unset it")


def _read_mpi_or_slurm(environment: Mapping[str, str]) -> Ranks:
    """Return this process's ranks from the variables of mpirun or srun; without any, a job of one rank.

    Raises:
        LaunchError: Variables are missing or wrong, or an mpirun other than Open MPI's started this process.
    """
    if OPEN_MPI_VARIABLES[0] in environment:
        missing = [name for name in OPEN_MPI_VARIABLES if name not in environment]
        if missing:
            raise LaunchError(
                f"the environment sets {OPEN_MPI_VARIABLES[0]} but not {', '.join(missing)}; start with "
                f"mpirun, srun, torchrun or deepspeed, or unset {OPEN_MPI_VARIABLES[0]} for one process"
            )
        return _parse_ranks({name: environment[name] for name in OPEN_MPI_VARIABLES})
    is_slurm_task = _is_slurm_task(environment)
    is_pmi_task = (environment.get("PMI_RANK", "0"), environment.get("PMI_SIZE", "1")) != ("0", "1")
    has_other_mpi = bool(OTHER_MPI_VARIABLES & environment.keys())
    if has_other_mpi or (is_pmi_task and not is_slurm_task):
        raise LaunchError(
            f"PMI_RANK={environment.get('PMI_RANK')}: only Open MPI's mpirun is supported; start with it, "
            "with srun, torchrun or deepspeed, or unset PMI_RANK, PMI_SIZE, "
            f"{' and '.join(sorted(OTHER_MPI_VARIABLES))} for one process"
        )
    return _read_slurm_task(environment) if is_slurm_task else Ranks(0, 0, 1, 1)


def _is_slurm_task(environment: Mapping[str, str]) -> bool:
    """Return whether srun started this process as one of several tasks.

    A batch script or the shell of an allocation is one process, and no such task.
    """
    step = environment.get("SLURM_STEP_ID", environment.get("SLURM_STEPID", ""))
    if not step.isdecimal() or int(step) >= FIRST_RESERVED_SLURM_STEP:
        return False
    return environment.get("SLURM_STEP_NUM_TASKS", "1") != "1"


def _read_slurm_task(environment: Mapping[str, str]) -> Ranks:
    """Return this process's ranks from the variables of srun.

    Raises:
        LaunchError: A variable is missing or wrong.
    """
    names = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS")
    missing = [n for n in (*names, "SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE") if n not in environment]
    if missing:
        raise LaunchError(
            f"srun started {environment.get('SLURM_STEP_NUM_TASKS')} tasks, but {', '.join(missing)} is not "
            "set; start each rank with srun, and pass all of its variables on to the rank"
        )
    num_tasks = parse_tasks_per_node(environment["SLURM_STEP_TASKS_PER_NODE"])
    node = environment["SLURM_NODEID"]
    is_node_listed = node.isdecimal() and int(node) < len(num_tasks)
    local_size = str(num_tasks[int(node)]) if is_node_listed else "unknown"
    variables = {name: environment[name] for name in names}
    return _parse_ranks(variables | {f"SLURM_STEP_TASKS_PER_NODE[{node}]": local_size})


def _parse_ranks(variables: Mapping[str, str]) -> Ranks:
    """Return the ranks that four variables give.

    Args:
        variables: Name -> value of the variables for rank, local rank, world size and local world size, in
            this order.

    Raises:
        LaunchError: A value is not a whole number, or the rank does not fit the world size.
    """
    if not all(WHOLE_NUMBER.fullmatch(value.strip()) for value in variables.values()):
        raise LaunchError(
            f"the environment sets {dict(variables)}: expected whole numbers; {LAUNCHER_ADVICE}"
        )
    rank, local_rank, world_size, local_world_size = (int(value) for value in variables.values())
    if not 0 <= rank < world_size:
        rank_name, _, world_size_name, _ = variables
        raise LaunchError(
            f"{rank_name}={rank}: expected at least 0 and less than {world_size_name}={world_size}; "
            f"{LAUNCHER_ADVICE}"
        )
    return Ranks(rank, local_rank, world_size, local_world_size)


def check_master_variables(environment: Mapping[str, str]) -> None:
    """Check MASTER_ADDR and MASTER_PORT, if they are set.

    Raises:
        LaunchError: MASTER_ADDR is not a host name or address, or MASTER_PORT is not a port.
    """
    host = environment.get("MASTER_ADDR")
    port = environment.get("MASTER_PORT")
    if port is not None and not is_port(port):
        raise LaunchError(
            f"MASTER_PORT={port}: expected a port, a whole number from 1 to 65535; set it on every rank to "
            "the same free port of rank 0's machine"
        )
    if host is not None and re.fullmatch(r"[\w.:%-]{1,253}", host) is None:
        raise LaunchError(
            f"MASTER_ADDR={host!r}: expected a host name or address; set it on every rank to the "
            "address of rank 0's machine"
        )


def is_port(text: str) -> bool:
    """Return whether the text is a port: a whole number from 1 to 65535."""
    return re.fullmatch(r"[0-9]{1,5}", text) is not None and 1 <= int(text) <= 65535


def find_master_address(ranks: Ranks, environment: Mapping[str, str]) -> tuple[str, int]:
    """Return the address and port at which rank 0 serves the store, from the launcher's environment.

    Every rank computes the same result, without communication. A job of one rank takes a free port.

    Raises:
        LaunchError: The environment does not say on which machine rank 0 runs.
    """
    if ranks.world_size == 1:
        return "127.0.0.1", find_free_port("127.0.0.1")
    address: str | None = None
    job: str | None = None
    if OPEN_MPI_VARIABLES[0] in environment:
        address, job = _find_open_mpi_master(ranks, environment)
    elif "SLURM_STEP_NODELIST" in environment:
        address = parse_first_host(environment["SLURM_STEP_NODELIST"])
        job = f"{environment.get('SLURM_JOB_ID')}.{environment.get('SLURM_STEP_ID')}"
    if ranks.local_world_size == ranks.world_size:
        address = "127.0.0.1"
    if address is None or job is None:
        raise LaunchError(
            f"the environment does not say on which machine rank 0 of {ranks.world_size} ranks runs; set "
            "MASTER_ADDR to its host and MASTER_PORT to a free port there, the same on every rank (with "
            "mpirun: -x NAME=value)"
        )
    # The port is below those that Linux gives to outgoing connections (32768 and up). It depends on the job's
    # id, so two jobs on one machine rarely get the same port.
    return address, 12_000 + zlib.crc32(job.encode()) % 20_000


def _find_open_mpi_master(ranks: Ranks, environment: Mapping[str, str]) -> tuple[str | None, str | None]:
    """Return the address of rank 0 and the id of the job; `None` for each that Open MPI does not give.

    The result is the address of mpirun's machine. Rank 0 runs there if the hostfile begins with that machine.
    Only rank 0 can check this: then the daemon that started it is mpirun itself. If it is not, the address is
    `None` on rank 0.
    """
    job = environment.get("OMPI_MCA_ess_base_jobid")
    mpirun_uri = environment.get("OMPI_MCA_orte_hnp_uri", "")
    match = re.search(r"tcp://([^,:;]+)", mpirun_uri)
    daemon_uri = environment.get("OMPI_MCA_orte_local_daemon_uri")
    is_on_other_machine = ranks.is_main_process and daemon_uri != mpirun_uri
    if match is None or is_on_other_machine:
        return None, job
    return match[1], job


def parse_first_host(nodelist: str) -> str:
    """Return the first host of a Slurm node list: rack2-node01 for `rack[2-3]-node[01-16,20],login`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodelist)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0] if first is not None else "")


def parse_tasks_per_node(text: str) -> list[int]:
    """Return the number of tasks on each node from Slurm's short form: [2, 2, 2, 1] for `2(x3),1`."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    return counts


def complete_launcher_environment(ranks: Ranks) -> None:
    """Set the environment variables that torch and DeepSpeed read, unless the launcher has set them.

    If they were missing, DeepSpeed would look for the ranks with mpi4py.

    Raises:
        LaunchError: The environment does not say on which machine rank 0 runs, or MASTER_ADDR or MASTER_PORT
            is wrong.
    """
    check_master_variables(os.environ)
    address = {}
    if "MASTER_ADDR" not in os.environ or "MASTER_PORT" not in os.environ:
        host, port = find_master_address(ranks, os.environ)
        address = {"MASTER_ADDR": host, "MASTER_PORT": port}
    rank_variables = {
        "RANK": ranks.rank,
        "LOCAL_RANK": ranks.local_rank,
        "WORLD_SIZE": ranks.world_size,
        "LOCAL_WORLD_SIZE": ranks.local_world_size,
        # Without LOCAL_SIZE, DeepSpeed on a CPU starts a numactl process each time it counts devices. At
        # ZeRO-3 this happens fifty times a step.
        "LOCAL_SIZE": ranks.local_world_size,
    }
    for name, value in (address | rank_variables).items():
        os.environ.setdefault(name, str(value))


def write_exit_code(rank: int, world_size: int, code: int) -> None:
    """Write this rank's exit code to a file for our launch scripts, if one of them started this process.

    The scripts do not rely on the exit code of the launcher. Only the first call of a process writes, because
    a later exit code is a consequence of the first one.
    """
    environment_file = os.environ.get(ENVIRONMENT_FILE_VARIABLE)
    if environment_file is None:
        return
    record = {"code": code, "world_size": world_size, "pid": os.getpid()}
    path = Path(environment_file).parent / f"rank-{rank}"
    with suppress(OSError, ValueError):  # such as a full disk; a missing code counts as a failure
        if path.exists() and json.loads(path.read_text())["pid"] == record["pid"]:
            return
        replace_file(path, json.dumps(record))


def choose_num_threads(num_cores: int, num_sharers: int, environment: Mapping[str, str]) -> int:
    """Return the number of CPU threads for this rank.

    This is OMP_NUM_THREADS if the user set it, else this rank's share of the cores. Two ranks that each use
    all cores run at half the speed of one. Under torchrun OMP_NUM_THREADS=1 does not count, because torchrun
    sets this if the user has set nothing.

    Args:
        num_cores: Number of cores that this rank may use.
        num_sharers: Number of ranks that share these cores, including this one.
        environment: Environment of the process.
    """
    omp_num_threads = environment.get("OMP_NUM_THREADS", "")
    is_set_by_torchrun = "TORCHELASTIC_RUN_ID" in environment and omp_num_threads == "1"
    is_positive = omp_num_threads.isdigit() and int(omp_num_threads) > 0
    if is_positive and not is_set_by_torchrun:
        return int(omp_num_threads)
    return max(1, num_cores // num_sharers)
