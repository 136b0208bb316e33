"""A rank whose launcher is killed is told to stop, whichever of the launcher's two processes it is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

RANK = """
import signal, time
from pipeline.distributed.orphans import stop_with_launcher
from pipeline.distributed.ranks import Ranks

def stop(number, frame):
    print("stopped", flush=True)
    raise SystemExit

signal.signal(signal.SIGTERM, stop)
stop_with_launcher(Ranks(0, 0, 1, 1), period=0.02)
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
