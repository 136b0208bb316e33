"""Every participant of the benchmark trains a tiny model for a few steps, and their losses agree."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.benchmarks import import_benchmark

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
THROUGHPUT = ROOT / "benchmarks" / "throughput.py"

workload = import_benchmark("workload")
throughput = import_benchmark("throughput")


def measured(folder, *options):
    """The results of all participants of a tiny model, whose losses agree or it would have failed."""
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
    command += [*options, "--output", folder / "results.json", "--append", folder / "rows.jsonl"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    return json.loads((folder / "results.json").read_text())


@pytest.mark.nightly
def test_all_participants_train_the_same_adapter(tmp_path):
    results = measured(tmp_path, "--adapter")
    losses = {row["name"]: row["loss"] for row in results["participants"]}
    full = {losses.pop(name) for name in ("ours-full", "ours-full stage 2")}
    peers = {"ours", "pytorch", "trainer", "ours stage 2", "deepspeed stage 2", "trainer stage 2"}
    assert set(losses) == peers
    assert max(losses.values()) - min(losses.values()) < 1e-4 * min(losses.values())
    assert max(full) < 0.99 * min(losses.values())
    flops = {row["name"]: row["flops_per_token"] for row in results["participants"]}
    assert flops["ours"] == flops["trainer"] < 0.75 * flops["ours-full"]


@pytest.mark.nightly
def test_all_participants_train_the_same_model(tmp_path):
    results = measured(tmp_path)
    losses = [row["loss"] for row in results["participants"]]
    assert max(losses) - min(losses) < 1e-4 * min(losses)
    for row in results["participants"]:
        assert len(row["round_tokens_per_second"]) == 2
        assert min(row["round_tokens_per_second"]) > 0
        assert row["peak_memory_gib"] > 0
        assert row["first_step_seconds"] > 0
    pairs = {
        *(("ours", peer) for peer in ("pytorch", "pytorch+our-loss", "trainer")),
        *(("ours stage 2", f"{peer} stage 2") for peer in ("deepspeed", "deepspeed+our-loss", "trainer")),
    }
    assert {(pair["ours"], pair["peer"]) for pair in results["ratios"]} == pairs
    assert {row["name"] for row in results["participants"]} == {name for pair in pairs for name in pair}
    records = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert sum("burst" in record for record in records) == 2 * len(losses)
    assert [record for record in records if "loss" in record] == results["participants"]


@pytest.mark.parametrize("rows", ["packed", "unpacked"])
def test_every_model_has_a_valid_recipe_for_either_kind_of_rows(rows, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(THROUGHPUT.parent))
    from pipeline.config.settings import load_settings

    recipe = tmp_path / "recipe.yaml"
    for model, size in workload.MODELS.items():
        data = "stdlib" if model == "default" else "random"
        work = workload.Workload.of(model, data, rows)
        workload.write_recipe(recipe, work, "bf16", plain=True)
        config = load_settings(recipe, None, []).config
        assert config.batch.micro_batch_size == size["micro_batch_size"]
        assert config.distributed.hang_seconds > 86_400  # it waits for the others between its bursts
        if data == "stdlib":
            assert config.data.separate_documents == (rows == "packed")
        else:
            assert config.data.kind == f"workload:{'packed' if rows == 'packed' else 'random'}_tokens"
        workload.write_recipe(recipe, replace(work, adapter=True), "bf16", plain=True)
        config = load_settings(recipe, None, []).config
        assert config.adapter.rank == 32
        assert getattr(config.model, "activation_checkpointing", "none") == "none"
    batch = workload.packed_tokens("train", 8, 64, 100).__getitems__([0, 3])
    assert batch["input_ids"].shape == batch["position_ids"].shape == (2, 64)
    assert (batch["position_ids"] == 0).sum() > 2  # more documents than rows


BOTH = ["ours (torch_ddp.json)", "ours (ddp.json)"]


@pytest.mark.parametrize(
    ("ranks", "split", "peers", "adapter", "names"),
    [
        (2, "plain", None, False, [*BOTH, "pytorch", "pytorch+our-loss", "trainer"]),
        (1, "plain", ["pytorch-compiled", "deepspeed"], False, ["ours", "pytorch-compiled"]),
        (1, "2", ["pytorch-compiled", "deepspeed"], False, ["ours stage 2", "deepspeed stage 2"]),
        (2, "plain", None, True, [*BOTH, "ours-full", "pytorch", "trainer"]),
        (1, "2", ["trainer"], True, ["ours stage 2", "trainer stage 2"]),
    ],
)
def test_participants_of_a_group(ranks, split, peers, adapter, names, tmp_path):
    """Ours is measured under both kinds of DDP at several ranks; all but `ours-full` train the adapter."""
    group = throughput.Group("bf16", ranks, split, replace(workload.Workload.of("tiny"), adapter=adapter))
    tasks = list(throughput.group_tasks(group, peers, 2, tmp_path))
    assert [task.name for task in tasks] == names
    for task in tasks:
        assert ("adapter:" in task.recipe.read_text()) == (adapter and task.peer != "ours-full")


def test_an_adapter_of_peft_begins_as_ours_does(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(THROUGHPUT.parent))
    from pipeline.config.settings import load_settings
    from pipeline.distributed.process_group import Job, describe_device
    from pipeline.distributed.ranks import Ranks
    from pipeline.objectives import CausalLM
    from pipeline.training.assemble import build_engine

    monkeypatch.chdir(tmp_path)
    work = replace(workload.Workload.of("tiny"), adapter=True)
    workload.write_recipe(tmp_path / "it.yaml", work, "fp32", plain=True)
    settings = load_settings(tmp_path / "it.yaml", None, [])
    script = import_benchmark("loops").Script(settings)
    job = Job(Ranks(0, 0, 1, 1), torch.device("cpu"))
    resolved = settings.resolve(1, describe_device(job.device))
    engine = build_engine(settings.config, resolved, job, script.data)
    theirs = script.model()
    probe = script.probe()
    trained = {name: p for name, p in theirs.get_base_model().named_parameters() if p.requires_grad}
    own = {name: p for name, p in engine.module.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 7 * 2  # all linear layers of two blocks
    assert all(torch.equal(p, own.pop(name)) for name, p in trained.items())
    assert not own
    found = engine.eval_step(probe, CausalLM())
    assert theirs(**probe).loss.item() == pytest.approx(float(found.loss_sum / found.count), rel=1e-6)


def test_a_failure_is_on_the_disk_when_it_happens(tmp_path, capsys):
    import argparse

    file = tmp_path / "made" / "all.jsonl"
    benchmark = throughput.Benchmark(argparse.Namespace(append=file))
    benchmark.fail("trainer", "trainer, rank 0: died")
    assert json.loads(file.read_text()) == {"failed": "trainer", "why": "trainer, rank 0: died"}
    assert "rank 0: died" in capsys.readouterr().err
