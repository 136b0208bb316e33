"""Facts about models, configs and folders of transformers, without importing transformers.

The import takes longer than torch's, and not every model needs it. A folder of transformers has weights, and
a description of the model that they belong to. A folder that the user names is checked before a library reads
it.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import nn

from pipeline.config.command_lines import find_installed_program, format_pipeline_command, format_shell_line
from pipeline.errors import ModelError
from pipeline.files import find_path_inside, find_unsafe_files, is_path, read_weight_map

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def is_transformers_model(value: object) -> TypeGuard[PreTrainedModel]:
    """Return whether the value is a model of transformers; if transformers is not imported, it is not."""
    return _is_instance(value, "transformers.modeling_utils", "PreTrainedModel")


def is_transformers_generator(value: object) -> bool:
    """Return whether the value has transformers' `generate`, or overrides it."""
    return _is_instance(value, "transformers.generation.utils", "GenerationMixin")


def is_transformers_config(value: object) -> TypeGuard[PreTrainedConfig]:
    """Return whether the value is a config of transformers."""
    return _is_instance(value, "transformers.configuration_utils", "PreTrainedConfig")


def caps_scores(config: PreTrainedConfig) -> bool:
    """Return whether the model's attention caps its scores, as in Gemma 2."""
    return getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None


def _is_instance(value: object, module: str, name: str) -> bool:
    """Return whether a value is an instance of the class `name` of a module; `False` if not imported."""
    imported = sys.modules.get(module)
    return imported is not None and isinstance(value, getattr(imported, name))


SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def write_model_description(model: nn.Module, tokenizer: Any, folder: Path) -> None:
    """Write config, generation config and tokenizer into `folder`; nothing if the model has no such config.

    Args:
        model: The whole model, or a pipeline stage that has the whole model's `config`.
        tokenizer: The tokenizer, or `None`.
        folder: The folder to write, created if missing.

    Raises:
        OSError: A file cannot be written.
    """
    config = getattr(model, "config", None)
    if not is_transformers_config(config):
        return
    folder.mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(config)
    config.use_cache = True
    config._attn_implementation = None  # a choice of this run, which programs that open the folder make anew
    config.save_pretrained(folder)
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        generation.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(str(folder))


def choose_auto_class(config: Mapping[str, Any]) -> str:
    """Return the name of transformers' auto class for a model, a reward model or a language model.

    Args:
        config: The content of the model's config.json.
    """
    names = config.get("architectures") or [""]
    is_reward = str(names[0]).endswith("ForSequenceClassification")
    return "AutoModelForSequenceClassification" if is_reward else "AutoModelForCausalLM"


def resolve_pretrained(given: str, key: str = "model.pretrained") -> str:
    """Return the folder or hub name that transformers loads for the recipe's `model.pretrained`.

    Args:
        given: Folder or hub name.
        key: Key of the recipe, or option, that has the name, for messages.

    Raises:
        ModelError: It is a path, but there is no folder; or `check_folder` refuses the folder.
    """
    path = Path(given).expanduser()
    if path.is_dir():
        check_folder(path, given, key)
        return str(path)
    if is_path(given) or path.exists():
        raise ModelError(f"{key}: {given!r}: there is no such folder; give the folder or hub name of a model")
    return given


def check_folder(folder: Path, given: str, key: str = "model.pretrained") -> None:
    """Check that transformers can load a folder, and would read plain files inside of it only.

    Args:
        folder: The folder to check.
        given: The folder as the user wrote it, for messages.
        key: Key of the recipe, or option, that has it, for messages.

    Raises:
        ModelError: A file is not safe to read, such as a pipe, or a file outside of the folder that the index
            names. Or the folder has no config.json, has no weights because it only describes a run's model,
            or has pickles only, an index that cannot be read, or two sets of weights.
    """
    start = f"{key}: {given!r}:"
    if problem := next(find_unsafe_files(folder), None):
        raise ModelError(f"{start} {problem}; remove or replace it")
    if not (folder / "config.json").is_file():
        if (folder / "checkpoints").is_dir():
            command = format_pipeline_command("export", folder.absolute(), "OUT")
            raise ModelError(
                f"{start} the folder is a run; export it (with --merge if it has an adapter) and give OUT: "
                f"{command}"
            )
        raise ModelError(f"{start} the folder has no config.json; give a folder that save_pretrained wrote")
    run_directory = folder.absolute().parent
    has_safetensors = any(folder.glob("*.safetensors*"))
    if not has_safetensors and (run_directory / "checkpoints").is_dir():
        raise ModelError(
            f"{start} the folder describes the model of a run, but has no weights; export the run (with "
            f"--merge if it has an adapter): {format_pipeline_command('export', run_directory, 'OUT')}"
        )
    pickles = sorted(folder.glob("*.bin"))
    if not has_safetensors and pickles:
        code = f"from transformers import AutoModelForCausalLM as M; f = {str(folder.absolute())!r}; "
        code += "M.from_pretrained(f, dtype='auto').save_pretrained(f)"
        python = find_installed_program("python") or sys.executable
        raise ModelError(
            f"{start} its weights are not safetensors ({pickles[0].name}); this command converts them: "
            f"{format_shell_line(python, '-c', code)}"
        )
    if not (folder / INDEX_FILE).exists():
        return
    if (folder / SINGLE_FILE).exists():
        raise ModelError(
            f"{start} the folder has two sets of weights: {SINGLE_FILE}, and the files that {INDEX_FILE} "
            f"names; delete one of them: {format_shell_line('rm', folder / SINGLE_FILE)}, "
            f"or {format_shell_line('rm', folder / INDEX_FILE)}"
        )
    try:
        names = set(read_weight_map(folder / INDEX_FILE).values())
    except (OSError, ValueError):
        raise ModelError(
            f"{start} {INDEX_FILE} cannot be read as an index of weights; fetch it again"
        ) from None
    for name in sorted(names):
        path = find_path_inside(folder, name)
        if path is None:
            raise ModelError(
                f"{start} {INDEX_FILE} names a file outside of the folder: {name[:100]!r}; fetch the model "
                "again"
            )
        if not path.is_file():
            raise ModelError(
                f"{start} {INDEX_FILE} names {name[:100]!r}, which is not a file there; fetch it again"
            )
