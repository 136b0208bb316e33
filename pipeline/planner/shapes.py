"""Shapes of the model that a recipe trains, from files alone: no weights, no torch.

families.yaml describes transformers' families."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from pipeline.config.hub import use_hub_or_cache
from pipeline.config.model_schema import (
    DEFAULT_ADAPTER_RANK,
    TRANSFORMERS_FIELDS,
    AdapterConfig,
    CausalLMConfig,
)
from pipeline.config.patterns import match_modules, match_parameters
from pipeline.config.schema import RunConfig
from pipeline.errors import ModelError, summarize_error
from pipeline.files import DESCRIPTION_LIMIT, is_path, read_regular_file
from pipeline.planner.model import DecoderDimensions, ModelSpec, ParameterSpec

TEMPLATES = Path(__file__).with_name("families.yaml")
OUTPUT_LAYER = "lm_head."
MOST = {"num_hidden_layers": 2**14, "max_position_embeddings": 2**31, "vocab_size": 2**28}
"""Limits of numbers in a config, no less than a recipe may say; of others 2**24."""


@cache
def read_families() -> Mapping[str, Mapping[str, Any]]:
    """Return families.yaml: model_type -> its lines."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    found: Mapping[str, Mapping[str, Any]] = yaml.load(TEMPLATES.read_text("utf-8"), loader)
    return found


def standardize_keys(family: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config in the words that most families share: `n_embd` is `hidden_size`."""
    words = read_families()[family].get("words", {})
    return {words.get(key, key): value for key, value in config.items()}


def build_model_spec(family: str, stated: Mapping[str, Any], gives_scores: bool = False) -> ModelSpec | None:
    """Return the model of a config; `None` if families.yaml does not know the family or its shapes.

    Args:
        stated: What the config says; the family's defaults fill the rest.
        gives_scores: A reward model: one number in the place of logits.

    Raises:
        ModelError: A number of it cannot be.
    """
    template = read_families().get(family)
    if template is None:
        return None
    config = dict(template["defaults"]) | standardize_keys(family, stated)
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
        if config.get(field) not in allowed:
            return None
    outside = [
        each
        for each in _parameters(template["outside"], config, sizes)
        if not (each.name == f"{OUTPUT_LAYER}weight" and dimensions.tied)
        and not (gives_scores and each.name.startswith(OUTPUT_LAYER))
    ]
    if gives_scores:
        outside.append(ParameterSpec("score.weight", (1, dimensions.hidden)))
    layer = "transposed" if family == "gpt2" else "linear"
    block = list(_parameters(template["block"], config, sizes, layer))
    blocks = [
        ParameterSpec(f"{template['prefix']}{number}.{each.name}", each.shape, layer=each.layer)
        for number in range(dimensions.layers)
        for each in block
    ]
    return ModelSpec(family, (*outside[:1], *blocks, *outside[1:]), dimensions)


def _whole(config: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    """Return the first of these numbers that the config has, else the default."""
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


def _dimensions(family: str, config: Mapping[str, Any], gives_scores: bool) -> DecoderDimensions:
    hidden, heads = _whole(config, "hidden_size"), _whole(config, "num_attention_heads")
    key_value_heads = _whole(config, "num_key_value_heads", default=heads)
    if heads % key_value_heads:
        raise ModelError(f"num_key_value_heads is {key_value_heads}: it does not divide {heads} heads")
    experts = _whole(config, "num_local_experts", "num_experts", default=0)
    intermediate = _whole(config, "intermediate_size", default=4 * hidden)
    if experts:
        intermediate = _whole(config, "moe_intermediate_size", default=intermediate)
    has_window = config.get("use_sliding_window", "layer_types" not in config) and family == "mistral"
    return DecoderDimensions(
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
    lines: str, config: Mapping[str, Any], sizes: Mapping[str, int], layer: Any = None
) -> Iterator[ParameterSpec]:
    for line in lines.splitlines():
        what, _, field = line.partition(" ? ")
        if field and not config.get(field):
            continue
        name, *dimensions = what.split()
        shape = tuple(_size(text, sizes) for text in dimensions)
        is_linear = len(shape) == 2 and not name.startswith("mlp.gate.")  # a router is no linear layer
        yield ParameterSpec(name, shape, layer=layer if is_linear else None)


def _size(text: str, sizes: Mapping[str, int]) -> int:
    total = 0
    for term in text.split("+"):
        match = re.fullmatch(r"(\d*)([A-Z]?)", term)
        assert match is not None
        total += int(match[1] or 1) * (sizes[match[2]] if match[2] else 1)
    return total


TIED = "lm_head.weight"


def read_model_spec(config: RunConfig) -> ModelSpec | None:
    """Return the model that a recipe trains, with its adapter, and with what is frozen marked.

    Returns:
        `None` if it has to be built: a family that is not in families.yaml, a module of a user's own.

    Raises:
        ModelError: The folder or the hub has no such model, or its config cannot be read.
    """
    model = config.model.language_model
    if model is None:
        return None
    words = read_vocabulary_size(config)
    scores = config.objective.kind == "reward"
    if model.pretrained is not None:
        stated = read_pretrained_config(model.pretrained)
        if stated.get("quantization_config"):
            raise ModelError(f"model.pretrained: {model.pretrained!r}: its weights are quantised already")
        family = str(stated.get("model_type"))
        if family not in read_families():
            return None
        stated = standardize_keys(family, stated)
        if model.grow_vocabulary:
            stated["vocab_size"] = max(words or 0, stated.get("vocab_size", 0))
    else:
        family = model.architecture or ""
        if family not in read_families():
            return None
        stated = _new(model, family, words, config.data.tokens_per_row)
    try:
        found = build_model_spec(family, stated, scores)
    except ModelError as error:
        given = model.pretrained
        whose = "model" if given is None else f"model.pretrained: {given!r}: config.json"
        raise ModelError(f"{whose}: {error}") from None
    if found is None:
        return None
    found = replace(found, name=model.pretrained or model.architecture or family)
    return mark_trained(found, model.freeze, config.adapter)


def mark_trained(model: ModelSpec, freeze: list[str] | None, adapter: AdapterConfig | None) -> ModelSpec:
    """Return the same model, with what stays frozen marked and an adapter's matrices added.

    Raises:
        ConfigError: A pattern matches nothing.
    """
    if freeze:
        names = {name: each for each in model.parameters for name in _names(each, model)}
        frozen = {
            names[name].name
            for pattern in freeze
            for name in match_parameters(pattern, names, "model.freeze")
        }
        parameters = (replace(each, trains=each.name not in frozen) for each in model.parameters)
        model = replace(model, parameters=tuple(parameters))
    return model if adapter is None else _with_adapter(model, adapter)


def _names(parameter: ParameterSpec, model: ModelSpec) -> tuple[str, ...]:
    """Return a parameter's names: a tied embedding is the output layer's weight, too."""
    is_tied = model.dimensions is not None and model.dimensions.tied and parameter is model.parameters[0]
    return (parameter.name, TIED) if is_tied else (parameter.name,)


def _new(
    model: CausalLMConfig, family: str, words: int | None, sequence_length: int | None
) -> dict[str, Any]:
    """Return the config of a new model: what the recipe says, and what follows from it and from the data."""
    defaults = read_families()[family]["defaults"]
    fields = standardize_keys(family, model.extra)
    for ours, theirs in TRANSFORMERS_FIELDS.items():
        if (value := getattr(model, ours)) is not None:
            fields[theirs] = value
    fields.setdefault("vocab_size", words or defaults["vocab_size"])
    if sequence_length is not None:
        fields.setdefault("max_position_embeddings", sequence_length)
    heads = fields.get("num_attention_heads")
    groups = defaults.get("num_key_value_heads") or defaults["num_attention_heads"]
    if heads is not None and heads % groups:
        fields.setdefault("num_key_value_heads", heads)
    return fields


def read_vocabulary_size(config: RunConfig) -> int | None:
    """Return the entries of the data's tokenizer; `None` if there is none, or they are not known.

    A tokenizer that a run trains may have fewer if the text is short.
    """
    documents = config.data.documents
    if documents is None:
        return None
    given = documents.tokenizer.pretrained
    if given is None:
        return documents.tokenizer.vocab_size
    try:
        tokenizer = json.loads(_read(given, "tokenizer.json", "data.tokenizer.pretrained"))
        ids = [*tokenizer["model"]["vocab"].values()] if "vocab" in tokenizer["model"] else []
        ids += [each["id"] for each in tokenizer.get("added_tokens", [])]
        return max(ids) + 1
    except (ModelError, AttributeError, KeyError, RecursionError, TypeError, ValueError):
        return None  # another layout, which the run reads


def check_pretrained(config: RunConfig) -> None:
    """Look for `model.pretrained` before anything takes its name for a tokenizer's.

    Raises:
        ModelError: As `read_config`.
    """
    if config.model.pretrained_from is not None:
        read_pretrained_config(config.model.pretrained_from)


def read_pretrained_config(given: str) -> dict[str, Any]:
    """Read config.json of a model's folder, or of a name on the hub.

    Raises:
        ModelError: It does not exist, or is no JSON object.
    """
    try:
        found = json.loads(_read(given, "config.json", "model.pretrained"))
    except (ValueError, RecursionError) as error:
        raise ModelError(
            f"model.pretrained: {given!r}: config.json is no JSON ({summarize_error(error)})"
        ) from None
    if not isinstance(found, dict):
        raise ModelError(f"model.pretrained: {given!r}: config.json is no JSON object")
    return found


def _read(given: str, name: str, key: str) -> bytes:
    path = Path(given).expanduser()
    if path.is_file() and name == "tokenizer.json":
        folder, name = path.parent, path.name
    elif path.is_dir():
        folder = path
    elif is_path(given):
        raise ModelError(f"{key}: {given!r}: there is no such folder")
    else:
        return _from_hub(given, name, key)
    try:
        return read_regular_file(folder / name, DESCRIPTION_LIMIT)
    except FileNotFoundError:
        raise ModelError(f"{key}: {given!r}: the folder has no {name}") from None
    except OSError as error:
        raise ModelError(f"{key}: {given!r}: {name}: {error.strerror or error}") from None


def _from_hub(given: str, name: str, key: str) -> bytes:
    from huggingface_hub import hf_hub_download  # half a second, where a name on the hub is given

    try:
        with use_hub_or_cache(key, given, ModelError):
            return read_regular_file(hf_hub_download(given, name), DESCRIPTION_LIMIT)
    except (OSError, ValueError) as error:  # the hub's own errors are among them
        raise ModelError(
            f"{key}: {given!r}: no {name} from the hub, and there is no folder of that name "
            f"({summarize_error(error)})"
        ) from None


def _with_adapter(model: ModelSpec, adapter: AdapterConfig) -> ModelSpec:
    adapter = _completed(adapter)
    rank = adapter.rank or DEFAULT_ADAPTER_RANK
    layers = {_owner(each.name): each for each in model.parameters if each.layer is not None}
    modules = dict.fromkeys(
        each for p in model.parameters for name in _names(p, model) for each in _around(_owner(name))
    )
    targets = set(layers)
    if adapter.targets is not None:
        key, what = "adapter.targets", "linear layer"
        found = (match_modules(each, layers, key, what, modules) for each in adapter.targets)
        targets = {name for names in found for name in names}
    saved = {
        name
        for pattern in adapter.modules_to_save or ()
        for name in match_modules(pattern, modules, "adapter.modules_to_save", "module")
    }
    parameters: list[ParameterSpec] = []
    for each in model.parameters:
        layer, _, last = each.name.rpartition(".")
        around = {part for name in _names(each, model) for part in _around(_owner(name))}
        trains = each.name == "score.weight" or bool(saved & around)
        name = f"{layer}.base_layer.{last}" if layer in targets else each.name
        parameters.append(replace(each, name=name, trains=trains))
        if layer not in targets or each.layer is None:
            continue
        outputs, inputs = each.shape if each.layer == "linear" else each.shape[::-1]
        parameters.append(ParameterSpec(f"{layer}.lora_A.default.weight", (rank, inputs)))
        parameters.append(ParameterSpec(f"{layer}.lora_B.default.weight", (outputs, rank)))
        if adapter.kind == "dora":
            parameters.append(ParameterSpec(f"{layer}.lora_magnitude_vector.default.weight", (outputs,)))
    return replace(model, parameters=tuple(parameters))


def _owner(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _around(module: str) -> list[str]:
    """Return the module, and those that hold it."""
    parts = module.split(".")
    return [".".join(parts[: number + 1]) for number in range(len(parts))]


def _completed(adapter: AdapterConfig) -> AdapterConfig:
    """Add the rank and the layers of peft's folder that it starts from."""
    if adapter.weights is None:
        return adapter
    try:
        found = json.loads(_read(adapter.weights, "adapter_config.json", "adapter.weights"))
        targets = found.get("target_modules")
        said = {"rank": int(found["r"]), "targets": targets if isinstance(targets, list) else None}
    except (KeyError, TypeError, ValueError):
        raise ModelError(
            f"adapter.weights: {adapter.weights!r}: adapter_config.json says neither rank (r) nor layers"
        ) from None
    return adapter.model_copy(update={key: v for key, v in said.items() if getattr(adapter, key) is None})
