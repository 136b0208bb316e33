"""Alerts: what they answer to rows, and what the answers do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.errors import NonFiniteLossError
from pipeline.monitoring.alerts import (
    RollbackRequested,
    RowDetails,
    StopRequested,
    check_row,
    collect_alert_state,
    restore_alerts,
)
from pipeline.monitoring.alerts.rules import ALERTS, MAX_CONSECUTIVE_SKIPS, EvalDivergence, NonFiniteStepLimit
from pipeline.monitoring.events import Event


def skipped(steps: int) -> RowDetails:
    return RowDetails({"train/loss": float("nan")} | ({"train/skipped_in_a_row": steps} if steps else {}))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_skips_in_a_row_end_the_run(precision):
    alert = NonFiniteStepLimit(precision, 0, 1000)
    limit = MAX_CONSECUTIVE_SKIPS[precision]
    assert alert(100, skipped(0)) is None
    assert alert(100, skipped(limit - 1)) is None
    answer = alert(101, skipped(limit))
    assert isinstance(answer, StopRequested)
    assert f"the last {limit} steps had an infinite or NaN gradient (loss nan)" in str(answer.error)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_run_of_few_steps_none_of_which_was_taken_is_an_error(precision):
    alert = NonFiniteStepLimit(precision, 20, 24)
    assert alert(23, skipped(3)) is None
    assert alert(24, skipped(3)) is None  # one was taken
    answer = alert(24, skipped(4))
    assert (answer is None) == (precision == "fp16")  # which may still search its loss scale


def test_a_good_last_step_ends_no_run_that_goes_on_at_its_end():
    assert NonFiniteStepLimit("fp32", 24, 24)(24, skipped(0)) is None


def test_what_watchers_say_is_told_and_the_first_stop_raises_its_error():
    rows = []
    told = []
    high = Event("loss_spike", "the loss is high", "lower the learning rate")

    def tells(step, seen):
        rows.append((step, seen))
        return high

    def ends(step, seen):
        return StopRequested(NonFiniteLossError("enough"))

    quiet = [tells, lambda step, seen: None]
    assert check_row(quiet, 3, RowDetails({"train/loss": 9.0}), lambda *event: told.append(event)) is None
    assert rows == [(3, RowDetails({"train/loss": 9.0}))]
    assert told == [(3, high)]
    with pytest.raises(NonFiniteLossError, match="enough") as ended:
        check_row([tells, ends, tells], 4, RowDetails({}), lambda *event: told.append(event))
    assert told == [(3, high), (4, high)]
    assert ended.value.exit_code == 2
    back = RollbackRequested(4, high)
    assert check_row([tells, ends], 4, RowDetails({}), lambda step, event: back) is back  # no other is asked


def test_what_watchers_keep_is_restored_by_name_and_may_be_missing():
    """A checkpoint of an earlier version has nothing of them, or not of all."""
    learned = EvalDivergence()
    learned(0, RowDetails({"eval/loss": 3.0}))
    kept = json.loads(
        json.dumps(collect_alert_state([learned, NonFiniteStepLimit("fp32", 0, 9), lambda step, seen: None]))
    )
    assert list(kept) == ["eval_divergence"]
    for state in ({}, {"of a later version": {}}, kept):
        again = EvalDivergence()
        restore_alerts([again, NonFiniteStepLimit("fp32", 0, 9)], state)
        assert (again.state_dict() == learned.state_dict()) == (state == kept)


@pytest.mark.parametrize("name", ALERTS)
def test_every_rule_is_explained(name):
    page = (Path(__file__).parents[3] / "docs" / "reference" / "metrics-and-alerts.md").read_text()
    assert any(f"`{name}`" in line for line in page.splitlines() if line.startswith("| "))
