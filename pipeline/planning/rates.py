"""What training reaches of a GPU's data sheet: fitted to published runs (benchmarks/published_speeds.jsonl).

`python benchmarks/calibrate.py` fits most of them again; docs/performance.md has how far they lead.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pipeline.planning.hardware import Gpu

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
        return Rates(peak, peak, gpu.bandwidth, gpu.link, network, HOP, HOP, per_node, overlap=0.0)
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
