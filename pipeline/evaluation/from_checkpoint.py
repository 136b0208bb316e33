"""Loads a whole trained model into this process, to evaluate it or to generate text.

A run's checkpoint may have any split. The run's recipe and its folder `model` describe the model, so neither
the files of `model.pretrained` nor the run's machines are needed. pipeline.evaluation.sources finds the run.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipeline.checkpoint.find import MODEL_FOLDER, find_checkpoint
from pipeline.checkpoint.initial_weights import open_checkpoint
from pipeline.config.batch_plan import BatchPlan, plan_batch
from pipeline.config.deepspeed_json import get_precision
from pipeline.config.hub import REMOTE_CODE
from pipeline.config.loading import parse_override, read_yaml
from pipeline.config.model_schema import CausalLMConfig
from pipeline.config.schema import RunConfig
from pipeline.config.settings import load_settings
from pipeline.data import prepare_data
from pipeline.data.bundle import DataBundle
from pipeline.data.reference import restore_reference_logps
from pipeline.distributed.process_group import Job, allow_tf32, describe_device
from pipeline.distributed.progress import Phase, tag_errors
from pipeline.engine.interface import DTYPES, add_document_bounds, to_device
from pipeline.errors import CheckpointError, ConfigError, DataError
from pipeline.evaluation import held_out
from pipeline.files import MAX_CONFIGURATION_BYTES, read_regular_file
from pipeline.models import build_model
from pipeline.models.generation import GenerationSettings, TokenCallback
from pipeline.models.generation import generate as generate_ids
from pipeline.models.sharding import NoSharding, build_model_request
from pipeline.models.transforms import TransformContext, apply_transforms
from pipeline.models.weights import load_weights
from pipeline.objectives import Batch, LossSum, Objective, SegmentObjective, build_objective
from pipeline.redaction import REDACTED

log = logging.getLogger(__name__)

CHANGEABLE_SECTIONS = ("data", "eval", "loader", "batch")
"""Sections of the recipe that overrides may change."""
SECTIONS_WITHOUT_SECRETS = ("data", "eval", "model", "objective")
"""Sections of the recipe in which an override must replace every redacted value."""


class InferenceEngine:
    """Evaluates and generates on one device, in the precision of the engine that trained the model.

    Implements Evaluator and TextGenerator.

    Args:
        model: Model with its weights in fp32.
        precision: Precision of the run: fp32, bf16 or fp16.
        device: Device to compute on.
        casts: Whether parameters are cast to the precision, as DeepSpeed does; buffers keep their dtype.
        autocast: Whether matrix products are computed under torch.autocast, if the precision is not fp32.
    """

    dp_rank = 0
    dp_world_size = 1

    def __init__(
        self, model: nn.Module, precision: str, device: torch.device, *, casts: bool, autocast: bool
    ):
        self.device = device
        self.precision = precision
        self.module = model.to(device).eval()
        self._dtype = DTYPES[precision]
        self._is_autocast = autocast and precision != "fp32"
        for p in model.parameters():
            if casts and p.is_floating_point():
                p.data = p.data.to(self._dtype)
        self._float_dtype = next(model.parameters()).dtype

    @property
    def precision_text(self) -> str:
        """Return the precision of weights and computation, such as `fp32 weights, bf16 autocast`."""
        names = {dtype: name for name, dtype in DTYPES.items()}
        weights = names.get(self._float_dtype, str(self._float_dtype))
        return f"{weights} weights, {names[self._dtype]} autocast" if self._is_autocast else weights

    @torch.no_grad()
    def eval_step(self, batch: Batch, objective: Objective) -> LossSum:
        """Return the loss sum of a batch. See Engine.eval_step."""
        batch = add_document_bounds(batch)
        inputs = objective.inputs(self.module, batch)
        with torch.autocast(self.device.type, self._dtype, enabled=self._is_autocast):
            return objective(self.module, to_device(batch, self.device, self._float_dtype, inputs))

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        settings: GenerationSettings | Sequence[GenerationSettings],
        on_token: TokenCallback | None = None,
    ) -> list[list[int]]:
        """Return the generated ids of each prompt. See TextGenerator.generate."""
        return generate_ids(self.module, prompts, settings, self.device, on_token)


@dataclass(frozen=True)
class TrainedRun:
    """A checkpoint with the settings of its run."""

    run: Path
    """Run directory."""
    checkpoint: Path
    """Folder of the checkpoint."""
    config: RunConfig
    """Recipe of the run with the overrides of this call, and with the run's tokenizer."""
    last_start: dict[str, Any]
    """Content of split.json: DeepSpeed JSON, world size, batch, TF32 and data of the run's last start."""

    @property
    def model_folder(self) -> Path:
        """Folder with the config and the tokenizer of a language model."""
        return self.run / MODEL_FOLDER

    @property
    def precision(self) -> str:
        """Precision of the run: `fp32`, `bf16`, `fp16`, or `auto`, which depends on the device."""
        deepspeed = self.last_start["deepspeed"]
        return str(self.config.engine.precision) if deepspeed is None else get_precision(deepspeed)

    @property
    def micro_batch_size(self) -> int:
        """Samples in a micro-batch: the number in the overrides or the recipe, else the one of the run."""
        batch = self.config.batch
        if isinstance(batch.micro_batch_size, int):
            return batch.micro_batch_size
        size_of_run = self.last_start.get("micro_batch_size")
        if isinstance(size_of_run, int):
            return size_of_run
        deepspeed = self.last_start["deepspeed"]
        if deepspeed is not None:
            return int(deepspeed["train_micro_batch_size_per_gpu"])
        return plan_batch(batch, int(self.last_start["world_size"])).micro_batch_size

    @property
    def sequence_length(self) -> int | None:
        """Number of tokens in a row; `None` if rows have no fixed length."""
        return self.config.data.tokens_per_row


def open_trained_run(path: Path, step: str | int, overrides: Sequence[str], import_paths: bool) -> TrainedRun:
    """Find a checkpoint, and read its run's recipe with overrides of data and evaluation.

    Args:
        path: Run directory, or one of its checkpoints.
        step: Which checkpoint, if `path` is a run directory: a step, `last` or `best`.
        overrides: `key=value` of data, eval, loader and batch.
        import_paths: Whether the recipe may name code to run.

    Raises:
        ConfigError: The recipe cannot be read or has a redacted value. Or an override changes what the
            checkpoint determines, or the model has Python code and no override allows to run it.
        CheckpointError: There is no such checkpoint, or split.json cannot be read.
    """
    run, checkpoint, _ = find_checkpoint(path, str(step))
    changed_keys = [".".join(parse_override(argument)[0]) for argument in overrides]
    recipe = read_yaml(run / "recipe.yaml").tree
    redacted_keys = [
        key for key in _find_redacted_keys(recipe) if _section_of(key) in SECTIONS_WITHOUT_SECRETS
    ]
    for key in redacted_keys:
        # An override of a key also replaces all keys below it; outside of CHANGEABLE_SECTIONS see below.
        if not any(f"{key}.".startswith(f"{changed}.") for changed in changed_keys):
            raise ConfigError(
                f"{run / 'recipe.yaml'}: {key} is {REDACTED}, because a run stores no secrets; append it to "
                f"the command: {key}=..., or have your code read it from an environment variable"
            )
    for key in changed_keys:
        if _section_of(key) not in CHANGEABLE_SECTIONS and key not in {REMOTE_CODE, *redacted_keys}:
            raise ConfigError(
                f"command line: {key}: the checkpoint determines this; sections that may be changed: "
                f"{', '.join(f'{section}.*' for section in CHANGEABLE_SECTIONS)}"
            )
    config = load_settings(run / "recipe.yaml", None, overrides, import_paths=import_paths).config
    language = config.model.language_model
    if language is not None and language.trust_remote_code and REMOTE_CODE not in changed_keys:
        raise ConfigError(
            f"{run / 'recipe.yaml'}: the model needs Python code from its own files; to run it, append "
            f"{REMOTE_CODE}=true to the command"
        )
    try:
        split = json.loads(read_regular_file(run / "split.json", MAX_CONFIGURATION_BYTES))
        _ = split["deepspeed"], int(split["world_size"])  # raises if a key is missing
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{run / 'split.json'} cannot be read ({error}); restore the file from a copy"
        ) from None
    return TrainedRun(run, checkpoint, _use_tokenizer_of_run(config, run / MODEL_FOLDER), split)


def _section_of(key: str) -> str:
    return key.partition(".")[0]


def _find_redacted_keys(tree: Any, prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys whose value was redacted because it contained a secret."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _find_redacted_keys(value, f"{prefix}.{key}" if prefix else str(key))
    elif REDACTED in str(tree):
        yield prefix


def _use_tokenizer_of_run(config: RunConfig, folder: Path) -> RunConfig:
    """Return the recipe with the tokenizer in a run's folder `model`.

    The model knows only the ids of this tokenizer, also if the overrides name other data.
    """
    data = config.data.documents
    if data is None:
        return config
    changes: dict[str, Any] = {"tokenizer": data.tokenizer.model_copy(update={"pretrained": str(folder)})}
    if data.conversations is not None:
        changes["chat_template"] = None  # then the tokenizer's template is used
    return config.model_copy(update={"data": data.model_copy(update=changes)})


def read_data(trained: TrainedRun) -> DataBundle:
    """Prepare the data that the recipe names, and warn if the run was trained on other data."""
    data = prepare_data(trained.config.data)
    if data.fingerprint != trained.last_start.get("data"):
        log.warning("this is not the data of the run: the results differ from those of its own evaluations")
    return data


def evaluate(trained: TrainedRun, job: Job, data: DataBundle) -> dict[str, float]:
    """Evaluate the checkpoint and return the row that the run itself writes at an evaluation.

    Raises:
        DataError: Nothing is held out.
        CheckpointError, ModelError: The weights are damaged, or cannot be put into the model.
    """
    config = trained.config
    length = trained.sequence_length
    objective = build_objective(config)
    if isinstance(objective, SegmentObjective) and objective.has_reference:
        data = restore_reference_logps(data, trained.run, job)
    engine = load_engine(trained, job, data)
    if config.model.language_model is not None:
        from pipeline.models.huggingface import check_positions

        check_positions(engine.module.config, length, data.longest_segment)
    loader = held_out.build_eval_loader(config, BatchPlan(trained.micro_batch_size, 1, 1), data, engine)
    if loader is None:
        raise DataError(
            "data: nothing is held out to evaluate on; data.eval_fraction=0.1 holds out a tenth of the "
            "documents"
        )
    row = held_out.evaluate(engine, objective, loader, job)
    assert row is not None  # without `stop`, nothing ends the evaluation early
    return row


@tag_errors(Phase.MODEL)
def load_engine(trained: TrainedRun, job: Job, data: DataBundle | None) -> InferenceEngine:
    """Build the model as the run did, and fill it from the checkpoint.

    Sets whether TF32 is allowed in this process, as in the run.

    Args:
        trained: Run and checkpoint.
        job: Job of this process.
        data: Data of the run, which decides the sizes of a model that is no language model; `None` only for a
            language model.
    """
    config = trained.config
    deepspeed = trained.last_start["deepspeed"]
    allow_tf32(bool(trained.last_start.get("tf32")))
    language = config.model.language_model
    if language is not None:
        from pipeline.models.huggingface import build_from_description

        model = build_from_description(trained.model_folder, language)
    else:
        assert data is not None
        model = build_model(config.model, build_model_request(config, data, NoSharding()), config.seed)
    section = config.model.model_copy(update={"weights": str(trained.checkpoint), "strict": True})
    if language is not None:  # weights trained in fp8 are evaluated without it, on any device
        section = section.model_copy(update={"fp8": "none"})
    load_weights(model, section, NoSharding(), job, open_checkpoint)
    precision = trained.precision
    if precision == "auto":
        precision = "bf16" if describe_device(job.device).bf16 else "fp32"
    # As in training: plain PyTorch has fp32 weights and computes under autocast. DeepSpeed casts the weights
    # and computes under autocast, too, unless the model is a language model.
    casts = deepspeed is not None
    autocasts = deepspeed is None or language is None
    context = TransformContext(job.device, is_autocast=casts and autocasts and precision != "fp32")
    model = apply_transforms(model, section, context)
    return InferenceEngine(model, precision, job.device, casts=casts, autocast=autocasts)


@tag_errors(Phase.MODEL)
def load_stored_engine(location: str, job: Job, trust_remote_code: bool, key: str) -> InferenceEngine:
    """Load a language model from a folder of transformers or from the hub, in its stored dtype.

    See load_stored_model for the arguments and errors.
    """
    from pipeline.models.huggingface import load_stored_model

    model: nn.Module = load_stored_model(location, trust_remote_code, key)
    model.config.use_cache = False  # type: ignore[union-attr] # as build_from_description does
    model = apply_transforms(model, CausalLMConfig(pretrained=location), TransformContext(job.device))
    return InferenceEngine(model, "fp32", job.device, casts=False, autocast=False)
