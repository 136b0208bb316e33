"""A bare machine with a GPU has torch, transformers and the wheels brought along: its tests need no more."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys

import pytest
from distributed.launch.test_installation import find_python
from support.launch import ROOT, make_environment

GPU_SH = ROOT / "benchmarks" / "gpu.sh"
COMPUTED_ON_A_GPU = [
    "tests/gpu",
    "tests/engine/test_fake_cuda.py",
    "tests/objectives/test_fused_loss.py",
    "tests/models/test_document_attention.py",
]
ABSENT = (
    "datasets zstandard wandb plotly torchao bitsandbytes hypothesis xdist pytest_timeout PIL pandas "
    "lm_eval starlette uvicorn openai"
)
COLLECT = f"""
import sys
sys.modules.update(dict.fromkeys({ABSENT.split()!r}))  # None: importing it fails
import pytest
sys.exit(pytest.main(["-p", "no:cacheprovider", "--collect-only", "-q", "tests/gpu", "tests/parity"]))
"""


@pytest.mark.nightly
def test_the_tests_of_a_gpu_need_no_package_that_is_absent_there():
    variables = make_environment(PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    done = subprocess.run(
        [sys.executable, "-c", COLLECT], cwd=ROOT, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "tests/gpu/test_gpu.py::" in done.stdout


def carried_along() -> str:
    """The commands at the head of gpu.sh that fetch the wheels a bare machine lacks."""
    return "\n".join(re.findall(r"^#   (pip .*|there=.*)$", GPU_SH.read_text(), re.M))


def test_the_head_of_gpu_sh_says_how_to_carry_the_wheels_along():
    words = shlex.split(carried_along())
    assert {"wheel", "download", "pydantic", "xxhash", "liger-kernel"} <= set(words)
    assert any(word.startswith("deepspeed") for word in words)
    assert subprocess.run(["bash", "-nc", carried_along()], check=False).returncode == 0


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.skipif(find_python("3.12") is None, reason="needs Python 3.12")
def test_a_call_of_the_gpu_machine_can_be_rehearsed_with_its_versions(tmp_path):
    """An environment of 6 GB is installed: both parts of the call, runs, and what a GPU computes."""
    tree = tmp_path / "tree"
    binaries = tmp_path / "venv" / "bin"
    variables = os.environ | {
        "PATH": f"{binaries}:{os.environ['PATH']}",
        "PYTHONPATH": f"{tree}:{tree / '.site'}",
        "PYTHON": str(binaries / "python"),
        "OUT": str(tmp_path / "out"),
        "HF_HUB_OFFLINE": "1",
        "TINY": "1",
    }
    subprocess.run([find_python("3.12"), "-m", "venv", tmp_path / "venv"], check=True)
    subprocess.run(["git", "clone", "-q", ROOT, tree], check=True)
    commands = [
        "python -m pip install -q -r benchmarks/rehearsal.txt",
        f"set -e\n{carried_along()}",
        "bash benchmarks/gpu.sh first",
        "bash benchmarks/gpu.sh second",
        "python launch/train.py max_steps=3",
        "python launch/train.py --deepspeed ds_configs/zero2.json max_steps=3",
        f"python -m pytest -q -m 'not nightly' {' '.join(COMPUTED_ON_A_GPU)}",
    ]
    for command in commands:
        done = subprocess.run(
            ["bash", "-c", command], cwd=tree, env=variables, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, command + done.stdout[-5000:] + done.stderr[-3000:]
