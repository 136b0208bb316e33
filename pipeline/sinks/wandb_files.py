"""W&B's own files of a run that the server has not got: which there are, and their upload."""

from __future__ import annotations

import base64
import contextlib
import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import PipelineError, one_line

SECONDS = 10.0
NOT_UPLOADED = "not_uploaded"
"""Beside the file of an online run that ended before the server had taken all of it."""


@dataclass(frozen=True)
class WandbFile:
    """A folder that W&B wrote in one start of a run."""

    folder: Path
    num_rows: int
    steps: tuple[int, int] | None
    """The first and the last global step; None: it has no row, and nothing to upload."""
    is_uploaded: bool


def files_to_upload(run_dir: Path) -> list[WandbFile]:
    """In the order of their starts. Those that a later start stands for are not among them."""
    folders = list(run_dir.glob("wandb/offline-run-*"))
    folders += [path.parent for path in run_dir.glob(f"wandb/run-*/{NOT_UPLOADED}")]
    return [_read(folder) for folder in sorted(folders, key=lambda path: path.name.partition("run-")[2])]


def rows_of(folder: Path) -> Iterator[dict[str, Any]]:
    """What W&B's file in a folder has of the history: `step` is W&B's own, `item` has the metrics."""
    # wandb's own reader, a line a record; each start's file has its own rows alone.
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json"]
    command += [str(path) for path in folder.glob("run-*.wandb")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as reader:
        for line in reader.stdout or ():
            if b'"type":"history"' in line:
                with contextlib.suppress(ValueError):  # of a file that ends in the middle of a record
                    row = json.loads(line)["history"]
                    yield {"step": int(row["step"]["num"]), "item": row.get("item", {})}


def check_server() -> str:
    """The server's address, once it has taken the key.

    Raises:
        PipelineError: there is no key, no server, or it does not take the key.
    """
    import wandb

    server = wandb.setup(settings=wandb.Settings(silent=True)).settings.base_url
    try:
        has_key = wandb.login(prompt=False, verify=False)
    except wandb.Error as error:
        raise PipelineError(f"{server} cannot be used: {one_line(error)}") from None
    if not has_key:
        raise PipelineError(f"no API key for {server}: run `wandb login`, or set WANDB_API_KEY")
    # Asked here, in one call: wandb itself tries again for minutes, and says nothing meanwhile.
    key = base64.b64encode(f"api:{wandb.setup().settings.api_key}".encode()).decode()
    headers = {"Authorization": f"Basic {key}", "Content-Type": "application/json"}
    question = json.dumps({"query": "query Viewer { viewer { id } }", "variables": {}}).encode()
    try:
        request = urllib.request.Request(f"{server}/graphql", question, headers)
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            is_known = json.load(answer)["data"]["viewer"] is not None
    except urllib.error.HTTPError as error:
        if error.code not in (401, 403):
            raise PipelineError(f"{server} does not answer as W&B does: {one_line(error)}") from None
        is_known = False
    except OSError as error:
        raise PipelineError(
            f"{server} is not there ({one_line(error)}); the files stay as they are"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise PipelineError(f"{server} does not answer as W&B does: {one_line(error)}") from None
    if not is_known:
        raise PipelineError(f"{server} does not take the API key: run `wandb login --relogin`")
    return str(server)


def upload(files: Sequence[WandbFile]) -> None:
    """Send the files of one run, in order, and remember that they were sent.

    Raises:
        PipelineError: some of it was not taken; what was stays there, and a second call sends the rest.
    """
    folders = [file.folder for file in files]
    command = [sys.executable, "-m", "wandb", "sync", "--yes", "--include-online", *map(str, folders)]
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    left = [folder for folder in folders if not _is_uploaded(folder)]
    if done.returncode or left:
        said = done.stdout.strip().splitlines() or ["it said nothing"]
        raise PipelineError(f"{left[0] if left else folders[0]} was not uploaded: wandb sync: {said[-1]}")
    for folder in folders:
        (folder / NOT_UPLOADED).unlink(missing_ok=True)


def _read(folder: Path) -> WandbFile:
    steps = [int(row["item"].get("global_step", row["step"])) for row in rows_of(folder)]
    bounds = (min(steps), max(steps)) if steps else None
    return WandbFile(folder, len(steps), bounds, _is_uploaded(folder))


def _is_uploaded(folder: Path) -> bool:
    """By the mark of wandb itself."""
    return any(folder.glob("run-*.wandb.synced"))
