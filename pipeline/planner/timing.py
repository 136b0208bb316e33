"""Seconds of a training step by part: arithmetic from sizes and rates.

docs/performance.md has the formulas with their sources; tests/planner/published_speeds.py compares them
with published runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from pipeline.config.schema import RunConfig
from pipeline.config.settings import ResolvedSettings
from pipeline.planner.hardware import Gpu
from pipeline.planner.model import ModelSpec, ParameterSpec

TIME_TOLERANCE = 0.2
"""Share by which a time may be off, up and down: half of the sources that set no constant are within it."""
DEFAULT_DOCUMENT_TOKENS = 2048
"""Tokens of the document that a token is in, where rows are packed and nobody says more."""


@dataclass(frozen=True)
class StepSpec:
    """Sizes and split of one step."""

    parameters: float
    """Number of the whole model's parameters, each once."""
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
    """Rows of a micro-batch of one replica."""
    micro_batches: int = 1
    data: int = 1
    """Number of replicas. GPUs: data x tensor x pipeline x sequence."""
    tensor: int = 1
    pipeline: int = 1
    sequence: int = 1
    stage: int = 0
    """ZeRO stage; 0 is DDP too."""
    recompute: float = 0.0
    """Share of the blocks' forward that is computed again."""
    trained: float = 1.0
    """Share of the parameters whose gradients are reduced."""
    weight_gradients: float = 1.0
    """Share of the matrices whose gradients are computed: 0 under an adapter."""
    quantised: bool = False
    """Whether the frozen base is in 4 bits."""
    weight_bytes: float = 2
    """Bytes of a parameter, and of its gradient, in collectives."""

    @classmethod
    def from_run(
        cls,
        model: ModelSpec,
        config: RunConfig,
        resolved: ResolvedSettings,
        document_tokens: int | None = None,
    ) -> StepSpec | None:
        """Return the job of a run; `None` if its time is not known.

        Args:
            document_tokens: Tokens of an average document; `None`: not stated.
        """
        of, length = model.dimensions, config.data.tokens_per_row
        if of is None or length is None or find_untimed_feature(config, resolved):
            return None
        chosen = of.experts_per_token / of.experts if of.experts else 1.0
        matrices = [
            (p.numel * (chosen if ".experts." in p.name else 1.0), p.trains)
            for p in model.parameters
            if _multiplies(p)
        ]
        elements = sum(number for number, _ in matrices)
        trained = sum(number for number, trains in matrices if trains)
        split, plan = resolved.split, resolved.batch_plan
        document = (document_tokens or DEFAULT_DOCUMENT_TOKENS) if packs_documents(config) else length
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
            weight_bytes=2 if split.precision != "fp32" and resolved.deepspeed is not None else 4,
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
        """Return FLOPs: 6N + 12 L d T, 4N under an adapter.

        perf/mfu has the whole row for T. Here it is what a token may see, as in the time.
        """
        matrices = self.blocks + self.vocabulary * self.hidden
        attention = 12 * self.layers * (self.width or self.hidden) * self.looks_back
        return (6 if self.weight_gradients else 4) * matrices + attention


def _multiplies(parameter: ParameterSpec) -> bool:
    """Whether it is a matrix of a block (`model.layers.3.`), and not one that an adapter adds."""
    in_block = any(part.isdecimal() for part in parameter.name.split("."))
    return in_block and len(parameter.shape) > 1 and "lora_" not in parameter.name


def find_untimed_feature(config: RunConfig, resolved: ResolvedSettings) -> str:
    """Return which feature of a run has no time here, as no published run was compared; empty if none."""
    language, zero = config.model.language_model, (resolved.deepspeed or {}).get("zero_optimization", {})
    offloads = (zero.get(f"offload_{what}") or {} for what in ("optimizer", "param"))
    if language is not None and language.fp8 != "none":
        return "fp8"
    return "offloading" if any(each.get("device", "none") != "none" for each in offloads) else ""


def packs_documents(config: RunConfig) -> bool:
    """Return whether rows hold several documents that do not see each other."""
    data = config.data
    documents = data.text or data.chat or data.preferences
    return documents is not None and documents.separate_documents and documents.packing != "none"


def _recomputed(config: RunConfig) -> float:
    model = config.model.language_model
    how = "none" if model is None else model.activation_checkpointing
    return {"none": 0.0, "selective": 0.5, "full": 1.0}[how] if isinstance(how, str) else 1.0 / how


@dataclass(frozen=True)
class HardwareRates:
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
LINK_SHARE, PCIE_SHARE = 0.8, 0.5
STREAM = {"compiled": 164.0, "eager": 890.0}
ENTRIES = 42
"""Bytes moved for each word of the vocabulary of each token."""
FLOOR = {"compiled": 1.6e-3, "eager": 4e-3}
HOOKS = 5e-3
"""Seconds more of the host a block at ZeRO 3, whose hooks stand on every module."""
HALF_NETWORK = 200
"""Nodes between which a ring has half of the network's rate."""
HALF_RATE = 770
"""Tokens over which attention reaches half of its rate."""
LIKE_H100 = ("H100", "H20", "H800", "GH200", "B200", "B300", "GB", "MI3")
NVLINK = 3e11
"""Bytes a second at which a collective takes from the computation beside it all that it hides."""
OPTIMIZER_BYTES = 30
"""Of a parameter: weight, moments and gradient in fp32 read, three written, bf16 written."""
ADAPTER_BYTES = 200
"""Of a layer's element of the stream and token, for low-rank matrices beside each linear layer."""
DEQUANTISE_BYTES = 16
"""Of a parameter and pass, of a base in 4 bits."""


def estimate_rates(
    gpu: Gpu,
    network: float,
    per_node: int = 8,
    compiled: bool = True,
    precision: str = "bf16",
    tf32: bool = False,
) -> HardwareRates | None:
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
    return HardwareRates(
        products=PRODUCTS[like] * peak,
        attention=ATTENTION[like] * peak,
        memory=gpu.bandwidth,
        link=gpu.nvlink * LINK_SHARE or gpu.pcie * PCIE_SHARE,
        network=network,
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


def estimate_step_time(job: StepSpec, rates: HardwareRates) -> StepTime:
    """Return the time of one optimizer step of all GPUs."""
    tokens = job.rows * job.length / job.sequence
    parts = _compute(job, rates, tokens)
    once = sum(parts.values())
    # Four all-reduces a layer and pass, two each way (Megatron-LM), with nothing to do meanwhile.
    layers, passes = max(1, job.layers // job.pipeline), 2 + job.recompute
    activation = tokens * job.hidden * job.weight_bytes
    cut = 4 * passes * layers * estimate_ring_seconds(activation, job.tensor, 1, rates) * rates.tensor_waiting
    # Ulysses: queries, keys, values and outputs change hands, each way.
    cut += (
        4
        * passes
        * layers
        * estimate_ring_seconds(activation, job.sequence, job.tensor, rates)
        / job.sequence
    )
    if job.pipeline > 1:
        cut += 2 * activation / min(rates.link, rates.network)
    parts = {name: job.micro_batches * seconds for name, seconds in parts.items()} | {
        "waiting for weights and gradients": _data(job, rates, once),
        "waiting inside of a replica": job.micro_batches * cut,
        "bubble of the stages": (job.pipeline - 1) * (once + cut),
        "optimizer": _update(job, rates),
    }
    return StepTime(parts, job.tokens, job.gpus, job.tokens * job.flops_per_token())


def _compute(job: StepSpec, rates: HardwareRates, tokens: float) -> dict[str, float]:
    """Return seconds of one micro-batch on a GPU of the stage with the most blocks."""
    blocks = ceil(job.layers / job.pipeline)
    share = blocks / job.layers / job.tensor
    passes = (3 + job.recompute) / 3
    units = 2 + job.weight_gradients + job.recompute  # a forward's products: again for inputs, for weights
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
        "matrix products": 2 * job.blocks * share * tokens * units / rates.products,
        "attention": 6 * blocks * width * job.looks_back * tokens * passes / speed,
        "between the products": moved / rates.memory,
        "output layer and loss": head * tokens / job.tensor / job.pipeline,
    }
    floor = rates.floor + (HOOKS if job.stage == 3 else 0.0)
    launched = blocks * floor * passes
    found["waiting for the host to launch"] = max(0.0, launched - sum(found.values()))
    return found


def estimate_ring_seconds(num_bytes: float, ranks: int, inner: int, rates: HardwareRates) -> float:
    """Return seconds of an all-gather or a reduce-scatter (an all-reduce is both).

    Args:
        num_bytes: Of the whole tensor.
        ranks: Of the group.
        inner: GPUs between two of them, such as tensor ranks.
    """
    return (ranks - 1) / ranks * num_bytes / _ring_rate(ranks, inner, rates)


def _ring_rate(ranks: int, inner: int, rates: HardwareRates) -> float:
    on_node = max(1, min(ranks, rates.per_node // inner))
    nodes = ceil(ranks / on_node)
    if nodes == 1:
        return rates.link
    return min(rates.link, on_node * rates.network) / (1 + nodes / HALF_NETWORK)


def compute_exposed_seconds(transfer: float, beside: float, disturbance: float) -> float:
    """Return the seconds of a transfer that `beside` seconds of computation do not hide.

    Args:
        disturbance: Share of the hidden seconds by which the computation beside them takes longer.
    """
    return transfer - (1 - disturbance) * min(transfer, beside)


def _data(job: StepSpec, rates: HardwareRates, once: float) -> float:
    """Return seconds a step waits for weights and gradients of the data-parallel (and sequence) ranks."""
    units = 3 + job.recompute
    forward, backward = (once * share / units for share in (1, units - 1))
    ranks = job.data * job.sequence
    kept = job.parameters / job.tensor / job.pipeline
    # A slow link disturbs longer, but less.
    disturbance = min(1.0, _ring_rate(ranks, job.tensor, rates) / NVLINK) ** 0.5
    reduced = estimate_ring_seconds(kept * job.trained * job.weight_bytes, ranks, job.tensor, rates)
    gathered = estimate_ring_seconds(kept * job.weight_bytes, ranks, job.tensor, rates)
    if job.stage == 0:
        return compute_exposed_seconds(2 * reduced, backward, disturbance)
    if job.stage < 3:
        times = job.micro_batches if job.stage == 2 else 1
        return times * compute_exposed_seconds(reduced, backward, disturbance) + gathered * job.trained
    waits = compute_exposed_seconds(gathered, forward, disturbance)
    return job.micro_batches * (waits + compute_exposed_seconds(gathered + reduced, backward, disturbance))


def _update(job: StepSpec, rates: HardwareRates) -> float:
    """Return seconds of the optimizer's step."""
    kept = job.parameters / job.tensor / job.pipeline
    shard = kept / (job.data * job.sequence) if job.stage else kept
    return shard * job.trained * OPTIMIZER_BYTES / rates.memory
