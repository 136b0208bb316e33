"""Chooses the environment variables and arguments that reach the nodes, and loads them in each rank.

They travel through ssh's standard input into a file of mode 600. The command line of pdsh is no place for
them: other users can read it in `ps` and in logs, and a shell on the node expands it.
"""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.config.shipped import LAUNCH
from pipeline.distributed.ranks import ENVIRONMENT_FILE_VARIABLE
from pipeline.errors import LaunchError

SENT_PREFIXES = (
    *("WANDB_", "HF_", "HUGGINGFACE_", "TRANSFORMERS_", "TOKENIZERS_", "DATASETS_"),
    *("NCCL_", "GLOO_", "TORCH_", "TORCHINDUCTOR_", "PYTORCH_", "TRITON_", "CUDA_", "NVIDIA_", "UCX_", "FI_"),
    *("OMP_", "MKL_", "KMP_", "GOMP_", "DS_", "DEEPSPEED_", "PIPELINE_WEBHOOK"),
)
# Their values hold for one machine only (the devices) or for one launch only (the file).
NEVER_SENT = {"CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "DS_ENV_FILE"}
# Python and the dynamic loader read these before the file with the environment is read. Therefore only the
# launcher can send them.
STARTUP_PREFIX = "PYTHON"
STARTUP_VARIABLES = ("LD_LIBRARY_PATH",)
# deepspeed itself would send variables with these prefixes, in double quotes, inside which a shell expands
# `$` and backquotes.
DEEPSPEED_PREFIXES = ("MLFLOW", "MV2", "UCX", "NCCL")
# pdsh replaces %h, %n and %u in a line, then a shell on every node interprets it.
PLAIN_TEXT = re.compile(r"[A-Za-z0-9_@+=:,./-]+")
PLAIN_CHARACTERS = "letters, digits and _@+=:,./-"
"""Characters of `PLAIN_TEXT`, for messages."""
TRAINING_OPTIONS = (
    *("--deepspeed", "--config", "--dry-run", "--world-size", "--no-import-paths"),
    *("--quiet", "--log-level"),
)


def is_plain(text: str) -> bool:
    """Return whether a text passes through pdsh and a shell unchanged."""
    return PLAIN_TEXT.fullmatch(text) is not None


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line into the arguments of the launcher and the arguments of train.py.

    The latter begin at the first option of train.py (--deepspeed, --config, ...), at the first key=value, or
    after `--`.

    Returns:
        The launcher's arguments, then train.py's.
    """
    for position, argument in enumerate(arguments):
        if argument == "--":
            return list(arguments[:position]), list(arguments[position + 1 :])
        name, equals, _ = argument.partition("=")
        if name in TRAINING_OPTIONS or (equals and not argument.startswith("-")):
            return list(arguments[:position]), list(arguments[position:])
    return list(arguments), []


def choose_environment(environment: Mapping[str, str], extra_names: Iterable[str] = ()) -> dict[str, str]:
    """Return the variables that training needs on every node.

    Args:
        environment: Environment of this shell.
        extra_names: Names to send besides those with one of `SENT_PREFIXES`.

    Raises:
        LaunchError: A variable of `extra_names` is not set.
    """
    chosen = {name: value for name, value in environment.items() if name.startswith(SENT_PREFIXES)}
    for name in extra_names:
        if name not in environment:
            raise LaunchError(
                f"--export {name}: {name} is not set in this shell; export it, or leave the option out"
            )
        chosen[name] = environment[name]
    return {name: value for name, value in chosen.items() if name not in NEVER_SENT}


def launcher_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for deepspeed itself, without the variables that deepspeed would send on.

    Raises:
        LaunchError: A variable that Python needs at startup has a value that a shell would change.
    """
    for name, value in environment.items():
        if (name.startswith(STARTUP_PREFIX) or name in STARTUP_VARIABLES) and value and not is_plain(value):
            raise LaunchError(
                f"{name}={value!r} cannot be sent to the nodes, because a shell there would change it; use "
                f"only {PLAIN_CHARACTERS}, or unset it here and set it on the nodes"
            )
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith(DEEPSPEED_PREFIXES) and name != ENVIRONMENT_FILE_VARIABLE
    }


def write_document(path: Path, document: Mapping[str, Any]) -> None:
    """Write a new file that only this user may read (mode 600).

    Raises:
        FileExistsError: The file exists already.
    """
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(document, file)  # writes ASCII escapes, which preserve bytes that are not UTF-8


def load_sent_environment(environment: MutableMapping[str, str]) -> list[str]:
    """Set the variables that a launch script sent, and return the arguments that it sent.

    It also puts the folder of this Python first in PATH, as on the machine of the launch script. Without
    PIPELINE_ENVIRONMENT no launch script sent anything: nothing is set, and the result is empty.

    Raises:
        LaunchError: The file named by PIPELINE_ENVIRONMENT is missing or incomplete, belongs to another user,
            or is accessible to others.
    """
    path = environment.get(ENVIRONMENT_FILE_VARIABLE)
    if path is None:
        return []
    try:
        with open(path) as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
                raise LaunchError(
                    f"{ENVIRONMENT_FILE_VARIABLE}={path}: other users may read or write this file; it must "
                    f"belong to the user who trains, with mode 600: chmod 600 {path}"
                )
            document = json.load(file)
        environment.update(document["environment"])
        arguments = [str(argument) for argument in document["arguments"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a file that a launch script wrote"
        raise LaunchError(
            f"{ENVIRONMENT_FILE_VARIABLE}={path}: {reason}; start with {LAUNCH / 'multi_node.sh'}, which "
            "sets this variable, or unset it"
        ) from None
    programs = os.path.dirname(sys.executable)
    if environment.get("PATH", "").split(os.pathsep)[0] != programs:
        environment["PATH"] = os.pathsep.join([programs, environment.get("PATH", os.defpath)])
    return arguments
