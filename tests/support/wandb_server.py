"""The stand-in for the W&B backend, in a process of its own on a free loopback port."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from pathlib import Path

from support.ranks import free_port

STANDIN = Path(__file__).parent / "wandb_standin.py"


class Server:
    """The stand-in in a process of its own."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.port = free_port()
        self.start()

    def start(self) -> None:
        """Also again, with what it has kept."""
        folder = self.folder
        self.process = subprocess.Popen([sys.executable, str(STANDIN), str(self.port), str(folder)])
        deadline = time.monotonic() + 200
        while socket.socket().connect_ex(("127.0.0.1", self.port)) and time.monotonic() < deadline:
            time.sleep(0.05)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def runs(self) -> dict:
        return json.loads((self.folder / "runs.json").read_text())

    def rows(self, run_id: str) -> list[dict]:
        return read_lines(self.folder / f"history-{run_id}.jsonl")

    def calls(self) -> list[dict]:
        return read_lines(self.folder / "requests.jsonl")


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]
