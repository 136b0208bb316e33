"""The peak of a card: by its own name, whatever other names are part of it or stand before it."""

from __future__ import annotations

import re

import pytest

from pipeline.planner.hardware import GEFORCE, PEAKS, find_peaks, peak_flops

NAMES = [*PEAKS, *(f"RTX {name}" for name in GEFORCE)]


@pytest.mark.parametrize(
    ("device", "bf16"),
    [
        ("NVIDIA H200", 989.5),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H20", 148),
        ("NVIDIA GH200 480GB", 989.5),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA B300 SXM6 AC", 2250),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A10", 125),
        ("NVIDIA A10G", 70),
        ("NVIDIA L4", 121),
        ("NVIDIA L40", 181),
        ("NVIDIA L40S", 362),
        ("NVIDIA RTX A6000", 154.8),
        ("NVIDIA RTX 6000 Ada Generation", 364.2),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 503.8),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", 88.2),
        ("AMD Instinct MI300X", 1307.4),
        ("AMD Instinct MI250X / MI250", 191.5),
    ],
)
def test_a_devices_name_finds_its_card(device, bf16):
    assert peak_flops(device, "bf16") == pytest.approx(bf16 * 1e12)


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_its_own_cards(name):
    own = PEAKS.get(name) or (2 * GEFORCE[name.removeprefix("RTX ")],)
    for device in (name, f"NVIDIA {name}", f"{name}-80GB", f"Tesla {name} 96GB HBM3"):
        assert find_peaks(device)[0] == own[0]
    for glued in (f"X{name}", f"{name}0", f"{name}X"):  # L4 is in L40, T4 in T400, B200 in GB200
        assert find_peaks(glued) is None or glued in NAMES or not name.isalnum()


def test_no_two_cards_of_one_length_are_in_one_name():
    """The longest counts, so the table's order decides nothing."""
    for one in NAMES:
        others = [other for other in NAMES if other != one and re.search(rf"\b{other}\b", one)]
        assert all(len(other) < len(one) for other in others)


@pytest.mark.parametrize(
    "device",
    [
        *("cpu", "NVIDIA T400", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA A100-SXM4-40GB MIG 1g.5gb"),
        *("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "NVIDIA GeForce GTX 1080", ""),
    ],
)
def test_what_is_not_the_whole_card_has_no_peak(device):
    assert peak_flops(device, "bf16") is None


def test_precisions_are_told_apart():
    assert peak_flops("Tesla V100-SXM2-32GB", "bf16") is None
    assert peak_flops("Tesla V100-SXM2-32GB", "fp16") == 125e12
    assert peak_flops("Tesla V100-SXM2-32GB", "fp32", tf32=True) == 15.7e12
    assert peak_flops("AMD Instinct MI100", "bf16") == peak_flops("AMD Instinct MI100", "fp16") / 2
    assert peak_flops("NVIDIA A100-SXM4-80GB", "fp32") == 19.5e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", "fp32", tf32=True) == 156e12
    assert peak_flops("NVIDIA GeForce RTX 3090", "fp32", tf32=True) == 35.6e12
