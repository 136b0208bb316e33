"""Format of log lines on the console and in a rank's file."""

from __future__ import annotations

import logging

import pytest

from pipeline.distributed.ranks import Ranks
from pipeline.monitoring.events import PLAN, TIME, Event
from pipeline.monitoring.logs import log_to_console, log_to_file
from pipeline.monitoring.trackers.interface import Trackers
from pipeline.monitoring.trackers.jsonl import JsonlTracker

ALONE = Ranks(0, 0, 1, 1)


@pytest.fixture
def console(capsys):
    """Start the log of a rank; the answer gives the lines that its console got since the last call."""

    def start(ranks=ALONE, level="info"):
        log_to_console(ranks, level)

        def lines():
            return capsys.readouterr().err.splitlines()

        return lines

    yield start
    logger = logging.getLogger("pipeline")
    for handler in logger.handlers:
        handler.close()
    logger.handlers.clear()
    logger.propagate = True


SPIKE = Event("loss_spike", "the loss of step 7 is 9", "look at the samples", fields={"at_step": 7})


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (SPIKE, "warning: loss_spike: the loss of step 7 is 9; look at the samples"),
        (Event("slow_rank", "rank 1 is slow", "look"), "warning: slow_rank: step 12: rank 1 is slow; look"),
        (
            Event("non_finite", "2 of 5 steps skipped", fields={"at_step": 9.0}),
            "warning: non_finite: step 9: 2 of 5 steps skipped",
        ),
        # Another step than its own is in the words of this one.
        (Event("memory_growth", "1 GiB at step 1"), "warning: memory_growth: step 12: 1 GiB at step 1"),
        (Event("corruption", "bits differ", level="error"), "error: corruption: step 12: bits differ"),
        (Event("profile", "profiled", level="info"), "profiled"),
        (Event(TIME, "Wall time 5s: startup 99%", level="info"), "Wall time 5s: startup 99%"),
    ],
)
def test_an_alert_is_one_line_of_the_console_and_news_is_none(console, event, line, tmp_path):
    lines = console()
    log_to_file(tmp_path, ALONE)
    with Trackers([JsonlTracker(tmp_path / "metrics.jsonl", start_step=0)]) as trackers:
        trackers.tell(12, event)
    assert lines() == [line]
    (kept,) = (tmp_path / "logs" / "rank00000.log").read_text().splitlines()
    told = line.removeprefix(f"{event.level}: ")
    assert kept.endswith(f"{event.level.upper()} pipeline.monitoring.trackers.interface {told}")


def test_of_several_ranks_one_shows_it(console, tmp_path):
    lines = console(Ranks(1, 1, 2, 2))
    log_to_file(tmp_path, Ranks(1, 1, 2, 2))
    for event in (SPIKE, Event("corruption", "bits differ", level="error")):
        Trackers().tell(12, event)
    assert lines() == []
    assert len((tmp_path / "logs" / "rank00001.log").read_text().splitlines()) == 2


def test_the_plan_is_left_to_the_closing_lines(console, tmp_path):
    lines = console()
    log_to_file(tmp_path, ALONE)
    with Trackers([JsonlTracker(tmp_path / "metrics.jsonl", start_step=0)]) as trackers:
        trackers.tell(9, Event(PLAN, "plan: x", level="info"))
    assert lines() == []
    assert "plan: x" in (tmp_path / "logs" / "rank00000.log").read_text()


def test_every_warning_says_that_it_is_one(console):
    lines = console()
    logger = logging.getLogger("pipeline.any")
    logger.info("news")
    logger.warning("W&B is offline")
    logger.error("gone")
    assert lines() == ["news", "warning: W&B is offline", "error: gone"]
