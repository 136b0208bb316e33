"""Seconds of a training step by part: arithmetic from sizes and rates.

docs/performance.md has the formulas with their sources; benchmarks/published.py holds them to runs of others.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any

from pipeline.config.loading import get_dotted
from pipeline.config.schema import RunConfig
from pipeline.config.settings import Resolved
from pipeline.planner.hardware import Gpu
from pipeline.planner.model import Dimensions, Model, Parameter

RANGE = 0.2
"""Share by which a time may be off, up and down: half of the sources that set no constant are within it."""
DOCUMENT = 2048
"""Tokens of the document that a token is in, where rows are packed and nobody says more."""


@dataclass(frozen=True)
class Job:
    """One step's work. `dataclasses.replace` a field and ask again."""

    parameters: float
    """Number of the whole model's, each once."""
    blocks: float
    """Elements of the blocks' matrices that a token is multiplied by: of experts those chosen."""
    layers: int
    hidden: int
    length: int
    """Tokens of a row."""
    vocabulary: int = 0
    width: int = 0
    """Heads times their width; 0: the hidden size."""
    span: int = 0
    """Tokens of a document, or of a window that is shorter; 0: the row."""
    rows: float = 1
    """Of a micro-batch of one replica."""
    micro_batches: int = 1
    data: int = 1
    """Replicas. GPUs: data x tensor x pipeline x sequence."""
    tensor: int = 1
    pipeline: int = 1
    sequence: int = 1
    stage: int = 0
    """ZeRO's; 0 is DDP too."""
    recompute: float = 0.0
    """Share of the blocks' forward that is computed again."""
    trained: float = 1.0
    """Share of the parameters whose gradients are reduced."""
    weight_gradients: float = 1.0
    """Share of the matrices whose gradients are made: 0 under an adapter."""
    quantised: bool = False
    """The frozen base is held in 4 bits."""
    fp8: float = 0.0
    """Share of the blocks' products that is multiplied in fp8."""
    weight_bytes: float = 2
    """Of a parameter and its gradient, as they are sent."""
    optimizer_on: str = ""
    """Where its states are: `cpu`, `nvme`; empty: on the GPU."""
    offloaded: float = 1.0
    """Share of the optimizer that is there."""
    weights_on: str = ""
    """Where stage 3 keeps them: `cpu`, `nvme`."""

    @classmethod
    def of(
        cls, model: Model, config: RunConfig, resolved: Resolved, document_tokens: int | None = None
    ) -> Job | None:
        """Return the job of a run; `None` if its model's blocks or its rows are not known.

        Args:
            document_tokens: Tokens of the document that a token is in; `None`: nobody knows.
        """
        of, length = model.dimensions, config.data.tokens_per_row
        if of is None or length is None:
            return None
        matrices = [p for p in model.parameters if _multiplies(p)]
        elements = sum(_active(p, of) for p in matrices)
        trained = sum(_active(p, of) for p in matrices if p.trains)
        split, plan, language = resolved.split, resolved.plan, config.model.language_model
        fp8 = "none" if language is None else language.fp8
        width = 2 if split.precision != "fp32" and resolved.deepspeed is not None else 4
        document = (document_tokens or DOCUMENT) if packs(config) else length
        return cls(
            parameters=model.numel,
            blocks=elements,
            layers=of.layers,
            hidden=of.hidden,
            length=length,
            vocabulary=of.vocabulary,
            width=of.heads * of.head_dim,
            span=min(length, document, of.window or length),
            rows=plan.micro_batch_size,
            micro_batches=plan.gradient_accumulation_steps,
            data=split.dp_world_size,
            tensor=split.tensor_parallel,
            pipeline=split.pipeline_stages,
            sequence=split.sequence_parallel,
            stage=split.zero_stage,
            recompute=_recomputed(config),
            trained=model.trained / model.numel,
            weight_gradients=trained / elements if elements else 1.0,
            quantised=config.adapter is not None and config.adapter.quantize is not None,
            fp8=0.0 if fp8 == "none" else 2 / 3 if fp8 == "rowwise_with_gw_hp" else 1.0,
            weight_bytes=width,
            optimizer_on=_where(resolved, "optimizer"),
            offloaded=_of_zero(resolved, "offload_optimizer.ratio", 1.0),
            weights_on=_where(resolved, "param"),
        )

    @property
    def gpus(self) -> int:
        """Number of GPUs."""
        return self.data * self.tensor * self.pipeline * self.sequence

    @property
    def tokens(self) -> float:
        """Tokens of one optimizer step."""
        return self.rows * self.length * self.micro_batches * self.data

    @property
    def looks_back(self) -> int:
        """Tokens of which attention sees half on average."""
        return min(self.span or self.length, self.length)

    def flops_per_token(self) -> float:
        """Return FLOPs as perf/mfu counts them: 6N + 12 L d T over the whole row, 4N under an adapter."""
        matrices = self.blocks + self.vocabulary * self.hidden
        attention = 12 * self.layers * (self.width or self.hidden) * self.length
        return (6 if self.weight_gradients else 4) * matrices + attention


def _multiplies(parameter: Parameter) -> bool:
    """Whether it is a matrix of a block (`model.layers.3.`), and not one that an adapter adds."""
    in_block = any(part.isdecimal() for part in parameter.name.split("."))
    return in_block and len(parameter.shape) > 1 and "lora_" not in parameter.name


def _active(parameter: Parameter, of: Dimensions) -> float:
    chosen = of.experts_per_token / of.experts if of.experts and ".experts." in parameter.name else 1.0
    return parameter.numel * chosen


def packs(config: RunConfig) -> bool:
    """Return whether rows hold several documents that do not see each other."""
    data = config.data
    documents = data.text or data.chat or data.preferences
    return documents is not None and documents.separate_documents and documents.packing != "none"


def _recomputed(config: RunConfig) -> float:
    model = config.model.language_model
    how = "none" if model is None else model.activation_checkpointing
    return {"none": 0.0, "selective": 0.5, "full": 1.0}[how] if isinstance(how, str) else 1.0 / how


def _of_zero(resolved: Resolved, key: str, default: Any) -> Any:
    found = get_dotted(resolved.deepspeed or {}, f"zero_optimization.{key}")
    return default if found is None else found


def _where(resolved: Resolved, what: str) -> str:
    device = _of_zero(resolved, f"offload_{what}.device", "none")
    return "" if device == "none" else str(device)


@dataclass(frozen=True)
class Rates:
    """What a GPU and what connects it reach in training. FLOP/s, bytes a second, seconds."""

    products: float
    """FLOP/s in matrix products."""
    attention: float
    """FLOP/s in attention over long rows, of the keys that a token sees."""
    memory: float
    """Bytes a second of the GPU's own memory."""
    link: float
    """Bytes a second of a ring inside a node, per GPU."""
    network: float
    """Bytes a second between nodes, per GPU."""
    host: float
    """Bytes a second of a copy to the host."""
    per_node: int
    stream: float
    """Bytes moved between the products for each element of each layer's stream of each token."""
    floor: float
    """Seconds that the host needs at least to launch a block's forward and backward."""
    tensor_waiting: float = 1.5
    """Seconds of a tensor-parallel all-reduce over those of its bytes on the link."""


# Shares of the data sheet, of cards like an A100 and like an H100: set by the rows of published_speeds.jsonl
# that are marked `fit`. Links: nccl-tests (bus bandwidth 230 of 300 GB/s on an A100, 370 of 450 on an H100).
PRODUCTS, ATTENTION = (0.75, 0.65), (0.50, 0.27)
LINK_SHARE, PCIE_SHARE, COPY_SHARE = 0.8, 0.5, 0.8
STREAM = {"compiled": 164.0, "eager": 890.0}
ENTRIES = 42
"""Bytes moved for each word of the vocabulary of each token."""
FLOOR = {"compiled": 1.6e-3, "eager": 4e-3}
HOOKS = 5e-3
"""Seconds more of the host a block at ZeRO 3, whose hooks stand on every module."""
HALF_RATE = 770
"""Tokens over which attention reaches half of its rate."""
LIKE_H100 = ("H100", "H20", "H800", "GH200", "B200", "B300", "GB", "MI3")
HALF_NETWORK = 200
"""Nodes between which a ring has half of the network's rate."""
NVLINK = 3e11
"""Bytes a second at which a collective takes from the computation beside it all that it hides."""
OPTIMIZER_BYTES = 30
"""Of a parameter: weight, moments and gradient in fp32 read, three written, bf16 written."""
ADAPTER_BYTES = 200
"""Of a layer's element of the stream and token, for low-rank matrices beside each linear layer."""
DEQUANTISE_BYTES = 16
"""Of a parameter and pass, of a base in 4 bits."""
FP8_GAIN = 1.7
HOST_ADAM = 4e9
"""Parameters a second that a node's processors step (ZeRO-Offload, arXiv 2101.06840, table 4)."""
NVME = 5e9
"""Bytes a second of a node's disks."""


def rates_of(
    gpu: Gpu,
    network: float,
    per_node: int = 8,
    compiled: bool = True,
    precision: str = "bf16",
    tf32: bool = False,
) -> Rates | None:
    """Return what this GPU reaches; `None` if its peak or its memory's rate is not known.

    Args:
        network: Bytes a second between nodes of one GPU.
        per_node: GPUs of a node.
        compiled: Whether blocks are.
        precision: Of the products: `bf16`, `fp16`, `fp32`.
        tf32: Whether those of fp32 are made in TF32.
    """
    peak = gpu.peak(precision, tf32)
    if peak is None or not gpu.bandwidth:
        return None
    like, how = int(gpu.name.startswith(LIKE_H100)), "compiled" if compiled else "eager"
    wide = 2 if precision == "fp32" else 1
    return Rates(
        products=PRODUCTS[like] * peak,
        attention=ATTENTION[like] * peak,
        memory=gpu.bandwidth,
        link=gpu.nvlink * LINK_SHARE or gpu.pcie * PCIE_SHARE,
        network=network,
        host=gpu.pcie * COPY_SHARE,
        per_node=per_node,
        stream=STREAM[how] * wide,
        floor=FLOOR[how],
    )


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step."""

    parts: dict[str, float]
    """By name: what is computed, and what nothing hides."""
    tokens: float
    """Of all GPUs."""
    gpus: int
    model_flops: float

    @property
    def seconds(self) -> float:
        """The sum of the parts."""
        return sum(self.parts.values())

    @property
    def tokens_per_second(self) -> float:
        """Of all GPUs."""
        return self.tokens / self.seconds

    def mfu(self, peak: float) -> float:
        """Return model FLOPs over what the GPUs' peak (FLOP/s of one) would do in that time."""
        return self.model_flops / self.gpus / self.seconds / peak


def step_time(job: Job, rates: Rates) -> StepTime:
    """Return the time of one optimizer step of all GPUs."""
    tokens = job.rows * job.length / job.sequence
    parts = _compute(job, rates, tokens)
    once = sum(parts.values())
    # Four all-reduces a layer and pass, two each way (Megatron-LM), with nothing to do meanwhile.
    layers, passes = max(1, job.layers // job.pipeline), 2 + job.recompute
    activation = tokens * job.hidden * job.weight_bytes
    cut = 4 * passes * layers * ring(activation, job.tensor, 1, rates) * rates.tensor_waiting
    # Ulysses: queries, keys, values and outputs change hands, each way.
    cut += 4 * passes * layers * ring(activation, job.sequence, job.tensor, rates) / job.sequence
    if job.pipeline > 1:
        cut += 2 * activation / min(rates.link, rates.network)
    optimizer, moved = _update(job, rates, once)
    parts = {name: job.micro_batches * seconds for name, seconds in parts.items()} | {
        "waiting for weights and gradients": _data(job, rates, once),
        "waiting inside of a replica": job.micro_batches * cut,
        "bubble of the stages": (job.pipeline - 1) * (once + cut),
        "optimizer": optimizer,
        "to and from the host": moved,
    }
    return StepTime(parts, job.tokens, job.gpus, job.tokens * job.flops_per_token())


def _compute(job: Job, rates: Rates, tokens: float) -> dict[str, float]:
    """Return seconds of one micro-batch on a GPU of the stage with the most blocks."""
    blocks = ceil(job.layers / job.pipeline)
    share = blocks / job.layers / job.tensor
    passes = (3 + job.recompute) / 3
    units = 2 + job.weight_gradients + job.recompute  # a forward's products: again for inputs, for weights
    products = rates.products / (1 - job.fp8 + job.fp8 / FP8_GAIN)
    width = (job.width or job.hidden) / job.tensor
    speed = rates.attention * job.looks_back / (job.looks_back + HALF_RATE)
    stream = rates.stream
    if job.trained and not job.weight_gradients:
        stream += ADAPTER_BYTES
    # Norms and residuals, half of the stream, are computed on every tensor rank.
    moved = job.hidden * tokens * passes * stream * (1 + 1 / job.tensor) / 2 * blocks
    if job.quantised:
        moved += DEQUANTISE_BYTES * job.blocks * share * (2 + job.recompute)
    head = (6 if job.weight_gradients else 4) * job.vocabulary * job.hidden / rates.products
    head += job.vocabulary * ENTRIES / rates.memory
    found = {
        "matrix products": 2 * job.blocks * share * tokens * units / products,
        "attention": 6 * blocks * width * job.looks_back * tokens * passes / speed,
        "between the products": moved / rates.memory,
        "output layer and loss": head * tokens / job.tensor / job.pipeline,
    }
    floor = rates.floor + (HOOKS if rates.floor and job.stage == 3 else 0.0)
    launched = blocks * floor * passes
    found["waiting for the host to launch"] = max(0.0, launched - sum(found.values()))
    return found


def ring(num_bytes: float, ranks: int, inner: int, rates: Rates) -> float:
    """Return seconds of an all-gather or a reduce-scatter (an all-reduce is both).

    Args:
        num_bytes: Of the whole tensor.
        ranks: Of the group.
        inner: GPUs between two of them, such as tensor ranks.
    """
    return (ranks - 1) / ranks * num_bytes / _ring_rate(ranks, inner, rates)


def _ring_rate(ranks: int, inner: int, rates: Rates) -> float:
    on_node = max(1, min(ranks, rates.per_node // inner))
    nodes = ceil(ranks / on_node)
    if nodes == 1:
        return rates.link
    return min(rates.link, on_node * rates.network) / (1 + nodes / HALF_NETWORK)


def exposed(transfer: float, beside: float, pieces: int, disturbance: float = 0.0) -> float:
    """Return what of a transfer is waited for: its first piece, and what `beside` seconds do not hide.

    Args:
        disturbance: Share of the hidden seconds by which the computation beside them takes longer.
    """
    hidden = min(transfer * (1 - 1 / pieces), beside)
    return transfer - (1 - disturbance) * hidden


def _data(job: Job, rates: Rates, once: float) -> float:
    """Return seconds a step waits for weights and gradients of the data-parallel (and sequence) ranks."""
    units = 3 + job.recompute
    forward, backward = (once * share / units for share in (1, units - 1))
    ranks, layers = job.data * job.sequence, max(1, job.layers // job.pipeline)
    kept = job.parameters / job.tensor / job.pipeline
    # A slow link disturbs longer, but less.
    disturbance = min(1.0, _ring_rate(ranks, job.tensor, rates) / NVLINK) ** 0.5
    reduced = ring(kept * job.trained * job.weight_bytes, ranks, job.tensor, rates)
    gathered = ring(kept * job.weight_bytes, ranks, job.tensor, rates)
    if job.stage == 0:
        return exposed(2 * reduced, backward, layers, disturbance)
    if job.stage < 3:
        times = job.micro_batches if job.stage == 2 else 1
        return times * exposed(reduced, backward, layers, disturbance) + gathered * job.trained
    waits = exposed(gathered, forward, layers, disturbance)
    return job.micro_batches * (waits + exposed(gathered + reduced, backward, layers, disturbance))


def _update(job: Job, rates: Rates, once: float) -> tuple[float, float]:
    """Return seconds of the optimizer's step, and of what moves between GPU and host that nothing hides."""
    kept = job.parameters / job.tensor / job.pipeline
    shard = kept / (job.data * job.sequence) if job.stage else kept
    trained, on_node = shard * job.trained, min(job.gpus, rates.per_node)
    moved = 0.0
    if job.weights_on:  # each gather begins with this rank's shard, twice a micro-batch
        rate = min(rates.host, NVME / on_node) if job.weights_on == "nvme" else rates.host
        moved += job.micro_batches * max(0.0, 2 * shard * job.weight_bytes / rate - once)
    if not job.optimizer_on:
        return trained * OPTIMIZER_BYTES / rates.memory, moved
    staying = trained * (1 - job.offloaded) * OPTIMIZER_BYTES / rates.memory
    trained *= job.offloaded
    # Gradients go to the host in the backward, the weights come back after the step.
    times = job.micro_batches if job.stage >= 2 else 1
    moved += times * max(0.0, trained * job.weight_bytes / rates.host - once * 2 / 3)
    moved += trained * job.weight_bytes / rates.host
    seconds = trained * on_node / HOST_ADAM
    if job.optimizer_on == "nvme":  # weights and two moments in fp32, read and written beside the step
        seconds = max(seconds, 2 * 12 * trained * on_node / NVME)
    return seconds + staying, moved
