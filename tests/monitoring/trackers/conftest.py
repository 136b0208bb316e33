"""Fixture that starts the stand-in for W&B's server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.wandb_server import WandbServer


@pytest.fixture
def server(tmp_path: Path) -> Iterator[WandbServer]:
    with WandbServer(tmp_path / "server") as server:
        yield server
