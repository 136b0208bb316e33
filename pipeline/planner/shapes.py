"""Reads the names and shapes of the model that a recipe trains, from files alone: no weights, no torch.

families.yaml describes the parameters of transformers' model families.
"""

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
from pipeline.files import MAX_DESCRIPTION_BYTES, is_path, read_regular_file
from pipeline.planner.model import DecoderDimensions, ModelSpec, ParameterSpec

FAMILIES_FILE = Path(__file__).with_name("families.yaml")
HUB_MODELS_FILE = Path(__file__).with_name("hub_models.yaml")
OUTPUT_LAYER_PREFIX = "lm_head."
OUTPUT_LAYER_WEIGHT = "lm_head.weight"
"""Name of the output layer's weight. A tied input embedding may also be named so in patterns."""
MAX_FIELD_VALUES = {"num_hidden_layers": 2**14, "max_position_embeddings": 2**31, "vocab_size": 2**28}
"""Largest value of a config's field, as in the recipe's schema; 2**24 for any other field."""


@cache
def read_families() -> Mapping[str, Mapping[str, Any]]:
    """Return families.yaml: transformers' `model_type` -> description of the family."""
    return _read_yaml(FAMILIES_FILE)


@cache
def read_hub_models() -> Mapping[str, Mapping[str, Any]]:
    """Return hub_models.yaml: name of a model on the hub -> sizes in its config.json."""
    return _read_yaml(HUB_MODELS_FILE)


def _read_yaml(path: Path) -> Mapping[str, Mapping[str, Any]]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    tree: Mapping[str, Mapping[str, Any]] = yaml.load(path.read_text("utf-8"), loader)
    return tree


def standardize_keys(family: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with the field names that most families use: `n_embd` becomes `hidden_size`."""
    standard_keys = read_families()[family].get("standard_keys", {})
    return {standard_keys.get(key, key): value for key, value in config.items()}


def build_model_spec(family: str, stated: Mapping[str, Any], gives_scores: bool = False) -> ModelSpec | None:
    """Return the model of a config; `None` if families.yaml does not know the family or its shapes.

    Args:
        family: transformers' `model_type`.
        stated: Fields that the config states; the family's defaults fill the rest.
        gives_scores: Whether it is a reward model, which returns one number in place of logits.

    Raises:
        ModelError: A number in the config is missing or out of range.
    """
    template = read_families().get(family)
    if template is None:
        return None
    config = dict(template["defaults"]) | standardize_keys(family, stated)
    dimensions = _read_dimensions(family, config, gives_scores)
    sizes = {
        "V": dimensions.vocabulary,
        "H": dimensions.hidden,
        "I": dimensions.intermediate,
        "Q": dimensions.heads * dimensions.head_dim,
        "K": dimensions.key_value_heads * dimensions.head_dim,
        "D": dimensions.head_dim,
        "P": _read_int(config, "max_position_embeddings", default=0),
        "E": dimensions.experts,
    }
    for field, allowed in template.get("only", {}).items():
        if config.get(field) not in allowed:
            return None
    outside = [
        each
        for each in _parse_parameters(template["outside"], config, sizes)
        if not (each.name == OUTPUT_LAYER_WEIGHT and dimensions.tied)
        and not (gives_scores and each.name.startswith(OUTPUT_LAYER_PREFIX))
    ]
    if gives_scores:
        outside.append(ParameterSpec("score.weight", (1, dimensions.hidden)))
    layer = "transposed" if family == "gpt2" else "linear"
    block = list(_parse_parameters(template["block"], config, sizes, layer))
    blocks = [
        ParameterSpec(f"{template['prefix']}{number}.{each.name}", each.shape, layer=each.layer)
        for number in range(dimensions.layers)
        for each in block
    ]
    return ModelSpec(family, (*outside[:1], *blocks, *outside[1:]), dimensions)


def _read_int(config: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    """Return the value of the first of these fields that the config has, or the default.

    Raises:
        ModelError: The value is no whole number in range, or the config has no such field and there is no
            default.
    """
    for name in names:
        value = config.get(name)
        limit = MAX_FIELD_VALUES.get(name, 2**24)
        if value is None or (value == 0 and default is not None):
            continue
        if type(value) is not int or not 0 < value <= limit:
            raise ModelError(f"{name} is {value!r}: expected a whole number, 1 to {limit:,}")
        return value
    if default is None:
        raise ModelError(f"the config has no {names[0]}")
    return default


def _read_dimensions(family: str, config: Mapping[str, Any], gives_scores: bool) -> DecoderDimensions:
    hidden = _read_int(config, "hidden_size")
    heads = _read_int(config, "num_attention_heads")
    key_value_heads = _read_int(config, "num_key_value_heads", default=heads)
    if heads % key_value_heads:
        raise ModelError(f"num_key_value_heads is {key_value_heads}: expected a divisor of the {heads} heads")
    experts = _read_int(config, "num_local_experts", "num_experts", default=0)
    intermediate = _read_int(config, "intermediate_size", default=4 * hidden)
    if experts:
        intermediate = _read_int(config, "moe_intermediate_size", default=intermediate)
    has_window = config.get("use_sliding_window", "layer_types" not in config) and family == "mistral"
    return DecoderDimensions(
        family=family,
        layers=_read_int(config, "num_hidden_layers"),
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        key_value_heads=key_value_heads,
        head_dim=_read_int(config, "head_dim", default=max(1, hidden // heads)),
        vocabulary=_read_int(config, "vocab_size"),
        tied=bool(config.get("tie_word_embeddings", False)) and not gives_scores,
        experts=experts,
        experts_per_token=_read_int(config, "num_experts_per_tok", default=0),
        window=(_read_int(config, "sliding_window", default=0) or None) if has_window else None,
    )


def _parse_parameters(
    lines: str, config: Mapping[str, Any], sizes: Mapping[str, int], layer: Any = None
) -> Iterator[ParameterSpec]:
    """Yield the parameters that lines of families.yaml describe for this config.

    Args:
        lines: Lines of the form `NAME DIMENSIONS [? FIELD]`.
        config: Config of the model, with standardized keys.
        sizes: Size for each letter of a dimension.
        layer: Layout of the weights of linear layers.
    """
    for line in lines.splitlines():
        description, _, field = line.partition(" ? ")
        if field and not config.get(field):
            continue
        name, *dimensions = description.split()
        shape = tuple(_evaluate_size(text, sizes) for text in dimensions)
        is_linear = len(shape) == 2 and not name.startswith("mlp.gate.")  # a router is no linear layer
        yield ParameterSpec(name, shape, layer=layer if is_linear else None)


def _evaluate_size(text: str, sizes: Mapping[str, int]) -> int:
    """Return the number of a dimension such as `Q+2K`."""
    total = 0
    for term in text.split("+"):
        match = re.fullmatch(r"(\d*)([A-Z]?)", term)
        assert match is not None
        total += int(match[1] or 1) * (sizes[match[2]] if match[2] else 1)
    return total


def read_model_spec(config: RunConfig) -> ModelSpec | None:
    """Return the model that a recipe trains, with its adapter and with frozen parameters marked.

    Returns:
        `None` if the model has to be built to be known: its family is not in families.yaml, or it is a
        module of the user's own.

    Raises:
        ModelError: The folder or the hub has no such model, or its config cannot be read.
    """
    model = config.model.language_model
    if model is None:
        return None
    is_sized_by_data = model.pretrained is None or model.grow_vocabulary
    vocabulary_size = read_vocabulary_size(config) if is_sized_by_data else None
    scores = config.objective.kind == "reward"
    if model.pretrained is not None:
        stated = read_planned_config(model.pretrained)
        if stated.get("quantization_config"):
            raise ModelError(
                f"model.pretrained: {model.pretrained!r}: its weights are quantized already; "
                "take the model with weights in 16 or 32 bits, and adapter.quantize for a base in 4 bits"
            )
        family = str(stated.get("model_type"))
        if family not in read_families():
            return None
        stated = standardize_keys(family, stated)
        if model.grow_vocabulary:
            stated["vocab_size"] = max(vocabulary_size or 0, stated.get("vocab_size", 0))
    else:
        family = model.architecture or ""
        if family not in read_families():
            return None
        stated = _new_model_config(model, family, vocabulary_size, config.data.tokens_per_row)
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
    """Return the same model with frozen parameters marked and the adapter's matrices added.

    Raises:
        ConfigError: A pattern matches nothing.
    """
    if freeze:
        names = {name: each for each in model.parameters for name in _all_names(each, model)}
        frozen = {
            names[name].name
            for pattern in freeze
            for name in match_parameters(pattern, names, "model.freeze")
        }
        parameters = (replace(each, trains=each.name not in frozen) for each in model.parameters)
        model = replace(model, parameters=tuple(parameters))
    return model if adapter is None else _add_adapter(model, adapter)


def _all_names(parameter: ParameterSpec, model: ModelSpec) -> tuple[str, ...]:
    """Return all names of a parameter: a tied embedding is also the output layer's weight."""
    is_tied = model.dimensions is not None and model.dimensions.tied and parameter is model.parameters[0]
    return (parameter.name, OUTPUT_LAYER_WEIGHT) if is_tied else (parameter.name,)


def _new_model_config(
    model: CausalLMConfig, family: str, vocabulary_size: int | None, sequence_length: int | None
) -> dict[str, Any]:
    """Return the config of a model with new weights, from the recipe and the data."""
    defaults = read_families()[family]["defaults"]
    fields = standardize_keys(family, model.extra)
    for recipe_key, transformers_key in TRANSFORMERS_FIELDS.items():
        value = getattr(model, recipe_key)
        if value is not None:
            fields[transformers_key] = value
    fields.setdefault("vocab_size", vocabulary_size or defaults["vocab_size"])
    if sequence_length is not None:
        fields.setdefault("max_position_embeddings", sequence_length)
    heads = fields.get("num_attention_heads")
    groups = defaults.get("num_key_value_heads") or defaults["num_attention_heads"]
    if heads is not None and heads % groups:
        fields.setdefault("num_key_value_heads", heads)
    return fields


def read_vocabulary_size(config: RunConfig) -> int | None:
    """Return the vocabulary size of the data's tokenizer; `None` if there is none, or it is not known.

    A tokenizer that the run trains itself may end up smaller if there is little text.
    """
    documents = config.data.documents
    if documents is None:
        return None
    given = documents.tokenizer.pretrained
    if given is None:
        return documents.tokenizer.vocab_size
    try:
        tokenizer = json.loads(_read_model_file(given, "tokenizer.json", "data.tokenizer.pretrained"))
        ids = [*tokenizer["model"]["vocab"].values()] if "vocab" in tokenizer["model"] else []
        ids += [each["id"] for each in tokenizer.get("added_tokens", [])]
        return max(ids) + 1
    except (ModelError, AttributeError, KeyError, RecursionError, TypeError, ValueError):
        return None  # another file layout, which only the run itself can read


def find_unread_tokenizer(config: RunConfig) -> str | None:
    """Return the tokenizer that decides the vocabulary of a new model and cannot be read.

    Returns:
        `None` if the vocabulary is known. Otherwise `read_model_spec` takes the family's default.
    """
    model = config.model.language_model
    documents = config.data.documents
    if model is None or documents is None or model.pretrained or model.vocab_size:
        return None
    return documents.tokenizer.pretrained if read_vocabulary_size(config) is None else None


def check_pretrained(config: RunConfig) -> None:
    """Raise a ModelError if the model that a recipe names as pretrained cannot be found or read.

    Called before the model's name is also looked up as a tokenizer, so that the error names the right key.
    """
    if config.model.pretrained_from is not None:
        read_pretrained_config(config.model.pretrained_from)


def read_pretrained_config(given: str, key: str = "model.pretrained") -> dict[str, Any]:
    """Return config.json of a model's folder, or of a model on the hub.

    Args:
        given: Folder or hub name.
        key: Key of the recipe, or option, that has the name, for messages.

    Raises:
        ModelError: The file does not exist, or is no JSON object.
    """
    try:
        found = json.loads(_read_model_file(given, "config.json", key))
    except (ValueError, RecursionError) as error:
        raise ModelError(
            f"{key}: {given!r}: config.json is no JSON ({summarize_error(error)}); download the model again"
        ) from None
    if not isinstance(found, dict):
        raise ModelError(f"{key}: {given!r}: config.json is no JSON object; download the model again")
    return found


def read_planned_config(given: str) -> dict[str, Any]:
    """Return config.json of a pretrained model for a plan, of models in hub_models.yaml without the hub.

    Raises:
        ModelError: See `read_pretrained_config`.
    """
    known = read_hub_models().get(given)
    return read_pretrained_config(given) if known is None or Path(given).exists() else dict(known)


def _read_model_file(given: str, name: str, key: str) -> bytes:
    """Return a file of a model's folder, or of a model on the hub.

    Args:
        given: Folder or hub name; for `tokenizer.json` also the path of the file itself.
        name: Name of the file.
        key: Key of the recipe that `given` is the value of, for errors.

    Raises:
        ModelError: The file does not exist, or cannot be read.
    """
    path = Path(given).expanduser()
    if path.is_file() and name == "tokenizer.json":
        folder = path.parent
        name = path.name
    elif path.is_dir():
        folder = path
    elif is_path(given):
        raise ModelError(f"{key}: {given!r}: there is no such folder; give a folder or a hub name")
    else:
        return _download_file(given, name, key)
    try:
        return read_regular_file(folder / name, MAX_DESCRIPTION_BYTES)
    except FileNotFoundError:
        raise ModelError(f"{key}: {given!r}: the folder has no {name}") from None
    except OSError as error:
        raise ModelError(f"{key}: {given!r}: {name}: {error.strerror or error}") from None


def _download_file(given: str, name: str, key: str) -> bytes:
    from huggingface_hub import hf_hub_download  # takes half a second to import

    try:
        with use_hub_or_cache(key, given, ModelError):
            return read_regular_file(hf_hub_download(given, name), MAX_DESCRIPTION_BYTES)
    except (OSError, ValueError) as error:  # the hub's own errors are among them
        raise ModelError(
            f"{key}: {given!r}: there is no such path, and no {name} from the hub ({summarize_error(error)})"
        ) from None


def _add_adapter(model: ModelSpec, adapter: AdapterConfig) -> ModelSpec:
    """Return the model with the adapter's matrices, which alone are trained, and `modules_to_save`.

    Raises:
        ConfigError: A pattern of the adapter matches nothing.
        ModelError: The adapter starts from a PEFT folder that cannot be read.
    """
    adapter = _complete_adapter(adapter)
    rank = adapter.rank or DEFAULT_ADAPTER_RANK
    layers = {_module_name(each.name): each for each in model.parameters if each.layer is not None}
    modules = dict.fromkeys(
        each
        for p in model.parameters
        for name in _all_names(p, model)
        for each in _with_parents(_module_name(name))
    )
    targets = set(layers)
    if adapter.targets is not None:
        key = "adapter.targets"
        what = "linear layer"
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
        modules_above = {
            part for name in _all_names(each, model) for part in _with_parents(_module_name(name))
        }
        trains = each.name == "score.weight" or bool(saved & modules_above)
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


def _module_name(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _with_parents(module: str) -> list[str]:
    """Return the names of the module and of the modules that contain it, the outermost first."""
    parts = module.split(".")
    return [".".join(parts[: number + 1]) for number in range(len(parts))]


def _complete_adapter(adapter: AdapterConfig) -> AdapterConfig:
    """Return the adapter with rank and layers filled in from the PEFT folder that it starts from."""
    if adapter.weights is None:
        return adapter
    try:
        found = json.loads(_read_model_file(adapter.weights, "adapter_config.json", "adapter.weights"))
        targets = found.get("target_modules")
        stated = {"rank": int(found["r"]), "targets": targets if isinstance(targets, list) else None}
    except (KeyError, TypeError, ValueError):
        raise ModelError(
            f"adapter.weights: {adapter.weights!r}: adapter_config.json has no rank (r) or is no "
            "JSON; give a folder that peft's save_pretrained wrote"
        ) from None
    return adapter.model_copy(update={key: v for key, v in stated.items() if getattr(adapter, key) is None})
