"""Compares digests of state that is equal on several ranks, to detect broken memory or a broken device.

A rank that computes wrong numbers shows no other sign: no error, and a loss that looks normal.
pipeline/engine/replicas.py defines what is compared.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from pipeline.config.schema import WatchConfig
from pipeline.distributed.process_group import Job
from pipeline.engine.replicas import DIGEST_KINDS, HISTORY_INDEX, ReplicaDigests
from pipeline.monitoring.events import CORRUPTION, Event

log = logging.getLogger(__name__)

MAX_NAMED_RANKS = 8
ADVICE = (
    "run the memory and device tests of that machine (nvidia-smi -q shows a GPU's errors), and do not use it "
    "until they pass; do not trust what this run writes from here on"
)


class ReplicaCheck:
    """Compares replicas of ranks. Collective: all ranks call the same methods at the same steps.

    Args:
        job: Ranks of the job.
        replicas: Replicated state of this rank; `None` if no other rank has a copy.
        watch: Section `watch` of the recipe, with the interval and the action.
        start: Number of steps completed at the start, whose values were read from verified files.
    """

    def __init__(self, job: Job, replicas: ReplicaDigests | None, watch: WatchConfig, start: int):
        self._job = job
        self._replicas = replicas
        every = watch.compare_every
        self.stops_run = watch.on_corruption == "stop"
        """Whether the run ends if replicas differ."""
        own_key = None if replicas is None else replicas.key
        # Ranks with equal keys, which are pairs of model part and processor, have equal tensors.
        keys = job.gather_object(own_key) if job.ranks.world_size > 1 and every > 0 else []
        num_ranks = Counter(key for key in keys if key is not None)
        self._groups = [
            [rank for rank, key in enumerate(keys) if key == group_key]
            for group_key, size in sorted(num_ranks.items())
            if size > 1
        ]
        self._every = every if self._groups else 0
        if job.ranks.is_main_process:
            self._warn_about_processors(sorted({processor for _, processor in num_ranks}))
        self._is_compared = False
        self._pending: tuple[int, Tensor, torch.cuda.Event | None] | None = None
        self.good_until = start
        """Last step after which all replicas were equal. Checkpoints up to it can be trusted."""

    def _warn_about_processors(self, processors: Sequence[str]) -> None:
        if len(processors) > 1:
            log.warning(
                "ranks compute on %d kinds of processors (%s), which round differently: their weights drift "
                "apart, so only ranks with equal processors are compared",
                len(processors),
                ", ".join(processors),
            )

    @property
    def is_on(self) -> bool:
        """Return whether any replicas are compared."""
        return self._every > 0

    def begin(self, step: int) -> None:
        """Prepare for the next step; `step` is the number of steps completed before it."""
        self._is_compared = self._every > 0 and step % self._every == 0
        if self._every and self._replicas is not None:
            self._replicas.begin(self._is_compared)

    def end(self, step: int) -> Event | None:
        """Compare replicas after a step, if `watch.compare_every` says so.

        Args:
            step: Argument of the preceding call of `begin`.

        Returns:
            The event if replicas differ, the same on all ranks; else `None`. On a GPU the result belongs to
            the previous comparison, so that no step synchronizes with the device.
        """
        is_gpu = self._job.device.type == "cuda"
        previous = self._read_pending() if is_gpu else None
        digests = self._replicas.end() if self._every and self._replicas is not None else None
        if self._is_compared:
            table = torch.zeros(
                self._job.ranks.world_size, len(DIGEST_KINDS), dtype=torch.int64, device=self._job.device
            )
            if digests is not None:
                table[self._job.ranks.rank] = digests
            self._copy_to_host(step, self._job.all_reduce_sum(table))
        return previous if is_gpu else self._read_pending()

    def note_rollback(self, step: int) -> None:
        """Note that the run continues from an earlier step, and discard a pending comparison."""
        self.good_until = min(self.good_until, step)
        self._pending = None

    def _copy_to_host(self, step: int, table: Tensor) -> None:
        """Start to copy the digests of all ranks to the host; `_read_pending` reads the copy."""
        is_gpu = table.device.type == "cuda"
        host = torch.empty(table.shape, dtype=table.dtype, pin_memory=is_gpu)
        host.copy_(table, non_blocking=True)
        arrived = torch.cuda.Event() if is_gpu else None
        if arrived is not None:
            arrived.record()
        self._pending = (step, host, arrived)

    def _read_pending(self) -> Event | None:
        """Compare the digests that were copied last; return an event if they differ within a group."""
        pending = self._pending
        self._pending = None
        if pending is None:
            return None
        step, host, arrived = pending
        if arrived is not None:
            arrived.synchronize()
        table = host.tolist()
        for group in self._groups:
            for number, kind in enumerate(DIGEST_KINDS):
                values = [table[rank][number] for rank in group]
                if len(set(values)) > 1:
                    when = f"of step {step + 1 if kind == 'gradients' else step}"
                    if number == HISTORY_INDEX:
                        when = f"between steps {self.good_until} and {step}"
                    return self._build_event(f"{kind} {when}", kind, group, values)
        self.good_until = step
        return None

    def _build_event(self, name: str, kind: str, group: Sequence[int], values: Sequence[int]) -> Event:
        """Return the event for a group of ranks whose digests differ.

        Args:
            name: Tensors and step, such as `weights of step 50`.
            kind: Kind of the tensors, one of DIGEST_KINDS.
            group: Ranks that should have equal digests.
            values: Digest of each rank of the group.
        """
        majority_value, count = Counter(values).most_common(1)[0]
        wrong = [rank for rank, value in zip(group, values, strict=True) if value != majority_value]
        if 2 * count <= len(group):  # no majority
            wrong = list(group)
        ranks = ", ".join(str(self._job.rank_processes[rank]) for rank in wrong[:MAX_NAMED_RANKS])
        if len(wrong) == len(group):
            difference = f"they differ between {ranks}, with no majority that shows which are right"
        else:
            difference = f"those of {ranks} differ from those of the other {len(group) - len(wrong)} ranks"
        return Event(
            CORRUPTION,
            f"the {name} should be the same on {len(group)} ranks, bit by bit, but {difference}",
            ADVICE,
            level="error",
            fields={"ranks": ",".join(map(str, wrong)), "kind": kind},
        )
