"""A few words from the trained language model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pipeline.config.schema import SampleConfig


@torch.no_grad()
def sample_text(
    module: nn.Module | None, tokenizer: Any, config: SampleConfig, seed: int, device: torch.device
) -> str | None:
    """What the model writes after the prompt; None for a model that cannot generate.

    Collective: under ZeRO-3 every rank takes part in each forward, so all of them write the same text.
    """
    if module is None or not hasattr(module, "generate"):
        return None
    module.eval()
    torch.manual_seed(seed)
    inputs = tokenizer(config.prompt, return_tensors="pt", return_token_type_ids=False).to(device)
    end = tokenizer.eos_token_id
    room = module.config.max_position_embeddings - inputs["input_ids"].shape[1]  # type: ignore[union-attr]
    with torch.compiler.set_stance("force_eager"):  # a prompt's lengths would each be compiled for
        output = module.generate(  # type: ignore[operator]
            **inputs,
            max_new_tokens=min(config.max_new_tokens, max(1, room)),
            do_sample=True,
            temperature=0.8,
            top_k=50,
            use_cache=True,
            pad_token_id=end,
        )
    return str(tokenizer.decode(output[0], skip_special_tokens=True))
