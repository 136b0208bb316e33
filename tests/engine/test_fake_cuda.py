"""Code that only CUDA reaches, run without a GPU: fused attention and loss, streams, and whole runs.

In fake tensors: every operator's checks of devices, types and shapes, forward and backward, and no number.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections import Counter
from dataclasses import replace
from time import perf_counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
from engine.census import counted
from support.fake_cuda import DEVICE, _Stream, hopper
from support.launch import ROOT, CompletedCommand, run_python, write_recipe
from support.rank_pool import RankFailedError, RankPool
from support.tiny import deepspeed_json, make_engine, recipe, settings, token_bundle
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.checkpoint.shard_file import FileLayout
from pipeline.checkpoint.shards import Region, Shard
from pipeline.checkpoint.store import CHUNK_BYTES, Snapshot
from pipeline.config.batch_plan import plan_batch
from pipeline.distributed.process_group import Job
from pipeline.engine.replicas import ReplicaDigests
from pipeline.models import document_attention
from pipeline.models.attention import choose_attention
from pipeline.models.batch_norm import synchronize_batch_norm
from pipeline.models.document_attention import ScoreOptions, WholeRowBoundsChooser, attend_in_blocks
from pipeline.models.generation import GenerationSettings, generate
from pipeline.monitoring.metrics import Meters, WallTime, Workload
from pipeline.objectives import CausalLM
from pipeline.objectives.logits_cross_entropy import FusedKernels
from pipeline.training.assemble import build_loader
from pipeline.training.loop import TrainState

LENGTH = 24
LAYERS = 2
MICRO_BATCHES = 2
SINGLE = {"torch": {"parallel": "single"}}
# By (packed, in fp32).
ATTENTION = {
    (True, False): "torch_attn._varlen_attn",
    (True, True): "aten._efficient_attention",
    (False, False): "aten._scaled_dot_product_cudnn_attention",
    (False, True): "aten._scaled_dot_product_efficient_attention",
}


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler"),
]


@pytest.fixture(scope="module")
def card():
    """Runs functions in a process of its own, a new one where one was ended by a failure."""
    pools: list[RankPool] = []

    def run(function: Any, *arguments: Any) -> Any:
        if not pools or not pools[-1].is_alive:
            pools.append(RankPool(1))
        return pools[-1].run(function, *arguments)[0]

    yield run
    for each in pools:
        each.close()


class Operators(TorchDispatchMode):
    """Tensors on the device by name, and those among them that are as large as a mask of a row."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self.masks: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        found = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor) and t.is_cuda]
        if found:
            self.names[str(func)] += 1
        self.masks += [str(func) for t in found if t.shape[-2:] == (LENGTH, LENGTH)]
        return result


def step(job: Job, split: dict[str, Any], packed: bool, model: dict[str, Any], kind: Any = CausalLM) -> Any:
    """A step as the loop makes it on a card, after one that warms up: its operators and host reads."""
    batch = {"micro_batch_size": 2, "gradient_accumulation_steps": MICRO_BATCHES}
    tree = recipe(batch=batch)
    tree["model"] = tree["model"] | model
    data = token_bundle(packed)
    config = settings(tree, dict(split)).config
    job = replace(job, device=DEVICE)
    with hopper() as card:
        engine = make_engine(job, tree, split, data)
        loader = build_loader(config, plan_batch(config.batch, 1), data, engine)
        wall = WallTime(engine.phases, perf_counter)
        meters = Meters(Workload(1, 1, "tokens", None, None), job, perf_counter, wall=wall)
        state = TrainState.start(DEVICE)
        objective = kind()
        engine.train_step(loader.next_group(), objective, 1e-3, 0)
        card.may_read = split.get("zero_optimization", {}).get("stage") == 3
        group = loader.next_group()
        with counted() as census, Operators() as seen:
            result = engine.train_step(group, objective, 1e-3, 0)
            state = state.after(result)
            meters.observe(result)
            spent = meters.state_dict()  # as far as the device has come, which is everywhere here
        assert 0 < spent["training_seconds"] < spent["elapsed_seconds"]
        assert {"forward", "backward", "optimizer"} <= set(engine.phases.totals())
        assert {t.device for t in (result.loss_sum, result.grad_norm, result.skipped)} == {DEVICE}
        card.may_read = True
        loader.close()
        engine.close()
    return seen.names, seen.masks, census.reads


# Functions that read the batch on the host.
ON_HOST = (
    "interface.py:add_document_bounds",
    "document_attention.py:find_document_bounds",
)
BF16 = {**SINGLE, "bf16": {"enabled": True}}
CASES = {
    "plain": (BF16, {}),
    "plain, fp32": (SINGLE, {}),
    **{f"ZeRO {stage}": (deepspeed_json(stage, "bf16"), {}) for stage in (0, 1, 2, 3)},
    "ZeRO 2, fp32": (deepspeed_json(2), {}),
    "offload": (BF16, {"activation_checkpointing": "full", "activation_offload": True}),
    "selective": (BF16, {"activation_checkpointing": "selective"}),
}


@pytest.mark.daily("plain-True", "ZeRO 3-True")
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_a_step_on_a_card_waits_for_nothing_and_makes_no_mask(card, name, packed):
    split, model = CASES[name]
    names, masks, reads = card(step, split, packed, model)
    in_fp32 = "fp32" in name
    kernel = ATTENTION[packed, in_fp32]
    recomputed = 2 if name == "offload" else 1
    calls = Counter({each: number for each, number in names.items() if each.startswith(kernel)})
    backward = sum(number for each, number in calls.items() if "backward" in each)
    assert backward == LAYERS * MICRO_BATCHES
    assert calls.total() - backward == LAYERS * MICRO_BATCHES * recomputed
    assert not masks
    assert names["aten.addmm.dtype_out"] == (0 if in_fp32 else MICRO_BATCHES)  # the output layer's gradient
    # Any read of the device would have been an error; at ZeRO 3 there is one, whether to step at all.
    assert reads["utils.py:is_invalid_grad_norm"] == (name == "ZeRO 3")
    assert set(reads) <= {*ON_HOST, "utils.py:is_invalid_grad_norm"}


def fused() -> CausalLM:
    """The model as a run builds it on a card."""
    return CausalLM(kernels=FusedKernels())


@pytest.mark.daily("True")
@pytest.mark.parametrize("packed", [True, False])
def test_the_fused_loss_waits_for_nothing(card, packed):
    names, _, reads = card(step, BF16, packed, {}, fused)
    assert names["aten.addmm.dtype_out"] == MICRO_BATCHES
    assert names["aten.amax.default"] == MICRO_BATCHES, "a chunk's largest logits, found once"
    assert not names["aten._softmax.out"], "the loss was computed in blocks"
    assert set(reads) <= set(ON_HOST)


def saved(job: Job) -> tuple[list[int], bool]:
    """Bytes of a snapshot's shards, and whether the device was asked to wait for the copy."""
    with hopper():
        tensors = [torch.ones(n, dtype=torch.bfloat16, device=DEVICE) for n in (5, CHUNK_BYTES // 2 + 3)]
        kinds = ("buffer", "weight")

        def shards() -> Any:
            for kind, tensor in zip(kinds, tensors, strict=True):
                yield Shard.of(kind, kind, Region((len(tensor),), None, 0, len(tensor)), tensor)

        snapshot = Snapshot(FileLayout.of(shards()), DEVICE)
        waited = []
        with patch.object(_Stream, "wait_event", lambda _, event: waited.append(event)):
            snapshot.fill(shards())
            snapshot.hold_device()
        return [sum(map(len, parts)) for parts in snapshot.views()], len(waited) == 1


def test_a_snapshot_is_copied_on_a_stream_of_its_own(card):
    assert card(saved) == ([10, CHUNK_BYTES + 6], True)


def attended(job: Job, groups: int) -> list[str]:
    """Kernels that compute rows of two lengths, one document each, with a forward's bounds."""
    rows = WholeRowBoundsChooser()
    kernels = []
    with hopper(), patch.object(document_attention, "_repeat_heads", None):  # nothing repeats keys or values
        attend = document_attention.DocumentAttention()
        for length in (32, 48, 32):
            heads = [
                torch.ones(2, n, length, 64, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
                for n in (4, groups, groups)
            ]
            bounds = rows.choose(heads[0].transpose(1, 2))
            with Operators() as seen:
                output, _ = attend(
                    torch.nn.Identity(), *heads, None, **{document_attention.BOUNDS_KEY: bounds}
                )
                output.sum().backward()
            kernels += [name for name in seen.names if "attn" in name or "attention" in name]
    return kernels


@pytest.mark.parametrize("groups", [4, 2])
def test_only_rows_of_the_first_shape_are_computed_by_cudnn(card, groups):
    """It would build a plan for each other one."""
    cudnn = [f"aten._scaled_dot_product_cudnn_attention{back}.default" for back in ("", "_backward")]
    variable = [f"torch_attn._varlen_attn{back}.default" for back in ("", "_backward")]
    assert card(attended, groups) == [*cudnn, *variable, *cudnn]


def masked(job: Job) -> bool:
    """Whether torch may choose cuDNN for the calls of a model that was built for a card."""
    with hopper():
        choose_attention(build_tiny(), True, DEVICE)
        chosen = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    return chosen


def build_tiny() -> Any:
    config = AutoConfig.for_model("llama", hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    return AutoModelForCausalLM.from_config(config)


def test_cudnn_never_computes_with_a_mask(card):
    assert not card(masked)


def generated(job: Job) -> tuple[int, bool]:
    """Number of tokens that a model on a GPU draws, and whether the GPU's random generator stays as it is."""
    with hopper() as card:
        card.boolean_value = True  # a row is at its end after one token
        model = build_tiny().to(DEVICE)
        settings = GenerationSettings(max_new_tokens=4, temperature=0.8, seed=5)
        before = torch.get_rng_state()
        with patch.object(torch.cuda, "manual_seed", side_effect=AssertionError):
            (written,) = generate(model, [[1, 2]], settings, DEVICE)
    return len(written), torch.equal(before, torch.get_rng_state())


def test_generation_on_a_gpu_draws_no_random_numbers(card):
    assert card(generated) == (1, True)


def generated_in_shards(job: Job) -> int:
    """Number of tokens that a model under ZeRO 3 writes on a GPU."""
    with hopper() as card:
        card.boolean_value = True  # a row is at its end after one token
        engine = make_engine(replace(job, device=DEVICE), recipe(), deepspeed_json(3, "bf16"), token_bundle())
        (written,) = engine.generate([[1, 2]], GenerationSettings(max_new_tokens=4, temperature=0, seed=0))
        engine.close()
    return len(written)


@pytest.mark.nightly
def test_a_sharded_model_generates_on_a_gpu(card):
    assert card(generated_in_shards) == 1


def compared(job: Job) -> tuple[str, torch.device]:
    """Class of a batch norm that counts all ranks' samples, and device of the replicas' digests."""
    with hopper() as card:
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)).to(DEVICE)
        model = synchronize_batch_norm(model, None, DEVICE)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        weights = list(model.parameters())
        replicas = ReplicaDigests(0, model.parameters, optimizer, DEVICE, rewritten=lambda: weights)
        card.may_read = False
        replicas.begin(is_compared=True)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        return type(model[1]).__name__, replicas.end().device


def test_replicas_are_compared_without_a_wait(card):
    assert card(compared) == ("SyncBatchNorm", DEVICE)


def with_dropout(job: Job) -> tuple[list[tuple[torch.device, torch.dtype]], int]:
    """Record gradients of attention in blocks with grouped keys.

    Returns:
        Device and dtype of each gradient; how often the state of the GPU's generator is restored.
    """
    restored: list[torch.Tensor] = []
    with hopper(), patch.object(torch.cuda, "set_rng_state", lambda state, _: restored.append(state)):
        heads = [
            torch.ones(2, n, 24, 8, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
            for n in (4, 2, 2)
        ]
        attend_in_blocks(tuple(heads), None, ScoreOptions()).sum().backward()
        assert not restored
        attend_in_blocks(tuple(heads), None, ScoreOptions(dropout=0.1)).sum().backward()
    return [(t.grad.device, t.grad.dtype) for t in heads], len(restored)


def test_attention_in_blocks_restores_the_generator_of_the_gpu_for_the_backward(card):
    # Once before the blocks are computed again, once behind them.
    assert card(with_dropout) == ([(DEVICE, torch.bfloat16)] * 3, 2)


FAKE_RUN = str(ROOT / "tests" / "engine" / "fake_run.py")
ZERO_2, ZERO_3 = (str(ROOT / "ds_configs" / f"zero{stage}.json") for stage in (2, 3))


def fake_run(*arguments: str) -> CompletedCommand:
    """Run launch/train.py on the fake GPU, to its end."""
    folders = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    return run_python(sys.executable, FAKE_RUN, *arguments, PYTHONPATH=os.pathsep.join(filter(None, folders)))


@pytest.mark.nightly
def test_a_run_on_a_gpu_from_its_command_to_its_end(tmp_path):
    """Training, evaluation, saves beside training, a search for the micro-batch size, and a resume."""
    changes = {"checkpoint": {"every": 2}, "eval": {"every": 2, "max_samples": 8}}
    common = ["--config", str(write_recipe(tmp_path, max_steps=4, **changes)), "sample.max_new_tokens=0"]
    common.append(f"run_dir={tmp_path / 'run'}")
    chosen = ["batch.micro_batch_size=auto", "log.console=debug"]
    run = fake_run(*common, *chosen, "--deepspeed", ZERO_2)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "DeepSpeed, ZeRO stage 2, bf16" in run.stderr
    assert "1 rank on cuda" in run.stderr
    assert "micro_batch_size 8, found by trials" in run.stderr
    assert "attention: by document, without a mask" in run.stderr
    resumed = fake_run(*common, "max_steps=6", "--deepspeed", ZERO_3)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {1, 6} <= {row["step"] for row in rows if "train/loss" in row}
    assert (tmp_path / "run" / "checkpoints" / "step-00000006").is_dir()


def test_a_run_that_is_out_of_memory_on_a_gpu_says_what_helps(tmp_path):
    faulty = {"kind": "support.faults:faulty", "args": {"fault": "memory", "at": 2}}
    data = {"kind": "support.faults:points"}
    objective = {"kind": "classification"}
    config = write_recipe(tmp_path, model=faulty, data=data, objective=objective)
    run = fake_run("--config", str(config), "--deepspeed", ZERO_2)
    assert run.returncode == 12, run.stdout + run.stderr
    (line,) = [line for line in run.stderr.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: out of memory on cuda:0 in the forward")
    assert "What helps, best first: batch.micro_batch_size=" in line


class Reading(CausalLM):
    """Somebody looks at the loss."""

    def __call__(self, model: Any, batch: Any) -> Any:
        loss = super().__call__(model, batch)
        loss.loss_sum.item()
        return loss


def test_a_read_of_the_device_is_an_error_here(card):
    with pytest.raises(RankFailedError, match="DataDependentOutputException"):
        card(step, BF16, True, {}, Reading)
