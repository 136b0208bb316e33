"""transformers' table of attention functions: read one, add one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

AttentionFunction = Callable[..., tuple[Any, Any]]
"""(module, query, key, value, mask, **rest) -> (output (B, T, heads, width), weights or None)."""


def attention_function(name: str) -> AttentionFunction:
    """The function behind `attn_implementation: <name>`."""
    function: AttentionFunction = ALL_ATTENTION_FUNCTIONS[name]
    return function


def register_attention(name: str, function: AttentionFunction) -> None:
    """Makes `attn_implementation: <name>` known. Models that use it get no mask: the function is causal."""
    AttentionInterface.register(name, function)
