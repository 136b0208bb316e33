"""Writes the recipe that every participant trains, and makes the data set of the peers.

The recipe is the default one with a constant learning rate and the changes of MODELS.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

REPOSITORY = Path(__file__).resolve().parents[1]
RECIPE = REPOSITORY / "launch" / "recipes" / "python_stdlib.yaml"
JSON_FILES = {"0": "ddp.json", "1": "zero1.json", "2": "zero2.json", "3": "zero3.json"}
FULL = "ours-full"  # the pipeline training all weights, in a group that trains an adapter
FP8 = "ours-fp8"  # the pipeline with linear layers that multiply in fp8
DRAW_ON_DEVICE = "BENCHMARK_DRAW_ON_DEVICE"  # environment variable of participants
LOG_EVERY = 10  # optimizer steps between two rows of the log, for every participant
MEAN_DOCUMENT = 512  # mean tokens of a document in packed rows of random tokens
SAMPLES = 512

LLAMA: dict[str, Any] = {"architecture": "llama"}
# Model -> sequence length, micro-batch, vocabulary, and the section `model` (`None`: that of the recipe).
MODELS: dict[str, dict[str, Any]] = {
    "default": {"sequence_length": 256, "micro_batch_size": 8, "vocab_size": 8192, "model": None},
    "tiny": {
        "sequence_length": 32,
        "micro_batch_size": 2,
        "vocab_size": 300,
        "model": LLAMA | {"num_layers": 2, "num_heads": 4, "hidden_size": 32, "intermediate_size": 64},
    },
    # Model, rows and micro-batch of the default recipe, with the vocabulary of GPT-2.
    "llama-50k": {
        "sequence_length": 256,
        "micro_batch_size": 8,
        "vocab_size": 50304,
        "model": LLAMA | {"num_layers": 4, "num_heads": 8, "hidden_size": 256, "intermediate_size": 688},
    },
    "llama-70m": {
        "sequence_length": 64,
        "micro_batch_size": 1,
        "vocab_size": 8192,
        "model": LLAMA | {"num_layers": 8, "num_heads": 12, "hidden_size": 768, "intermediate_size": 2048},
    },
    "gpt2-124m": {
        "sequence_length": 1024,
        "micro_batch_size": 16,
        "vocab_size": 50257,
        "model": {"architecture": "gpt2", "num_layers": 12, "num_heads": 12, "hidden_size": 768}
        | {"extra": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}},
    },
    "llama-1b": {  # sizes of Llama 3.2 1B, 1.24 billion parameters
        "sequence_length": 4096,
        "micro_batch_size": 2,
        "vocab_size": 128256,
        "model": LLAMA
        | {"num_layers": 16, "num_heads": 32, "num_key_value_heads": 8, "hidden_size": 2048}
        | {"intermediate_size": 8192, "extra": {"tie_word_embeddings": True}},
    },
    "llama-8b": {  # sizes of Llama 3 8B, 8.03 billion parameters; recomputes activations like llama_8b.yaml
        "sequence_length": 4096,
        "micro_batch_size": 1,
        "vocab_size": 128256,
        "model": LLAMA
        | {"num_layers": 32, "num_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
        | {"intermediate_size": 14336, "activation_checkpointing": "full"},
    },
}


@dataclass(frozen=True)
class Workload:
    """Model with the rows that it trains on.

    Attributes:
        model: Key of MODELS.
        data: `stdlib` (the text of the default recipe) or `random`.
        rows: `packed` (documents of a row do not attend to each other) or `unpacked` (they do).
        adapter: Whether a LoRA adapter is trained instead of the weights, without recomputation.
        fp8: Whether linear layers of the blocks multiply in fp8.
    """

    model: str
    data: str
    rows: str
    sequence_length: int
    micro_batch_size: int
    adapter: bool = False
    fp8: bool = False

    @staticmethod
    def of(model: str, data: str = "random", rows: str = "unpacked") -> Workload:
        """Return a workload with the model's own sequence length and micro-batch."""
        size = MODELS[model]
        return Workload(model, data, rows, size["sequence_length"], size["micro_batch_size"])


def write_recipe(path: Path, work: Workload, precision: str, *, plain: bool) -> None:
    """Write a participant's recipe.

    Args:
        plain: Whether the participant has no DeepSpeed JSON, so that the recipe has to set the precision.
    """
    tree = yaml.safe_load(RECIPE.read_text())
    size = MODELS[work.model]
    if size["model"] is not None:
        tree["model"] = {"kind": "causal_lm", "vocab_size": size["vocab_size"], **size["model"]}
    tree["model"]["max_sequence_length"] = work.sequence_length
    if work.fp8:
        tree["model"]["fp8"] = "rowwise"
    if work.adapter:
        tree["adapter"] = {"kind": "lora", "rank": 32}
        tree["model"].pop("activation_checkpointing", None)
    if work.data == "stdlib":
        tree["data"] |= {"sequence_length": work.sequence_length, "separate_documents": work.rows == "packed"}
        tree["data"]["eval_fraction"] = 0.0  # a run evaluates before its first step
    else:
        shape = {"sequence_length": work.sequence_length, "vocab_size": size["vocab_size"]}
        kind = f"workload:{'packed' if work.rows == 'packed' else 'random'}_tokens"
        tree["data"] = {"kind": kind, "args": {"num_samples": SAMPLES, **shape}}
    tree["batch"] = {"micro_batch_size": work.micro_batch_size, "gradient_accumulation_steps": 1}
    tree["schedule"] = {"kind": "constant"}
    tree["max_steps"] = 1_000_000  # the gate ends the run
    tree["log"] = {"every": LOG_EVERY}
    tree["wandb"] = {"mode": "disabled"}
    tree["eval"] = {"every": 0}
    tree["checkpoint"] = {"every": 0, "resume": "never"}
    # Between its bursts a participant waits for the others, which the watchdog must not report as a hang.
    tree["distributed"] = {"hang_seconds": 1e6, "timeout_seconds": 1e6}
    if plain:
        tree["engine"] = {"precision": precision}
    path.write_text(yaml.safe_dump(tree, sort_keys=False))


def random_tokens(split: str, num_samples: int, sequence_length: int, vocab_size: int) -> RandomTokens | None:
    """Return the rows of `data.kind: workload:random_tokens`; there are no held-out rows."""
    return RandomTokens(num_samples, sequence_length, vocab_size) if split == "train" else None


def packed_tokens(split: str, num_samples: int, sequence_length: int, vocab_size: int) -> Any:
    """Return the rows of `data.kind: workload:packed_tokens`: random documents, packed by the pipeline."""
    if split != "train":
        return None
    import numpy as np

    from pipeline.data.packing import ConcatenatedRows

    random = np.random.default_rng(0)
    tokens = random.integers(1, vocab_size, num_samples * sequence_length + 1, dtype=np.int64)
    ends = random.random(len(tokens)) < 1 / min(MEAN_DOCUMENT, sequence_length // 4)
    tokens[ends] = 0
    part = SimpleNamespace(tokens=tokens, ends=np.flatnonzero(ends) + 1, loss_mask=None)
    part.num_tokens = len(tokens)
    rows = ConcatenatedRows([SimpleNamespace(parts=[part])], sequence_length, True, 0)  # type: ignore[list-item]
    rows.vocab_size = vocab_size  # type: ignore[attr-defined]
    return rows


class RandomTokens:
    """Map-style data set of `input_ids` (T,) and equal `labels` (T,); transformers shifts the labels."""

    def __init__(self, num_samples: int, sequence_length: int, vocab_size: int):
        import torch

        generator = torch.Generator().manual_seed(0)
        self.vocab_size = vocab_size
        self.tokens = torch.randint(0, vocab_size, (num_samples, sequence_length), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class PeerDataset:
    """Map-style data set of the pipeline's prepared tokens, as users of the peers write it.

    A sample is a dict in which the labels equal the inputs. Packed rows keep their positions. Sample i is the
    i-th sample in the pipeline's order.
    """

    def __init__(self, samples: Any, order: Any):
        import numpy as np

        self._samples = samples
        self._order = order.samples_at(np.arange(len(samples))).tolist()

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = self._samples[self._order[index]]
        positions = {"position_ids": sample["position_ids"]} if "position_ids" in sample else {}
        return {"input_ids": sample["input_ids"], "labels": sample["input_ids"], **positions}
