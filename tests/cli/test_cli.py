"""The command line before a run: help, plans and mistakes, quick and without torch."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import yaml
from support.launch import ROOT, make_environment

from pipeline.config.split import Device

ZERO2 = str(ROOT / "ds_configs" / "zero2.json")
HEAVY = [
    "torch",
    "deepspeed",
    "transformers",
    "wandb",
    "numpy",
    "sklearn",
    "rich",
    "pipeline.training.run_rank",
]
# What launch/train.py, or `python -m pipeline`, does, and then: which of the heavy modules came in.
WRAPPER = f"""
import importlib, sys
main = importlib.import_module(sys.argv.pop(1)).main
try:
    code = main()
except SystemExit as exit:
    code = exit.code
print("imported:", *[name for name in {HEAVY!r} if name in sys.modules])
sys.exit(code)
"""


def section(text, heading):
    """The part of a dry run under `# heading`."""
    parts = [part for part in text.split("# ") if part.startswith(heading)]
    assert len(parts) == 1
    return parts[0].partition("\n")[2]


IMPORTS_NOTHING = {
    "launch/train.py --dry-run": (
        ["pipeline.cli.train", "--dry-run", "--deepspeed", ZERO2, "--world-size", "64"],
        0,
    ),
    "launch/train.py with a typo": (["pipeline.cli.train", "model.num_layer=4"], 2),
    "train --help": (["pipeline.__main__", "train", "--help"], 0),
    "checkpoints --help": (["pipeline.__main__", "checkpoints", "--help"], 0),
}


@pytest.mark.slow
@pytest.mark.parametrize(("words", "code"), IMPORTS_NOTHING.values(), ids=IMPORTS_NOTHING)
def test_what_starts_nothing_imports_nothing(words, code):
    done = subprocess.run(
        [sys.executable, "-c", WRAPPER, *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=make_environment(),
        check=False,
        timeout=300,
    )
    assert done.stdout.splitlines()[-1] == "imported:"
    assert done.returncode == code
    assert "Traceback" not in done.stderr


@pytest.fixture
def main(capfd, monkeypatch):
    """`main(*arguments)` in this process -> (exit code, stdout, stderr)."""
    from pipeline.cli.train import main

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(ROOT)

    def function(*arguments):
        try:
            code = main(arguments)
        except SystemExit as end:  # argparse leaves so
            code = end.code
        return code, *capfd.readouterr()

    return function


@pytest.fixture
def plan(main):
    """`plan(*arguments)`: what --dry-run prints."""

    def function(*arguments):
        code, out, err = main("--dry-run", *arguments)
        assert (code, err) == (0, "")
        return out

    return function


def test_help_names_the_options_and_where_the_keys_stand(main):
    code, text, err = main("--help")
    assert (code, err) == (0, "")
    for word in (
        "--deepspeed",
        "--config",
        "--dry-run",
        "--world-size",
        "key=value",
        "docs/reference/configuration.md",
    ):
        assert word in text
    assert "local_rank" not in text


def test_a_dry_run_shows_everything_a_run_would_use(plan):
    sizes = ("max_steps=10", "batch={micro_batch_size: 8}", "data.sequence_length=256")
    text = plan("--deepspeed", ZERO2, "--world-size", "64", *sizes)
    recipe = yaml.safe_load(section(text, "recipe"))
    assert recipe["max_steps"] == 10
    assert recipe["optimizer"]["eps"] == 1e-8, "defaults are filled in"
    split = json.loads(section(text, "DeepSpeed"))
    assert split["train_batch_size"] == 512
    assert '"auto"' not in text
    assert "ZeRO stage 2" in section(text, "split")
    assert "64 ranks" in section(text, "split")
    equation = section(text, "batch")
    assert (
        "8 (micro_batch_size) x 1 (gradient_accumulation_steps) x 64 (data-parallel ranks) = 512" in equation
    )
    steps, remark = section(text, "steps").strip().splitlines()
    assert steps == "10 optimizer steps, 5,120 samples, 1,310,720 tokens"
    assert remark.startswith("schedule.warmup 30 is longer than the run of 10 steps")


def test_a_dry_run_without_deepspeed_is_plain_pytorch(plan):
    text = plan()
    assert section(text, "split").strip() == "plain PyTorch, one process, fp32, 1 rank"
    assert "# DeepSpeed" not in text


@pytest.mark.parametrize("split", [[], ["--deepspeed", "ds_configs/torch_ddp.json"]], ids=str)
def test_several_ranks_without_deepspeed_are_ddp(plan, split):
    text = plan("--world-size", "2", *split)
    precision = "bf16" if split and Device.cpu().bf16 else "fp32"  # the file says auto
    assert section(text, "split").strip() == f"plain PyTorch, DistributedDataParallel, {precision}, 2 ranks"
    assert "# DeepSpeed" not in text


@pytest.mark.parametrize("parallel", ["single", "dp"])
def test_one_process_on_several_ranks_is_refused(main, parallel):
    code, out, err = main("--dry-run", "--world-size", "2", f"engine.parallel={parallel}")
    assert (code, out) == (2, "")
    assert err == (
        "error: `parallel: single` or `dp` on several ranks: both use one process; every rank would train a "
        "separate model; use one process, or parallel: ddp\n"
    )
    assert main("--dry-run", "--world-size", "2", "--deepspeed", f"ds_configs/{parallel}.json")[0] == 2


def test_a_dry_run_counts_epochs_where_the_recipe_does(plan):
    text = plan("--config", "launch/recipes/digits_cnn.yaml", "max_epochs=7")
    assert section(text, "steps").startswith("7 epochs")


def test_only_one_rank_prints_the_plan(plan, monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)  # a run in this process has set it
    for rank in ("1", "0"):
        for name, value in (("WORLD_SIZE", "4"), ("RANK", rank), ("LOCAL_RANK", rank)):
            monkeypatch.setenv(name, value)
        text = plan("--deepspeed", ZERO2, f"--local_rank={rank}")
        assert ("x 4 (data-parallel ranks)" in text) == (rank == "0")
        assert bool(text) == (rank == "0")


def test_overrides_may_stand_before_between_and_after_options(main):
    between = ("max_steps=7", "--deepspeed", ZERO2, "model.num_layers=3", "--dry-run", "seed=9")
    code, out, err = main(*between, "ds.fp16.enabled=false")
    assert (code, err) == (0, "")
    recipe = yaml.safe_load(section(out, "recipe"))
    assert (recipe["max_steps"], recipe["model"]["num_layers"], recipe["seed"]) == (7, 3, 9)
    assert json.loads(section(out, "DeepSpeed"))["fp16"] == {"enabled": False}


def test_a_plan_that_does_not_divide_is_told_before_anything_starts(main):
    plan = ("--dry-run", "--deepspeed", ZERO2, "--world-size", "3")
    code, out, err = main(*plan, "batch={global_batch_size: 32}")
    assert (code, out) == (2, "")
    assert err.startswith("error: batch: global_batch_size = 32 on 3 data-parallel ranks")
    assert err.endswith("use a global_batch_size of 30 or 33\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model.num_layers=4"], "overrides are written without dashes: model.num_layers=4"),
        (
            ["--dry-run", "--ds.fp16.enabled=true"],
            "overrides are written without dashes: ds.fp16.enabled=true",
        ),
        (["--bogus"], "unrecognized argument --bogus"),
        (["--deepspeed_config=x.json"], "unrecognized argument --deepspeed_config=x.json"),
        (["my.yaml"], "my.yaml: a file without its option; write --config my.yaml"),
        (["ds/zero9.json"], "write --deepspeed ds/zero9.json"),
        (["\u2013\u2013dry-run"], "begins with a dash that is no hyphen"),
        (["--seed=4"], "unrecognized argument --seed=4"),
        (["--world-size", "8"], "--world-size works only with --dry-run"),
        (
            ["--dry-run", "--world-size", "0"],
            "argument --world-size: got '0', expected 1 to 999,999,999 ranks",
        ),
        (
            ["--dry-run", "--world-size", "many"],
            "argument --world-size: got 'many', expected 1 to 999,999,999 ranks",
        ),
    ],
)
def test_a_wrong_option_is_told_with_the_usage(main, arguments, message):
    code, out, err = main(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("usage: train.py")
    assert err.splitlines()[-1].startswith("train.py: error: ")
    assert message in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["ds.zero_optimization.stage=3"],
            "command line: ds.zero_optimization.stage changes the DeepSpeed JSON, but none is given; "
            "add --deepspeed FILE.json",
        ),
        (
            ["--config", "launch/recipes/digit_cnn.yaml"],
            'launch/recipes/digit_cnn.yaml: no such file (did you mean "digits_cnn.yaml"?)',
        ),
        (
            ["--deepspeed", "ds_configs/zer02.json"],
            'ds_configs/zer02.json: no such file (did you mean "zero2.json"?)',
        ),
        (["num_layers"], "command line: 'num_layers' is not an override; write section.key=value"),
        (["ds=4", "--deepspeed", ZERO2], "command line: 'ds=4' is not an override; write section.key=value"),
        (["--deepspeed", ZERO2, "ds.stage=4"], "command line: ds.stage: unknown key"),
        (["seed=one"], "command line: seed: input should be a valid integer, given 'one'"),
        (
            ["engine.precision=bf16", "--deepspeed", ZERO2],
            "command line: engine: with --deepspeed the JSON decides the precision (bf16, fp16); "
            "remove the section",
        ),
    ],
)
def test_a_mistake_is_one_line(main, arguments, message):
    code, out, err = main(*arguments)
    assert (code, out, err) == (2, "", f"error: {message}\n")
