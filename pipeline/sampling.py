"""A few words from the trained language model: after a prompt, or as the answer to a question."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pipeline.config.schema import SampleConfig
from pipeline.data.template_process import TemplateProcess

TEMPERATURE = 0.8


def sample_text(
    module: nn.Module | None,
    tokenizer: Any,
    config: SampleConfig,
    seed: int,
    device: torch.device,
    *,
    asks: bool,
) -> str | None:
    """The prompt, and what the model writes after it; None for a model that cannot generate.

    Collective: under ZeRO-3 every rank takes part in each forward, so all of them write the same text.

    Args:
        asks: The prompt is a question in the tokenizer's chat template.
    """
    if module is None or not hasattr(module, "generate"):
        return None
    prompt = (question_ids if asks else prompt_ids)(tokenizer, config.prompt)
    written = write(module, tokenizer, prompt.to(device), config.max_new_tokens, TEMPERATURE, seed)
    return str(tokenizer.decode(written, skip_special_tokens=True))


def prompt_ids(tokenizer: Any, text: str) -> Tensor:
    """(T,) ids to go on from; of an empty prompt, the token that stands between documents."""
    ids: Tensor = tokenizer(text, return_tensors="pt")["input_ids"][0].long()
    return ids if len(ids) else torch.tensor([tokenizer.eos_token_id])


def question_ids(tokenizer: Any, text: str) -> Tensor:
    """(T,) ids of a question, written out by the tokenizer's chat template, up to where the answer begins.

    Raises:
        DataError: the template is no Jinja, or refuses it.
    """
    special = tokenizer.all_special_tokens
    template = TemplateProcess(tokenizer.chat_template, dict(tokenizer.special_tokens_map), special)
    written = template.ask(text)
    ids: Tensor = tokenizer(written, return_tensors="pt", add_special_tokens=False)["input_ids"][0]
    return ids


@torch.no_grad()
def write(
    module: nn.Module, tokenizer: Any, prompt: Tensor, max_new_tokens: int, temperature: float, seed: int
) -> Tensor:
    """The ids of the prompt and of what the model writes after it, up to its end or as far as it can see.

    Args:
        prompt: (T,) on the model's device. Of one that the model has no positions for, the end is read.
        temperature: 0: always the likeliest token.
    """
    module.eval()
    torch.manual_seed(seed)
    longest = getattr(module.config, "max_position_embeddings", None)  # not every model has an end
    if longest is not None:
        prompt = prompt[-max(1, longest - 1) :]
        max_new_tokens = min(max_new_tokens, longest - len(prompt))
    draws = (
        {"do_sample": True, "temperature": temperature, "top_k": 50} if temperature else {"do_sample": False}
    )
    with torch.compiler.set_stance("force_eager"):  # a prompt's lengths would each be compiled for
        output = module.generate(  # type: ignore[operator]
            input_ids=prompt[None],
            attention_mask=torch.ones_like(prompt[None]),
            max_new_tokens=max(1, max_new_tokens),
            use_cache=True,
            pad_token_id=tokenizer.eos_token_id,
            **draws,
        )
    written: Tensor = output[0]
    return written
