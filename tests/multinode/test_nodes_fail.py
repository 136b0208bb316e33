"""Each way a job on two nodes can be hurt: it ends, says of which rank on which host, and leaves nothing."""

from __future__ import annotations

import re

import pytest
from multinode.faults import FAULTS, collect_survived_faults, run_with_fault
from multinode.launchers import LAUNCHERS

pytestmark = pytest.mark.slow
HANG = 124
GONE = r"rank 1 on node2 \(pid \d+\) (is gone|sends no heartbeat)"

# Fault -> exit code, and what the console says.
EXPECTED = {
    "kill -9 of a rank": (HANG, GONE),
    "kill -9 of launch.py": (143, r"rank 1 on node2 \(pid \d+\): its launcher has ended"),
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
SECRETS = {
    "WANDB_API_KEY": "c0ffee" * 6 + "aaaa",
    "HF_TOKEN": "hf_canaryCANARYcanary",
    "MLFLOW_TRACKING_PASSWORD": "canary of MLflow",
    "WANDB_BASE_URL": "http://user:canary-in-a-url@127.0.0.1:9",
}


# On one machine tests/distributed/ has a rank killed, asleep and stopped, and a launcher killed.
@pytest.mark.daily("link-cut")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.replace(" ", "-"))
def test_the_job_ends_and_says_where(cluster, fault):
    """Secrets of the launch's environment show on no command line of any node, in no output and no file."""
    outcome = run_with_fault(cluster, LAUNCHERS["multi_node"], FAULTS[fault], **SECRETS)
    assert outcome.remaining_commands == {}
    written = [path.read_bytes() for path in cluster.shared.rglob("*") if path.is_file()]
    assert list(cluster.shared.rglob("*.wandb"))
    for content in [outcome.text.encode(), *written]:
        assert not [name for name, secret in SECRETS.items() if secret.encode() in content]
    code, words = EXPECTED[fault]
    assert outcome.code == code, outcome.text
    assert re.search(words, outcome.text), outcome.text


@pytest.mark.nightly
def test_a_full_disk_and_a_slow_node_are_named_and_survived(cluster):
    assert len(collect_survived_faults(cluster, LAUNCHERS["multi_node"])) == 2
