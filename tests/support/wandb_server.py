"""Starts the stand-in for the W&B backend, and reads what a client sent to it or wrote offline."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from support.rank_pool import free_port

STANDIN = Path(__file__).parent / "wandb_standin.py"
KEY = {"WANDB_API_KEY": "k" * 40}


class WandbServer:
    """Runs the stand-in in a separate process, on a free loopback port.

    Args:
        folder: Folder in which the stand-in stores all that it receives.
        port: Port; `None`: a free one.
    """

    def __init__(self, folder: Path, port: int | None = None):
        self.folder = folder
        self.port = port or free_port()
        self.start()

    def start(self) -> None:
        """Start the server; after a kill, it goes on with the data in its folder."""
        folder = self.folder
        self.process = subprocess.Popen([sys.executable, str(STANDIN), str(self.port), str(folder)])
        deadline = time.monotonic() + 200
        while socket.socket().connect_ex(("127.0.0.1", self.port)) and time.monotonic() < deadline:
            time.sleep(0.05)

    def __enter__(self) -> WandbServer:
        return self

    def __exit__(self, *raised: object) -> None:
        self.process.kill()
        self.process.wait()

    @property
    def url(self) -> str:
        """Address of the server."""
        return f"http://127.0.0.1:{self.port}"

    def runs(self) -> dict:
        """Return configuration, summary, exit code and alerts of each run, by run id."""
        return json.loads((self.folder / "runs.json").read_text())

    def rows(self, run_id: str) -> list[dict]:
        """Return the history rows of a run."""
        return read_lines(self.folder / f"history-{run_id}.jsonl")

    def artifacts(self) -> list[dict]:
        """Return the versions of all artifacts, oldest first, each with its manifest."""
        versions = json.loads((self.folder / "artifacts.json").read_text())
        for number, version in enumerate(versions):
            path = self.folder / "files" / "artifacts" / str(number) / "wandb_manifest.json"
            version["manifest"] = json.loads(path.read_text())["contents"]
        return versions

    def calls(self) -> list[dict]:
        """Return all requests, oldest first."""
        return read_lines(self.folder / "requests.jsonl")


def read_lines(path: Path) -> list[dict]:
    """Return the objects of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def make_environment(home: Path, url: str, **more: str) -> dict[str, str]:
    """Return this process's environment for a client of the stand-in.

    It has no W&B variables of the user, and the home folder has no key, netrc or settings.
    """
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}
    return inherited | {"HOME": str(home), "NETRC": str(home / "netrc"), "WANDB_BASE_URL": url} | more


def read_run_id(folder: Path) -> str:
    """Return the W&B id of the run in this directory."""
    return (folder / "wandb_run_id").read_text().strip()


def read_offline_rows(folder: Path) -> list[dict]:
    """Return the rows of offline files, as `wandb sync` would send them; wandb's own reader reads them."""
    rows = []
    for path in sorted((folder / "wandb").glob("offline-run-*/run-*.wandb")):
        wandb = Path(sys.executable).with_name("wandb")
        command = [str(wandb), "leet", "inspect", "--json", str(path)]
        records = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        items = [json.loads(line) for line in records]
        rows += [item["history"]["item"] for item in items if item["type"] == "history"]
    return rows
