"""Finds the language model that a name on the command line means, and loads it for inference.

A source is a run directory, one of its checkpoints, a folder of transformers, an adapter's folder of peft, or
a name on the hub. An existing path is never taken for a name on the hub. Nothing is unpickled, and Python
code of a model runs only with `model.trust_remote_code=true`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pipeline.config.command_lines import format_pipeline_command
from pipeline.config.hub import REMOTE_CODE, use_hub_or_cache
from pipeline.config.loading import parse_override
from pipeline.errors import ConfigError, ModelError, PipelineError, summarize_error
from pipeline.files import is_path
from pipeline.planner.shapes import read_pretrained_config

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from pipeline.distributed.process_group import Job
    from pipeline.evaluation.from_checkpoint import InferenceEngine, TrainedRun
    from pipeline.objectives.model_call import ModelCall

SOURCE = "SOURCE"
"""Name of the command-line argument, for messages."""
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILES = (ADAPTER_CONFIG, "adapter_model.safetensors", "*token*", "vocab*", "merges.txt", "*.jinja")
"""Patterns of the files that are downloaded of an adapter on the hub."""


@dataclass(frozen=True)
class LoadedModel:
    """A language model with its weights, ready to generate and to score."""

    engine: InferenceEngine
    """Engine that computes."""
    tokenizer: PreTrainedTokenizerFast
    """Tokenizer of the model."""
    name: str
    """Short name of the source."""
    is_conversational: bool
    """Whether prompts go through the chat template."""
    call: ModelCall
    """Call of the model with a batch."""
    max_positions: int | None
    """Largest number of tokens in a row; `None`: no limit is known."""
    end_ids: frozenset[int]
    """Ids that end a text; see find_end_ids."""


@dataclass(frozen=True)
class ModelSource:
    """A model that has been found, before its weights are read."""

    name: str
    """Short name: of a run or a folder its last part, or the name on the hub."""
    kind: Literal["run", "folder", "adapter", "hub"]
    """Kind of the source."""
    location: str
    """Folder or hub name of the tokenizer, and of the weights unless there is a run."""
    run: TrainedRun | None = None
    """Checkpoint of a run with the run's settings; `None` for other kinds."""
    base: ModelSource | None = None
    """Base of an adapter; `None` for other kinds."""
    trust_remote_code: bool = False
    """Whether Python code of the model may run."""

    @property
    def whole_model(self) -> ModelSource:
        """Source with the weights of a whole model: the base of an adapter, else this source."""
        return self.base or self

    def load_tokenizer(self) -> PreTrainedTokenizerFast:
        """Return the tokenizer. An adapter without one has that of its base.

        Raises:
            DataError: There is no tokenizer that can be loaded.
            ModelError: The model is no language model.
        """
        from pipeline.data.tokenizer import load_pretrained

        if self.run is not None and self.run.config.model.language_model is None:
            raise ModelError(
                f"{self.run.run}: a model of kind {self.run.config.model.kind} writes no text; that is for "
                "language models (model.kind: causal_lm)"
            )
        if self.base is not None and not any(Path(self.location).glob("tokenizer*")):
            return self.base.load_tokenizer()
        return load_pretrained(self.location, SOURCE)

    def load(self, job: Job) -> LoadedModel:
        """Return the model with its weights on the job's device.

        A run has the precision of its training; other sources have the dtype in which they are stored.

        Raises:
            CheckpointError, ModelError: The weights are damaged, cannot be read or do not fit the model.
            DataError: There is no tokenizer that can be loaded.
        """
        from pipeline.evaluation.from_checkpoint import load_engine, load_stored_engine
        from pipeline.evaluation.samples import uses_chat_template
        from pipeline.models.generation import get_max_positions
        from pipeline.objectives.model_call import ModelCall

        tokenizer = self.load_tokenizer()
        is_conversational = bool(tokenizer.chat_template)
        if self.run is not None:
            is_conversational = uses_chat_template(self.run.config.data, tokenizer)
        if self.whole_model.run is not None:
            engine = load_engine(self.whole_model.run, job, None)
        else:
            engine = load_stored_engine(self.whole_model.location, job, self.trust_remote_code, SOURCE)
        if self.base is not None:
            from pipeline.models.adapters import apply_peft_folder

            apply_peft_folder(engine.module, Path(self.location)).eval()
        return LoadedModel(
            engine=engine,
            tokenizer=tokenizer,
            name=self.name,
            is_conversational=is_conversational,
            call=ModelCall(),
            max_positions=get_max_positions(engine.module),
            end_ids=find_end_ids(engine.module, tokenizer),
        )


def names_run(source: str | Path) -> bool:
    """Return whether a source is a run directory or a path in it, and not a folder of a model.

    Raises:
        ModelError: There is no such path, or a file or a folder of another kind.
    """
    path = Path(source).expanduser()
    is_model = any((path / name).exists() for name in (ADAPTER_CONFIG, "config.json"))
    if is_model or not (path.exists() or is_path(str(source))):
        return False
    if (path / "checkpoints").is_dir() or "checkpoints" in path.absolute().parts[-2:]:
        return True
    problem = "does not exist"
    if path.exists():
        problem = "is a folder without a model" if path.is_dir() else "is a file"
    raise ModelError(
        f"{SOURCE}: {source} {problem}; expected a run directory (with checkpoints/), a folder of "
        f"transformers (with config.json) or of peft (with {ADAPTER_CONFIG}), or a name on the hub "
        "(OWNER/NAME)"
    )


def open_source(
    source: str | Path,
    step: str | int = "last",
    overrides: Sequence[str] = (),
    *,
    base: str | None = None,
    import_paths: bool = True,
) -> ModelSource:
    """Find the model that `source` names. No weights are read.

    Args:
        source: Run directory, one of its checkpoints, folder of transformers or of peft, or hub name.
        step: Which checkpoint of a run directory: a step, `last` or `best`.
        overrides: `key=value` of a run's data, eval, loader and batch, or model.trust_remote_code=true.
        base: Folder, run or hub name of an adapter's base; `None`: the one that its config names.
        import_paths: Whether a run's recipe may name code to run.

    Raises:
        ConfigError: An argument does not suit this kind of source, or a run's recipe cannot be used.
        CheckpointError: A run has no such checkpoint.
        ModelError: There is no such model, or its config cannot be read.
    """
    name_or_path = str(source)
    path = Path(name_or_path).expanduser()
    if names_run(name_or_path):
        if base is not None:
            raise ConfigError(f"--base {base}: {name_or_path} is a run, which knows its base; remove --base")
        from pipeline.evaluation.from_checkpoint import open_trained_run

        run = open_trained_run(path, step, overrides, import_paths)
        language = run.config.model.language_model
        trusts = language is not None and language.trust_remote_code
        name = run.run.resolve().name
        return ModelSource(name, "run", str(run.model_folder), run, trust_remote_code=trusts)
    if step != "last":
        raise ConfigError(
            f"--step {step}: {name_or_path} is no run directory, so it has no steps; remove --step"
        )
    if any(parse_override(argument) != (REMOTE_CODE.split("."), True) for argument in overrides):
        raise ConfigError(
            f"command line: {name_or_path} is no run, so it has no recipe; the only key for it is "
            f"{REMOTE_CODE}=true"
        )
    trusts = bool(overrides)
    name = path.resolve().name if path.exists() else name_or_path
    folder = _find_folder(name_or_path)
    if (folder / ADAPTER_CONFIG).exists():
        opened = _open_base(folder, base, overrides, import_paths)
        return ModelSource(name, "adapter", str(folder), base=opened, trust_remote_code=trusts)
    if base is not None:
        raise ConfigError(f"--base {base}: {name_or_path} is no adapter (no {ADAPTER_CONFIG}); remove --base")
    if read_pretrained_config(name_or_path, SOURCE).get("quantization_config"):
        raise ModelError(
            f"{SOURCE}: {name_or_path}: its weights are already quantized; use the original model"
        )
    from pipeline.models.transformers_facts import resolve_pretrained

    kind: Literal["folder", "hub"] = "folder" if path.exists() else "hub"
    return ModelSource(name, kind, resolve_pretrained(name_or_path, SOURCE), trust_remote_code=trusts)


def _open_base(folder: Path, base: str | None, overrides: Sequence[str], import_paths: bool) -> ModelSource:
    """Return the base of an adapter's folder: `base`, or the one that its config names."""
    from pipeline.models.adapters import check_peft_folder

    config = check_peft_folder(folder, f"{SOURCE}: {folder}")
    named = base or config.get("base_model_name_or_path")
    if not (isinstance(named, str) and named):
        raise ModelError(
            f"{SOURCE}: {folder} is an adapter whose {ADAPTER_CONFIG} names no base "
            "(base_model_name_or_path); name it: --base FOLDER_OR_HUB_NAME"
        )
    try:
        if (_find_folder(named) / ADAPTER_CONFIG).exists():
            merge = format_pipeline_command("export", named, "OUT", "--merge")
            raise ModelError(f"{named} is an adapter, too; merge that first: {merge}, then --base OUT")
        return open_source(named, overrides=overrides, import_paths=import_paths)
    except PipelineError as error:
        advice = "" if base else f"; it is from {ADAPTER_CONFIG}, and --base FOLDER_OR_HUB_NAME names another"
        reason = summarize_error(error, 600).removeprefix(f"{SOURCE}: ")
        raise ModelError(f"{folder} is an adapter whose base cannot be opened: {reason}{advice}") from None


def _find_folder(name_or_path: str) -> Path:
    """Return a path, or the folder of a name on the hub, after a download of ADAPTER_FILES."""
    path = Path(name_or_path).expanduser()
    if path.exists() or is_path(name_or_path):
        return path
    from huggingface_hub import snapshot_download

    with use_hub_or_cache(SOURCE, name_or_path, ModelError, "run or folder"), suppress(OSError, ValueError):
        return Path(snapshot_download(name_or_path, allow_patterns=list(ADAPTER_FILES)))
    return path  # there is no such name, and read_pretrained_config says why


def find_end_ids(module: Any, tokenizer: PreTrainedTokenizerFast) -> frozenset[int]:
    """Return the ids that end a text.

    They are those of the generation config, the tokenizer's, and the end of a turn in its chat template.
    """
    from pipeline.evaluation.conversation import ChatFormat
    from pipeline.models.generation import get_end_and_pad_ids

    ids = {*get_end_and_pad_ids(module)[0], tokenizer.eos_token_id}
    with suppress(PipelineError):  # the first conversation reports a template that cannot be used
        ids |= ChatFormat(tokenizer).end_ids
    return frozenset(ids)
