"""metrics.jsonl: parseable by anyone, nothing lost in a kill, nothing doubled by a resume."""

import inspect
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.monitoring.events import CORRUPTION, ROLLBACK, Event
from pipeline.monitoring.trackers.jsonl import (
    METRICS_FILE,
    JsonlTracker,
    MetricsFileError,
    encode_row,
    iterate_record,
    read_metrics,
    read_newest,
    replay,
)

FLOATS = st.floats(allow_nan=True, allow_infinity=True)
KEYS = st.text(min_size=1).filter(lambda key: key not in ("step", "event"))  # no mean has such a name
ROWS = st.dictionaries(KEYS, FLOATS | st.integers())


def refuse(constant: str) -> float:
    raise AssertionError(f"{constant} is not JSON")


@pytest.mark.slow
@given(step=st.integers(0), row=ROWS)
def test_a_row_is_one_line_of_strict_json_and_reads_back_equal(step, row, tmp_path_factory):
    line = encode_row(step, row)
    assert line.count(b"\n") == 1
    json.loads(line, parse_constant=refuse)
    path = tmp_path_factory.mktemp("rows") / "metrics.jsonl"
    path.write_bytes(line)
    (read,) = read_metrics(path)
    assert read.pop("step") == step
    assert read.keys() == row.keys()
    assert all(read[key] == row[key] or (math.isnan(read[key]) and math.isnan(row[key])) for key in row)


@given(
    steps=st.lists(st.integers(0, 20)).map(sorted), start_step=st.integers(1, 21), torn_bytes=st.integers(0)
)
def test_resume_keeps_exactly_the_rows_up_to_its_step(steps, start_step, torn_bytes, tmp_path_factory):
    path = tmp_path_factory.mktemp("resume") / "metrics.jsonl"
    torn = encode_row(1, {"train/loss": 1.5})[: torn_bytes % 20]
    path.write_bytes(b"".join(encode_row(step, {"train/loss": step / 3}) for step in steps) + torn)
    tracker = JsonlTracker(path, start_step=start_step)
    tracker.write(start_step + 1, {"train/loss": 0.5})
    tracker.close(0)
    kept = [step for step in steps if step <= start_step]
    assert [row["step"] for row in read_metrics(path)] == [*kept, start_step + 1]
    assert [item.name for item in path.parent.iterdir()] == ["metrics.jsonl"]


def test_why_a_run_went_back_stays_in_its_record(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    tracker = JsonlTracker(path, start_step=0)
    for step in range(1, 9):
        tracker.write(step, {"train/loss": 1 / step})
    tracker.tell(8, Event("slow_rank", "rank 2 is slow"))
    tracker.tell(8, Event(CORRUPTION, "the weights differ", fields={"ranks": "2"}))
    tracker.close(0)
    for start_step in (5, 4):  # the checkpoint of step 5 was no good
        JsonlTracker(path, start_step=start_step).close(0)
        *kept, told = iterate_record(path)
        assert [row["step"] for row in kept] == list(range(1, start_step + 1))
        assert (told["step"], told["from_step"], told["ranks"]) == (start_step, 8, "2")


@pytest.mark.nightly
@pytest.mark.slow
def test_going_on_reads_a_long_record_a_row_at_a_time(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    with path.open("wb") as file:
        for step in range(1, 50_001):
            file.write(encode_row(step, {f"train/number_{number}": step / 7 for number in range(12)}))
    inode = path.stat().st_ino
    program = "import sys; " + inspect.cleandoc(
        """
        import resource
        from pathlib import Path
        from pipeline.monitoring.trackers.jsonl import JsonlTracker, iterate_metrics
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        JsonlTracker(Path(sys.argv[1]), start_step=49_990).close(0)
        assert sum(1 for _ in iterate_metrics(Path(sys.argv[1]))) == 49_990
        print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
        """
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, check=True)
    assert int(done.stdout) < path.stat().st_size / 2  # all rows at once take eight times the file
    assert path.stat().st_ino == inode  # cut, not written anew


def test_a_new_run_starts_with_no_rows(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(encode_row(3, {"train/loss": 1.0}))
    JsonlTracker(path, start_step=0).close(0)
    assert path.read_bytes() == b""


def test_events_stand_between_the_rows_and_are_no_rows(tmp_path: Path):
    spike = Event("loss_spike", "the loss is NaN", "look at it", "error", {"sample": 3, "source": "code"})
    path = tmp_path / "metrics.jsonl"
    tracker = JsonlTracker(path, start_step=0)
    tracker.write(1, {"train/loss": 2.0})
    tracker.tell(2, spike)
    tracker.write(2, {"train/loss": math.inf})
    tracker.tell(3, spike)
    tracker.close(0)
    assert read_metrics(path) == [{"step": 1, "train/loss": 2.0}, {"step": 2, "train/loss": math.inf}]
    line = {"step": 2, "event": "loss_spike", "level": "error", "message": "the loss is NaN"}
    line |= {"advice": "look at it", "sample": 3, "source": "code"}
    assert list(iterate_record(path))[1] == line
    JsonlTracker(path, start_step=2).close(0)
    assert [each["step"] for each in iterate_record(path)] == [1, 2, 2]


def test_the_newest_row_with_a_number_is_found_from_the_end(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    assert read_newest(path, "perf/x") is None
    written = [{"step": step, "perf/x": float(step)} for step in range(1, 40_000)]
    path.write_text("".join(json.dumps(each) + "\n" for each in written) + '{"step": 40000, "per')
    assert read_newest(path, "perf/x") == {"step": 39_999, "perf/x": 39_999.0}
    assert read_newest(path, "perf/y") is None


def test_every_row_is_in_the_file_before_write_returns(tmp_path: Path):
    tracker = JsonlTracker(tmp_path / "metrics.jsonl", start_step=0)
    for step in range(1, 4):
        tracker.write(step, {"train/loss": math.nan})
        assert len(read_metrics(tmp_path / "metrics.jsonl")) == step
    tracker.close(0)


def test_reading_forgives_a_torn_last_line_and_no_other(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(encode_row(1, {"a/b": 1.0}) + b'{"step": 2, "a/')
    assert [row["step"] for row in read_metrics(path)] == [1]
    path.write_bytes(b"garbage\n" + encode_row(1, {"a/b": 1.0}))
    with pytest.raises(MetricsFileError, match=r"metrics\.jsonl:1: not a row"):
        read_metrics(path)


def test_a_full_disk_is_one_line_that_names_path_and_reason(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")
    tracker = JsonlTracker(path, start_step=0)
    with pytest.raises(MetricsFileError, match=r"metrics\.jsonl: .*No space left on device") as caught:
        tracker.write(1, {"train/loss": 1.0})
    assert "\n" not in str(caught.value)
    with pytest.raises(MetricsFileError, match="No such file or directory"):
        JsonlTracker(tmp_path / "missing" / "metrics.jsonl", start_step=0)


def write(folder: Path, start_step: int, *words: tuple) -> None:
    """Rows `(first, last)`, rollbacks `(to, from, "back")`."""
    tracker = JsonlTracker(folder / METRICS_FILE, start_step=start_step)
    for first, last, *back in words:
        if back:
            tracker.tell(first, Event(ROLLBACK, "back", fields={"from_step": last}))
        else:
            for step in range(first, last + 1):
                tracker.write(step, {"train/loss": 1.0})
    tracker.close(0)


def told(folder: Path, start_step: int) -> list[int | tuple]:
    """Steps of rows, and (rollbacks, steps given up) of rollbacks."""
    return [
        (line["rewinds"], line["steps_given_up"]) if "event" in line else line["step"]
        for line in replay(folder / METRICS_FILE, start_step)
    ]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([(1, 3)], [1, 2, 3]),
        ([(1, 6), (4, 6, "back"), (5, 6), (2, 6, "back"), (3, 8)], [1, 2, (2, 6), *range(3, 9)]),
        ([(1, 6), (4, 6, "back"), (5, 7), (4, 7, "back"), (5, 8)], [1, 2, 3, 4, (1, 2), (2, 5), 5, 6, 7, 8]),
    ],
    ids=["none", "one inside of what another gave up", "two to one step"],
)
def test_rollbacks_are_counted_with_what_they_gave_up(tmp_path, words, expected):
    write(tmp_path, 0, *words)
    assert told(tmp_path, 8) == expected
    write(tmp_path, 8, (9, 12), (8, 12, "back"))
    rollbacks = [each for each in expected if isinstance(each, tuple)] or [(0, 0)]
    assert told(tmp_path, 99)[-1] == (rollbacks[-1][0] + 1, rollbacks[-1][1] + 4)


@pytest.mark.parametrize("killed", [1, 2])
def test_a_rollback_that_a_kill_had_come_about_again_counts_once(tmp_path, killed):
    write(tmp_path, 0, (1, 6), (4, 6, "back"), (5, 5))
    for _ in range(killed):
        JsonlTracker(tmp_path / METRICS_FILE, start_step=4).close(0)
        assert told(tmp_path, 4) == [1, 2, 3, 4], "it is still to come"
        write(tmp_path, 4, (5, 6), (4, 6, "back"), (5, 8))
    assert set(told(tmp_path, 8)) == {*range(1, 9), (1, 2)}
