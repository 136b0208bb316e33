"""Command `python -m pipeline evaluate SOURCE`: evaluates a checkpoint on held-out data, in one process."""

from __future__ import annotations

import argparse

from pipeline.checkpoint.find import find_checkpoint
from pipeline.cli.inputs import (
    ParagraphHelpFormatter,
    add_overrides,
    add_source_arguments,
    report_file_errors,
)
from pipeline.distributed.ranks import Ranks
from pipeline.evaluation.sources import open_source
from pipeline.monitoring.logs import log_to_console

HELP = "evaluate a checkpoint on its run's held-out data, or on other data"
DESCRIPTION = """\
Evaluate a checkpoint of any split in a single process, and print the results beside those of the run's own
evaluation at this step. The process uses the first GPU if there is one; set CUDA_VISIBLE_DEVICES= (empty) to
use the CPU."""
EPILOG = """\
To evaluate on other data, and on all of its samples:

  %(prog)s runs/NAME-TIME 'data.eval_sets={mine: {paths: [mine.jsonl]}}' eval.max_samples=null
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = DESCRIPTION
    parser.epilog = EPILOG
    parser.formatter_class = ParagraphHelpFormatter
    add_source_arguments(parser)
    add_overrides(parser, "recipe keys of data, eval, loader and batch")


@report_file_errors()
def run(arguments: argparse.Namespace) -> None:
    """Evaluate the checkpoint and print its metrics beside those that the run recorded at this step.

    Raises:
        PipelineError: The checkpoint cannot be found, read or evaluated.
    """
    log_to_console(Ranks(0, 0, 1, 1))
    source = open_source(
        arguments.source,
        arguments.step,
        arguments.overrides,
        base=arguments.base,
        import_paths=not arguments.no_import_paths,
    )
    from pipeline.cli.screen import Screen
    from pipeline.monitoring.trackers.jsonl import METRICS_FILE, read_metrics
    from pipeline.training.api import evaluate_source

    metrics = evaluate_source(source)
    assert source.run is not None  # else evaluate_source has raised
    _, checkpoint, manifest = find_checkpoint(source.run.checkpoint, "last")
    metrics_file = source.run.run / METRICS_FILE
    rows = read_metrics(metrics_file) if metrics_file.is_file() else []
    evaluations = [row for row in rows if row["step"] == manifest.global_step and "eval/loss" in row]
    recorded = evaluations[-1] if evaluations else {}
    cells = []
    for name, value in metrics.items():
        cells.append([name, f"{value:.6f}", f"{recorded[name]:.6f}" if name in recorded else ""])
    Screen(no_color=True).table([checkpoint.name, "now", "in the run"], cells)
