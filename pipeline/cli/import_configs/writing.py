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
from pipeline.cli.import_configs.mapping import ImportDraft, TrainerTable
from pipeline.cli.inputs import report_file_errors
from pipeline.config import deepspeed_keys
from pipeline.config.command_lines import format_train_command
from pipeline.config.deepspeed_adoption import adopt_stated_numbers, remove_replaced_keys
from pipeline.config.deepspeed_check import check_deepspeed_json
from pipeline.config.loading import ConfigFile, Tree, YamlDumper, read_json, read_yaml, set_dotted
from pipeline.config.recipe import FILL_IN
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
"""Key that `--from` takes -> table of the trainer."""
RECIPE_FILE = "recipe.yaml"
JSON_FILE = "deepspeed.json"
# A file with one of these keys is a DeepSpeed JSON, and not a configuration of a trainer.
DEEPSPEED_KEYS = {
    "zero_optimization",
    "train_micro_batch_size_per_gpu",
    "train_batch_size",
    "steps_per_print",
}
THEIR_KEYS = {
    "optimizer": ("optimizer.kind", "optim", ("lr", "weight_decay")),
    "scheduler": ("schedule.kind", "lr_scheduler_type", ("warmup_num_steps",)),
}
"""Section of a DeepSpeed JSON -> key of the recipe and of transformers for its kind, and parameters that
DeepSpeed sets to its own default if they are missing."""
# Valid values for the check of the recipe, for keys whose placeholder is not of their type.
STAND_INS = {
    "optimizer.kind": "adamw",
    "schedule.kind": "cosine",
    "data.sequence_length": 256,
    "ds.zero_optimization.stage": 2,
}


def draft_recipe(path: Path, tool_name: str | None, gpus: int) -> ImportDraft:
    """Return the draft of a recipe and a JSON from another trainer's file.

    Args:
        path: YAML or JSON of the other trainer.
        tool_name: Key of TOOLS; `None` to recognise the trainer by the file's keys.
        gpus: Number of GPUs that the other run used.

    Raises:
        ConfigError: The file is missing, malformed or of no known trainer, or a value cannot be imported.
    """
    file = read_json(path) if path.suffix == ".json" else read_yaml(path)
    if DEEPSPEED_KEYS & set(file.tree):
        raise ConfigError(f"{path}: a DeepSpeed JSON needs no import; give it to --deepspeed as it is")
    tool_name = tool_name or _recognise_tool(file)
    draft = ImportDraft(file, TOOLS[tool_name], gpus, tool_name.removeprefix("trl-"))
    draft.import_keys()
    draft.put("model.kind", "causal_lm")
    if draft.has_recipe:
        _locate_model(draft)
    return draft


def _locate_model(draft: ImportDraft) -> None:
    """Make the model's path absolute. Leave it to the user if the file has none, or if it is not here."""
    model = draft.recipe.get("model.pretrained")
    if model is None:
        draft.ask(
            "model.pretrained", FILL_IN, "the model's folder or name on the hub; the imported file has none"
        )
        return
    path = draft.find_path(model)
    if path is not None and path.is_dir():
        draft.put("model.pretrained", str(path))
    elif is_path(model):
        draft.fill_in.append(f"model.pretrained: {model} is not on this machine")


def _recognise_tool(file: ConfigFile) -> str:
    """Return the key of TOOLS whose table has most of the file's keys, the first in a tie.

    Raises:
        ConfigError: No table has half of the keys, or the file is one of TRL, whose trainer has to be named.
    """
    keys = set(file.tree)
    num_shared = {}
    for name, tool in TOOLS.items():
        num_shared[name] = len(keys & {key.partition(".")[0] for key in tool.rows})
    best = max(num_shared, key=num_shared.__getitem__)
    if num_shared[best] * 2 < max(len(keys), 1):
        titles = ", ".join(dict.fromkeys(tool.title for tool in TOOLS.values()))
        raise ConfigError(
            f"{file.path}: its keys are those of no configuration of {titles}; if it is one, add --from TOOL"
        )
    if TOOLS[best] is trl.TOOL:
        choices = ", ".join(f"trl-{trainer}" for trainer in trl.TRAINERS)
        raise ConfigError(
            f"{file.path}: TRL's files do not name their trainer; add --from with one of {choices}"
        )
    return best


def write_files(draft: ImportDraft, folder: Path) -> str:
    """Load recipe and JSON as a check, write them, and return a text for the user on the JSON's origin.

    An import from accelerate has only a JSON, which is not loaded. Files in the folder are overwritten.

    Raises:
        ConfigError: The recipe would be invalid. The message names the key of theirs, and nothing is written.
    """
    tree, origin = make_json(draft)
    if draft.has_recipe:
        contents = {JSON_FILE: format_json(tree), RECIPE_FILE: format_recipe(draft)}
        _check_files(draft, contents)
    else:  # JSON has no comments, and the loader ignores this key
        contents = {JSON_FILE: format_json({"_comment": [*format_open_points(draft)], **tree})}
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        replace_file(folder / name, content)
    return origin


def _check_files(draft: ImportDraft, contents: dict[str, str]) -> None:
    """Write recipe and JSON to a temporary folder, with valid values for placeholders, and load them.

    Args:
        draft: Draft from which they were made.
        contents: File name -> text, with RECIPE_FILE and JSON_FILE.

    Raises:
        ConfigError: The loader refuses them. The message names the key of theirs that has the invalid value.
    """
    with tempfile.TemporaryDirectory() as folder:
        for name, content in contents.items():
            (Path(folder) / name).write_text(content.replace(FILL_IN, "elsewhere"))
        # This override keeps the loader from looking for the tokenizer of a model that is not here yet.
        overrides = ["data.tokenizer.pretrained=elsewhere"]
        for key, value in STAND_INS.items():
            if FILL_IN in (draft.recipe.get(key), draft.json.get(key.removeprefix("ds."))):
                overrides.append(f"{key}={value}")
        try:
            load_settings(Path(folder) / RECIPE_FILE, Path(folder) / JSON_FILE, overrides)
        except ConfigError as error:
            message = re.sub(rf"{re.escape(folder)}/\S+:\d+: ", "", str(error))
            their_key = _find_their_key(draft, message.partition(":")[0])
            place = f"{their_key}: " if their_key else ""
            raise ConfigError(
                f"{draft.file.path}: {place}its value makes an invalid recipe: {message}"
            ) from None


def _find_their_key(draft: ImportDraft, ours: str) -> str | None:
    """Return the first key of theirs that is mapped to a key of the recipe and has a value, or `None`."""
    for key, row in draft.tool.rows.items():
        if ours in row.ours.split(", ") and draft.theirs.get(key) is not None:
            return key
    return None


def format_json(tree: Tree) -> str:
    """Return the text of a JSON file, indented and with a final line break."""
    return json.dumps(tree, indent=2) + "\n"


def format_open_points(draft: ImportDraft) -> Iterator[str]:
    """Yield a line for each key to fill in, each key left open, and each reason of keys without effect."""
    yield from (f"fill in: {line}" for line in draft.fill_in)
    yield from (f"left open: {key}: {what_to_do}" for key, what_to_do in draft.left_open.items())
    for reason in dict.fromkeys(draft.no_effect.values()):
        keys = ", ".join(key for key, its_reason in draft.no_effect.items() if its_reason == reason)
        yield f"without effect: {keys}: {reason}"


def format_recipe(draft: ImportDraft) -> str:
    """Return the recipe as YAML, in the order of the schema, below comments on decisions and open points."""
    lines = [f"From {draft.tool.title}'s {draft.file.path.name}, by python -m pipeline import."]
    lines += [f"{key}: {remark}" for key, remark in draft.remarks.items() if key in draft.recipe]
    comments = [
        f"# {escape_unprintable(' '.join(line.split()))}" for line in (*lines, *format_open_points(draft))
    ]
    order = list(RunConfig.model_fields)
    tree: Tree = {}
    for key in sorted(draft.recipe, key=lambda key: order.index(key.partition(".")[0])):
        set_dotted(tree, key.split("."), draft.recipe[key], RECIPE_FILE)
    return (
        "\n".join(comments) + "\n" + yaml.dump(tree, Dumper=YamlDumper, sort_keys=False, allow_unicode=True)
    )


def make_json(draft: ImportDraft) -> tuple[Tree, str]:
    """Return the DeepSpeed JSON with the values of the draft, and its origin as a text for the user.

    Without a usable JSON of theirs, it is made from one in ds_configs/. The draft's recipe gets the values of
    their JSON's sections `optimizer` and `scheduler`.
    """
    tree, origin = _read_their_json(draft)
    if tree is None:
        is_quantized = "adapter.quantize" in draft.recipe  # ZeRO 3 cannot shard weights in 4 bits
        name = "zero3" if draft.base == "zero3" and not is_quantized else "zero2"
        tree = read_json(DS_CONFIGS / f"{name}.json").tree
        origin = f"from ds_configs/{name}.json"
    if not draft.json.get("fp16.enabled"):
        tree.pop("fp16", None)
    for dotted, value in draft.json.items():
        set_dotted(tree, dotted.split("."), value, str(draft.file.path))
    return tree, origin


def _read_their_json(draft: ImportDraft) -> tuple[Tree | None, str]:
    """Return the imported file's DeepSpeed JSON without keys that the recipe owns, and its origin.

    The JSON is `None`, and the origin empty, if the file has none, or if it cannot be used: it does not exist
    here, or the loader refuses it. The stage of ZeRO is then left to the user.
    """
    if draft.base in ("zero2", "zero3"):
        return None, ""
    if isinstance(draft.base, dict):
        file = ConfigFile(draft.file.path, json.loads(json.dumps(draft.base)))  # a copy, to be changed
        origin = "from the imported file"
    else:
        path = draft.find_path(draft.base)
        if path is None:
            _ask_for_stage(draft, f"{draft.base} does not exist here; copy it and import again")
            return None, ""
        file = read_json(path)
        origin = f"from {path}"
    if draft.has_recipe:
        for section in THEIR_KEYS:
            _adopt_their_section(draft, file, section)
        for dotted in deepspeed_keys.RECIPE_OWNS:
            file.tree.pop(dotted.partition(".")[0], None)
    try:
        check_deepspeed_json(file)
    except ConfigError as error:
        _ask_for_stage(draft, str(error))
        return None, ""
    return file.tree, origin


def _ask_for_stage(draft: ImportDraft, reason: str) -> None:
    """Leave the stage of ZeRO to the user, because their JSON cannot be imported for this reason."""
    draft.json["zero_optimization.stage"] = FILL_IN
    draft.fill_in.insert(0, f"zero_optimization.stage in {JSON_FILE}: {reason}; or write the stage of ZeRO")


def _adopt_their_section(draft: ImportDraft, file: ConfigFile, section: str) -> None:
    """Put the values of a section of their JSON into the recipe: transformers trains with them.

    The kind is left to the user if the loader refuses the section. Values that transformers does not fill in,
    and differences from DeepSpeed's schedules, are left open.

    Args:
        draft: Draft with the recipe.
        file: Their JSON, unchecked. It keeps the section.
        section: `optimizer` or `scheduler`.
    """
    given = file.tree.get(section)
    if not isinstance(given, dict) or given.get("type") in (None, "auto"):
        return
    ours, theirs, params = THEIR_KEYS[section]
    stated = ConfigFile(file.path, {section: given}, dict(file.locations))
    draft.fill_in = [line for line in draft.fill_in if not line.startswith(f"{ours}: ")]
    for name in (theirs, "lr_scheduler_kwargs.min_lr_rate", "lr_scheduler_kwargs.min_lr"):
        is_replaced = name == theirs or section == "scheduler"
        if is_replaced and draft.get_stated(name) is not None:
            key = draft.tool.names.get(name, name)
            draft.no_effect[key] = f"the {section} of the DeepSpeed JSON replaces it, as in transformers"
    try:
        check_deepspeed_json(stated)
    except ConfigError as error:
        draft.ask(ours, FILL_IN, f"the {section} of the DeepSpeed JSON cannot be imported: {error}")
        return
    if section == "scheduler":
        training_arguments.put_warmup(draft)  # for an "auto"; the recipe's kind may have had none
        draft.remarks.pop("schedule.warmup", None)
    recipe = ConfigFile(draft.file.path, {})
    for key, value in draft.recipe.items():
        set_dotted(recipe.tree, key.split("."), value, RECIPE_FILE)
    stated.notes.clear()
    remove_replaced_keys(recipe, stated)
    adopt_stated_numbers(recipe, stated)
    draft.recipe = {}
    for name, value in recipe.tree.items():
        if isinstance(value, dict):
            draft.recipe |= {f"{name}.{key}": each for key, each in value.items()}
        else:
            draft.recipe[name] = value
    draft.remarks |= dict.fromkeys(recipe.locations, f"from the {section} of the DeepSpeed JSON")
    training_arguments.remove_unread_keys(draft)
    missing = ", ".join(name for name in params if name not in (given.get("params") or {}))
    if missing:
        stated.notes.append(f"it has no {missing}; DeepSpeed's default may differ from the recipe's value")
    if stated.notes:
        draft.left_open[f"deepspeed: {section}"] = "; ".join(stated.notes)


HELP = "convert LLaMA-Factory's, Axolotl's, TRL's, transformers' or accelerate's configuration to a recipe"
DESCRIPTION = """\
Convert a configuration of LLaMA-Factory, Axolotl, TRL, transformers' Trainer or accelerate to a recipe and a
DeepSpeed JSON in a new folder. Each key that is not imported is printed with what to do about it, or with the
reason for which it has no effect."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = DESCRIPTION
    add = parser.add_argument
    add("theirs", type=Path, metavar="THEIRS.yaml", help="configuration of the other trainer")
    add("-o", "--output", type=Path, metavar="FOLDER", help="folder to write (default: THEIRS)")
    gpus = "number of GPUs of the other run, whose batch size is per GPU (default: 1)"
    add("--gpus", type=int, default=1, metavar="N", help=gpus)
    tools = f"the other trainer: {', '.join(TOOLS)} (default: recognised by the file's keys)"
    add("--from", dest="tool_name", choices=list(TOOLS), metavar="TOOL", help=tools)
    add("--force", action="store_true", help="overwrite the recipe and the JSON in FOLDER")


@report_file_errors()
def run(arguments: argparse.Namespace) -> None:
    """Import the configuration, write recipe and JSON, and print what is left to do.

    Raises:
        PipelineError: The file cannot be imported, or the folder is not empty and `--force` is not given.
    """
    theirs: Path = arguments.theirs
    folder: Path = arguments.output or theirs.with_suffix("")
    if arguments.gpus < 1:
        raise PipelineError(f"--gpus {arguments.gpus}: expected a positive number")
    draft = draft_recipe(theirs, arguments.tool_name, arguments.gpus)
    is_occupied = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    if is_occupied and not arguments.force:
        raise PipelineError(
            f"{folder} exists and is not empty; choose another folder (--output), or add --force to "
            f"overwrite {RECIPE_FILE} and {JSON_FILE} in it"
        )
    json_origin = write_files(draft, folder)
    lines = []
    if draft.has_recipe:
        lines.append(f"{folder / RECIPE_FILE}: from {draft.tool.title}'s {theirs.name}")
    lines.append(f"{folder / JSON_FILE}: {json_origin}")
    batch = "batch.global_batch_size"
    if batch in draft.recipe:
        lines.append(f"{batch}: {draft.recipe[batch]} = {draft.remarks[batch]}")
    lines += format_open_points(draft)
    recipe = folder / RECIPE_FILE if draft.has_recipe else "RECIPE.yaml"
    command = format_train_command(draft.gpus, "--deepspeed", folder / JSON_FILE, "--config", recipe)
    lines.append(f"to train: {command}")
    for line in lines:
        print(shorten_message(line))
