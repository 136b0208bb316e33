"""What is transformers', without importing it: that takes longer than torch, and not every model needs it.

A transformers folder: what it says of a model beside its weights, and whether one that somebody else made
holds what a library may read.
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
from pipeline.files import find_unsafe_files, is_path, path_inside, read_weight_map

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def is_transformers_model(value: object) -> TypeGuard[PreTrainedModel]:
    """Who has one has imported its class."""
    return _is(value, "transformers.modeling_utils", "PreTrainedModel")


def is_transformers_generator(value: object) -> bool:
    """Has transformers' own `generate`, or one of its own on top."""
    return _is(value, "transformers.generation.utils", "GenerationMixin")


def is_transformers_config(value: object) -> TypeGuard[PreTrainedConfig]:
    return _is(value, "transformers.configuration_utils", "PreTrainedConfig")


def caps_scores(config: PreTrainedConfig) -> bool:
    """Whether attention bounds its scores, as in Gemma 2."""
    return getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None


def _is(value: object, module: str, name: str) -> bool:
    imported = sys.modules.get(module)
    return imported is not None and isinstance(value, getattr(imported, name))


SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def write_model_description(model: nn.Module, tokenizer: Any, folder: Path) -> None:
    """Writes config, generation config and tokenizer into `folder`; nothing, where the model is none of
    transformers.

    Args:
        model: Whole, or a stage of it that has the whole model's `config`.
        tokenizer: None: there is none.

    Raises:
        OSError: it cannot be written.
    """
    config = getattr(model, "config", None)
    if not is_transformers_config(config):
        return
    folder.mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(config)
    config.use_cache = True
    config._attn_implementation = None  # of the run, not of who opens the folder
    config.save_pretrained(folder)
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        generation.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(str(folder))


def choose_auto_class(config: Mapping[str, Any]) -> str:
    """The class of transformers that opens a folder with this config.json: a reward model's, or a language
    model's.
    """
    names = config.get("architectures") or [""]
    is_reward = str(names[0]).endswith("ForSequenceClassification")
    return f"AutoModelFor{'SequenceClassification' if is_reward else 'CausalLM'}"


def resolve_pretrained(given: str) -> str:
    """What transformers is to load, of what the recipe says.

    Raises:
        ModelError: see `check_folder`; it is a path, and there is no folder.
    """
    path = Path(given).expanduser()
    if path.is_dir():
        check_folder(path, given)
        return str(path)
    if is_path(given) or path.exists():
        raise ModelError(f"model.pretrained: {given!r}: there is no such folder")
    return given


def check_folder(folder: Path, given: str) -> None:
    """Whether everything that would be read is a plain file in the folder.

    Args:
        given: The recipe's word for the folder.

    Raises:
        ModelError: it has no config.json, it is in a run's directory and without weights, its index names
            no plain file of the folder, or a file in it is a pipe or a device.
    """
    start = f"model.pretrained: {given!r}:"
    if problem := next(find_unsafe_files(folder), None):
        raise ModelError(f"{start} {problem}; remove or replace it")
    if not (folder / "config.json").is_file():
        raise ModelError(f"{start} the folder has no config.json")
    run = folder.absolute().parent
    if (run / "checkpoints").is_dir() and not any(folder.glob("*.safetensors*")):
        raise ModelError(
            f"{start} says what the model of a run is, and has no weights; this writes both (--merge where "
            f"the run has an adapter): {format_pipeline_command('export', run, 'OUT')}"
        )
    if not any(folder.glob("*.safetensors*")) and (others := sorted(folder.glob("*.bin"))):
        code = f"from transformers import AutoModelForCausalLM as M; f = {str(folder.absolute())!r}; "
        code += "M.from_pretrained(f, dtype='auto').save_pretrained(f)"
        raise ModelError(
            f"{start} its weights are no safetensors ({others[0].name}); this writes them as such: "
            f"{format_shell_line(find_installed_program('python') or sys.executable, '-c', code)}"
        )
    if not (folder / INDEX).exists():
        return
    if (folder / SINGLE).exists():
        raise ModelError(
            f"{start} two sets of weights: {SINGLE}, and the files that {INDEX} names; delete the one "
            f"that is not meant: {format_shell_line('rm', folder / SINGLE)}, "
            f"or {format_shell_line('rm', folder / INDEX)}"
        )
    try:
        names = set(read_weight_map(folder / INDEX).values())
    except (OSError, ValueError):
        raise ModelError(f"{start} {INDEX} cannot be read as an index of weights; fetch it again") from None
    for name in sorted(names):
        path = path_inside(folder, name)
        if path is None:
            raise ModelError(f"{start} {INDEX} points outside of the folder: {name[:100]!r}")
        if not path.is_file():
            raise ModelError(f"{start} {INDEX} names {name[:100]!r}, which is no file there; fetch it again")
