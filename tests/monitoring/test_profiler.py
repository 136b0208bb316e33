"""The section `profile`: the steps that were asked for are in the files, and no number of the run changes."""

from __future__ import annotations

import gzip
import json
import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from monitoring.test_rows import ALONE, Engine
from support.tiny import recipe, resolve, token_bundle

from pipeline.distributed.ranks import Ranks
from pipeline.monitoring.profiler import (
    PROFILE_FOLDER,
    OomSnapshotWriter,
    StepProfiler,
    build_profiler,
    format_most_expensive,
    snapshot_if_profiling,
    snapshot_on_oom,
)
from pipeline.training.assemble import assemble
from pipeline.training.loop import TrainLoop


def profiler_of(config, parts, folder: Path):
    start = parts.start.global_step
    tell = parts.trackers.tell
    return build_profiler(config, folder, job=parts.job, start=start, tell=tell)


def run(folder: Path, *, stop_at: int = 0, **profile: int) -> list[dict[str, Any]]:
    """Rows and events of a run of eight steps; those that are left, where it goes on."""
    folder.mkdir(exist_ok=True)
    batch = {"micro_batch_size": 8, "global_batch_size": 8}  # few events, which are most of the time
    config, resolved = resolve(recipe(profile=profile, eval={"every": 3}, batch=batch), None, 1)
    parts = assemble(config, resolved, ALONE, token_bundle(), folder)
    parts = replace(parts, engine=Engine(parts.engine, signal.SIGTERM, stop_at))
    try:
        profiler = profiler_of(config, parts, folder)
        with parts.trackers, profiler as profiled, TrainLoop(parts, None, profiled) as loop:
            loop.train()
    finally:
        parts.loader.close()
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def told(rows: list[dict[str, Any]]) -> list[str]:
    return [row["message"] for row in rows if row.get("event") == "profile"]


def losses(rows: list[dict[str, Any]]) -> list[Any]:
    keys = ("step", "train/loss", "train/grad_norm", "eval/loss")
    return [[row.get(key) for key in keys] for row in rows if "event" not in row]


def traced(folder: Path) -> dict[str, int]:
    """Trace file -> steps of the optimizer in it."""
    return {
        path.name: sum("Optimizer.step#" in name for name in names(path))
        for path in (folder / PROFILE_FOLDER).glob("trace-*")
    }


def names(trace: Path) -> list[str]:
    """Names of the ranges of a trace."""
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return [each.get("name", "") for each in events]


def shares(table: str) -> float:
    """The sum of the shares of all operators, in percent."""
    (head,) = [line for line in table.splitlines() if "Self CPU %" in line]
    column = re.split(r"\s{2,}", head.strip()).index("Self CPU %")
    rows = [re.split(r"\s{2,}", line.strip()) for line in table.splitlines()]
    found = [row[column].strip() for row in rows if len(row) > column]
    return sum(float(share[:-1]) for share in found if re.fullmatch(r"[\d.]+%", share))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return run(tmp_path_factory.mktemp("plain") / "run")


@pytest.mark.slow
def test_without_the_section_nothing_is_there(tmp_path, plain):
    config, resolved = resolve(recipe(), None, 1)
    parts = assemble(config, resolved, ALONE, token_bundle(), tmp_path)
    with profiler_of(config, parts, tmp_path) as profiled, profiled(1) as around:
        assert not isinstance(around, StepProfiler)
        assert not torch.autograd.profiler._is_profiler_enabled
    parts.loader.close()
    assert not (tmp_path / PROFILE_FOLDER).exists()
    assert told(plain) == []


@pytest.mark.slow
@pytest.mark.daily("1-2")
@pytest.mark.parametrize(("first", "count"), [(1, 2), (7, 5)])
def test_the_steps_asked_for_are_in_trace_and_table(tmp_path, plain, first, count):
    rows = run(tmp_path / "run", start_step=first, num_steps=count)
    last = min(first + count - 1, 8)
    assert losses(rows) == losses(plain)
    assert traced(tmp_path / "run") == {f"trace-rank0-step{first}.json.gz": last - first + 1}
    table = (tmp_path / "run" / PROFILE_FOLDER / "operators.txt").read_text()
    assert table.startswith(f"steps {first} to {last}\n")
    assert "aten::mm" in table
    (line,) = told(rows)
    assert line.startswith(
        f"profiled steps {first} to {last}: {tmp_path / 'run' / PROFILE_FOLDER} has the trace"
    )
    assert re.search(r"most expensive operators: \S.* \d+ %, \S.* \d+ %", line)  # some names have spaces
    assert not torch.autograd.profiler._is_profiler_enabled


@pytest.mark.slow
def test_a_run_that_goes_on_profiles_what_is_left(tmp_path, plain):
    """And a run that is stopped keeps what it had."""
    asked = {"start_step": 4, "num_steps": 4}
    assert told(run(tmp_path / "run", stop_at=5, **asked))[0].startswith("profiled steps 4 to ")
    stopped = int(
        re.findall(r"steps 4 to (\d)", (tmp_path / "run" / PROFILE_FOLDER / "operators.txt").read_text())[0]
    )
    rows = run(tmp_path / "run", **asked)
    assert losses(rows) == losses(plain)
    assert told(rows)[-1].startswith(f"profiled steps {stopped + 1} to 7: ")
    assert traced(tmp_path / "run") == {
        "trace-rank0-step4.json.gz": stopped - 3,
        f"trace-rank0-step{stopped + 1}.json.gz": 7 - stopped,
    }


def of_steps(folder: Path, steps: tuple[int, int], start: int, told: list) -> StepProfiler:
    """Return a profiler of these steps on the CPU, which adds its events to `told`."""
    device = torch.device("cpu")
    return StepProfiler(folder, steps, start=start, device=device, tell=lambda *event: told.append(event))


def test_a_step_that_comes_again_begins_no_second_profile(tmp_path):
    """It was left out, or the run went back."""
    told = []
    with of_steps(tmp_path, (2, 3), 0, told) as profiler:
        for step in (1, 1, 2, 2, 3, 3, 1, 2, 3, 4):
            with profiler(step):
                torch.ones(4, 4) @ torch.ones(4, 4)
    assert [step for step, _ in told] == [3]
    assert list(traced(tmp_path)) == ["trace-rank0-step2.json.gz"]
    assert not torch.autograd.profiler._is_profiler_enabled


@pytest.mark.slow
def test_a_trace_that_cannot_be_written_ends_nothing(tmp_path, plain, caplog):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / PROFILE_FOLDER).write_text("in the way")
    rows = run(tmp_path / "run", start_step=2, num_steps=1)
    assert losses(rows) == losses(plain)
    assert told(rows) == []
    assert sum("the profile is not written (FileExistsError" in each.message for each in caplog.records) == 1


@pytest.mark.parametrize("start", [0, 100])
def test_steps_have_the_numbers_of_the_run_and_no_share_of_its_time(tmp_path, start):
    """One step warms up, unless the process begins with the first profiled step."""
    told = []
    with of_steps(tmp_path, (101, 103), start, told) as profiler:
        for step in (100, 101, 102, 102, 103, 104)[start // 100 :]:  # the second is left out, and comes again
            with profiler(step):
                torch.ones(400, 400) @ torch.ones(400, 400)
    (trace,) = (tmp_path / PROFILE_FOLDER).glob("trace-*")
    steps = [name for name in names(trace) if name.startswith("ProfilerStep")]
    assert sorted(steps) == [f"ProfilerStep#{step}" for step in (101, 102, 102, 103)]
    table = (tmp_path / PROFILE_FOLDER / "operators.txt").read_text()
    assert table.startswith("steps 101 to 103\n")
    assert "ProfilerStep" not in table
    assert shares(table) == pytest.approx(100, abs=1)  # each is rounded
    assert "ProfilerStep" not in told[0][1].message


def test_the_most_expensive_operators_are_told_with_their_shares():
    class Row:
        def __init__(self, key, time):
            self.key = key
            self.self_cpu_time_total = time

    rows = [Row("a", 10), Row("b", 60), Row("c", 30), Row("d", 0)]
    assert format_most_expensive(rows, "self_cpu_time_total") == "b 60 %, c 30 %, a 10 %"


def test_other_ranks_do_not_profile(tmp_path):
    config, _ = resolve(recipe(profile={"start_step": 1, "num_steps": 2}), None, 1)
    second = replace(ALONE, ranks=Ranks(1, 1, 2, 2))
    with build_profiler(config, tmp_path, job=second, start=0, tell=print) as profiled, profiled(1):
        torch.ones(4, 4) @ torch.ones(4, 4)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [None, OSError("full")])
def test_memory_that_runs_out_is_written_once_and_hides_no_error(tmp_path, caplog, error):
    written = []

    def dump(path):
        written.append(path)
        if error is not None:
            raise error

    observer = OomSnapshotWriter(tmp_path / PROFILE_FOLDER / "memory-rank0.pickle", dump)
    for _ in range(2):
        observer(0, 1, 2, 3)
    assert written == [str(tmp_path / PROFILE_FOLDER / "memory-rank0.pickle")]
    said = "cannot be written (full)" if error else f"memory snapshot: {written[0]}"
    assert said in caplog.text


def test_no_memory_is_watched_on_a_cpu_or_unasked(tmp_path):
    config, _ = resolve(recipe(), None, 1)
    with snapshot_if_profiling(config, ALONE, tmp_path), snapshot_on_oom(torch.device("cpu"), tmp_path / "x"):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_that_runs_out_leaves_what_it_held(tmp_path):
    path = tmp_path / PROFILE_FOLDER / "memory-rank0.pickle"
    with snapshot_on_oom(torch.device("cuda"), path):
        held = torch.ones(1 << 20, device="cuda")
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
        del held
    assert path.stat().st_size > 1000
    before = path.stat().st_mtime_ns
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    assert path.stat().st_mtime_ns == before
