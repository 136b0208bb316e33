"""Runs that are sent out of memory: what they say, and that what they say helps."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys

import pytest
import torch
from support.cgroup import limit_memory
from support.launch import BIN, ROOT, TORCHRUN, TRAIN, launch, make_environment, write_recipe
from support.rank_pool import free_port

pytestmark = pytest.mark.slow

FAULTS = {"PYTHONPATH": str(ROOT / "tests")}
ZERO2 = ["--deepspeed", str(ROOT / "ds_configs" / "zero2.json")]


def hungry(folder, **arguments):
    return write_recipe(
        folder,
        model={"kind": "support.faults:hungry", "args": arguments},
        data={"kind": "support.faults:points"},
        objective={"kind": "classification"},
        max_steps=2,
        eval={"every": 0},
    )


def advice(text):
    """The words of the first change."""
    (words,) = re.findall(r"[Ww]hat helps, best first: (.*?) \(", text)
    return shlex.split(words)


def test_a_run_that_is_out_of_memory_trains_with_what_it_says(tmp_path):
    arguments = ["--config", str(hungry(tmp_path, mib_per_sample=96, limit_mib=640))]
    result = launch(*arguments, **FAULTS)
    assert result.returncode == 12, result.stderr
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: out of memory on cpu in the forward at micro_batch_size 8, at ")
    assert "asked for 96 MiB, it used" in line
    assert re.search(
        r"this process may use .* GiB \(ulimit -d\); this rank's memory: .*MiB activations", line
    )
    words = advice(line)
    assert words == ["batch.micro_batch_size=4", "batch.gradient_accumulation_steps=2"]
    result = launch(*arguments, *words, **FAULTS)
    assert result.returncode == 0, result.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_so_does_one_on_a_gpu(tmp_path):
    arguments = ["--config", str(hungry(tmp_path, mib_per_sample=96, limit_mib=640))]
    cuda = {"DS_ACCELERATOR": "cuda"}
    result = launch(*arguments, **FAULTS | cuda)
    assert result.returncode == 12, result.stderr
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert re.match(r"error: out of memory on cuda(:0)? in the forward at micro_batch_size 8, at ", line)
    assert "asked for 96.00 MiB" in line
    assert re.search(r"this rank's memory: .* 576 MiB activations and temporaries", line)
    words = advice(line)
    assert words[0] == "batch.micro_batch_size=4"
    result = launch(*arguments, *words, **FAULTS | cuda)
    assert result.returncode == 0, result.stderr


def limited(mib, *words):
    """(exit code, output) of a command in a cgroup of so many MiB."""
    with limit_memory(mib) as members:
        shell = f"echo $$ > {members}; exec {shlex.join(words)}"
        done = subprocess.run(
            ["sh", "-c", shell],
            capture_output=True,
            text=True,
            check=False,
            cwd=ROOT,
            env=make_environment(**FAULTS),
        )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("launcher", "code"),
    [
        ([sys.executable, *TORCHRUN, "--nproc-per-node", "2", "--standalone", TRAIN], 1),
        ([str(BIN / "deepspeed"), "--num_gpus", "2", "--master_port", "{port}", TRAIN, *ZERO2], 247),
        ([str(ROOT / "launch" / "multi_gpu.sh"), "--num_gpus", "2", *ZERO2], 124),
    ],
    ids=["torchrun", "deepspeed", "multi_gpu.sh"],
)
def test_a_rank_that_was_killed_for_memory_is_told_as_such(tmp_path, launcher, code):
    """The remaining rank names it, or our script; if none remains, the next start does."""
    words = [word.format(port=free_port()) for word in launcher]
    arguments = ["--config", str(hungry(tmp_path, mib_per_sample=256))]
    ended, text = limited(2560, *words, *arguments)
    assert ended != 0
    if "is gone" in text:  # else the kernel ended both at once, as it may
        assert ended == code
        assert re.search(
            r"killed for memory \(exit code -9\): 2 ranks on its machine x [\d.]+ [GM]iB; what helps", text
        )
    if "multi_gpu.sh" in launcher[0]:
        assert re.search(r"^this machine: the kernel killed \d process(es)? for memory; lower ", text, re.M)
    ended, text = limited(
        2560, *words, *arguments, "batch.micro_batch_size=2", "batch.gradient_accumulation_steps=2"
    )
    assert ended == 0, text


@pytest.mark.nightly
def test_a_run_that_was_killed_whole_is_told_of_by_its_next_start(tmp_path):
    arguments = ["--config", str(hungry(tmp_path, mib_per_sample=256))]
    ended, _ = limited(1800, sys.executable, TRAIN, *arguments)
    assert ended == -9
    ended, text = limited(1800, sys.executable, TRAIN, *arguments)
    assert ended == -9
    start = r"warning: run_killed: (step \d+: )?the last process of this run "
    (line,) = [line for line in text.splitlines() if re.match(start, line)]
    assert re.search(
        r"killed (rank 0 .* )?for memory: 1 rank on its machine x [\d.]+ [GM]iB, and its cgroup allows", line
    )
    words = advice(line)
    ended, text = limited(1800, sys.executable, TRAIN, *arguments, *words)
    assert ended == 0, text
