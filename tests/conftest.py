from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    # Threads of two processes on the same cores wait for each other in every operator: several times slower.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // int(workers))))
# Of each environment its own: another one's ops are built anew wherever the two take turns.
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))
if shutil.which("g++"):
    os.environ.setdefault("CXX", str(Path(__file__).parent / "support" / "compiler" / "g++"))
os.environ["WANDB_MODE"] = "disabled"  # never a user's own account; the tests of the sink set their own

import pytest
from support.rank_pool import RankPool

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import LoadScopeScheduling

NODES = Path(__file__).parent / "multinode"

if find_spec("hypothesis"):  # a machine with a GPU may have little besides torch
    import hypothesis

    hypothesis.settings.register_profile("busy machine", deadline=None)  # by default 200 ms an example
    hypothesis.settings.load_profile("busy machine")


def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.has_plugin("timeout"):
        config.addinivalue_line("markers", "timeout(seconds): pytest-timeout's, which is not here")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip slow files before their import; they have three of ten tests that `make check` would collect."""
    if "not slow" not in config.option.markexpr or collection_path.suffix != ".py":
        return None
    return "\npytestmark = pytest.mark.slow\n" in collection_path.read_text() or None


@pytest.hookimpl(tryfirst=True)  # before markers choose
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Cases that a test's marker `daily` does not name are nightly."""
    missing: dict[str, set[str]] = {}
    for item in items:
        if marker := item.get_closest_marker("daily"):
            test, _, case = item.nodeid.removesuffix("]").partition("[")
            missing.setdefault(test, set(marker.args)).discard(case)
            if case not in marker.args:
                item.add_marker("nightly")
    one_by_one = any("::" in argument for argument in config.args)
    if not one_by_one and (wrong := {test: cases for test, cases in missing.items() if cases}):
        raise pytest.UsageError(f"marker daily names cases that are not there: {wrong}")
    # Files with long tests first, those of nodes before them: workers then end together.
    long = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.path.parent != NODES, item.path not in long))


@pytest.hookimpl(optionalhook=True)  # without xdist there is no such hook
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        """Gives a file's tests to one worker, and all tests of nodes, of which there is one set, to one."""

        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "nodes" if file.startswith("tests/multinode/") else file

    return ByFile(config, log)


@pytest.fixture(autouse=True)
def _process_as_it_was() -> Iterator[None]:
    """A command run in this process sets up its console, its signals and, under ZeRO 3, DeepSpeed's F.linear.

    The next test has none of that.
    """
    handler = signal.getsignal(signal.SIGTERM)
    _reset_console()  # a fixture of a whole module may have run a command, too
    yield
    signal.signal(signal.SIGTERM, handler)
    _reset_console()
    if (torch := sys.modules.get("torch")) is not None:
        torch.nn.functional.linear = torch._C._nn.linear


def _reset_console() -> None:
    logger = logging.getLogger("pipeline")
    logger.setLevel(logging.NOTSET)
    logger.propagate, logger.handlers[:] = True, []


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """`ranks(2)` is a living pool of two ranks; one that a failure ended starts anew."""
    pools: dict[int, RankPool] = {}

    def pool(world_size: int) -> RankPool:
        living = pools.get(world_size)
        if living is None or not living.is_alive:
            pools[world_size] = RankPool(world_size)
        return pools[world_size]

    yield pool
    for each in pools.values():
        each.close()
