"""An engine of plain tensors: a model that every rank knows, divided over ranks in one of two ways."""

from __future__ import annotations

import math

import torch

from pipeline.checkpoint.shards import Region, Shard

SHAPES = {
    ("embed.weight", "weight"): ((11, 6), torch.float32),
    ("embed.weight", "exp_avg"): ((11, 6), torch.float32),
    ("layers.0.weight", "weight"): ((6, 8), torch.float32),
    ("layers.0.weight", "exp_avg"): ((6, 8), torch.float32),
    ("flag", "buffer"): ((3,), torch.bool),
    ("norm.bias", "weight"): ((6,), torch.bfloat16),
    ("batches", "buffer"): ((), torch.int64),
    ("head.weight", "weight"): ((4, 6), torch.float32),
}


def whole_region(shape):
    return Region(shape, None, 0, math.prod(shape))


class PlainEngine:
    """Holds its part of a model that a seed decides.

    Args:
        by: "values": all tensors end to end, in unequal shares. "columns": matrices in boxes of columns.
    """

    def __init__(self, rank: int, world_size: int, by: str = "values", seed: int = 0):
        self.rank = rank
        self.world_size = world_size
        self.by = by
        self.step = seed
        self.fails_at = None
        self.waits = []
        generator = torch.Generator().manual_seed(seed)
        self.whole = {
            key: torch.randn(shape, generator=generator, dtype=torch.float64).mul(9).to(dtype)
            for key, (shape, dtype) in SHAPES.items()
        }
        self.held = [(key, region, self.expected(key, region).clone()) for key, region in self.regions()]

    def regions(self):
        total = sum(math.prod(shape) for shape, _ in SHAPES.values())
        # Unequal shares, cut wherever they fall.
        cuts = [
            total * (r * r + r) // (self.world_size**2 + self.world_size) for r in range(self.world_size + 1)
        ]
        begin = cuts[self.rank]
        end = cuts[self.rank + 1]
        at = 0
        for key, (shape, _) in SHAPES.items():
            size = math.prod(shape)
            if self.by == "values":
                start = max(begin - at, 0)
                stop = min(end - at, size)
                if start < stop:
                    yield key, Region(shape, None, start, stop - start)
            elif len(shape) == 2:
                left, right = (shape[1] * r // self.world_size for r in (self.rank, self.rank + 1))
                box = ((0, shape[0]), (left, right))
                yield key, Region(shape, box, 0, shape[0] * (right - left))
            elif self.rank == 0:
                yield key, whole_region(shape)
            at += size

    def expected(self, key, region):
        whole = self.whole[key]
        box = whole if region.box is None else whole[tuple(slice(a, b) for a, b in region.box)]
        return box.reshape(-1)[region.start : region.start + region.length]

    def shards(self):
        for (name, kind), region, tensor in self.held:
            yield Shard.of(name, kind, region, tensor)

    def scalars(self):
        return {"step": self.step, "loss_scale": 65536.0, "searching": True}

    def hold_step(self, wait):
        self.waits.append(wait)

    def restore(self, source):
        for (name, kind), region, tensor in self.held:
            source.read(name, kind, region, tensor)
        self.step = source.scalars["step"]

    def forget(self):
        for _, _, tensor in self.held:
            tensor.zero_()

    def is_model_of(self, seed: int) -> bool:
        other = PlainEngine(self.rank, self.world_size, self.by, seed)
        return self.step == seed and all(
            torch.equal(tensor, other.expected(key, region)) for key, region, tensor in self.held
        )
