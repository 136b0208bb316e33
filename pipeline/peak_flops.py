"""Dense peak FLOP/s of a GPU by its name, from the vendors' data sheets (without sparsity)."""

from __future__ import annotations

import re

# (words in the device's name, 16-bit tensor cores, fp32). The first match counts.
PEAKS = [
    ("B200", 2250e12, 80e12),
    ("GB200", 2500e12, 80e12),
    ("H200", 989.5e12, 67e12),
    ("GH200", 989.5e12, 67e12),
    ("H100 PCIe", 756e12, 51e12),
    ("H100 NVL", 835e12, 60e12),
    ("H100", 989.5e12, 67e12),
    ("A100", 312e12, 19.5e12),
    ("L40S", 362e12, 91.6e12),
    ("L40", 181e12, 90.5e12),
    ("L4", 121e12, 30.3e12),
    ("A10G", 70e12, 35e12),
    ("V100", 125e12, 15.7e12),
    ("T4", 65e12, 8.1e12),
    ("RTX 4090", 165.2e12, 82.6e12),
    ("RTX 3090", 71e12, 35.6e12),
]
# Older than TF32; on the others it runs at half the rate of the 16-bit formats.
WITHOUT_TF32 = ("V100", "T4")


def peak_flops(device_name: str, precision: str, tf32: bool = False) -> float | None:
    """Dense peak in FLOP/s for `fp32` (in TF32 or not), `bf16`, `fp16`; None for an unknown device."""
    for name, half, single in PEAKS:
        if re.search(rf"\b{name}\b", device_name):  # GB200 is no B200, L40 no L4
            if precision != "fp32":
                return half
            return half / 2 if tf32 and name not in WITHOUT_TF32 else single
    return None
