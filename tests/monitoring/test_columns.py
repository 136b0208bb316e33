"""docs/reference/metrics-and-alerts.md lacks no column and no event."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
from support.launch import DIGITS, ROOT, launch, run_directories, write_recipe

from pipeline.distributed.phases import PHASES
from pipeline.monitoring.columns import COLUMNS, OBJECTIVE_METRICS, PHASE_MEANINGS
from pipeline.monitoring.trackers.jsonl import read_metrics
from pipeline.objectives.cross_entropies import CausalLM, Classification
from pipeline.objectives.custom_loss import BUILT_IN_METRICS
from pipeline.objectives.preferences import KTO, PairLoss, PairSettings, PairwisePreference, RewardRanking

PAGE = ROOT / "docs" / "reference" / "metrics-and-alerts.md"
GROUPS = sorted({name.partition("/")[0] for name in COLUMNS})
COLUMN = re.compile(rf"({'|'.join(GROUPS)})/[\w/]+")
FROM_THE_OBJECTIVE = {"train/METRIC", "eval/METRIC"}
"""Entries of the metrics in OBJECTIVE_METRICS."""


def find_column(name: str) -> str | None:
    """Return the entry of COLUMNS that describes a column; `None` if no entry does."""
    group, _, metric = name.partition("/")
    if metric in OBJECTIVE_METRICS:
        return f"{group}/METRIC" if group in ("train", "eval") else None
    patterns = {
        described: re.sub(r"[A-Z]{2,}", ".+", described)
        for described in COLUMNS
        if described not in FROM_THE_OBJECTIVE
    }
    return next((described for described, pattern in patterns.items() if re.fullmatch(pattern, name)), None)


def columns_in_code() -> Iterator[str]:
    """Yield the constants of the meters and the loop that are names of columns."""
    for file in ("monitoring/metrics.py", "training/loop.py", "data/loader.py", "evaluation/held_out.py"):
        for node in ast.walk(ast.parse((ROOT / "pipeline" / file).read_text())):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and COLUMN.fullmatch(node.value)
            ):
                yield node.value


def events_in_code() -> Iterator[str]:
    """Yield the names of events that are constructed or declared in the program."""
    for path in (ROOT / "pipeline").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            is_event = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Event"
            if is_event and node.args and isinstance(node.args[0], ast.Constant):
                yield node.args[0].value
    for line in (ROOT / "pipeline" / "monitoring" / "events.py").read_text().splitlines():
        if declared := re.match(r'[A-Z_]+(?<!_FOLDER) = "(\w+)"$', line):
            yield declared[1]


def test_every_phase_is_described():
    assert tuple(PHASE_MEANINGS) == PHASES


def test_every_column_of_the_code_is_described():
    found = set(columns_in_code())
    assert len(found) > 20
    assert {name for name in found if find_column(name) is None} == set()


def test_every_metric_of_a_built_in_objective_is_described():
    pairs = PairwisePreference(PairSettings("dpo", PairLoss("sigmoid", 0.1), sft_weight=1.0))
    objectives = (CausalLM, Classification, KTO, RewardRanking, pairs)
    assert {metric for objective in objectives for metric in objective.means} == set(OBJECTIVE_METRICS)


def test_a_user_may_give_no_metric_the_name_of_a_built_in_column():
    built_in = {name.partition("/")[2] for name in COLUMNS if name.startswith(("train/", "eval/"))}
    assert {name for name in built_in if not re.search("[A-Z]", name)} == BUILT_IN_METRICS


def test_every_event_is_on_the_page():
    page = PAGE.read_text(encoding="utf-8")
    names = set(events_in_code())
    assert len(names) > 15
    assert {name for name in names if f"| `{name}` |" not in page} == set()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["text", "digits"])
def test_a_run_writes_no_column_that_is_not_described(tmp_path, kind):
    changes = {"log": {"price_per_device_hour": 2.0}}
    if kind == "digits":
        changes |= DIGITS
    recipe = write_recipe(tmp_path, **changes)
    done = launch("--config", str(recipe), ranks=2 if kind == "text" else 0)
    assert done.returncode == 0, done.stderr
    (run,) = run_directories(tmp_path)
    rows = read_metrics(run / "metrics.jsonl")
    names = {name for row in rows if "event" not in row for name in row} - {"step"}
    assert len(names) > 25
    assert {name for name in names if find_column(name) is None} == set()
