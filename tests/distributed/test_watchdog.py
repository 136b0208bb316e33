"""Real ranks that hang, freeze, die and disagree: who is named, how the others leave, what is left."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time

import pytest
from support.fork_server import ForkedProgram
from support.launch import ROOT, launch, make_environment, write_recipe
from support.rank_pool import free_port

from pipeline.distributed.watchdog import HANG_EXIT_CODE

pytestmark = pytest.mark.slow
FAULTS = {"PYTHONPATH": str(ROOT / "tests")}
PATIENCE = 200  # seconds: a machine that is busy with other tests


class Ranks:
    """Processes of one job of distributed.watched, and what they printed."""

    def __init__(self, folder, fault, victim, world_size=3):
        self.port = free_port()
        self.output = [folder / f"{rank}.txt" for rank in range(world_size)]
        self.processes = []
        for rank in range(world_size):
            place = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": world_size,
                "LOCAL_WORLD_SIZE": world_size,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": self.port,
            }
            variables = make_environment(**FAULTS, **{key: str(value) for key, value in place.items()})
            words = ["-m", "distributed.watched", fault, str(victim), str(folder)]
            self.processes.append(ForkedProgram(words, variables, self.output[rank]))

    def codes(self, living):
        """Exit codes of those that are to leave by themselves; all are gone afterwards."""
        deadline = time.monotonic() + PATIENCE
        try:
            return [self.processes[rank].wait(max(0.1, deadline - time.monotonic())) for rank in living]
        finally:
            for process in self.processes:
                process.kill()
                process.wait()

    def said(self):
        return "".join(path.read_text() for path in self.output)


def test_a_rank_that_sleeps_is_named_with_its_line(tmp_path):
    job = Ranks(tmp_path, "sleep", 1)
    assert job.codes([0, 1, 2]) == [HANG_EXIT_CODE] * 3
    (line,) = [line for line in job.said().splitlines() if line.startswith("hang:")]
    assert f"no step for 3 s. rank 1 on {socket.gethostname()} (pid {job.processes[1].pid}) is behind" in line
    assert "step 5, at tests/distributed/watched.py:" in line
    assert "in something_happens (time.sleep(600)); ranks 0, 2 wait in all_reduce number 6 (step 5, " in line
    assert line == f"{(tmp_path / 'hang' / 'diagnosis.txt').read_text().strip()}; stacks: {tmp_path / 'hang'}"
    assert "something_happens" in (tmp_path / "hang" / "rank-00001.txt").read_text()
    for rank in range(3):
        assert "Thread 0x" in (tmp_path / "hang" / f"rank-{rank:05d}.txt").read_text()
    recorded = json.loads((tmp_path / "hang" / "rank-00000.collectives.json").read_text())
    assert recorded["entries"][-1]["profiling_name"] == "gloo:all_reduce"
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # past connections do not count
        probe.bind(("127.0.0.1", job.port))  # held by nobody


@pytest.mark.nightly
def test_a_rank_that_may_open_no_more_files_is_not_lost(tmp_path):
    """Its memory, which its heartbeats tell, is read from files."""
    job = Ranks(tmp_path, "no more files", 1, world_size=2)
    assert job.codes([0, 1]) == [0, 0], job.said()


def test_torchs_own_stacks_of_a_lost_store_are_off_before_torch_is_imported():
    """Torch reads the level at its import; this process may have imported it in any order."""
    words = "import os, sys; os.environ.pop('TORCH_CPP_LOG_LEVEL', None); import pipeline.training; "
    words += "print('torch' in sys.modules, os.environ['TORCH_CPP_LOG_LEVEL'])"
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=False)
    assert done.stdout == "False ERROR\n", done.stderr


@pytest.mark.daily("0")
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_named_in_one_line_of_each_rank(tmp_path, victim):
    """The loss of rank 0, whose store dies with it, is reported by the others alone."""
    job = Ranks(tmp_path, "kill", victim)
    living = [rank for rank in range(3) if rank != victim]
    assert job.codes(living) == [HANG_EXIT_CODE] * 2
    named = (
        f"rank {victim} on {socket.gethostname()} (pid {job.processes[victim].pid}) is gone: last heartbeat "
    )
    # Each has a stderr of its own: one finds it out, the other one says what it ends of.
    lines = [job.output[rank].read_text().splitlines() for rank in living]
    assert [len(said) for said in lines] == [1, 1]
    assert any(said[0].startswith(named) for said in lines)
    assert all(named in said[0] for said in lines)
    assert any("; it used " in said[0] for said in lines)  # not by one who heard late


@pytest.mark.nightly
@pytest.mark.parametrize("victim", [0, 1])
def test_a_frozen_rank_is_named(tmp_path, victim):
    job = Ranks(tmp_path, "stop", victim, world_size=2)
    assert job.codes([1 - victim]) == [HANG_EXIT_CODE]
    (line,) = job.said().splitlines()
    assert f"rank {victim} on {socket.gethostname()} (pid {job.processes[victim].pid}) is stopped: " in line
    assert (tmp_path / "hang" / f"rank-{1 - victim:05d}.txt").exists()


def test_ranks_in_different_collectives_are_told_apart(tmp_path):
    job = Ranks(tmp_path, "another collective", 2)
    codes = job.codes([0, 1, 2])
    said = job.said()
    assert set(codes) == {HANG_EXIT_CODE}, said
    assert "the ranks are in different collectives: rank 2 on " in said
    assert "is in broadcast number 6 (step 5, tests/distributed/watched.py:" in said
    assert "; ranks 0, 1 wait in all_reduce number 6" in said


def test_a_real_run_that_hangs_ends_with_its_own_code(tmp_path):
    recipe = write_recipe(
        tmp_path,
        model={"kind": "support.faults:faulty", "args": {"fault": "sleep", "rank": 1}},
        data={"kind": "support.faults:points"},
        objective={"kind": "classification"},
        distributed={"hang_seconds": 10},
    )
    zero2 = ["--deepspeed", str(ROOT / "ds_configs" / "zero2.json")]
    result = launch("--config", str(recipe), *zero2, ranks=2, **FAULTS)
    assert result.returncode == HANG_EXIT_CODE, result.stderr
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("hang:")]
    assert "rank 1 on " in line
    assert "is behind: step 2, at tests/support/faults.py:" in line
    assert "; rank 0 waits in all_reduce" in line
    assert "Traceback" not in result.stderr + result.stdout
    assert not result.remaining_processes()
    assert list(tmp_path.glob("runs/*/report.html"))


def test_a_real_run_that_loses_a_rank_says_so_instead_of_a_traceback(tmp_path):
    recipe = write_recipe(
        tmp_path,
        model={"kind": "support.faults:faulty", "args": {"fault": "kill", "rank": 1}},
        data={"kind": "support.faults:points"},
        objective={"kind": "classification"},
    )
    zero2 = ["--deepspeed", str(ROOT / "ds_configs" / "zero2.json")]
    result = launch("--config", str(recipe), *zero2, ranks=2, **FAULTS)
    assert result.returncode == 256 - signal.SIGKILL
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("rank 1 on ")]
    assert " is gone: last heartbeat " in line
    assert "Traceback" not in result.stderr + result.stdout
    assert not result.remaining_processes()
