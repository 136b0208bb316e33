"""Bytes of tensors that come and go in a step, by phase: of the host, or of fake CUDA tensors on a Hopper."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from support.fake_cuda import DEVICE, hopper
from support.tiny import DataBundle, MaskedTokens, collate_items, resolve
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeline.distributed.process_group import Job
from pipeline.objectives import build_objective
from pipeline.training.assemble import build_engine, build_loader

TOKENS = 4
WORDS = 512


class Live(TorchDispatchMode):
    """Counts storages that operators make, for as long as they live; the most of each phase."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._kind = kind
        self._seen: dict[int, int] = {}
        self.now = 0
        self.phase = "forward"
        self.most: dict[str, int] = {}

    def know(self) -> None:
        """Leave out tensors that exist already."""
        gc.collect()
        for thing in gc.get_objects():
            if issubclass(type(thing), torch.Tensor) and thing.device.type == self._kind:
                for each in (thing, thing.grad if thing.is_leaf else None):
                    if each is not None:
                        self._see(each, 0)

    def _see(self, tensor: torch.Tensor, size: int | None = None) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._seen:
            return
        size = storage.nbytes() if size is None else size
        self._seen[storage._cdata] = size
        self.now += size
        weakref.finalize(storage, self._gone, storage._cdata, size)

    def enter(self, phase: str) -> None:
        self.phase = phase
        self._note()

    def _note(self) -> None:
        self.most[self.phase] = max(self.now, self.most.get(self.phase, 0))

    def _gone(self, key: int, size: int) -> None:
        self.now -= size
        self._seen.pop(key, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, torch.Tensor) and each.device.type == self._kind:
                self._see(each)
        self._note()
        return out


def of_a_step(job: Job, tree: dict[str, Any], split: dict[str, Any], on_gpu: bool) -> dict[str, int]:
    """Measure the peak bytes of new tensors in `forward`, `backward` and `step`, and after the step (`end`).

    Collective.
    """
    data = DataBundle(
        MaskedTokens(16, TOKENS), {"t": MaskedTokens(8, TOKENS)}, collate_items, None, WORDS, None, "tiny"
    )
    if not on_gpu:
        return _measured(job, tree, split, data, Live("cpu"), lambda: None)
    with hopper() as card:

        def quiet() -> None:
            card.may_read = True

        return _measured(replace(job, device=DEVICE), tree, split, data, Live("cuda"), quiet)


def _measured(
    job: Job,
    tree: dict[str, Any],
    split: dict[str, Any],
    data: DataBundle,
    live: Live,
    quiet: Callable[[], None],
) -> dict[str, int]:
    config, resolved = resolve(tree, split, job.ranks.world_size)
    engine: Any = build_engine(config, resolved, job, data)
    loader = build_loader(config, resolved.batch_plan, data, engine)
    objective = build_objective(config)
    quiet()
    for _ in range(2):
        engine.train_step(loader.next_group(), objective, 1e-3, False)
    group = loader.next_group()
    _mark(engine, live)
    live.know()
    with live:
        engine.train_step(group, objective, 1e-3, False)
        live.enter("end")
    found = dict(live.most)
    loader.close()
    engine.close()
    return found


def _mark(engine: Any, live: Live) -> None:
    """Says where a backward and a step begin."""
    measured = engine.phases.measure

    def marked(name: str) -> Any:
        if name in ("backward", "optimizer"):
            live.enter({"optimizer": "step"}.get(name, name))
        return measured(name)

    engine.phases.measure = marked
