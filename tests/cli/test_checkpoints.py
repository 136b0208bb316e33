"""`checkpoints` shows what a run has saved, names what is damaged, and says in one line what is wrong."""

from __future__ import annotations

import math

import pytest
import torch
from checkpoint.plain_engine import SHAPES, PlainEngine, whole_region
from support.checkpoints import flip_last_bit, write_checkpoint

from pipeline.__main__ import main
from pipeline.checkpoint.catalog import Retention, diff_checkpoints, list_checkpoints, verify_checkpoint
from pipeline.checkpoint.manifest import MANIFEST, read_manifest
from pipeline.checkpoint.store import CheckpointStore
from pipeline.distributed.process_group import Job
from pipeline.distributed.ranks import Ranks

ALONE = Job(Ranks(0, 0, 1, 1), torch.device("cpu"))
SPLIT = "DeepSpeed, ZeRO stage 1, bf16, sequence_parallel 16, pipeline_stages 4, data-parallel 16"
SHARD = "rank-00000.safetensors"


@pytest.fixture
def run(tmp_path):
    """A run directory with the steps 20, 40 and 60; the later, the lower its loss."""
    directory = tmp_path / "llama-20260101-120000"
    store = CheckpointStore(directory / "checkpoints", Retention(5), ALONE, SPLIT)
    for step in (20, 40, 60):
        state = {"global_step": step, "tokens_seen": step * 1e9, "eval_loss": 100 / step}
        state["best_by"] = {"metric": "loss", "value": 100 / step, "mode": "min"}
        store.save_final(PlainEngine(0, 1, seed=step), state)
    return directory


@pytest.fixture
def look(run, capsys):
    """`look("verify")` -> (exit code, lines on stdout, lines on stderr)."""

    def function(*what, path=run):
        code = main(["checkpoints", str(path), *map(str, what)])
        out, err = capsys.readouterr()
        return code, [line.rstrip() for line in out.splitlines()], err.splitlines()

    return function


def checkpoint_of(run, step):
    return run / "checkpoints" / f"step-{step:08d}"


@pytest.mark.parametrize(("what", "state"), [([], "complete"), (["verify"], "verified")])
def test_the_list_has_one_line_for_each_checkpoint(look, what, state):
    code, lines, errors = look(*what)
    assert (code, errors, len(lines)) == (0, [], 4)
    assert lines[0].split() == ["step", "tokens", "size", "eval", "loss", "state", "saved", "by"]
    shown = " ".join(" ".join(lines[1:]).split())
    for row in (
        f"20 20,000,000,000 2 KiB 5.0000 {state} DeepSpeed, ZeRO",
        f"60 60,000,000,000 2 KiB 1.6667 {state} DeepSpeed, ZeRO",
    ):
        assert row in shown
    assert shown.count(f"{SPLIT}, 1 rank") == 3, "nothing is cut"


@pytest.mark.parametrize(("unit", "count"), [("samples", "384"), ("pairs", "401"), ("tokens", "401")])
def test_a_column_has_what_the_loss_counts_and_samples_without_their_weights(tmp_path, look, unit, count):
    store = CheckpointStore(tmp_path / "checkpoints", Retention(5), ALONE, SPLIT)
    state = {"global_step": 6, "tokens_seen": 401.5, "samples_seen": 384, "unit": unit}
    store.save_final(PlainEngine(0, 1, seed=6), state)
    code, lines, _ = look(path=tmp_path)
    assert code == 0
    assert [line.split()[:2] for line in lines] == [["step", unit], ["6", count]]


def test_a_flipped_bit_is_found_by_verify_with_file_and_tensor(run, look):
    flip_last_bit(checkpoint_of(run, 40) / SHARD)
    assert look()[0] == 0, "without reading it cannot be seen"
    code, lines, errors = look("verify")
    assert code == 2
    damaged = "1 of 3 checkpoints is damaged; a run resumes from the newest intact one"
    assert errors == [f"error: {run}: {damaged}"]
    states = [line.split()[5] for line in lines[1:] if line[0] != " " and "KiB" in line]
    assert states == ["verified", "damaged", "verified"]
    (named,) = [line for line in lines if line.startswith("step-00000040")]
    assert (
        f"{SHARD}: the content is damaged: its checksum differs (weight of head.weight); written on" in named
    )


@pytest.mark.parametrize("what", [[], ["verify"]])
def test_what_is_not_whole_is_named_without_reading(run, look, what):
    (checkpoint_of(run, 20) / SHARD).unlink()
    flip_last_bit(checkpoint_of(run, 40) / MANIFEST)
    (checkpoint_of(run, 60) / MANIFEST).unlink()
    checkpoint_of(run, 80).symlink_to(checkpoint_of(run, 60))
    checkpoint_of(run, 90).with_suffix(".partial").mkdir()  # a save under way
    code, lines, errors = look(*what)
    assert (code, len(errors)) == (2, 1)
    assert "4 of 4 checkpoints are damaged; restore their files, or start a new run with" in errors[0]
    named = [line for line in lines if line.startswith("step-")]
    assert f"step-00000020: {SHARD}: missing; written on " in named[0]
    assert "manifest.json is damaged" in named[1]
    assert named[2] == "step-00000060: it has no manifest.json"
    assert "step-00000080: it is a symbolic link" in named[3]
    assert len(named) == 4


def test_several_damaged_files_are_counted_and_read_to_the_end(tmp_path):
    manifest = write_checkpoint(checkpoint_in(tmp_path), [PlainEngine(rank, 6) for rank in range(6)])
    for rank in (1, 5):
        flip_last_bit(checkpoint_in(tmp_path) / f"rank-{rank:05d}.safetensors")
    done = []
    (row,) = list_checkpoints(tmp_path)
    assert row.problem is None
    row = verify_checkpoint(row, done.append)
    assert "rank-00001.safetensors" in row.problem
    assert row.problem.endswith("; and 1 more file")
    assert sum(done) == manifest.num_bytes == row.num_bytes
    assert len(done) > 1, "the bar moves before the end"


def checkpoint_in(run):
    path = checkpoint_of(run, 1)
    path.mkdir(parents=True, exist_ok=True)
    return path


def test_a_machines_part_is_shown_as_one(tmp_path, look):
    manifest = write_checkpoint(checkpoint_in(tmp_path), [PlainEngine(rank, 2) for rank in range(2)])
    files = [file.model_copy(update={"place": file.rank}) for file in manifest.files]
    apart = manifest.model_copy(update={"files": tuple(files)})
    (checkpoint_in(tmp_path) / MANIFEST).write_bytes(apart.encode())
    (checkpoint_in(tmp_path) / "rank-00001.safetensors").unlink()
    for what, state in ([], "complete"), (["verify"], "verified"):
        code, lines, _ = look(*what, path=tmp_path)
        assert code == 0
        assert f"{state}, 1 of 2 files here  plain, 2 ranks" in lines[1]


def test_the_difference_names_tensors_and_amounts(run, look):
    engine = PlainEngine(0, 1, seed=60)
    held = {key: tensor for key, _, tensor in engine.held}
    held["layers.0.weight", "weight"][7] += 3.0
    held["embed.weight", "weight"][:6] = math.nan
    held["embed.weight", "exp_avg"].mul_(1.5)
    engine.held = [each for each in engine.held if each[0] not in (("flag", "buffer"), ("batches", "buffer"))]
    engine.held.append((("batches", "buffer"), whole_region((2,)), torch.zeros(2, dtype=torch.int64)))
    store = CheckpointStore(run / "checkpoints", Retention(5), ALONE, SPLIT)
    store.save_final(engine, {"global_step": 70})
    code, lines, errors = look("diff", 60, "last")
    assert (code, errors) == (0, [])
    head = [" ".join(line.split()) for line in lines[:3]]
    assert head[0] == "kind changed max diff rel diff tensor"
    assert set(head[1:]) == {"buffer flag: only in step-00000060", "buffer batches: [] became [2]"}
    del lines[2]
    assert lines[2].split()[:3] == ["weight", "9.1%", "inf"]
    assert lines[2].endswith("  embed.weight")
    weight = PlainEngine(0, 1, seed=60).whole["layers.0.weight", "weight"]
    relative = f"{3 / float(weight.norm()):.2e}"
    assert lines[3].split() == ["weight", "2.1%", "3", relative, "layers.0.weight"]
    assert lines[4].split()[::3] == ["exp_avg", "5.00e-01"], "the optimizer's state after the model"
    assert len(lines) == 5
    assert look("diff", 70, 70) == (0, ["step-00000070 and step-00000070 have the same values"], [])
    assert look("diff", "best", 60)[1] == ["step-00000060 and step-00000060 have the same values"]


def test_the_difference_counts_what_is_done(run):
    one = checkpoint_of(run, 20)
    other = checkpoint_of(run, 40)
    done = []
    changes = list(diff_checkpoints(read_manifest(one), read_manifest(other), done.append))
    values = sum(math.prod(shape) for shape, _ in SHAPES.values())
    assert sum(done) == values
    assert 0 < len(changes) <= len(SHAPES)


@pytest.mark.parametrize(
    ("place", "what", "said"),
    [
        ("", ["diff", "30", "40"], "has no checkpoint of step 30; it has 20, 40, 60"),
        ("", ["diff", "first", "40"], "diff first: expected a step, `last` or `best`"),
        ("", ["diff", "40"], "expected verify, or diff A B"),
        ("", ["verfy"], "expected verify, or diff A B"),
        ("checkpoints", [], "is inside a run directory; give the run directory: "),
        ("checkpoints/step-00000040", [], "is inside a run directory; give the run directory: "),
        (
            "checkpoints/step-00000040",
            ["diff", "20", "40"],
            "is inside a run directory; give the run directory: ",
        ),
        (f"checkpoints/step-00000040/{SHARD}", [], "is no run directory: it has no folder checkpoints/"),
        ("logs", [], "is no run directory: it has no folder checkpoints/"),
        ("file", ["verify"], "is no run directory: it has no folder checkpoints/"),
        ("young", [], "has no checkpoints yet"),
        ("young", ["diff", "last", "20"], "has no complete checkpoint"),
        ("nowhere", ["verify"], "nowhere does not exist"),
        ("n" * 300, [], "File name too long"),
    ],
)
def test_a_mistake_is_one_line(run, look, place, what, said):
    (run / "logs").mkdir()
    (run / "file").touch()
    (run / "young" / "checkpoints").mkdir(parents=True)
    code, lines, errors = look(*what, path=run / place)
    assert (code, lines, len(errors)) == (2, [], 1)
    assert errors[0].startswith("error: ")
    assert said in errors[0]
