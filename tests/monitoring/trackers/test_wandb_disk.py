"""The disk of W&B's files is full: one line, training goes on, and W&B is filled up once there is room."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from monitoring.trackers.wandb_program import run
from support.wandb_server import KEY, WandbServer, make_environment, read_offline_rows, read_run_id

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="a file system is mounted by root alone"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A run directory whose `wandb` is a disk of 16 MiB."""
    folder = tmp_path / "trial-1"
    disk = folder / "wandb"
    disk.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(disk)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount")
    yield folder
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def losses(rows: list[dict]) -> dict[int, float]:
    assert [row["global_step"] for row in rows] == sorted({row["global_step"] for row in rows})
    return {row["global_step"]: row["train/loss"] for row in rows}


def expected(last: int) -> dict[int, float]:
    return {step: step / 7 for step in range(1, last + 1)}


def told(said: str) -> list[str]:
    return [line for line in said.splitlines() if "W&B" in line and "MiB left" in line]


@pytest.mark.daily("online")
@pytest.mark.parametrize("is_online", [True, False], ids=["online", "offline"])
def test_it_fills_up_in_the_run(tmp_path: Path, folder: Path, server: WandbServer, is_online: bool):
    env = make_environment(tmp_path, server.url, **(KEY if is_online else {}))
    (line,) = told(run(folder, env, 0, ["rows", 1, 10, 0], ["fill"], ["rows", 11, 400, 0]))
    found = re.search(r"W&B gets no more rows from step (\d+) on", line)
    assert found
    assert int(found[1]) <= 10  # its thread may be behind
    assert "metrics.jsonl has them all" in line
    assert (folder / "metrics.jsonl").read_text().count("train/loss") == 400
    (folder / "wandb" / "filler").unlink()
    assert told(run(folder, env, 400, ["rows", 401, 410, 0])) == []
    rows = server.rows(read_run_id(folder)) if is_online else read_offline_rows(folder)
    assert losses(rows) == expected(410), "each row once, in order"


@pytest.mark.nightly
def test_it_is_full_from_the_start(tmp_path: Path, folder: Path, server: WandbServer):
    (folder / "wandb" / "filler").write_bytes(bytes(12 * 2**20))
    env = make_environment(tmp_path, server.url, **KEY)
    (line,) = told(run(folder, env, 0, ["rows", 1, 10, 0]))
    assert "W&B is left out" in line
    assert (folder / "metrics.jsonl").read_text().count("train/loss") == 10
    (folder / "wandb" / "filler").unlink()
    run(folder, env, 10, ["rows", 11, 12, 0])
    assert losses(server.rows(read_run_id(folder))) == expected(12)
