"""Each way a job on two nodes can be hurt: it ends, says of which rank on which host, and leaves nothing."""

from __future__ import annotations

import re

import pytest
from multinode.faults import FAULTS, endure, suffer
from multinode.launchers import LAUNCHERS

pytestmark = pytest.mark.slow
HANG = 124
GONE = r"rank 1 on node2 \(pid \d+\) (is gone|sends no heartbeat)"

# Fault -> exit code, and what the console says.
EXPECTED = {
    "kill -9 of a rank": (HANG, GONE),
    "kill -9 of launch.py": (143, r"rank 1 on node2 \(pid \d+\): its launcher is gone"),
    "kill -9 of the launcher": (-9, ""),
    "a rank asleep in a step": (
        HANG,
        r"hang: .*rank 1 on node2 \(pid \d+\) is behind: step \d+, at .*paced\.py",
    ),
    "a rank stopped (SIGSTOP)": (HANG, r"rank 1 on node2 \(pid \d+\) (is stopped|sends no heartbeat)"),
    "link cut": (HANG, GONE),
    "power off": (HANG, GONE),
    "sshd stopped": (255, "node2 is lost"),
}
EVERY_DAY = {"kill -9 of a rank", "kill -9 of launch.py", "a rank asleep in a step", "link cut"}


def faults():
    for fault in FAULTS:
        marks = [] if fault in EVERY_DAY else [pytest.mark.nightly]
        yield pytest.param(fault, marks=marks, id=fault.replace(" ", "-"))


@pytest.mark.parametrize("fault", faults())
def test_the_job_ends_and_says_where(cluster, fault):
    outcome = suffer(cluster, LAUNCHERS["multi_node"], FAULTS[fault])
    assert outcome.left == {}
    code, words = EXPECTED[fault]
    assert outcome.code == code, outcome.text
    assert re.search(words, outcome.text), outcome.text


def test_a_full_disk_and_a_slow_node_are_named_and_survived(cluster):
    assert len(endure(cluster, LAUNCHERS["multi_node"])) == 2
