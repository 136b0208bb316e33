"""What a transformers folder says of a model beside its weights: config, generation config, tokenizer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from torch import nn

from pipeline.models.of_transformers import is_config


def write_description(model: nn.Module, tokenizer: Any, folder: Path) -> None:
    """Writes them into `folder`; nothing, where the model is none of transformers.

    Args:
        model: Whole, or a stage of it that has the whole model's `config`.
        tokenizer: None: there is none.

    Raises:
        OSError: it cannot be written.
    """
    config = getattr(model, "config", None)
    if not is_config(config):
        return
    folder.mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(config)
    config.use_cache = True
    config._attn_implementation = None  # of the run, not of who opens the folder
    config.save_pretrained(folder)
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        generation.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(str(folder))
