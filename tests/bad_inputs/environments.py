"""Environment variables of launchers and shells that contradict each other or are malformed."""

from __future__ import annotations

from typing import Any

from bad_inputs.case import Case


def env(wrong: str, *says: str, **environment: str) -> Case:
    return Case(wrong, says, base="digits", env=environment)


RANKED: dict[str, Any] = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
SLURM: dict[str, Any] = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
MPI: dict[str, Any] = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}

CASES = [
    env("a world size alone", "WORLD_SIZE", "not RANK, LOCAL_RANK", "unset", WORLD_SIZE="2"),
    env("a rank alone", "RANK", "not LOCAL_RANK, WORLD_SIZE", "unset", RANK="0"),
    env("a local rank alone", "LOCAL_RANK", "not RANK, WORLD_SIZE", "unset", LOCAL_RANK="0"),
    env("a rank in words", "RANK", "'one'", **RANKED | {"RANK": "one"}),
    env("an empty rank", "RANK", **RANKED | {"RANK": ""}),
    env("a rank outside of the world", "RANK=1", "WORLD_SIZE=1", **RANKED | {"RANK": "1"}),
    env("a rank below zero", "RANK=-1", **RANKED | {"RANK": "-1"}),
    env("a world of no ranks", "WORLD_SIZE", **RANKED | {"WORLD_SIZE": "0"}),
    env("half a world", "WORLD_SIZE", "1.5", **RANKED | {"WORLD_SIZE": "1.5"}),
    env("a local rank in words", "LOCAL_RANK", "'x'", **RANKED | {"LOCAL_RANK": "x"}),
    env("a local world in words", "LOCAL_WORLD_SIZE", "'x'", LOCAL_WORLD_SIZE="x", **RANKED),
    env("a rank of escapes", "RANK", "\\x1b", **RANKED | {"RANK": "\x1b[2J"}),
    env("a rank of 5000 digits", "RANK", **RANKED | {"RANK": "9" * 5000}),
    env("mpirun without a local rank", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", **MPI),
    env(
        "mpirun in words",
        "OMPI_COMM_WORLD",
        OMPI_COMM_WORLD_LOCAL_RANK="a",
        OMPI_COMM_WORLD_LOCAL_SIZE="2",
        **MPI,
    ),
    env("srun without a rank", "srun", "SLURM_PROCID", **SLURM),
    env(
        "srun with tasks that are not told",
        "SLURM_STEP_TASKS_PER_NODE",
        SLURM_PROCID="0",
        SLURM_LOCALID="0",
        SLURM_NODEID="5",
        SLURM_STEP_TASKS_PER_NODE="2",
        **SLURM,
    ),
    env("an accelerator of that name", "DS_ACCELERATOR=gpu", "expected cuda or cpu", DS_ACCELERATOR="gpu"),
    env("a PMI rank without a size", "PMI_RANK", "unset PMI_RANK", PMI_RANK="1"),
    env(
        "what a launcher handed over is gone",
        "PIPELINE_ENVIRONMENT=/nowhere/x",
        "No such file",
        "unset it",
        PIPELINE_ENVIRONMENT="/nowhere/x",
    ),
    Case(
        "what a launcher handed over is others' too",
        ["PIPELINE_ENVIRONMENT={here}/e.json", "chmod 600"],
        env={"PIPELINE_ENVIRONMENT": "{here}/e.json"},
        files={"e.json": "{}"},
    ),
]
