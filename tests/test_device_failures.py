"""What is made of exceptions: memory that is out, a device that failed, and what is neither."""

from __future__ import annotations

import errno

import numpy as np
import pytest
import torch
from support.launch import ROOT

from pipeline.config.settings import load_settings
from pipeline.device_failures import explain
from pipeline.distributed.process_group import Job
from pipeline.distributed.ranks import Ranks
from pipeline.errors import DeviceFailedError, DeviceMemoryError

# Word for word, of torch 2.11's allocator.
CUDA = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.81 "
    "GiB is free. Process 9 has 77.29 GiB memory in use. Of the allocated memory 70.12 GiB is allocated by "
    "PyTorch, and 5.30 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is "
    "large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
JOB = Job(Ranks(0, 0, 2, 2), torch.device("cpu"))


def told(error, *overrides, job=JOB):
    recipe = ROOT / "launch" / "recipes" / "python_stdlib.yaml"
    return explain(error, load_settings(recipe, ROOT / "ds_configs" / "zero2.json", overrides), job)


def test_the_numbers_and_what_to_change():
    error = told(torch.OutOfMemoryError(CUDA), "batch.micro_batch_size=9", "batch.global_batch_size=36")
    assert error.exit_code == 12
    numbers = (
        "asked for 2.50 GiB, of 79.11 GiB in all, 1.81 GiB were free, 70.12 GiB allocated, 5.30 GiB more"
    )
    assert numbers in str(error)
    levers = (
        "batch.micro_batch_size=3 batch.gradient_accumulation_steps=6 (now 9 and 2), the same step with 1/3",
        "model.activation_checkpointing=full",
        "ds_configs/zero3.json",
        "data.sequence_length",
    )
    assert sorted(levers, key=str(error).index) == list(levers)


def test_a_lever_that_is_pulled_already_is_left_out():
    changes = ["batch.micro_batch_size=1", "batch.global_batch_size=2", "model.activation_checkpointing=full"]
    text = str(told(torch.OutOfMemoryError(CUDA), *changes, "ds.zero_optimization.stage=3"))
    assert not any(word in text for word in ("micro_batch_size=", "activation_checkpointing", "zero3"))


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError(
            "NCCL error in: ProcessGroupNCCL.cpp:77, unhandled cuda error\nCuda failure 2 'out of memory'"
        ),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ],
    ids=["cublas", "nccl", "pinned", "fork"],
)
def test_other_ways_to_say_it(error):
    assert isinstance(told(error, job=None), DeviceMemoryError)


def test_numpy_says_it_too():
    with pytest.raises(MemoryError) as caught:
        np.empty(2**50)
    assert "out of memory on cpu" in str(told(caught.value))


def test_a_device_that_failed_is_known_by_what_came_of_it_too():
    """Closing an engine whose device failed raises anew."""
    error = ValueError("closing")
    error.__context__ = RuntimeError("CUDA error: an illegal memory access was encountered")
    error = told(error)
    assert isinstance(error, DeviceFailedError)
    assert "illegal memory access" in str(error)
    assert "CUDA_LAUNCH_BLOCKING=1" in str(error)


def test_a_card_that_is_at_fault_is_not_debugged():
    text = str(told(RuntimeError("CUDA error: uncorrectable ECC error encountered")))
    assert "dmesg" in text
    assert "LAUNCH_BLOCKING" not in text


def test_a_mistake_stays_one():
    assert told(RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)")) is None
    assert told(ValueError("out of memory")) is None
