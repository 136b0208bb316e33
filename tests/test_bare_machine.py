"""A bare machine with a GPU has torch, transformers and the wheels brought along: its tests need no more."""

from __future__ import annotations

import subprocess
import sys

import pytest
from distributed.launch.test_installation import find_python
from support.launch import ROOT, environment

ABSENT = "datasets zstandard wandb plotly torchao bitsandbytes hypothesis xdist pytest_timeout PIL pandas"
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


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.skipif(find_python("3.12") is None, reason="needs Python 3.12")
def test_a_call_of_the_gpu_machine_can_be_rehearsed_with_its_versions(tmp_path):
    """An environment of 6 GB is installed: runs, tests, and both parts of the call."""
    command = [sys.executable, "benchmarks/rehearsal.py", tmp_path, "--python", find_python("3.12")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "failed: nothing"
