"""Names and shapes of the parameters of transformers' language models, by families.yaml, from a config."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from pipeline.planning.model import Dimensions, Model, Parameter

TEMPLATES = Path(__file__).with_name("families.yaml")
OUTPUT_LAYER = "lm_head."


@cache
def families() -> Mapping[str, Mapping[str, Any]]:
    """model_type -> its lines."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    found: Mapping[str, Mapping[str, Any]] = yaml.load(TEMPLATES.read_text("utf-8"), loader)
    return found


def standard_words(family: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """A config in the words that most families share: `n_embd` is `hidden_size`."""
    words = families()[family].get("words", {})
    return {words.get(key, key): value for key, value in config.items()}


def build(family: str, stated: Mapping[str, Any], gives_scores: bool = False) -> Model | None:
    """The model of a config of this family.

    Args:
        stated: What the config says; the family's defaults stand for the rest.
        gives_scores: A reward model: one number in the place of logits.

    Returns:
        None: of another family, or it says something that changes shapes in a way that is not known here.
    """
    template = families().get(family)
    if template is None:
        return None
    config = dict(template["defaults"]) | standard_words(family, stated)
    dimensions = _dimensions(family, config, gives_scores)
    sizes = {
        "V": dimensions.vocabulary,
        "H": dimensions.hidden,
        "I": dimensions.intermediate,
        "Q": dimensions.heads * dimensions.head_dim,
        "K": dimensions.key_value_heads * dimensions.head_dim,
        "D": dimensions.head_dim,
        "P": config.get("max_position_embeddings") or 0,
        "E": dimensions.experts,
    }
    for field, allowed in template.get("only", {}).items():
        if config.get(field) not in [sizes.get(value, value) if value else value for value in allowed]:
            return None
    outside = [
        each
        for each in _parameters(template["outside"], "", config, sizes)
        if not (each.name == f"{OUTPUT_LAYER}weight" and dimensions.tied)
        and not (gives_scores and each.name.startswith(OUTPUT_LAYER))
    ]
    if gives_scores:
        outside.append(Parameter("score.weight", (1, dimensions.hidden)))
    block = list(_parameters(template["block"], "", config, sizes, _layer_kind(family)))
    blocks = [
        Parameter(f"{template['prefix']}{number}.{each.name}", each.shape, layer=each.layer)
        for number in range(dimensions.layers)
        for each in block
    ]
    return Model(family, (*outside[:1], *blocks, *outside[1:]), dimensions)


def _layer_kind(family: str) -> Any:
    return "transposed" if family == "gpt2" else "linear"


def _dimensions(family: str, config: Mapping[str, Any], gives_scores: bool) -> Dimensions:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    experts = config.get("num_local_experts") or config.get("num_experts") or 0
    intermediate = config.get("intermediate_size") or 4 * hidden
    if experts:
        intermediate = config.get("moe_intermediate_size") or intermediate
    has_window = config.get("use_sliding_window", "layer_types" not in config) and family == "mistral"
    return Dimensions(
        family=family,
        layers=config["num_hidden_layers"],
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        key_value_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        vocabulary=config["vocab_size"],
        tied=bool(config.get("tie_word_embeddings", False)) and not gives_scores,
        experts=experts,
        experts_per_token=config.get("num_experts_per_tok") or 0,
        window=config.get("sliding_window") if has_window else None,
    )


def _parameters(
    lines: str, prefix: str, config: Mapping[str, Any], sizes: Mapping[str, int], layer: Any = None
) -> Iterator[Parameter]:
    for line in lines.splitlines():
        what, _, field = line.partition(" ? ")
        if field and not config.get(field):
            continue
        name, *dimensions = what.split()
        shape = tuple(_size(text, sizes) for text in dimensions)
        is_linear = len(shape) == 2 and not name.startswith("mlp.gate.")  # a router is no linear layer
        yield Parameter(prefix + name, shape, layer=layer if is_linear else None)


def _size(text: str, sizes: Mapping[str, int]) -> int:
    total = 0
    for term in text.split("+"):
        match = re.fullmatch(r"(\d*)([A-Z]?)", term)
        assert match is not None
        total += int(match[1] or 1) * (sizes[match[2]] if match[2] else 1)
    return total
