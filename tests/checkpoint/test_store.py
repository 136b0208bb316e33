"""One rank's checkpoints: what is saved, kept, passed over and told, also when the disk says no."""

from __future__ import annotations

import io
import logging
import math
import os
import pickle
import shutil
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from parity.measure import ALONE
from plain_engine import PlainEngine
from support.checkpoints import MaliciousPickle, flip_last_bit, verify
from test_manifest import resealed

from pipeline.checkpoint.catalog import Retention, SavedCheckpoint, SavedCheckpoints, find_newest_complete
from pipeline.checkpoint.manifest import MANIFEST, TABLE
from pipeline.checkpoint.peers import Peers
from pipeline.checkpoint.store import CheckpointStore
from pipeline.errors import CheckpointError


def make_store(folder, **policy):
    return CheckpointStore(folder, Retention(**{"keep_last": 3} | policy), ALONE, "plain PyTorch")


def state_at(step, **more):
    state = {"global_step": step, "tokens_seen": step * 100.0, **more}
    if more.get("eval_loss") is not None:
        state["best_by"] = {"metric": "loss", "value": more["eval_loss"], "mode": "min"}
    return state


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("wait", [True, False])
def test_a_save_comes_back(tmp_path, wait):
    store = make_store(tmp_path / "checkpoints")
    outcome = store.save(PlainEngine(0, 1, seed=4), state_at(10, eval_loss=0.5), wait)
    assert (outcome.problem, outcome.step, outcome.write_seconds is None) == (None, 10, not wait)
    store.close()
    assert [done.step for done in store.poll()] == ([] if wait else [10])
    assert store.poll() == []
    assert names(store.folder) == ["step-00000010"]
    assert verify(store.folder / "step-00000010") == []
    engine = PlainEngine(0, 1, "columns", seed=1)
    assert make_store(tmp_path / "checkpoints").resume(engine) == state_at(10, eval_loss=0.5)
    assert engine.is_model_of(4)


def test_training_goes_on_while_a_save_is_written(tmp_path):
    engine = PlainEngine(0, 1, seed=4)
    store = make_store(tmp_path)
    for seed in range(5, 8):
        outcome = store.save(engine, state_at(seed))
        assert outcome.stall_seconds > 0
        engine.forget()  # the next step changes every value
        engine = PlainEngine(0, 1, seed=seed)
    store.save_final(engine, state_at(8))
    ends = store.poll()
    assert [done.step for done in ends] == [5, 6, 7]
    assert all(done.problem is None and done.write_seconds for done in ends)
    for step, seed in ((6, 5), (7, 6), (8, 7)):
        engine = PlainEngine(0, 1)
        path = tmp_path / f"step-{step:08d}"
        assert verify(path) == []
        alone = make_store(tmp_path / "other" / path.name)
        shutil.copytree(path, alone.folder / path.name)
        alone.resume(engine)
        assert engine.is_model_of(seed)


def test_one_save_is_under_way_at_a_time(tmp_path):
    store = make_store(tmp_path)
    most = []
    for step in range(1, 6):
        store.save(PlainEngine(0, 1), state_at(step))
        most.append(sum(thread.name == "checkpoint" for thread in threading.enumerate()))
        assert len(list(tmp_path.glob("*.partial"))) <= 1
    store.close()
    assert max(most) <= 1
    assert names(tmp_path) == ["step-00000003", "step-00000004", "step-00000005"]


def test_the_end_of_a_save_is_told_though_it_was_asked_for_meanwhile(tmp_path, monkeypatch):
    store = make_store(tmp_path)
    found = []
    prune = store._pruner.prune

    def asked(*arguments):  # in the thread that writes, as a step that ends just now
        found.extend(store.poll())
        prune(*arguments)

    monkeypatch.setattr(store._pruner, "prune", asked)
    store.save(PlainEngine(0, 1), state_at(1))
    store.close()
    assert [done.step for done in [*found, *store.poll()]] == [1]


def test_a_rank_without_shards_has_no_file(tmp_path):
    """Else another machine's empty file would have to be brought along."""
    store = make_store(tmp_path)
    engine = PlainEngine(0, 1)
    engine.held = []
    for step, wait in enumerate((True, False), 1):
        store.save(engine, state_at(step), wait)
        store.wait()
        assert names(tmp_path / f"step-{step:08d}") == [MANIFEST, TABLE]


def test_the_same_step_is_written_once(tmp_path):
    store = make_store(tmp_path)
    store.save(PlainEngine(0, 1), state_at(1))
    store.save_final(PlainEngine(0, 1), state_at(1))
    before = (tmp_path / "step-00000001" / "manifest.json").stat().st_mtime_ns
    again = make_store(tmp_path)
    again.resume(PlainEngine(0, 1))
    again.save_final(PlainEngine(0, 1), state_at(1))
    assert (tmp_path / "step-00000001" / "manifest.json").stat().st_mtime_ns == before


@given(
    st.dictionaries(st.integers(0, 40), st.none() | st.floats(-1e9, 1e9), max_size=12),
    st.integers(1, 4),
    st.integers(0, 5),
    st.booleans(),
)
def test_what_stays(losses, keep_last, keep_every, keep_best):
    saved = [SavedCheckpoint(step, Path(), loss, sort_key=loss) for step, loss in sorted(losses.items())]
    stays = Retention(keep_last, keep_every, keep_best).steps_to_keep(SavedCheckpoints(tuple(saved)))
    assert stays <= set(losses)
    assert set(sorted(losses)[-keep_last:]) <= stays
    if keep_every:
        assert {step for step in losses if step % keep_every == 0} <= stays
    known = [loss for loss in losses.values() if loss is not None]
    if keep_best and known:
        assert min(known) in [losses[step] for step in stays]
    assert (
        len(stays) <= keep_last + len([s for s in losses if keep_every and s % keep_every == 0]) + keep_best
    )


def test_the_policy_is_applied(tmp_path):
    store = make_store(tmp_path, keep_last=2, keep_every=4, keep_best=True)
    for step, loss in enumerate([3.0, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0], 1):
        store.save(PlainEngine(0, 1), state_at(step, eval_loss=loss), wait=step % 2 == 0)
    store.close()
    assert [int(name[5:]) for name in names(tmp_path)] == [2, 4, 8, 9]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_evaluation_that_is_not_finite_is_never_the_best(tmp_path, bad):
    """-inf is the lowest of all numbers."""
    store = make_store(tmp_path, keep_last=1, keep_best=True)
    for step, loss in enumerate([bad, 3.0, bad, 4.0, bad], 1):
        store.save(PlainEngine(0, 1), state_at(step, eval_loss=loss), wait=True)
    store.close()
    assert [int(name[5:]) for name in names(tmp_path)] == [2, 5]


def test_all_of_it_is_on_the_disk_before_it_counts(tmp_path, monkeypatch):
    store = make_store(tmp_path)
    done = []
    fsync = os.fsync
    rename = os.rename

    def noted_fsync(descriptor):
        done.append(os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), tmp_path))
        fsync(descriptor)

    def noted_rename(source, target):
        done.append("renamed")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "rename", noted_rename)
    assert store.save(PlainEngine(0, 1), state_at(1), wait=True).problem is None
    partial = "step-00000001.partial"
    assert done == [
        f"{partial}/rank-00000.safetensors",
        f"{partial}/shards.safetensors",
        f"{partial}/manifest.json",
        partial,
        "renamed",
        ".",
    ]


def damage(path):
    flip_last_bit(path / "rank-00000.safetensors")


def test_damaged_ones_are_skipped_and_told(tmp_path, caplog):
    caplog.set_level(logging.INFO, "pipeline")
    store = make_store(tmp_path)
    for step in (1, 2, 3, 4):
        store.save(PlainEngine(0, 1, seed=step), state_at(step), wait=True)
    damage(tmp_path / "step-00000004")
    (tmp_path / "step-00000003" / "rank-00000.safetensors").unlink()
    later = make_store(tmp_path, keep_last=1)
    engine = PlainEngine(0, 1)
    assert later.resume(engine)["global_step"] == 2
    assert engine.is_model_of(2)
    lines = [record.getMessage() for record in caplog.records]
    told = [line for line in lines if "is skipped" in line]
    assert "step-00000004 is skipped" in told[0]
    assert "weight of head.weight" in told[0]
    assert "step-00000003 is skipped" in told[1]
    # What is said before anything is loaded: why not those, then which.
    said = [line for line in lines if "is skipped" in line or "resuming" in line]
    assert said[2:] == [f"resuming {tmp_path.parent} from step-00000002, saved by plain PyTorch"]
    # Going on: the damaged ones do not push out the good ones, and are written anew when their step comes.
    later.save(PlainEngine(0, 1, seed=3), state_at(3), wait=True)
    assert names(tmp_path) == ["step-00000003", "step-00000004"]
    assert find_newest_complete(tmp_path)[0].folder.name == "step-00000004"  # by its size
    later.save(PlainEngine(0, 1, seed=4), state_at(4), wait=True)
    assert names(tmp_path) == ["step-00000004"]
    assert verify(tmp_path / "step-00000004") == []


def without_manifest(path):
    (path / "manifest.json").unlink()


def emptied(path):
    shutil.rmtree(path)
    path.mkdir()


def a_file(path):
    shutil.rmtree(path)
    path.write_bytes(b"")


def a_link(path):
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


@pytest.mark.parametrize("change", [without_manifest, emptied, a_file, a_link])
def test_whatever_bears_a_checkpoints_name_and_is_none_is_told(tmp_path, caplog, change):
    folder = tmp_path / "checkpoints"
    store = make_store(folder)
    for step in (1, 2):
        store.save(PlainEngine(0, 1, seed=step), state_at(step), wait=True)
    change(folder / "step-00000002")
    caplog.clear()
    assert make_store(folder).resume(PlainEngine(0, 1))["global_step"] == 1
    (told,) = [line for line in caplog.messages if "is skipped" in line]
    assert told.startswith("step-00000002 is skipped: on ")
    good, skipped = find_newest_complete(folder)
    assert good.folder.name == "step-00000001"
    assert "step-00000002 is skipped" in skipped[0]


def test_a_step_saved_again_is_never_without_a_checkpoint(tmp_path):
    """Killed between the two renames: the old one has its name back."""
    store = make_store(tmp_path)
    store.save(PlainEngine(0, 1, seed=3), state_at(3), wait=True)
    (tmp_path / "step-00000003").rename(tmp_path / "step-00000003.replaced.partial")
    later = make_store(tmp_path)
    engine = PlainEngine(0, 1)
    assert later.resume(engine)["global_step"] == 3
    assert engine.is_model_of(3)


def test_a_step_saved_again_stays_where_another_machine_could_not_publish_it(tmp_path, monkeypatch):
    store = make_store(tmp_path)
    store.save(PlainEngine(0, 1, seed=3), state_at(3), wait=True)
    attempt = Peers.attempt
    monkeypatch.setattr(Peers, "attempt", lambda *given: [*attempt(*given), "rank 8 on node2: disk full"])
    store.save(PlainEngine(0, 1, seed=3), state_at(3, eval_loss=0.5), wait=True)
    monkeypatch.undo()
    engine = PlainEngine(0, 1)
    assert make_store(tmp_path).resume(engine) == state_at(3)
    assert engine.is_model_of(3)


def test_an_evaluation_loss_that_comes_late_is_saved(tmp_path):
    store = make_store(tmp_path)
    for loss in (None, None, 0.5, None):  # the second and the last change nothing
        store.save(PlainEngine(0, 1, seed=3), state_at(3, eval_loss=loss), wait=True)
    state = make_store(tmp_path).resume(PlainEngine(0, 1))
    assert state["eval_loss"] == 0.5
    assert names(tmp_path) == ["step-00000003"]


def test_damaged_ones_do_not_push_out_good_ones(tmp_path):
    store = make_store(tmp_path)
    for step in (1, 2, 3):
        store.save(PlainEngine(0, 1, seed=step), state_at(step), wait=True)
    damage(tmp_path / "step-00000003")
    later = make_store(tmp_path, keep_last=2)
    assert later.resume(PlainEngine(0, 1))["global_step"] == 2
    later.save(PlainEngine(0, 1), state_at(5), wait=True)
    assert [int(name[5:]) for name in names(tmp_path)] == [2, 3, 5]


def test_later_steps_of_an_earlier_run_do_not_push_out_new_ones(tmp_path):
    for step in (8, 9, 1, 2):
        store = make_store(tmp_path, keep_last=1)
        store.save(PlainEngine(0, 1), state_at(step), wait=True)
    assert [int(name[5:]) for name in names(tmp_path)] == [2, 9]


def test_a_successor_that_is_gone_removes_nothing(tmp_path, monkeypatch):
    store = make_store(tmp_path, keep_last=1)
    store.save(PlainEngine(0, 1), state_at(1), wait=True)
    pruned = store._pruner.prune

    def lost(manifest):
        (tmp_path / f"step-{manifest.global_step:08d}" / "rank-00000.safetensors").unlink()
        pruned(manifest)

    monkeypatch.setattr(store._pruner, "prune", lost)
    store.save(PlainEngine(0, 1), state_at(2), wait=True)
    good, skipped = find_newest_complete(tmp_path)
    assert good.folder.name == "step-00000001"
    assert "step-00000002 is skipped" in skipped[0]
    assert "missing" in skipped[0]


SHARD = "rank-00000.safetensors"
PLANTED = {
    "a pickle as a shard": lambda step, outside: (step / SHARD).write_bytes(outside.pickle),
    "a pickle as the table": lambda step, outside: (step / TABLE).write_bytes(outside.pickle),
    "a link as the table": lambda step, outside: as_link(step / TABLE, outside.step / TABLE),
    "a pickle as the manifest": lambda step, outside: (step / MANIFEST).write_bytes(outside.pickle),
    "a path in the manifest": lambda step, outside: rename_in_manifest(step, f"../../outside/2/{SHARD}"),
    "a whole path in the manifest": lambda step, outside: rename_in_manifest(step, f"{outside.step}/{SHARD}"),
    "a link as a shard": lambda step, outside: as_link(step / SHARD, outside.step / SHARD),
    "a link as the manifest": lambda step, outside: as_link(step / MANIFEST, outside.step / MANIFEST),
    "a link as the folder": lambda step, outside: as_link(step, outside.step),
}


def as_link(path, target):
    path.rename(path.with_name(f"moved-{path.name}"))
    path.symlink_to(target)


def rename_in_manifest(step, name):
    """Somebody who can compute checksums altered it; the file of that name is right but for its place."""
    (step / SHARD).unlink()
    content = (step / MANIFEST).read_bytes()
    (step / MANIFEST).write_bytes(resealed(content, lambda m: m["files"][0].update(name=name)))


class Outside:
    """A good checkpoint of step 2 that is not the run's, and bytes that make `owned` when unpickled."""

    def __init__(self, folder):
        self.step = folder / "outside" / "2"
        self.owned = folder / "owned"
        store = make_store(folder / "outside")
        store.save(PlainEngine(0, 1, seed=2), state_at(2), wait=True)
        (folder / "outside" / "step-00000002").rename(self.step)
        size = (self.step / SHARD).stat().st_size
        self.pickle = pickle.dumps(MaliciousPickle(self.owned)).ljust(size, b"\0")


@pytest.mark.parametrize("plant", PLANTED)
def test_what_is_planted_neither_runs_nor_leads_outside(tmp_path, monkeypatch, plant):
    """The last good checkpoint is taken; nothing is opened or removed outside of the run."""
    outside = Outside(tmp_path)
    store = make_store(tmp_path / "run")
    for step in (1, 2):
        store.save(PlainEngine(0, 1, seed=step), state_at(step), wait=True)
    PLANTED[plant](store.folder / "step-00000002", outside)
    (store.folder / "latest").symlink_to(outside.step)
    (store.folder / "step-00000009.partial").symlink_to(outside.step)
    opened = []
    for module in (os, io):
        monkeypatch.setattr(module, "open", noting(module.open, opened))
    engine = PlainEngine(0, 1)
    later = make_store(store.folder)
    assert later.resume(engine)["global_step"] == 1
    assert engine.is_model_of(1)
    assert [path for path in opened if path.startswith(str(tmp_path / "outside"))] == []
    assert f"{store.folder}/step-00000001/{SHARD}" in opened
    later.save_final(PlainEngine(0, 1, seed=2), state_at(2))
    assert not outside.owned.exists()
    assert names(outside.step) == [MANIFEST, SHARD, TABLE]


def noting(function, opened):
    def noted(path, flags, *arguments, **options):
        # As the system will: O_NOFOLLOW opens no link.
        if isinstance(flags, int) and flags & os.O_NOFOLLOW and os.path.islink(path):
            return function(path, flags, *arguments, **options)
        opened.append(os.path.realpath(path))
        return function(path, flags, *arguments, **options)

    return noted


def test_nothing_whole_is_an_error_and_nothing_at_all_is_not(tmp_path):
    assert make_store(tmp_path).resume(PlainEngine(0, 1)) is None
    store = make_store(tmp_path)
    store.save(PlainEngine(0, 1), state_at(1), wait=True)
    damage(tmp_path / "step-00000001")
    with pytest.raises(CheckpointError, match="has no intact checkpoint") as caught:
        make_store(tmp_path).resume(PlainEngine(0, 1))
    assert "\n" not in str(caught.value)


def test_what_killed_saves_left_goes_at_the_next_save(tmp_path):
    left = ["step-00000001.partial", "step-00000002.removed.partial", "step-00000003.replaced.partial"]
    for name in left:
        (tmp_path / name / "inner").mkdir(parents=True)
    (tmp_path / ".meeting-0-0").touch()
    (tmp_path / "notes.txt").touch()
    assert find_newest_complete(tmp_path) == (None, [])
    store = make_store(tmp_path)
    store.save(PlainEngine(0, 1), state_at(1), wait=True)
    assert names(tmp_path) == ["notes.txt", "step-00000001"]


def test_a_full_disk_leaves_the_old_checkpoint_and_the_run(small_disk, caplog):
    store = make_store(small_disk / "checkpoints")
    engine = PlainEngine(0, 1, seed=3)
    store.save(engine, state_at(1), wait=True)
    with (small_disk / "filler").open("wb") as file:
        file.write(bytes(shutil.disk_usage(small_disk).free))
    for wait in (True, False):
        outcome = store.save(engine, state_at(2 + wait), wait)
        assert "has 0 KiB free" in outcome.problem
    with pytest.raises(CheckpointError, match="not saved"):
        store.save_final(engine, state_at(5))
    assert names(store.folder) == ["step-00000001"]
    assert find_newest_complete(store.folder)[0].folder.name == "step-00000001"
    (small_disk / "filler").unlink()
    assert store.save(engine, state_at(6), wait=True).problem is None


def test_a_disk_that_fills_up_while_it_is_written(small_disk, monkeypatch):
    """Another program takes the room between the look and the write."""
    monkeypatch.setattr("pipeline.checkpoint.peers.Peers.find_disk_shortage", lambda *_: None)
    store = make_store(small_disk / "checkpoints")
    engine = PlainEngine(0, 1, seed=3)
    store.save(engine, state_at(1), wait=True)
    with (small_disk / "filler").open("wb") as file:
        file.write(bytes(shutil.disk_usage(small_disk).free - 4096))
    assert "No space left" in store.save(engine, state_at(2), wait=True).problem
    assert store.save(engine, state_at(3)).problem is None  # not known yet
    store.close()
    (ended,) = store.poll()
    assert "No space left" in ended.problem
    assert "\n" not in ended.problem
    assert names(store.folder) == ["step-00000001"]


def test_short_memory_is_said_once_and_training_waits(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("pipeline.checkpoint.store.available_memory", lambda: 1000)
    store = make_store(tmp_path)
    for step in (1, 2):
        outcome = store.save(PlainEngine(0, 1), state_at(step))
        assert outcome.write_seconds > 0
        assert store.poll() == [outcome]  # what it took is measured as that of any other
    assert sum("memory" in record.getMessage() for record in caplog.records) == 1


def test_moments_that_appear_later_are_saved(tmp_path):
    """An optimizer has none before its first step that counts."""
    store = make_store(tmp_path)
    young = PlainEngine(0, 1)
    young.held = [each for each in young.held if each[0][1] != "exp_avg"]
    for step, wait in ((1, True), (2, True), (3, False), (4, False)):
        store.save(young if step % 2 else PlainEngine(0, 1, seed=5), state_at(step), wait)
    store.close()
    assert [done.problem for done in store.poll()] == [None, None]
    engine = PlainEngine(0, 1, seed=1)
    make_store(tmp_path).resume(engine)
    assert engine.is_model_of(5)


def test_shares_that_do_not_add_up_are_never_published(tmp_path):
    engine = PlainEngine(0, 2)  # half of a model
    assert "do not form whole tensors" in make_store(tmp_path).save(engine, state_at(1), wait=True).problem
    assert names(tmp_path) == []


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="run_dir"):
        make_store(tmp_path / "file" / "checkpoints")
