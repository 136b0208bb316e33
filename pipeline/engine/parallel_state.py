"""Which process groups DeepSpeed uses: it keeps them in module variables, and the last engine made sets them.

Groups are made once per degree and kept, so that a process may make many engines, each with its own split.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, ClassVar
from weakref import WeakSet

import deepspeed
import deepspeed.runtime.sequence_parallel.parallel_state_sp as sequence_groups
import torch.distributed as dist
from deepspeed.runtime.pipe import p2p
from deepspeed.sequence import layer
from deepspeed.utils import groups
from torch.distributed import distributed_c10d

from pipeline.config.split import Split


class EngineGroups:
    """The process groups of one engine: made before them, `keep` once it stands, `destroy` at its end.

    Each group is a connection to every other rank in it and two threads. One that another open engine found
    in DeepSpeed's module variables, and took, stays until that one is closed.
    """

    _open: ClassVar[WeakSet[EngineGroups]] = WeakSet()

    def __init__(self) -> None:
        self._before = _living() - _shared()
        self._used: set[Any] = set()

    def keep(self) -> None:
        """What was made since is this engine's, and what DeepSpeed's module variables hold."""
        self._used = (_living() - self._before) | _shared()
        self._open.add(self)

    def destroy(self) -> None:
        """Ends the groups that no other open engine uses. Every rank; a second call does nothing."""
        self._open.discard(self)
        used, self._used = self._used & _living(), set()
        taken = set[Any]().union(*(other._used for other in self._open))
        mine = used - taken
        if {sequence_groups._SEQUENCE_PARALLEL_GROUP, sequence_groups._SEQUENCE_DATA_PARALLEL_GROUP} & mine:
            sequence_groups._release_sequence_parallel_groups()
        if groups._DATA_PARALLEL_GROUP in mine:  # the tensor group may be the job's own, which stays
            groups._TENSOR_MODEL_PARALLEL_GROUP = groups._MODEL_PARALLEL_GROUP = None
        if p2p._grid is not None and p2p._grid.pp_proc_group in mine:
            p2p._grid = None
        for group in list(distributed_c10d._world.pg_map):  # in the order they were made, as on other ranks
            if group in mine:
                layer._all_to_all_groups.pop(group.group_name, None)  # Ulysses' registry
                deepspeed.comm.destroy_process_group(group)
        if not self._open:
            groups.mpu = None


def _living() -> set[Any]:
    """All groups but the job's own, which a mesh over all ranks takes for one of its dimensions."""
    return {group for group in distributed_c10d._world.pg_map if group is not dist.group.WORLD}


def _shared() -> set[Any]:
    """The groups that DeepSpeed keeps for whichever engine comes next."""
    named = (
        groups._WORLD_GROUP,
        groups._ZERO_PARAM_INTRA_PARALLEL_GROUP,
        groups._TENSOR_MODEL_PARALLEL_GROUP,
        groups._DATA_PARALLEL_GROUP,
        sequence_groups._SEQUENCE_PARALLEL_GROUP,
        sequence_groups._SEQUENCE_DATA_PARALLEL_GROUP,
        *groups._ALL_TO_ALL_GROUP.values(),
    )
    return _living() & set(named)


def parallel_state(split: Split) -> ModuleType | None:
    """The module DeepSpeed asks for its groups (its `mpu`), holding this split's. Collective.

    None where every rank is a data-parallel one.
    """
    groups.mpu = None  # an engine before this one may have left its own
    if split.tensor_parallel > 1:
        if not _is_of(groups._TENSOR_MODEL_PARALLEL_GROUP, split.tensor_parallel):
            groups._TENSOR_MODEL_PARALLEL_GROUP = None
        groups._init_tp_mesh_device(tensor_model_parallel_size=split.tensor_parallel)
        return groups
    if split.sequence_parallel > 1:
        if not _is_of(sequence_groups._SEQUENCE_PARALLEL_GROUP, split.sequence_parallel):
            sequence_groups._release_sequence_parallel_groups()
            sequence_groups.initialize_sequence_parallel(split.sequence_parallel)
        return sequence_groups
    return None


def _is_of(group: Any, size: int) -> bool:
    return group is not None and dist.get_world_size(group) == size


def forget_parameter_groups() -> None:
    """Lets go of the hpZ groups of an engine or a zero.Init before this one. Before a model is made.

    DeepSpeed divides parameters by whatever groups there are, also where the configuration has no hpZ; where
    it has, zero.Init makes its own and refuses to do so twice.
    """
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
