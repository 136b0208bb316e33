"""Every participant of the benchmark trains a tiny model for a few steps, and their losses agree."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
THROUGHPUT = ROOT / "benchmarks" / "throughput.py"


@pytest.mark.nightly
@pytest.mark.slow
def test_all_participants_train_the_same_model(tmp_path):
    output = tmp_path / "results.json"
    command = [sys.executable, THROUGHPUT, "--model", "tiny", "--ranks", "1", "--precision", "fp32"]
    command += [
        "--stages",
        "plain",
        "2",
        "--steps",
        "2",
        "--rounds",
        "2",
        "--warmup",
        "2",
        "--start-together",
    ]
    done = subprocess.run(
        [*command, "--output", output], cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr + done.stdout
    results = json.loads(output.read_text())
    assert {row["name"] for row in results["participants"]} == {
        "ours",
        "pytorch",
        "pytorch+our-loss",
        "trainer",
        "ours stage 2",
        "deepspeed stage 2",
        "deepspeed+our-loss stage 2",
        "trainer stage 2",
    }
    losses = [row["loss"] for row in results["participants"]]
    assert max(losses) - min(losses) < 1e-4 * min(losses)
    for row in results["participants"]:
        assert len(row["round_tokens_per_second"]) == 2
        assert min(row["round_tokens_per_second"]) > 0
        assert row["peak_memory_gib"] > 0
        assert row["first_step_seconds"] > 0
    assert {(pair["ours"], pair["peer"]) for pair in results["ratios"]} == {
        ("ours", "pytorch"),
        ("ours", "pytorch+our-loss"),
        ("ours", "trainer"),
        ("ours stage 2", "deepspeed stage 2"),
        ("ours stage 2", "deepspeed+our-loss stage 2"),
        ("ours stage 2", "trainer stage 2"),
    }
    assert {claim["what"] for claim in results["claims"]} == {
        "tokens/s, ours over pytorch+our-loss",
        "tokens/s, ours stage 2 over deepspeed+our-loss stage 2",
        "first step, ours over trainer",
        "first step, ours stage 2 over trainer stage 2",
    }


@pytest.mark.parametrize("rows", ["packed", "unpacked"])
def test_every_model_has_a_valid_recipe_for_either_kind_of_rows(rows, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(THROUGHPUT.parent))
    from workload import MODELS, Workload, packed_tokens, write_recipe

    from pipeline.config.settings import load_settings

    for model in MODELS:
        data = "stdlib" if model == "default" else "random"
        write_recipe(tmp_path / "recipe.yaml", Workload.of(model, data, rows), "bf16", plain=True)
        config = load_settings(tmp_path / "recipe.yaml", None, []).config
        assert config.batch.micro_batch_size == MODELS[model]["micro_batch_size"]
        if data == "stdlib":
            assert config.data.separate_documents == (rows == "packed")
        else:
            assert config.data.kind == f"workload:{'packed' if rows == 'packed' else 'random'}_tokens"
    batch = packed_tokens("train", 8, 64, 100).__getitems__([0, 3])
    assert batch["input_ids"].shape == batch["position_ids"].shape == (2, 64)
    assert (batch["position_ids"] == 0).sum() > 2  # more documents than rows


def test_at_several_ranks_ours_is_measured_under_both_kinds_of_ddp(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(THROUGHPUT.parent))
    from argparse import Namespace

    from throughput import Group, group_tasks
    from workload import Workload

    def names(ranks, split, peers=None):
        group = Group("bf16", ranks, split, Workload.of("tiny"))
        return [task.name for task in group_tasks(Namespace(peers=peers, warmup=2), group, tmp_path)]

    both = ["ours (torch_ddp.json)", "ours (ddp.json)"]
    assert names(2, "plain") == [*both, "pytorch", "pytorch+our-loss", "trainer"]
    assert names(1, "plain", ["pytorch-compiled", "deepspeed"]) == ["ours", "pytorch-compiled"]
    assert names(1, "2", ["pytorch-compiled", "deepspeed"]) == ["ours stage 2", "deepspeed stage 2"]


@pytest.mark.parametrize("file", sorted((ROOT / "ds_configs").glob("*.json")), ids=lambda file: file.stem)
def test_a_shipped_split_has_no_auto_that_the_trainer_cannot_fill(file):
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    filled = HfTrainerDeepSpeedConfig.trainer_config_process.__code__.co_consts
    filled += HfTrainerDeepSpeedConfig.trainer_config_finalize.__code__.co_consts
    zero = json.loads(file.read_text()).get("zero_optimization", {})
    assert {f"zero_optimization.{key}" for key in zero if zero[key] == "auto"} <= {*filled}
