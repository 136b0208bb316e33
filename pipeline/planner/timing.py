"""Work of a training step, and its seconds by part: pure arithmetic from sizes and rates.

docs/performance.md has the formulas with their sources, benchmarks/published.py holds them to runs of others.
Bytes, seconds, FLOPs; a machine's accelerators are called GPUs also where they are processes of a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, log, sqrt
from typing import Any

from pipeline.planner.hardware import Rates
from pipeline.planner.model import Dimensions, Model, Parameter


@dataclass(frozen=True)
class Job:
    """One step's work. `dataclasses.replace` a field and ask again."""

    parameters: float
    """Of the whole model, each once."""
    blocks: float
    """Elements of the blocks' matrices that one token is multiplied by: of experts, those chosen."""
    layers: int
    hidden: int
    length: int
    """Tokens of a row."""
    vocabulary: int = 0
    """Words that the output layer tells apart."""
    width: int = 0
    """Heads times their width; 0: the hidden size."""
    window: int = 0
    """Tokens that every layer's attention looks back; 0: the row."""
    rows: float = 1
    """Of a micro-batch of one replica."""
    micro_batches: int = 1
    """Of one optimizer step."""
    data: int = 1
    """Replicas. GPUs: data x tensor x pipeline x sequence."""
    tensor: int = 1
    pipeline: int = 1
    sequence: int = 1
    stage: int = 0
    """ZeRO's; 0 is DDP too."""
    hpz: bool = False
    """Stage 3 gathers weights for the backward inside of the node."""
    overlap: bool = True
    """Whether collectives of weights and gradients run beside the computation."""
    recompute: float = 0.0
    """Part of the blocks' forward that is computed again: 1 is all, 0.5 what selective kinds do."""
    trained: float = 1.0
    """Part of the parameters that are trained, whose gradients are reduced."""
    weight_gradients: float = 1.0
    """Part of the matrices whose gradients are made: 0 under an adapter."""
    quantised: bool = False
    """The frozen base is held in 4 bits."""
    fp8: float = 0.0
    """Part of the blocks' products that is multiplied in fp8."""
    weight_bytes: float = 2
    """Of a parameter, as it is computed with and gathered."""
    reduce_bytes: float = 2
    """Of a gradient on its way to other ranks."""
    optimizer_on: str = ""
    """Where its states are and its step is computed: `cpu`, `nvme`; empty: on the GPU."""
    weights_on: str = ""
    """Where stage 3 keeps them: `cpu`, `nvme`."""
    activations_on: str = ""
    """Where what blocks keep for the backward is: `cpu`."""
    balanced: bool = True
    """Blocks are dealt to stages so that the output layer counts; else equally many to each."""
    dealt: tuple[int, ...] = ()
    """Blocks of each stage, where that is known; empty: as `balanced` says."""

    @classmethod
    def of(cls, model: Model, length: int, **split: Any) -> Job | None:
        """The job of a model; None where its blocks' numbers are not known.

        Args:
            length: Tokens of a row.
            split: Any other field, in place of what the model says.
        """
        of = model.dimensions
        if of is None:
            return None
        matrices = [p for p in model.parameters if _multiplies(p)]
        elements = sum(_active(p, of) for p in matrices)
        trained = sum(_active(p, of) for p in matrices if p.trains)
        numbers: dict[str, Any] = {
            "parameters": model.numel,
            "blocks": elements,
            "layers": of.layers,
            "hidden": of.hidden,
            "length": length,
            "vocabulary": of.vocabulary,
            "width": of.heads * of.head_dim,
            "window": of.window or 0,
            "trained": model.trained / model.numel,
            "weight_gradients": trained / elements if elements else 1.0,
        }
        return cls(**{**numbers, **split})

    @property
    def gpus(self) -> int:
        """All of them."""
        return self.data * self.tensor * self.pipeline * self.sequence

    @property
    def tokens(self) -> float:
        """Of one optimizer step."""
        return self.rows * self.length * self.micro_batches * self.data

    @property
    def seen(self) -> float:
        """Keys of a token."""
        return mean_keys(self.length, self.window or self.length)

    def flops_per_token(self, causal: bool = False) -> float:
        """Forward and backward as models/sizes.py counts them: 6N + 12 L d T, 4N where no matrix is trained.

        Args:
            causal: Count the keys that a token sees in place of the whole row.
        """
        matrices = self.blocks + self.vocabulary * self.hidden
        keys = self.seen if causal else min(self.length, self.window or self.length)
        attention = 12 * self.layers * (self.width or self.hidden) * keys
        return (6 if self.weight_gradients else 4) * matrices + attention


def mean_keys(length: int, window: int) -> float:
    """Keys a token meets in the mean over a row that fills up, of which it sees a window at most."""
    most = min(window, length)
    return most - most**2 / (2 * length)


def _multiplies(parameter: Parameter) -> bool:
    """Whether it is a matrix of a block (`model.layers.3.`), and not one that an adapter adds."""
    in_block = any(part.isdecimal() for part in parameter.name.split("."))
    return in_block and len(parameter.shape) > 1 and "lora_" not in parameter.name


def _active(parameter: Parameter, of: Dimensions) -> float:
    chosen = of.experts_per_token / of.experts if of.experts and ".experts." in parameter.name else 1.0
    return parameter.numel * chosen


# A parameter: weight, two moments and gradient in fp32 read, three written, bf16 written.
OPTIMIZER_BYTES = 30
# A layer's element of the stream and token: what low-rank matrices beside each linear layer read and add.
ADAPTER_BYTES = 200
# Seconds of the host for the hooks of ZeRO 3 on every module of a block: from Qwen's full fine-tuning.
HOOKS = 5e-3
DEQUANTISE_BYTES = 16  # a parameter and pass, of a base held in 4 bits: fitted to QLoRA's published runs
FP8_GAIN = 1.7  # of the products in fp8, with what casts them: fitted


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step: what is computed, and what nothing hides."""

    linear: float
    attention: float
    elementwise: float
    """What lies between the products, in memory's time; with it what a base in 4 bits takes to unpack."""
    vocabulary: float
    """The output layer and the loss."""
    launches: float
    bubble: float
    tensor: float
    sequence: float
    data: float
    """Weights and gradients of the data-parallel ranks."""
    optimizer: float
    offload: float
    stragglers: float
    tokens: float
    """Of all GPUs."""
    gpus: int
    model_flops: float
    """Of the whole step, as models/sizes.py counts."""
    causal_flops: float
    """The same, of attention the keys that a token sees."""

    @property
    def compute(self) -> float:
        """All that a GPU does in its forward and backward."""
        return self.linear + self.attention + self.elementwise + self.vocabulary + self.launches

    @property
    def communication(self) -> float:
        """That nothing hides."""
        return self.tensor + self.sequence + self.data

    @property
    def seconds(self) -> float:
        """The sum of the parts."""
        waits = self.bubble + self.communication + self.stragglers
        return self.compute + waits + self.optimizer + self.offload

    @property
    def tokens_per_second(self) -> float:
        """Of one GPU."""
        return self.tokens / self.gpus / self.seconds

    def mfu(self, peak: float, causal: bool = False) -> float:
        """Model FLOPs over what the GPUs' peak (FLOP/s of one) would do in that time."""
        return (self.causal_flops if causal else self.model_flops) / self.gpus / self.seconds / peak


def ring(num_bytes: float, ranks: int, inner: int, rates: Rates) -> float:
    """An all-gather or a reduce-scatter: each of n - 1 hops carries an n-th (an all-reduce is both).

    Args:
        num_bytes: Of the whole tensor.
        ranks: Of the group.
        inner: GPUs between two of them: what lies inside of the group's stride, such as tensor ranks.
    """
    if ranks == 1:
        return 0.0
    rate, nodes = _ring_rate(ranks, inner, rates)
    between = nodes if nodes > 1 else 0
    latency = (ranks - 1 - between) * rates.link_latency if ranks - 1 > between else 0.0
    return (ranks - 1) / ranks * num_bytes / rate + latency + between * rates.network_latency


def _ring_rate(ranks: int, inner: int, rates: Rates) -> tuple[float, int]:
    """Bytes a second, and nodes."""
    on_node = max(1, min(ranks, rates.per_node // inner))  # of this group; the node's networks are shared
    nodes = ceil(ranks / on_node)
    return (rates.link if nodes == 1 else min(rates.link, on_node * rates.network)), nodes


def exposed(transfer: float, beside: float, pieces: int, disturbance: float = 0.0) -> float:
    """What of a transfer in pieces is waited for: one piece, and what `beside` seconds do not hide.

    Args:
        disturbance: Part of the hidden seconds by which the computation beside them takes longer.
    """
    first = transfer / pieces
    hidden = min(transfer - first, beside)
    return transfer - (1 - disturbance) * hidden


@dataclass(frozen=True)
class _Pass:
    """Seconds of one micro-batch on one GPU of the slowest stage."""

    linear: float
    attention: float
    elementwise: float
    vocabulary: float
    launches: float
    forward: float
    """Part of them."""
    others: float
    """Seconds of the other stages together."""

    @property
    def seconds(self) -> float:
        return self.linear + self.attention + self.elementwise + self.vocabulary + self.launches


def _compute(job: Job, rates: Rates) -> _Pass:
    """One micro-batch: products, what lies between them, and what launching it all takes."""
    tokens = job.rows * job.length / job.sequence
    units = 2 + job.weight_gradients + job.recompute  # a forward's products: again for inputs, for weights
    passes = (3 + job.recompute) / 3
    per_layer = 1 / job.layers / job.tensor
    speed = rates.speed
    products = rates.products * speed / (1 - job.fp8 + job.fp8 / FP8_GAIN)
    linear = 2 * job.blocks * per_layer * tokens * units / products
    attention = (
        12 * (job.width or job.hidden) * job.seen / job.tensor * tokens * passes / rates.attention / speed
    )
    whole = rates.replicated if job.tensor > 1 else 0.0  # norms and residuals, on every tensor rank
    beside = 0.0 if job.weight_gradients or not job.trained else ADAPTER_BYTES
    stream = (rates.stream + beside) * (whole + (1 - whole) / job.tensor)
    elementwise = job.hidden * tokens * passes * stream / rates.memory / speed
    if job.quantised:
        elementwise += DEQUANTISE_BYTES * job.blocks * per_layer * (2 + job.recompute) / rates.memory / speed
    launches = rates.launch * passes / speed
    busy = linear + attention + elementwise + launches
    floor = rates.floor + HOOKS if rates.floor and job.stage == 3 else rates.floor
    launches += max(0.0, floor * passes / speed - busy)
    block = linear + attention + elementwise + launches
    head = (6 if job.weight_gradients else 4) * job.vocabulary * job.hidden / rates.products
    head = tokens * (head + job.vocabulary * rates.entries / rates.memory) / job.tensor / speed
    here, share = _slowest_stage(job, block, head)
    busy = here * block + share * head
    forward = here * block / units + share * head / (2 + bool(job.weight_gradients))
    return _Pass(
        linear=here * linear,
        attention=here * attention,
        elementwise=here * elementwise,
        vocabulary=share * head,
        launches=here * launches,
        forward=forward / busy,
        others=job.layers * block + head - busy,
    )


def _slowest_stage(job: Job, block: float, head: float) -> tuple[float, float]:
    """Blocks of the stage that takes longest, and whether it has the output layer."""
    layers, stages = job.layers, job.pipeline
    if stages == 1:
        return layers, 1.0
    if job.dealt:
        last, others = job.dealt[-1], max(job.dealt[:-1])
    elif not job.balanced:
        return layers / stages, 1.0
    else:
        last = max(0, round((layers * block + head) / stages / block - head / block))
        others = ceil((layers - last) / (stages - 1))
    return (last, 1.0) if last * block + head > others * block else (others, 0.0)


def step_time(job: Job, rates: Rates) -> StepTime:
    """One optimizer step of all GPUs."""
    once = _compute(job, rates)
    tokens = job.rows * job.length
    layers = max(1, job.layers // job.pipeline)
    activation = tokens / job.sequence * job.hidden * job.weight_bytes
    passes = 2 + job.recompute  # forward, again, backward
    # Four all-reduces a layer, two each way (Megatron-LM), and nothing to do meanwhile.
    tensor = 2 * 2 * passes * layers * ring(activation, job.tensor, 1, rates) * rates.waiting
    # Ulysses: queries, keys, values and outputs change hands, each way.
    sequence = 4 * passes * layers * ring(activation, job.sequence, job.tensor, rates) / job.sequence
    handed = 0.0
    if job.pipeline > 1:
        handed = 2 * activation / min(rates.link, rates.network) + 2 * rates.network_latency
    many = job.micro_batches
    work = (once.seconds * once.forward, once.seconds * (1 - once.forward))
    optimizer, moved = _update(job, rates, work)
    return StepTime(
        linear=many * once.linear,
        attention=many * once.attention,
        elementwise=many * once.elementwise,
        vocabulary=many * once.vocabulary,
        launches=many * once.launches,
        bubble=once.others + (job.pipeline - 1) * (tensor + sequence + handed) + many * handed,
        tensor=many * tensor,
        sequence=many * sequence,
        data=_data(job, rates, work),
        optimizer=optimizer,
        offload=moved,
        stragglers=many * once.seconds * rates.straggling * sqrt(2 * log(job.gpus)),
        tokens=job.tokens,
        gpus=job.gpus,
        model_flops=job.tokens * job.flops_per_token(),
        causal_flops=job.tokens * job.flops_per_token(causal=True),
    )


def _data(job: Job, rates: Rates, work: tuple[float, float]) -> float:
    """Seconds a step waits for weights and gradients of the data-parallel (and sequence) ranks."""
    forward, backward = (each * rates.overlap * job.overlap for each in work)
    ranks, inner = job.data * job.sequence, job.tensor
    layers = max(1, job.layers // job.pipeline)
    kept = job.parameters / job.tensor / job.pipeline

    def all_gather(pieces: int, part: float = 1.0, ranks: int = ranks) -> float:
        return pieces * ring(kept * part * job.weight_bytes / pieces, ranks, inner, rates)

    reduce_scatter = layers * ring(kept * job.trained * job.reduce_bytes / layers, ranks, inner, rates)
    # A transfer takes processors for its time and memory's rate for its bytes: a slow link disturbs longer,
    # but less.
    disturbance = rates.disturbance * min(1.0, sqrt(_ring_rate(ranks, inner, rates)[0] / rates.disturbing))
    if job.stage == 0:
        return exposed(2 * reduce_scatter, backward, layers, disturbance)
    if job.stage < 3:
        reductions = job.micro_batches if job.stage == 2 else 1
        reduced = exposed(reduce_scatter, backward, layers, disturbance)
        return reductions * reduced + all_gather(1, job.trained)
    again = all_gather(layers)
    if job.hpz:
        again = all_gather(layers, ranks=min(ranks, max(1, rates.per_node // inner)))
    fetched = exposed(all_gather(layers), forward, layers, disturbance)
    fetched += exposed(again + reduce_scatter, backward, layers, disturbance)
    return job.micro_batches * fetched


def _update(job: Job, rates: Rates, work: tuple[float, float]) -> tuple[float, float]:
    """Seconds of the optimizer's step, and of what moves between a GPU and its host that nothing hides."""
    kept = job.parameters / job.tensor / job.pipeline
    shard = kept / (job.data * job.sequence) if job.stage else kept
    trained = shard * job.trained
    beside = sum(work) * rates.overlap
    on_node = min(job.gpus, rates.per_node)
    layers = max(1, job.layers // job.pipeline)
    moved = 0.0
    if job.weights_on:  # each gather begins with this rank's shard, twice a micro-batch
        rate = min(rates.host, rates.nvme / on_node) if job.weights_on == "nvme" else rates.host
        moved += job.micro_batches * exposed(2 * shard * job.weight_bytes / rate, beside, layers)
    if job.activations_on:
        kept_bytes = 2 * job.rows * job.length / job.sequence * job.hidden * layers * job.weight_bytes
        moved += job.micro_batches * exposed(kept_bytes / rates.host, beside, layers)
    if not job.optimizer_on:
        return trained * OPTIMIZER_BYTES / rates.memory / rates.speed, moved
    # Gradients go to the host in the backward, the weights come back after the step.
    reduced = job.micro_batches if job.stage >= 2 else 1
    moved += reduced * exposed(trained * job.reduce_bytes / rates.host, work[1] * rates.overlap, layers)
    moved += trained * job.weight_bytes / rates.host
    optimizer = trained * on_node / rates.host_adam
    if job.optimizer_on == "nvme":  # weights and two moments in fp32, read and written beside the step
        optimizer = max(optimizer, 2 * 12 * trained * on_node / rates.nvme)
    return optimizer, moved


def fitted(job: Job, rates: Rates, tokens_per_second: float) -> Rates:
    """The rates with the speed at which this job gives these tokens a second of one GPU.

    Raises:
        ValueError: none does: communication alone takes longer.
    """
    low, high = 1e-6, 1e6
    if step_time(job, replace(rates, speed=high)).tokens_per_second < tokens_per_second:
        raise ValueError(f"{tokens_per_second:g} tokens/s: communication alone takes longer")
    for _ in range(60):
        middle = (low * high) ** 0.5
        reached = step_time(job, replace(rates, speed=middle)).tokens_per_second
        low, high = (middle, high) if reached < tokens_per_second else (low, middle)
    return replace(rates, speed=high)
