"""Lists GPUs by their data sheets, and describes the hardware of a plan: devices, machines and network."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
from contextlib import suppress
from dataclasses import dataclass, replace

from pipeline.config.split import Device
from pipeline.distributed.machine import read_memory_usage
from pipeline.errors import ConfigError
from pipeline.files import GIB, MIB


@dataclass(frozen=True)
class Gpu:
    """Speeds and memory of one device of torch.

    A speed is 0 if it is unknown, or if the GPU has no such part.
    """

    name: str
    """Name in the list of data sheets, such as `A100 SXM 80GB`; torch's or the driver's if not listed."""
    memory: int
    """Bytes of memory in total.

    In the list by `torch.cuda.mem_get_info`, which is less than the data sheet says; otherwise by the driver,
    or as given.
    """
    bf16: float = 0.0
    """Dense peak in FLOP/s; 0 if the GPU has no units for it."""
    fp16: float = 0.0
    """Dense peak in FLOP/s."""
    tf32: float = 0.0
    """Dense peak in FLOP/s; 0 if the GPU has no units for it."""
    fp32: float = 0.0
    """Dense peak in FLOP/s, without TF32."""
    bandwidth: float = 0.0
    """Bytes per second of the GPU's memory."""
    pcie: float = 0.0
    """Bytes per second to its host, in one direction."""
    nvlink: float = 0.0
    """Bytes per second to the other GPUs of its node, in one direction; 0 if these are reached over PCIe."""
    network: float = 0.0
    """Bytes per second of the network card that the vendor's nodes have for each GPU."""
    host: int = 0
    """Bytes of host memory for each GPU in machines with this GPU."""

    def peak(self, precision: str, tf32: bool = False) -> float | None:
        """Return the dense peak in FLOP/s for `fp32` (or TF32), `bf16` or `fp16`.

        `None` if it is unknown, or if the GPU has no units for it.
        """
        single = self.tf32 if tf32 and self.tf32 else self.fp32
        return {"bf16": self.bf16, "fp16": self.fp16, "fp32": single}[precision] or None


# Numbers of vendors' data sheets; memory as torch reports it. An incomplete name selects the first fit.
# name | GiB | TFLOP/s bf16, fp16, TF32, fp32 | GB/s memory | GB/s PCIe or chip to chip | GB/s NVLink
#      | Gbit/s of the network card per GPU | GiB of host memory per GPU in machines that are rented or sold
_SHEETS = """
H100 SXM 80GB       | 79.1   | 989.5 989.5 494.7 67     | 3350 | 64  | 450 | 400 | 256
H100 PCIe 80GB      | 79.1   | 756 756 378 51           | 2039 | 64  | 0   | 200 | 128
H100 NVL 94GB       | 93.1   | 835.5 835.5 417.5 60     | 3938 | 64  | 0   | 200 | 128
H200 SXM 141GB      | 139.8  | 989.5 989.5 494.7 67     | 4800 | 64  | 450 | 400 | 256
H200 NVL 141GB      | 139.8  | 835.5 835.5 417.5 60     | 4800 | 64  | 0   | 200 | 256
B200 180GB          | 178.35 | 2250 2250 1125 75        | 8000 | 64  | 900 | 400 | 256
A100 SXM 80GB       | 79.15  | 312 312 156 19.5         | 2039 | 32  | 300 | 200 | 128
A100 PCIe 80GB      | 79.15  | 312 312 156 19.5         | 1935 | 32  | 0   | 100 | 128
A100 SXM 40GB       | 39.4   | 312 312 156 19.5         | 1555 | 32  | 300 | 200 | 128
A100 PCIe 40GB      | 39.4   | 312 312 156 19.5         | 1555 | 32  | 0   | 100 | 85
L40S 48GB           | 44.4   | 362 362 183 91.6         | 864  | 32  | 0   | 0   | 128
RTX 4090 24GB       | 23.52  | 165.2 165.2 82.6 82.6    | 1008 | 32  | 0   | 0   | 64
RTX 3090 24GB       | 23.57  | 71.2 71.2 35.6 35.6      | 936  | 32  | 0   | 0   | 64
A10G 24GB           | 22.05  | 70 70 35 31.5            | 600  | 32  | 0   | 0   | 48
A10 24GB            | 22.05  | 125 125 62.5 31.2        | 600  | 32  | 0   | 0   | 64
L4 24GB             | 22.0   | 121 121 60 30.3          | 300  | 32  | 0   | 0   | 48
RTX 5090 32GB       | 31.36  | 209.6 209.6 104.8 104.8  | 1792 | 64  | 0   | 0   | 64
RTX PRO 6000 96GB   | 94.97  | 503.8 503.8 251.9 126    | 1792 | 64  | 0   | 0   | 128
RTX 6000 Ada 48GB   | 47.4   | 364.2 364.2 182.1 91.1   | 960  | 32  | 0   | 0   | 64
RTX A6000 48GB      | 47.4   | 154.8 154.8 77.4 38.7    | 768  | 32  | 0   | 0   | 64
V100 SXM 32GB       | 31.73  | 0 125 0 15.7             | 900  | 16  | 150 | 100 | 96
V100 SXM 16GB       | 15.77  | 0 125 0 15.7             | 900  | 16  | 150 | 100 | 60
T4 16GB             | 14.74  | 0 65 0 8.1               | 320  | 16  | 0   | 0   | 48
MI300X 192GB        | 191.98 | 1307.4 1307.4 0 163.4    | 5300 | 64  | 448 | 400 | 256
GH200 96GB          | 94.5   | 989.5 989.5 494.7 67     | 4000 | 450 | 450 | 400 | 440
GB200 192GB         | 184.0  | 2500 2500 1250 80        | 8000 | 225 | 900 | 400 | 220
B300 SXM 288GB      | 268.2  | 2250 2250 1125 75        | 8000 | 64  | 900 | 800 | 256
GB300 288GB         | 268.2  | 2500 2500 1250 80        | 8000 | 225 | 900 | 800 | 220
H800 SXM 80GB       | 79.1   | 989.5 989.5 494.7 67     | 3350 | 64  | 200 | 400 | 256
H800 PCIe 80GB      | 79.1   | 756 756 378 51           | 2039 | 64  | 0   | 200 | 128
H20 96GB            | 95.1   | 148 148 74 44            | 4000 | 64  | 450 | 400 | 256
L40 48GB            | 44.4   | 181 181 90.5 90.5        | 864  | 32  | 0   | 0   | 64
A40 48GB            | 44.4   | 149.7 149.7 74.8 37.4    | 696  | 32  | 0   | 0   | 64
"""


def _parse_sheets() -> dict[str, Gpu]:
    """Return the GPUs of the data sheets by name."""
    gpus = {}
    for line in _SHEETS.strip().splitlines():
        name, memory, peaks, *rates, network, host = (cell.strip() for cell in line.split("|"))
        bf16, fp16, tf32, fp32 = (1e12 * float(peak) for peak in peaks.split())
        bandwidth, pcie, nvlink = (1e9 * float(rate) for rate in rates)
        gpus[name] = Gpu(
            name=name,
            memory=int(float(memory) * GIB),
            bf16=bf16,
            fp16=fp16,
            tf32=tf32,
            fp32=fp32,
            bandwidth=bandwidth,
            pcie=pcie,
            nvlink=nvlink,
            network=float(network) * 1e9 / 8,
            host=int(host) * GIB,
        )
    return gpus


GPUS = _parse_sheets()
# Words of GPU names that do not distinguish two GPUs.
_IGNORED_WORDS = {
    *("nvidia", "amd", "instinct", "tesla", "geforce", "generation", "hbm2", "hbm2e", "hbm3", "hbm3e"),
    *("blackwell", "server", "workstation", "edition", "ac", "oam"),
}
# Words that many GPUs have, so that they do not select one by themselves.
_COMMON_WORDS = {"sxm", "pcie", "nvl", "rtx", "ada", "pro"}
# Names of GPUs with units for fp8.
FP8_NAMES = re.compile(r"^(H\d|GH|GB|B\d|L4|RTX (4|50|6000 Ada|PRO)|MI3)")


def _split_name(name: str) -> set[str]:
    """Return the distinctive words of a GPU's name in lower case, such as `h200`, `sxm`, `141`."""
    without_version = re.sub(r"sxm\d", "sxm", name.lower())
    separated = re.sub(r"(pcie|sxm|nvl|rtx)", r" \1 ", without_version)
    without_unit = re.sub(r"(\d+) ?gi?b\b", r"\1", separated)
    return set(re.findall(r"[a-z0-9]+", without_unit)) - _IGNORED_WORDS


def find_gpu(name: str) -> Gpu:
    """Return a GPU by an incomplete name: `h200`, `A100-40GB`, `rtx4090`, torch's `NVIDIA A100-SXM4-80GB`.

    Of several GPUs with such a name, the first in the list is returned.

    Raises:
        ConfigError: No GPU has such a name; the message has the closest names.
    """
    given_words = _split_name(name)
    for gpu in GPUS.values():
        size = gpu.name.rpartition(" ")[2].removesuffix("GB")
        selects_model = bool(given_words - _COMMON_WORDS - {size})
        if given_words <= _split_name(gpu.name) and selects_model:
            return gpu
    closest = difflib.get_close_matches(name.lower(), [listed.lower() for listed in GPUS], 3, 0.3)
    hint = f"nearest: {', '.join(closest)}" if closest else "such as h100, a100, rtx 4090"
    raise ConfigError(f"--gpu {name}: no such GPU is known here; {hint}; or give --gpu-memory GIB")


def _find_listed_gpu(name: str) -> Gpu | None:
    """Return a GPU by torch's name, even if its memory differs from the listed one (GH200 480GB).

    Returns:
        `None` if it is not listed.
    """
    without_size = re.sub(r"\d+ ?GB\b", "", name)
    for candidate in (name, without_size):
        with suppress(ConfigError):
            return find_gpu(candidate)
    return None


def peak_flops(device_name: str, precision: str, tf32: bool = False, fp8_share: float = 0.0) -> float | None:
    """Return the dense peak in FLOP/s of a device by torch's name; `None` if it is not known.

    Args:
        device_name: Name by torch.cuda.get_device_name, or `cpu`.
        precision: Precision of matrix products: `bf16`, `fp16` or `fp32`.
        tf32: Whether products of fp32 matrices are computed in TF32.
        fp8_share: Share of the FLOPs that are computed in fp8. Every GPU with fp8 has twice the rate of 16
            bits for it. The result is the rate of the mixture.
    """
    gpu = _find_listed_gpu(device_name)
    if gpu is None:
        return None
    peak = gpu.peak(precision, tf32)
    if peak is None:
        return None
    return 1 / (fp8_share / (2 * gpu.fp16) + (1 - fp8_share) / peak)


NODE_NETWORK_GBITS = 100
"""Gbit/s of a whole node's network, if the data sheet has no network card for each GPU."""


def choose_network_rate(gigabits: float | None, gpu: Gpu, per_node: int) -> float:
    """Return the bytes per second that one GPU can send to other nodes.

    Args:
        gigabits: Gbit/s of the network card of one GPU. `None` takes what the vendor's nodes have, or 100
            Gbit/s for a whole node.
        gpu: GPU by its data sheet.
        per_node: Number of GPUs in a node.

    Raises:
        ConfigError: `gigabits` is no positive number.
    """
    if gigabits is None:
        return gpu.network or NODE_NETWORK_GBITS * 1e9 / 8 / per_node
    if not 0 < gigabits < 1e6:
        raise ConfigError(f"--network {gigabits:g}: expected Gbit/s above 0")
    return gigabits * 1e9 / 8


@dataclass(frozen=True)
class PlannedHardware:
    """Devices, machines and network that a run is planned for, with the length of its documents."""

    gpu: Gpu
    """Data sheet of the GPU; if CPUs compute, a stand-in with a rank's share of the machine's memory."""
    device: Device
    """Kind of device and the precisions that it supports."""
    per_node: int
    """Number of GPUs in a machine, or of ranks if CPUs compute."""
    nodes: int
    """Number of machines."""
    network: float
    """Bytes per second that one GPU can send to other machines."""
    host_memory: int | None = None
    """Bytes of main memory in one machine; `None` if CPUs compute: then `memory` is a share of it."""
    assumes_host: bool = False
    """Whether `host_memory` is assumed to be what machines with such GPUs usually have."""
    document_tokens: int | None = None
    """Number of tokens in an average document; `None` if not stated."""

    @property
    def ranks(self) -> int:
        """Number of ranks on all machines."""
        return self.per_node * self.nodes

    @property
    def memory(self) -> int:
        """Bytes of memory for each rank."""
        return self.gpu.memory

    def __str__(self) -> str:
        machines = f" on {self.nodes} machines" if self.nodes > 1 else ""
        return f"{self.ranks} x {self.gpu.name}, {self.memory / GIB:.1f} GiB{machines}"


def resolve_hardware(
    name: str | None,
    memory_gib: float | None = None,
    per_node: int = 1,
    nodes: int = 1,
    network: float | None = None,
    host_memory_gib: float | None = None,
    document_tokens: int | None = None,
) -> PlannedHardware:
    """Return the hardware that the command line names; without a GPU's name and memory, this machine's.

    Args:
        name: Name of the GPU; `None` if the command line has none.
        memory_gib: GiB of memory of one GPU; `None` takes the listed memory, or this machine's if there is no
            name.
        per_node: Number of GPUs in a machine.
        nodes: Number of machines.
        network: Gbit/s of the network card of one GPU, see `choose_network_rate`.
        host_memory_gib: GiB of main memory in one machine; `None` takes what is usual with this GPU, or this
            machine's if `name` and `memory_gib` are `None`.
        document_tokens: Number of tokens in an average document; `None` if not stated.

    Raises:
        ConfigError: There is no such GPU, or a number is out of range.
    """
    host = None if host_memory_gib is None else _convert_gib("--host-memory", host_memory_gib)
    if name is None and memory_gib is None:
        return replace(detect_hardware(per_node, nodes, network, host), document_tokens=document_tokens)
    gpu = Gpu("GPU", 0) if name is None else find_gpu(name)
    if memory_gib is not None:
        gpu = replace(gpu, memory=_convert_gib("--gpu-memory", memory_gib))
    if name is None:  # assume the host memory of machines with GPUs of about this memory
        gpu = replace(gpu, host=min(GPUS.values(), key=lambda card: abs(card.memory - gpu.memory)).host)
    # A GPU without a name may have any precision.
    has_bf16 = name is None or gpu.bf16 > 0
    has_fp8 = name is None or FP8_NAMES.match(gpu.name) is not None
    return PlannedHardware(
        gpu=gpu,
        device=Device("cuda", bf16=has_bf16, fp16=True, fp8=has_fp8),
        per_node=per_node,
        nodes=nodes,
        network=choose_network_rate(network, gpu, per_node),
        host_memory=host or gpu.host * per_node,
        assumes_host=host is None,
        document_tokens=document_tokens,
    )


def detect_hardware(
    per_node: int, nodes: int = 1, network: float | None = None, host: int | None = None
) -> PlannedHardware:
    """Return this machine's GPUs by nvidia-smi; without either, its CPU cores shared among the ranks.

    Args:
        per_node: Number of ranks on a machine.
        nodes: Number of machines like this one.
        network: Gbit/s of the network card of one GPU, see `choose_network_rate`.
        host: Bytes of main memory in one machine; `None` reads them.
    """
    device = Device.probe()
    limit = host or read_memory_usage().limit
    queried = _query_driver() if device.kind == "cuda" else None
    if queried is not None:
        name, memory = queried
        return build_gpu_hardware(
            name, memory, device, per_node=per_node, nodes=nodes, network=network, host=limit
        )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cores = max(1, cores // per_node)
    cpu = Gpu(f"{cores} CPU core{'s' * (cores > 1)}", limit // per_node)
    return PlannedHardware(cpu, Device.cpu(), per_node, nodes, choose_network_rate(network, cpu, per_node))


def build_gpu_hardware(
    name: str,
    memory: int,
    device: Device,
    *,
    per_node: int,
    nodes: int,
    network: float | None = None,
    host: int | None = None,
) -> PlannedHardware:
    """Return the hardware of GPUs that exist here. For a GPU that is not listed, only the memory is known.

    Args:
        name: Name of the GPU by torch or its driver.
        memory: Bytes of memory of one GPU.
        device: Device by torch.
        per_node: Number of ranks on a machine.
        nodes: Number of machines.
        network: Gbit/s of the network card of one GPU, see `choose_network_rate`.
        host: Bytes of main memory in one machine; `None` reads them.
    """
    gpu = replace(_find_listed_gpu(name) or Gpu(name, memory), memory=memory)
    return PlannedHardware(
        gpu=gpu,
        device=device,
        per_node=per_node,
        nodes=nodes,
        network=choose_network_rate(network, gpu, per_node),
        host_memory=host or read_memory_usage().limit,
    )


def _query_driver() -> tuple[str, int] | None:
    """Return name and memory bytes of the first GPU, from nvidia-smi; `None` if it cannot be run."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=5, check=True).stdout
        name, mebibytes = output.splitlines()[0].rsplit(",", 1)
        return name.strip(), int(float(mebibytes) * MIB)
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def _convert_gib(option: str, gib: float) -> int:
    """Return the bytes of an option's value in GiB.

    Raises:
        ConfigError: The value is not above 0.
    """
    if not 0 < gib < 1e6:
        raise ConfigError(f"{option} {gib:g}: expected GiB above 0")
    return int(gib * GIB)
