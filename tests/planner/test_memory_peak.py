"""The peak of a rank by formula, against what tensors of a real engine's step take."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from planner.allocations import Allocations
from support.tiny import MaskedTokens, deepspeed_json, make_engine, recipe, resolve

from pipeline.data.batches import collate_items
from pipeline.data.bundle import DataBundle
from pipeline.distributed.process_group import Job
from pipeline.distributed.ranks import Ranks
from pipeline.models.sizes import measure_module
from pipeline.objectives import build_objective
from pipeline.planner.activations import MicroBatchSpec
from pipeline.planner.memory import compute_phase_peaks, count_batch_bytes, estimate_memory
from pipeline.planner.model import DecoderDimensions, ModelSpec, ParameterSpec
from pipeline.planner.rank import RankSlice
from pipeline.planner.states import count_buffers, count_states
from pipeline.training.assemble import build_loader

ALONE = Job(Ranks(0, 0, 1, 1), torch.device("cpu"))
WORDS = 1032
LLAMA = {"architecture": "llama", "num_heads": 4, "num_key_value_heads": 2}
QWEN2 = {"architecture": "qwen2", "num_heads": 4, "num_key_value_heads": 2}
GPT2 = {
    "architecture": "gpt2",
    "num_heads": 4,
    "extra": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}


@dataclass(frozen=True)
class Run:
    """A small step."""

    name: str
    model: dict[str, Any]
    precision: str = "fp32"
    recompute: Any = "none"
    apart: bool = False
    optimizer: dict[str, Any] = field(default_factory=dict)
    accumulated: int = 1
    rows: int = 2
    length: int = 160
    adapter: dict[str, Any] | None = None
    stage: int | None = None
    """ZeRO stage; None: plain PyTorch."""
    how: dict[str, Any] | None = None
    """The file, where it is none of these."""
    ranks: int = 1
    bound: float = 0.01
    """Share of the peak that the formula may be off by."""

    def __str__(self) -> str:
        return self.name

    @property
    def tree(self) -> dict[str, Any]:
        """Return the recipe."""
        sizes = {"num_layers": 4, "hidden_size": 128, "intermediate_size": 344, "vocab_size": WORDS}
        model = {
            "kind": "causal_lm",
            **sizes,
            "max_sequence_length": self.length,
            "activation_checkpointing": self.recompute,
            **self.model,
        }
        batch = {"micro_batch_size": self.rows, "gradient_accumulation_steps": self.accumulated}
        adapter = {} if self.adapter is None else {"adapter": self.adapter}
        return recipe(
            model=model, batch=batch, optimizer={"learning_rate": 1e-3, **self.optimizer}, **adapter
        )

    @property
    def split(self) -> dict[str, Any]:
        """Return the DeepSpeed JSON."""
        if self.how is not None:
            return self.how
        if self.stage is not None:
            return deepspeed_json(self.stage, self.precision)
        return {"torch": {"parallel": "single"}, "bf16": {"enabled": self.precision == "bf16"}}

    def data(self) -> DataBundle:
        """Rows whose labels all count."""
        rows = MaskedTokens(8 * self.rows * self.accumulated, self.length)
        rows.valid[:] = self.length
        if self.apart:  # two documents, which are calls of their own
            first = self.length * 5 // 8
            places = torch.cat([torch.arange(first), torch.arange(self.length - first)])
            rows.positions = places.expand(len(rows), -1)
        return DataBundle(rows, {"tiny": rows}, collate_items, None, WORDS, None, "tiny")


def counted(job: Job, run: Run, device: str, block: int = 1) -> tuple[int, ModelSpec]:
    """The most bytes that a step makes, after one that makes the optimizer's states; and the model."""
    data = run.data()
    config, resolved = resolve(run.tree, run.split, job.ranks.world_size)
    engine = make_engine(job, run.tree, run.split, data)
    loader = build_loader(config, resolved.batch_plan, data, engine)
    objective = build_objective(config)
    try:
        engine.train_step(loader.next_group(), objective, 1e-3, 0)
        group = loader.next_group()
        gc.collect()
        with Allocations(device, block) as made:
            engine.train_step(group, objective, 1e-3, 0)
        return made.most, measure_module(engine.module)
    finally:
        loader.close()
        engine.close()


def formula(run: Run, model: ModelSpec, device: str, number: int = 0, ranks: int = 1) -> tuple[float, int]:
    """The peak of a rank, and what is there before the step."""
    config, resolved = resolve(run.tree, run.split, ranks)
    assert model.dimensions is not None
    rank = RankSlice.from_run(model, config, resolved, number, on_cpu=device == "cpu")
    stage = number * resolved.split.pipeline_stages // ranks
    work = MicroBatchSpec.from_run(config, resolved, rank.own, device, stage)
    assert work is not None
    work = replace(work, apart=run.apart)
    states = count_states(rank)
    beside = count_buffers(rank)
    held = states.device
    kept = held.weights + held.masters + held.moments + beside.always + count_batch_bytes(work)
    received = (stage > 0) + (stage < work.stages - 1)  # into memory that stays
    kept += received * work.tokens * model.dimensions.hidden * work.product_element_size
    if run.stage == 3:  # whose gradients have a place of their own for good
        kept += held.gradients
    return max(compute_phase_peaks(work, rank.own, states, beside).values()), kept


RUNS = [
    Run("llama", LLAMA),
    Run("llama, all blocks recompute", LLAMA, recompute="full"),
    Run("llama, every other block recomputes", LLAMA, recompute=2),
    Run("llama, all but products are recomputed", LLAMA, recompute="selective"),
    Run("llama, documents apart", LLAMA, apart=True),
    Run("llama, two micro-batches, SGD", LLAMA, accumulated=2, optimizer={"kind": "sgd"}),
    Run("llama, bf16", LLAMA, "bf16"),
    Run("llama, bf16, recomputes", LLAMA, "bf16", recompute="full"),
    Run("llama, bf16, documents apart", LLAMA, "bf16", apart=True),
    Run(
        "llama, whole heads, tied", LLAMA | {"num_key_value_heads": 4, "extra": {"tie_word_embeddings": True}}
    ),
    Run("gpt2", GPT2),
    Run("gpt2, bf16, recomputes, many words", GPT2 | {"vocab_size": 9001}, "bf16", recompute="full"),
    Run("gpt2, selective", GPT2, recompute="selective"),
    Run("qwen2", QWEN2),
    Run("qwen2, bf16, documents apart, recomputes", QWEN2, "bf16", recompute="full", apart=True),
    Run("llama, adapter", LLAMA, adapter={"rank": 4}),
    Run(
        "frozen output layer, few tokens", LLAMA | {"freeze": ["lm_head.*"]}, accumulated=2, rows=1, length=8
    ),
    Run("tied, few tokens", LLAMA | {"extra": {"tie_word_embeddings": True}}, rows=1, length=8),
    Run("frozen embedding, few tokens", LLAMA | {"freeze": ["*.embed_tokens.*"]}, rows=1, length=8),
    # A first block whose input needs no gradient keeps less: of what drops above all.
    Run("bf16, adapter, recomputes", LLAMA, "bf16", "full", adapter={"rank": 16}, bound=0.025),
    Run("adapter drops, documents apart", LLAMA, apart=True, adapter={"rank": 8, "dropout": 0.1}, bound=0.05),
    Run("llama, dora", LLAMA, adapter={"kind": "dora", "rank": 4}),
    Run("gpt2, bf16, adapter", GPT2, "bf16", adapter={"rank": 8}),
    Run("qwen2, adapter", QWEN2, adapter={"rank": 8, "modules_to_save": ["lm_head"]}),
]


@pytest.mark.daily(
    "llama, every other block recomputes",
    "llama, two micro-batches, SGD",
    "llama, bf16, documents apart",
    "gpt2, bf16, adapter",
    "frozen output layer, few tokens",
)
@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS, ids=str)
def test_the_peak_of_a_step(run):
    made, model = counted(ALONE, run, "cpu")
    peak, before = formula(run, model, "cpu")
    assert peak == pytest.approx(before + made, rel=run.bound)
    assert peak - before == pytest.approx(made, rel=0.05)


def test_parts_and_phases_of_a_recipe():
    """The plan of an 8B model over eight GPUs, on a machine without GPUs and without the weights."""
    run = Run("llama", LLAMA, "bf16", recompute="full", stage=3)
    config, resolved = resolve(run.tree, run.split, 1)
    sizes = (4096, 14336, 32, 8, 128, 128256)
    names = ("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "lm_head.weight")
    shapes = ((128256, 4096), (14336, 4096), (128256, 4096))
    parameters = tuple(ParameterSpec(n, s) for n, s in zip(names, shapes, strict=True))
    model = ModelSpec("8b", parameters, DecoderDimensions("llama", 32, *sizes, tied=False))
    found = estimate_memory(model, config, resolved, "cuda")
    assert found.is_complete
    assert found.peak == max(found.phases.values()) == found.phases[found.peak_phase]
    assert {"parameters", "optimizer states", "activations kept", "logits and loss"} <= set(found.parts)
    assert not estimate_memory(replace(model, dimensions=None), config, resolved, "cuda").is_complete
