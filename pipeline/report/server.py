"""The page served on loopback, made anew whenever the runs' files have changed."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from pipeline.errors import PipelineError
from pipeline.report.page import encode, page_data, render, stamp
from pipeline.report.runs import read_run


class LiveReport(ThreadingHTTPServer):
    """`/` is the page, `/data.json?seen=VERSION` its data, or 204 where VERSION is still what there is."""

    daemon_threads = True

    def __init__(self, runs: Sequence[Path], port: int):
        """Listens, on 127.0.0.1 alone.

        Args:
            port: 0: any that is free.

        Raises:
            PipelineError: the port cannot be had.
        """
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except OSError as error:
            raise PipelineError(f"--port {port}: {error.strerror}; give another one, or 0 for any") from None
        self._runs = runs
        self._made_of: object = None
        self._data: dict[str, Any] = {}
        self._lock = threading.Lock()

    @property
    def address(self) -> str:
        """What a browser is given."""
        return f"http://127.0.0.1:{self.server_address[1]}/"

    def data(self) -> dict[str, Any]:
        """Of the page, as the files are now."""
        with self._lock:
            if (made_of := stamp(self._runs)) != self._made_of:
                self._data = page_data([read_run(run) for run in self._runs], live=True)
                self._data["version"] = hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]
                self._made_of = made_of
            return self._data


class _Handler(BaseHTTPRequestHandler):
    server: LiveReport

    def do_GET(self) -> None:
        place = urlsplit(self.path)
        # A page of another site may have its own name point here; it may not read what is served.
        if urlsplit(f"//{self.headers.get('Host', '')}").hostname not in ("127.0.0.1", "localhost"):
            self._answer(403, "this report is for 127.0.0.1")
        elif place.path not in ("/", "/data.json"):
            self._answer(404, "there is / and /data.json")
        else:
            try:
                data = self.server.data()
            except PipelineError as error:
                self._answer(500, str(error))
                return
            if place.path == "/":
                self._answer(200, render(data), "text/html; charset=utf-8")
            elif parse_qs(place.query).get("seen") == [data["version"]]:
                self._answer(204)
            else:
                self._answer(200, encode(data), "application/json")

    def _answer(self, code: int, text: str = "", kind: str = "text/plain; charset=utf-8") -> None:
        content = text.encode("utf-8", "replace")
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing: a line every few seconds."""
