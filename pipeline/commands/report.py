"""python -m pipeline report RUN ...: one HTML file with the curves of one or several runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from pipeline.commands.inputs import reading_a_run
from pipeline.errors import ConfigError

HELP = "the curves, alerts and settings of runs as one HTML file"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.description = HELP
    parser.add_argument(
        "runs", type=Path, nargs="+", metavar="RUN", help="run directory; several are compared"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE.html",
        help="default: RUN/report.html; of several ./report.html",
    )
    parser.add_argument(
        "--figures",
        type=Path,
        metavar="FOLDER",
        help="the plots as PNG and SVG too, for papers, in this folder",
    )
    parser.add_argument(
        "--x", choices=("step", "tokens", "hours"), default="step", help="x axis of --figures"
    )
    parser.add_argument(
        "--follow",
        action="store_true",
        help="serve the page on 127.0.0.1, live, until Ctrl-C; no file is written",
    )
    parser.add_argument("--port", type=_port, default=0, help="for --follow; default: any that is free")


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text}: expected a number from 0 to 65535")
    return int(text)


@reading_a_run()
def run(arguments: argparse.Namespace) -> None:
    """Raises a PipelineError where a folder is no run, or its metrics are damaged."""
    from pipeline.report.page import REPORT_FILE, page_data, render, write_page
    from pipeline.report.runs import find_run, read_run

    paths = list(dict.fromkeys(find_run(path) for path in arguments.runs))
    output = arguments.output or (paths[0] / REPORT_FILE if len(paths) == 1 else Path(REPORT_FILE))
    if output.suffix not in (".html", ".htm"):
        raise ConfigError(f"--output {output}: expected the name of a file that ends in .html")
    if not output.parent.is_dir():
        raise ConfigError(f"--output {output}: there is no folder {output.parent}")
    if arguments.follow:
        from pipeline.report.server import LiveReport

        with LiveReport(paths, arguments.port) as server:
            print(f"the report is at {server.address}; Ctrl-C ends it", flush=True)
            server.serve_forever()
    views = [read_run(path) for path in paths]
    write_page(render(page_data(views)), output)
    if arguments.figures is not None:
        from pipeline.report.figures import draw_figures

        drawn = draw_figures(views, arguments.figures, arguments.x)
        print(f"{len(drawn)} figures in {arguments.figures}")
    print(output)
