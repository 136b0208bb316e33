"""What a machine knows of itself: its processes, and the memory cgroups leave, on trees as Slurm has them."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import psutil
import pytest

from pipeline.distributed.machine import available_memory, kills, machine_id, memory_now, process_state

UNLIMITED = "9223372036854771712"  # version 1 has a number for it


@pytest.mark.parametrize("stopped", [False, True])
def test_a_process_is_looked_at(stopped):
    process = subprocess.Popen(["sleep", "600"])
    if stopped:
        process.send_signal(19)
        os.waitpid(process.pid, os.WUNTRACED)
    assert process_state(process.pid) == ("stopped" if stopped else "there")
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert process_state(process.pid) == "gone"  # not reaped yet
    process.wait()
    assert process_state(process.pid) == "gone"


def test_a_machine_is_known_by_more_than_its_name():
    other = subprocess.run(
        [sys.executable, "-c", "from pipeline.distributed.machine import *; print(machine_id())"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout.strip() == machine_id()


def test_a_process_knows_how_old_it_is():
    code = "import time; time.sleep(0.5); from pipeline.distributed.machine import *; print(process_age())"
    began = time.monotonic()
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0.5 <= float(other.stdout) <= time.monotonic() - began + 0.02  # clock ticks


def test_memory_of_this_machine_has_a_limit():
    now = memory_now()
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


def write_own(root, lines):
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(lines)


def seen(root):
    now = memory_now(root)
    return now.by_cgroup, now.limit, now.used, available_memory(root)


def test_version_2_a_limit_stands_on_the_job_and_not_on_the_root_or_the_task(tmp_path):
    """As Slurm has it: a step's own group says `max`, the root has no limit at all."""
    write_own(tmp_path, "0::/system.slice/slurmstepd.scope/job_7/step_0/task_0\n")
    top = tmp_path / "sys/fs/cgroup"
    job = top / "system.slice/slurmstepd.scope/job_7"
    write_v2(job, 1000, used=900, cached=150, num_kills=3)
    write_v2(job / "step_0/task_0", "max", used=400, num_kills=2)
    write_v2(top / "system.slice/slurmstepd.scope/job_8", 10, used=10)  # a neighbour's
    assert seen(tmp_path) == (True, 1000, 750, 250)
    assert kills(tmp_path) == 2
    assert "KiB its cgroup allows were in use" in str(memory_now(tmp_path))


def test_version_1_beside_an_empty_version_2(tmp_path):
    write_own(tmp_path, "11:cpu,cpuacct:/\n9:memory:/slurm/uid_5/job_7/step_0\n0::/\n")
    top = tmp_path / "sys/fs/cgroup"
    write_v1(top / "memory", UNLIMITED, used=5000)
    write_v1(top / "memory/slurm/uid_5/job_7", 1000, used=900, cached=150)
    write_v1(top / "memory/slurm/uid_5/job_7/step_0", UNLIMITED, used=800, num_kills=4)
    assert seen(tmp_path) == (True, 1000, 750, 250)
    assert kills(tmp_path) == 4


def test_the_tightest_limit_and_the_least_that_is_left_may_be_of_two_groups(tmp_path):
    write_own(tmp_path, "0::/job/task\n")
    write_v2(tmp_path / "sys/fs/cgroup/job", 2000, used=1900)
    write_v2(tmp_path / "sys/fs/cgroup/job/task", 1000, used=100)
    assert seen(tmp_path) == (True, 1000, 100, 100)


@pytest.mark.parametrize("path", ["/kubepods/pod7/9", "/../../pod7", "/"])
def test_in_a_container_the_root_is_the_containers_own(tmp_path, path):
    """The path is the host's, where the container has no namespace of its own, or leads out of it."""
    write_own(tmp_path, f"0::{path}\n")
    write_v2(tmp_path / "sys/fs/cgroup", 1000, used=400)
    assert seen(tmp_path) == (True, 1000, 400, 600)


def test_a_group_that_is_over_its_limit_leaves_nothing(tmp_path):
    write_own(tmp_path, "0::/job\n")
    write_v2(tmp_path / "sys/fs/cgroup/job", 1000, used=1100)
    assert available_memory(tmp_path) == 0


def test_without_a_cgroup_it_is_the_machines(tmp_path):
    for text in (None, "0::/\n"):
        if text is not None:
            write_own(tmp_path, text)
        assert not memory_now(tmp_path).by_cgroup
        assert memory_now(tmp_path).limit == psutil.virtual_memory().total
        assert available_memory(tmp_path) > 0
        assert kills(tmp_path) == 0
