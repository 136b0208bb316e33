"""GPUs, networks and processors by their data sheets: memory as torch counts it, FLOP/s, bandwidths, watts.

Rates are the share of these numbers that training reaches, fitted. Imports no torch.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace
from itertools import permutations

from pipeline.errors import ConfigError
from pipeline.files import GIB

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


# NCCL's own constants for the latency of a hop of a ring (src/graph/tuning.cc, protocol Simple).
LINK_LATENCY, NETWORK_LATENCY = 3.4e-6, 14e-6
# ZeRO-Offload (arXiv 2101.06840, table 4): CPU Adam of 10 billion parameters takes 2.57 s on two sockets.
HOST_ADAM = 4e9
HOP = 5e-5  # seconds of a hop between processes of one machine (benchmarks/scaling.py measures it)
NVME = 5e9  # bytes a second of a node's disks, where nothing is known of them
NEWER = ("H100", "H200", "H20", "H800", "GH200", "B200", "B300", "GB200", "GB300", "MI3")
"""First words of cards that are taken to be like an H100; others like an A100."""


@dataclass(frozen=True)
class Kernels:
    """How a stack of software computes."""

    name: str
    products: tuple[float, float]
    """Share of the dense peak in matrix products: of cards like an A100, like an H100."""
    attention: tuple[float, float]
    """The same in attention, of the keys that a token sees."""
    stream: float
    """Bytes that a GPU's memory moves between the products in forward and backward, at its data sheet's rate:
    for each element of each layer's stream of each token."""
    entries: float
    """The same for each word of the vocabulary of each token."""
    launch: float
    """Seconds that a block's forward and backward take beside that, whatever their size."""
    floor: float
    """Seconds that the host needs at least to launch them."""
    replicated: float
    """Part of the stream that every tensor rank works on."""
    waiting: float
    """Seconds of a tensor-parallel all-reduce, over those of its bytes on the link."""


@dataclass(frozen=True)
class Rates:
    """Of one GPU and of what connects it. FLOP/s, bytes a second, seconds."""

    products: float
    """FLOP/s reached in matrix products."""
    attention: float
    """FLOP/s reached in attention, of the keys that a token sees."""
    memory: float
    """Bytes a second of the GPU's own memory."""
    link: float
    """Bytes a second of a ring inside a node, per GPU (bus bandwidth)."""
    network: float
    """Bytes a second between nodes, per GPU."""
    link_latency: float = LINK_LATENCY
    """Seconds a hop of a ring inside a node."""
    network_latency: float = NETWORK_LATENCY
    per_node: int = 8
    stream: float = 0.0
    """As Kernels has this, and what follows."""
    entries: float = 0.0
    launch: float = 0.0
    floor: float = 0.0
    replicated: float = 0.0
    waiting: float = 1.0
    overlap: float = 1.0
    """Share of computation beside which collectives run: 0 where the same cores do both."""
    disturbance: float = 0.0
    """Part of the hidden seconds of a collective by which the computation beside it takes longer, where the
    ring carries `disturbing` bytes a second."""
    disturbing: float = 1.0
    straggling: float = 0.0
    """Spread of the step times of ranks: the slowest of n is sqrt(2 ln n) of these above the mean."""
    host: float = 2.5e10
    """Bytes a second to the host of one GPU."""
    host_adam: float = HOST_ADAM
    """Parameters a second that a node's processors step."""
    nvme: float = NVME
    """Bytes a second of a node's disks."""
    speed: float = 1.0
    """Of the computation, over what is predicted: what was measured on a machine corrects it."""


COMPILED = Kernels(
    name="torch, compiled blocks",
    products=(0.84, 0.775),
    attention=(0.37, 0.205),
    stream=136,
    entries=38,
    launch=1.5e-3,
    floor=1.6e-3,
    replicated=0.5,
    waiting=1.0,
)
EAGER = replace(COMPILED, name="torch, eager", stream=749, floor=4e-3)
DISTURBANCE, STRAGGLING = 0.87, 0.031
FITTED_LINKS = (2.4e11, 3.6e11)  # of the A100s and H100s that these were fitted to


def rates_of(
    gpu: Gpu,
    network: float,
    per_node: int = 8,
    kernels: Kernels = COMPILED,
    precision: str = "bf16",
    tf32: bool = False,
) -> Rates | None:
    """What this GPU reaches with these kernels; None where its peak or its memory's rate is not known.

    Args:
        network: Bytes a second between nodes of one GPU (`network_rate`).
        per_node: GPUs of a node.
        precision: Of the products: `bf16`, `fp16`, `fp32`.
        tf32: Whether those of fp32 are made in TF32.
    """
    peak = gpu.peak(precision, tf32)
    if peak is None or not gpu.bandwidth:
        return None
    if gpu.measured_flops is not None:  # of whole steps: all that stands between the products is in it
        return Rates(
            products=peak,
            attention=peak,
            memory=gpu.bandwidth,
            link=gpu.link,
            network=network,
            link_latency=HOP,
            network_latency=HOP,
            per_node=per_node,
            overlap=0.0,
        )
    like = int(gpu.name.startswith(NEWER))
    wide = 2 if precision == "fp32" else 1
    return Rates(
        products=kernels.products[like] * peak,
        attention=kernels.attention[like] * peak,
        memory=gpu.bandwidth,
        link=gpu.link,
        network=network,
        per_node=per_node,
        stream=kernels.stream * wide,
        entries=kernels.entries * wide,
        launch=kernels.launch,
        floor=kernels.floor,
        disturbance=DISTURBANCE,
        disturbing=FITTED_LINKS[like],
        straggling=STRAGGLING,
        replicated=kernels.replicated,
        waiting=kernels.waiting,
        host=gpu.host,
    )


# Of one direction of a link, what a ring of NCCL reaches (bus bandwidth of nccl-tests: 230 of 300 GB/s on an
# A100, 370 of 450 on an H100); over PCIe ranks share the host's bridges.
LINK_SHARE, PCIE_SHARE, COPY_SHARE = 0.8, 0.5, 0.8
SHARED_NETWORK = (
    100  # Gbit/s of a whole node, of cards that no maker puts into nodes with a network card each
)


@dataclass(frozen=True)
class Gpu:
    """One device as torch counts them; what is 0 is not known."""

    name: str
    memory: int
    """Bytes, `torch.cuda.mem_get_info`'s total: less than the data sheet's."""
    bandwidth: float = 0.0
    """Bytes a second of its memory."""
    pcie: float = 0.0
    """Bytes a second to its host, one way."""
    nvlink: float = 0.0
    """Bytes a second to the GPUs of its node, one way; 0: they talk over PCIe."""
    network: float = 0.0
    """Bytes a second of the network card that the maker's nodes have for each GPU."""
    watts: float = 0.0
    """The limit of the board; of a module of two devices, half."""
    measured_flops: float | None = None
    """FLOP/s that were measured on it, in place of a data sheet's."""

    def peak(self, precision: str, tf32: bool = False) -> float | None:
        """Dense peak in FLOP/s; None: not known, or it has no such units."""
        return self.measured_flops or peak_flops(self.name, precision, tf32)

    @property
    def link(self) -> float:
        """Bytes a second of a ring inside a node, per GPU."""
        return self.nvlink * LINK_SHARE or self.pcie * PCIE_SHARE

    @property
    def host(self) -> float:
        """Bytes a second of a copy to or from its host's pinned memory."""
        return self.pcie * COPY_SHARE


# Makers' data sheets; memory as torch says it (out-of-memory messages have it to two places).
# Where a name leaves the choice, the first line that it fits is meant.
# name | GiB | GB/s memory | GB/s PCIe or chip to chip | GB/s NVLink | Gbit/s network card of a GPU | W
_SHEETS = """
H100 SXM 80GB       | 79.1  | 3350 | 64  | 450 | 400 | 700
H100 PCIe 80GB      | 79.1  | 2039 | 64  | 0   | 200 | 350
H100 NVL 94GB       | 93.1  | 3938 | 64  | 0   | 200 | 400
H200 SXM 141GB      | 139.8 | 4800 | 64  | 450 | 400 | 700
H200 NVL 141GB      | 139.8 | 4800 | 64  | 0   | 200 | 600
H20 96GB            | 95.1  | 4000 | 64  | 450 | 400 | 400
H800 SXM 80GB       | 79.1  | 3350 | 64  | 200 | 400 | 700
H800 PCIe 80GB      | 79.1  | 2039 | 64  | 0   | 200 | 350
GH200 96GB          | 94.5  | 4000 | 450 | 450 | 400 | 900
B200 180GB          | 178.35| 8000 | 64  | 900 | 400 | 1000
B300 288GB          | 268.2 | 8000 | 64  | 900 | 800 | 1400
GB200 192GB         | 184.0 | 8000 | 225 | 900 | 400 | 1200
GB300 288GB         | 268.2 | 8000 | 225 | 900 | 800 | 1400
A100 SXM 80GB       | 79.15 | 2039 | 32  | 300 | 200 | 400
A100 PCIe 80GB      | 79.15 | 1935 | 32  | 0   | 100 | 300
A100 SXM 40GB       | 39.4  | 1555 | 32  | 300 | 200 | 400
A100 PCIe 40GB      | 39.4  | 1555 | 32  | 0   | 100 | 250
A800 80GB           | 79.15 | 2039 | 32  | 200 | 200 | 400
A30 24GB            | 23.5  | 933  | 32  | 0   | 0   | 165
A40 48GB            | 44.4  | 696  | 32  | 0   | 0   | 300
A10G 24GB           | 22.05 | 600  | 32  | 0   | 0   | 300
A10 24GB            | 22.05 | 600  | 32  | 0   | 0   | 150
L4 24GB             | 22.0  | 300  | 32  | 0   | 0   | 72
L40S 48GB           | 44.4  | 864  | 32  | 0   | 0   | 350
L40 48GB            | 44.4  | 864  | 32  | 0   | 0   | 300
RTX 5090 32GB       | 31.36 | 1792 | 64  | 0   | 0   | 575
RTX 5080 16GB       | 15.5  | 960  | 64  | 0   | 0   | 360
RTX 4090 24GB       | 23.52 | 1008 | 32  | 0   | 0   | 450
RTX 4080 16GB       | 15.6  | 717  | 32  | 0   | 0   | 320
RTX 4070 Ti SUPER 16GB | 15.6 | 672 | 32 | 0  | 0   | 285
RTX 3090 24GB       | 23.57 | 936  | 32  | 0   | 0   | 350
RTX 3090 Ti 24GB    | 23.57 | 1008 | 32  | 0   | 0   | 450
RTX 3080 10GB       | 9.6   | 760  | 32  | 0   | 0   | 320
RTX 3060 12GB       | 11.6  | 360  | 32  | 0   | 0   | 170
RTX PRO 6000 96GB   | 94.97 | 1792 | 64  | 0   | 0   | 600
RTX 6000 Ada 48GB   | 47.4  | 960  | 32  | 0   | 0   | 300
RTX 5000 Ada 32GB   | 31.5  | 576  | 32  | 0   | 0   | 250
RTX A6000 48GB      | 47.4  | 768  | 32  | 0   | 0   | 300
RTX A5000 24GB      | 23.5  | 768  | 32  | 0   | 0   | 230
V100 SXM 32GB       | 31.73 | 900  | 16  | 150 | 100 | 300
V100 SXM 16GB       | 15.77 | 900  | 16  | 150 | 100 | 300
V100-PCIE 16GB      | 15.77 | 900  | 16  | 0   | 0   | 250
T4 16GB             | 14.74 | 320  | 16  | 0   | 0   | 70
Quadro RTX 8000 48GB | 47.4 | 672  | 16  | 0   | 0   | 295
Quadro RTX 6000 24GB | 23.6 | 672  | 16  | 0   | 0   | 295
TITAN RTX 24GB      | 23.6  | 672  | 16  | 0   | 0   | 280
MI355X 288GB        | 287.98| 8000 | 64  | 537 | 400 | 1400
MI350X 288GB        | 287.98| 8000 | 64  | 537 | 400 | 1000
MI325X 256GB        | 255.98| 6000 | 64  | 448 | 400 | 1000
MI300X 192GB        | 191.98| 5300 | 64  | 448 | 400 | 750
MI250X 64GB         | 63.98 | 1638 | 36  | 100 | 100 | 280
MI250 64GB          | 63.98 | 1638 | 32  | 100 | 100 | 280
MI210 64GB          | 63.98 | 1638 | 32  | 0   | 0   | 300
MI100 32GB          | 31.98 | 1229 | 32  | 0   | 0   | 300
"""


def _read_sheets() -> dict[str, Gpu]:
    found = {}
    for line in _SHEETS.strip().splitlines():
        name, *numbers = (cell.strip() for cell in line.split("|"))
        gib, memory, pcie, nvlink, network, watts = map(float, numbers)
        rates = (memory * 1e9, pcie * 1e9, nvlink * 1e9, network * 1e9 / 8)
        found[name] = Gpu(name, int(gib * GIB), *rates, watts=watts)
    return found


GPUS = _read_sheets()
_NOISE = {"nvidia", "amd", "instinct", "tesla", "geforce", "generation", "accelerator", "oam", "gpu"}
_NOISE |= {"hbm2", "hbm2e", "hbm3", "hbm3e"}
_NEVER_ALONE = {"sxm", "pcie", "nvl", "rtx", "ada", "ti", "super", "pro", "quadro"}


def _words(name: str) -> list[str]:
    plain = re.sub(r"(\d+)\s*gi?b\b", r"\1", name.lower())
    plain = re.sub(r"\bsxm\d\b", "sxm", plain)
    return [word for word in re.findall(r"[a-z0-9]+", plain) if word not in _NOISE]


def find_gpu(name: str) -> Gpu:
    """A card by a loose name: `h200`, `A100-40GB`, `rtx4090`, torch's `NVIDIA A100-SXM4-80GB`.

    Raises:
        ConfigError: there is none; the message has the nearest names.
    """
    asked = "".join(_words(name))
    for gpu in GPUS.values():
        words = _words(gpu.name)
        size = next(word for word in reversed(words) if re.search(rf"\b{word}GB", gpu.name))
        for count in range(1, len(words) + 1):
            for some in permutations(words, count):
                if "".join(some) == asked and set(some) - _NEVER_ALONE - {size}:
                    return gpu
    squashed = {"".join(_words(each)): each for each in GPUS}
    squashed |= {"".join(_words(each)[:count]): each for each in GPUS for count in (1, 2)}
    near = [squashed[word] for word in difflib.get_close_matches(asked, squashed, 6, 0.5)]
    told = f"nearest: {', '.join(list(dict.fromkeys(near))[:3])}" if near else "such as h100, a100, rtx 4090"
    raise ConfigError(f"--gpu {name}: no such GPU is known here; {told}; or give --gpu-memory GIB")


def this_cpu(cores: int, memory: int) -> Gpu:
    """One rank's share of this machine's processors.

    Args:
        cores: Of the rank.
        memory: Bytes that it may take.
    """
    # 10 GB/s of memory for each rank, and as much between them: of the order of what scaling.py measures.
    return Gpu(f"{cores} CPU core{'s' * (cores > 1)}", memory, 1e10, 1e10)


NETWORK_HELP = (
    "Gbit/s between nodes of the network card that each GPU has (400: a node of 8 has 8 such cards); "
    "100/node: one card that the node's GPUs share"
)


def network_rate(text: str | None, gpu: Gpu, per_node: int) -> float:
    """Bytes a second between nodes of one GPU.

    Args:
        text: As NETWORK_HELP says; None: what the maker's nodes have for this GPU, or 100 Gbit/s a node.
        per_node: GPUs of a node.

    Raises:
        ConfigError: no positive number, alone or before `/node`.
    """
    if text is None:
        return gpu.network or SHARED_NETWORK * 1e9 / 8 / per_node
    number, slash, unit = text.strip().lower().partition("/")
    try:
        gigabits = float(number)
    except ValueError:
        gigabits = 0.0
    if not 0 < gigabits < 1e6 or (slash and unit not in ("node", "gpu")):
        raise ConfigError(f"--network {text}: give {NETWORK_HELP}")
    return gigabits * 1e9 / 8 / (per_node if unit == "node" else 1)
