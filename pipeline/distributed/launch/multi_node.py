"""Implements launch/multi_node.sh: `python -m pipeline.distributed.launch.multi_node HOSTFILE ...`.

It reads the hostfile and runs the doctor. Then it sends the environment and the arguments to the nodes, runs
the deepspeed launcher, and returns the exit code of the run.

torchrun's agents over ssh would be no substitute for the deepspeed launcher: they end with 1 in place of 124
or 143, and they can outlive their launcher.
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
    PLAIN_CHARACTERS,
    STARTUP_VARIABLES,
    choose_environment,
    is_plain,
    launcher_environment,
    split_arguments,
)
from pipeline.distributed.launch.hostfile import (
    Devices,
    Selection,
    advise_on_one_machine,
    choose_devices,
    read_hostfile,
)
from pipeline.distributed.launch.ssh import SSH_OPTIONS, ssh_command
from pipeline.distributed.launch.supervise import Supervisor
from pipeline.distributed.ranks import ENVIRONMENT_FILE_VARIABLE, is_port
from pipeline.errors import LaunchError, report_errors
from pipeline.redaction import redact

TRAIN_SCRIPT = LAUNCH / "train.py"
GUARD_MODULE = "pipeline.distributed.launch.node_guard"
INSTALL_ADVICE = {
    "deepspeed": "make setup",
    "torchrun": "make setup",
    "mpirun": "apt-get install openmpi-bin",
}
"""Program -> command that installs it. A program that is not listed is the apt-get package of its name."""


class _Parser(argparse.ArgumentParser):
    """Parser that raises a `LaunchError` for wrong arguments; argparse would print its usage and exit."""

    def error(self, message: str) -> NoReturn:
        raise LaunchError(f"{message}; see {LAUNCH / 'multi_node.sh'} --help")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the hostfile, this script's options and the deepspeed launcher's options."""
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
    """Checked plan of a run over several machines.

    Names of nodes, `folder` and `arguments` have only characters that a shell does not interpret.
    """

    options: argparse.Namespace
    """Options of the command line."""
    devices: Devices
    """Devices of the run on each node."""
    folder: str
    """Path of a folder on every node, for the environment and the exit codes of the ranks."""
    document: dict[str, Any]
    """First message to each guard, with the fields `folder`, `environment` and `arguments`.

    It may contain secrets, so it must not be printed or put on a command line.
    """
    arguments: list[str]
    """Arguments of train.py for the command line; empty if they travel in `document`."""

    @property
    def uses_mpi(self) -> bool:
        """Return whether mpirun starts the ranks."""
        return bool(self.options.launcher == "openmpi")

    @property
    def needs_include(self) -> bool:
        """Return whether the launcher needs --include: the devices of a node are not its first ones."""
        return any(numbers != list(range(len(numbers))) for numbers in self.devices.values())

    def format_hostfile(self) -> str:
        """Return the text of a hostfile for deepspeed, with the nodes of this run only."""
        return "".join(f"{name} slots={max(numbers) + 1}\n" for name, numbers in self.devices.items())

    def format_include(self) -> str:
        """Return the devices in the format of the launcher's --include, as NAME:0,1@NAME:0."""
        return "@".join(f"{name}:{','.join(map(str, numbers))}" for name, numbers in self.devices.items())

    def map_ranks_to_nodes(self) -> dict[int, str]:
        """Return rank -> name of its node."""
        return dict(enumerate(name for name, numbers in self.devices.items() for _ in numbers))

    def build_command(self, hostfile: Path, master: Mapping[str, Any]) -> list[str]:
        """Return the command line of the deepspeed launcher.

        Args:
            hostfile: File with the text of `format_hostfile()`.
            master: Message of the first node's guard: `address` of the node and a free `port`.
        """
        options = self.options
        address = options.master_addr or master["address"]
        arguments = options.launcher_args
        if self.uses_mpi:
            # By default mpirun binds each rank to one core, and waits without end for an unreachable node.
            defaults = f"--bind-to none --mca plm_rsh_args '{' '.join(SSH_OPTIONS)}'"
            arguments = f"{defaults} {arguments}".strip()
        values = {
            "--hostfile": hostfile,
            "--master_addr": address if is_plain(address) else next(iter(self.devices)),
            "--master_port": options.master_port or master["port"],
            "--launcher": options.launcher,
            "--launcher_args": arguments,
            "--log_level": options.log_level,
            "--include": self.format_include() if self.needs_include else "",
        }
        # Name and value are one word with an equals sign, because a value may begin with a dash.
        words = [f"{name}={value}" for name, value in values.items() if value != ""]
        flags = ["--force_multi", "--no_ssh_check"]
        return [find_program("deepspeed"), *words, *flags, str(TRAIN_SCRIPT), *self.arguments]


def plan_launch(argv: Sequence[str], environment: Mapping[str, str]) -> MultiNodeLaunch:
    """Return the launch that a command line asks for.

    Args:
        argv: Command line of launch/multi_node.sh.
        environment: Environment of this shell.

    Raises:
        LaunchError: The command line, the hostfile or a variable is wrong, or a path contains characters that
            a shell on the nodes would interpret.
    """
    launcher_arguments, arguments = split_arguments(argv)
    options = build_parser().parse_args(launcher_arguments)
    command_line_texts = {
        "the working folder": os.getcwd(),
        "Python": sys.executable,
        "the project's train.py": str(TRAIN_SCRIPT),
        "--master_addr": options.master_addr or "none",
    }
    for name, text in command_line_texts.items():
        if not is_plain(text):
            raise LaunchError(
                f"{name}: {text!r} has characters that a shell on the nodes would interpret; move or rename "
                f"it to have only {PLAIN_CHARACTERS}"
            )
    if options.master_port is not None and not is_port(str(options.master_port)):
        raise LaunchError(
            f"--master_port {options.master_port}: expected a whole number from 1 to 65535; leave the option "
            "out to use a free port"
        )
    selection = Selection(
        include=options.include,
        exclude=options.exclude,
        num_nodes=options.num_nodes,
        num_gpus=options.num_gpus,
        visible=environment.get("CUDA_VISIBLE_DEVICES"),
    )
    devices = choose_devices(read_hostfile(options.hostfile), selection)
    if options.bind_cores_to_rank:
        # Over pdsh deepspeed loses its own option --bind_cores_to_rank.
        arguments = [*arguments, "distributed.bind_cores=true"]
    # deepspeed prints its command line and `ps` shows it, so no secret may be on it.
    is_safe = all(map(is_plain, arguments)) and redact(arguments) == arguments
    folder = f"/tmp/pipeline-{secrets.token_hex(8)}"
    document = {
        "folder": folder,
        "environment": choose_environment(environment, options.export),
        "arguments": [] if is_safe else arguments,
    }
    launch = MultiNodeLaunch(options, devices, folder, document, arguments if is_safe else [])
    if launch.uses_mpi and launch.needs_include:
        raise LaunchError(
            "--launcher openmpi: mpirun always takes the first devices of each node; leave this option out "
            "to choose other devices"
        )
    return launch


def find_program(name: str) -> str:
    """Return the path of a program, from the folder of this Python or else from PATH.

    Raises:
        LaunchError: The program is not installed on this machine.
    """
    beside_python = Path(sys.executable).with_name(name)
    path = str(beside_python) if beside_python.exists() else shutil.which(name)
    if path is None:
        advice = INSTALL_ADVICE.get(name, f"apt-get install {name}")
        raise LaunchError(f"{name} is not on this machine; install it: {advice}")
    return path


def run(launch: MultiNodeLaunch, environment: Mapping[str, str]) -> int:
    """Run the doctor, train, and return the exit code.

    Args:
        launch: Plan of the run.
        environment: Environment of this shell.

    Raises:
        LaunchError: A variable cannot be sent, or a node does not answer.
    """
    variables = launcher_environment(environment)
    ssh_arguments = f"{variables.get('PDSH_SSH_ARGS_APPEND', '')} {' '.join(SSH_OPTIONS)}".strip()
    with tempfile.TemporaryDirectory(prefix="pipeline-") as name:  # mode 700
        hostfile = Path(name) / "hostfile"
        hostfile.write_text(launch.format_hostfile())
        # deepspeed sends the variables that this file lists. It sends those with `STARTUP_PREFIX` anyway.
        sent = {key: environment[key] for key in STARTUP_VARIABLES if environment.get(key)}
        sent[ENVIRONMENT_FILE_VARIABLE] = f"{launch.folder}/environment.json"
        sent_file = Path(name) / "deepspeed_env"
        sent_file.touch(mode=0o600)
        sent_file.write_text("".join(f"{key}={value}\n" for key, value in sent.items()))
        # With an absolute path deepspeed searches neither the home directory nor the working directory.
        variables |= {"DS_ENV_FILE": str(sent_file), "PDSH_SSH_ARGS_APPEND": ssh_arguments}
        if not launch.options.no_doctor:
            code = _run_doctor(launch, environment)
            if code:
                return code
        guards = {host: ssh_command(host, GUARD_MODULE, Path.cwd()) for host in launch.devices}
        supervisor = Supervisor(guards, launch.document, launch.map_ranks_to_nodes())

        def build_command(master: Mapping[str, Any]) -> list[str]:
            command = launch.build_command(hostfile, master)
            if launch.uses_mpi:
                # mpirun gives each rank its number, but not the address of rank 0.
                options = dict(word.split("=", 1) for word in command if word.startswith("--master_"))
                with sent_file.open("a") as file:
                    file.write(
                        f"MASTER_ADDR={options['--master_addr']}\nMASTER_PORT={options['--master_port']}\n"
                    )
            return command

        return asyncio.run(supervisor.run(build_command, variables))


def _run_doctor(launch: MultiNodeLaunch, environment: Mapping[str, str]) -> int:
    """Run `doctor --quick` for the nodes and devices of the launch, and return its exit code."""
    hostfile = str(launch.options.hostfile)
    selection = ["--hostfile", hostfile, f"--include={launch.format_include()}", "--force_multi"]
    arguments = launch.arguments or launch.document["arguments"]
    command = [sys.executable, "-m", "pipeline", "doctor", *selection, "--quick", *arguments]
    # CUDA_VISIBLE_DEVICES would choose devices a second time, which the doctor refuses.
    variables = {name: value for name, value in environment.items() if name != "CUDA_VISIBLE_DEVICES"}
    return subprocess.run(command, env=variables, check=False).returncode


def main(argv: Sequence[str] | None = None) -> int:
    """Train on several machines, and return the exit code of the run.

    The code is 2 for bad input, and if a node cannot take part.
    """
    return report_errors(lambda: _launch(sys.argv[1:] if argv is None else argv))


def _launch(argv: Sequence[str]) -> int:
    """Check the command line and the programs on this machine, and run the launch."""
    launch = plan_launch(argv, os.environ)
    advice = advise_on_one_machine(launch.devices)
    if advice:
        print(advice, file=sys.stderr, flush=True)
    find_program("mpirun" if launch.uses_mpi else "pdsh")  # raises if it is missing
    for folder in (Path.cwd(), Path.home()):
        file = folder / ".deepspeed_env"
        if file.exists():
            print(f"{file} is not read; to send a variable, give --export NAME", file=sys.stderr)
    return run(launch, os.environ)


if __name__ == "__main__":
    sys.exit(main())
