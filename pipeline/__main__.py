"""The command line: `ds-pipeline COMMAND`, or `python -m pipeline COMMAND`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from pipeline.cli import (
    chat,
    checkpoints,
    doctor,
    evaluate,
    export,
    generate,
    inspect,
    plan,
    prepare,
    report,
    serve,
    supports,
)
from pipeline.cli import train as train_command
from pipeline.cli.import_configs import writing as import_config
from pipeline.config.command_lines import SCRIPT
from pipeline.distributed.machine import raise_open_files_limit
from pipeline.errors import CommandLineParser, DeviceFailedError, PipelineError, report_errors
from pipeline.monitoring.logs import hide_torchao_warnings

COMMANDS = {
    "plan": plan,
    "supports": supports,
    "prepare": prepare,
    "checkpoints": checkpoints,
    "evaluate": evaluate,
    "generate": generate,
    "chat": chat,
    "serve": serve,
    "export": export,
    "import": import_config,
    "report": report,
    "inspect": inspect,
    "doctor": doctor,
}
"""Name -> module with `HELP`, `add_arguments`, `run` and, optionally, `AFTER_INTERRUPT`.

`train` is absent, since it parses its own arguments.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    Side effect: raise this process's limit of open files, except for `train`, which does so itself.

    The code is 0 for success, 1 for the answer no of `supports`, 2 for bad input or a problem that a command
    reports, 12 for out of memory, 14 for a failed device and 130 for an interrupt. docs/reference/cli.md has
    the further codes of `train`.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    program = SCRIPT if Path(sys.argv[0]).name == SCRIPT else "python -m pipeline"
    # deepspeed and torch.distributed.launch put `--local_rank=0` before the command.
    launcher_words = [word for word in words[:1] if word.startswith(("--local_rank=", "--local-rank="))]
    if words[len(launcher_words) :][:1] == ["train"]:
        return train_command.main([*launcher_words, *words[len(launcher_words) + 1 :]], f"{program} train")
    parser = CommandLineParser(
        prog=program, description="Train models, and plan, prepare, inspect, evaluate and export them."
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    commands.add_parser("train", help=train_command.HELP)
    for name, command in COMMANDS.items():
        command.add_arguments(commands.add_parser(name, help=command.HELP))
    arguments, unknown = parser.parse_known_args(words)
    for argument in unknown:
        if "overrides" not in arguments or "=" not in argument or argument.startswith("-"):
            commands.choices[arguments.command].error(f"unrecognized argument {argument}")
        arguments.overrides.append(argument)  # argparse does not parse an override that follows an option
    raise_open_files_limit()
    hide_torchao_warnings()
    command = COMMANDS[arguments.command]
    return report_errors(lambda: _run(command, arguments), getattr(command, "AFTER_INTERRUPT", None))


def _run(command: ModuleType, arguments: argparse.Namespace) -> int | None:
    """Run a command and return its exit code.

    Raises:
        DeviceMemoryError: Memory ran out. It replaces the exception of torch or of the operating system.
        DeviceFailedError: The device failed. It replaces the exception of torch.
    """
    try:
        code: int | None = command.run(arguments)
    except Exception as error:
        if isinstance(error, PipelineError):
            raise
        from pipeline.training.device_failures import advise_on_files, explain_failure

        explained = explain_failure(error, None, advise_on_files)
        if explained is None:
            raise
        raise explained from error
    return code


def run_script() -> None:
    """Run the command of `sys.argv` and end the process with its exit code."""
    try:
        code = main()
        if code == DeviceFailedError.exit_code:  # CUDA's destructors would abort and replace the exit code
            sys.stdout.flush()
            os._exit(code)
        sys.exit(code)
    except KeyboardInterrupt:  # it came before a command could handle it
        sys.exit(130)


if __name__ == "__main__":
    run_script()
