from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator

if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ["WANDB_MODE"] = "disabled"  # never a user's own account; the tests of the sink set their own

import pytest
from support.ranks import RankPool


@pytest.fixture(autouse=True)
def _log_as_it_was() -> Iterator[None]:
    """A command run in this process sets up its console; the next test has none."""
    logger = logging.getLogger("pipeline")
    before = logger.level, logger.propagate, list(logger.handlers)
    yield
    logger.setLevel(before[0])
    _, logger.propagate, logger.handlers[:] = before


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """`ranks(2)` is a living pool of two ranks; a pool that a failure ended is started anew."""
    pools: dict[int, RankPool] = {}

    def pool(world_size: int) -> RankPool:
        if world_size not in pools or not pools[world_size].is_alive:
            pools[world_size] = RankPool(world_size)
        return pools[world_size]

    yield pool
    for each in pools.values():
        each.close()
