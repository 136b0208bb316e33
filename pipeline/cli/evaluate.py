"""Command `python -m pipeline evaluate RUN`: evaluates a checkpoint on held-out data, in one process."""

from __future__ import annotations

import argparse

from pipeline.checkpoint.find import find_checkpoint
from pipeline.cli.inputs import add_checkpoint_arguments, add_overrides, report_file_errors
from pipeline.distributed.ranks import Ranks
from pipeline.monitoring.logs import log_to_console

HELP = "evaluate a checkpoint on its run's held-out data, or on other data"
DESCRIPTION = """\
Evaluates a checkpoint of any split in a single process, with the same results as the run's own evaluation. It
uses the first GPU if there is one; set CUDA_VISIBLE_DEVICES= (empty) to use the CPU."""
EPILOG = """\
To evaluate on other data, and on all of it:

  %(prog)s RUN 'data.eval_sets={mine: {paths: [mine.jsonl]}}' eval.max_samples=null
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = DESCRIPTION
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_checkpoint_arguments(parser)
    add_overrides(parser, "recipe keys of data, eval, loader and batch")


@report_file_errors()
def run(arguments: argparse.Namespace) -> None:
    """Evaluate the checkpoint and print its metrics beside those that the run recorded at this step."""
    log_to_console(Ranks(0, 0, 1, 1))
    directory, checkpoint, manifest = find_checkpoint(arguments.run, arguments.step)
    from pipeline.cli.screen import Screen
    from pipeline.monitoring.trackers.jsonl import METRICS_FILE, read_metrics
    from pipeline.training.api import evaluate

    row = evaluate(checkpoint, arguments.overrides, import_paths=not arguments.no_import_paths)
    record = directory / METRICS_FILE
    rows = read_metrics(record) if record.is_file() else []
    at_this_step = [each for each in rows if each["step"] == manifest.global_step and "eval/loss" in each]
    own = at_this_step[-1] if at_this_step else {}
    screen = Screen(no_color=True)
    screen.table(
        [checkpoint.name, "now", "in the run"],
        [[key, f"{value:.6f}", f"{own[key]:.6f}" if key in own else ""] for key, value in row.items()],
    )
