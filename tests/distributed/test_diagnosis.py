"""The sentence about who holds up the job, from what the ranks say of themselves."""

from __future__ import annotations

import pytest

from pipeline.distributed.diagnosis import (
    LostRank,
    RankProcess,
    RankReport,
    describe_hang,
    describe_lost,
    format_ranks,
)
from pipeline.distributed.machine import MemoryUsage
from pipeline.files import GIB

LINE = "pipeline/engine/torch_engine.py:81 in train_step"
WAIT_12 = f"ranks 0, 2 wait in all_reduce number 12 (step 41, {LINE})"


def who(rank: int) -> RankProcess:
    return RankProcess(rank, f"node{rank // 2 + 1}", 700 + rank)


def waits(rank, collective="all_reduce", step=41, place=LINE, number=None):
    return RankReport(who(rank), "step", step, place, collective, number)


def busy(rank, step=41, doing="step", place="my_model.py:88 in forward (time.sleep(9))"):
    return RankReport(who(rank), doing, step, place)


def lost(rank, state=None, **changes):
    fields = {"silent_seconds": 1.2, "step": 40, "memory": MemoryUsage(2 * GIB, 3 * GIB, 16 * GIB, True, 0)}
    return LostRank(who(rank), state=state, **fields | changes)


DIFFERENT = "the ranks are in different collectives: rank 1 on node1 (pid 701) is in "
ODD = {"collective": "broadcast", "place": "other.py:7 in g"}


@pytest.mark.parametrize(
    ("reports", "silent", "start", "end"),
    [
        (
            [waits(0), waits(1), busy(2), waits(3)],
            [],
            "rank 2 on node2 (pid 702) is behind: step 41, at my_model.py:88 in forward (time.sleep(9)); ",
            f"ranks 0, 1, 3 wait in all_reduce (step 41, {LINE})",
        ),
        ([waits(0, number=12), waits(1, **ODD), waits(2, number=12)], [], DIFFERENT, WAIT_12),
        ([waits(0, number=12), waits(1, number=11), waits(2, number=12)], [], DIFFERENT, WAIT_12),
        (
            [waits(0, number=12), waits(1, place="other.py:7 in g"), waits(2, number=12)],
            [],
            DIFFERENT,
            WAIT_12,
        ),
        (
            [waits(rank, number=5) for rank in range(3)],
            [],
            f"all ranks wait in all_reduce (step 41, {LINE}), and nothing arrives: check the network",
            "NCCL_SOCKET_IFNAME to the interface that connects them",
        ),
        (
            [busy(0), busy(1), busy(2, step=40)],
            [],
            "no rank waits in a collective: ranks 0, 1: step 41, at my_model.py:88",
            "; rank 2: step 40, at my_model.py:88 in forward (time.sleep(9))",
        ),
        (
            [waits(0), waits(2)],
            [lost(1, "stopped", silent_seconds=3.1)],
            "rank 1 on node1 (pid 701) is stopped: last heartbeat 3.1 s ago at",
            f"; ranks 0, 2 wait in all_reduce (step 41, {LINE})",
        ),
    ],
)
def test_who_holds_up_the_job(reports, silent, start, end):
    said = describe_hang(reports, 60.2, silent)
    assert said.startswith(f"hang: no step for 60 s. {start}")
    assert said.endswith(end)


def test_what_it_does_instead_of_a_step_is_said():
    said = describe_hang([busy(0, doing="saving", place="x.py:1 in f"), waits(1)], 1800)
    assert "rank 0 on node1 (pid 700) is behind: step 41, saving, at x.py:1 in f; rank 1 waits in" in said


HEARD = "last heartbeat 1.2 s ago at step 40; "


@pytest.mark.parametrize(
    ("state", "changes", "words"),
    [
        ("gone", {}, f"is gone: {HEARD}it used 2.00 GiB, and 3.00 GiB of the 16.00 GiB its cgroup allows"),
        ("stopped", {}, f"is stopped: {HEARD}it received SIGSTOP"),
        ("alive", {}, f"sends no heartbeat: {HEARD}its process is alive but runs no Python"),
        (None, {}, f"sends no heartbeat: {HEARD}its process, its machine or the"),
        ("gone", {"num_kills": 1}, ": killed for memory (exit code -9); lower batch.micro_batch_size"),
        (
            "gone",
            {"memory": MemoryUsage(15 * GIB, 15 * GIB, 16 * GIB, False, 0)},
            "it used 15.00 GiB, and 15.00 GiB of the 16.00 GiB the machine has were in use: most likely",
        ),
    ],
)
def test_a_lost_rank(state, changes, words):
    said = describe_lost([lost(1, state, **changes)])
    assert said.startswith("rank 1 on node1 (pid 701) ")
    assert words in said
    assert ("killed for memory" in said) == bool(changes)


def test_the_hint_to_an_exit_code_is_about_the_launcher(monkeypatch):
    monkeypatch.delenv("CROSS_SIZE", raising=False)
    assert describe_lost([lost(1, "gone")]).endswith("see the launcher's output for the exit code")
    monkeypatch.setenv("CROSS_SIZE", "1")  # as deepspeed's launcher does
    assert describe_lost([lost(1, "gone")]).endswith("exit code, with the command of its last rank")


def test_a_machine_takes_its_ranks_with_it():
    said = describe_lost([lost(2), lost(3), lost(0, "gone")])
    assert said.startswith("ranks 2, 3 on node2 send no heartbeat: last heartbeat 1.2 s ago")
    assert "; rank 0 on node1 (pid 700) is gone: " in said


def test_ranks_in_words():
    assert format_ranks([3]) == "rank 3"
    assert format_ranks([8, 0, 1, 2, 3, 5, 6]) == "ranks 0-3, 5, 6, 8"
