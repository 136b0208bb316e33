"""Chooses the environment variables and arguments that reach the nodes, and loads them in each rank.

Variables and arguments travel through ssh's standard input into a file of mode 600. They do not travel on the
command line of pdsh: other users can read it in `ps` and in logs, and a shell on the node expands it.
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

# Prefixes of the variables of the user's shell that every rank receives.
SENT_PREFIXES = (
    *("WANDB_", "HF_", "HUGGINGFACE_", "TRANSFORMERS_", "TOKENIZERS_", "DATASETS_"),
    *("NCCL_", "GLOO_", "TORCH_", "TORCHINDUCTOR_", "PYTORCH_", "TRITON_", "CUDA_", "NVIDIA_", "UCX_", "FI_"),
    *("OMP_", "MKL_", "KMP_", "GOMP_", "DS_", "DEEPSPEED_", "PIPELINE_WEBHOOK"),
)
# The first two are right for one machine only, and DS_ENV_FILE is right for one launch only.
NEVER_SENT = {"CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "DS_ENV_FILE"}
# Python and the dynamic loader read variables with this prefix, or of these names, before a rank can read the
# file with the environment. So the launcher must send them on its command line.
STARTUP_PREFIX = "PYTHON"
STARTUP_VARIABLES = ("LD_LIBRARY_PATH",)
# deepspeed would send variables with these prefixes in double quotes, in which a shell expands `$` and
# backquotes. They are sent in the file instead.
DEEPSPEED_PREFIXES = ("MLFLOW", "MV2", "UCX", "NCCL")
# Text that pdsh (which replaces %h, %n and %u) and the shell on a node leave as it is.
PLAIN_TEXT = re.compile(r"[A-Za-z0-9_@+=:,./-]+")
PLAIN_CHARACTERS = "letters, digits and _@+=:,./-"
"""Characters of `PLAIN_TEXT`, for messages."""
TRAINING_OPTIONS = (
    *("--deepspeed", "--config", "--dry-run", "--world-size", "--no-import-paths"),
    *("--quiet", "--log-level"),
)
"""Options of train.py. The first one on a command line ends the launcher's options."""


def is_plain(text: str) -> bool:
    """Return whether a text passes through pdsh and a shell unchanged."""
    return PLAIN_TEXT.fullmatch(text) is not None


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line into the arguments of the launcher and the arguments of train.py.

    The arguments of train.py begin at its first option (--deepspeed, --config, ...), at the first key=value,
    or after `--`.

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
    """Return the variables of this shell that every rank receives.

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
    """Return the environment for deepspeed itself, without the variables of DEEPSPEED_PREFIXES.

    Args:
        environment: Environment of this shell.

    Raises:
        LaunchError: A variable that Python needs at startup has a value that a shell would change.
    """
    for name, value in environment.items():
        is_startup_variable = name.startswith(STARTUP_PREFIX) or name in STARTUP_VARIABLES
        if is_startup_variable and value and not is_plain(value):
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
    """Write a JSON object to a new file that only this user may read (mode 600).

    Raises:
        OSError: The file cannot be written, or exists already (FileExistsError).
    """
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(document, file)  # writes ASCII escapes, which preserve bytes that are not UTF-8


def load_sent_environment(environment: MutableMapping[str, str]) -> list[str]:
    """Set the variables that a launch script sent, and return the arguments that it sent.

    Also puts the folder of this Python first in PATH, as on the machine of the launch script. If
    PIPELINE_ENVIRONMENT is not set, no launch script has sent anything: this sets nothing and returns an
    empty list.

    Args:
        environment: Environment of this process, which is changed.

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
    python_folder = os.path.dirname(sys.executable)
    if environment.get("PATH", "").split(os.pathsep)[0] != python_folder:
        environment["PATH"] = os.pathsep.join([python_folder, environment.get("PATH", os.defpath)])
    return arguments
