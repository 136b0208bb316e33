"""Steps that go wrong: left out so that nothing shows of them, gone back from, or the end of the run."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.corrupted_data import ALONE, BATCH, SPLITS, STEPS, read_events, read_loss_rows, train

from pipeline.config.schema import WatchConfig
from pipeline.distributed.process_group import Job
from pipeline.engine.interface import StepResult
from pipeline.errors import NonFiniteLossError, StoppedError
from pipeline.monitoring.events import Event
from pipeline.monitoring.trackers.jsonl import iterate_record
from pipeline.training.safeguard import MAX_IN_A_ROW, Safeguard


def both(job: Job, split, folder: str):
    """Whether a run that skips equals one whose data never held it."""
    watch = {"on_spike": "skip", "on_nonfinite": "skip"}
    # Step 41's batch is NaN in one sample, that after it too, and step 45's is far too high.
    poison = {40 * BATCH: math.nan, 41 * BATCH: math.inf, 46 * BATCH: 1e4}
    skipped = train(job, split, f"{folder}/skipped", poison, watch=watch)
    left_out = [[40 * BATCH, 42 * BATCH], [46 * BATCH, 47 * BATCH]]
    clean = train(job, split, f"{folder}/clean", {}, watch=watch, loader={"leave_out": left_out})
    same = all(torch.equal(a, b) for a, b in zip(skipped[0], clean[0], strict=True))
    return same and skipped[1] == clean[1]


@pytest.mark.slow
@pytest.mark.daily("single")  # as the engine alone, under all: tests/engine/test_refused_steps.py
@pytest.mark.parametrize("split", SPLITS)
def test_a_run_that_skipped_equals_one_whose_data_never_held_it(ranks, split, tmp_path):
    world_size, deepspeed = SPLITS[split]
    if split == "single":
        assert both(ALONE, deepspeed, str(tmp_path))
    else:
        assert all(ranks(world_size).run(both, deepspeed, str(tmp_path), timeout=500))
    assert read_loss_rows(tmp_path / "skipped") == read_loss_rows(tmp_path / "clean")
    assert len(read_loss_rows(tmp_path / "clean")) >= STEPS
    skips = read_events(tmp_path / "skipped", "skip")
    assert [(each["step"], each["first_sample"]) for each in skips] == [(41, 320), (41, 328), (45, 368)]
    told = read_events(tmp_path / "clean", "skip", "loss_spike", "non_finite")
    assert not [each for each in told if each["level"] != "info"]
    searched = [
        row["train/skipped_steps"] for row in read_loss_rows(tmp_path / "skipped") if "train/loss" in row
    ][-1]
    assert (searched > 0) == ("fp16" in split)  # steps that found the loss scale: they count


@pytest.mark.slow
@pytest.mark.nightly
def test_a_run_that_goes_on_skips_what_it_skipped(tmp_path):
    """The normal range is part of a checkpoint: without it nothing would be a spike for 32 steps."""
    changes: dict[str, Any] = {
        "checkpoint": {"every": 10, "keep_last": 9},
        "watch": {"on_spike": "skip", "on_nonfinite": "skip"},
    }
    poison = {40 * BATCH: math.nan, 46 * BATCH: 1e4}
    train(ALONE, None, str(tmp_path / "unbroken"), poison, **changes)
    train(ALONE, None, str(tmp_path / "killed"), poison, **changes)
    for step in (48, 50):  # killed behind a batch that it skipped, it goes on from before it
        shutil.rmtree(tmp_path / f"killed/checkpoints/step-{step:08d}", ignore_errors=True)
    train(ALONE, None, str(tmp_path / "killed"), poison, **changes)
    assert read_loss_rows(tmp_path / "killed") == read_loss_rows(tmp_path / "unbroken")
    for name in ("killed", "unbroken"):
        assert [each["step"] for each in read_events(tmp_path / name, "skip")] == [41, 46]


def gone_back(job: Job, split, folder: str):
    """A run that goes back, and one whose data never held what the first left out."""
    poison = {40 * BATCH: 1e4}
    changes: dict[str, Any] = {"checkpoint": {"every": 10, "keep_last": 9}}
    watch = {"on_spike": "rollback", "rollback_steps": 4}
    back = train(job, split, f"{folder}/back", poison, watch=watch, **changes)
    left_out = [[37 * BATCH, 41 * BATCH]]
    clean = train(job, split, f"{folder}/clean", {}, loader={"leave_out": left_out}, **changes)
    same = all(torch.equal(a, b) for a, b in zip(back[0], clean[0], strict=True))
    return same and back[1] == clean[1]


@pytest.mark.slow
@pytest.mark.daily("ddp")
@pytest.mark.parametrize("split", ["single", "ddp", "zero2-bf16", "zero3", "pipeline"])
def test_after_a_rollback_a_run_equals_one_whose_data_never_held_what_it_left_out(ranks, split, tmp_path):
    world_size, deepspeed = SPLITS[split]
    if split == "single":
        assert gone_back(ALONE, deepspeed, str(tmp_path))
    else:
        assert all(ranks(world_size).run(gone_back, deepspeed, str(tmp_path), timeout=500))
    back = tmp_path / "back"
    assert read_loss_rows(back) == read_loss_rows(tmp_path / "clean")
    (told,) = read_events(back, "rollback")
    assert (told["step"], told["from_step"]) == (30, 41)
    assert (told["first_sample"], told["last_sample"]) == (37 * BATCH, 41 * BATCH - 1)
    assert "step 41" in told["message"]
    abandoned = list(iterate_record(back / "metrics-until-step-41.jsonl"))
    assert [line["step"] for line in abandoned if "train/loss" in line] == list(range(31, 42))
    assert [line["event"] for line in abandoned if "event" in line][-1] == "loss_spike"
    assert sorted(path.name for path in (back / "checkpoints").glob("step-*"))[-1] == "step-00000048"


@pytest.mark.nightly
@pytest.mark.slow
def test_a_step_without_a_gradient_can_be_gone_back_from(tmp_path):
    changes: dict[str, Any] = {"checkpoint": {"every": 10, "keep_last": 9}}
    watch = {"on_nonfinite": "rollback", "rollback_steps": 1}
    back = train(ALONE, None, str(tmp_path / "back"), {40 * BATCH: math.nan}, watch=watch, **changes)
    leave_out = {"leave_out": [[40 * BATCH, 41 * BATCH]]}
    clean = train(ALONE, None, str(tmp_path / "clean"), {}, loader=leave_out, **changes)
    assert all(torch.equal(a, b) for a, b in zip(back[0], clean[0], strict=True))
    assert read_loss_rows(tmp_path / "back") == read_loss_rows(tmp_path / "clean")
    (told,) = read_events(tmp_path / "back", "rollback")
    assert (told["step"], told["from_step"]) == (40, 41)


@pytest.mark.slow
def test_log_counts_a_step_without_a_gradient_as_before(tmp_path):
    train(ALONE, None, str(tmp_path), {40 * BATCH: math.nan})
    last = [row for row in read_loss_rows(tmp_path) if "train/loss" in row][-1]
    assert last["step"] == STEPS
    assert last["train/skipped_steps"] == 1
    assert last["train/samples_seen"] == STEPS * BATCH


@pytest.mark.slow
def test_what_was_left_out_stays_left_out_when_the_run_goes_on(tmp_path):
    poison = {40 * BATCH: 1e4}
    changes: dict[str, Any] = {
        "checkpoint": {"every": 10, "keep_last": 9},
        "watch": {"on_spike": "rollback", "rollback_steps": 4},
    }
    train(ALONE, None, str(tmp_path / "run"), poison, **changes)
    before = read_loss_rows(tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints/step-00000048")
    train(ALONE, None, str(tmp_path / "run"), poison, **changes)
    assert read_loss_rows(tmp_path / "run") == before
    assert len(read_events(tmp_path / "run", "rollback")) == 1


@pytest.mark.slow
@pytest.mark.daily("non-finite")
@pytest.mark.parametrize(
    ("poison", "watch", "says"),
    [
        (1e4, {"on_spike": "stop"}, r"^loss_spike at step 41 ends the run \(watch.on_spike: stop\)$"),
        (math.nan, {"on_nonfinite": "stop"}, r"^non_finite at step 41 ends the run \(watch.on_nonfinite"),
        (1e4, {"on_spike": "rollback", "rollback_steps": 41}, "no checkpoint of step 0 or earlier"),
    ],
    ids=["spike", "non-finite", "nothing to go back to"],
)
def test_a_run_that_is_to_end_there_ends_there(tmp_path, poison, watch, says):
    with pytest.raises(StoppedError, match=says) as ended:
        train(ALONE, None, str(tmp_path), {40 * BATCH: poison}, watch=watch, checkpoint={"every": 10})
    assert ended.value.exit_code == 2
    names = [line["event"] for line in iterate_record(tmp_path / "metrics.jsonl") if "event" in line]
    assert {"loss_spike", "non_finite"}.intersection(names)


def result(loss: float, norm: float = 1.0, skipped: float = 0.0) -> StepResult:
    zero = torch.zeros((), dtype=torch.float64)
    return StepResult(
        zero, zero, torch.tensor(norm), torch.tensor(skipped), zero, None, loss=torch.tensor(loss).double()
    )


@pytest.mark.parametrize(
    ("bad", "kind"),
    [
        (lambda: result(math.nan, math.nan, 1.0), NonFiniteLossError),
        (lambda: result(50.0, 1.0, 1.0), StoppedError),
    ],
)
def test_a_run_that_only_leaves_out_ends(bad, kind):
    told: list[Event] = []
    safeguard = Safeguard(
        WatchConfig(on_spike="skip", on_nonfinite="skip"), 1, lambda _, event: told.append(event)
    )
    for step in range(40):
        assert safeguard.accepts_step(step + 1, result(2.0 + 0.01 * (step % 3)), (0, 8), str)
    limits = safeguard.limits
    assert limits is not None
    assert 2.0 < limits.loss < 5.0
    for _ in range(MAX_IN_A_ROW - 1):
        assert not safeguard.accepts_step(41, bad(), (0, 8), lambda first, last: "wiki 7")
    with pytest.raises(kind, match=f"the last {MAX_IN_A_ROW} batches"):
        safeguard.accepts_step(41, bad(), (0, 8), lambda first, last: "wiki 7")
    assert len(told) == MAX_IN_A_ROW
    assert "wiki 7" in told[0].message


@pytest.mark.parametrize(
    ("loss", "searched", "on_spike", "on_nonfinite", "counts"),
    [
        (2.0, True, "skip", "skip", True),  # it finds the loss scale
        (2.0, False, "skip", "skip", False),  # which could not fall
        (2.0, False, "skip", "log", True),
        (50.0, False, "skip", "log", False),  # a spike, whose gradient overflows
        (50.0, True, "log", "skip", True),
        (50.0, False, "log", "skip", False),
        (math.nan, False, "skip", "log", True),
        (math.nan, False, "log", "skip", False),
    ],
)
def test_in_fp16_a_gradient_that_overflows_is_what_its_loss_is(
    loss, searched, on_spike, on_nonfinite, counts
):
    watch = WatchConfig(on_spike=on_spike, on_nonfinite=on_nonfinite)
    safeguard = Safeguard(watch, 1, lambda step, event: None)
    for step in range(40):
        for detector, value in zip(safeguard.detectors, (2.0 + 0.01 * (step % 3), 1.0), strict=True):
            detector.add(value)
    bad = replace(result(loss, math.inf, 1.0), loss_scale=256.0, is_loss_scale_search=searched)
    assert safeguard.accepts_step(41, bad, (0, 8), lambda first, last: "wiki 7") is counts


def test_a_run_that_goes_back_and_back_ends():
    safeguard = Safeguard(WatchConfig(on_spike="rollback"), 1, lambda step, event: None)
    spike = Event("loss_spike", "the loss of step 41 is high", fields={"at_step": 41})
    for _ in range(MAX_IN_A_ROW):
        rollback = safeguard.act_on_alert(45, spike)
        assert rollback is not None
        assert safeguard.begin_rollback(rollback) == 33
    with pytest.raises(StoppedError, match="did not get beyond loss_spike"):
        safeguard.begin_rollback(rollback)
