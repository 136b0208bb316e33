"""Every split that is held against the oracle: its JSON, the ranks it runs on, the precisions."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.tiny import recipe

WORLDS = (1, 2, 4)
ALL = ("fp32", "bf16", "fp16")
STEPS = 20
# What `make test` takes of them: two epochs.
SHORT = 8

# Four heads for four ranks; fewer key-value heads than ranks.
LLAMA = {
    "kind": "causal_lm",
    "architecture": "llama",
    "num_layers": 2,
    "num_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "max_sequence_length": 24,
}
GPT2 = {
    "kind": "causal_lm",
    "architecture": "gpt2",
    "num_layers": 2,
    "num_heads": 4,
    "hidden_size": 32,
    "extra": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}
WIDE = LLAMA | {"hidden_size": 128, "intermediate_size": 512}  # below 1 MB a rank nothing goes to disk
QWEN2 = LLAMA | {"architecture": "qwen2"}
PHI3 = LLAMA | {"architecture": "phi3", "extra": {"pad_token_id": 0}}
# Two matrices in one, each cut by itself.
FUSED = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": [r".*\.gate_up_proj\.weight$"], "partition_type": "column", "shape": [2, -1]},
        {"patterns": [r".*\.down_proj\.weight$"], "partition_type": "row"},
    ],
}
# 100 MB in fp32: more than what a process allocates beside it.
LARGE = {
    "kind": "causal_lm",
    "architecture": "llama",
    "num_layers": 6,
    "num_heads": 8,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "max_sequence_length": 24,
}


@dataclass(frozen=True)
class Split:
    """One row of the table, before world size and precision."""

    name: str
    json: dict[str, Any]
    worlds: tuple[int, ...] = WORLDS
    precisions: tuple[str, ...] = ALL
    model: dict[str, Any] = field(default_factory=lambda: LLAMA)
    adapter: dict[str, Any] | None = None


def zero(stage: int, **more: Any) -> dict[str, Any]:
    # By default a bucket is half a billion elements, allocated whole.
    buckets = {"reduce_bucket_size": 20_000, "allgather_bucket_size": 20_000}
    return {"zero_optimization": {"stage": stage, **buckets, **more}}


def recomputed(mode: str | int) -> dict[str, Any]:
    return LLAMA | {"activation_checkpointing": mode}


CPU = {"device": "cpu"}
NVME = {"device": "nvme", "nvme_path": str(Path(tempfile.gettempdir()) / "parity-nvme")}
BUFFERED = NVME | {"buffer_size": 200_000}  # by default five of a hundred million elements each
TENSOR_2 = {"tensor_parallel": {"autotp_size": 2}}
SEQUENCE_2 = {"sequence_parallel_size": 2}
TENSOR_4 = {"tensor_parallel": {"autotp_size": 4}}
SEQUENCE_4 = {"sequence_parallel_size": 4}
TWO_STAGES = {"pipeline": {"stages": 2}}
FOUR_STAGES = {"pipeline": {"stages": 4}}
STATIC = {"fp16": {"enabled": True, "loss_scale": 256.0}}
SUMMED = {"data_types": {"grad_accum_dtype": "fp32"}}

SPLITS = [
    Split("one process", {"torch": {"parallel": "single"}}, (1,), ("fp32", "bf16")),
    Split("nn.DataParallel", {"torch": {"parallel": "dp"}}, (1,), ("fp32", "bf16")),
    Split("DistributedDataParallel", {"torch": {"parallel": "ddp"}}, (1, 2, 4), ("fp32", "bf16")),
    *(Split(f"ZeRO {stage}", zero(stage)) for stage in (0, 1, 2, 3)),
    Split("ZeRO 3, nothing kept whole", zero(3, stage3_param_persistence_threshold=0)),
    Split("ZeRO 3, hpZ 2", zero(3, zero_hpz_partition_size=2), (2, 4)),
    *(Split(f"ZeRO {stage}, optimizer on CPU", zero(stage, offload_optimizer=CPU)) for stage in (1, 2, 3)),
    Split("ZeRO 3, all on CPU", zero(3, offload_optimizer=CPU, offload_param=CPU)),
    Split("ZeRO 3, all on NVMe", zero(3, offload_optimizer=NVME, offload_param=BUFFERED), (1, 2), model=WIDE),
    *(Split(f"tensor 2, ZeRO {stage}", zero(stage) | TENSOR_2, (2, 4)) for stage in (0, 1, 2, 3)),
    Split("tensor 4, ZeRO 1", zero(1) | TENSOR_4, (4,), model=LLAMA | {"num_key_value_heads": 4}),
    Split("tensor 2, ZeRO 1, qwen2", zero(1) | TENSOR_2, (2,), ("fp32",), QWEN2),
    *(Split(f"pipeline 2, ZeRO {stage}", zero(stage) | TWO_STAGES, (2, 4)) for stage in (0, 1)),
    Split("pipeline 4, ZeRO 1", zero(1) | FOUR_STAGES, (4,), model=LLAMA | {"num_layers": 4}),
    Split("pipeline 2, ZeRO 1, gpt2 (tied)", zero(1) | TWO_STAGES, (2, 4), ("fp32",), GPT2),
    Split("pipeline 2, ZeRO 1, qwen2", zero(1) | TWO_STAGES, (2,), ("fp32",), QWEN2),
    *(Split(f"sequence 2, ZeRO {stage}", zero(stage) | SEQUENCE_2, (2, 4)) for stage in (0, 1, 2, 3)),
    Split("sequence 4, ZeRO 3", zero(3) | SEQUENCE_4, (4,)),
    Split("ZeRO 2, blocks recomputed", zero(2), (1, 2), ("fp32",), recomputed("full")),
    Split("ZeRO 3, blocks recomputed", zero(3), (1, 2), ("fp32",), recomputed("full")),
    Split("ZeRO 3, every 2nd recomputed", zero(3), (1, 2), ("fp32",), recomputed(2)),
    Split("ZeRO 3, all but products recomputed", zero(3), (1, 2), ("fp32",), recomputed("selective")),
    Split("pipeline 2, blocks recomputed", zero(1) | TWO_STAGES, (2,), ("fp32",), recomputed("full")),
    Split("tensor 2, blocks recomputed", zero(1) | TENSOR_2, (2,), ("fp32",), recomputed("full")),
    Split("sequence 2, blocks recomputed", zero(3) | SEQUENCE_2, (2,), ("fp32",), recomputed("full")),
    Split("ZeRO 2, static loss scale", zero(2) | STATIC, (1, 2), ("fp16",)),
    *(
        Split(f"ZeRO {stage}, gradients summed in fp32", zero(stage) | SUMMED, (1, 2), ("bf16",))
        for stage in (1, 2, 3)
    ),
    Split("ZeRO 3, compiled", zero(3) | {"compile": {"enabled": True}}, (1,), ("fp32",)),
]


@dataclass(frozen=True)
class Case:
    """One run."""

    split: Split
    world_size: int
    precision: str

    def __str__(self) -> str:
        return f"{self.split.name}-{self.precision}-{self.world_size}".replace(" ", "_").replace(",", "")

    @property
    def json(self) -> dict[str, Any]:
        tree = dict(self.split.json)
        if self.precision == "bf16":
            tree["bf16"] = {"enabled": True}
        if self.precision == "fp16" and "fp16" not in tree:
            # A scale that needs no search: skipped steps would shift the curve against the oracle's.
            tree["fp16"] = {"enabled": True, "initial_scale_power": 8}
        return tree

    @property
    def recipe(self) -> dict[str, Any]:
        """The same 16 samples a step in two micro-batches, whatever the ranks."""
        # The wide model would amplify rounding a thousandfold at the small one's learning rate.
        rate = 3e-4 if self.split.model == WIDE else 3e-3
        return recipe(
            model=self.split.model,
            adapter=self.split.adapter,
            batch={"gradient_accumulation_steps": 2, "global_batch_size": 16},
            optimizer={"learning_rate": rate, "max_grad_norm": 0.5},
            max_steps=STEPS,
        )


def cases(splits: Sequence[Split] = SPLITS) -> Iterator[Case]:
    """All runs, those of one world size together: a pool of ranks serves them one after the other."""
    for world_size in WORLDS:
        for split in splits:
            if world_size in split.worlds:
                for precision in split.precisions:
                    yield Case(split, world_size, precision)
