"""Command `python -m pipeline import`: writes a recipe and a JSON from another trainer's configuration."""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import yaml

from pipeline.cli.import_configs import accelerate, axolotl, llama_factory, training_arguments, trl
from pipeline.cli.import_configs.mapping import FILL_IN, ImportDraft, TrainerTable
from pipeline.cli.inputs import report_file_errors
from pipeline.config import deepspeed_keys
from pipeline.config.command_lines import format_train_command
from pipeline.config.deepspeed_check import check_deepspeed_json
from pipeline.config.loading import ConfigFile, Tree, YamlDumper, read_json, read_yaml, set_dotted
from pipeline.config.schema import RunConfig
from pipeline.config.settings import load_settings
from pipeline.config.shipped import DS_CONFIGS
from pipeline.errors import ConfigError, PipelineError, escape_unprintable, shorten_message
from pipeline.files import is_path, replace_file

TOOLS: dict[str, TrainerTable] = {
    "trainer": training_arguments.TOOL,
    "llama-factory": llama_factory.TOOL,
    "axolotl": axolotl.TOOL,
    **{f"trl-{trainer}": trl.TOOL for trainer in trl.TRAINERS},
    "accelerate": accelerate.TOOL,
}
RECIPE = "recipe.yaml"
JSON = "deepspeed.json"
OF_DEEPSPEED = {"zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size", "steps_per_print"}


def draft_recipe(path: Path, origin: str | None, gpus: int) -> ImportDraft:
    """Return the draft of a recipe from another trainer's file.

    Args:
        path: YAML or JSON of the other trainer.
        origin: Key of TOOLS; `None` to tell the trainer by the file's keys.
        gpus: Number of GPUs that the other run used.

    Raises:
        ConfigError: The file is missing, malformed or of no known trainer, or a value cannot be imported.
    """
    file = read_json(path) if path.suffix == ".json" else read_yaml(path)
    if OF_DEEPSPEED & set(file.tree):
        raise ConfigError(f"{path}: a DeepSpeed JSON needs no import; give it to --deepspeed as it is")
    origin = origin or _recognised(file)
    draft = ImportDraft(file, TOOLS[origin], gpus, origin.removeprefix("trl-"))
    draft.import_keys()
    draft.put("model.kind", "causal_lm")
    model = draft.recipe.get("model.pretrained")
    if draft.has_recipe and model is None:
        draft.ask(
            "model.pretrained", FILL_IN, "the model's folder or name on the hub; the imported file has none"
        )
    elif model is not None and (found := draft.find_path(model)) is not None and found.is_dir():
        draft.put("model.pretrained", str(found))
    elif model is not None and is_path(model):
        draft.fill_in.append(f"model.pretrained: {model} is not on this machine")
    return draft


def _recognised(file: ConfigFile) -> str:
    """Return the key of TOOLS whose table knows most of the file's keys, the first in a tie."""
    known = {name: {key.partition(".")[0] for key in tool.rows} for name, tool in TOOLS.items()}
    best = max(known, key=lambda name: len(known[name] & set(file.tree)))
    if len(known[best] & set(file.tree)) * 2 < max(len(file.tree), 1):
        titles = ", ".join(dict.fromkeys(tool.title for tool in TOOLS.values()))
        raise ConfigError(f"{file.path}: no configuration of {titles}; if it is one, name it with --from")
    if TOOLS[best] is trl.TOOL:
        choices = ", ".join(f"trl-{trainer}" for trainer in trl.TRAINERS)
        raise ConfigError(f"{file.path}: TRL's files do not name their trainer; add --from {choices}")
    return best


def write_files(draft: ImportDraft, folder: Path) -> str:
    """Write recipe and JSON after loading them as a check, and return the origin of the JSON.

    Raises:
        ConfigError: The recipe would be invalid. The message names the imported key.
    """
    tree, origin = make_json(draft)
    if draft.has_recipe:
        made = {JSON: format_json(tree), RECIPE: format_recipe(draft)}
        _check(draft, made)
    else:  # JSON has no comments, and the loader ignores this key
        made = {JSON: format_json({"_comment": [*format_open_points(draft)], **tree})}
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in made.items():
        replace_file(folder / name, content)
    return origin


def _check(draft: ImportDraft, made: dict[str, str]) -> None:
    """Raise a ConfigError if the loader refuses recipe and JSON, written to a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        for name, content in made.items():
            (Path(folder) / name).write_text(content)
        try:  # the override keeps the loader from looking for the tokenizer of a model that is not here yet
            load_settings(Path(folder) / RECIPE, Path(folder) / JSON, ["data.tokenizer.pretrained=elsewhere"])
        except ConfigError as error:
            message = re.sub(rf"{re.escape(folder)}/\S+:\d+: ", "", str(error))
            theirs = [
                f"{key}: "
                for key, row in draft.tool.rows.items()
                if message.partition(":")[0] in row.ours.split(", ") and draft.theirs.get(key) is not None
            ]
            where = "".join(theirs[:1])
            raise ConfigError(
                f"{draft.file.path}: {where}its value makes an invalid recipe: {message}"
            ) from None


def format_json(tree: Tree) -> str:
    """Return the text of a JSON file."""
    return json.dumps(tree, indent=2) + "\n"


def format_open_points(draft: ImportDraft) -> Iterator[str]:
    """Yield one line for each key to fill in, key left open, and reason of keys without effect."""
    yield from (f"fill in: {each}" for each in draft.fill_in)
    yield from (f"left open: {key}: {what_to_do}" for key, what_to_do in draft.left_open.items())
    for reason in dict.fromkeys(draft.no_effect.values()):
        keys = ", ".join(key for key, each in draft.no_effect.items() if each == reason)
        yield f"without effect: {keys}: {reason}"


def format_recipe(draft: ImportDraft) -> str:
    """Return the recipe as YAML, below comments on decisions and open points."""
    lines = [f"From {draft.tool.title}'s {draft.file.path.name}, by python -m pipeline import."]
    lines += [f"{key}: {remark}" for key, remark in draft.remarks.items() if key in draft.recipe]
    comments = [
        f"# {escape_unprintable(' '.join(line.split()))}" for line in (*lines, *format_open_points(draft))
    ]
    order = list(RunConfig.model_fields)
    tree: Tree = {}
    for key in sorted(draft.recipe, key=lambda key: order.index(key.partition(".")[0])):
        set_dotted(tree, key.split("."), draft.recipe[key], RECIPE)
    return (
        "\n".join(comments) + "\n" + yaml.dump(tree, Dumper=YamlDumper, sort_keys=False, allow_unicode=True)
    )


def make_json(draft: ImportDraft) -> tuple[Tree, str]:
    """Return the DeepSpeed JSON and its origin, as a text for the user."""
    tree, origin = _read_their_json(draft)
    if tree is None:
        is_quantized = "adapter.quantize" in draft.recipe  # ZeRO 3 cannot divide weights in 4 bits
        name = "zero3" if draft.base == "zero3" and not is_quantized else "zero2"
        tree = read_json(DS_CONFIGS / f"{name}.json").tree
        origin = f"ds_configs/{name}.json"
    if not draft.json.get("fp16.enabled"):
        tree.pop("fp16", None)
    for dotted, value in draft.json.items():
        set_dotted(tree, dotted.split("."), value, str(draft.file.path))
    return tree, origin


def _read_their_json(draft: ImportDraft) -> tuple[Tree | None, str]:
    """Return the imported file's DeepSpeed JSON without keys that the recipe owns, and its origin.

    `None` in place of the JSON if there is none, it does not exist here, or the loader refuses it.
    """
    if isinstance(draft.base, dict):
        file = ConfigFile(draft.file.path, json.loads(json.dumps(draft.base)))
        origin = "from the imported file"
    elif draft.base in ("zero2", "zero3"):
        return None, ""
    elif (path := draft.find_path(draft.base)) is None:
        draft.left_open["deepspeed"] = (
            f"{draft.base} does not exist here; copy it and import again, or choose a split"
        )
        return None, ""
    else:
        file = read_json(path)
        origin = str(path)
    for dotted in deepspeed_keys.RECIPE_OWNS:
        file.tree.pop(dotted.partition(".")[0], None)
    try:
        check_deepspeed_json(file)
    except ConfigError as error:
        draft.left_open["deepspeed"] = str(error)
        return None, ""
    return file.tree, origin


HELP = "convert a configuration of LLaMA-Factory, Axolotl, TRL, the Trainer or accelerate to a recipe"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = HELP
    add = parser.add_argument
    add("theirs", type=Path, metavar="THEIRS.yaml", help="configuration of the other trainer")
    add("-o", "--output", type=Path, metavar="FOLDER", help="default: beside THEIRS.yaml, without .yaml")
    gpus = "GPUs of the other run; its batch size is per GPU (default: 1)"
    add("--gpus", type=int, default=1, metavar="N", help=gpus)
    tools = f"{', '.join(TOOLS)} (default: by the file's keys)"
    add("--from", dest="origin", choices=list(TOOLS), metavar="TOOL", help=tools)
    add("--force", action="store_true", help="overwrite files in the folder")


@report_file_errors()
def run(arguments: argparse.Namespace) -> None:
    """Import the configuration, write recipe and JSON, and print what is left to do.

    Raises:
        PipelineError: The file cannot be imported, or the folder exists and is not empty.
    """
    theirs: Path = arguments.theirs
    folder: Path = arguments.output or theirs.with_suffix("")
    if arguments.gpus < 1:
        raise PipelineError(f"--gpus {arguments.gpus}: expected a positive number")
    draft = draft_recipe(theirs, arguments.origin, arguments.gpus)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())) and not arguments.force:
        raise PipelineError(f"{folder} exists and is not empty; choose another folder (--output), or --force")
    origin = write_files(draft, folder)
    said = [f"{folder / RECIPE}: {draft.tool.title}'s {theirs.name}"] if draft.has_recipe else []
    said.append(f"{folder / JSON}: {origin}")
    batch = "batch.global_batch_size"
    said += [f"{batch}: {draft.recipe[batch]} = {draft.remarks[batch]}"] if batch in draft.recipe else []
    said += format_open_points(draft)
    for line in said:
        print(shorten_message(line))
    recipe = folder / RECIPE if draft.has_recipe else "RECIPE.yaml"
    print(
        shorten_message(
            f"train by: {format_train_command(draft.gpus, '--deepspeed', folder / JSON, '--config', recipe)}"
        )
    )
