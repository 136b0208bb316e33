"""The stand-in for the W&B backend, in a process of its own on a free loopback port."""

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
    """The stand-in in a process of its own."""

    def __init__(self, folder: Path, port: int | None = None):
        self.folder = folder
        self.port = port or free_port()
        self.start()

    def start(self) -> None:
        """Also again, with what it has kept."""
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
        return f"http://127.0.0.1:{self.port}"

    def runs(self) -> dict:
        return json.loads((self.folder / "runs.json").read_text())

    def rows(self, run_id: str) -> list[dict]:
        return read_lines(self.folder / f"history-{run_id}.jsonl")

    def artifacts(self) -> list[dict]:
        """Versions, oldest first, each with its manifest."""
        kept = json.loads((self.folder / "artifacts.json").read_text())
        for number, each in enumerate(kept):
            path = self.folder / "files" / "artifacts" / str(number) / "wandb_manifest.json"
            each["manifest"] = json.loads(path.read_text())["contents"]
        return kept

    def calls(self) -> list[dict]:
        return read_lines(self.folder / "requests.jsonl")


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def make_environment(home: Path, url: str, **more: str) -> dict[str, str]:
    """This process's, without anything of the user's own W&B: no key, no netrc, no settings."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}
    return kept | {"HOME": str(home), "NETRC": str(home / "netrc"), "WANDB_BASE_URL": url} | more


def read_run_id(folder: Path) -> str:
    return (folder / "wandb_run_id").read_text().strip()


def read_offline_rows(folder: Path) -> list[dict]:
    """The rows of the offline files that `wandb sync` would send, read back with wandb's own reader."""
    found = []
    for path in sorted((folder / "wandb").glob("offline-run-*/run-*.wandb")):
        wandb = Path(sys.executable).with_name("wandb")
        command = [str(wandb), "leet", "inspect", "--json", str(path)]
        records = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        items = [json.loads(line) for line in records]
        found += [item["history"]["item"] for item in items if item["type"] == "history"]
    return found
