"""Cards are found by the names that people and torch give them, and what cannot be is said in one line."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline.errors import ConfigError
from pipeline.files import GIB
from pipeline.planner.hardware import GPUS, Gpu, find_gpu, network_rate, rates_of, this_cpu
from pipeline.planner.place import place_of


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("h200", "H200 SXM 141GB"),
        ("a100", "A100 SXM 80GB"),
        ("A100-40GB", "A100 SXM 40GB"),
        ("a100pcie", "A100 PCIe 80GB"),
        ("4090", "RTX 4090 24GB"),
        ("rtx 6000 ada", "RTX 6000 Ada 48GB"),
        ("l4", "L4 24GB"),
        ("mi300x", "MI300X 192GB"),
        # as torch names them
        ("NVIDIA A100-SXM4-80GB", "A100 SXM 80GB"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM 80GB"),
        ("NVIDIA H100 PCIe", "H100 PCIe 80GB"),
        ("NVIDIA GeForce RTX 3090", "RTX 3090 24GB"),
        ("Tesla V100-SXM2-16GB", "V100 SXM 16GB"),
    ],
)
def test_a_card_by_a_loose_name(asked, name):
    assert find_gpu(asked).name == name


def test_every_card_has_what_the_formulas_need():
    for name, gpu in GPUS.items():
        assert find_gpu(name) == gpu
        assert 0 not in (gpu.peak("fp16") or 0, gpu.bandwidth, gpu.link, gpu.watts), name
    pcie, sxm = find_gpu("h100-pcie"), find_gpu("h100")
    assert pcie.peak("bf16") < sxm.peak("bf16")
    assert find_gpu("h100-nvl").peak("bf16") != sxm.peak("bf16")
    assert sxm.memory < 80 * GIB


@pytest.mark.parametrize("asked", ["h300", "80gb", "rtx", "", "\x1b[2J"])
def test_an_unknown_card_is_one_line_with_what_to_do(asked):
    with pytest.raises(ConfigError, match=r"no such GPU is known here; .*--gpu-memory GIB") as caught:
        find_gpu(asked)
    assert "\n" not in str(caught.value)


def test_a_memory_alone_tells_no_times():
    assert rates_of(Gpu("a GPU of 80 GiB", 80 * GIB), 1e9) is None
    for wrong in (0.0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match="--gpu-memory"):
            place_of(None, wrong, 1, 1, None, None)


def test_a_network_is_of_a_gpu_or_of_a_node():
    gpu = find_gpu("h100")
    assert (
        network_rate("400", gpu, 8) == network_rate("3200/node", gpu, 8) == network_rate(None, gpu, 8) == 5e10
    )
    assert network_rate(None, find_gpu("l4"), 4) == 100e9 / 8 / 4
    for wrong in ("fast", "0", "-1", "nan", "400/rack"):
        with pytest.raises(ConfigError, match="--network"):
            network_rate(wrong, gpu, 8)


def test_a_cpu_has_times_where_its_rate_was_measured():
    assert rates_of(this_cpu(4, GIB), 1e9) is None
    rates = rates_of(replace(this_cpu(4, GIB), measured_flops=2e11), 1e9)
    assert (rates.products, rates.overlap) == (2e11, 0)
