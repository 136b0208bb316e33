"""Watchers: what they answer to rows, and what the answers do."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from pipeline.errors import NonFiniteLossError
from pipeline.watchers import MAX_CONSECUTIVE_SKIPS, NonFiniteSteps, ask


def skipped(steps: int) -> dict[str, float]:
    return {"train/loss": float("nan")} | ({"train/skipped_in_a_row": steps} if steps else {})


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_skips_in_a_row_end_the_run(precision):
    watcher, limit = NonFiniteSteps(precision, 0, 1000), MAX_CONSECUTIVE_SKIPS[precision]
    watcher(100, skipped(0))
    watcher(100, skipped(limit - 1))
    with pytest.raises(NonFiniteLossError) as ended:
        watcher(101, skipped(limit))
    assert f"the last {limit} steps had an infinite or NaN gradient (loss nan)" in str(ended.value)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_run_of_few_steps_none_of_which_was_taken_is_an_error(precision):
    watcher = NonFiniteSteps(precision, 20, 24)
    watcher(23, skipped(3))
    watcher(24, skipped(3))  # one was taken
    searches_loss_scale = precision == "fp16"
    with nullcontext() if searches_loss_scale else pytest.raises(NonFiniteLossError):
        watcher(24, skipped(4))


def test_a_good_last_step_ends_no_run_that_goes_on_at_its_end():
    NonFiniteSteps("fp32", 24, 24)(24, skipped(0))


def test_alerts_are_logged_and_the_first_error_ends_the_run(caplog):
    rows = []

    def tells(step, row):
        rows.append((step, row))
        return "the loss is high"

    def ends(step, row):
        raise NonFiniteLossError("enough")

    ask([tells, lambda step, row: None], 3, {"train/loss": 9.0})
    assert rows == [(3, {"train/loss": 9.0})]
    assert caplog.messages == ["the loss is high"]
    with pytest.raises(NonFiniteLossError, match="enough") as ended:
        ask([tells, ends, tells], 4, {})
    assert len(rows) == 2
    assert ended.value.exit_code == 2
