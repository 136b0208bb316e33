"""Writes a tiny model folder with the files of the Hugging Face hub: config, random weights, tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline.data.chat_template import BUILT_IN, SPECIAL_TOKENS
from pipeline.data.tokenizer import get_token_id_bound, train_tokenizer

ANSWERS = {"the sky": "blue", "grass": "green", "snow": "white", "coal": "black", "a lemon": "yellow"}


def conversations() -> Iterator[dict[str, list[dict[str, str]]]]:
    """Yield 200 conversations of one question and one answer, about five things."""
    for number in range(200):
        thing, colour = list(ANSWERS.items())[number % len(ANSWERS)]
        question = f"What colour is {thing}? ({number})"
        turns = ("user", question), ("assistant", f"It is {colour}.")
        yield {"messages": [{"role": role, "content": content} for role, content in turns]}


def write_conversations(path: Path) -> Path:
    """Write the conversations as JSONL, and return the path."""
    path.write_text("".join(json.dumps(each) + "\n" for each in conversations()))
    return path


def write_base_model(
    folder: Path, chat_template: str | None = BUILT_IN["chatml"], hidden_size: int = 32
) -> Path:
    """Write a Llama whose tokenizer was trained on the conversations, and return the folder.

    The model has 30,000 parameters at a width of 32.
    """
    texts = [turn["content"] for each in conversations() for turn in each["messages"]]
    tokenizer = train_tokenizer([*texts, "user assistant"], 400, SPECIAL_TOKENS["chatml"])
    tokenizer.chat_template = chat_template
    sizes = {"hidden_size": hidden_size, "intermediate_size": 2 * hidden_size}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=get_token_id_bound(tokenizer), max_position_embeddings=128, **sizes)
    config.bos_token_id = config.eos_token_id = tokenizer.eos_token_id
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
