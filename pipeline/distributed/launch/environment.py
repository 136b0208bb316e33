"""The part of this shell's environment and arguments that reaches the nodes, and how a rank reads it.

It travels through ssh's standard input into a file of mode 600. What pdsh is given is seen on command lines
and in logs, and a shell on the node expands it.
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
from pipeline.distributed.ranks import ENVIRONMENT_FILE
from pipeline.errors import LaunchError

PREFIXES = (
    *("WANDB_", "HF_", "HUGGINGFACE_", "TRANSFORMERS_", "TOKENIZERS_", "DATASETS_"),
    *("NCCL_", "GLOO_", "TORCH_", "TORCHINDUCTOR_", "PYTORCH_", "TRITON_", "CUDA_", "NVIDIA_", "UCX_", "FI_"),
    *("OMP_", "MKL_", "KMP_", "GOMP_", "DS_", "DEEPSPEED_", "PIPELINE_WEBHOOK"),
)
# Each node's own, or of this launch alone.
NOT = {"CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "DS_ENV_FILE"}
# Python and the loader read them before any of our code runs: they go the launcher's way, or not at all.
EARLY_PREFIX = "PYTHON"
EARLY = ("LD_LIBRARY_PATH",)
# What deepspeed sends to the nodes by itself, in double quotes, which a shell looks into.
SENT_BY_DEEPSPEED = ("MLFLOW", "MV2", "UCX", "NCCL")
# pdsh hands a line to a shell on every node, after putting its own words in place of %h, %n and %u.
PLAIN = re.compile(r"[A-Za-z0-9_@+=:,./-]+")
TRAINING_OPTIONS = (
    *("--deepspeed", "--config", "--dry-run", "--world-size", "--no-import-paths"),
    *("--quiet", "--log-level"),
)


def is_plain(text: str) -> bool:
    """Return whether no shell, and no pdsh, changes a text."""
    return PLAIN.fullmatch(text) is not None


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split into the launcher's and train.py's: those begin at --deepspeed, --config, key=value, after --."""
    for number, argument in enumerate(arguments):
        if argument == "--":
            return list(arguments[:number]), list(arguments[number + 1 :])
        name, equals, _ = argument.partition("=")
        if name in TRAINING_OPTIONS or (equals and not argument.startswith("-")):
            return list(arguments[:number]), list(arguments[number:])
    return list(arguments), []


def choose_environment(environment: Mapping[str, str], also: Iterable[str] = ()) -> dict[str, str]:
    """Return the variables that training needs on every node: by their first letters, and those in `also`.

    Raises:
        LaunchError: One of `also` is not set.
    """
    chosen = {name: value for name, value in environment.items() if name.startswith(PREFIXES)}
    for name in also:
        if name not in environment:
            raise LaunchError(f"--export {name}: it is not set in this shell; set it, or leave this out")
        chosen[name] = environment[name]
    return {name: value for name, value in chosen.items() if name not in NOT}


def launcher_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for deepspeed itself, without what it would send to the nodes by itself.

    Raises:
        LaunchError: A variable that Python needs from its start has a value that a shell would change.
    """
    for name, value in environment.items():
        if (name.startswith(EARLY_PREFIX) or name in EARLY) and value and not is_plain(value):
            raise LaunchError(
                f"{name}={value!r} cannot be sent to the nodes unchanged: a shell there would read it; use "
                "letters, digits and @+=:,./- or set it on the nodes"
            )
    return {
        k: v for k, v in environment.items() if not k.startswith(SENT_BY_DEEPSPEED) and k != ENVIRONMENT_FILE
    }


def write_document(path: Path, document: Mapping[str, Any]) -> None:
    """Write a new file that only this user may read (mode 600).

    Raises:
        FileExistsError: There is one already.
    """
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(document, file)  # ASCII: bytes that are not UTF-8 come through as what they are


def load_sent_environment(environment: MutableMapping[str, str]) -> list[str]:
    """Set the variables that a launch script sent, if one did, and return the arguments that it sent.

    The venv's programs come first in PATH, as they do where the launch script was started.

    Raises:
        LaunchError: The file that PIPELINE_ENVIRONMENT names is not there, not ours alone, or not whole.
    """
    name = environment.get(ENVIRONMENT_FILE)
    if name is None:
        return []
    try:
        with open(name) as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
                raise LaunchError(f"{ENVIRONMENT_FILE}={name}: others may write or read it; chmod 600")
            document = json.load(file)
        environment.update(document["environment"])
        arguments = [str(argument) for argument in document["arguments"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not what a launch script writes"
        raise LaunchError(
            f"{ENVIRONMENT_FILE}={name}: {reason}; start with {LAUNCH / 'multi_node.sh'}, or unset it"
        ) from None
    first = os.path.dirname(sys.executable)
    if environment.get("PATH", "").split(os.pathsep)[0] != first:
        environment["PATH"] = os.pathsep.join([first, environment.get("PATH", os.defpath)])
    return arguments
