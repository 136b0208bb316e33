"""Bytes of a real rank right before a step, by the purpose of each tensor: every storage once."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from support.tiny import resolve, token_bundle

from pipeline.distributed.process_group import Job
from pipeline.objectives import build_objective
from pipeline.training.assemble import build_engine, build_loader

KINDS = ("weights", "gradients", "masters", "moments")


def counted(job: Job, tree: dict[str, Any], split: dict[str, Any], steps: int = 2) -> dict[str, int]:
    """Bytes of this rank by kind, right before the update of the last of these steps. Collective."""
    data = token_bundle()
    config, resolved = resolve(tree, split, job.ranks.world_size)
    engine = build_engine(config, resolved, job, data)
    loader = build_loader(config, resolved.batch_plan, data, engine)
    objective = build_objective(config)
    found: list[dict[str, int]] = []

    def look(*_: Any, **__: Any) -> None:
        found.append(_count(engine))

    if resolved.deepspeed is None:
        engine._optimizer.register_step_pre_hook(look)
    else:
        take = engine._engine._take_model_step

        def looked(*given: Any, **named: Any) -> Any:
            look()
            return take(*given, **named)

        engine._engine._take_model_step = looked
    for _ in range(steps):
        engine.train_step(loader.next_group(), objective, 1e-3, False)
    loader.close()
    engine.close()
    return found[-1]


def _count(engine: Any) -> dict[str, int]:
    gc.collect()
    module = engine.module
    zero = getattr(engine, "_zero_optimizer", None)
    kinds: dict[str, dict[int, int]] = {kind: {} for kind in KINDS}
    taken: set[int] = set()
    for kind, tensors in (
        ("weights", _weights(module, zero)),
        ("moments", _moments(engine)),
        ("gradients", _gradients(engine, module, zero)),
        ("masters", _masters(engine, zero)),
    ):
        for pointer, size in _storages(tensors).items():
            if pointer not in taken:
                kinds[kind][pointer] = size
        taken |= set(kinds[kind])
    return {kind: sum(each.values()) for kind, each in kinds.items()}


def _weights(module: Any, zero: Any) -> Iterator[torch.Tensor]:
    for p in module.parameters():
        yield p
        state = getattr(p, "quant_state", None)
        if state is not None:
            yield from (state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code)
        for name in ("ds_tensor", "ds_secondary_tensor"):
            if getattr(p, name, None) is not None:
                yield getattr(p, name)
    yield from getattr(zero, "param_groups_fp16_flat_cpu_memory", [])


def _moments(engine: Any) -> Iterator[torch.Tensor]:
    for optimizer in (engine._optimizer, *getattr(engine, "_stepped", [])):
        for state in optimizer.state.values():
            yield from (each for each in state.values() if torch.is_tensor(each))


def _gradients(engine: Any, module: Any, zero: Any) -> Iterator[torch.Tensor]:
    for p in (*module.parameters(), *_masters(engine, zero)):
        for name in ("grad", "grad_accum"):
            if getattr(p, name, None) is not None:
                yield getattr(p, name)
    for name in ("averaged_gradients", "all_grad_tensors"):
        for each in (getattr(zero, name, None) or {}).values():
            yield from each or []
    if getattr(zero, "grad_partitions_flat_buffer", None) is not None:
        yield zero.grad_partitions_flat_buffer
    yield from getattr(zero, "fp32_groups_gradients_flat", [])
    yield from getattr(zero, "accumulated_grads_in_cpu", {}).values()


def _masters(engine: Any, zero: Any) -> Iterator[torch.Tensor]:
    for optimizer in (engine._optimizer, *getattr(engine, "_stepped", [])):
        for group in optimizer.param_groups:
            yield from group["params"]
    yield from getattr(zero, "fp32_partitioned_groups_flat", [])


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    found: dict[int, int] = {}
    for each in tensors:
        if each.layout == torch.strided and each.device.type != "meta":
            storage = each.untyped_storage()
            try:
                found[storage.data_ptr()] = storage.nbytes()
            except RuntimeError:
                continue
    found.pop(0, None)
    return found
