"""Command `python -m pipeline evaluate`: evaluates a model on held-out data or on tasks, in one process."""

from __future__ import annotations

import argparse
import logging
import math
import time
from pathlib import Path

from pipeline.checkpoint.find import find_checkpoint
from pipeline.cli.inputs import (
    ParagraphHelpFormatter,
    add_overrides,
    add_source_arguments,
    open_argument_source,
    report_file_errors,
)
from pipeline.config.optional_packages import require_package
from pipeline.distributed.ranks import Ranks
from pipeline.errors import ConfigError
from pipeline.evaluation.sources import ModelSource
from pipeline.monitoring.logs import log_to_console

log = logging.getLogger(__name__)

HELP = "evaluate a model on its run's held-out data, on other data, or on lm-evaluation-harness's tasks"
DESCRIPTION = """\
Evaluate a checkpoint of any split in a single process, and print the results beside those of the run's own
evaluation at this step. The process uses the first GPU if there is one; set CUDA_VISIBLE_DEVICES= (empty) to
use the CPU.

With --tasks, evaluate any language model (SOURCE) on tasks of lm-evaluation-harness instead. Prompts and
scores are those of `lm_eval --model hf`."""
EPILOG = """\
To evaluate on other data, and on all of its samples:

  %(prog)s runs/NAME-TIME 'data.eval_sets={mine: {paths: [mine.jsonl]}}' eval.max_samples=null

To see the tasks, and to evaluate on two of them:

  %(prog)s --tasks list

  %(prog)s SOURCE --tasks stdlib_perplexity,addition --output results.json
"""
SECONDS_BETWEEN_LINES = 10.0  # lines about progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = DESCRIPTION
    parser.epilog = EPILOG
    parser.formatter_class = ParagraphHelpFormatter
    add_source_arguments(parser, is_required=False)
    tasks = parser.add_argument_group("tasks")
    tasks.add_argument(
        "--tasks",
        metavar="NAMES",
        help="names of tasks and YAML files, separated by commas; `list` shows those that need no network",
    )
    tasks.add_argument(
        "--limit", type=float, metavar="N", help="first documents of each task; below 1 a fraction of them"
    )
    tasks.add_argument("--num-fewshot", type=int, metavar="K", help="solved examples before each document")
    tasks.add_argument(
        "--apply-chat-template", action="store_true", help="write prompts with the chat template"
    )
    tasks.add_argument("--output", type=Path, metavar="FILE.json", help="write results of each document")
    tasks.add_argument(
        "--compare", type=Path, metavar="EARLIER.json", help="compare with earlier results of the same tasks"
    )
    add_overrides(parser, "recipe keys of data, eval, loader and batch")


@report_file_errors()
def run(arguments: argparse.Namespace) -> None:
    """Evaluate the model and print its metrics.

    Raises:
        PipelineError: The model or a task cannot be found, read or evaluated.
    """
    log_to_console(Ranks(0, 0, 1, 1))
    tasks: str | None = arguments.tasks
    if tasks is None:
        for option in ("limit", "num_fewshot", "apply_chat_template", "output", "compare"):
            if getattr(arguments, option) not in (None, False):
                name = option.replace("_", "-")
                raise ConfigError(f"--{name} is for tasks; name some: --tasks NAMES (`list` shows them)")
    else:
        require_package("lm_eval", "--tasks")
    if tasks == "list":
        _print_tasks()
        return
    if arguments.source is None:
        raise ConfigError(
            "SOURCE is missing: give a run directory, an exported folder (transformers or peft) or a hub name"
        )
    source = open_argument_source(arguments)
    if tasks is None:
        _evaluate_held_out(source)
    else:
        _evaluate_tasks(source, tasks, arguments)


def _evaluate_held_out(source: ModelSource) -> None:
    """Evaluate on held-out data, and print the metrics beside those that the run recorded at this step."""
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


def _print_tasks() -> None:
    """Print the shipped tasks and the number of lm-eval's."""
    from pipeline.cli.screen import Screen
    from pipeline.evaluation.harness import LM_EVAL_TASKS, list_shipped_tasks

    screen = Screen(no_color=True)
    screen.table(["task without network", "what it asks for"], list_shipped_tasks(), ["what it asks for"])
    num_files = sum(1 for _ in LM_EVAL_TASKS.rglob("*.yaml"))  # to read them takes ten seconds
    screen.line(f"and lm-eval's own, in {num_files:,} files; their names: lm-eval ls tasks")


def _evaluate_tasks(source: ModelSource, tasks: str, arguments: argparse.Namespace) -> None:
    """Evaluate on tasks, print the metrics, and compare them with earlier ones."""
    from pipeline.cli.screen import Screen
    from pipeline.distributed.process_group import start_job
    from pipeline.evaluation.harness import HarnessModel, load_tasks, run_tasks
    from pipeline.evaluation.task_results import compare_results, find_prompt_differences, read_task_results

    if arguments.limit is not None and not 0 < arguments.limit < math.inf:
        raise ConfigError(f"--limit {arguments.limit:g}: expected a number above 0")
    if arguments.num_fewshot is not None and arguments.num_fewshot < 0:
        raise ConfigError(f"--num-fewshot {arguments.num_fewshot}: expected 0 or more")
    output: Path | None = arguments.output
    if output is not None and not output.parent.is_dir():
        raise ConfigError(f"--output {output}: there is no folder {output.parent}")
    if output is not None and output.is_dir():
        raise ConfigError(f"--output {output}: it is a folder; name a file in it")
    names = [name.strip() for name in tasks.split(",")]
    earlier = read_task_results(arguments.compare) if arguments.compare is not None else None
    loaded = load_tasks(
        names, arguments.limit, arguments.num_fewshot, import_paths=not arguments.no_import_paths
    )
    job = start_job(Ranks(0, 0, 1, 1), distributed=False)
    model = source.load(job)
    precision = model.engine.precision_text
    log.info("evaluating %s on %s in %s", model.name, job.device.type, precision)
    last_line = time.monotonic()

    def log_progress(done: int, total: int) -> None:
        nonlocal last_line
        if time.monotonic() - last_line >= SECONDS_BETWEEN_LINES:
            last_line = time.monotonic()
            log.info("%s of %s answers", f"{done:,}", f"{total:,}")

    results = run_tasks(
        loaded,
        HarnessModel(model.engine, model.call, job, model.tokenizer, on_progress=log_progress),
        apply_chat_template=arguments.apply_chat_template,
        settings={"model": str(arguments.source), "step": arguments.step, "precision": precision},
    )
    screen = Screen(no_color=True)
    rows = []
    for task, result in results.tasks.items():
        for name, metric in result.metrics.items():
            error = "" if metric.stderr is None else f"± {metric.stderr:.2g}"
            rows.append([task, name, f"{metric.value:.5g}", error, f"{result.num_documents:,}"])
    screen.table(["task", "metric", "value", "", "n"], rows, ["metric"])
    if output is not None:
        results.write(output)
    if earlier is None:
        return
    prompt_differences = find_prompt_differences(earlier, results)
    if prompt_differences:
        log.warning(
            "the earlier results had other prompts (%s), so the difference is not of the model alone",
            ", ".join(prompt_differences),
        )
    rows = []
    for each in compare_results(earlier, results):
        values = [f"{each.earlier:.5g}", f"{each.later:.5g}", f"{each.later - each.earlier:+.3g}"]
        interval = f"{each.low:+.3g} to {each.high:+.3g}"
        rows.append([each.task, each.metric, *values, interval, f"{each.num_documents:,}"])
    screen.line()
    columns = ["task", "metric", "earlier", "now", "difference", "95 % interval", "n"]
    screen.table(columns, rows, ["metric"])
