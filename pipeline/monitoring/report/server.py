"""The page served on loopback, made anew whenever the runs' files have changed."""

from __future__ import annotations

from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pipeline.errors import PipelineError
from pipeline.monitoring.report.page import encode, plotly_source, render
from pipeline.monitoring.trackers.jsonl import METRICS_FILE


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
