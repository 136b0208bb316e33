"""Command `train`: reads the command line into settings and starts the run.

Imports torch only when the run starts, so that `--dry-run` and mistakes take less than a second.

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
from pipeline.config.schema import LogLevel
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

LEVELS: tuple[str, ...] = get_args(LogLevel)
HELP = "train a model"


def build_parser(program: str) -> argparse.ArgumentParser:
    """Return the parser of `train`; `program` is its name in usage and errors."""
    parser = CommandLineParser(
        prog=program,
        description="Train a model. The recipe says what to train, the JSON how to split the work.",
        epilog="Without --deepspeed, the run uses plain PyTorch. All keys: docs/configuration.md.",
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
    shows = parser.add_mutually_exclusive_group()
    shows.add_argument("--log-level", choices=LEVELS, help="what the console shows (default: info)")
    only = "only warnings, errors and the closing lines"
    shows.add_argument("--quiet", dest="log_level", action="store_const", const="warning", help=only)
    # Launchers add this option: deepspeed, and torch.distributed.launch with another spelling.
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    return parser


def _parse_rank_count(text: str) -> int:
    if not text.isdecimal() or len(text) > 9 or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is no positive number of ranks")
    return int(text)


def parse_arguments(words: Sequence[str], program: str) -> argparse.Namespace:
    """Return the arguments, or end the process with a usage error."""
    parser = build_parser(program)
    arguments, unknown = parser.parse_known_args(words)
    for argument in unknown:
        if argument.startswith("--") and "." in argument.partition("=")[0]:
            parser.error(f"{argument}: overrides are written without dashes: {argument.lstrip('-')}")
        elif "=" in argument and not argument.startswith("-"):
            arguments.overrides.append(argument)  # argparse takes an override after an option for unknown
        else:
            parser.error(f"unrecognized argument {argument}")
    for argument in arguments.overrides:
        if argument[:1] in "\u2010\u2011\u2012\u2013\u2014\u2212" and argument:
            parser.error(f"{argument}: begins with a dash that is no hyphen (-); type a hyphen in its place")
        option = {".yaml": "--config", ".yml": "--config", ".json": "--deepspeed"}.get(Path(argument).suffix)
        if option is not None and "=" not in argument:
            parser.error(f"{argument}: a file without its option; write {option} {argument}")
    if arguments.log_level is not None:
        arguments.overrides.append(f"log.console={arguments.log_level}")
    if arguments.world_size is not None and not arguments.dry_run:
        parser.error("--world-size works only with --dry-run; add it, or choose the ranks by the launcher")
    return arguments


def main(argv: Sequence[str] | None = None, program: str = "train.py") -> int:
    """Run the command and return the exit code of the process.

    Args:
        argv: Arguments of the command; `None` takes those of the process.
        program: Name of the command in usage and errors.
    """
    hide_secrets_in_tracebacks()
    ranks = Ranks(0, 0, 1, 1)
    try:
        handed_over = load_sent_environment(os.environ)
        ranks = read_ranks(os.environ)
    except PipelineError as error:
        return _refuse(error, ranks)
    arguments = parse_arguments([*(sys.argv[1:] if argv is None else argv), *handed_over], program)
    try:
        import_paths = not arguments.no_import_paths
        settings = load_settings(
            arguments.config,
            arguments.deepspeed,
            arguments.overrides,
            import_paths=import_paths,
        )
        shows_notes = ranks.is_main_process and settings.config.log.shows_rows
        if shows_notes and settings.deepspeed_file is not None:
            for line in settings.deepspeed_file.notes:
                print(f"note: {shorten_message(line)}", file=sys.stderr)
        if arguments.dry_run:
            if ranks.is_main_process:
                print(format_dry_run(settings, arguments.world_size or ranks.world_size))
            return 0
        planned = settings.resolve_before_torch(ranks.world_size)
        check_pretrained(settings.config)
    except (PipelineError, OSError) as error:
        mistake = error if isinstance(error, PipelineError) else explain_long_path(error)
        if mistake is None:
            raise
        return _refuse(mistake, ranks)
    stop_with_launcher(ranks)
    code = _run(settings, ranks, planned)
    write_exit_code(ranks.rank, ranks.world_size, code)
    from pipeline.monitoring.trackers.interface import limit_exit_time  # already imported by the run

    limit_exit_time(code)
    return code


def _run(settings: Settings, ranks: Ranks, planned: ResolvedSettings) -> int:
    with raise_on_stop_signals():
        try:
            from pipeline.training.run_rank import run_rank  # imports torch

            return run_rank(settings, ranks, planned.deepspeed)
        except INTERRUPTS as interrupt:  # while torch is being imported; a run handles its own interrupts
            message, code = explain_interrupt(interrupt, NO_FURTHER_CHECKPOINT)
            if ranks.local_rank == 0 or reports_own_exit(False):
                print(message, file=sys.stderr, flush=True)
            return code


def _refuse(error: PipelineError, ranks: Ranks) -> int:
    """Print a user's mistake once on each machine, and return the exit code.

    Every rank finds the same mistake. The first rank of a machine prints it; the others wait, since the
    launcher ends all ranks as soon as one exits.
    """
    write_exit_code(ranks.rank, ranks.world_size, error.exit_code)
    if ranks.local_rank == 0 or reports_own_exit(False):
        print(f"error: {error}", file=sys.stderr, flush=True)
    if ranks.local_rank != 0:
        time.sleep(3)
    return error.exit_code


def format_dry_run(settings: Settings, world_size: int) -> str:
    """Return the output of --dry-run: recipe, DeepSpeed JSON, split, batch plan and steps."""
    resolved = settings.resolve(world_size, Device.probe())
    plan = resolved.batch_plan
    config = settings.config
    parts = [f"# recipe ({settings.recipe_path}, defaults filled in)", format_recipe_yaml(config)]
    filled = resolved.deepspeed
    if filled is not None and plan.is_provisional:
        filled = filled | {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    if filled is not None:
        parts += [
            f"# DeepSpeed ({settings.deepspeed_path}, every auto filled)",
            json.dumps(redact(filled), indent=2),
            "",
        ]
    ranks = f"{world_size} rank{'s' * (world_size > 1)}"
    parts += ["# split", f"{resolved.split}, {ranks}\n", "# batch", str(plan), "", "# steps"]
    if config.max_steps is not None:
        samples = config.max_steps * plan.global_batch_size
        line = f"{config.max_steps:,} optimizer steps, {samples:,} samples"
        if config.data.text is not None:
            line += f", {samples * config.data.text.sequence_length:,} tokens"
        parts += [line, *filter(None, [describe_missed_peak(config.schedule, config.max_steps)])]
    else:
        parts.append(f"{config.max_epochs:g} epochs of the training data (steps: known once it is read)")
    return "\n".join(parts)
