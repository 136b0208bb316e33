"""One optimizer step that counts: its samples, learning rate, random numbers, and what the ranks ask for."""

from __future__ import annotations

import random

import numpy as np
import torch

from pipeline.data.random_numbers import derive_seed
from pipeline.distributed.stopping import SAVE_FLAG, STOP_FLAG, Alarm, FlagReader, Flags, StopOnSignal
from pipeline.engine.interface import StepResult
from pipeline.parts import Parts
from pipeline.schedule import multiplier


class Stepper:
    """Steps the engine. All calls are collective.

    Args:
        stop: Asks for a stop.
    """

    def __init__(self, parts: Parts, stop: StopOnSignal):
        self._parts = parts
        self._stop = stop
        self._objective = parts.meters.timed(parts.objective)
        self._flag_reader = FlagReader(parts.engine.device)

    def learning_rate(self, global_step: int) -> float:
        """Of the step after `global_step` of them."""
        parts = self._parts
        return parts.peak_learning_rate * multiplier(parts.schedule, global_step, parts.max_steps)

    def step(self, global_step: int, alarm: Alarm) -> tuple[StepResult | None, Flags]:
        """The next step that counts: the first one, but where the safeguard leaves samples out.

        Args:
            global_step: Steps done.
            alarm: Asks for a checkpoint.

        Returns:
            What came of it, None where a stop was agreed before; and what the ranks ask for.
        """
        parts, asked = self._parts, Flags(save=False, stop=False)
        while True:
            parts.job.progress.at("step", global_step)
            first = parts.loader.samples_seen
            with parts.meters.waiting_for_data():
                micro_batches = parts.loader.next_group()
            samples = (first, parts.loader.samples_seen)
            seed_step(parts.seed, global_step, parts.engine.seed_rank)
            flags = STOP_FLAG if self._stop.requested else SAVE_FLAG if alarm.due() else 0
            result = parts.engine.train_step(
                micro_batches, self._objective, self.learning_rate(global_step), flags, parts.safeguard.limits
            )
            with parts.meters.waiting_for_data():
                parts.loader.fetch_ahead()
            now = self._flag_reader.read(result.flags)
            asked = Flags(save=asked.save or now.save, stop=asked.stop or now.stop)
            if parts.safeguard.takes(global_step + 1, result, samples, parts.loader.describe):
                return result, asked
            if asked.stop:
                return None, asked


def seed_step(seed: int, step: int, seed_rank: int) -> None:
    """Makes a step's random numbers (dropout) a pure function of seed, step and rank.

    No generator state needs to be saved, and a resumed run draws what the unbroken one would have drawn.
    """
    bits = derive_seed(seed, step, seed_rank) % 2**32
    torch.manual_seed(bits)
    np.random.seed(bits)
    random.seed(bits)
