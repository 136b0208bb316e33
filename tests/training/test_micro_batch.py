"""`micro_batch_size: auto`: the result does not depend on the guess, and the run equals one with that number.

Memory is that of real ranks; the limit is an argument.
"""

from __future__ import annotations

import json
import logging
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support.cgroup import limit_memory
from support.tiny import VOCABULARY, MaskedTokens, deepspeed_json, recipe, resolve

from pipeline.data.batches import collate_items
from pipeline.data.bundle import DataBundle
from pipeline.data.random_numbers import seed_step
from pipeline.distributed.process_group import Job
from pipeline.distributed.ranks import Ranks
from pipeline.objectives import build_objective
from pipeline.training.assemble import build_engine, build_loader
from pipeline.training.micro_batch import MAX_TRIALS, USABLE_SHARE, MicroBatchSearch

pytestmark = pytest.mark.slow

DOCS = Path(__file__).parents[2] / "docs"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")
ALONE = Job(Ranks(0, 0, 1, 1), torch.device("cpu"))
# A row is large beside what a process keeps of the tests before.
LENGTH = 512
SAMPLES = 16
ANSWER = 4
SPLITS: dict[str, Any] = {"plain": None, **{f"zero{stage}": deepspeed_json(stage) for stage in (1, 2, 3)}}
CASES = {f"{name}-{ranks}": (split, ranks) for name, split in SPLITS.items() for ranks in (1, 2)} | {
    "zero2-fp16-2": (deepspeed_json(2) | {"fp16": {"enabled": True, "initial_scale_power": 20}}, 2),
    "zero3-offload-2": (deepspeed_json(3, offload_optimizer={"device": "cpu"}), 2),
    "tensor-2": (deepspeed_json(1) | {"tensor_parallel": {"autotp_size": 2}}, 2),
    "sequence-2": (deepspeed_json(1) | {"sequence_parallel_size": 2}, 2),
    "pipeline-2": (deepspeed_json(1) | {"pipeline": {"stages": 2}}, 2),
}


def train(
    job: Job,
    split: Any,
    micro: Any,
    folder: Path,
    guess: int | None = None,
    limit: int | None = None,
    calibrates: bool = False,
    length: int = LENGTH,
):
    """Choose a size, then train three steps.

    Returns:
        The size, losses and norms with the state afterwards, and the number of trials; or a limit that the
        answer keeps to and the next size does not.
    """
    tree = recipe(
        batch={"micro_batch_size": micro, "global_batch_size": SAMPLES * job.ranks.world_size},
        model=recipe()["model"] | {"max_sequence_length": length, "intermediate_size": 1024},
    )
    config, resolved = resolve(tree, split, job.ranks.world_size)
    data = DataBundle(MaskedTokens(64, length), {}, collate_items, None, VOCABULARY, None, "tiny")
    engine = build_engine(config, resolved, job, data)
    objective = build_objective(config)
    search = MicroBatchSearch(
        config,
        resolved,
        job,
        engine,
        objective,
        lambda plan: build_loader(config, plan, data, engine),
        folder,
        guess,
        limit,
    )
    if calibrates:
        most = [max(use.peak for use in search.measure(size)) for size in (1, ANSWER, 2 * ANSWER)]
        engine.close()
        return int((most[1] + most[2]) / 2 / USABLE_SHARE)
    plan = search.resolve_auto().batch_plan
    loader = build_loader(config, plan, data, engine)
    curve = []
    for step in range(3):
        seed_step(config.seed, step, engine.seed_rank)
        result = engine.train_step(loader.next_group(), objective, 1e-2, 0)
        curve.append((float(result.loss_sum), float(result.grad_norm), result.loss_scale))
    kept = [shard.values.detach().clone() for shard in engine.shards() if shard.values is not None]
    loader.close()
    engine.close()
    tried = [len(json.loads(file.read_text())["tried"]) for file in folder.rglob("*.json")]
    return plan, curve, kept, tried


def compare(job: Job, split: Any, folder: Path):
    """Sizes found from a guess twice too large, and from one half too small, on this rank."""
    limit = max(job.gather_object(train(job, split, "auto", folder, calibrates=True)))
    given = train(job, split, ANSWER, folder)
    found = []
    for guess in (2 * ANSWER, ANSWER // 2):
        plan, curve, kept, tried = train(job, split, "auto", folder / str(guess), guess, limit)
        same = [torch.equal(a, b) for a, b in zip(kept, given[2], strict=True)]
        found.append((plan == given[0], curve == given[1], all(same), max(job.gather_object(tried))[0]))
    return found


@pytest.mark.daily("plain-2")
@pytest.mark.parametrize("case", CASES)
def test_the_same_is_found_whatever_the_guess_and_nothing_of_the_search_stays(ranks, tmp_path, case):
    split, world_size = CASES[case]
    if case == "plain-1":
        answers = [compare(ALONE, split, tmp_path)]
    else:
        answers = ranks(world_size).run(compare, split, tmp_path, timeout=500)
    for found in answers:
        for is_plan, is_curve, is_kept, num_tried in found:
            assert is_plan
            assert is_curve
            assert is_kept
            assert num_tried <= MAX_TRIALS


def started(folder: Path, guess: int | None = None):
    """The size chosen if memory is no limit and rows may be short."""
    return train(ALONE, None, "auto", folder, guess, limit=2**40, length=32)[0]


def test_the_next_start_knows(tmp_path, caplog):
    """The size found, and the size being tried when the process died."""
    caplog.set_level(logging.INFO)
    assert started(tmp_path).micro_batch_size == SAMPLES
    caplog.clear()
    assert started(tmp_path).micro_batch_size == SAMPLES
    (file,) = tmp_path.rglob("*.json")
    assert (
        f"micro_batch_size {SAMPLES}, found at an earlier start (to search again, delete {file})"
        in caplog.text
    )
    file.write_text(json.dumps(json.loads(file.read_text()) | {"trying": 4}))
    caplog.clear()
    assert started(tmp_path).micro_batch_size == SAMPLES, "a smaller size's interrupted trial does not matter"
    assert "found at an earlier start" in caplog.text
    file.write_text(json.dumps(json.loads(file.read_text()) | {"found": None}))
    assert started(tmp_path).micro_batch_size == 2
    assert "micro_batch_size 4 ran out of memory or was interrupted at an earlier start" in caplog.text
    file.write_text(json.dumps(json.loads(file.read_text()) | {"found": None, "trying": 1}))
    caplog.clear()
    found = started(tmp_path, guess=4 * SAMPLES)
    assert found.micro_batch_size == SAMPLES
    assert next(iter(json.loads(file.read_text())["tried"])) == "1"  # whatever the guess


def test_a_trial_that_runs_out_of_memory_is_known_to_the_next_start(tmp_path, monkeypatch):
    def fail(self: MicroBatchSearch, plan: Any) -> Any:
        if plan.micro_batch_size > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return load(self, plan)

    load = MicroBatchSearch._read_batches
    monkeypatch.setattr(MicroBatchSearch, "_read_batches", fail)
    with pytest.raises(torch.OutOfMemoryError):
        started(tmp_path)
    monkeypatch.undo()
    assert started(tmp_path).micro_batch_size == 1


@pytest.mark.nightly
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_keeps_to_the_limit_of_its_cgroup(tmp_path, world_size):
    """The command finds it. All rows fit without the limit; with it a larger size would be killed."""
    recipe_file = tmp_path / "recipe.yaml"
    model = {"kind": "causal_lm", "architecture": "llama", "num_layers": 2, "num_heads": 4, "hidden_size": 64}
    data = {"kind": "text", "paths": [str(DOCS / "*.md")], "cache_dir": str(tmp_path / "cache")}
    tree = {
        "max_steps": 2,
        "model": model | {"intermediate_size": 2048, "max_sequence_length": 256},
        "data": data | {"sequence_length": 256, "tokenizer": {"vocab_size": 2000}},
        "batch": {"micro_batch_size": "auto", "global_batch_size": 64 * world_size},
        "run_dir": str(tmp_path / "run"),
        "sample": {"max_new_tokens": 0},
        "eval": {"max_samples": 8},
        "wandb": {"mode": "disabled"},
    }
    recipe_file.write_text(yaml.safe_dump(tree))
    command = [*TORCHRUN, f"--nproc_per_node={world_size}", "launch/train.py", "--config", str(recipe_file)]
    with limit_memory(world_size * 1100) as members:
        ended = subprocess.run(
            ["sh", "-c", f"echo $$ > {members}; exec {shlex.join(command)}"],
            cwd=DOCS.parent,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
    assert ended.returncode == 0, ended.stderr[-3000:]
    told = (ended.stdout + ended.stderr).splitlines()
    line = next(line for line in told if line.startswith("micro_batch_size"))
    found = json.loads((tmp_path / "run/split.json").read_text())["micro_batch_size"]
    assert 1 < found < 64, line
    assert 1 < len(re.findall(r"\d+ \d+\.\d\d[,;]", line)) <= MAX_TRIALS
