"""What a model needs to generate while it is trained: ZeRO 3's parameters whole, or stages in a row."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import Tensor

from pipeline.distributed.machine import available_memory
from pipeline.distributed.process_group import Job
from pipeline.engine.deepspeed_patches import without_hooks


@contextmanager
def gathered_where_it_fits(optimizer: Any, job: Job, wanted: bool) -> Iterator[bool]:
    """ZeRO 3's parameters, whole on every rank and left alone by forwards; gives whether they are.

    Where they are not, a forward gathers them layer by layer, and all ranks have to take part. Collective.
    """
    offload = optimizer.parameter_offload
    # What the last forward fetched ahead would be gathered twice.
    offload.get_param_coordinator()._clean_inflight_param_registry()
    sharded = [p for p in offload.module.parameters() if p.ds_status is ZeroParamStatus.NOT_AVAILABLE]
    if not (wanted and _fit(sharded, job)):
        yield False
        return
    with deepspeed.zero.GatheredParameters(sharded, enabled=bool(sharded)), without_hooks(offload):
        yield True


def _fit(sharded: list[Any], job: Job) -> bool:
    """Whether twice their size is free on all ranks: the other half is for activations and the cache."""
    on_disk = any(p.ds_tensor.final_location == OffloadDeviceEnum.nvme for p in sharded)
    needed = sum(p.ds_numel * p.dtype.itemsize for p in sharded)
    if job.device.type == "cuda":
        unused = torch.cuda.memory_reserved(job.device) - torch.cuda.memory_allocated(job.device)
        free = torch.cuda.mem_get_info(job.device)[0] + unused
    else:
        free = available_memory() // job.ranks.local_world_size
    too_much = torch.tensor(float(on_disk or 2 * needed > free), device=job.device)
    return bool(job.all_reduce_sum(too_much) == 0)


def logits_through_stages(stages: Any, ids_BT: Tensor, mask_BT: Tensor | None) -> Tensor:
    """The last position's logits (B, 1, V), on every rank of a pipeline. Collective over its ranks.

    Args:
        stages: This rank's PipelineModule, with the whole model's `config`.
        mask_BT: 0 where a row is padded on the left.
    """
    grid, stage = stages._grid, stages.stage_id
    group, last = grid.get_pipe_parallel_group(), stages.num_stages - 1
    like = next(stages.parameters())
    carried = ids_BT
    if stage > 0:
        carried = like.new_empty(*ids_BT.shape, stages.config.hidden_size)
        dist.recv(carried, grid.stage_to_global(stage_id=stage - 1), group=group)
    if mask_BT is None or bool(mask_BT.all()):
        output = stages(carried)
    else:
        # Positions that start again begin a document, and padding is a row of documents of one token.
        output = stages((carried, (mask_BT.cumsum(1) - 1).clamp(min=0)))
    if stage < last:
        hidden = output[0] if isinstance(output, tuple) else output
        dist.send(hidden.contiguous(), grid.stage_to_global(stage_id=stage + 1), group=group)
        logits_BV = like.new_empty(len(ids_BT), stages.config.vocab_size)
    else:
        logits_BV = output[:, -1].contiguous()
    dist.broadcast(logits_BV, grid.stage_to_global(stage_id=last), group=group)
    return logits_BV[:, None]
