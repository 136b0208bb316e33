"""The JSON beside an imported recipe: theirs, without what the recipe owns, or one of ds_configs/."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from pipeline.config import deepspeed_keys as keys
from pipeline.config.deepspeed_check import check
from pipeline.config.deepspeed_conflicts import refuse_conflicts
from pipeline.config.loading import ConfigFile, read_json
from pipeline.errors import ConfigError
from pipeline.foreign_configs.mapping import Draft
from pipeline.shipped import DS_CONFIGS


def make_json(draft: Draft) -> tuple[str, str]:
    """The JSON's text, and where it comes from."""
    given = draft.json["theirs"]
    tree, origin = None, ""
    if isinstance(given, dict):
        tree, origin = (
            _theirs(draft, ConfigFile(draft.file.path, json.loads(json.dumps(given)))),
            "as theirs has it",
        )
    elif isinstance(given, str):
        path = draft.found(given)
        if path is not None and path.is_file():
            tree, origin = _theirs(draft, read_json(path)), str(path)
        else:
            draft.drop("deepspeed", f"{given} is not here; the JSON is chosen by its name")
    if tree is None:
        path = DS_CONFIGS / f"{_nearest(draft, given)}.json"
        tree, origin = read_json(path).tree, f"ds_configs/{path.name}"
    tree = {key: value for key, value in tree.items() if key not in ("bf16", "fp16", "tf32", "compile")} | {
        "bf16": _half(tree, "bf16", draft.json["bf16"])
    }
    if draft.json["fp16"]:
        tree["fp16"] = _half(tree, "fp16", True)
    for name in ("tf32", "compile"):
        if name in draft.json:
            tree[name] = {"enabled": draft.json[name]}
    return json.dumps(tree, indent=2) + "\n", origin


def _half(tree: dict[str, Any], name: str, enabled: Any) -> dict[str, Any]:
    return {key: value for key, value in (tree.get(name) or {}).items() if key != "enabled"} | {
        "enabled": enabled
    }


def _theirs(draft: Draft, file: ConfigFile) -> dict[str, Any] | None:
    """Their tree, checked; None where it has what this trainer does not read, which is named then."""
    for dotted in keys.RECIPE_OWNS:
        file.tree.pop(dotted.partition(".")[0], None)
    try:
        check(file)
        refuse_conflicts(file)
    except ConfigError as error:
        draft.drop("deepspeed", str(error))
        return None
    return file.tree


def _nearest(draft: Draft, given: Any) -> str:
    """Return which of ds_configs/ has the stage that a file's name speaks of."""
    name = Path(str(given or "")).name.lower()
    stage = re.search(r"z(?:ero)?_?-?([0-3])", name)
    split = {"0": "ddp", "1": "zero1", "2": "zero2", "3": "zero3"}[stage[1]] if stage else draft.json["split"]
    if "adapter.quantize" in draft.recipe and split == "zero3":
        draft.not_taken["ZeRO 3 or FSDP"] = "weights of 4 bits cannot be cut; ZeRO 2 is taken"
        split = "zero2"
    return split + "_offload" * (split in ("zero2", "zero3") and "offload" in name)
