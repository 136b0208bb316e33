"""The console at the start and the end of a run, and its number of lines."""

from __future__ import annotations

import json
import logging
import re
from typing import Any

import pytest
from support.launch import launch, run_directories, write_recipe
from support.terminal import run_in_terminal
from support.tiny import deepspeed_json, recipe, resolve

from pipeline.cli.train import build_parser
from pipeline.distributed.launch.environment import split_arguments
from pipeline.distributed.ranks import Ranks
from pipeline.monitoring.logs import log_to_console
from pipeline.monitoring.report.runs import summary_lines
from pipeline.planner.model import ModelSpec, ParameterSpec
from pipeline.planner.rank import RankSlice
from pipeline.planner.states import count_states

HALF = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
BF16 = {"bf16": {"enabled": True}}
HALVES = {"bf16": {"enabled": True, **HALF}}
SHARDED = {"stage3_param_persistence_threshold": 0}


def zero(stage: int, more: dict[str, Any] | None = None, **section: Any) -> dict[str, Any]:
    return deepspeed_json(stage, **section) | (more or {})


# A model of a million parameters in many matrices, as blocks have them.
MANY = ModelSpec("many", tuple(ParameterSpec(f"layers.{n}.weight", (100, 100)) for n in range(100)))


@pytest.mark.parametrize(
    ("json", "ranks", "expected"),
    [
        (None, 1, 16),
        (zero(1, BF16), 4, 2 + (2 + 12) / 4),
        (zero(2, BF16), 4, 2 + (2 + 12) / 4),
        (zero(3, BF16, **SHARDED), 4, 16 / 4),
        (zero(2, HALVES), 2, 2 + 1 + 3),
        (zero(3, HALVES, **SHARDED), 1, 10),
        (zero(2, BF16, offload_optimizer={"device": "cpu"}), 1, 2),
        (
            zero(3, BF16, offload_optimizer={"device": "cpu"}, offload_param={"device": "cpu"}, **SHARDED),
            2,
            0,
        ),
    ],
)
def test_memory_is_what_performance_md_says(json, ranks, expected):
    """And tests/planner/test_states.py counts."""
    config, resolved = resolve(recipe(batch={"global_batch_size": 8}), json, ranks)
    found = count_states(RankSlice.from_run(MANY, config, resolved)).device.total / MANY.numel
    assert found == pytest.approx(expected, rel=1e-3)


ROWS: list[dict[str, Any]] = [
    {"step": 0, "eval/loss": 4.0},
    {
        "step": 1,
        "train/loss": 3.0,
        "perf/elapsed_seconds": 4.0,
        "perf/goodput": 0.5,
        "train/tokens_seen": 100,
    },
    {"step": 10, "train/loss": 1.0, "train/tokens_seen": 1000},
    {"step": 10, "eval/loss": 1.5},
    {
        "step": 20,
        "train/loss": 2.0,
        "perf/elapsed_seconds": 204.0,
        "perf/goodput": 0.5,
        "train/tokens_seen": 2000,
    },
    {"step": 20, "eval/loss": 1.25},
]
STOPPED = {"step": 23, "event": "time", "elapsed_seconds": 400.0, "goodput": 0.3, "tokens_seen": 2345}
WITH_ACCURACY: list[dict[str, Any]] = [
    {"step": 0, "eval/loss": 2.0, "eval/accuracy": 0.1, "eval/more/accuracy": 1.0},
    {"step": 1, "train/loss": 2.0, "train/accuracy": 0.5},
    {"step": 2, "train/loss": 1.0, "train/accuracy": 0.25},
    {"step": 2, "eval/loss": 3.0, "eval/accuracy": 0.9, "eval/more/accuracy": 0.0},
    {"step": 2, "event": "plan", "level": "info", "message": "plan: memory 0.95 GiB, expected 0.94"},
]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (
            ROWS,
            [
                "steps          20 in 1m42s, 2.0k tokens",
                "loss           2 at step 20; lowest 1 at step 10",
                "eval loss      1.25 at step 20, the lowest",
            ],
        ),
        # Stopped behind the last row, and gone on from there.
        ([*ROWS, STOPPED], ["steps          23 in 2m00s, 2.3k tokens"]),
        ([*ROWS, STOPPED, ROWS[-2] | {"step": 30}], ["steps          30 in 1m42s, 2.0k tokens"]),
        (
            WITH_ACCURACY,
            [
                "steps          2 in 0s",
                "loss           1 at step 2, the lowest",
                "accuracy       0.25 at step 2; highest 0.5 at step 1",
                "eval loss      3 at step 2; lowest 2 at step 0",
                "eval accuracy  0.9 at step 2, the highest",
                "plan           memory 0.95 GiB, expected 0.94",
            ],
        ),
        (
            [{"step": 5, "eval/rewards/accuracy": 0.75, "eval/rewards/margin": 1.0}],
            ["steps          5 in 0s", "eval accuracy  0.75 at step 5, the highest"],
        ),
        ([{"step": 1, "train/loss": "NaN"}], ["steps          1 in 0s", "loss           nan at step 1"]),
        ([], []),
    ],
)
def test_a_run_is_summed_up_from_its_record(tmp_path, rows, expected):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert summary_lines(tmp_path)[: len(expected) if len(expected) == 1 else None] == expected


def test_a_record_that_cannot_be_read_leaves_it_out(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("[]\n[]\n")
    assert summary_lines(tmp_path) == []


@pytest.mark.parametrize(
    ("level", "shown"),
    [("debug", "diwe"), ("info", "iwe"), ("warning", "we"), ("error", "e")],
)
def test_the_console_shows_a_level_and_what_is_worse_and_files_all(level, shown, capsys):
    log_to_console(Ranks(0, 0, 1, 1), level)
    logger = logging.getLogger("pipeline.any")
    for name, number in (("d", 10), ("i", 20), ("w", 30), ("e", 40)):
        logger.log(number, name)
    assert [line[-1] for line in capsys.readouterr().err.splitlines()] == list(shown)
    assert logger.isEnabledFor(logging.INFO), "the run's files"


@pytest.mark.parametrize("options", [["--quiet"], ["--log-level", "warning"], ["--log-level=warning"]])
def test_every_launcher_hands_the_options_over(options):
    assert split_arguments(["--num_gpus", "2", *options, "max_steps=3"]) == (
        ["--num_gpus", "2"],
        [*options, "max_steps=3"],
    )
    assert build_parser("train.py").parse_args(options).log_level == "warning"


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    folder = tmp_path_factory.mktemp("told")
    recipe = write_recipe(folder)
    tree = json.loads(recipe.read_text())
    tree["data"]["eval_sets"] = {"more": {"paths": [str(folder / "texts" / "batch_plan.py")]}}
    recipe.write_text(json.dumps(tree))
    done = launch("--config", str(recipe), "name=tiny-told")
    assert done.returncode == 0, done.stderr
    return recipe, done, run_directories(folder)[-1]


def rows_and_events(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_the_plan_stands_before_the_first_step(told):
    _, done, run = told
    lines = done.stderr.splitlines()
    plan = {
        line.split()[0]: line for line in lines if re.match(r"(model|split|batch|steps|memory|run)  ", line)
    }
    assert re.search(r"llama, [\d,]+ parameters$", plan["model"])
    assert plan["split"].endswith("plain PyTorch, one process, fp32; 1 rank on cpu")
    assert "8 (micro_batch_size) x 1 (gradient_accumulation_steps) x 1" in plan["batch"]
    assert plan["steps"].endswith("10, 80 samples, 2,560 tokens")
    expected = re.search(
        r"([\d.]+) GiB expected \(weights, gradients and optimizer states 0.00\); "
        r"[\d.]+ GiB free of the \w+'s [\d.]+ GiB$",
        plan["memory"],
    )
    (took,) = [row for row in rows_and_events(run) if row.get("event") == "plan"]
    assert float(expected[1]) == pytest.approx(took["memory_expected_gib"], abs=0.01)
    assert took["memory_measured_gib"] == pytest.approx(took["memory_expected_gib"], rel=0.2)
    assert took["level"] == "info"
    assert str(run) in plan["run"]
    logged = (run / "logs" / "rank00000.log").read_text()
    assert all(line in logged for line in plan.values())
    first = next(number for number, line in enumerate(lines) if line == plan["run"])
    assert all("saved" not in line for line in lines[:first])


@pytest.mark.slow
def test_at_most_eight_lines_come_before_the_first_step(tmp_path):
    """Warnings, and the lines of data that is prepared for the first time, come in addition."""
    recipe = write_recipe(tmp_path)
    adapter = tmp_path / "adapter.yaml"
    adapter.write_text(json.dumps(json.loads(recipe.read_text()) | {"adapter": "lora"}))
    assert launch("--config", str(recipe), "name=tiny-first").returncode == 0
    run = run_directories(tmp_path)[-1]
    cases = {
        "new": ("--config", str(recipe)),
        "resumed": ("--config", str(recipe), f"run_dir={run}", "name=tiny-first", "max_steps=12"),
        "adapter": ("--config", str(adapter)),
    }
    for name, arguments in cases.items():
        done = launch(*arguments)
        assert done.returncode == 0, done.stderr
        lines = [line for line in done.stderr.splitlines() if not line.startswith("warning: ")]
        number = next(number for number, line in enumerate(lines, 1) if line.startswith("run  "))
        assert number <= 8, (name, lines)
        assert any(line.startswith("resuming ") for line in lines) == (name == "resumed")


@pytest.mark.slow
def test_evaluation_and_end_can_be_read_in_a_file(told):
    _, done, run = told
    lines = done.stdout.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("eval 10/10"))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = [row for row in rows if "eval/loss" in row][-1]
    for line, name in zip(lines[at + 1 : at + 3], ("source1", "more"), strict=True):
        loss, bits = (last[f"eval/{name}/{metric}"] for metric in ("loss", "bits_per_byte"))
        assert line.split() == [name, "loss", f"{loss:.4f}", "bits_per_byte", f"{bits:.4f}"]
        assert line.index("loss") == lines[at].index("loss")
    assert [line.split()[0] for line in lines[-6:]] == ["steps", "loss", "eval", "plan", "report", "run"]
    assert "\x1b" not in done.stdout + done.stderr


@pytest.mark.slow
def test_a_quiet_run_says_warnings_and_the_closing_lines(told):
    recipe, _, _ = told
    done = launch("--config", str(recipe), "--quiet", "name=tiny-quiet", "schedule.warmup=50")
    assert done.returncode == 0
    (warning,) = done.stderr.splitlines()
    assert warning.startswith("warning: schedule.warmup 50 is longer")
    assert [line.split()[0] for line in done.stdout.splitlines()] == [
        *("steps", "loss", "eval", "plan", "report", "run"),
    ]
    run = run_directories(recipe.parent)[-1]
    assert "parameters" in (run / "logs" / "rank00000.log").read_text()


@pytest.mark.slow
def test_no_color_takes_the_colours_from_a_terminal(told):
    look = f"main(['inspect', '--config', {str(told[0])!r}])"
    program = f"""
        import os
        from pipeline.__main__ import main
        {look}
        print("then")
        os.environ["NO_COLOR"] = "1"
        {look}
    """
    coloured, _, plain = run_in_terminal(program, 100).partition("\nthen\n")
    colours = re.compile(r"\x1b\[[\d;]*\b(3[0-7]|9[0-7])[\d;]*m")
    assert "in the loss" in plain
    assert colours.search(plain) is None
    assert colours.search(coloured) is not None
