"""The device of a rank, by its environment and the visible devices; whether it has the device to itself."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.captured_logs import capture_logs
from torch.distributed import HashStore

from pipeline.distributed import accelerator
from pipeline.distributed.accelerator import (
    check_own_devices,
    configure_allocator,
    device_index,
    find_device,
)
from pipeline.distributed.diagnosis import RankProcess
from pipeline.distributed.ranks import Ranks
from pipeline.errors import LaunchError

SAYS = """
import os
from pipeline.distributed.accelerator import choose_accelerator
print(choose_accelerator(), os.environ["DS_ACCELERATOR"])
import torch
from deepspeed.accelerator import get_accelerator
print(get_accelerator().device_name(), torch.cuda.is_initialized())
"""


@pytest.mark.nightly
def test_deepspeed_computes_on_what_was_chosen():
    """A CUDA build without a visible card is no GPU either: DeepSpeed asks for the packages alone."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
    environment.pop("DS_ACCELERATOR", None)
    command = [sys.executable, "-c", SAYS]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.split() == ["cpu", "cpu", "cpu", "False"], done.stderr


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_segments_grow_unless_the_user_chose(name):
    chosen = {}
    untouched = {name: "max_split_size_mb:64"}
    configure_allocator(chosen)
    configure_allocator(untouched)
    assert chosen == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert untouched == {name: "max_split_size_mb:64"}


@pytest.mark.parametrize(
    ("local_rank", "visible", "index"), [(0, 1, 0), (3, 1, 0), (3, 4, 3), (0, 8, 0)], ids=str
)
def test_a_rank_takes_the_device_of_its_number_or_the_only_one(local_rank, visible, index):
    """The only one: srun --gpus-per-task=1 shows each task its own."""
    assert device_index(Ranks(local_rank, local_rank, 4, 4), visible, {}) == index


@pytest.mark.parametrize(
    ("visible", "said"),
    [
        (0, r"DS_ACCELERATOR=cuda, but torch .* sees no GPU \(CUDA_VISIBLE_DEVICES is unset\); unset DS"),
        (2, r"local rank 3 has no GPU: 4 ranks .* and 2 GPUs are visible .*; start as many ranks as GPUs"),
    ],
)
def test_a_rank_without_a_device_is_told_what_to_change(visible, said):
    with pytest.raises(LaunchError, match=said):
        device_index(Ranks(3, 3, 4, 4), visible, {})


def test_what_the_user_set_wins(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert find_device(Ranks(0, 0, 1, 1)) == torch.device("cpu")
    if not torch.cuda.is_available():
        monkeypatch.setenv("DS_ACCELERATOR", "cuda")
        with pytest.raises(LaunchError, match="sees no GPU"):
            find_device(Ranks(0, 0, 1, 1))


@pytest.mark.parametrize("word", ["npu", "xpu", "CUDA"])
def test_another_accelerator_is_not_taken_for_cuda(monkeypatch, word):
    monkeypatch.setenv("DS_ACCELERATOR", word)
    with pytest.raises(LaunchError, match=f"DS_ACCELERATOR={word}: expected cuda or cpu"):
        find_device(Ranks(0, 0, 1, 1))


def compared(devices):
    """The messages for each rank, on one machine of two each."""
    store = HashStore()
    everyone = [RankProcess(rank, f"node{rank // 2}", 1, f"m{rank // 2}") for rank in range(len(devices))]

    def compare(rank):
        try:
            check_own_devices(store, everyone, rank, devices[rank])
        except LaunchError as error:
            return str(error)

    with ThreadPoolExecutor(len(devices)) as pool:
        return list(pool.map(compare, range(len(devices))))


def test_ranks_that_share_a_device_are_named_by_each():
    """A machine's devices alone are compared: a copied virtual machine may have the numbers of another."""
    assert compared(["a", "b", "a", "b"]) == [None] * 4
    told = compared(["a", "b", "c", "c"])
    assert set(told) == {told[0]}
    assert told[0].startswith("ranks 2, 3 on node1 share one GPU (c), but each rank needs its own; start")


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch computes on it")
def test_a_gpu_that_torch_leaves_idle_is_told_once(monkeypatch):
    monkeypatch.setattr(accelerator, "explain_idle_gpu", lambda *_: "this torch is a CPU build")
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    with capture_logs() as lines:
        assert [accelerator.choose_accelerator(warn=True) for _ in range(2)] == ["cpu", "cpu"]
    assert lines == ["computing on the CPU although this machine has a GPU: this torch is a CPU build"]
