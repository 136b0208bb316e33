"""What a recipe trains, from its files alone: no weights are read, and torch is not imported."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.config.adapter_schema import RANK, AdapterConfig
from pipeline.config.model_schema import FIELDS, CausalLMConfig
from pipeline.config.patterns import matching, matching_parts
from pipeline.config.schema import RunConfig
from pipeline.errors import ModelError, one_line
from pipeline.files import DESCRIPTION_LIMIT, is_path, read_plain
from pipeline.hub import hub_or_cache
from pipeline.planning.families import build, families, standard_words
from pipeline.planning.model import Model, Parameter

TIED = "lm_head.weight"


def model_of(config: RunConfig) -> Model | None:
    """The model that a recipe trains, with its adapter, and with what is frozen marked.

    Returns:
        None: it has to be built to be known: a family that is not in families.yaml, a module of one's own.

    Raises:
        ModelError: the folder or the hub has no such model, or its config cannot be read.
    """
    model = config.model.language_model
    if model is None:
        return None
    words = needed_words(config)
    scores = config.objective.kind == "reward"
    if model.pretrained is not None:
        stated = read_config(model.pretrained)
        if stated.get("quantization_config"):
            raise ModelError(f"model.pretrained: {model.pretrained!r}: its weights are quantised already")
        family = str(stated.get("model_type"))
        if family not in families():
            return None
        stated = standard_words(family, stated)
        if model.grow_vocabulary:
            stated["vocab_size"] = max(words or 0, stated.get("vocab_size", 0))
    else:
        family = model.architecture or ""
        if family not in families():
            return None
        stated = _new(model, family, words, config.data.tokens_per_row)
    try:
        found = build(family, stated, scores)
    except ModelError as error:
        given = model.pretrained
        whose = "model" if given is None else f"model.pretrained: {given!r}: config.json"
        raise ModelError(f"{whose}: {error}") from None
    if found is None:
        return None
    found = replace(found, name=model.pretrained or model.architecture or family)
    return trained_parts(found, model.freeze, config.adapter)


def trained_parts(model: Model, freeze: list[str] | None, adapter: AdapterConfig | None) -> Model:
    """The same model, with what stays frozen marked and an adapter's matrices added.

    Raises:
        ConfigError: a pattern matches nothing.
    """
    if freeze:
        names = {name: each for each in model.parameters for name in _names(each, model)}
        frozen = {names[name].name for pattern in freeze for name in matching(pattern, names, "model.freeze")}
        parameters = (replace(each, trains=each.name not in frozen) for each in model.parameters)
        model = replace(model, parameters=tuple(parameters))
    return model if adapter is None else _with_adapter(model, adapter)


def _names(parameter: Parameter, model: Model) -> tuple[str, ...]:
    """A tied embedding is the output layer's weight, too."""
    is_tied = model.dimensions is not None and model.dimensions.tied and parameter is model.parameters[0]
    return (parameter.name, TIED) if is_tied else (parameter.name,)


def _new(
    model: CausalLMConfig, family: str, words: int | None, sequence_length: int | None
) -> dict[str, Any]:
    """The config of a new model: what the recipe says, and what follows from it and from the data."""
    defaults = families()[family]["defaults"]
    fields = standard_words(family, model.extra)
    for ours, theirs in FIELDS.items():
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


def needed_words(config: RunConfig) -> int | None:
    """Entries of the data's tokenizer, as far as it is known without making it; None: there is none.

    A tokenizer that a run trains has as many as it may have, or fewer where the text is short.
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
    """Look for `model.pretrained` before anything takes its name for that of a tokenizer. Loads no torch.

    Raises:
        ModelError: as `read_config`.
    """
    if config.model.pretrained_from is not None:
        read_config(config.model.pretrained_from)


def read_config(given: str) -> dict[str, Any]:
    """config.json of a model's folder, or of a name on the hub.

    Raises:
        ModelError: it is not there, or no JSON object.
    """
    try:
        found = json.loads(_read(given, "config.json", "model.pretrained"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"model.pretrained: {given!r}: config.json is no JSON ({one_line(error)})") from None
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
        return read_plain(folder / name, DESCRIPTION_LIMIT)
    except FileNotFoundError:
        raise ModelError(f"{key}: {given!r}: the folder has no {name}") from None
    except OSError as error:
        raise ModelError(f"{key}: {given!r}: {name}: {error.strerror or error}") from None


def _from_hub(given: str, name: str, key: str) -> bytes:
    from huggingface_hub import hf_hub_download  # half a second, where a name on the hub is given

    try:
        with hub_or_cache(key, given, ModelError):
            return read_plain(hf_hub_download(given, name), DESCRIPTION_LIMIT)
    except (OSError, ValueError) as error:  # the hub's own errors are among them
        raise ModelError(
            f"{key}: {given!r}: no {name} from the hub, and there is no folder of that name "
            f"({one_line(error)})"
        ) from None


def _with_adapter(model: Model, adapter: AdapterConfig) -> Model:
    adapter = _completed(adapter)
    rank = adapter.rank or RANK
    layers = {_owner(each.name): each for each in model.parameters if each.layer is not None}
    modules = dict.fromkeys(
        each for p in model.parameters for name in _names(p, model) for each in _around(_owner(name))
    )
    targets = set(layers)
    if adapter.targets is not None:
        key, what = "adapter.targets", "linear layer"
        found = (matching_parts(each, layers, key, what, modules) for each in adapter.targets)
        targets = {name for names in found for name in names}
    saved = {
        name
        for pattern in adapter.modules_to_save or ()
        for name in matching_parts(pattern, modules, "adapter.modules_to_save", "module")
    }
    parameters: list[Parameter] = []
    for each in model.parameters:
        layer, _, last = each.name.rpartition(".")
        around = {part for name in _names(each, model) for part in _around(_owner(name))}
        trains = each.name == "score.weight" or bool(saved & around)
        name = f"{layer}.base_layer.{last}" if layer in targets else each.name
        parameters.append(replace(each, name=name, trains=trains))
        if layer not in targets or each.layer is None:
            continue
        outputs, inputs = each.shape if each.layer == "linear" else each.shape[::-1]
        parameters.append(Parameter(f"{layer}.lora_A.default.weight", (rank, inputs)))
        parameters.append(Parameter(f"{layer}.lora_B.default.weight", (outputs, rank)))
        if adapter.kind == "dora":
            parameters.append(Parameter(f"{layer}.lora_magnitude_vector.default.weight", (outputs,)))
    return replace(model, parameters=tuple(parameters))


def _owner(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _around(module: str) -> list[str]:
    """The module, and those that hold it."""
    parts = module.split(".")
    return [".".join(parts[: number + 1]) for number in range(len(parts))]


def _completed(adapter: AdapterConfig) -> AdapterConfig:
    """With the rank and the layers of peft's folder that it starts from."""
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
