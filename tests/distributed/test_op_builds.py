"""Which native ops a split needs, and whose a build's lock is: alive, dead, or out of sight."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.distributed import op_builds
from pipeline.distributed.op_builds import ALIVE, OUT_OF_SIGHT, QUIET, find_holder, signature


@pytest.fixture
def lock(tmp_path) -> Path:
    """torch's own, made a minute ago."""
    lock = tmp_path / "op" / "lock"
    lock.parent.mkdir()
    lock.touch()
    return aged(lock, 60)


def aged(lock: Path, seconds: float) -> Path:
    for path in (lock, lock.parent):
        os.utime(path, (time.time() - seconds,) * 2)
    return lock


def test_a_released_lock_has_no_holder(tmp_path):
    assert find_holder(tmp_path / "lock") is None


def test_a_still_lock_in_whose_folder_nobody_works_is_dead(lock):
    holder = find_holder(lock)
    assert (holder.name, holder.dead_in) == (None, 0.0)
    assert 0 < find_holder(aged(lock, 1)).dead_in <= QUIET


def test_a_compiler_in_its_folder_holds_it_also_through_a_link(lock, tmp_path):
    (tmp_path / "link").symlink_to(lock.parent)
    with subprocess.Popen(["sleep", "100"], cwd=lock.parent) as compiler:
        try:
            for path in (lock, tmp_path / "link" / "lock"):
                holder = find_holder(path)
                assert (holder.name, holder.dead_in) == (f"process {compiler.pid} (sleep)", ALIVE)
        finally:
            compiler.kill()
    assert find_holder(lock).dead_in == 0.0


def test_a_run_of_ours_signs_and_is_known_to_be_gone_at_once(lock):
    sign = "from pipeline.distributed.op_builds import signature; print(signature(), flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", sign], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        lock.write_text(owner.stdout.readline().strip())
        holder = find_holder(lock)
        assert (holder.name, holder.dead_in) == (f"process {owner.pid}", ALIVE)
        owner.kill()
    assert find_holder(lock).dead_in == 0.0  # though it was changed a moment ago


def test_a_process_number_that_was_given_again_is_another_process(lock):
    pid, started, place = signature().split()
    lock.write_text(f"{pid} {float(started) - 100} {place}")
    assert find_holder(lock).dead_in == 0.0


def test_a_lock_of_another_machine_gets_more_time(lock):
    pid, started, place = signature().split()
    lock.write_text(f"{pid} {started} elsewhere{place}")
    holder = find_holder(aged(lock, 60))
    assert holder.name == f"process {pid} on elsewhere{place.partition('/')[0]}"
    assert OUT_OF_SIGHT - 70 < holder.dead_in < OUT_OF_SIGHT - 50
    assert find_holder(aged(lock, OUT_OF_SIGHT + 1)).dead_in == 0.0


@pytest.mark.parametrize(
    ("kind", "namespace", "patience"),
    [
        ("ext4", op_builds._FIRST_NAMESPACE, QUIET),
        ("nfs4", op_builds._FIRST_NAMESPACE, OUT_OF_SIGHT),
        ("lustre", op_builds._FIRST_NAMESPACE, OUT_OF_SIGHT),
        ("overlay", "pid:[4026532999]", QUIET),
        ("ext4", "pid:[4026532999]", OUT_OF_SIGHT),  # a volume of several containers
    ],
)
def test_a_lock_without_a_name_is_dead_sooner_where_its_owner_would_be_seen(
    lock, monkeypatch, kind, namespace, patience
):
    class Mount:
        mountpoint, fstype = "/", kind

    monkeypatch.setattr(op_builds.psutil, "disk_partitions", lambda all: [Mount])
    monkeypatch.setattr(op_builds, "_namespace", lambda: namespace)
    assert find_holder(aged(lock, patience + 1)).dead_in == 0.0
    assert find_holder(aged(lock, patience - 5)).dead_in > 0.0
