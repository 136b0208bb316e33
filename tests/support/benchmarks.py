"""Imports modules of benchmarks/, which is not a package."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from support.launch import ROOT

FOLDER = str(ROOT / "benchmarks")


def import_benchmark(name: str) -> Any:
    """Import a module of benchmarks/, and leave its folder off `sys.path` afterwards."""
    sys.path.insert(0, FOLDER)
    try:
        return import_module(name)
    finally:
        sys.path.remove(FOLDER)
