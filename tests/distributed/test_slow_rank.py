"""A rank that is really slowed is named, with its host, and in the metrics."""

from __future__ import annotations

import json
import logging
import os
import time
from unittest.mock import patch

import pytest
from support.tiny import recipe, resolve, token_bundle

from pipeline.assemble import assemble
from pipeline.training import Loop


class Heard(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def warnings_of_a_run(job, folder, slow_rank):
    """What each rank's log says of a run in which the forward of one takes 200 ms longer."""
    changes = {"engine": {"parallel": "ddp"}, "max_steps": 20, "log": {"every": 1}}
    config, resolved = resolve(recipe(**changes), None, job.ranks.world_size)
    run = assemble(config, resolved, job, token_bundle(), folder)
    if job.ranks.rank == slow_rank:
        run.engine.module.register_forward_pre_hook(lambda *_: time.sleep(0.2))
    heard = Heard()
    logging.getLogger("pipeline").addHandler(heard)
    with (
        patch("os.getloadavg", lambda: (0.5, 0.5, 0.5)),
        run.sinks,
        Loop(run) as loop,
    ):  # whoever else is there
        while loop.step() is not None:
            pass
    logging.getLogger("pipeline").removeHandler(heard)
    run.loader.close()
    return heard.lines, os.getpid()


@pytest.mark.slow
def test_a_slowed_rank_is_named_once_and_measured(ranks, tmp_path):
    (lines, _), (_, pid) = ranks(2).run(warnings_of_a_run, tmp_path, 1)
    (line,) = [line for line in lines if " is slow: " in line]
    assert line.startswith("rank 1 on ")
    assert f"(pid {pid}) is slow: the forward takes it" in line
    rows = [json.loads(row) for row in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "perf/slowest_rank" in row][1:]
    assert [row["perf/slowest_rank"] for row in rows].count(1) > 0.8 * len(rows)
    for row in rows:
        assert row["perf/slowest_rank_own_time_seconds"] > 0.02
        assert row["perf/own_time_seconds"] < row["perf/slowest_rank_own_time_seconds"]
