"""Trackers on threads of their own: nothing waits for them; what fails or blocks is dropped with one line."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
from trackers_of_tests import Recorded

from pipeline.checkpoint.catalog import SavedCheckpoints
from pipeline.monitoring.events import Event
from pipeline.monitoring.trackers import interface as dispensable
from pipeline.monitoring.trackers.interface import Trackers, TrackerThread

PATIENCE = 60  # seconds, on a busy machine
EVENT = Event("loss_spike", "the loss is 9")


class Gated:
    """Waits in one of its methods until the gate opens, and keeps what it was given."""

    def __init__(self, at: str, gate: threading.Event):
        self.at = at
        self.gate = gate
        self.calls: list[tuple] = []
        self.entered = threading.Event()

    def _do(self, what: str, *given) -> None:
        if what == self.at:
            self.entered.set()
            self.gate.wait(PATIENCE)
        self.calls.append((what, *given))

    def write(self, step, row):
        self._do("write", step, row)

    def tell(self, step, event):
        self._do("tell", step, event)

    def show(self, what):
        self._do("show", what)

    def close(self, exit_code):
        self._do("close", exit_code)


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    gate = threading.Event()
    yield gate
    gate.set()


def threaded(tracker, name: str = "it", **how) -> TrackerThread:
    return TrackerThread(lambda: tracker, name, **how)


def dropped(caplog) -> list[str]:
    return [each.message for each in caplog.records if "dropped" in each.message]


def ended(tracker: TrackerThread) -> bool:
    tracker._thread.join(PATIENCE)
    return not tracker._thread.is_alive()


def test_calls_come_in_their_order_with_the_row_as_it_was(gate):
    tracker = Gated("write", gate)
    row = {"train/loss": 1.0}
    shown = SavedCheckpoints(())
    with Trackers([threaded(tracker)]) as trackers:
        trackers.write(1, row)
        row["train/loss"] = 2.0
        trackers.tell(1, EVENT)
        trackers.show(shown)
        trackers.write(2, row)
        gate.set()
    calls = [("write", 1, {"train/loss": 1.0}), ("tell", 1, EVENT), ("show", shown)]
    assert tracker.calls == [*calls, ("write", 2, {"train/loss": 2.0}), ("close", 0)]


def test_one_thread_makes_a_sink_and_calls_it():
    """MLflow's runs and sqlite3's connections are of the thread that made them."""
    threads = []

    class Threads(Recorded):
        def __init__(self):
            threads.append(threading.current_thread())

        def write(self, step, row):
            threads.append(threading.current_thread())

        def close(self, exit_code):
            threads.append(threading.current_thread())

    with Trackers([TrackerThread(Threads, "it")]) as trackers:
        trackers.write(1, {})
    assert len(threads) == 3
    assert len(set(threads)) == 1
    assert threads[0].daemon
    assert threads[0] is not threading.current_thread()


def test_one_whose_queue_is_full_is_dropped_and_given_nothing_more(gate, caplog, monkeypatch):
    monkeypatch.setattr(dispensable, "QUEUE_SIZE", 3)
    monkeypatch.setattr(dispensable, "CLOSE_SECONDS", 0.1)
    tracker = Gated("write", gate)
    other = Gated("", gate)
    thread = threaded(tracker, resend=", and a second start sends them")
    with Trackers([thread]) as trackers:
        trackers.write(0, {})
        assert tracker.entered.wait(PATIENCE)
        for step in range(1, 9):
            trackers.write(step, {})
            trackers.tell(step, EVENT)
    with Trackers([threaded(other)]) as trackers:
        trackers.write(0, {})
    why = (
        "it hangs and is 3 rows and events behind; metrics.jsonl has all rows, and a second start sends them"
    )
    assert dropped(caplog) == [f"it is dropped ({why}); the run continues without it"]
    gate.set()
    assert ended(thread)
    assert tracker.calls == [("write", 0, {})], "not even its close"
    assert len(other.calls) == 2


@pytest.mark.parametrize(
    ("at", "left"), [("write", "did not take its last 2 rows and events"), ("close", "did not close")]
)
def test_one_that_blocks_at_the_end_is_dropped_after_a_while(gate, caplog, monkeypatch, at, left):
    monkeypatch.setattr(dispensable, "CLOSE_SECONDS", 0.2)
    tracker = Gated(at, gate)
    with Trackers([threaded(tracker)]) as trackers:
        trackers.write(1, {})
        trackers.tell(1, EVENT)
        assert at == "close" or tracker.entered.wait(PATIENCE)
    (line,) = dropped(caplog)
    assert line.startswith(f"it is dropped (it {left} within 0 s; metrics.jsonl has all rows);")


def test_the_end_says_whom_it_waits_for_and_waits_no_longer_than_it_may(gate, caplog, monkeypatch):
    monkeypatch.setattr(dispensable, "QUIET_SECONDS", 0.1)
    caplog.set_level("INFO", logger="pipeline")
    trackers = Trackers([threaded(Gated("close", gate), "a"), threaded(Gated("", gate), "b")])
    trackers.close(143, at_most=0.5)
    lines = [each.message for each in caplog.records]
    assert lines[0] == "waiting up to 0 s for a to take the last rows"
    assert [line.split()[0] for line in lines[1:]] == ["a"]


@pytest.mark.parametrize("raised", [ConnectionError("no answer"), SystemExit(3), asyncio.CancelledError()])
def test_whatever_is_raised_ends_that_sink_alone(caplog, raised):
    def fail(step, row):
        raise raised

    tracker = Gated("", threading.Event())
    tracker.write = fail  # type: ignore[method-assign]
    thread = threaded(tracker)
    with Trackers([thread]) as trackers:
        for step in range(3):
            trackers.write(step, {})
    assert ended(thread)
    assert [line.startswith(f"it is dropped ({type(raised).__name__}: ") for line in dropped(caplog)] == [
        True
    ]
    assert tracker.calls == []
