"""python -m pipeline report RUN ...: one HTML file with the curves of one or several runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pipeline.cli.inputs import reading_a_run
from pipeline.errors import ConfigError, PipelineError
from pipeline.files import replace_file
from pipeline.monitoring.report.page import encode, plotly_source, render
from pipeline.monitoring.trackers.jsonl import METRICS_FILE

HELP = "the curves, alerts and settings of runs as one HTML file"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.description = HELP
    add = parser.add_argument
    add("runs", type=Path, nargs="+", metavar="RUN", help="run directory; several are compared")
    add("-o", "--output", type=Path, metavar="FILE.html", help="default: RUN/report.html, or ./report.html")
    add("--follow", action="store_true", help="serve it live on 127.0.0.1, until Ctrl-C; writes no file")
    add("--port", type=int, default=0, help="for --follow; default: any that is free")


@reading_a_run()
def run(arguments: argparse.Namespace) -> None:
    """Raises a PipelineError where a folder is no run, or its metrics are damaged."""
    from pipeline.monitoring.report.page import REPORT_FILE, encode, render
    from pipeline.monitoring.report.runs import find_run

    runs = list(dict.fromkeys(find_run(path) for path in arguments.runs))
    output = arguments.output or (runs[0] / REPORT_FILE if len(runs) == 1 else Path(REPORT_FILE))
    if output.suffix not in (".html", ".htm"):
        raise ConfigError(f"--output {output}: expected the name of a file that ends in .html")
    if arguments.follow:
        with live_report(runs, arguments.port) as server:
            print(f"the report is at http://127.0.0.1:{server.server_port}/; Ctrl-C ends it", flush=True)
            server.serve_forever()
    replace_file(output, render(encode(runs)))
    print(output)


def live_report(runs: Sequence[Path], port: int) -> ThreadingHTTPServer:
    """A server on 127.0.0.1 alone, at any free port for 0. `/data.json` is the data, all else the page.

    Raises:
        PipelineError: the port cannot be had, or plotly is not installed.
    """
    plotly_source()  # a missing package ends the command, not each request
    made_of, made = object(), ""

    def data() -> str:
        nonlocal made_of, made
        files = [run / name for run in runs for name in (METRICS_FILE, "summary.json", "logs/rank00000.log")]
        stats = [file.stat() for file in files if file.exists()]  # one changes with whatever is new
        if (stamp := [(each.st_size, each.st_mtime_ns) for each in stats]) != made_of:
            made, made_of = encode(runs, live=True), stamp
        return made

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            code, kind = 200, "text/plain"
            try:
                # A page of another site may have its own name point here; it may not read what is served.
                if urlsplit(f"//{self.headers.get('Host', '')}").hostname not in ("127.0.0.1", "localhost"):
                    code, text = 403, "this report is for 127.0.0.1"
                elif self.path == "/data.json":
                    text = data()
                else:
                    text, kind = render(data()), "text/html"
            except PipelineError as error:
                code, text = 500, str(error)
            self.send_response(code)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *arguments: Any) -> None:
            """Nothing: a line every few seconds."""

    try:
        return ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except (OSError, OverflowError) as error:
        raise PipelineError(f"--port {port}: {error}; give another one, or 0 for any") from None
