"""Weights & Biases, the real client against a server on this machine: exactly once, never in the way."""

import json
import math
import os
import pty
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from monitoring.trackers import wandb_program
from support.wandb_server import KEY, WandbServer, make_environment, read_offline_rows, read_run_id

pytestmark = pytest.mark.slow


def run(folder: Path, env: dict[str, str], *end: list, start=0, last=12, mode="auto") -> list[str]:
    """Rows to the step `last`, then what `end` says; the lines about W&B."""
    words = ["rows", start + 1, last, 0], *end
    said = wandb_program.run(folder, env, start, *words, mode=mode, tags=["t"])
    return [line for line in said.splitlines() if "W&B" in line]


def check_rows(rows: list[dict], last: int) -> None:
    """Steps 1 to `last`, each once and in order, with its own numbers; evaluation merged into its step."""
    assert [row["_step"] for row in rows] == list(range(1, last + 1))
    assert [row["train/loss"] for row in rows] == [step / 7 for step in range(1, last + 1)]
    assert {row["_step"]: row["eval/loss"] for row in rows if "eval/loss" in row} == {
        step: step / 9 for step in range(5, last + 1, 5)
    }


def test_every_row_arrives_exactly_once_from_one_run(tmp_path: Path, server: WandbServer):
    (said,) = run(tmp_path / "trial-1", make_environment(tmp_path, server.url, **KEY))
    ((name, kept),) = server.runs().items()
    assert name == read_run_id(tmp_path / "trial-1")
    check_rows(server.rows(name), last=12)
    assert math.isnan(server.rows(name)[0]["train/grad_norm"])
    assert (kept["displayName"], kept["groupName"], kept["tags"]) == ("trial-1", "trial", ["t"])
    assert json.loads(kept["config"])["seed"]["value"] == 7
    assert (kept["project"], kept["exitcode"]) == ("deepspeed-pipeline", 0)
    assert not [call for call in server.calls() if call.get("GAP")]
    assert server.url in said
    assert {item.name for item in tmp_path.iterdir()} <= {"trial-1", "server", ".cache"}


def test_offline_without_a_key_says_once_how_to_upload(tmp_path: Path, server: WandbServer):
    folder = tmp_path / "trial-1"
    (said,) = run(folder, make_environment(tmp_path, server.url))
    check_rows(read_offline_rows(folder), last=12)
    assert not (server.folder / "requests.jsonl").exists()
    assert "no API key" in said
    assert re.search(r"wandb sync \S*/trial-1/wandb/offline-run-\S+$", said)
    sync([said], make_environment(tmp_path, server.url, **KEY), tmp_path)
    check_rows(server.rows(read_run_id(folder)), last=12)


def test_a_terminal_is_never_asked_for_a_key(tmp_path: Path):
    ours, theirs = pty.openpty()
    env = make_environment(tmp_path, "http://127.0.0.1:9")
    command = wandb_program.command(tmp_path / "trial-1", 0, ["rows", 1, 2, 0], mode="online")
    done = subprocess.run(
        command, env=env, cwd=tmp_path, stdin=theirs, stdout=theirs, stderr=theirs, timeout=300, check=True
    )
    printed = os.read(ours, 65536).decode()
    os.close(ours)
    os.close(theirs)
    assert done.returncode == 0
    assert "W&B is offline (no API key for http://127.0.0.1:9)" in printed


@pytest.mark.daily("offline-auto-offline")
@pytest.mark.parametrize(
    ("variable", "mode", "expected"),
    [
        ("offline", "auto", "offline"),  # WANDB_MODE wins over auto,
        ("shared", "auto", "online"),
        ("offline", "online", "online"),  # and not over a recipe that says what it wants
        ("disabled", "auto", "disabled"),
        ("nonsense", "auto", "disabled"),
    ],
)
def test_wandb_mode_of_the_environment(tmp_path: Path, server: WandbServer, variable, mode, expected):
    folder = tmp_path / "trial-1"
    env = make_environment(tmp_path, server.url, WANDB_MODE=variable, **KEY)
    said = run(folder, env, mode=mode)
    assert bool(list(folder.glob("wandb/offline-run-*"))) == (expected == "offline")
    assert (server.folder / "runs.json").exists() == (expected == "online")
    is_overridden = mode == "online"  # a line more
    assert len(said) == (0 if variable == "disabled" else 1 + is_overridden)
    if variable == "shared":
        check_rows(server.rows(read_run_id(folder)), last=12)
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 14


@pytest.mark.nightly
@pytest.mark.parametrize(("key", "said"), [("short", "40"), ("wrong" * 8, "401")])
def test_a_key_in_netrc_is_found_and_a_bad_key_goes_offline(tmp_path: Path, server: WandbServer, key, said):
    if key == "short":
        netrc = f"machine 127.0.0.1:{server.port} login user password {'n' * 40}\n"
        (tmp_path / "netrc").write_text(netrc)
        (tmp_path / "netrc").chmod(0o600)
        run(tmp_path / "trial-1", make_environment(tmp_path, server.url))
        check_rows(server.rows(read_run_id(tmp_path / "trial-1")), last=12)
    (line,) = run(tmp_path / "trial-2", make_environment(tmp_path, server.url, WANDB_API_KEY=key))
    assert "W&B is offline" in line
    assert said in line
    check_rows(read_offline_rows(tmp_path / "trial-2"), last=12)


def test_resume_after_a_kill_has_every_row_exactly_once(tmp_path: Path, server: WandbServer):
    folder = tmp_path / "trial-1"
    env = make_environment(tmp_path, server.url, **KEY)
    run(folder, env, ["kill"], last=12)  # wandb loses what it had not sent: here, all
    first_id = read_run_id(folder)
    run(folder, env, start=10, last=16)
    run(folder, env, start=16, last=21)  # from where the server stands
    run(folder, env, start=19, last=24)  # from before: the server keeps its 20 and 21
    assert read_run_id(folder) == first_id
    assert list(server.runs()) == [first_id]
    check_rows(server.rows(first_id), last=24)


@pytest.mark.nightly
def test_a_step_whose_evaluation_is_still_to_come_is_not_closed_by_a_stop(
    tmp_path: Path, server: WandbServer
):
    folder = tmp_path / "trial-1"
    env = make_environment(tmp_path, server.url, **KEY)
    run(folder, env, ["close", 138], last=10)
    assert [row["_step"] for row in server.rows(read_run_id(folder))] == list(range(1, 10))
    rows = (folder / "metrics.jsonl").read_text().splitlines()
    assert '"eval/loss"' in rows.pop()
    (folder / "metrics.jsonl").write_text("\n".join(rows) + "\n")  # as if the stop had come before it
    wandb_program.run(folder, env, 10, ["eval", 10], ["rows", 11, 16, 0])
    check_rows(server.rows(read_run_id(folder)), last=16)


def sync(said: list[str], env: dict[str, str], folder: Path) -> None:
    """Runs the command that the run named."""
    (line,) = (line for line in said if "to upload: " in line)
    command = [*shlex.split(line.partition("to upload: ")[2]), "--yes"]
    command[0] = str(Path(sys.executable).with_name(command[0]))
    subprocess.run(command, env=env, cwd=folder, capture_output=True, timeout=300, check=True)


@pytest.mark.nightly
@pytest.mark.parametrize("synced_between", [False, True])
def test_resume_offline_writes_new_rows_only_and_all_are_uploaded_once(tmp_path, server, synced_between):
    folder = tmp_path / "trial-1"
    env = make_environment(tmp_path, server.url)
    online = make_environment(tmp_path, server.url, **KEY)
    first = run(folder, env, ["flushed"], last=12)
    kept = folder.joinpath("wandb_run_id").read_text()
    if synced_between:
        sync(first, online, tmp_path)
    run(folder, env, ["kill"], start=10, last=16)  # which may leave a file without a row
    last = run(folder, env, start=10, last=21)
    check_rows(read_offline_rows(folder), last=21)
    assert len(list(folder.glob("wandb/**/offline-run-*"))) == 3
    assert folder.joinpath("wandb_run_id").read_text() == kept
    sync(last, online, tmp_path)
    check_rows(server.rows(read_run_id(folder)), last=21)


@pytest.mark.daily("SIGSTOP")
@pytest.mark.parametrize("signal_name", ["SIGKILL", "SIGSTOP"])
def test_server_gone_in_mid_run_does_not_hold_up_the_end(
    tmp_path: Path, server: WandbServer, signal_name: str
):
    env = make_environment(tmp_path, server.url, **KEY)
    began = time.monotonic()
    said = run(tmp_path / "trial-1", env, ["signal", signal_name, server.process.pid], ["rows", 13, 30, 0])
    assert time.monotonic() - began < 200, "wandb would wait for ever; at the interpreter's exit, too"
    assert "within 8 s; metrics.jsonl has them all" in said[-1]
    # The command that is named uploads them, once the server is there again.
    server.process.kill()
    server.start()
    command = shlex.split(said[-1].partition("to upload them: ")[2])
    command[0] = str(Path(sys.executable).with_name(command[0]))
    subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, timeout=300, check=True)
    arrived = server.rows(read_run_id(tmp_path / "trial-1"))
    assert {row["_step"]: row["train/loss"] for row in arrived} == {step: step / 7 for step in range(1, 31)}
    assert len((tmp_path / "trial-1" / "metrics.jsonl").read_text().splitlines()) == 36


def test_death_of_wandbs_own_process_is_one_line(tmp_path: Path, server: WandbServer):
    env = make_environment(tmp_path, server.url, **KEY)
    said = wandb_program.run(tmp_path / "trial-1", env, 0, ["rows", 1, 2, 0], ["core"], ["rows", 3, 12, 0])
    lines = [line for line in said.splitlines() if "W&B" in line]
    assert len(lines) == 2
    assert "training continues without it" in lines[1]
    assert len((tmp_path / "trial-1" / "metrics.jsonl").read_text().splitlines()) == 14


def test_death_of_wandbs_own_process_in_a_stop_is_no_warning_and_the_resume_sends_its_rows(tmp_path, server):
    """DeepSpeed's launcher passes Ctrl-C on as a SIGTERM to every process below it."""
    folder = tmp_path / "trial-1"
    env = make_environment(tmp_path, server.url, **KEY)
    said = run(folder, env, ["core"], ["close", 130], last=7)
    assert said[1:] == ["LOG W&B ended before the run; a resumed run sends the rows that W&B lacks"]
    run(folder, env, start=7)
    check_rows(server.rows(read_run_id(folder)), last=12)


def test_histograms_go_with_the_row_of_their_step(tmp_path: Path, server: WandbServer):
    folder = tmp_path / "trial-1"
    env = make_environment(tmp_path, server.url, **KEY)
    shown = [["rows", 1, 4, 0], ["histograms", 4, [3, 0, 2]], ["rows", 5, 6, 0]]
    wandb_program.run(folder, env, 0, *shown, ["histograms", 5, [9, 9]], ["histograms", 6, [1]])
    drawn = {row["_step"]: row for row in server.rows(read_run_id(folder)) if "parameters/w" in row}
    assert list(drawn) == [4, 6], "that of 5 came when its row was sent"
    histogram = {"_type": "histogram", "values": [3, 0, 2], "bins": [0.0, 1.0, 2.0, 3.0]}
    assert drawn[4]["parameters/w"] == histogram
    assert drawn[4]["gradients/w"] == histogram | {"values": [6, 0, 4]}


def test_documents_of_tasks_are_a_bounded_table_with_the_row_of_their_step(
    tmp_path: Path, server: WandbServer
):
    folder = tmp_path / "trial-1"
    env = make_environment(tmp_path, server.url, **KEY)
    shown = [["rows", 1, 5, 0], ["tasks", 5], ["rows", 6, 7, 0], ["tasks", 5]]
    wandb_program.run(folder, env, 0, *shown)
    rows = [row for row in server.rows(read_run_id(folder)) if "tasks" in row]
    assert [row["_step"] for row in rows] == [5]
    assert rows[0]["tasks"]["_type"] == "table-file"
    content = json.loads(
        (server.folder / "files" / read_run_id(folder) / rows[0]["tasks"]["path"]).read_text()
    )
    assert content["columns"] == ["task", "document", "prompt", "target", "answer", "score"]
    assert content["data"] == [["sums", 7, "1 + 1 =", "2", "answer 5", 0.5]] * 400
    assert not [call for call in server.calls() if "Artifact" in call.get("operation", "")]


def test_what_the_model_wrote_is_a_table_over_resumes_too(tmp_path: Path, server: WandbServer):
    folder = tmp_path / "trial-1"
    env = make_environment(tmp_path, server.url, **KEY)
    wandb_program.run(folder, env, 0, ["rows", 1, 5, 0], ["sample", 5], ["rows", 6, 7, 0])
    wandb_program.run(folder, env, 7, ["rows", 8, 10, 0], ["sample", 10], ["rows", 11, 12, 0])
    rows = [row for row in server.rows(read_run_id(folder)) if "samples" in row]
    assert [row["_step"] for row in rows] == [5, 10]
    assert [row["samples"]["_type"] for row in rows] == ["table-file"] * 2
    path = server.folder / "files" / read_run_id(folder) / rows[-1]["samples"]["path"]
    assert json.loads(path.read_text())["data"] == [[5, 0, "p", "text 5"], [10, 0, "p", "text 10"]]
    assert not [call for call in server.calls() if "Artifact" in call.get("operation", "")]
