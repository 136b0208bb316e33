"""Command `train`: reads the command line into settings and starts the run.

Torch is imported only when the run starts, so that `--dry-run` and mistakes take less than a second.

    deepspeed launch/train.py --deepspeed ds_configs/zero2.json model.num_layers=4
    ds-pipeline train --deepspeed zero2 model.num_layers=4
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from pipeline.cli.inputs import PATH_OR_NAME
from pipeline.config.recipe import NO_IMPORT_PATHS
from pipeline.config.schema import LogLevel, RunConfig
from pipeline.config.settings import ResolvedSettings, Settings, format_recipe_yaml, load_settings
from pipeline.config.shipped import DEFAULT_RECIPE
from pipeline.config.split import Device
from pipeline.distributed.launch.environment import load_sent_environment
from pipeline.distributed.ranks import Ranks, read_ranks, write_exit_code
from pipeline.distributed.signals import raise_on_stop_signals, reports_own_exit, stop_with_launcher
from pipeline.engine.schedule import describe_missed_peak
from pipeline.errors import (
    INTERRUPTS,
    NO_FURTHER_CHECKPOINT,
    CommandLineParser,
    PipelineError,
    explain_interrupt,
    explain_long_path,
    hide_secrets_in_tracebacks,
    shorten_message,
)
from pipeline.planner.shapes import check_pretrained
from pipeline.redaction import redact

LOG_LEVELS: tuple[str, ...] = get_args(LogLevel)
HELP = "train a model"
MAX_WORLD_SIZE = 999_999_999
DASHES = ("\u2010", "\u2011", "\u2012", "\u2013", "\u2014", "\u2212")
"""Characters that look like a hyphen; word processors and web pages put them in its place."""
REPORT_SECONDS = 3.0
"""Seconds that a rank waits before it exits because of a mistake, so that another rank can print it."""


def build_parser(program: str) -> argparse.ArgumentParser:
    """Return the parser of `train`; `program` is its name in usage and errors."""
    parser = CommandLineParser(
        prog=program,
        description="Train a model. The recipe says what to train, the JSON how to split the work.",
        epilog="Without --deepspeed, the run uses plain PyTorch. All keys: docs/reference/configuration.md",
    )
    parser.add_argument(
        "--deepspeed", type=Path, metavar="FILE.json", help=f"split and precision; {PATH_OR_NAME}"
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="RECIPE.yaml",
        help=f"recipe; {PATH_OR_NAME} (default: {DEFAULT_RECIPE.stem})",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="key=value",
        help="recipe keys (model.num_layers=4) and, with ds., DeepSpeed keys (ds.zero_optimization.stage=3)",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the resolved settings and stop")
    parser.add_argument(
        "--world-size", type=_parse_rank_count, metavar="N", help="with --dry-run: plan for N ranks"
    )
    parser.add_argument(NO_IMPORT_PATHS, action="store_true", help="refuse a recipe that names code to run")
    console = parser.add_mutually_exclusive_group()
    log_level = "least severe messages that the console shows (default: info)"
    console.add_argument("--log-level", choices=LOG_LEVELS, help=log_level)
    quiet = "show only warnings, errors and the closing lines: --log-level warning"
    console.add_argument("--quiet", dest="log_level", action="store_const", const="warning", help=quiet)
    # The deepspeed launcher adds this option; torch.distributed.launch adds it in the second spelling.
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    return parser


def _parse_rank_count(text: str) -> int:
    """Return the number of ranks that an option has.

    Raises:
        ArgumentTypeError: The text is no number from 1 to MAX_WORLD_SIZE.
    """
    has_digits = text.isdecimal() and len(text) <= len(str(MAX_WORLD_SIZE))
    if not has_digits or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text[:20]!r}, expected 1 to {MAX_WORLD_SIZE:,} ranks")
    return int(text)


def parse_arguments(words: Sequence[str], program: str) -> argparse.Namespace:
    """Return the arguments of `train`, or end the process with a usage error.

    Args:
        words: Words of the command line after the command.
        program: Name of the command in usage and errors.
    """
    parser = build_parser(program)
    arguments, unknown = parser.parse_known_args(words)
    for argument in unknown:
        if argument.startswith("--") and "." in argument.partition("=")[0]:
            parser.error(f"{argument}: overrides are written without dashes: {argument.lstrip('-')}")
        elif "=" in argument and not argument.startswith("-"):
            arguments.overrides.append(argument)  # to argparse, an override after an option is unknown
        else:
            parser.error(f"unrecognized argument {argument}")
    options = {".yaml": "--config", ".yml": "--config", ".json": "--deepspeed"}
    for argument in arguments.overrides:
        if argument.startswith(DASHES):
            parser.error(f"{argument}: begins with a dash that is no hyphen (-); type a hyphen in its place")
        option = options.get(Path(argument).suffix)
        if option is not None and "=" not in argument:
            parser.error(f"{argument}: a file without its option; write {option} {argument}")
    if arguments.log_level is not None:
        arguments.overrides.append(f"log.console={arguments.log_level}")
    if arguments.world_size is not None and not arguments.dry_run:
        parser.error(
            "--world-size works only with --dry-run; add it, or give the number of ranks to the launcher"
        )
    return arguments


def main(argv: Sequence[str] | None = None, program: str = "train.py") -> int:
    """Run `train` and return the exit code of the process.

    In a job, every rank calls this. Prints a user's mistake on stderr, and the result of --dry-run on stdout.

    Args:
        argv: Words after the command; `None` for those of this process.
        program: Name of the command in usage and errors.
    """
    hide_secrets_in_tracebacks()
    ranks = Ranks(0, 0, 1, 1)
    try:
        sent_words = load_sent_environment(os.environ)  # by a launch script
        ranks = read_ranks(os.environ)
    except PipelineError as error:
        return _report_mistake(error, ranks)
    words = sys.argv[1:] if argv is None else argv
    arguments = parse_arguments([*words, *sent_words], program)
    try:
        settings = load_settings(
            arguments.config,
            arguments.deepspeed,
            arguments.overrides,
            import_paths=not arguments.no_import_paths,
        )
        shows_notes = ranks.is_main_process and settings.config.log.shows_rows
        if shows_notes and settings.deepspeed_file is not None:
            for note in settings.deepspeed_file.notes:
                print(f"note: {shorten_message(note)}", file=sys.stderr)
        if arguments.dry_run:
            command = settings.config.notify.command
            if command is not None and arguments.world_size is None:  # the plan is for this machine
                from pipeline.monitoring.trackers.notify import split_command

                split_command(command)
            if ranks.is_main_process:
                print(format_dry_run(settings, arguments.world_size or ranks.world_size))
            return 0
        resolved = settings.resolve_before_torch(ranks.world_size)
        check_pretrained(settings.config)
    except (PipelineError, OSError) as error:
        mistake = error if isinstance(error, PipelineError) else explain_long_path(error)
        if mistake is None:
            raise
        return _report_mistake(mistake, ranks)
    stop_with_launcher(ranks)
    exit_code = _train(settings, ranks, resolved)
    write_exit_code(ranks.rank, ranks.world_size, exit_code)
    from pipeline.monitoring.trackers.interface import limit_exit_time  # already imported by the run

    limit_exit_time(exit_code)
    return exit_code


def _train(settings: Settings, ranks: Ranks, resolved: ResolvedSettings) -> int:
    """Import torch, train this rank, and return its exit code. Prints an interrupt of the import."""
    with raise_on_stop_signals():
        try:
            from pipeline.training.run_rank import run_rank  # imports torch

            return run_rank(settings, ranks, resolved.deepspeed)
        except INTERRUPTS as interrupt:  # while torch is being imported; `run_rank` handles later ones
            message, code = explain_interrupt(interrupt, NO_FURTHER_CHECKPOINT)
            if ranks.local_rank == 0 or reports_own_exit(is_only_reporter=False):
                print(message, file=sys.stderr, flush=True)
            return code


def _report_mistake(error: PipelineError, ranks: Ranks) -> int:
    """Print a user's mistake once on each machine, and return the exit code.

    Every rank finds the same mistake, and the first rank of a machine prints it. The others wait before they
    exit, since the launcher ends all ranks as soon as one exits.
    """
    write_exit_code(ranks.rank, ranks.world_size, error.exit_code)
    if ranks.local_rank == 0 or reports_own_exit(is_only_reporter=False):
        print(f"error: {error}", file=sys.stderr, flush=True)
    if ranks.local_rank != 0:
        time.sleep(REPORT_SECONDS)
    return error.exit_code


def format_dry_run(settings: Settings, world_size: int) -> str:
    """Return the output of --dry-run: recipe, DeepSpeed JSON, split, batch plan and steps.

    Args:
        settings: Settings of the run.
        world_size: Number of ranks to plan for.

    Raises:
        ConfigError: The run cannot be split over this number of ranks.
    """
    resolved = settings.resolve(world_size, Device.probe())
    batch_plan = resolved.batch_plan
    lines = [f"# recipe ({settings.recipe_path}, defaults filled in)", format_recipe_yaml(settings.config)]
    tree = resolved.deepspeed
    if tree is not None:
        if batch_plan.is_provisional:  # the sizes are chosen when the run starts
            tree = tree | {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
        lines.append(f"# DeepSpeed ({settings.deepspeed_path}, every auto filled)")
        lines += [json.dumps(redact(tree), indent=2), ""]
    ranks = f"{world_size} rank{'s' * (world_size > 1)}"
    lines += ["# split", f"{resolved.split}, {ranks}", ""]
    lines += ["# batch", str(batch_plan), ""]
    lines += ["# steps", *_describe_steps(settings.config, batch_plan.global_batch_size)]
    return "\n".join(lines)


def _describe_steps(config: RunConfig, global_batch_size: int) -> list[str]:
    """Return lines on the length of a run, and on a schedule that does not reach its peak in it."""
    if config.max_steps is None:
        return [f"{config.max_epochs:g} epochs; the number of steps is known once the training data is read"]
    num_samples = config.max_steps * global_batch_size
    length = f"{config.max_steps:,} optimizer steps, {num_samples:,} samples"
    if config.data.text is not None:
        length += f", {num_samples * config.data.text.sequence_length:,} tokens"
    missed_peak = describe_missed_peak(config.schedule, config.max_steps)
    return [length] if missed_peak is None else [length, missed_peak]
