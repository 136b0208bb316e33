"""The blocks that a model is built of: what is computed, and gathered, one like the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import nn

from pipeline.models.of_transformers import is_model

LISTS = (nn.ModuleList, nn.Sequential)


def repeated_blocks(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Two or more modules of a list that differ in their values alone; the outermost ones.

    They are of one class, have modules inside and parameters of the same names, shapes and dtypes.
    """
    taken: set[nn.Module] = set()
    if isinstance(model, LISTS):
        alike: dict[Any, list[nn.Module]] = {}
        for child in dict.fromkeys(model):
            if any(True for _ in child.children()) and not isinstance(child, LISTS):
                alike.setdefault(_likeness(child), []).append(child)
        for blocks in alike.values():
            if len(blocks) > 1:
                taken.update(blocks)
                yield blocks
    for child in model.children():
        if child not in taken:
            yield from repeated_blocks(child)


def _likeness(block: nn.Module) -> Any:
    parameters = tuple(
        (name, tuple(getattr(p, "ds_shape", p.shape)), p.dtype, p.requires_grad)
        for name, p in block.named_parameters()
    )
    return type(block), getattr(block, "gradient_checkpointing", None), parameters


def is_sharded(model: nn.Module) -> bool:
    """Whether parameters lie in ZeRO 3's shards."""
    return any(hasattr(p, "ds_shape") for p in model.parameters())


def has_experts(model: nn.Module) -> bool:
    """A mixture of experts of transformers: what each computes on differs in size from batch to batch."""
    return getattr(getattr(model, "config", None), "num_experts_per_tok", None) is not None


def sharded_as_one(model: nn.Module) -> Iterator[list[nn.Module]]:
    """The repeated blocks of which ZeRO 3 can gather all parameters at once, when the block is called.

    transformers calls its blocks as modules, with hidden states, which others need not do. A parameter of
    several modules is gathered with one of them. Experts make a block too large.
    """
    if is_model(model) and not has_experts(model):
        uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
        for blocks in repeated_blocks(model):
            is_theirs = type(blocks[0]).__module__.startswith("transformers.")
            if is_theirs and all(uses[id(p)] == 1 for block in blocks for p in block.parameters()):
                yield blocks
