from __future__ import annotations

import logging
import os
import signal
from collections import defaultdict
from collections.abc import Callable, Iterator
from zlib import crc32

if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    # Threads of two processes on the same cores wait for each other in every operator: several times slower.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // int(workers))))
os.environ["WANDB_MODE"] = "disabled"  # never a user's own account; the tests of the sink set their own

import hypothesis
import pytest
from support.ranks import RankPool

hypothesis.settings.register_profile("busy machine", deadline=None)  # by default 200 ms an example
hypothesis.settings.load_profile("busy machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thin", action="store_true", help="of each slow test's cases only some: marker `thin`")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With --thin a slow test keeps one of its cases, or what its marker says, spread over all of them."""
    if not config.getoption("--thin"):
        return
    tests = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("matrix"):
            tests[item.nodeid.partition("[")[0]].append(item)
    dropped = set[pytest.Item]()
    for name, cases in tests.items():
        marker = cases[0].get_closest_marker("thin")
        number = min(len(cases), marker.args[0] if marker else 1)
        first = crc32(name.encode())  # not the same case of all tests
        kept = {cases[(first + i * len(cases) // number) % len(cases)] for i in range(number)}
        dropped |= set(cases) - kept
    config.hook.pytest_deselected(items=list(dropped))
    items[:] = [item for item in items if item not in dropped]


@pytest.fixture(autouse=True)
def _process_as_it_was() -> Iterator[None]:
    """A command run in this process sets up its console and its signals; the next test has none of that."""
    handler = signal.getsignal(signal.SIGTERM)
    _reset_console()  # a fixture of a whole module may have run a command, too
    yield
    signal.signal(signal.SIGTERM, handler)
    _reset_console()


def _reset_console() -> None:
    logger = logging.getLogger("pipeline")
    logger.setLevel(logging.NOTSET)
    logger.propagate, logger.handlers[:] = True, []


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """`ranks(2)` is a living pool of two ranks; one that a failure ended, or that is crowded, starts anew."""
    pools: dict[int, RankPool] = {}

    def pool(world_size: int) -> RankPool:
        living = pools.get(world_size)
        if living is not None and living.is_alive and living.is_crowded:
            living.close()
        if living is None or not living.is_alive:
            pools[world_size] = RankPool(world_size)
        return pools[world_size]

    yield pool
    for each in pools.values():
        each.close()
