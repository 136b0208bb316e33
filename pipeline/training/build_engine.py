"""Settings -> the model inside the engine that the split asks for."""

from __future__ import annotations

import weakref
from dataclasses import replace

import torch
from torch import nn

from pipeline.checkpoint.initial_weights import open_checkpoint
from pipeline.config.adapter_schema import AdapterConfig
from pipeline.config.model_schema import ModelSection
from pipeline.config.schema import RunConfig
from pipeline.config.settings import Resolved
from pipeline.data.bundle import DataBundle
from pipeline.distributed.process_group import Job, allow_tf32
from pipeline.distributed.progress import Phase, phase
from pipeline.engine.interface import DTYPES, Engine, count_parameters
from pipeline.engine.memory import freed_at_once
from pipeline.engine.torch_engine import TorchEngine
from pipeline.models import build_model
from pipeline.models.blocks import compile_blocks
from pipeline.models.frozen_base import HalfBase
from pipeline.models.sharding import Placed, Sharding, model_request
from pipeline.models.transforms import Adaptation, Placement, transform
from pipeline.models.weights import load_weights


@phase(Phase.MODEL)
@freed_at_once()
def build_engine(
    config: RunConfig, resolved: Resolved, job: Job, data: DataBundle, *, resumes: bool = False
) -> Engine:
    """The model inside the engine that the split asks for. Collective.

    Args:
        resumes: Its weights will be a checkpoint's; those that a new run starts from are not read.
    """
    split, placement = resolved.split, placement_of(config, resolved, job)
    starts = not resumes or config.adapter is not None  # checkpoints of an adapter have no base
    # Weights from elsewhere fill every tensor, where `strict` is set.
    draws = starts and (config.model.weights is None or not config.model.strict)

    def model_in(sharding: Sharding) -> nn.Module:
        if config.adapter is not None:
            sharding = hold_base(config.adapter, config.model, sharding, placement.dtype)
        model = build_model(config.model, model_request(config, data, sharding, draws), config.seed)
        if config.model.weights is not None and starts:
            load_weights(model, config.model, sharding, job, open_checkpoint, ids_trained_here(config, data))
        adapter = None
        if config.adapter is not None:
            adapter = Adaptation(config.adapter, config.seed, sharding, job)
        model = transform(model, config.model, replace(placement, adapter=adapter))
        if resolved.compile:
            compile_blocks(model)
        return model

    allow_tf32(resolved.tf32)
    if resolved.deepspeed is None:
        return TorchEngine(
            model_in(Placed(job.device, torch.float32)), config.optimizer, config.engine, split, job
        )
    from pipeline.engine.deepspeed_base import start_deepspeed
    from pipeline.engine.deepspeed_engine import DeepSpeedEngine, sharding_for
    from pipeline.engine.native_ops import prepare_native_ops
    from pipeline.engine.nvme import SwapFolder

    start_deepspeed(job)
    if split.pipeline_stages > 1:
        from pipeline.engine.pipeline_engine import PipelineEngine
        from pipeline.engine.stages import StageSharding

        length = config.data.tokens_per_row
        stages = StageSharding(resolved.deepspeed, split, length, job)
        model_in(stages)
        assert stages.model is not None
        return PipelineEngine(
            stages.model,
            optimizer=config.optimizer,
            config=resolved.deepspeed,
            split=split,
            job=job,
            bounds=stages.bounds,
        )
    swap = SwapFolder(prepare_native_ops(resolved.deepspeed, job), job)
    sharding = sharding_for(swap.config, split, job.device)
    model = model_in(sharding)
    swap.check_space(count_parameters(model))
    engine = DeepSpeedEngine(
        model,
        optimizer=config.optimizer,
        config=swap.config,
        split=split,
        job=job,
        autocast=placement.is_autocast,
        sharding=sharding,
    )
    engine.closing.callback(swap.close)
    weakref.finalize(engine, swap.close)  # of an engine that nobody closes
    return engine


def hold_base(
    adapter: AdapterConfig, model: ModelSection, sharding: Sharding, dtype: torch.dtype
) -> Sharding:
    """How the model under an adapter is held: its frozen part in 4 bits where that was asked for, else in the
    dtype of products, also where parameters are not.

    Args:
        dtype: Of products.
    """
    if adapter.quantize is not None:
        from pipeline.models.quantised import Quantising  # imports bitsandbytes

        assert isinstance(sharding, Placed)  # others are refused
        return Quantising(sharding, adapter, model)
    if isinstance(sharding, Placed) and sharding.dtype != dtype:
        return HalfBase(sharding, adapter, dtype)
    return sharding


def placement_of(config: RunConfig, resolved: Resolved, job: Job) -> Placement:
    """What the steps between weights and compilation may know, but for an adapter's."""
    split = resolved.split
    documents = config.data.documents
    # transformers' language models are written for parameters in half precision, other modules for fp32.
    is_half = resolved.deepspeed is not None and split.precision != "fp32"
    return Placement(
        job.device,
        split.dp_world_size,
        is_autocast=is_half and config.model.language_model is None,
        separate_documents=documents is not None and documents.separate_documents,
        dtype=DTYPES[split.precision],
    )


def ids_trained_here(config: RunConfig, data: DataBundle) -> dict[str, int] | None:
    """Token -> id of the tokenizer, where it was trained on this data for want of another."""
    documents = config.data.documents
    named = documents.tokenizer.pretrained if documents is not None else None
    return data.tokenizer.get_vocab() if data.tokenizer is not None and named is None else None
