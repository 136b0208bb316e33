"""What every participant trains: model, tokens and numbers, as one recipe; and the peers' data set.

All is the default recipe's but for what MODELS changes, and a constant learning rate: no schedule needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).resolve().parents[1]
RECIPE = REPOSITORY / "launch" / "recipes" / "python_stdlib.yaml"
JSON_FILES = {0: "ddp.json", 1: "zero1.json", 2: "zero2.json", 3: "zero3.json"}
LOG_EVERY = 10  # optimizer steps between two rows of the log, for every participant

# Per model: sequence length, micro batch, and the recipe's model section (None: the recipe's own).
MODELS: dict[str, dict[str, Any]] = {
    "default": {"sequence_length": 256, "micro_batch_size": 8, "vocab_size": 8192, "model": None},
    "tiny": {
        "sequence_length": 32,
        "micro_batch_size": 2,
        "vocab_size": 300,
        "model": {"architecture": "llama", "num_layers": 2, "num_heads": 4, "hidden_size": 32}
        | {"intermediate_size": 64},
    },
    "llama-70m": {
        "sequence_length": 64,
        "micro_batch_size": 1,
        "vocab_size": 8192,
        "model": {"architecture": "llama", "num_layers": 8, "num_heads": 12, "hidden_size": 768}
        | {"intermediate_size": 2048},
    },
    "gpt2-124m": {
        "sequence_length": 1024,
        "micro_batch_size": 16,
        "vocab_size": 50304,
        "model": {"architecture": "gpt2", "num_layers": 12, "num_heads": 12, "hidden_size": 768}
        | {"extra": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}},
    },
    "llama-1b": {
        "sequence_length": 2048,
        "micro_batch_size": 4,
        "vocab_size": 32000,
        "model": {"architecture": "llama", "num_layers": 16, "num_heads": 32, "hidden_size": 2048}
        | {"num_key_value_heads": 8, "intermediate_size": 8192},
    },
}


def write_recipe(
    path: Path, model: str, data: str, precision: str, *, plain: bool, save_every: int = 0
) -> None:
    """The recipe of one participant. `data` is `stdlib` (the default recipe's text) or `random`."""
    tree = yaml.safe_load(RECIPE.read_text())
    size = MODELS[model]
    if size["model"] is not None:
        tree["model"] = {"kind": "causal_lm", "vocab_size": size["vocab_size"], **size["model"]}
        tree["model"]["max_sequence_length"] = size["sequence_length"]
    if data == "stdlib":
        tree["data"]["sequence_length"] = size["sequence_length"]
    else:
        shape = {"num_samples": 512, "sequence_length": size["sequence_length"]}
        tree["data"] = {
            "kind": "workload:random_tokens",
            "args": shape | {"vocab_size": size["vocab_size"]},
        }
        tree["model"]["max_sequence_length"] = size["sequence_length"]
    tree["batch"] = {"micro_batch_size": size["micro_batch_size"], "gradient_accumulation_steps": 1}
    tree["schedule"] = {"kind": "constant"}
    tree["max_steps"] = 1_000_000  # the gate ends the run
    tree["log"] = {"every": LOG_EVERY}
    tree["wandb"] = {"mode": "disabled"}
    tree["eval"] = {"every": 0}
    tree["checkpoint"] = {"every": save_every, "resume": "never"}
    if plain:
        tree["engine"] = {"precision": precision}
    path.write_text(yaml.safe_dump(tree, sort_keys=False))


def random_tokens(split: str, num_samples: int, sequence_length: int, vocab_size: int) -> RandomTokens | None:
    """`data.kind: workload:random_tokens`: the same tokens in every process; nothing to evaluate on."""
    return RandomTokens(num_samples, sequence_length, vocab_size) if split == "train" else None


class RandomTokens:
    """Map-style data set of `input_ids` (T,) and `labels` (T,), aligned as transformers has them."""

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
    """The pipeline's prepared tokens as a user of the peers writes them: one dict a sample, labels = inputs.

    Sample i is the i-th of the pipeline's own order, so reading on from 0 sees what the pipeline sees.
    """

    def __init__(self, samples: Any, order: Any):
        import numpy as np

        self._samples = samples
        self._order = order.samples_at(np.arange(len(samples))).tolist()

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> dict[str, Any]:
        input_ids = self._samples[self._order[index]]["input_ids"]
        return {"input_ids": input_ids, "labels": input_ids}
