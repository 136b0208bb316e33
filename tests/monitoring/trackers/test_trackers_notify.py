"""Alerts to a command and a webhook: delivered, never waited for, and the address is nowhere."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from monitoring.trackers.test_trackers_composite import build, recipe
from support.launch import ROOT, launch, run_directories, write_recipe
from support.rank_pool import free_port

from pipeline.__main__ import main
from pipeline.config.schema import NotifyConfig
from pipeline.errors import ConfigError
from pipeline.monitoring.events import Event
from pipeline.monitoring.trackers import notify
from pipeline.monitoring.trackers.notify import (
    NotifyTracker,
    build_channels,
    notify_failure,
    post_json,
    run_command,
)

SECRET = "T0P-5ecret"
SPIKE = Event("loss_spike", "the loss is 9", "look at the data")
KEEPER = """
import json, os, sys
said = json.load(sys.stdin)
named = {name: value for name, value in os.environ.items() if name.startswith("PIPELINE_")}
with open(sys.argv[1], "a") as file:
    file.write(json.dumps([said, named]) + "\\n")
"""


class Server:
    """Takes what is posted; answers with a code, or not before it is let."""

    def __init__(self) -> None:
        self.code, self.posted, self.may_answer = 200, [], threading.Event()
        self.may_answer.set()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                server.posted.append((self.path, json.loads(body)))
                server.may_answer.wait(60)
                self.send_response(server.code)
                self.end_headers()

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http.server_port}/services/{SECRET}"


@pytest.fixture
def server() -> Iterator[Server]:
    standing = Server()
    yield standing
    standing.may_answer.set()
    standing.http.shutdown()
    standing.http.server_close()


def keeper(folder: Path) -> str:
    (folder / "keeper.py").write_text(KEEPER)
    return f"{sys.executable} {folder / 'keeper.py'} '{folder / 'kept by it.jsonl'}'"


def kept(folder: Path) -> list:
    return [json.loads(line) for line in (folder / "kept by it.jsonl").read_text().splitlines()]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Way:
    def __init__(self) -> None:
        self.said: list[dict] = []

    def __call__(self, said) -> None:
        self.said.append(said)


def test_both_are_given_what_happened(tmp_path, server, monkeypatch):
    monkeypatch.setenv("PIPELINE_WEBHOOK", server.url)
    run_dir = tmp_path / "tiny-1"
    run_dir.mkdir()
    config = NotifyConfig(command=keeper(tmp_path), webhook_env="PIPELINE_WEBHOOK")
    with build(run_dir, recipe(notify=config)) as trackers:
        trackers.write(7, {"train/loss": 9.0})
        trackers.tell(7, SPIKE)
    text = "tiny-1, step 7: loss_spike: the loss is 9; look at the data"
    expected = {
        "run": "tiny-1",
        "step": 7,
        "event": "loss_spike",
        "level": "warning",
        "message": "the loss is 9",
        "advice": "look at the data",
        "text": text,
        "content": text,
    }
    assert server.posted == [(f"/services/{SECRET}", expected)]
    ((said, named),) = kept(tmp_path)
    assert said == expected
    assert {name: named[name] for name in named if name != "PIPELINE_WEBHOOK"} == {
        f"PIPELINE_{key.upper()}": str(expected[key])
        for key in ("run", "step", "event", "level", "message", "advice")
    }
    for path in run_dir.rglob("*"):
        assert path.is_dir() or SECRET.encode() not in path.read_bytes()


@pytest.mark.parametrize(("level", "told"), [("info", 3), ("warning", 2), ("error", 1)])
def test_what_is_less_than_the_level_is_not_told(level, told):
    way = Way()
    tracker = NotifyTracker({"command": way}, level, "run")
    for each in ("info", "warning", "error"):
        tracker.tell(1, Event(each, "it happened", level=each))
    tracker.close(0)
    assert [said["event"] for said in way.said] == ["info", "warning", "error"][-told:]


def test_of_a_name_one_a_minute_is_told_with_how_many_were_held_back():
    way = Way()
    clock = Clock()
    tracker = NotifyTracker({"command": way}, "warning", "run", clock)
    for clock.now in (0.0, 1.0, 59.0, 60.0, 61.0, 130.0):
        tracker.tell(int(clock.now), SPIKE)
        tracker.tell(int(clock.now), Event(f"other_{clock.now}", "it happened"))
    tracker.close(0)
    spikes = [(said["step"], said["message"]) for said in way.said if said["event"] == "loss_spike"]
    assert spikes == [
        (0, "the loss is 9"),
        (60, "the loss is 9 (and 2 more since the last one)"),
        (130, "the loss is 9 (and 1 more since the last one)"),
    ]
    assert len(way.said) == 3 + 6


def test_one_that_does_not_answer_in_time_is_given_up(server, monkeypatch):
    monkeypatch.setattr(notify, "TIMEOUT", 0.2)
    server.may_answer.clear()
    with pytest.raises(RuntimeError, match="cannot be reached: TimeoutError"):
        post_json(server.url, {"event": "x"})


def test_what_fails_is_said_once_and_tried_again(server, caplog):
    server.code = 500
    tracker = NotifyTracker({"webhook_env": lambda said: post_json(server.url, said)}, "warning", "run")
    for number in range(3):
        tracker.tell(number, Event(f"event_{number}", "it happened"))
    tracker.close(0)
    assert len(server.posted) == 3
    lines = [each.message for each in caplog.records]
    assert lines == [
        "notify.webhook_env failed (the server answered 500); it is tried again at the next alert"
    ]


@pytest.mark.parametrize("address", ["http://127.0.0.1:{port}/{secret}", "http://{secret}.invalid/{secret}"])
def test_no_failure_repeats_the_path_of_the_address(address):
    with pytest.raises(RuntimeError) as caught:
        post_json(address.format(port=free_port(), secret=SECRET), {"event": "x"})
    assert f"/{SECRET}" not in str(caught.value)
    assert str(caught.value).startswith("the server cannot be reached: ")


def test_a_command_that_fails_or_hangs_is_ended_and_told(tmp_path, monkeypatch):
    with pytest.raises(RuntimeError, match="ended with exit code 3"):
        run_command([sys.executable, "-c", "raise SystemExit(3)"], {"event": "x"})
    monkeypatch.setattr(notify, "TIMEOUT", 0.5)
    started = tmp_path / "child"
    child = f"sleep 60 & echo $! > {started}; wait"
    with pytest.raises(RuntimeError, match="sh took longer than"):
        run_command(["sh", "-c", child], {"event": "x"})
    deadline = time.monotonic() + 30
    while _is_there(int(started.read_text())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _is_there(int(started.read_text()))


def _is_there(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def test_no_shell_reads_the_command(tmp_path):
    config = NotifyConfig(
        command=f"{keeper(tmp_path)} '$(touch {tmp_path}/touched)' ; touch {tmp_path}/touched"
    )
    build_channels(config)["command"]({"event": "x"})
    assert len(kept(tmp_path)) == 1
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (None, "PIPELINE_WEBHOOK is not set where the main process runs"),
        (f"hooks.example/{SECRET}", "the value of PIPELINE_WEBHOOK is not an address"),
        (f"file:///{SECRET}", "is not an address"),
        (f"https://hooks.example/{SECRET} x", "is not an address"),
        (f"https://[hooks.example/{SECRET}", "is not an address"),
    ],
)
def test_a_variable_without_an_address_is_an_error_that_does_not_repeat_it(monkeypatch, value, says):
    monkeypatch.delenv("PIPELINE_WEBHOOK", raising=False)
    if value is not None:
        monkeypatch.setenv("PIPELINE_WEBHOOK", value)
    with pytest.raises(ConfigError) as caught:
        build_channels(NotifyConfig(webhook_env="PIPELINE_WEBHOOK"))
    assert says in str(caught.value)
    assert SECRET not in str(caught.value)


def test_an_address_in_the_recipe_is_an_error_that_does_not_repeat_it():
    with pytest.raises(ValueError, match="put the address into one") as caught:
        NotifyConfig(webhook_env=f"https://hooks.example/{SECRET}")
    assert SECRET not in caught.value.errors()[0]["ctx"]["error"].args[0]


def test_a_program_that_is_not_there_is_an_error_and_no_key_tells_nobody():
    with pytest.raises(ConfigError, match="there is no program 'no-such-program' here"):
        build_channels(NotifyConfig(command="no-such-program --now"))
    assert build_channels(NotifyConfig()) == {}


def test_a_dry_run_names_a_file_that_is_not_executable(tmp_path, capsys):
    program = tmp_path / "tell.sh"
    program.write_text("#!/bin/sh\n")
    words = ["train", "--dry-run", f"notify.command={program} --now"]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said == f"error: notify.command: {program} is not executable; run: chmod +x {program}\n"
    assert main([*words, "--world-size", "2"]) == 0  # for another machine
    program.chmod(0o755)
    assert main(words) == 0


@pytest.mark.slow
def test_a_run_that_fails_says_so_and_the_address_is_in_no_file_and_no_line(tmp_path, server):
    changes = {"webhook_env": "PIPELINE_WEBHOOK", "command": keeper(tmp_path)}
    recipe = write_recipe(tmp_path, max_steps=12, optimizer={"learning_rate": 1e30}, notify=changes)
    result = launch("--config", str(recipe), PIPELINE_WEBHOOK=server.url)
    assert result.returncode == 2, result.stderr
    told = [said for _, said in server.posted]
    assert [said["event"] for said in told][-1] == "run_failed"
    assert "infinite or NaN gradient" in told[-1]["message"]
    assert told == [said for said, _ in kept(tmp_path)]
    (run,) = run_directories(tmp_path)
    assert told[-1]["run"] == run.name
    assert SECRET not in result.stdout + result.stderr
    files = [path for path in run.rglob("*") if path.is_file()]
    assert {"recipe.yaml", "metrics.jsonl", "rank00000.log"} <= {path.name for path in files}
    for path in files:
        assert SECRET.encode() not in path.read_bytes(), path
    assert json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["event"] == "run_failed"


@pytest.mark.slow
@pytest.mark.daily("kill-rank 1 on ")
@pytest.mark.parametrize(
    ("fault", "says"),
    [("raise", "[rank 1] "), ("kill", "rank 1 on ")],
)
def test_a_rank_that_fails_or_is_lost_is_told_by_whoever_says_so(tmp_path, server, fault, says):
    recipe = write_recipe(
        tmp_path,
        model={"kind": "support.faults:faulty", "args": {"fault": fault, "rank": 1, "at": 4}},
        data={"kind": "support.faults:points"},
        objective={"kind": "classification"},
        notify={"webhook_env": "PIPELINE_WEBHOOK"},
    )
    split = ["--deepspeed", str(ROOT / "ds_configs" / "torch_ddp.json")]
    extra = {"PYTHONPATH": str(ROOT / "tests"), "PIPELINE_WEBHOOK": server.url}
    result = launch("--config", str(recipe), *split, ranks=2, **extra)
    assert result.returncode != 0
    told = [said for _, said in server.posted]
    assert [said["event"] for said in told] == ["run_failed"], told  # none of a rank that lost its peer
    assert told[0]["message"].startswith(says)
    assert SECRET not in result.stdout + result.stderr


def test_a_process_that_ends_waits_for_seconds_at_the_most_and_says_nothing(server, monkeypatch, caplog):
    monkeypatch.setattr(notify, "FAILURE_TIMEOUT", 0.2)
    monkeypatch.setenv("HOOK", server.url)
    server.may_answer.clear()
    notify_failure(NotifyConfig(webhook_env="HOOK"), "run", 3, "rank 1 was lost")
    monkeypatch.delenv("HOOK")
    notify_failure(NotifyConfig(webhook_env="HOOK"), "run", 3, "rank 1 was lost")
    assert [said["message"] for _, said in server.posted] == ["rank 1 was lost"]
    assert caplog.text == ""
