"""Implements launch/multi_gpu.sh: `python -m pipeline.distributed.launch.multi_gpu ...`.

It runs the deepspeed launcher on this machine only, with a free port, and returns the exit code of the ranks.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.config.command_lines import format_pipeline_command
from pipeline.config.shipped import LAUNCH
from pipeline.config.split import Device
from pipeline.distributed.launch.environment import split_arguments
from pipeline.distributed.launch.hostfile import Selection, choose_devices
from pipeline.distributed.launch.multi_node import TRAIN_SCRIPT, find_program
from pipeline.distributed.launch.ssh import local_command
from pipeline.distributed.launch.supervise import Supervisor
from pipeline.distributed.ranks import ENVIRONMENT_FILE_VARIABLE, is_port
from pipeline.errors import CommandLineParser, LaunchError, report_errors


def main(argv: Sequence[str] | None = None) -> int:
    """Train on this machine, and return the exit code of the run; bad input has code 2."""
    options, arguments = split_arguments(sys.argv[1:] if argv is None else argv)
    folder = Path(tempfile.gettempdir()) / f"pipeline-{secrets.token_hex(8)}"
    # The ranks inherit the environment of this shell. The arguments travel in a file. deepspeed would print
    # them with its command line when a rank fails, and other users could read them in the list of processes.
    document = {"folder": str(folder), "environment": {}, "arguments": arguments}
    guards = {"this machine": local_command("pipeline.distributed.launch.node_guard")}

    def build_command(master: Mapping[str, Any]) -> list[str]:
        # The user's options come later on the command line, so they override these defaults.
        defaults = [f"--master_port={master['port']}", "--log_level=warning"]
        return [find_program("deepspeed"), *defaults, *options, str(TRAIN_SCRIPT)]

    def run() -> int:
        check_options(options, os.environ)
        environment = os.environ | {ENVIRONMENT_FILE_VARIABLE: str(folder / "environment.json")}
        supervisor = Supervisor(guards, document, rank_nodes={})  # deepspeed chooses the number of ranks
        return asyncio.run(supervisor.run(build_command, environment))

    return report_errors(run)


def check_options(options: Sequence[str], environment: Mapping[str, str]) -> None:
    """Check the options of the deepspeed launcher.

    deepspeed itself would misread some wrong options, and end with a traceback at others.

    Args:
        options: Options for the deepspeed launcher.
        environment: Environment of this shell. Its CUDA_VISIBLE_DEVICES selects devices, like an option.

    Raises:
        LaunchError: A device does not exist, the options ask for several machines, an option is misspelled,
            or a number is out of range.
    """
    parser = CommandLineParser(prog="launch/multi_gpu.sh", add_help=False, allow_abbrev=False)
    parser.add_argument("-i", "--include", default="")
    parser.add_argument("-e", "--exclude", default="")
    parser.add_argument("-H", "--hostfile")
    parser.add_argument("--num_nodes", type=int)
    parser.add_argument("--num_gpus", "--num_accelerators", type=int)
    parser.add_argument("--master_port")
    parsed, unknown = parser.parse_known_args(options)
    for option in unknown:
        # deepspeed spells its options with underscores; --num-gpus is a common mistake.
        name = option.partition("=")[0].replace("-", "_").replace("__", "--", 1)
        if name in ("--include", "--exclude", "--num_nodes", "--num_gpus", "--master_port"):
            raise LaunchError(f"{option}: unknown option; did you mean {name}?")
    has_several_nodes = (parsed.num_nodes or 1) != 1
    if parsed.hostfile is not None or has_several_nodes:
        raise LaunchError(
            "multi_gpu.sh trains on this machine only, without --hostfile or --num_nodes; for several "
            f"machines use {LAUNCH / 'multi_node.sh'} HOSTFILE"
        )
    if parsed.num_gpus is not None and parsed.num_gpus < 1:
        raise LaunchError(f"--num_gpus {parsed.num_gpus}: give 1 or more")
    if parsed.master_port is not None and not is_port(parsed.master_port):
        raise LaunchError(
            f"--master_port {parsed.master_port}: expected a whole number from 1 to 65535; leave the option "
            "out to use a free port"
        )
    has_gpus = Device.probe().kind == "cuda"
    visible = environment.get("CUDA_VISIBLE_DEVICES") if has_gpus else None
    lists_devices = bool(parsed.include or parsed.exclude)
    # On CPUs --num_gpus is a number of processes, which has no limit.
    num_gpus = parsed.num_gpus if has_gpus or lists_devices else None
    if lists_devices or num_gpus or visible:
        selection = Selection(
            include=parsed.include,
            exclude=parsed.exclude,
            num_nodes=None,
            num_gpus=num_gpus,
            visible=visible,
            source="this machine",
        )
        choose_devices({"localhost": _count_devices(environment)}, selection)  # raises if they do not exist


def _count_devices(environment: Mapping[str, str]) -> int:
    """Return the number of devices that deepspeed will find on this machine.

    A separate process asks deepspeed itself, because on CPUs deepspeed counts the NUMA nodes of numactl.

    Args:
        environment: Environment of this shell.

    Raises:
        LaunchError: deepspeed fails to count the devices.
    """
    program = "from deepspeed.accelerator import get_accelerator as a; print('devices', a().device_count())"
    # With CUDA_VISIBLE_DEVICES set, deepspeed would count only the devices that it lists.
    variables = {name: value for name, value in environment.items() if name != "CUDA_VISIBLE_DEVICES"}
    result = subprocess.run(
        [sys.executable, "-c", program], env=variables, capture_output=True, text=True, check=False
    )
    match = re.search(r"^devices (\d+)$", result.stdout, re.MULTILINE)
    if match is None:
        raise LaunchError(
            f"deepspeed failed to count the devices of this machine: {result.stderr.strip()[-200:]}; check "
            f"the installation: {format_pipeline_command('doctor')}"
        )
    return int(match[1])


if __name__ == "__main__":
    sys.exit(main())
