"""Dense peak FLOP/s of a GPU by its name, from the makers' data sheets: without sparsity, summed in fp32.

NVIDIA: the data sheets of each product (where one states sparse figures alone, half of them), and the white
papers GA102, Ada and RTX Blackwell. AMD: the Instinct data sheets. All for one device as torch counts them.
"""

from __future__ import annotations

import re

# Words in the device's name -> bf16, fp16, TF32, fp32 in TFLOP/s; None: it has no such units.
Peaks = tuple[float | None, float, float | None, float]
PEAKS: dict[str, Peaks] = {
    "GB300": (2500, 2500, 1250, 80),
    "B300": (2250, 2250, 1125, 75),
    "GB200": (2500, 2500, 1250, 80),
    "B200": (2250, 2250, 1125, 75),
    "GH200": (989.5, 989.5, 494.7, 67),
    "H200 NVL": (835.5, 835.5, 417.5, 60),
    "H200": (989.5, 989.5, 494.7, 67),
    "H100 NVL": (835.5, 835.5, 417.5, 60),
    "H100 PCIe": (756, 756, 378, 51),
    "H100": (989.5, 989.5, 494.7, 67),
    "H800 PCIe": (756, 756, 378, 51),
    "H800": (989.5, 989.5, 494.7, 67),
    "H20": (148, 148, 74, 44),
    "A100": (312, 312, 156, 19.5),
    "A800": (312, 312, 156, 19.5),
    "A40": (149.7, 149.7, 74.8, 37.4),
    "A30": (165, 165, 82, 10.3),
    "A10G": (70, 70, 35, 31.5),
    "A10": (125, 125, 62.5, 31.2),
    "A2": (18, 18, 9, 4.5),
    "L40S": (362, 362, 183, 91.6),
    "L40": (181, 181, 90.5, 90.5),
    "L4": (121, 121, 60, 30.3),
    "RTX PRO 6000": (503.8, 503.8, 251.9, 126),
    "RTX 6000 Ada": (364.2, 364.2, 182.1, 91.1),
    "RTX 5000 Ada": (261.1, 261.1, 130.6, 65.3),
    "RTX A6000": (154.8, 154.8, 77.4, 38.7),
    "RTX A5000": (111.1, 111.1, 55.6, 27.8),
    "V100S": (None, 130, None, 16.4),
    "V100-PCIE": (None, 112, None, 14),
    "V100": (None, 125, None, 15.7),
    "T4": (None, 65, None, 8.1),
    "Quadro RTX 8000": (None, 130.5, None, 16.3),
    "Quadro RTX 6000": (None, 130.5, None, 16.3),
    "TITAN RTX": (None, 130.5, None, 16.3),
    "MI355X": (2516.6, 2516.6, None, 157.3),
    "MI350X": (2306.9, 2306.9, None, 144.2),
    "MI325X": (1307.4, 1307.4, None, 163.4),
    "MI300X": (1307.4, 1307.4, None, 163.4),
    "MI300A": (980.6, 980.6, None, 122.6),
    "MI250X": (191.5, 191.5, None, 47.9),  # a device is one die of two
    "MI250": (181, 181, None, 45.3),
    "MI210": (181, 181, None, 45.3),
    "MI100": (92.3, 184.6, None, 46.1),
}
# GeForce since Ampere, fp32 in TFLOP/s: TF32 has the same rate, 16-bit formats summed in fp32 twice that.
GEFORCE = {
    "3060": 12.7, "3060 Ti": 16.2, "3070": 20.3, "3070 Ti": 21.7, "3080": 29.8, "3080 Ti": 34.1, "3090": 35.6,
    "3090 Ti": 40.0, "4060": 15.1, "4060 Ti": 22.1, "4070": 29.1, "4070 SUPER": 35.5, "4070 Ti": 40.1,
    "4070 Ti SUPER": 44.1, "4080": 48.7, "4080 SUPER": 52.2, "4090": 82.6, "4090 D": 73.5, "5060": 19.2,
    "5060 Ti": 23.7, "5070": 30.8, "5070 Ti": 43.9, "5080": 56.3, "5090": 104.8,
}  # fmt: skip
# Other clocks and slices under the name of a whole card.
LESS_THAN_ITS_NAME = ("Laptop", "Max-Q", "MIG", "5090 D")


def find_peaks(device_name: str) -> Peaks | None:
    """The card's peaks: of the names that are whole words in the device's, the longest; None: none is."""
    known = PEAKS | {f"RTX {name}": (2 * x, 2 * x, x, x) for name, x in GEFORCE.items()}
    found = [name for name in known if _has(name, device_name)]
    if not found or any(_has(word, device_name) for word in LESS_THAN_ITS_NAME):
        return None
    return known[max(found, key=len)]


def _has(words: str, device_name: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(words)}(?!\w)", device_name) is not None


def peak_flops(device_name: str, precision: str, tf32: bool = False, fp8_share: float = 0.0) -> float | None:
    """Dense peak in FLOP/s for `fp32` (in TF32 or not), `bf16`, `fp16`; None where it is not known.

    Args:
        fp8_share: The part of the FLOPs that is multiplied in fp8, at twice the rate of 16 bits on every card
            that has it. The peak is of all together: they take that part's time and the others'.
    """
    peaks = find_peaks(device_name)
    if peaks is None:
        return None
    bf16, fp16, reduced, full = peaks
    single = reduced if tf32 and reduced is not None else full
    peak = {"bf16": bf16, "fp16": fp16, "fp32": single}[precision]
    if peak is None:
        return None
    return 1e12 / (fp8_share / (2 * fp16) + (1 - fp8_share) / peak)
