"""The stand-in for W&B's server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.wandb_server import Server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path / "server") as server:
        yield server
