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

from pipeline.checkpoint.find import find_checkpoint
from pipeline.config.command_lines import format_pipeline_command
from pipeline.config.hub import use_hub_or_cache
from pipeline.config.loading import parse_override
from pipeline.errors import ConfigError, ModelError, PipelineError, summarize_error
from pipeline.files import is_path
from pipeline.planner.shapes import read_pretrained_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from pipeline.checkpoint.export import ExportResult
    from pipeline.distributed.process_group import Job
    from pipeline.evaluation.from_checkpoint import InferenceEngine, TrainedRun
    from pipeline.objectives.model_call import ModelCall

KEY = "SOURCE"
"""Name of the argument in messages."""
REMOTE_CODE = "model.trust_remote_code"
"""Only key that an override may set for a source without a recipe."""
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
    """Ids that end a text: of the generation config, the tokenizer and the end of a turn in its template."""


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
        return load_pretrained(self.location, KEY)

    def load(self, job: Job) -> LoadedModel:
        """Return the model with its weights on the job's device.

        A run has the precision of its training; other sources have the dtype in which they are stored.

        Raises:
            CheckpointError, ModelError: The weights are damaged, cannot be read or do not fit the model.
            DataError: There is no tokenizer that can be loaded.
        """
        from pipeline.evaluation.samples import uses_chat_template
        from pipeline.models.generation import get_max_positions
        from pipeline.objectives.model_call import ModelCall

        tokenizer = self.load_tokenizer()
        engine = self.load_engine(job)
        config = None if self.run is None else self.run.config
        is_conversational = bool(tokenizer.chat_template)
        if config is not None:
            is_conversational = uses_chat_template(config.data, tokenizer)
        return LoadedModel(
            engine=engine,
            tokenizer=tokenizer,
            name=self.name,
            is_conversational=is_conversational,
            call=ModelCall(None if config is None else config.model.inputs),
            max_positions=get_max_positions(engine.module),
            end_ids=find_end_ids(getattr(engine.module, "generation_config", None), tokenizer),
        )

    def load_engine(self, job: Job) -> InferenceEngine:
        """Return the engine with the model; see `load`."""
        from pipeline.evaluation import from_checkpoint

        if self.run is not None:
            return from_checkpoint.load_engine(self.run, job, None)
        if self.base is None:
            return from_checkpoint.load_stored_engine(self.location, job, self.trust_remote_code, KEY)
        from pipeline.models.adapters import apply_peft_folder

        engine = self.base.load_engine(job)
        apply_peft_folder(engine.module, Path(self.location))
        engine.module.eval()
        return engine

    def build_empty(self) -> PreTrainedModel:
        """Return the model without weights, on the meta device; of an adapter, its base.

        Raises:
            ModelError: The config cannot be read, or describes no language model.
        """
        from pipeline.models.huggingface import build_empty_model

        if self.base is not None:
            return self.base.build_empty()
        return build_empty_model(self.location, self.trust_remote_code, KEY, has_weights=self.run is None)

    def export(self, out: str | Path, *, dtype: str | None = None, merge: bool = False) -> ExportResult:
        """Write a model that is no run's as a folder of transformers, in another dtype or merged.

        Args:
            out: Folder to write, which must not exist or must be empty.
            dtype: Dtype of the weights: `fp32`, `bf16` or `fp16`; `None` for the one of the source.
            merge: Whether to merge an adapter into its base.

        Raises:
            ConfigError: `merge` does not suit the source.
            CheckpointError, ModelError: The model cannot be loaded or written.
        """
        from pipeline.checkpoint.export import export_model
        from pipeline.distributed.accelerator import choose_accelerator
        from pipeline.models.huggingface import load_stored_model

        if self.base is not None and not merge:
            raise ConfigError(
                f"{self.location} is a folder of an adapter already; --merge merges it into its base and "
                "writes one model"
            )
        if self.base is None and merge:
            raise ConfigError(f"{self.location} is no adapter (no {ADAPTER_CONFIG}); remove --merge")
        model = self if self.base is None else self.base
        if model.run is not None:
            raise ConfigError(
                f"{self.location}: its base is a run; export that first, and name the folder: --base OUT"
            )
        choose_accelerator()  # transformers imports DeepSpeed to save
        tokenizer = self.load_tokenizer()
        adapter = None if self.base is None else Path(self.location)
        weights = load_stored_model(model.location, self.trust_remote_code, KEY)
        return export_model(weights, tokenizer, out, adapter=adapter, dtype=dtype)


def names_run(source: str | Path) -> bool:
    """Return whether a source is a run directory or a path in it, and not a folder of a model.

    Raises:
        ModelError: There is a file or a folder of another kind.
    """
    path = Path(source).expanduser()
    if not path.exists() or any((path / name).exists() for name in (ADAPTER_CONFIG, "config.json")):
        return False
    if not (path / "checkpoints").is_dir() and "checkpoints" not in path.absolute().parts[-2:]:
        what = "a folder without a model" if path.is_dir() else "a file"
        raise ModelError(
            f"{KEY}: {source} is {what}; expected a run directory (with checkpoints/), a folder of "
            f"transformers (with config.json) or a folder of peft (with {ADAPTER_CONFIG})"
        )
    return True


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
    given = str(source)
    path = Path(given).expanduser()
    if names_run(given):
        if base is not None:
            raise ConfigError(f"--base {base}: {given} is a run, which knows its base; remove --base")
        directory, checkpoint, _ = find_checkpoint(path, str(step))
        from pipeline.evaluation.from_checkpoint import open_trained_run

        run = open_trained_run(checkpoint, step, overrides, import_paths)
        language = run.config.model.language_model
        trusts = language is not None and language.trust_remote_code
        return ModelSource(
            directory.resolve().name, "run", str(run.model_folder), run, trust_remote_code=trusts
        )
    if step != "last":
        raise ConfigError(f"--step {step}: {given} is no run directory, so it has no steps; remove --step")
    trusts = _read_trust(overrides, given)
    if not path.exists():
        if is_path(given):
            raise ModelError(
                f"{KEY}: {given} does not exist; give a run directory, one of its checkpoints, a folder of "
                "transformers or peft, or a name on the hub (OWNER/NAME)"
            )
        adapter = _download_adapter(given)
        if adapter is not None:
            return _open_adapter(adapter, given, base, trusts)
    elif (path / ADAPTER_CONFIG).exists():
        return _open_adapter(path, path.resolve().name, base, trusts)
    if base is not None:
        raise ConfigError(f"--base {base}: {given} is no adapter (no {ADAPTER_CONFIG}); remove --base")
    if read_pretrained_config(given, KEY).get("quantization_config"):
        raise ModelError(f"{KEY}: {given}: its weights are already quantized; use the original model")
    if path.exists():
        from pipeline.models.transformers_facts import check_folder

        check_folder(path, given, KEY)
        return ModelSource(path.resolve().name, "folder", str(path), trust_remote_code=trusts)
    return ModelSource(given, "hub", given, trust_remote_code=trusts)


def _open_adapter(folder: Path, name: str, base: str | None, trust_remote_code: bool) -> ModelSource:
    """Return the adapter of a folder as a source, with its base.

    Raises:
        ModelError: The folder cannot be read, or its base is not named or cannot be found.
    """
    from pipeline.models.adapters import check_peft_folder

    config = check_peft_folder(folder, f"{KEY}: {folder}")
    named = config.get("base_model_name_or_path")
    if base is None and not (isinstance(named, str) and named):
        raise ModelError(
            f"{KEY}: {folder} is an adapter whose {ADAPTER_CONFIG} names no base (base_model_name_or_path); "
            "name it: --base FOLDER_OR_HUB_NAME"
        )
    overrides = [f"{REMOTE_CODE}=true"] if trust_remote_code else []
    try:
        opened = open_source(base or str(named), overrides=overrides)
    except PipelineError as error:
        advice = "" if base else f"; it is from {ADAPTER_CONFIG}, and --base FOLDER_OR_HUB_NAME names another"
        reason = summarize_error(error, 600).removeprefix(f"{KEY}: ")
        raise ModelError(f"{folder} is an adapter whose base cannot be opened: {reason}{advice}") from None
    if opened.base is not None:
        raise ModelError(
            f"{KEY}: {folder} is an adapter whose base, {opened.location}, is an adapter, too; merge that "
            f"first: {format_pipeline_command('export', opened.location, 'OUT', '--merge')}, then --base OUT"
        )
    return ModelSource(name, "adapter", str(folder), base=opened, trust_remote_code=trust_remote_code)


def _download_adapter(name: str) -> Path | None:
    """Return the folder with the files of an adapter on the hub; `None` if it is no adapter.

    Raises:
        ModelError: The hub does not answer, and its cache does not have the name.
    """
    from huggingface_hub import snapshot_download

    with use_hub_or_cache(KEY, name, ModelError):
        try:
            folder = Path(snapshot_download(name, allow_patterns=list(ADAPTER_FILES)))
        except (OSError, ValueError):  # read_pretrained_config says why
            return None
    return folder if (folder / ADAPTER_CONFIG).exists() else None


def _read_trust(overrides: Sequence[str], given: str) -> bool:
    """Return the value of `model.trust_remote_code` in the overrides, the only key for sources but runs.

    Raises:
        ConfigError: There is another key, or the value is neither true nor false.
    """
    trusts = False
    for argument in overrides:
        keys, value = parse_override(argument)
        key = ".".join(keys)
        if key != REMOTE_CODE:
            raise ConfigError(
                f"command line: {key}: {given} is no run, so it has no recipe; the only key for it is "
                f"{REMOTE_CODE}"
            )
        if not isinstance(value, bool):
            raise ConfigError(f"command line: {REMOTE_CODE}={value}: expected true or false")
        trusts = value
    return trusts


def find_end_ids(generation_config: Any, tokenizer: PreTrainedTokenizerFast) -> frozenset[int]:
    """Return the ids that end a text.

    They are those of the generation config, the tokenizer's, and the end of a turn in its chat template.
    """
    from pipeline.evaluation.conversation import ChatFormat

    stated = getattr(generation_config, "eos_token_id", None)
    ids = {stated} if isinstance(stated, int) else set(stated or ())
    if tokenizer.chat_template:
        with suppress(PipelineError):  # the first conversation reports a template that cannot be used
            ids |= ChatFormat(tokenizer).end_ids
    return frozenset(ids | {tokenizer.eos_token_id})
