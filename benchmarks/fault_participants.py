"""Who saves in checkpoint_faults.py: our store, and DeepSpeed's engine as it comes, each on two ranks.

Each saves states that can be told apart by their step, and says of what it loads which of them it is.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from pipeline.checkpoint.catalog import Retention, newest_good
from pipeline.checkpoint.reader import verify
from pipeline.checkpoint.store import CheckpointStore
from pipeline.distributed.process_group import Job
from pipeline.distributed.ranks import Ranks

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "checkpoint"))

from plain_engine import PlainEngine

LAST = 3


def answer_with(step: int, answer: Path) -> None:
    """Leaves word of what was loaded; both ranks' words have to be the same."""
    answer.with_name(f"{answer.name}-{dist.get_rank()}").write_text(str(step))


@dataclass(frozen=True)
class Store:
    """Ours. One checkpoint stays, so that each save also removes one."""

    wait: bool
    there: tuple[int, ...]
    """Steps that are saved before."""

    def prepare(self, rank: int, folder: Path) -> None:
        store = self._store(rank, folder)
        for step in self.there:
            assert store.save(*self._state(rank, step), wait=True).problem is None

    def save(self, rank: int, folder: Path, arm: Callable[[], None]) -> None:
        store = self._store(rank, folder)
        arm()
        for step in range(2, LAST + 1):
            store.save(*self._state(rank, step), self.wait)
        store.close()

    def load(self, rank: int, folder: Path, answer: Path) -> None:
        """The newest is the one that is said to be, verifies, and holds what was saved."""
        newest, passed_over = newest_good(folder)
        assert newest is not None, passed_over
        damages = verify(newest.folder)
        assert not damages, damages
        engine = PlainEngine(rank, dist.get_world_size())
        state = self._store(rank, folder).resume(engine)
        assert state is not None
        step = int(state["global_step"])
        assert newest.folder.name == f"step-{step:08d}", newest.folder
        assert engine.is_model_of(step)
        answer_with(step, answer)

    def _store(self, rank: int, folder: Path) -> CheckpointStore:
        ranks = Ranks(rank, rank, dist.get_world_size(), dist.get_world_size())
        job = Job(ranks, torch.device("cpu"), dist.HashStore())
        return CheckpointStore(folder, Retention(keep_last=len(self.there)), job, "two ranks")

    @staticmethod
    def _state(rank: int, step: int) -> tuple[PlainEngine, dict[str, Any]]:
        return PlainEngine(rank, dist.get_world_size(), seed=step), {"global_step": step}


class DeepSpeed:
    """A small model under ZeRO 1, trained a step before each save: the same numbers each time."""

    CONFIG: ClassVar = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
    }

    def prepare(self, rank: int, folder: Path) -> None:
        engine = self._engine()
        digests = []
        for step in range(1, LAST + 1):
            self._train(engine, step)
            digests.append(self._digest(engine))
            if step == 1:
                engine.save_checkpoint(str(folder))
        (folder.parent / f"digests-{rank}.json").write_text(json.dumps(digests))

    def save(self, rank: int, folder: Path, arm: Callable[[], None]) -> None:
        engine = self._engine()
        self._train(engine, 1)
        arm()
        for step in range(2, LAST + 1):
            self._train(engine, step)
            engine.save_checkpoint(str(folder))

    def load(self, rank: int, folder: Path, answer: Path) -> None:
        """What `latest` names loads, and is the step that it is named for."""
        engine = self._engine()
        path, _ = engine.load_checkpoint(str(folder))
        assert path is not None, "load_checkpoint finds nothing"
        digests = json.loads((folder.parent.parent / f"digests-{rank}.json").read_text())
        step = int((folder / "latest").read_text().removeprefix("global_step"))
        assert self._digest(engine) == digests[step - 1], f"{path} does not hold step {step}"
        answer_with(step, answer)

    def _engine(self) -> Any:
        import deepspeed

        # On a CPU DeepSpeed would compile a shared-memory all-reduce for a minute: nothing here is inference.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.utils.logger.setLevel("WARNING")
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(32, 4))
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=dict(self.CONFIG)
        )
        return engine

    @staticmethod
    def _train(engine: Any, step: int) -> None:
        generator = torch.Generator().manual_seed(2 * step + dist.get_rank())
        engine.backward(engine(torch.randn(1, 16, generator=generator)).square().mean())
        engine.step()

    @staticmethod
    def _digest(engine: Any) -> str:
        """Of this rank's weights, master weights and moments."""
        states = engine.optimizer.optimizer.state
        moments = [value for state in states.values() for _, value in sorted(state.items())]
        masters = list(states)
        tensors = [*engine.module.parameters(), *masters, *moments]
        total = hashlib.sha256()
        for tensor in tensors:
            total.update(torch.as_tensor(tensor).detach().reshape(-1).double().numpy().tobytes())
        return total.hexdigest()
