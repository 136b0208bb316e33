"""A machine whose rank computes wrong numbers leaves a torchrun job, and the others go on."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from support.launch import ROOT, environment, numbers, write_recipe
from support.poisoned import events
from support.ranks import free_port

from pipeline.distributed.launch.torchrun import command, described
from pipeline.distributed.ranks import AGENT, Agent, read_agent, why_none_leaves

STEPS = 20


def agents(*changes: dict) -> list[Agent]:
    """Of three machines with two ranks each, that meet on the first."""
    found = []
    for number in range(3):
        stated = {"number": number, "least": 2, "is_endpoint": number == 0, "restarts_left": 1}
        found += 2 * [Agent(**stated | (changes[number] if changes else {}))]
    return found


@pytest.mark.parametrize(
    ("given", "leaving", "why"),
    [
        (agents(), [5], None),
        (agents(), [4, 5], None),
        (agents(), [2, 4], "--nnodes has a MIN of 2, and 1 would be left"),
        (agents(), [0, 2, 4], "no machine would be left"),
        (agents(), [1], "all meet on its machine: give --rdzv-endpoint another one"),
        (agents({}, {"restarts_left": 0}, {}), [4], "no restart is left: raise --max-restarts"),
        (agents({}, {}, {"restarts_left": 0}), [4], None),  # its own it does not need
        ([*agents()[:4], None], [3], "a machine leaves what launch/torchrun.sh --nnodes MIN:MAX has started"),
    ],
)
def test_whether_a_machine_can_leave(given, leaving, why):
    found = why_none_leaves(given, leaving)
    assert found == why or (why is not None and found.startswith(why))


@pytest.mark.parametrize(
    ("options", "least", "serves"),
    [
        (["--nnodes=2:3", "--rdzv-endpoint=localhost:1"], 2, "1"),
        (["--nnodes", "2:3", "--rdzv-endpoint", "192.0.2.1"], 2, "0"),
        (["--nnodes=3", "--rdzv-endpoint=localhost:1", "--rdzv-conf=join_timeout=3,is_host=False"], 3, "0"),
        (["--nnodes=1:3", "--rdzv-endpoint=192.0.2.1", "--rdzv-conf=is_host=1"], 1, "1"),
    ],
)
def test_what_ranks_are_told_of_their_agent(options, least, serves):
    words = command([*options, "--nproc-per-node=1", "name=x"])
    assert described(words) == f"{os.getpid()}:{least}:{serves}"


def test_only_the_process_above_is_an_agent():
    told = {"GROUP_RANK": "1", "TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_RESTART_COUNT": "1"}
    assert read_agent(told | {AGENT: f"{os.getppid()}:2:0"}) == Agent(1, 2, False, 2)
    assert read_agent(told | {AGENT: f"{os.getpid()}:2:0"}) is None  # inherited from a launch around this one
    assert read_agent(told) is None


def start(folder: Path, ranks: int, port: int, *words: str, **extra: str) -> subprocess.Popen[str]:
    """A machine's torchrun.sh, in a session of its own."""
    serves = "0" if extra else "1"
    meeting = [f"--rdzv-endpoint=localhost:{port}", f"--rdzv-conf=last_call_timeout=20,is_host={serves}"]
    recipe = write_recipe(
        folder,
        max_steps=STEPS,
        model={"kind": "support.faults:on_a_broken_machine", "args": {"at": 7}},
        data={"kind": "support.faults:points"},
        objective={"kind": "classification"},
        batch={"global_batch_size": 12},
        checkpoint={"every": 4, "keep_last": 9},
        watch={"compare_every": 5, "on_corruption": "leave"},
    )
    script = [str(ROOT / "launch" / "torchrun.sh"), "--nnodes=1:2", f"--nproc-per-node={ranks}", *meeting]
    return subprocess.Popen(
        [*script, "--config", str(recipe), *words],
        env=environment(PYTHONPATH=str(ROOT / "tests"), OMP_NUM_THREADS="1", **extra),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(*started: subprocess.Popen[str]) -> list[tuple[int, str]]:
    try:
        return [(each.returncode, said) for each in started for said, _ in [each.communicate(timeout=400)]]
    finally:
        for each in started:
            if each.poll() is None:
                os.killpg(each.pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.daily("rank-2")
@pytest.mark.parametrize("rank", [0, 2], ids=lambda rank: f"rank-{rank}")
def test_a_run_goes_on_without_a_machine_that_computes_wrong_numbers(tmp_path, rank):
    """Two machines, three ranks: a bit flips on the one with one rank before step 7. It is found at step 10,
    and the other goes on from step 4 as a run on its ranks does from there."""
    run, port = tmp_path / "run", free_port()
    ways = [
        lambda: start(tmp_path, 2, port, f"run_dir={run}"),
        lambda: start(tmp_path, 1, port, f"run_dir={run}", BROKEN_MACHINE="1"),
    ]
    started = [way() for way in (ways if rank else reversed(ways))]  # torchrun ranks by process number
    good, broken = started if rank else reversed(started)
    (code, said), (code_of_broken, said_by_broken) = finish(good, broken)
    assert code == 0, said + said_by_broken
    assert code_of_broken not in (0, 2), said_by_broken
    assert "leaves the job, and the others go on" in said + said_by_broken
    assert f"going on with {run} from step-00000004" in said
    assert [row["step"] for row in numbers(run)][-1] == STEPS
    (told,) = events(run, "corruption")
    assert (told["step"], told["from_step"], told["kind"], told["ranks"]) == (4, 10, "weights", f"{rank}")
    assert told["leaves"]
    names = {path.name for path in (run / "checkpoints").glob("*step-*")}
    assert {"step-00000004", "suspect-step-00000008", "step-00000020"} <= names

    alone = tmp_path / "alone"
    shutil.copytree(run, alone)
    (alone / "summary.json").unlink()
    for path in (alone / "checkpoints").glob("*step-*"):
        if path.name != "step-00000004":
            shutil.rmtree(path)
    ((code, said),) = finish(start(tmp_path, 2, free_port(), f"run_dir={alone}"))
    assert code == 0, said
    assert f"going on with {alone} from step-00000004" in said
    assert numbers(alone) == numbers(run)
