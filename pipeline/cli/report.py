"""Command `python -m pipeline report RUN ...`: writes the curves of one or several runs as one HTML file."""

from __future__ import annotations

import argparse
from pathlib import Path

from pipeline.cli.inputs import report_file_errors
from pipeline.errors import ConfigError
from pipeline.files import replace_file

HELP = "write the curves, alerts and settings of runs as one HTML file"
DESCRIPTION = """\
Write the curves, alerts and settings of a run as one HTML file, which needs no server and no network. Several
runs share one page, which compares their curves and settings."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = DESCRIPTION
    add = parser.add_argument
    add("runs", type=Path, nargs="+", metavar="RUN", help="run directory; several are compared")
    add(
        "-o",
        "--output",
        type=Path,
        metavar="FILE.html",
        help="default: RUN/report.html; of several runs, ./report.html",
    )


@report_file_errors()
def run(arguments: argparse.Namespace) -> None:
    """Write the page and print its path.

    Raises:
        PipelineError: A folder is no run, its metrics are damaged, or the file cannot be written.
    """
    from pipeline.monitoring.report.page import REPORT_FILE, encode_runs, render_page
    from pipeline.monitoring.report.runs import check_run_directory

    runs = list(dict.fromkeys(check_run_directory(path) for path in arguments.runs))  # each only once
    output = arguments.output or (runs[0] / REPORT_FILE if len(runs) == 1 else Path(REPORT_FILE))
    if output.suffix not in (".html", ".htm"):
        raise ConfigError(f"--output {output}: expected the name of a file that ends in .html")
    replace_file(output, render_page(encode_runs(runs)))
    print(output)
