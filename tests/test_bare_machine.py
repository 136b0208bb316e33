"""A bare machine with a GPU has torch, transformers and the wheels brought along: its tests need no more."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.launch import ROOT, environment

ABSENT = "hypothesis xdist pytest_timeout datasets zstandard kornia gigatoken wandb PIL pandas"
COLLECT = f"""
import sys
sys.modules.update(dict.fromkeys({ABSENT.split()!r}))  # None: importing it fails
import pytest
sys.exit(pytest.main(["-p", "no:cacheprovider", "--collect-only", "-q", "tests/gpu", "tests/parity"]))
"""


@pytest.mark.nightly
def test_the_tests_of_a_gpu_need_no_package_that_is_absent_there():
    variables = environment(PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    done = subprocess.run(
        [sys.executable, "-c", COLLECT], cwd=ROOT, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "tests/gpu/test_gpu.py::" in done.stdout
