"""One W&B run of two nodes, every row once, over a kill of all ranks."""

from __future__ import annotations

import sys

import pytest
from multinode.launchers import torchrun
from multinode.test_nodes_train import wait_for_rows
from support.launch import ROOT, write_recipe
from support.wandb_rows import of_record, of_server
from support.wandb_server import STANDIN, read_lines

# Each day test_nodes_train.py asks it of a preempted job.
pytestmark = [pytest.mark.slow, pytest.mark.nightly]
PORT = "8713"


def test_two_nodes_make_one_run(cluster):
    """The server is on the node of rank 0, the only one that may talk to it."""
    folder, run = cluster.shared / "server", cluster.shared / "run"
    server = cluster.start("node1", sys.executable, STANDIN, PORT, str(folder))
    recipe = write_recipe(cluster.shared, max_steps=30, wandb={"mode": "online"}, checkpoint={"every": 4})
    split = ["--deepspeed", str(ROOT / "ds_configs" / "zero2.json")]
    private = f"data.cache_dir={cluster.private / 'cache'}"
    arguments = ["--config", str(recipe), *split, f"run_dir={run}", private]
    online = {"WANDB_BASE_URL": f"http://127.0.0.1:{PORT}", "WANDB_API_KEY": "0" * 40}
    hosts = cluster.hosts[:2]
    jobs = torchrun(cluster, hosts, *arguments, **online)
    wait_for_rows(run, jobs)
    for host in hosts:
        cluster.kill(host, "train.py")
    for job in jobs:
        job.wait(100)
    for job in torchrun(cluster, hosts, *arguments, **online):
        assert job.wait(500) == 0, job.text
    server.command.kill()
    ((run_id,),) = [[path.stem.removeprefix("history-") for path in folder.glob("history-*.jsonl")]]
    assert of_server(read_lines(folder / f"history-{run_id}.jsonl")) == of_record(run)
    assert of_record(run)[-1][0] == 30
