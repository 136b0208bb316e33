"""Estimates the seconds of a training step by part, with arithmetic from sizes and rates.

N is the number of elements of the blocks' matrices (of experts, the chosen ones), V the vocabulary, d the
width, L the number of layers, S the tokens of a document or window, n the number of ranks.

- Matrix products, PaLM (https://arxiv.org/abs/2204.02311): 6N + 6Vd FLOPs per token; 4 instead of 6 if no
  matrix is trained; 4/3 of the blocks' with full recomputation, 7/6 with selective.
- Attention, PaLM halved for the causal mask: 6LdS FLOPs per token. Its share of the peak grows with S.
- Ring of n ranks, Thakur et al. (https://web.cels.anl.gov/~thakur/papers/ijhpca-coll.pdf): an all-gather or
  reduce-scatter of B bytes takes (n - 1)/n B / rate; an all-reduce is both. Rates of links: nccl-tests
  (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md), and fitted.
- DDP, Li et al. (https://arxiv.org/abs/2006.15704): an all-reduce of the gradients beside the backward.
- ZeRO (https://arxiv.org/abs/1910.02054): a reduce-scatter of gradients (at stage 2 and 3 in each
  micro-batch), an all-gather of weights (at stage 3 in each forward and backward, beside them).
- Tensor parallelism, Megatron-LM (https://arxiv.org/abs/1909.08053): four all-reduces per layer, not hidden.
- Pipeline, Narayanan et al. (https://arxiv.org/abs/2104.04473): one micro-batch less than there are stages,
  on top, each of the stage with the most blocks.
- Sequence parallelism, Ulysses (https://arxiv.org/abs/2309.14509): eight all-to-alls per layer.

All other constants are fitted. tests/planner/published_speeds.py compares the result with published runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from pipeline.config.schema import RunConfig
from pipeline.config.settings import ResolvedSettings
from pipeline.planner.hardware import Gpu
from pipeline.planner.model import ModelSpec, ParameterSpec

TIME_TOLERANCE = 0.2
"""Share by which a time may be off in either direction. Half of the published sources that set no constant
are within it."""
DEFAULT_DOCUMENT_TOKENS = 2048
"""Length of the document that an average token is in, if rows are packed and the length is not stated."""


@dataclass(frozen=True)
class StepSpec:
    """Sizes and split of one optimizer step."""

    parameters: float
    """Number of parameters in the whole model, each counted once."""
    blocks: float
    """Number of elements, not of blocks: those of all blocks' matrices that a token is multiplied by. Of
    experts, only the chosen ones count."""
    layers: int
    """Number of blocks of the whole model."""
    hidden: int
    """Width of the hidden states."""
    length: int
    """Number of tokens in a row."""
    vocabulary: int = 0
    """Number of rows of the output layer."""
    width: int = 0
    """Number of heads times the width of a head; 0 if that is the hidden size."""
    span: int = 0
    """Number of tokens in a document, or in a sliding window if that is shorter; 0 for the whole row."""
    rows: float = 1
    """Number of rows in a micro-batch of one replica."""
    micro_batches: int = 1
    """Number of micro-batches of one replica in a step."""
    data: int = 1
    """Number of replicas. The number of GPUs is data x tensor x pipeline x sequence."""
    tensor: int = 1
    """Number of tensor-parallel ranks."""
    pipeline: int = 1
    """Number of pipeline stages."""
    sequence: int = 1
    """Number of sequence-parallel ranks."""
    stage: int = 0
    """ZeRO stage; 0 also stands for DDP."""
    recompute: float = 0.0
    """Share of the blocks' forward that is recomputed in the backward."""
    trained: float = 1.0
    """Share of `parameters` that is trained, so that its gradients are reduced."""
    weight_gradients: float = 1.0
    """Share of `blocks` whose gradients are computed; 0 with an adapter."""
    quantized: bool = False
    """Whether the frozen base is stored in 4 bits."""
    weight_bytes: float = 2
    """Bytes of an element of weights and gradients in collectives."""

    @classmethod
    def from_run(
        cls,
        model: ModelSpec,
        config: RunConfig,
        resolved: ResolvedSettings,
        document_tokens: int | None = None,
    ) -> StepSpec | None:
        """Return the step of a run; `None` if its time cannot be estimated.

        `document_tokens` is the number of tokens in an average document, or `None` if it is not stated.
        """
        dimensions = model.dimensions
        length = config.data.tokens_per_row
        if dimensions is None or length is None or find_untimed_feature(config, resolved):
            return None
        expert_share = dimensions.experts_per_token / dimensions.experts if dimensions.experts else 1.0
        matrices = [
            (p.numel * (expert_share if ".experts." in p.name else 1.0), p.trains)
            for p in model.parameters
            if _is_block_matrix(p)
        ]
        elements = sum(number for number, _ in matrices)
        trained = sum(number for number, trains in matrices if trains)
        split = resolved.split
        plan = resolved.batch_plan
        document = (document_tokens or DEFAULT_DOCUMENT_TOKENS) if packs_documents(config) else length
        return cls(
            parameters=model.numel,
            blocks=elements,
            layers=dimensions.layers,
            hidden=dimensions.hidden,
            length=length,
            vocabulary=dimensions.vocabulary,
            width=dimensions.heads * dimensions.head_dim,
            span=min(length, document, dimensions.window or length),
            rows=plan.micro_batch_size,
            micro_batches=plan.gradient_accumulation_steps,
            data=split.dp_world_size,
            tensor=split.tensor_parallel,
            pipeline=split.pipeline_stages,
            sequence=split.sequence_parallel,
            stage=split.zero_stage,
            recompute=_read_recompute_share(config),
            trained=model.trained / model.numel,
            weight_gradients=trained / elements if elements else 1.0,
            quantized=config.adapter is not None and config.adapter.quantize is not None,
            weight_bytes=2 if split.precision != "fp32" and resolved.deepspeed is not None else 4,
        )

    @property
    def gpus(self) -> int:
        """Number of GPUs."""
        return self.data * self.tensor * self.pipeline * self.sequence

    @property
    def tokens(self) -> float:
        """Number of tokens in one optimizer step."""
        return self.rows * self.length * self.micro_batches * self.data

    @property
    def attention_span(self) -> int:
        """Number of tokens that attention spans. It is causal: on average, a token sees half of them."""
        return min(self.span or self.length, self.length)

    def flops_per_token(self) -> float:
        """Return the model FLOPs of a token: 6N + 12 L d T, or 4N + 12 L d T with an adapter.

        N is the number of elements of all matrices, L that of blocks, d the width of all heads. T is
        `attention_span`, as in the estimated time; perf/mfu of a run counts the whole row.
        """
        matrices = self.blocks + self.vocabulary * self.hidden
        attention = 12 * self.layers * (self.width or self.hidden) * self.attention_span
        return (6 if self.weight_gradients else 4) * matrices + attention


def _is_block_matrix(parameter: ParameterSpec) -> bool:
    """Return whether a parameter is a matrix of a block (`model.layers.3.`), and not of an adapter."""
    in_block = any(part.isdecimal() for part in parameter.name.split("."))
    return in_block and len(parameter.shape) > 1 and "lora_" not in parameter.name


def find_untimed_feature(config: RunConfig, resolved: ResolvedSettings) -> str:
    """Return the feature of the run, `fp8` or `offloading`, that the formulas do not cover.

    No published run with these features was compared with the formulas.

    Returns:
        Empty text if the time can be estimated.
    """
    language = config.model.language_model
    if language is not None and language.fp8 != "none":
        return "fp8"
    zero = (resolved.deepspeed or {}).get("zero_optimization", {})
    sections = (zero.get(f"offload_{states}") or {} for states in ("optimizer", "param"))
    offloads = any(section.get("device", "none") != "none" for section in sections)
    return "offloading" if offloads else ""


def packs_documents(config: RunConfig) -> bool:
    """Return whether rows hold several documents, and attention does not cross between them."""
    data = config.data
    documents = data.text or data.chat or data.preferences
    return documents is not None and documents.separate_documents and documents.packing != "none"


def _read_recompute_share(config: RunConfig) -> float:
    """Return the share of the blocks' forward that is recomputed, by `model.activation_checkpointing`."""
    model = config.model.language_model
    mode = "none" if model is None else model.activation_checkpointing
    if isinstance(mode, int):  # every mode-th block recomputes
        return 1.0 / mode
    return {"none": 0.0, "selective": 0.5, "full": 1.0}[mode]


@dataclass(frozen=True)
class HardwareRates:
    """Rates and costs that a GPU and its links reach in training."""

    products: float
    """FLOP/s in matrix products."""
    attention: float
    """FLOP/s of attention over long rows; only the keys that a token sees count."""
    memory: float
    """Bytes per second of the GPU's own memory."""
    link: float
    """Bytes per second of a ring inside a node, per GPU."""
    network: float
    """Bytes per second between nodes, per GPU."""
    per_node: int
    """Number of GPUs in a node."""
    stream: float
    """Bytes moved outside of matrix products, for each hidden element of each token and layer."""
    floor: float
    """Seconds that the host needs to launch the kernels of a block's forward and backward. A block takes at
    least as long."""
    tensor_waiting: float = 1.5
    """Ratio of the time of a tensor-parallel all-reduce to the time of its bytes on the link."""


# Shares of the data sheet's peak that training reaches: (GPUs like an A100, GPUs like an H100). They were
# fitted to the rows of tests/planner/published_speeds.jsonl that are marked `fit`.
PRODUCT_SHARES = (0.75, 0.65)
ATTENTION_SHARES = (0.50, 0.27)
# Shares of a link's rate, from nccl-tests: bus bandwidth 230 of 300 GB/s on an A100, 370 of 450 on an H100.
LINK_SHARE = 0.8
PCIE_SHARE = 0.5
STREAM_BYTES = {"compiled": 164.0, "eager": 890.0}
"""Bytes moved outside of matrix products, for each hidden element of each token and layer.

Those of 16-bit values, by mode; twice as many in fp32."""
LOGIT_BYTES = 42
"""Bytes that the loss moves for each logit."""
LAUNCH_SECONDS = {"compiled": 1.6e-3, "eager": 4e-3}
"""Seconds that the host needs to launch the kernels of a block's forward and backward, by mode."""
HOOK_SECONDS = 5e-3
"""Seconds per block that DeepSpeed's hooks on every module add on the host at ZeRO 3."""
HALF_NETWORK_NODES = 200
"""Number of nodes at which a ring has half of the network's rate."""
HALF_ATTENTION_TOKENS = 770
"""Value of `StepSpec.attention_span` at which attention reaches half of its rate."""
H100_LIKE_NAMES = ("H100", "H20", "H800", "GH200", "B200", "B300", "GB", "MI3")
"""Beginnings of the names of GPUs to which the second of the shares above applies."""
FULL_DISTURBANCE_RATE = 3e11
"""Bytes per second of a collective that slows the concurrent computation by as much time as it hides. Slower
collectives disturb it less."""
OPTIMIZER_BYTES = 30
"""Bytes per parameter that the optimizer's step moves. In fp32 it reads weight, gradient and two moments, and
writes weight and moments; in bf16 it writes the weight."""
ADAPTER_BYTES = 200
"""Bytes per hidden element, token and layer that an adapter of all linear layers moves."""
DEQUANTIZE_BYTES = 16
"""Bytes per parameter and pass that dequantizing a base in 4 bits moves."""


def estimate_rates(
    gpu: Gpu,
    network: float,
    per_node: int = 8,
    compiled: bool = True,
    precision: str = "bf16",
    tf32: bool = False,
) -> HardwareRates | None:
    """Return the rates that a GPU reaches; `None` if its peak or its memory bandwidth is not known.

    Args:
        gpu: GPU by its data sheet.
        network: Bytes per second that one GPU can send to other nodes.
        per_node: Number of GPUs in a node.
        compiled: Whether blocks are compiled.
        precision: Precision of matrix products: `bf16`, `fp16` or `fp32`.
        tf32: Whether products of fp32 matrices are computed in TF32.
    """
    peak = gpu.peak(precision, tf32)
    if peak is None or not gpu.bandwidth:
        return None
    generation = int(gpu.name.startswith(H100_LIKE_NAMES))  # index of the shares
    mode = "compiled" if compiled else "eager"
    width_factor = 2 if precision == "fp32" else 1  # STREAM_BYTES are for 16-bit values
    return HardwareRates(
        products=PRODUCT_SHARES[generation] * peak,
        attention=ATTENTION_SHARES[generation] * peak,
        memory=gpu.bandwidth,
        link=gpu.nvlink * LINK_SHARE or gpu.pcie * PCIE_SHARE,
        network=network,
        per_node=per_node,
        stream=STREAM_BYTES[mode] * width_factor,
        floor=LAUNCH_SECONDS[mode],
    )


@dataclass(frozen=True)
class StepTime:
    """Estimated time of one optimizer step."""

    parts: dict[str, float]
    """Seconds by name of the part: computation, and communication that no computation hides."""
    tokens: float
    """Number of tokens in the step, on all GPUs."""
    gpus: int
    """Number of GPUs."""
    model_flops: float
    """Model FLOPs of the step, on all GPUs."""

    @property
    def seconds(self) -> float:
        """Sum of the parts."""
        return sum(self.parts.values())

    @property
    def tokens_per_second(self) -> float:
        """Throughput of all GPUs together."""
        return self.tokens / self.seconds

    def mfu(self, peak: float) -> float:
        """Return the model FLOPs utilisation. `peak` is one GPU's peak in FLOP/s."""
        return self.model_flops / self.gpus / self.seconds / peak


def estimate_step_time(job: StepSpec, rates: HardwareRates) -> StepTime:
    """Return the time of one optimizer step on all GPUs."""
    tokens = job.rows * job.length / job.sequence
    parts = _time_computation(job, rates, tokens)
    computing = sum(parts.values())  # seconds of one micro-batch; `waiting` is for its communication
    # Megatron-LM's tensor parallelism: four all-reduces per layer, two in the forward and two in the
    # backward, which no computation hides.
    layers = max(1, job.layers // job.pipeline)
    passes = 2 + job.recompute
    activation = tokens * job.hidden * job.weight_bytes
    reduce_seconds = estimate_ring_seconds(activation, job.tensor, 1, rates)
    waiting = 4 * passes * layers * reduce_seconds * rates.tensor_waiting
    # Ulysses' sequence parallelism: all-to-alls of queries, keys, values, outputs in forward and backward.
    gather_seconds = estimate_ring_seconds(activation, job.sequence, job.tensor, rates)
    waiting += 4 * passes * layers * gather_seconds / job.sequence
    if job.pipeline > 1:
        waiting += 2 * activation / min(rates.link, rates.network)
    parts = {name: job.micro_batches * seconds for name, seconds in parts.items()} | {
        "waiting for weights and gradients": _time_data_parallel(job, rates, computing),
        "waiting inside of a replica": job.micro_batches * waiting,
        "bubble of the stages": (job.pipeline - 1) * (computing + waiting),
        "optimizer": _time_optimizer(job, rates),
    }
    return StepTime(parts, job.tokens, job.gpus, job.tokens * job.flops_per_token())


def _time_computation(job: StepSpec, rates: HardwareRates, tokens: float) -> dict[str, float]:
    """Return the seconds that a micro-batch computes, by part, on a GPU of the stage with the most blocks."""
    blocks = ceil(job.layers / job.pipeline)
    share = blocks / job.layers / job.tensor
    passes = (3 + job.recompute) / 3
    # In units of a forward's products: the forward, gradients of inputs, gradients of weights, recomputation.
    units = 2 + job.weight_gradients + job.recompute
    width = (job.width or job.hidden) / job.tensor
    attention_rate = rates.attention * job.attention_span / (job.attention_span + HALF_ATTENTION_TOKENS)
    stream = rates.stream
    if job.trained and not job.weight_gradients:
        stream += ADAPTER_BYTES
    # Norms and residuals, half of the bytes, are computed on every tensor-parallel rank.
    moved = job.hidden * tokens * passes * stream * (1 + 1 / job.tensor) / 2 * blocks
    if job.quantized:
        moved += DEQUANTIZE_BYTES * job.blocks * share * (2 + job.recompute)
    output_layer = (6 if job.weight_gradients else 4) * job.vocabulary * job.hidden / rates.products
    output_layer += job.vocabulary * LOGIT_BYTES / rates.memory
    found = {
        "matrix products": 2 * job.blocks * share * tokens * units / rates.products,
        "attention": 6 * blocks * width * job.attention_span * tokens * passes / attention_rate,
        "between the products": moved / rates.memory,
        "output layer and loss": output_layer * tokens / job.tensor / job.pipeline,
    }
    launch_seconds = blocks * passes * (rates.floor + (HOOK_SECONDS if job.stage == 3 else 0.0))
    found["waiting for the host to launch"] = max(0.0, launch_seconds - sum(found.values()))
    return found


def estimate_ring_seconds(num_bytes: float, ranks: int, inner: int, rates: HardwareRates) -> float:
    """Return the seconds of an all-gather or a reduce-scatter; an all-reduce takes both.

    Args:
        num_bytes: Bytes of the whole tensor.
        ranks: Number of ranks in the process group.
        inner: Distance between neighbours of the group in global ranks, such as the tensor-parallel degree.
        rates: Rates of the GPU and its links.
    """
    return (ranks - 1) / ranks * num_bytes / _compute_ring_rate(ranks, inner, rates)


def _compute_ring_rate(ranks: int, inner: int, rates: HardwareRates) -> float:
    """Return the bytes per second of a ring, per GPU. The arguments are those of `estimate_ring_seconds`."""
    on_node = max(1, min(ranks, rates.per_node // inner))
    nodes = ceil(ranks / on_node)
    if nodes == 1:
        return rates.link
    return min(rates.link, on_node * rates.network) / (1 + nodes / HALF_NETWORK_NODES)


def compute_exposed_seconds(transfer: float, beside: float, disturbance: float) -> float:
    """Return the seconds by which a transfer lengthens `beside` seconds of concurrent computation.

    Args:
        transfer: Seconds that the transfer takes.
        beside: Seconds of computation that could hide it.
        disturbance: Slowdown of the computation, as a share of the seconds that it hides.
    """
    return transfer - (1 - disturbance) * min(transfer, beside)


def _time_data_parallel(job: StepSpec, rates: HardwareRates, computing: float) -> float:
    """Return the seconds that a step waits for weights and gradients of data- and sequence-parallel ranks.

    Args:
        job: Sizes and split of the step.
        rates: Rates of the GPU and its links.
        computing: Seconds that a micro-batch computes, which can hide the communication.
    """
    units = 3 + job.recompute
    forward, backward = (computing * share / units for share in (1, units - 1))
    ranks = job.data * job.sequence
    kept = job.parameters / job.tensor / job.pipeline
    # A slow link disturbs the computation for longer, but less at a time.
    disturbance = min(1.0, _compute_ring_rate(ranks, job.tensor, rates) / FULL_DISTURBANCE_RATE) ** 0.5
    reduced = estimate_ring_seconds(kept * job.trained * job.weight_bytes, ranks, job.tensor, rates)
    gathered = estimate_ring_seconds(kept * job.weight_bytes, ranks, job.tensor, rates)
    if job.stage == 0:
        return compute_exposed_seconds(2 * reduced, backward, disturbance)
    if job.stage < 3:
        times = job.micro_batches if job.stage == 2 else 1
        return times * compute_exposed_seconds(reduced, backward, disturbance) + gathered * job.trained
    waits = compute_exposed_seconds(gathered, forward, disturbance)
    return job.micro_batches * (waits + compute_exposed_seconds(gathered + reduced, backward, disturbance))


def _time_optimizer(job: StepSpec, rates: HardwareRates) -> float:
    """Return the seconds of the optimizer's step."""
    kept = job.parameters / job.tensor / job.pipeline
    shard = kept / (job.data * job.sequence) if job.stage else kept
    return shard * job.trained * OPTIMIZER_BYTES / rates.memory
