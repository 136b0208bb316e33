"""Names and shapes of the parameters of transformers' language models, by families.yaml, from a config."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from pipeline.config.model_schema import FIELDS
from pipeline.errors import ModelError
from pipeline.planning.model import Dimensions, Model, Parameter

TEMPLATES = Path(__file__).with_name("families.yaml")
OUTPUT_LAYER = "lm_head."
OF_ALL_FAMILIES = ("head_dim", "tie_word_embeddings")
"""What shapes follow from in each."""
MOST = {"num_hidden_layers": 2**14, "max_position_embeddings": 2**31, "vocab_size": 2**28}
"""No less than a recipe may say; of other numbers 2**24."""


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


def shaping(family: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """What of a config shapes follow from, besides the sizes that a recipe has words for, and the family's
    defaults do not say.
    """
    template, stated = families()[family], standard_words(family, config)
    defaults, lines = template["defaults"], f"{template['outside']}{template['block']}"
    keys = {*defaults, *template.get("only", {}), *re.findall(r"\? (\w+)", lines), *OF_ALL_FAMILIES}
    return {
        key: stated[key]
        for key in sorted(keys - {*FIELDS.values()})
        if key in stated and stated[key] != defaults.get(key) and (stated[key] or key in defaults)
    }


def build(family: str, stated: Mapping[str, Any], gives_scores: bool = False) -> Model | None:
    """The model of a config of this family.

    Args:
        stated: What the config says; the family's defaults stand for the rest.
        gives_scores: A reward model: one number in the place of logits.

    Returns:
        None: of another family, or it says something that changes shapes in a way that is not known here.

    Raises:
        ModelError: a number of it can be none.
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
        "P": _whole(config, "max_position_embeddings", default=0),
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


def _whole(config: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    """The first of these numbers that the config has; the default where it has none."""
    for name in names:
        value, most = config.get(name), MOST.get(name, 2**24)
        if value is None or (value == 0 and default is not None):
            continue
        if type(value) is not int or not 0 < value <= most:
            raise ModelError(f"{name} is {value!r}: expected a whole number, 1 to {most:,}")
        return value
    if default is None:
        raise ModelError(f"the config has no {names[0]}")
    return default


def _dimensions(family: str, config: Mapping[str, Any], gives_scores: bool) -> Dimensions:
    hidden, heads = _whole(config, "hidden_size"), _whole(config, "num_attention_heads")
    key_value_heads = _whole(config, "num_key_value_heads", default=heads)
    if heads % key_value_heads:
        raise ModelError(f"num_key_value_heads is {key_value_heads}: it does not divide {heads} heads")
    experts = _whole(config, "num_local_experts", "num_experts", default=0)
    intermediate = _whole(config, "intermediate_size", default=4 * hidden)
    if experts:
        intermediate = _whole(config, "moe_intermediate_size", default=intermediate)
    has_window = config.get("use_sliding_window", "layer_types" not in config) and family == "mistral"
    return Dimensions(
        family=family,
        layers=_whole(config, "num_hidden_layers"),
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        key_value_heads=key_value_heads,
        head_dim=_whole(config, "head_dim", default=max(1, hidden // heads)),
        vocabulary=_whole(config, "vocab_size"),
        tied=bool(config.get("tie_word_embeddings", False)) and not gives_scores,
        experts=experts,
        experts_per_token=_whole(config, "num_experts_per_tok", default=0),
        window=(_whole(config, "sliding_window", default=0) or None) if has_window else None,
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
