"""Adapters of the peers, as users of peft and of Unsloth write them, with the first values that ours has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipeline.config.schema import RunConfig
from pipeline.models.adapters import ALPHA, RANK, first_values

MARKS = {"unk_token": "<unk>", "pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}


def with_peft(model: nn.Module, config: RunConfig, base_dtype: torch.dtype) -> nn.Module:
    """Wrap all linear layers but the output layer by peft, over a base in `base_dtype`."""
    from peft import LoraConfig, get_peft_model

    assert config.adapter is not None
    how = LoraConfig(
        r=config.adapter.rank or RANK,
        lora_alpha=config.adapter.alpha or ALPHA,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    return _begun(get_peft_model(model.to(base_dtype), how), config)


def with_unsloth(model: nn.Module, config: RunConfig, folder: Path) -> nn.Module:
    """As Unsloth's notebooks do it, in 16 bits and without recomputation.

    Args:
        model: On the CPU; goes by way of a folder, which is how Unsloth takes one.
    """
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from unsloth import FastLanguageModel

    assert config.adapter is not None
    words = {mark: place for place, mark in enumerate(MARKS.values())}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=MARKS["unk_token"]))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **MARKS).save_pretrained(folder)
    model.to(torch.bfloat16).save_pretrained(folder)
    length = config.model.max_sequence_length
    model, _ = FastLanguageModel.from_pretrained(
        str(folder), max_seq_length=length, dtype=torch.bfloat16, load_in_4bit=False
    )
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    model = FastLanguageModel.get_peft_model(
        model,
        r=config.adapter.rank or RANK,
        lora_alpha=config.adapter.alpha or ALPHA,
        target_modules=sorted({name.rpartition(".")[2] for name in linear} - {"lm_head"}),
        lora_dropout=0,
        bias="none",
        use_gradient_checkpointing=False,
        random_state=config.seed,
    )
    return _begun(model, config)


@torch.no_grad()
def _begun(model: Any, config: RunConfig) -> nn.Module:
    """The model with our first values in its adapters: everybody starts at one place, and losses compare."""
    for name, parameter in model.get_base_model().named_parameters():
        if ".lora_" in name:
            parameter.copy_(first_values(name, parameter.shape, config.adapter, config.seed))
    return model
