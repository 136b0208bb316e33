"""Facts about this machine: its processes, and the memory that cgroups leave, on trees like Slurm's."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import psutil
import pytest

from pipeline.distributed.machine import (
    available_memory,
    count_kills,
    machine_id,
    process_state,
    read_memory_usage,
)

UNLIMITED = "9223372036854771712"  # version 1 has a number for it


@pytest.mark.parametrize("stopped", [False, True])
def test_a_process_is_looked_at(stopped):
    process = subprocess.Popen(["sleep", "600"])
    if stopped:
        process.send_signal(19)
        os.waitpid(process.pid, os.WUNTRACED)
    assert process_state(process.pid) == ("stopped" if stopped else "alive")
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert process_state(process.pid) == "gone"  # not reaped yet
    process.wait()
    assert process_state(process.pid) == "gone"


@pytest.mark.slow
def test_a_machine_is_known_by_more_than_its_name():
    other = subprocess.run(
        [sys.executable, "-c", "from pipeline.distributed.machine import *; print(machine_id())"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout.strip() == machine_id()


@pytest.mark.slow
def test_a_process_knows_how_old_it_is():
    code = "import time; time.sleep(0.5); from pipeline.distributed.machine import *; print(process_age())"
    began = time.monotonic()
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0.5 <= float(other.stdout) <= time.monotonic() - began + 0.02  # clock ticks


def test_memory_of_this_machine_has_a_limit():
    now = read_memory_usage()
    assert 0 < now.resident < now.limit
    assert 0 < now.used <= now.limit
    assert 0 < available_memory() <= psutil.virtual_memory().total


def write_v2(folder, limit, used=0, cached=0, num_kills=0):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon {used - cached}\ninactive_file {cached}\n")
    (folder / "memory.events").write_text(f"low 0\nmax 9\noom 1\noom_kill {num_kills}\n")


def write_v1(folder, limit, used=0, cached=0, num_kills=0):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"inactive_file 7\ntotal_inactive_file {cached}\n")
    (folder / "memory.oom_control").write_text(f"oom_kill_disable 0\nunder_oom 0\noom_kill {num_kills}\n")


SLURM = "system.slice/slurmstepd.scope/job_7"
GROUPS = {
    # Slurm's limit stands on the job: a step's own group says `max`, and the root has none at all.
    "version 2": (
        f"0::/{SLURM}/step_0/task_0\n",
        [
            (write_v2, SLURM, {"limit": 1000, "used": 900, "cached": 150, "num_kills": 3}),
            (write_v2, f"{SLURM}/step_0/task_0", {"limit": "max", "used": 400, "num_kills": 2}),
            (write_v2, "system.slice/slurmstepd.scope/job_8", {"limit": 10, "used": 10}),  # a neighbour's
        ],
        (1000, 750, 250, 2),
    ),
    "version 1 beside an empty version 2": (
        "11:cpu,cpuacct:/\n9:memory:/slurm/job_7/step_0\n0::/\n",
        [
            (write_v1, "memory", {"limit": UNLIMITED, "used": 5000}),
            (write_v1, "memory/slurm/job_7", {"limit": 1000, "used": 900, "cached": 150}),
            (write_v1, "memory/slurm/job_7/step_0", {"limit": UNLIMITED, "used": 800, "num_kills": 4}),
        ],
        (1000, 750, 250, 4),
    ),
    "the tightest limit and the least that is left are of two groups": (
        "0::/job/task\n",
        [
            (write_v2, "job", {"limit": 2000, "used": 1900}),
            (write_v2, "job/task", {"limit": 1000, "used": 100}),
        ],
        (1000, 100, 100, 0),
    ),
    # In a container the path is the host's, or leads out of it; the root is the container's own.
    "a container": (
        "0::/kubepods/pod7/9\n",
        [(write_v2, "", {"limit": 1000, "used": 400})],
        (1000, 400, 600, 0),
    ),
    "outside": ("0::/../../pod7\n", [(write_v2, "", {"limit": 1000, "used": 400})], (1000, 400, 600, 0)),
    "over its limit": ("0::/job\n", [(write_v2, "job", {"limit": 1000, "used": 1100})], (1000, 1100, 0, 0)),
}


@pytest.mark.parametrize(("own", "groups", "seen"), GROUPS.values(), ids=GROUPS)
def test_the_limits_of_cgroups(tmp_path, own, groups, seen):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(own)
    for write, group, values in groups:
        write(tmp_path / "sys/fs/cgroup" / group, **values)
    now = read_memory_usage(tmp_path)
    assert now.by_cgroup
    assert (now.limit, now.used, available_memory(tmp_path), count_kills(tmp_path)) == seen
    assert "KiB its cgroup allows were in use" in str(now)


def test_without_a_cgroup_it_is_the_machines(tmp_path):
    assert not read_memory_usage(tmp_path).by_cgroup
    assert read_memory_usage(tmp_path).limit == psutil.virtual_memory().total
    assert available_memory(tmp_path) > 0
    assert count_kills(tmp_path) == 0
