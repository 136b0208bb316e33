"""Implements launch/multi_node.sh: `python -m pipeline.distributed.launch.multi_node HOSTFILE ...`.

It reads the hostfile, runs the doctor, sends the environment and returns the exit code. The deepspeed
launcher starts the ranks, not torchrun's agents through ssh: those end with 1 in place of 124 or 143 and can
outlive their launcher.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from pipeline.config.shipped import LAUNCH
from pipeline.distributed.launch.environment import (
    STARTUP_VARIABLES,
    choose_environment,
    is_plain,
    launcher_environment,
    split_arguments,
)
from pipeline.distributed.launch.hostfile import Devices, Selection, choose_devices, read_hostfile
from pipeline.distributed.launch.ssh import SSH_OPTIONS, ssh_command
from pipeline.distributed.launch.supervise import Supervisor
from pipeline.distributed.ranks import ENVIRONMENT_FILE, is_port
from pipeline.errors import LaunchError, report_errors
from pipeline.redaction import redact

TRAIN = LAUNCH / "train.py"
GUARD = "pipeline.distributed.launch.node_guard"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise LaunchError(f"{message}; see {LAUNCH / 'multi_node.sh'} --help")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the hostfile, our own options, and those of the deepspeed launcher's."""
    parser = _Parser(prog="multi_node.sh", add_help=False, allow_abbrev=False)
    parser.add_argument("hostfile", type=Path)
    parser.add_argument("--no-doctor", action="store_true")
    parser.add_argument("--export", action="append", default=[], metavar="NAME")
    parser.add_argument("-i", "--include", default="")
    parser.add_argument("-e", "--exclude", default="")
    parser.add_argument("--num_nodes", type=int)
    parser.add_argument("--num_gpus", "--num_accelerators", type=int)
    parser.add_argument("--master_addr")
    parser.add_argument("--master_port", type=int)
    parser.add_argument("--launcher", choices=["pdsh", "openmpi"], default="pdsh")
    parser.add_argument("--launcher_args", default="")
    parser.add_argument("--log_level", default="warning")
    parser.add_argument("--bind_cores_to_rank", action="store_true")
    return parser


@dataclass(frozen=True)
class MultiNodeLaunch:
    """One run over several machines, checked: nothing in it means anything to a shell."""

    options: argparse.Namespace
    devices: Devices
    folder: str
    """Folder on every node for the environment and the exit codes of the ranks."""
    document: dict[str, Any]
    """Message to the guards; holds secrets."""
    arguments: list[str]
    """train.py's arguments that stand on the command line."""

    @property
    def over_mpi(self) -> bool:
        """Return whether mpirun starts the ranks."""
        return bool(self.options.launcher == "openmpi")

    @property
    def chooses(self) -> bool:
        """Return whether some node's devices are not its first ones."""
        return any(numbers != list(range(len(numbers))) for numbers in self.devices.values())

    def hostfile(self) -> str:
        """Return the machines and slots of this run alone."""
        return "".join(f"{name} slots={max(numbers) + 1}\n" for name, numbers in self.devices.items())

    def listed(self) -> str:
        """Return the devices as the launcher's --include has them."""
        return "@".join(f"{name}:{','.join(map(str, ns))}" for name, ns in self.devices.items())

    def places(self) -> dict[int, str]:
        """Return the node of each rank."""
        return dict(enumerate(name for name, numbers in self.devices.items() for _ in numbers))

    def command(self, hostfile: Path, master: Mapping[str, Any]) -> list[str]:
        """Return the deepspeed launcher's command line."""
        options = self.options
        address = options.master_addr or master["address"]
        arguments = options.launcher_args
        if self.over_mpi:  # mpirun binds each rank to one core, and waits for ever for a node that is cut off
            reach = f"--bind-to none --mca plm_rsh_args '{' '.join(SSH_OPTIONS)}'"
            arguments = f"{reach} {arguments}".strip()
        words = {
            "--hostfile": hostfile,
            "--master_addr": address if is_plain(address) else next(iter(self.devices)),
            "--master_port": options.master_port or master["port"],
            "--launcher": options.launcher,
            "--launcher_args": arguments,
            "--log_level": options.log_level,
            "--include": self.listed() if self.chooses else "",
        }
        # With an equals sign: a value may begin with a dash.
        given = [f"{name}={value}" for name, value in words.items() if value != ""]
        flags = ["--force_multi", "--no_ssh_check"]
        return [find_program("deepspeed"), *given, *flags, str(TRAIN), *self.arguments]


def plan_launch(argv: Sequence[str], environment: Mapping[str, str]) -> MultiNodeLaunch:
    """Return the launch that a command line asks for.

    Raises:
        LaunchError: It is wrong, or cannot be carried out as it stands.
    """
    launcher, arguments = split_arguments(argv)
    options = build_parser().parse_args(launcher)
    fixed = {
        "the folder": os.getcwd(),
        "Python": sys.executable,
        "the project": str(TRAIN),
        "--master_addr": options.master_addr or "none",
    }
    for what, text in fixed.items():
        if not is_plain(text):
            raise LaunchError(
                f"{what}, {text!r}, has characters that a shell on the nodes would read; move or rename it"
            )
    if options.master_port is not None and not is_port(str(options.master_port)):
        raise LaunchError(f"--master_port {options.master_port}: a port is a whole number from 1 to 65535")
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    wanted = Selection(options.include, options.exclude, options.num_nodes, options.num_gpus, visible)
    devices = choose_devices(read_hostfile(options.hostfile), wanted)
    if options.bind_cores_to_rank:
        arguments = [*arguments, "distributed.bind_cores=true"]  # pdsh would drop it
    # deepspeed prints the command, and `ps` shows it.
    is_safe = all(map(is_plain, arguments)) and redact(arguments) == arguments
    folder = f"/tmp/pipeline-{secrets.token_hex(8)}"
    document = {
        "folder": folder,
        "environment": choose_environment(environment, options.export),
        "arguments": [] if is_safe else arguments,
    }
    launch = MultiNodeLaunch(options, devices, folder, document, arguments if is_safe else [])
    if launch.over_mpi and launch.chooses:
        raise LaunchError(
            "--launcher openmpi: mpirun takes the first devices of each node; choose others by pdsh"
        )
    return launch


def find_program(name: str) -> str:
    """Return the path of a program: beside Python, else in PATH.

    Raises:
        LaunchError: It is not on this machine.
    """
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise LaunchError(f"{name} is not on this machine: install it (apt-get install {name})")
    return found


def run(launch: MultiNodeLaunch, environment: Mapping[str, str]) -> int:
    """Start the run, wait for it and return its exit code."""
    child = launcher_environment(environment)
    append = f"{child.get('PDSH_SSH_ARGS_APPEND', '')} {' '.join(SSH_OPTIONS)}".strip()
    with tempfile.TemporaryDirectory(prefix="pipeline-") as name:  # mode 700
        hostfile, sent = Path(name) / "hostfile", Path(name) / "deepspeed_env"
        hostfile.write_text(launch.hostfile())
        # deepspeed itself sends those that begin with PYTHON.
        variables = {early: environment[early] for early in STARTUP_VARIABLES if environment.get(early)}
        variables[ENVIRONMENT_FILE] = f"{launch.folder}/environment.json"
        sent.touch(mode=0o600)
        sent.write_text("".join(f"{key}={value}\n" for key, value in variables.items()))
        # An absolute name: deepspeed then looks neither into the home nor the working directory.
        child |= {"DS_ENV_FILE": str(sent), "PDSH_SSH_ARGS_APPEND": append}
        if not launch.options.no_doctor and (code := _doctor(launch, environment)):
            return code
        guards = {host: ssh_command(host, GUARD, Path.cwd()) for host in launch.devices}
        supervisor = Supervisor(guards, launch.document, launch.places())

        def start(master: Mapping[str, Any]) -> list[str]:
            command = launch.command(hostfile, master)
            if launch.over_mpi:  # mpirun tells the ranks their numbers, but not where rank 0 is
                named = dict(word.split("=", 1) for word in command if word.startswith("--master_"))
                with sent.open("a") as file:
                    file.write(
                        f"MASTER_ADDR={named['--master_addr']}\nMASTER_PORT={named['--master_port']}\n"
                    )
            return command

        return asyncio.run(supervisor.run(start, child))


def _doctor(launch: MultiNodeLaunch, environment: Mapping[str, str]) -> int:
    chosen = ["--hostfile", str(launch.options.hostfile), f"--include={launch.listed()}", "--force_multi"]
    arguments = launch.arguments or launch.document["arguments"]
    command = [sys.executable, "-m", "pipeline", "doctor", *chosen, "--quick", *arguments]
    # It would choose devices a second time.
    left = {name: value for name, value in environment.items() if name != "CUDA_VISIBLE_DEVICES"}
    return subprocess.run(command, env=left, check=False).returncode


def main(argv: Sequence[str] | None = None) -> int:
    """Return the run's exit code; 2 for bad input or a node that cannot take part."""
    return report_errors(lambda: _launch(sys.argv[1:] if argv is None else argv))


def _launch(argv: Sequence[str]) -> int:
    launch = plan_launch(argv, os.environ)
    find_program("mpirun" if launch.over_mpi else "pdsh")
    for folder in (Path.cwd(), Path.home()):
        if (file := folder / ".deepspeed_env").exists():
            print(f"{file} is not read; name variables with --export", file=sys.stderr)
    return run(launch, os.environ)


if __name__ == "__main__":
    sys.exit(main())
