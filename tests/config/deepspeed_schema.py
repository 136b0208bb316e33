"""Writes what DeepSpeed's configuration takes, from the installed DeepSpeed, for pipeline/config to check by.

    python tests/config/deepspeed_schema.py

Sections with a pydantic model are read from the model, all others by running DeepSpeed's own parser on a
mapping that notes which keys it asks for. A test compares the file with the installed DeepSpeed.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from operator import attrgetter
from typing import Annotated, Any

from deepspeed.runtime import config as installed
from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from pydantic import ConfigDict, create_model
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import core_schema

from pipeline.config.deepspeed_check import SCHEMA

Rule = dict[str, Any]

# Where DeepSpeed's parser reads a nested section in Python and makes no model of it.
READ_BY_HAND = (
    "activation_checkpointing", "aio", "autotuning", "checkpoint", "checkpoint.parallel_write",
    "checkpoint.writer", "data_types", "flops_profiler", "timers", "torch_autocast",
)  # fmt: skip
# A model's section -> the attribute of DeepSpeed's parsed configuration, where the two differ in name.
ATTRIBUTES = {
    "bf16": "bfloat16_config",
    "comms_logger": "comms_config.comms_logger",
    "comet": "monitor_config.comet",
    "csv_monitor": "monitor_config.csv_monitor",
    "fp16": "float16_config",
    "hybrid_engine": "hybrid_engine",
    "tensorboard": "monitor_config.tensorboard",
    "timers.throughput": "timers_config",
    "wandb": "monitor_config.wandb",
    "weight_quantization": "weight_quantization_config",
    "zero_optimization": "zero_config",
}
BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


class _Noting(dict[str, Any]):
    """A section that notes every key it is asked for, with the default that is asked for beside it."""

    def __init__(self, asked: dict[str, Any], prefix: str = "", **given: Any):
        super().__init__(**given)
        self.asked = asked
        self.prefix = prefix

    def _note(self, key: str, default: Any = None) -> None:
        full = self.prefix + key
        if self.asked.get(full) is None:
            self.asked[full] = copy.deepcopy(default)

    def get(self, key: str, default: Any = None) -> Any:
        self._note(key, default)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self._note(str(key))
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self._note(key)
        return super().__getitem__(key)

    def keys(self) -> Any:
        return self

    def __copy__(self) -> _Noting:
        return self


ANY_TYPE = ConfigDict(arbitrary_types_allowed=True)


class _Lenient(GenerateJsonSchema):
    """JSON Schema of a model; what JSON cannot say (a torch.dtype, a group) is not described."""

    def handle_invalid_for_json_schema(self, schema: core_schema.CoreSchema, error_info: str) -> Rule:
        return {}


def described() -> dict[str, Rule]:
    """Every key DeepSpeed reads, dotted -> its JSON type, bounds, choices, default and other names.

    A section is an `object`; it is open where no key below it is listed.
    """
    rules: dict[str, Rule] = {}
    asked, config = _asked()
    for key, default in asked.items():
        rules[key] = _of_default(default)
    for section, model in _models(config).items():
        rules[section] = {"type": "object"}
        for key, rule in _fields(model):
            rules[f"{section}.{key}"] = rule
    for key, default in config.pipeline.items():
        rules[f"pipeline.{key}"] = _of_default(default)
    removed = installed._REMOVED_TOP_LEVEL_CONFIG_KEYS
    for key in ("pipeline", *READ_BY_HAND, "optimizer", "scheduler", "data_efficiency", "expert_parallel"):
        rules[key] = {"type": "object"}
    return {key: rule for key, rule in sorted(rules.items()) if key not in removed}


def _asked() -> tuple[dict[str, Any], Any]:
    """Return the keys that DeepSpeed's parser asks for, with defaults, and an empty file as parsed."""
    asked: dict[str, Any] = {}
    root = _Noting(asked, train_batch_size=1, weight_quantization={}, comms_logger={})
    for section in READ_BY_HAND:
        parent, _, name = section.rpartition(".")
        holder: dict[str, Any] = dict.__getitem__(root, parent) if parent else root
        dict.__setitem__(holder, name, _Noting(asked, f"{section}."))
    return asked, installed.DeepSpeedConfig(root)


def _models(config: Any) -> dict[str, type[DeepSpeedConfigModel]]:
    """Dotted section -> DeepSpeed's model of it, nested ones too."""
    found: dict[str, type[DeepSpeedConfigModel]] = {}
    for section in (*ATTRIBUTES, "compile", "tensor_parallel"):
        found[section] = type(attrgetter(ATTRIBUTES.get(section, f"{section}_config"))(config))
    for section, model in list(found.items()):
        for name, field in model.model_fields.items():
            for inner in (field.annotation, *getattr(field.annotation, "__args__", ())):
                if isinstance(inner, type) and issubclass(inner, DeepSpeedConfigModel):
                    found[f"{section}.{field.alias or name}"] = inner
    return found


def _fields(model: type[DeepSpeedConfigModel]) -> Iterator[tuple[str, Rule]]:
    for name, field in model.model_fields.items():
        kind: Any = field.annotation
        for rule_of_field in field.metadata:
            kind = Annotated[kind, rule_of_field]
        alone: Any = create_model("Field", __config__=ANY_TYPE, value=(kind, None))
        schema = alone.model_json_schema(schema_generator=_Lenient)
        rule = _of_schema(schema["properties"]["value"], schema.get("$defs", {}))
        if isinstance(field.default, (bool, int, float, str)):
            rule["default"] = field.default
        if field.alias:
            rule["names"] = [name]
        yield field.alias or name, rule


def _of_schema(schema: Rule, definitions: Rule) -> Rule:
    """Return the part of a JSON Schema that can be checked key by key."""
    rule: Rule = {}
    types = set()
    for each in schema.get("anyOf", [schema]):
        name = each.get("$ref", "").rpartition("/")[2]
        part = definitions[name] if name else each
        types |= {part["type"]} if "type" in part else set()
        # 0 and 0.0 are one to typing's cache: which of them comes back depends on who asked first.
        bounds = {word: part[word] for word in BOUNDS if word in part}
        rule |= {word: int(each) if each == int(each) else each for word, each in bounds.items()}
        rule |= {"enum": list(dict.fromkeys(part["enum"]))} if "enum" in part else {}
        rule |= {"enum": [part["const"]]} if "const" in part else {}
        rule |= {"items": "string"} if part.get("items", {}).get("type") == "string" else {}
    kinds = sorted(types - {"null"})
    return rule | ({"type": kinds[0] if len(kinds) == 1 else kinds} if kinds else {})


def _of_default(default: Any) -> Rule:
    if default is None:
        return {}
    rule: Rule = {"type": TYPES[type(default)]}
    return rule | {"default": default} if default not in ({}, []) else rule


def text() -> str:
    """Return the text of the file, a key a line."""
    lines = (f'  "{key}": {json.dumps(rule, sort_keys=True)}' for key, rule in described().items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    SCHEMA.write_text(text(), encoding="utf-8")
