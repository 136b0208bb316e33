"""`sync` lists what W&B has not got, uploads it once and in order, and says what is in the way."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock
from support.ranks import free_port
from support.wandb_program import run
from support.wandb_server import KEY, Server, environment, run_id


def sync(folder: Path, env: dict[str, str], *words: str) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "pipeline", "sync", *words]
    done = subprocess.run(
        command,
        cwd=folder,
        env=env | {"COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_offline_runs_are_listed_and_uploaded_once(tmp_path: Path):
    runs = tmp_path / "runs"
    runs.mkdir()
    url = f"http://127.0.0.1:{free_port()}"
    offline = environment(tmp_path, url)
    run(runs / "a-1", offline, 0, ["rows", 1, 12, 0], ["back", 8, 12], ["rows", 9, 10, 1])
    run(runs / "a-1", offline, 10, ["rows", 11, 14, 1])
    run(runs / "b-1", offline, 0, ["rows", 1, 3, 0])
    code, out, err = sync(tmp_path, offline)
    assert (code, err) == (0, "")
    lines = [line for line in out.splitlines() if "offline-run" in line]
    assert [line.split()[1:] for line in lines] == [
        ["14", "1", "to", "12", "to", "upload"],
        ["4", "11", "to", "14", "to", "upload"],
        ["3", "1", "to", "3", "to", "upload"],
    ]
    assert "--upload" in out

    code, out, err = sync(tmp_path, offline, "--upload")
    assert code == 2
    assert err.startswith(f"error: no API key for {url}")
    code, out, err = sync(tmp_path, offline | KEY, "--upload")
    assert code == 2
    assert err.startswith(f"error: {url} is not there")
    assert len(err.splitlines()) == 1

    server = Server(tmp_path / "server", port=int(url.rpartition(":")[2]))
    try:
        with FileLock(runs / "b-1" / ".lock"):
            code, out, err = sync(tmp_path, offline | KEY, "--upload")
        assert (code, err) == (0, "")
        assert "in training" in out
        assert "runs/a-1: 18 rows uploaded" in out
        assert list(server.runs()) == [run_id(runs / "a-1")]
        code, _, err = sync(tmp_path, offline | {"WANDB_API_KEY": "wrong" * 8}, "--upload")
        assert code == 2
        assert err.startswith(f"error: {url} does not take the API key")
        code, out, err = sync(tmp_path, offline | KEY, "--upload", "runs/a-1", "runs/b-1")
        assert out.count(" rows uploaded") == 1
        steps = [row["global_step"] for row in server.rows(run_id(runs / "a-1"))]
        assert steps == [*range(1, 13), *range(9, 15)]
        assert [row["global_step"] for row in server.rows(run_id(runs / "b-1"))] == [1, 2, 3]
    finally:
        server.process.kill()
        server.process.wait()


def test_nothing_to_upload(tmp_path: Path):
    assert sync(tmp_path, environment(tmp_path, "http://127.0.0.1:9")) == (
        0,
        "nothing to upload: no run was offline\n",
        "",
    )
    code, _, err = sync(tmp_path, environment(tmp_path, "http://127.0.0.1:9"), "elsewhere")
    assert code == 2
    assert err == "error: elsewhere holds nothing of Weights & Biases; expected a run directory\n"
