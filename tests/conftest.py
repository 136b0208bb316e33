"""Hooks and fixtures of all tests."""

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
    # Threads of two processes on the same cores wait for each other in every operator, which is several times
    # slower.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // int(workers))))
# Each environment has its own folder: two environments with one folder would rebuild each other's ops.
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))
if shutil.which("g++"):
    os.environ.setdefault("CXX", str(Path(__file__).parent / "support" / "compiler" / "g++"))
os.environ["WANDB_MODE"] = "disabled"  # no test writes to a user's account
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell lets jobs in the background ignore it. Programs would inherit that, and tests send it to them.
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
from support.rank_pool import RankPool

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import LoadScopeScheduling

NODES = Path(__file__).parent / "multinode"

if find_spec("hypothesis"):  # a machine with a GPU may lack most packages of the tests
    import hypothesis

    hypothesis.settings.register_profile("busy machine", deadline=None)  # the default is 200 ms per example
    hypothesis.settings.load_profile("busy machine")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker `timeout` where pytest-timeout is missing."""
    if not config.pluginmanager.has_plugin("timeout"):
        config.addinivalue_line("markers", "timeout(seconds): of pytest-timeout, which is not installed")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip slow files before their import: three of ten tests that `make check` would collect are in them."""
    if "not slow" not in config.option.markexpr or collection_path.suffix != ".py":
        return None
    return "\npytestmark = pytest.mark.slow\n" in collection_path.read_text() or None


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marker
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark cases that a `daily` marker does not name as nightly, and put files with long tests first."""
    missing: dict[str, set[str]] = {}
    for item in items:
        if marker := item.get_closest_marker("daily"):
            test, _, case = item.nodeid.removesuffix("]").partition("[")
            missing.setdefault(test, set(marker.args)).discard(case)
            if case not in marker.args:
                item.add_marker("nightly")
    selects_single_tests = any("::" in argument for argument in config.args)
    unknown = {test: cases for test, cases in missing.items() if cases}
    if unknown and not selects_single_tests:
        raise pytest.UsageError(
            f"the marker `daily` names cases that do not exist: {unknown}; correct the ids in the marker"
        )
    # The tests of nodes and then the files with long tests start first, so that all workers end together.
    slow_files = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.path.parent != NODES, item.path not in slow_files))


@pytest.hookimpl(optionalhook=True)  # without xdist there is no such hook
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    """Schedule tests by file."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        """Gives the tests of a file to one worker, and all tests of nodes to one, as they share the nodes."""

        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "nodes" if file.startswith("tests/multinode/") else file

    return ByFile(config, log)


@pytest.fixture(autouse=True)
def _restore_process() -> Iterator[None]:
    """Undo after each test what a command changes in its process.

    A command sets up a console and signal handlers, and under ZeRO 3 DeepSpeed replaces F.linear.
    """
    handler = signal.getsignal(signal.SIGTERM)
    _reset_console()  # a fixture with the scope of a module may have run a command, too
    yield
    signal.signal(signal.SIGTERM, handler)
    _reset_console()
    if (torch := sys.modules.get("torch")) is not None:
        torch.nn.functional.linear = torch._C._nn.linear


def _reset_console() -> None:
    logger = logging.getLogger("pipeline")
    logger.setLevel(logging.NOTSET)
    logger.propagate = True
    logger.handlers.clear()


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, list[str]]]:
    """Give `call("evaluate", run, ...)` -> (exit code, stdout, error lines), a command in this process."""
    from pipeline.__main__ import main

    def function(*arguments: object) -> tuple[int, str, list[str]]:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return code, out, [line for line in err.splitlines() if line.startswith("error: ")]

    return function


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """Give `ranks(2)`, a pool of two ranks that lives across tests; after a failure a new pool starts."""
    pools: dict[int, RankPool] = {}

    def get_pool(world_size: int) -> RankPool:
        pool = pools.get(world_size)
        if pool is None or not pool.is_alive:
            pools[world_size] = RankPool(world_size)
        return pools[world_size]

    yield get_pool
    for pool in pools.values():
        pool.close()
