"""No process ends without a word on its own stderr; a closed terminal is a stop with a checkpoint."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.launch import ROOT, TRAIN, make_environment, start, write_recipe
from support.rank_pool import free_port

from pipeline.distributed.signals import STOP_SIGNALS, raise_on_stop_signals
from pipeline.errors import Terminated

PATIENCE = 200


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_before_training_is_told(number):
    signal.signal(number, signal.SIG_DFL)  # SIGHUP is ignored where the tests run under nohup

    def receive():
        with raise_on_stop_signals():
            os.kill(os.getpid(), number)

    with pytest.raises(Terminated) as caught:
        receive()
    assert caught.value.exit_code == 128 + number
    assert signal.getsignal(number) == signal.SIG_DFL


def test_what_is_ignored_stays_ignored_and_children_end_as_ever():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with raise_on_stop_signals():
            os.kill(os.getpid(), signal.SIGHUP)
            child = os.fork()
            if child == 0:
                os.kill(os.getpid(), signal.SIGTERM)
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


LEAVE = """
from pipeline.distributed.signals import detach_closed_terminal as leave
leave(); print('here', flush=True); sys.stdin.readline(); leave(); print('there', flush=True)
"""
ROWS = """
from pipeline.monitoring.trackers.console import ConsoleTracker
tracker = ConsoleTracker(9); row = {'train/loss': 1.0, 'eval/loss': 1.0}
tracker.write(1, row); sys.stdin.readline(); tracker.write(2, row); tracker.write(3, row); tracker.close(0)
"""


@pytest.mark.parametrize(
    ("words", "opened"),
    [
        pytest.param(LEAVE, pty.openpty, id="terminal"),
        pytest.param(LEAVE, os.pipe, id="pipe"),
        # The launcher gets the SIGHUP, and passes it on: a rank may print before.
        pytest.param(ROWS, pty.openpty, id="a row", marks=pytest.mark.slow),
    ],
)
def test_what_is_printed_where_nobody_reads_is_no_error(words, opened):
    outside, inside = opened()
    child = subprocess.Popen(
        [sys.executable, "-c", "import sys" + words],
        stdin=subprocess.PIPE,
        stdout=inside,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        env=make_environment(TERM="xterm"),
    )
    os.close(inside)
    shown = b""
    while not re.search(rb"here\r?\n|eval", shown):
        shown += os.read(outside, 100)
    os.close(outside)
    said = child.communicate(b"\n", timeout=PATIENCE)[1]
    assert child.returncode == 0, said.decode()


def start_rank(folder, rank, local_rank=0, **changes):
    """A rank of two, alone on its machine, with streams of its own; and the file of its stderr."""
    place = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1 + local_rank}
    recipe = write_recipe(
        folder,
        model={"kind": "support.faults:faulty", "args": {"fault": "none", "rank": 0}},
        data={"kind": "support.faults:points"},
        objective={"kind": "classification"},
        distributed={"timeout_seconds": 5},
    )
    variables = place | {"PYTHONPATH": ROOT / "tests"} | changes
    errors = folder / f"{local_rank}-of-{rank}.txt"
    extra = {name: str(value) for name, value in variables.items()}
    return start("--config", str(recipe), output=Path(os.devnull), errors=errors, **extra), errors


@pytest.mark.slow
def test_each_rank_says_why_it_ends(tmp_path):
    """A master that nobody can find, one that cannot be reached, and a rank whose peer does not come."""
    port = free_port()
    unknown = start_rank(tmp_path, 1, MASTER_ADDR="nowhere.invalid", MASTER_PORT=port)
    second = start_rank(tmp_path, 1, local_rank=1, MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port())
    alone = start_rank(tmp_path, 0, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    expected = {
        unknown: f"rank 1 on .* does not reach the master, nowhere.invalid:{port}",
        second: "rank 1 on .* does not reach the master, 127.0.0.1",
        alone: "rank 1 of 2 has not joined",
    }
    for (process, errors), words in expected.items():
        assert process.wait(PATIENCE) == 2
        said = errors.read_text()
        last = said.splitlines()[-1]
        assert last.startswith("error: "), said
        assert re.search(words, last), said


@pytest.mark.slow
@pytest.mark.daily("python", "multi_gpu.sh")
@pytest.mark.parametrize(
    "words",
    [[sys.executable, TRAIN], ["launch/multi_gpu.sh", "--num_gpus", "2"]],
    ids=["python", "multi_gpu.sh"],
)
def test_a_closed_terminal_is_a_stop_with_a_checkpoint(tmp_path, words):
    """The terminal hangs up, as sshd makes it when the connection is gone."""
    recipe = write_recipe(
        tmp_path,
        max_steps=100_000,
        model={"kind": "multinode.paced:paced", "args": {"seconds": 0.05, "folder": str(tmp_path)}},
        data={"kind": "support.faults:points"},
        objective={"kind": "classification"},
        checkpoint={"every": 100_000},
    )
    run = tmp_path / "run"
    split = ["--deepspeed", str(ROOT / "ds_configs" / "zero1.json")] if "launch" in words[0] else []
    outside, inside = pty.openpty()
    process = subprocess.Popen(
        ["setsid", "--ctty", "--wait", *words, *split, "--config", str(recipe), f"run_dir={run}"],
        cwd=ROOT,
        env=make_environment(PYTHONPATH=str(ROOT / "tests"), TERM="xterm"),
        stdin=inside,
        stdout=inside,
        stderr=inside,
    )
    os.close(inside)
    os.set_blocking(outside, False)
    shown = b""
    deadline = time.monotonic() + PATIENCE
    rows = run / "metrics.jsonl"
    while not (rows.exists() and rows.read_text().count("\n") > 5):
        assert process.poll() is None, shown.decode()
        assert time.monotonic() < deadline, shown.decode()
        try:
            shown += os.read(outside, 1 << 16)
        except BlockingIOError:  # nothing new
            time.sleep(0.05)
    os.close(outside)
    assert process.wait(PATIENCE) == 128 + signal.SIGHUP
    (saved,) = (run / "checkpoints").glob("step-*")
    assert (saved / "manifest.json").exists()


RANK = """
import signal, time
from pipeline.distributed.signals import stop_with_launcher
from pipeline.distributed.ranks import Ranks

def stop(number, frame):
    print("stopped", flush=True)
    raise SystemExit

signal.signal(signal.SIGTERM, stop)
stop_with_launcher(Ranks(0, 0, 1, 1), check_seconds=0.02)
print("watching", flush=True)
time.sleep({seconds})
"""
LAUNCHER = """
import os, subprocess, sys
print(os.getpid(), flush=True)
subprocess.run(sys.argv[2:])
"""


def chain(folder, top="deepspeed", seconds=600.0):
    """`deepspeed` -> launch.py -> a rank, by their command lines; the first, and the pids of two."""
    launcher = folder / top
    launcher.write_text(LAUNCHER)
    rank = [sys.executable, "-c", RANK.format(seconds=seconds)]
    middle = [sys.executable, "-c", LAUNCHER, "deepspeed.launcher.launch", *rank]
    process = subprocess.Popen(
        [sys.executable, str(launcher), "-", *middle],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"LOCAL_RANK": "0"},
    )
    pids = [int(process.stdout.readline()) for _ in range(2)]
    assert process.stdout.readline() == "watching\n"
    return process, pids


@pytest.mark.parametrize("which", [0, 1])
def test_a_rank_stops_when_a_launcher_above_it_is_killed(tmp_path, which):
    process, pids = chain(tmp_path)
    os.kill(pids[which], signal.SIGKILL)
    assert process.stdout.read() == "stopped\n"  # to the end: nobody holds the pipe any more
    process.wait()


def test_a_launcher_outlives_the_shell_it_was_started_from(tmp_path):
    process, pids = chain(tmp_path, top="shell", seconds=0.3)
    os.kill(pids[0], signal.SIGKILL)
    assert process.stdout.read() == ""
    process.wait()


def test_without_a_launcher_nothing_is_watched():
    left = {name: value for name, value in os.environ.items() if name != "LOCAL_RANK"}
    code = RANK.format(seconds=0) + "import threading\nassert threading.active_count() == 1"
    subprocess.run([sys.executable, "-c", code], env=left, check=True, stdout=subprocess.DEVNULL)
