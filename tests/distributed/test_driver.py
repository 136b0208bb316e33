"""Cards and drivers read from files as systems have them, and what is said of a card that lies idle."""

from __future__ import annotations

import pytest

from pipeline.distributed.machine import (
    AMD,
    NVIDIA,
    TorchBuild,
    count_installed_gpus,
    explain_idle_gpu,
    find_required_driver,
)

OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (x)\n"
CPU = TorchBuild("2.13.0+cpu", None, None)
CUDA = TorchBuild("2.11.0+cu130", "13.0", None)


def system(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


NATIVE = {"dev/nvidia0": "", "proc/driver/nvidia/version": OPEN}
WSL = {
    "dev/dxg": "",
    "proc/version": "Linux 5.15-microsoft-standard-WSL2",
    "usr/lib/wsl/lib/libcuda.so.1": "",
}


@pytest.mark.parametrize(
    ("driver", "cuda", "oldest"),
    [
        ("570.86.15", "12.8", None),
        ("520.61.05", "12.1", "525"),
        ("1.0", "14.0", None),
    ],
)
def test_a_driver_that_is_too_old_for_a_cuda(driver, cuda, oldest):
    assert find_required_driver(driver, cuda) == oldest


def test_cards_on_the_bus(tmp_path):
    kinds = {"a": ("0x030200", "0x10de"), "b": ("0x120000", "0x1002"), "c": ("0x040300", "0x10de")}
    for name, (kind, vendor) in kinds.items():
        folder = f"sys/bus/pci/devices/{name}"
        system(tmp_path, {f"{folder}/class": f"{kind}\n", f"{folder}/vendor": f"{vendor}\n"})
    assert (count_installed_gpus(NVIDIA, tmp_path), count_installed_gpus(AMD, tmp_path)) == (1, 1)


@pytest.mark.parametrize(
    ("files", "torch", "said"),
    [
        (NATIVE, CPU, "(2.13.0+cpu) is a CPU build: pip install --force-reinstall torch==2.13.0"),
        (NATIVE, CUDA, "the driver 570.86.15 is too old for torch's CUDA 13.0: install driver 580 or newer"),
        (NATIVE, CUDA._replace(cuda="12.8"), "does not see it; to find the fault run: "),
        (NATIVE, TorchBuild("2.11+rocm", None, "7.0"), "(2.11+rocm) is built without CUDA"),
        (WSL, CPU, "is a CPU build"),
        ({"dev/kfd": ""}, CPU, "is a CPU build: install the build of torch 2.13.0 for ROCm"),
    ],
)
def test_a_card_that_lies_idle(tmp_path, files, torch, said):
    root = system(tmp_path, files)
    told = explain_idle_gpu(torch, {}, root)
    assert said in told
    assert "://" not in told
    assert explain_idle_gpu(torch, {"DS_ACCELERATOR": "cpu"}, root) is None
    assert explain_idle_gpu(torch, {"CUDA_VISIBLE_DEVICES": ""}, root) is None


@pytest.mark.parametrize(
    "files", [{}, {"proc/driver/nvidia/version": OPEN}], ids=["no card", "no device given"]
)
def test_nothing_is_said_where_this_process_was_given_none(tmp_path, files):
    assert explain_idle_gpu(CPU, {}, system(tmp_path, files)) is None
