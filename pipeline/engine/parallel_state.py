"""Which process groups DeepSpeed uses: it keeps them in module variables, and the last engine made sets them.

Groups are made once per degree and kept, so that a process may make many engines, each with its own split.
"""

from __future__ import annotations

from types import ModuleType

import deepspeed.runtime.sequence_parallel.parallel_state_sp as sequence_groups
import torch.distributed as dist
from deepspeed.utils import groups

from pipeline.config.split import Split


def parallel_state(split: Split) -> ModuleType | None:
    """The module DeepSpeed asks for its groups (its `mpu`), holding this split's. Collective.

    None where every rank is a data-parallel one.
    """
    groups.mpu = None  # an engine before this one may have left its own
    if split.tensor_parallel > 1:
        _make_tensor_groups(split.tensor_parallel)
        return groups
    if split.sequence_parallel > 1:
        _make_sequence_groups(split.sequence_parallel)
        return sequence_groups
    return None


def keep_parameter_groups(partition_size: int) -> None:
    """Lets go of the hpZ groups of an engine before this one, unless they are of this size (1: no hpZ).

    DeepSpeed divides parameters by whatever groups there are, also where the configuration has no hpZ. To be
    called before the model is made, which may be where its own are made.
    """
    group = groups._ZERO_PARAM_INTRA_PARALLEL_GROUP
    if group is not None and (partition_size <= 1 or dist.get_world_size(group) != partition_size):
        groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None


def _make_tensor_groups(degree: int) -> None:
    group = groups._TENSOR_MODEL_PARALLEL_GROUP
    if group is not None and dist.get_world_size(group) != degree:
        groups._TENSOR_MODEL_PARALLEL_GROUP = None
    groups._init_tp_mesh_device(tensor_model_parallel_size=degree)


def _make_sequence_groups(degree: int) -> None:
    group = sequence_groups._SEQUENCE_PARALLEL_GROUP
    if group is not None and dist.get_world_size(group) != degree:
        sequence_groups._release_sequence_parallel_groups()
    if sequence_groups._SEQUENCE_PARALLEL_GROUP is None:
        sequence_groups.initialize_sequence_parallel(degree)
