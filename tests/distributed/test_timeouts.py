"""Every process group waits as long as the recipe says, whoever made it."""

from __future__ import annotations

import json

import pytest
from support.launch import run_python

CODE = """
import json, os
from datetime import timedelta
import deepspeed, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from pipeline.distributed.process_group import start_job
from pipeline.distributed.ranks import read_ranks
from pipeline.engine.deepspeed_base import start_deepspeed

job = start_job(read_ranks({}), distributed=True, timeout=timedelta(seconds=77))
start_deepspeed(job)
groups = {
    "default": dist.group.WORLD,
    "new_group": dist.new_group([0]),
    "deepspeed.comm": deepspeed.comm.new_group([0]),
    "deepspeed.utils.groups": deepspeed.utils.groups._get_data_parallel_group(),
    "device mesh": init_device_mesh("cpu", (1,)).get_group(),
}
timeouts = {
    name: group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    for name, group in groups.items()
}
print(json.dumps(timeouts))
job.close()
"""


@pytest.mark.slow
def test_every_group_has_the_timeout(tmp_path):
    script = tmp_path / "groups.py"
    script.write_text(CODE)
    done = run_python(str(script))
    assert done.returncode == 0, done.stderr
    timeouts = json.loads(done.stdout.splitlines()[-1])
    assert len(timeouts) == 5
    assert set(timeouts.values()) == {77.0}, timeouts
