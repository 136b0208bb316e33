"""A module of benchmarks/, which is no package."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from support.launch import ROOT

FOLDER = str(ROOT / "benchmarks")


def imported(name: str) -> Any:
    """It is in a test's process from then on, its folder is not on the path."""
    sys.path.insert(0, FOLDER)
    try:
        return import_module(name)
    finally:
        sys.path.remove(FOLDER)
