"""A draft -> recipe.yaml and deepspeed.json in a folder, accepted by this trainer's own loader."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from pipeline.config.loading import read_yaml
from pipeline.config.schema import RunConfig
from pipeline.config.settings import load_settings
from pipeline.config.split import Device
from pipeline.config.yaml_loader import Dumper
from pipeline.durable import replace_text
from pipeline.errors import ConfigError, printable
from pipeline.foreign import is_path
from pipeline.foreign_configs import axolotl, llama_factory, trl
from pipeline.foreign_configs.deepspeed_file import make_json
from pipeline.foreign_configs.mapping import Draft, Tool, listed, meant

TOOLS: dict[str, Tool] = {
    "llama-factory": llama_factory.TOOL,
    "axolotl": axolotl.TOOL,
    "trl": trl.TOOL,
}
RECIPE, JSON = "recipe.yaml", "deepspeed.json"


def draft_of(path: Path, origin: str | None, gpus: int, folder: Path) -> Draft:
    """The draft of a recipe from another trainer's file.

    Args:
        path: Their YAML.
        origin: A key of TOOLS, or `trl-dpo` and the like; None: by its keys.
        gpus: How many theirs ran on.
        folder: Where the recipe will lie.

    Raises:
        ConfigError: missing, no YAML, of none of the tools, or with a value that none of them takes.
    """
    file = read_yaml(path)
    name, _, kind = (origin or "").partition("-") if (origin or "").startswith("trl-") else (origin, "", "")
    tool = TOOLS[name] if name else _recognised(path, file.tree)
    draft = Draft(file, tool, gpus, folder, kind or None)
    draft.fill()
    return draft


def _recognised(path: Path, tree: dict[str, Any]) -> Tool:
    """The tool whose keys a file has, those of its own before those that others have too."""

    def counts(tool: Tool) -> tuple[int, int]:
        return len(set(tool.marks.split()) & set(tree)), len(
            (tool.keys.keys() | tool.without.keys()) & set(tree)
        )

    best = max(TOOLS.values(), key=counts)
    if counts(best) > (0, 0) and counts(best)[1] * 2 >= len(tree):
        return best
    slips = ((key, meant(key, tool)) for key in map(str, tree) for tool in TOOLS.values())
    found = next(((key, near) for key, near in slips if near is not None and near != key), None)
    hint = f': {found[0]} (did you mean "{found[1]}"?)' if found else "; --from says which"
    raise ConfigError(f"{path}: no configuration of {listed(TOOLS.values())}{hint}")


def write(draft: Draft) -> tuple[str, str | None]:
    """Writes recipe, JSON and data that were made anew; takes all back where the loader refuses them.

    Returns:
        Where the JSON comes from, and what this machine would refuse of the plan.

    Raises:
        ConfigError: the recipe would not be one.
    """
    model = str(draft.recipe.get("model.pretrained", ""))
    missing = is_path(model) and not Path(model).expanduser().is_dir()
    if missing:
        draft.fill_in.append(f"model.pretrained: {model} is not on this machine")
    text, origin = make_json(draft)
    made = {draft.folder / RECIPE: recipe_text(draft), draft.folder / JSON: text} | draft.files
    before = {path: path.read_bytes() if path.is_file() else None for path in made}
    is_new = not draft.folder.exists()
    draft.folder.mkdir(parents=True, exist_ok=True)
    for path, content in made.items():
        replace_text(path, content)
    try:
        overrides = ["data.tokenizer.pretrained=elsewhere"] if missing else []
        settings = load_settings(draft.folder / RECIPE, draft.folder / JSON, overrides)
    except ConfigError as error:
        for path, old in before.items():
            path.unlink() if old is None else path.write_bytes(old)
        if is_new:
            draft.folder.rmdir()
        told = re.sub(rf"{re.escape(str(draft.folder))}/\S+:\d+: ", "", str(error))
        raise ConfigError(f"{draft.file.path}: what it says makes no recipe: {told}") from None
    try:
        settings.resolve(draft.gpus, Device.probe())
    except ConfigError as error:
        return origin, str(error)
    return origin, None


def recipe_text(draft: Draft) -> str:
    """The recipe as YAML; what was decided, is to fill in and was not taken stands in it as comments."""
    lines = [_comment(f"From {draft.tool.title}'s {draft.file.path.name}, by python -m pipeline import.")]
    within = ""
    for dotted in sorted(draft.recipe, key=_order):
        name, _, key = dotted.partition(".")
        if key and name != within:
            lines += ["", f"{name}:"]
        within = name
        start, value = f"{'  ' * bool(key)}{key or name}:", draft.recipe[dotted]
        told = f"  {_comment(draft.remarks[dotted])}" if dotted in draft.remarks else ""
        if isinstance(value, list) and any(isinstance(each, dict) for each in value):
            lines += [f"{start}{told}", *(f"{'  ' * bool(key)}- {_flow(each)}" for each in value)]
        else:
            lines.append(f"{start} {_flow(value)}{told}")
    lines += ["", *(_comment(f"fill in: {each}") for each in draft.fill_in)]
    lines += [_comment(f"not taken: {key}: {why}") for key, why in draft.not_taken.items()]
    return "\n".join(lines) + "\n"


def _comment(text: str) -> str:
    """One line, whatever it repeats of theirs."""
    return f"# {printable(' '.join(text.split()))}"


def _flow(value: Any) -> str:
    written: str = yaml.dump(
        [value], Dumper=Dumper, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**6
    )
    return written.strip()[1:-1]


def _order(dotted: str) -> tuple[int, bool]:
    name, _, key = dotted.partition(".")
    return list(RunConfig.model_fields).index(name), key != "kind"
