"""`python -m pipeline import`: a foreign configuration -> recipe.yaml and deepspeed.json, checked."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from pipeline.cli.import_configs import accelerate, axolotl, llama_factory, training_arguments, trl
from pipeline.cli.import_configs.mapping import FILL_IN, Draft, Tool, listed, meant
from pipeline.cli.import_configs.trl import TRAINERS
from pipeline.cli.inputs import reading_a_run
from pipeline.config import deepspeed_keys as keys
from pipeline.config.command_lines import train_command
from pipeline.config.deepspeed_check import check
from pipeline.config.loading import ConfigFile, Dumper, read_json, read_yaml
from pipeline.config.schema import RunConfig
from pipeline.config.settings import load_settings
from pipeline.config.shipped import DS_CONFIGS
from pipeline.config.split import Device
from pipeline.errors import ConfigError, PipelineError, printable, shown
from pipeline.files import is_path, replace_file

TOOLS: dict[str, Tool] = {
    "llama-factory": llama_factory.TOOL,
    "axolotl": axolotl.TOOL,
    "trl": trl.TOOL,
    "trainer": training_arguments.TOOL,
    "accelerate": accelerate.TOOL,
}
RECIPE, JSON = "recipe.yaml", "deepspeed.json"
OF_DEEPSPEED = {"zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size", "steps_per_print"}


def draft_of(path: Path, origin: str | None, gpus: int, folder: Path) -> Draft:
    """Return the draft of a recipe from another trainer's file.

    Args:
        path: Their YAML or JSON.
        origin: A key of TOOLS, or `trl-dpo` and the like; None: by its keys.
        gpus: How many theirs ran on.
        folder: Where the recipe will be.

    Raises:
        ConfigError: The file is missing, malformed or of none of the tools, or a value cannot be imported.
    """
    file = read_json(path) if path.suffix == ".json" else read_yaml(path)
    if OF_DEEPSPEED & set(file.tree):
        raise ConfigError(f"{path}: a DeepSpeed JSON; give it to --deepspeed as it is")
    name, _, kind = (origin or "").partition("-") if (origin or "").startswith("trl-") else (origin, "", "")
    tool = TOOLS[name] if name else _recognised(path, file.tree)
    draft = Draft(file, tool, gpus, folder.absolute(), kind or None)
    draft.fill()
    draft.put("model.kind", "causal_lm")
    if (model := draft.found(draft.recipe.get("model.pretrained", FILL_IN))) is not None and model.is_dir():
        draft.put("model.pretrained", str(model))
    if draft.has_recipe and "model.pretrained" not in draft.recipe:
        draft.put("model.pretrained", FILL_IN)
        draft.fill_in.append("model.pretrained: the model's folder or name on the hub; theirs names none")
    return draft


def _recognised(path: Path, tree: dict[str, Any]) -> Tool:
    """Return the tool whose keys a file has, those of its own before those that others have too."""

    def counts(tool: Tool) -> tuple[int, int]:
        known = tool.keys.keys() | tool.without.keys()
        return len(set(tool.marks.split()) & set(tree)), len(known & set(tree))

    best = max(TOOLS.values(), key=counts)
    if counts(best) > (0, 0) and counts(best)[1] * 2 >= len(tree):
        return best
    slips = ((key, meant(str(key), tool)) for key in tree for tool in TOOLS.values())
    found = next((slip for slip in slips if slip[1]), None)
    hint = f': {found[0]} (did you mean "{found[1]}"?)' if found else "; --from says which"
    raise ConfigError(f"{path}: no configuration of {listed(TOOLS.values())}{hint}")


def write(draft: Draft) -> tuple[str, str | None]:
    """Write recipe, JSON and further files; take all back if the loader refuses them.

    Returns:
        Where the JSON comes from, and what this machine would refuse of the plan.

    Raises:
        ConfigError: The recipe would not be one; names the key of theirs.
    """
    model = str(draft.recipe.get("model.pretrained", ""))
    missing = is_path(model) and not Path(model).expanduser().is_dir()
    if missing:
        draft.fill_in.append(f"model.pretrained: {model} is not on this machine")
    text, origin = make_json(draft)
    made = {draft.folder / JSON: text} | draft.files
    if draft.has_recipe:
        made[draft.folder / RECIPE] = recipe_text(draft)
    else:  # JSON has no comments; the key is passed over
        made[draft.folder / JSON] = json.dumps(
            {"_comment": [*lines_left(draft)], **json.loads(text)}, indent=2
        )
    before = {path: path.read_bytes() if path.is_file() else None for path in made}
    is_new = not draft.folder.exists()
    draft.folder.mkdir(parents=True, exist_ok=True)
    for path, content in made.items():
        replace_file(path, content)
    if not draft.has_recipe:
        return origin, None
    try:
        overrides = ["data.tokenizer.pretrained=elsewhere"] if missing else []
        settings = load_settings(draft.folder / RECIPE, draft.folder / JSON, overrides)
    except ConfigError as error:
        for path, old in before.items():
            path.unlink() if old is None else path.write_bytes(old)
        if is_new:
            draft.folder.rmdir()
        told = re.sub(rf"{re.escape(str(draft.folder))}/\S+:\d+: ", "", str(error))
        raise ConfigError(
            f"{draft.file.path}: {_theirs_of(draft, told)}what it says makes no recipe: {told}"
        ) from None
    try:
        settings.resolve(draft.gpus, Device.probe())
    except ConfigError as error:
        return origin, str(error)
    return origin, None


def _theirs_of(draft: Draft, told: str) -> str:
    """Return their key, or keys, behind the key of ours that a message begins with."""
    ours = told.partition(":")[0]
    theirs = [
        key
        for key, row in draft.tool.keys.items()
        if ours in row.ours.split(", ") and draft.file.tree.get(key) is not None
    ]
    return f"{', '.join(theirs)}: " if theirs else ""


def lines_left(draft: Draft) -> Iterator[str]:
    """Yield what is to fill in and what was not taken, one line each."""
    yield from (f"fill in: {each}" for each in draft.fill_in)
    yield from (f"not taken: {key}: {why}" for key, why in draft.not_taken.items())


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
    lines += ["", *map(_comment, lines_left(draft))]
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


HELP = "make a recipe of a configuration of LLaMA-Factory, Axolotl, TRL, the Trainer or accelerate"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.description = HELP
    add = parser.add_argument
    add("theirs", type=Path, metavar="THEIRS.yaml", help="their configuration")
    add("-o", "--output", type=Path, metavar="FOLDER", help="default: beside theirs, without .yaml")
    add(
        "--gpus",
        type=int,
        default=1,
        metavar="N",
        help="how many theirs ran on: the batch is theirs a GPU (default: 1)",
    )
    choices = [*TOOLS, *(f"trl-{name}" for name in TRAINERS)]
    add(
        "--from",
        dest="origin",
        choices=choices,
        metavar="TOOL",
        help=f"{', '.join(choices)}; default: by its keys",
    )
    add("--force", action="store_true", help="write over what is in the folder")


@reading_a_run()
def run(arguments: argparse.Namespace) -> None:
    """Raises a PipelineError where theirs is none of these, or there is no room for ours."""
    theirs: Path = arguments.theirs
    folder: Path = arguments.output or theirs.with_suffix("")
    if arguments.gpus < 1:
        raise PipelineError(f"--gpus {arguments.gpus}: expected a positive number")
    draft = draft_of(theirs, arguments.origin, arguments.gpus, folder.absolute())
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())) and not arguments.force:
        raise PipelineError(f"{folder} exists and is not empty; choose another folder (--output), or --force")
    origin, refused = write(draft)
    folder = draft.folder
    said = [f"{folder / RECIPE}: {draft.tool.title}'s {theirs.name}"] if draft.has_recipe else []
    said += [f"{folder / JSON}: {origin}", *(f"{path}: for the recipe" for path in draft.files)]
    batch = "batch.global_batch_size"
    said += [f"{batch}: {draft.recipe[batch]} = {draft.remarks[batch]}"] if batch in draft.recipe else []
    said += lines_left(draft)
    said += [f"to change: {refused}"] if refused else []
    for line in said:
        print(shown(line))
    recipe = folder / RECIPE if draft.has_recipe else "RECIPE.yaml"
    print(shown(f"train by: {train_command(draft.gpus, '--deepspeed', folder / JSON, '--config', recipe)}"))
