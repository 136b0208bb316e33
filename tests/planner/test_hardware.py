"""Cards are found by the names that people and torch give them; what is not stated is assumed and said."""

from __future__ import annotations

import pytest

from pipeline.errors import ConfigError
from pipeline.files import GIB
from pipeline.planner.hardware import GPUS, Gpu, choose_network_rate, find_gpu, peak_flops, resolve_hardware
from pipeline.planner.timing import estimate_rates


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("h200", "H200 SXM 141GB"),
        ("a100", "A100 SXM 80GB"),
        ("A100-40GB", "A100 SXM 40GB"),
        ("a100pcie", "A100 PCIe 80GB"),
        ("4090", "RTX 4090 24GB"),
        ("rtx4090", "RTX 4090 24GB"),
        ("rtx 6000 ada", "RTX 6000 Ada 48GB"),
        ("l4", "L4 24GB"),
        ("mi300x", "MI300X 192GB"),
        # as torch names them
        ("NVIDIA A100-SXM4-80GB", "A100 SXM 80GB"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM 80GB"),
        ("NVIDIA H100 PCIe", "H100 PCIe 80GB"),
        ("NVIDIA H200", "H200 SXM 141GB"),
        ("gh200", "GH200 96GB"),
        ("NVIDIA B300 SXM6 AC", "B300 SXM 288GB"),
        ("NVIDIA L40S", "L40S 48GB"),
        ("NVIDIA GeForce RTX 3090", "RTX 3090 24GB"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000 96GB"),
        ("Tesla V100-SXM2-16GB", "V100 SXM 16GB"),
        ("AMD Instinct MI300X", "MI300X 192GB"),
    ],
)
def test_a_card_by_a_loose_name(asked, name):
    assert find_gpu(asked).name == name


def test_every_card_has_what_the_formulas_need():
    for name, gpu in GPUS.items():
        assert find_gpu(name) == gpu
        assert 0 not in (gpu.peak("fp16") or 0, gpu.bandwidth, gpu.pcie, gpu.host), name
    assert find_gpu("h100-pcie").bf16 < find_gpu("h100").bf16
    assert find_gpu("h100").memory < 80 * GIB


@pytest.mark.parametrize("asked", ["h300", "80gb", "rtx", "", "\x1b[2J"])
def test_an_unknown_card_is_one_line_with_what_to_do(asked):
    with pytest.raises(ConfigError, match=r"no such GPU is known here; .*--gpu-memory GIB") as caught:
        find_gpu(asked)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "device",
    [
        *("cpu", "NVIDIA T400", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA A100-SXM4-40GB MIG 1g.5gb"),
        *("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "NVIDIA GeForce GTX 1080", ""),
    ],
)
def test_what_is_not_the_whole_card_has_no_peak(device):
    assert peak_flops(device, "bf16") is None


@pytest.mark.parametrize(
    ("device", "precision", "tf32", "teraflops"),
    [
        ("Tesla V100-SXM2-32GB", "bf16", False, None),
        ("Tesla V100-SXM2-32GB", "fp16", False, 125),
        ("Tesla V100-SXM2-32GB", "fp32", True, 15.7),
        ("NVIDIA A100-SXM4-80GB", "fp32", False, 19.5),
        ("NVIDIA A100-SXM4-80GB", "fp32", True, 156),
        ("NVIDIA H100 NVL", "bf16", False, 835.5),
        ("NVIDIA GH200 480GB", "bf16", False, 989.5),
        ("NVIDIA A100-SXM-64GB", "bf16", False, 312),
        ("NVIDIA H800", "bf16", False, 989.5),
        ("NVIDIA H800 PCIe", "bf16", False, 756),
        ("NVIDIA H20", "bf16", False, 148),
        ("NVIDIA GB200", "bf16", False, 2500),
        ("NVIDIA GB300", "bf16", False, 2500),
        ("NVIDIA B300 SXM6 AC", "bf16", False, 2250),
        ("NVIDIA L40", "bf16", False, 181),
        ("NVIDIA A40", "bf16", False, 149.7),
    ],
)
def test_peaks_by_precision(device, precision, tf32, teraflops):
    expected = None if teraflops is None else pytest.approx(teraflops * 1e12)
    assert peak_flops(device, precision, tf32) == expected


def test_products_in_fp8_raise_the_peak():
    half, whole = (peak_flops("NVIDIA H100 80GB HBM3", "bf16", fp8_share=share) for share in (0.5, 1.0))
    assert whole == pytest.approx(2 * 989.5e12)
    assert half == pytest.approx(989.5e12 / 0.75)


def test_a_memory_alone_is_a_card_of_that_size_and_a_wrong_one_is_refused():
    assert resolve_hardware(None, 60, 8).memory == 60 * GIB
    assert resolve_hardware("h100", 60, 8).memory == 60 * GIB
    assert resolve_hardware(None, 24).host_memory == find_gpu("rtx 4090").host
    assert estimate_rates(Gpu("a GPU of 80 GiB", 80 * GIB), 1e9) is None
    for wrong in (0.0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match="--gpu-memory"):
            resolve_hardware(None, wrong)


def test_host_memory_is_assumed_by_the_machine_until_it_is_stated():
    assumed = resolve_hardware("h100", None, 8, 2)
    assert (assumed.host_memory, assumed.assumes_host) == (2048 * GIB, True)
    stated = resolve_hardware("h100", None, 8, 2, host_memory_gib=512)
    assert (stated.host_memory, stated.assumes_host) == (512 * GIB, False)


def test_a_network_is_of_a_gpu():
    gpu = find_gpu("h100")
    assert choose_network_rate(400, gpu, 8) == choose_network_rate(None, gpu, 8) == 5e10
    assert choose_network_rate(None, find_gpu("l4"), 4) == 100e9 / 8 / 4
    for wrong in (0.0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match="--network"):
            choose_network_rate(wrong, gpu, 8)
