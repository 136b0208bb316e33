"""Writes a model folder whose Llama says what a script says: each token decides the next one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline.data.tokenizer import get_token_id_bound, train_tokenizer

SPECIAL_TOKENS = ("<|user|>", "<|system|>", "<|assistant|>", "<|end|>", "<think>", "</think>")
# The last character of a message decides its answer. No token but END ends an answer.
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}"
    "{% if m.role == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
)


def write_scripted_model(
    folder: Path, scripts: Iterable[str], chat_template: str | None = TEMPLATE, max_positions: int = 4096
) -> Path:
    """Write the model and its tokenizer, and return the folder.

    The tokenizer has one token for each byte and each of SPECIAL_TOKENS. Its layers add nothing, so a token
    alone decides the next one: those that follow it in the scripts are about equally likely, the first of
    them a little more, and all others never come.

    Args:
        folder: Folder to write.
        scripts: Texts of which each token is followed by the next one.
        chat_template: Chat template; `None` for a base model.
        max_positions: Number of positions of the model.
    """
    tokenizer = train_tokenizer(["."], 300, SPECIAL_TOKENS)
    tokenizer.chat_template = chat_template
    size = get_token_id_bound(tokenizer)
    size += -size % 4
    logits = torch.zeros(size, size)
    for number, script in reversed(list(enumerate(scripts))):
        ids: Sequence[int] = tokenizer(script)["input_ids"]
        logits[ids[:-1], ids[1:]] = 100.0 - 0.01 * number
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=size,
        intermediate_size=4,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=max_positions,
    )
    config.bos_token_id = config.eos_token_id = tokenizer.eos_token_id
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.lm_head.weight.copy_(logits.T / size**0.5)  # the last norm makes the 1 of a token sqrt(size)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
