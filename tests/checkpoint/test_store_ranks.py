"""Two real ranks: one file system or two, a rank whose disk is full, a node that lost its part."""

from __future__ import annotations

import os
import resource
import shutil
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from parity.measure import ALONE
from plain_engine import PlainEngine
from support.captured_logs import capture_logs
from support.checkpoints import flip_last_bit, verify
from support.rank_pool import RankFailedError, RankPool
from test_save_killed import Fault

from pipeline.checkpoint.catalog import Retention, find_newest_complete
from pipeline.checkpoint.store import CheckpointStore
from pipeline.distributed.process_group import Job
from pipeline.distributed.ranks import Ranks
from pipeline.errors import CheckpointError

pytestmark = pytest.mark.slow


def open_store(job: Job, folder: str, apart: bool = False, keep_last: int = 3) -> CheckpointStore:
    """A store; `apart`: each rank is a machine of its own, with its own disk below the folder."""
    if not apart:
        return CheckpointStore(Path(folder), Retention(keep_last), job, "two ranks")
    rank = job.ranks.rank
    alone = Job(Ranks(rank, 0, job.ranks.world_size, 1), job.device, job.store)
    disk = Path(folder) / f"disk{rank}"
    return CheckpointStore(disk, Retention(keep_last), alone, "two machines", f"node{rank}")


def tensors(job: Job, by: str = "values", seed: int = 0) -> PlainEngine:
    return PlainEngine(job.ranks.rank, job.ranks.world_size, by, seed)


def save_steps(job: Job, folder: str, steps, apart: bool, wait: bool, by: str = "values"):
    store = open_store(job, folder, apart)
    outcomes = [store.save(tensors(job, by, seed=step), {"global_step": step}, wait) for step in steps]
    store.close()
    return [done.problem for done in outcomes + store.poll()]


def resume(job: Job, folder: str, apart: bool, by: str = "values"):
    """(step, whether all values are those of that step), or what was said."""
    store = open_store(job, folder, apart)
    engine = tensors(job, by, seed=99)
    try:
        state = store.resume(engine)
    except CheckpointError as error:
        return str(error)
    return None if state is None else (state["global_step"], engine.is_model_of(state["global_step"]))


@pytest.mark.parametrize("wait", [True, False])
def test_two_ranks_save_and_resume_in_another_division(ranks, tmp_path, wait):
    assert (
        ranks(2).run(save_steps, str(tmp_path), [1, 2, 3, 4], False, wait)
        == [[None] * (4 if wait else 8)] * 2
    )
    assert sorted(os.listdir(tmp_path)) == ["step-00000002", "step-00000003", "step-00000004"]
    assert sorted(os.listdir(tmp_path / "step-00000004")) == [
        "manifest.json",
        "rank-00000.safetensors",
        "rank-00001.safetensors",
        "shards.safetensors",
    ]
    assert verify(tmp_path / "step-00000004") == []
    assert ranks(2).run(resume, str(tmp_path), False, "columns") == [(4, True)] * 2
    assert resume(ALONE, str(tmp_path), False) == (4, True)


def train_beside(job: Job, folder: str):
    """Saves in the background while the main threads are busy with other collectives, at their own pace."""
    store = open_store(job, folder)
    engine = tensors(job)
    sums = []
    for step in range(30):
        time.sleep(0.002 * job.ranks.rank)
        sums.append(float(job.all_reduce_sum(torch.ones(1000))[0]))
        if step % 5 == 0:
            store.save(engine, {"global_step": step})
        store.poll()
    store.close()
    job.barrier()
    return sums == [2.0] * 30, sorted(store._saved), threading.active_count()


def test_collectives_of_training_and_of_saving_do_not_meet(ranks, tmp_path):
    for answer in ranks(2).run(train_beside, str(tmp_path)):
        assert answer[:2] == (True, [0, 5, 10, 15, 20, 25])


@contextmanager
def files_may_not_grow(at_most: int):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (at_most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def save_with_a_full_disk(job: Job, folder: str, full_rank: int, apart: bool, limit: int):
    store = open_store(job, folder, apart)
    problems = []
    store.save(tensors(job, seed=1), {"global_step": 1}, wait=True)
    for step, wait in ((2, True), (3, False)):
        with files_may_not_grow(limit if job.ranks.rank == full_rank else 1 << 40):
            outcome = store.save(tensors(job, seed=step), {"global_step": step}, wait)
            store.wait()
        problems += [done.problem for done in (store.poll() or [outcome])]
    try:
        with files_may_not_grow(limit if job.ranks.rank == full_rank else 1 << 40):
            store.save_final(tensors(job, seed=4), {"global_step": 4})
    except CheckpointError as error:
        problems.append(str(error))
    problems.append(store.save(tensors(job, seed=5), {"global_step": 5}, wait=True).problem)
    return problems


@pytest.mark.daily("0-100-shared", "1-100-apart", "0-1000-shared")
@pytest.mark.parametrize("apart", [False, True], ids=["shared", "apart"])
@pytest.mark.parametrize(("full_rank", "limit"), [(0, 100), (1, 100), (0, 1000)])
def test_one_ranks_full_disk_is_known_to_all(ranks, tmp_path, full_rank, limit, apart):
    """Its share fails at 100 bytes; at 1,000 the table fails, which leaders write after all shares."""
    answers = ranks(2).run(save_with_a_full_disk, str(tmp_path), full_rank, apart, limit)
    assert answers[0] == answers[1]
    *failed, last = answers[0]
    assert len(failed) == 3
    for problem in failed:
        assert f"rank {full_rank} on " in problem
        assert "File too large" in problem
        assert "\n" not in problem
    assert last is None
    for folder in [tmp_path / "disk0", tmp_path / "disk1"] if apart else [tmp_path]:
        assert sorted(os.listdir(folder)) == ["step-00000001", "step-00000005"]


class Gathering(PlainEngine):
    """Fetching a shard takes all ranks."""

    def shards(self):
        for shard in super().shards():
            if shard.region.box is not None:
                dist.all_reduce(torch.ones(1))
            yield shard


def save_gathered(job: Job, folder: str):
    store = open_store(job, folder)
    problems = []
    engine = Gathering(job.ranks.rank, 2, "columns", seed=1)
    for step, limit in ((1, 1 << 40), (2, 10), (3, 1 << 40)):
        with files_may_not_grow(limit if job.ranks.rank else 1 << 40):
            problems.append(store.save(engine, {"global_step": step}, wait=True).problem)
    return problems


def test_a_rank_that_cannot_write_still_takes_part_in_fetching(ranks, tmp_path):
    for first, second, third in ranks(2).run(save_gathered, str(tmp_path), timeout=240):
        assert (first, third) == (None, None)
        assert "rank 1 on" in second


def test_machines_that_share_no_file_system(ranks, tmp_path):
    assert ranks(2).run(save_steps, str(tmp_path), [1, 2], True, False) == [[None] * 4] * 2
    contents = [(tmp_path / f"disk{n}" / "step-00000002" / "manifest.json").read_bytes() for n in range(2)]
    assert contents[0] == contents[1]
    for rank in range(2):
        folder = tmp_path / f"disk{rank}"
        assert sorted(os.listdir(folder / "step-00000002")) == [
            "manifest.json",
            f"rank-0000{rank}.safetensors",
            "shards.safetensors",
        ]
        newest, passed_over = find_newest_complete(folder)
        assert (newest.folder, passed_over) == (folder / "step-00000002", [])
        assert verify(folder / "step-00000002") == []
    assert ranks(2).run(resume, str(tmp_path), True) == [(2, True)] * 2


def test_the_step_is_one_that_all_machines_have(ranks, tmp_path):
    ranks(2).run(save_steps, str(tmp_path), [1, 2, 3], True, True)
    (tmp_path / "disk1" / "step-00000003").rename(tmp_path / "disk1" / "gone")
    assert ranks(2).run(resume, str(tmp_path), True) == [(2, True)] * 2
    (tmp_path / "disk0" / "step-00000002" / "rank-00000.safetensors").unlink()
    assert ranks(2).run(resume, str(tmp_path), True) == [(1, True)] * 2
    path = tmp_path / "disk1" / "step-00000001" / "rank-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    for said in ranks(2).run(resume, str(tmp_path), True):
        assert "has no intact checkpoint" in said
        assert "node1" in said
        assert "\n" not in said


def test_another_division_without_a_shared_file_system_names_what_to_bring(ranks, tmp_path):
    ranks(2).run(save_steps, str(tmp_path), [1], True, True)
    ranks(2).run(swap_lost, str(tmp_path))


def swap_lost(job: Job, folder: str):
    """Rank 0 wants all columns: some were written by rank 1, on another machine."""
    store = open_store(job, folder, True)
    engine = tensors(job, "columns")
    with pytest.raises(CheckpointError, match=r"wrote it on node[01]; copy it here"):
        store.resume(engine)


def test_what_was_brought_is_read_in_another_division(ranks, tmp_path):
    ranks(2).run(save_steps, str(tmp_path), [1, 2], True, True)
    for here, there in ((0, 1), (1, 0)):
        name = f"step-00000002/rank-0000{there}.safetensors"
        shutil.copy(tmp_path / f"disk{there}" / name, tmp_path / f"disk{here}" / name)
    assert ranks(2).run(resume, str(tmp_path), True, "columns") == [(2, True)] * 2


def test_a_machine_put_in_anothers_place_is_named(ranks, tmp_path):
    """All ranks say the same and none waits: the new machine's folder is empty."""
    ranks(2).run(save_steps, str(tmp_path), [1, 2], True, True)
    shutil.rmtree(tmp_path / "disk1")
    said, same = ranks(2).run(resume, str(tmp_path), True)
    assert said.replace("disk0", "disk1") == same
    assert "has no intact checkpoint" in said
    assert "step-00000002 is skipped: on node1: " in said
    shutil.copytree(tmp_path / "disk0" / "step-00000002", tmp_path / "disk1" / "step-00000002")
    for said in ranks(2).run(resume, str(tmp_path), True):
        assert "no machine has rank-00001.safetensors, written on node1" in said


def two_machines_of_two(job: Job, folder: str, steps):
    """Saves the steps, or resumes where there are none to save: two ranks a disk."""
    rank = job.ranks.rank
    placed = Job(Ranks(rank, rank % 2, 4, 2), job.device, job.store)
    disk = Path(folder) / f"disk{rank // 2}"
    store = CheckpointStore(disk, Retention(3), placed, "two machines", f"node{rank // 2}")
    for step in steps:
        store.save(tensors(job, seed=step), {"global_step": step}, wait=True)
    if steps:
        return store._peers.neighbours
    engine = tensors(job, seed=99)
    with capture_logs("pipeline.checkpoint") as lines:
        state = store.resume(engine)
    return state["global_step"], engine.is_model_of(state["global_step"]), lines


def test_ranks_of_a_machine_share_its_disk(ranks, tmp_path):
    saved = ranks(4).run(two_machines_of_two, str(tmp_path), [1, 2, 3])
    assert saved == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert sorted(os.listdir(tmp_path / "disk1" / "step-00000003")) == [
        "manifest.json",
        "rank-00002.safetensors",
        "rank-00003.safetensors",
        "shards.safetensors",
    ]
    flip_last_bit(tmp_path / "disk0" / "step-00000003" / "rank-00001.safetensors")
    (tmp_path / "disk1" / "step-00000002" / "rank-00003.safetensors").unlink()
    for step, is_whole, lines in ranks(4).run(two_machines_of_two, str(tmp_path), []):
        assert (step, is_whole) == (1, True)
        assert "rank-00001.safetensors: the content is damaged" in lines[0]
        assert "written on node0" in lines[0]
        assert "no machine has rank-00003.safetensors, written on node1" in lines[1]


def different_layouts(job: Job, folder: str):
    """Rank 1's shards change between two saves, rank 0's do not."""
    store = open_store(job, folder)
    problems = []
    for step, wait in ((1, True), (2, True), (3, False), (4, False)):
        engine = tensors(job, seed=step)
        if step % 2:
            left_out = {"norm.bias", "batches", "head.weight"}
            engine.held = [each for each in engine.held if each[0][0] not in left_out]
        problems.append(store.save(engine, {"global_step": step}, wait).problem)
    store.close()
    return problems + [done.problem for done in store.poll()], sorted(store._saved)


def test_ranks_agree_that_shards_changed(ranks, tmp_path):
    for answer in ranks(2).run(different_layouts, str(tmp_path)):
        assert answer == ([None] * 6, [1, 2, 3, 4])


def test_the_group_is_gloo_and_its_own(ranks, tmp_path):
    assert ranks(2).run(group_of, str(tmp_path)) == [("gloo", True, 0)] * 2


def group_of(job: Job, folder: str):
    """(backend of the store's group, whether it is its own, groups that are left of it)."""
    before = len(dist.distributed_c10d._world.pg_map)
    store = open_store(job, folder)
    group = store._peers.group
    seen = dist.get_backend(group), group is not dist.group.WORLD
    store.close()
    return *seen, len(dist.distributed_c10d._world.pg_map) - before


def lose_a_rank(job: Job, folder: str, at: int, wait: bool):
    """Rank 1 is killed at one of the calls of its save; rank 0 must not wait for it for ever."""
    store = open_store(job, folder)
    store.save(tensors(job, seed=1), {"global_step": 1}, wait=True)
    job.barrier()
    if job.ranks.rank == 1:
        fault = Fault(at, None)
        threading.setprofile(fault)
        sys.setprofile(fault)
    try:
        store.save(tensors(job, seed=2), {"global_step": 2}, wait)
        store.close()
    except RuntimeError as error:
        return f"lost: {type(error).__name__}"
    return "not lost"


@pytest.mark.daily("2-True")
@pytest.mark.parametrize(("at", "wait"), [(2, True), (2, False), (4, False)])
def test_a_lost_rank_ends_the_save_and_leaves_the_old_checkpoint(tmp_path, at, wait):
    with RankPool(2) as pool:
        with pytest.raises(RankFailedError, match="rank 1 died") as caught:
            pool.run(lose_a_rank, str(tmp_path), at, wait, timeout=200)
        assert "did not answer" not in str(caught.value)
    assert find_newest_complete(tmp_path)[0].folder.name == "step-00000001"
    assert resume(ALONE, str(tmp_path), False) == (1, True)
