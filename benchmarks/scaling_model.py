"""Seconds of a training step from sizes, rates and collectives alone: pure functions, no measurement.

docs/performance.md has the formulas with their sources; published.py holds it to runs of others.
Bytes, seconds, FLOPs; a machine's accelerators are called GPUs also where they are processes of a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, log, sqrt

OPTIMIZER_BYTES = (
    30  # a parameter: weight, two moments and gradient in fp32 read, three written, bf16 written
)
FORWARD = 1 / 3  # of the FLOPs of forward and backward


@dataclass(frozen=True)
class Shape:
    """A transformer language model and the length of its rows."""

    parameters: float
    layers: int
    hidden: int
    length: int

    @property
    def flops_per_token(self) -> float:
        """Forward and backward: 6N + 12 L d T."""
        return 6 * self.parameters + 12 * self.layers * self.hidden * self.length


@dataclass(frozen=True)
class Cluster:
    """Rates of one GPU and of what connects it."""

    flops: float
    """A second, reached in matrix products and all that stands between them: fitted, never a data sheet's."""
    link: float
    """Bytes a second of a ring inside a node, per GPU (bus bandwidth)."""
    network: float
    """Bytes a second between nodes, per GPU."""
    link_latency: float
    """Seconds a hop of a ring inside a node."""
    network_latency: float
    memory: float
    """Bytes a second of the GPU's own memory."""
    per_node: int = 8
    overlap: float = 1.0
    """Share of computation beside which collectives run: 0 where the same cores do both."""
    straggling: float = 0.0
    """Spread of the step times of ranks: the slowest of n is sqrt(2 ln n) of these above the mean."""


@dataclass(frozen=True)
class Plan:
    """How the work is split. GPUs: data x tensor x pipeline x sequence."""

    data: int
    stage: int = 0
    tensor: int = 1
    pipeline: int = 1
    sequence: int = 1
    rows: float = 1
    """Of a micro-batch of one replica."""
    micro_batches: int = 1
    hpz: bool = False
    """Stage 3 gathers weights for the backward inside of the node."""
    recompute: bool = False
    weight_bytes: float = 2
    reduce_bytes: float = 2

    @property
    def world(self) -> int:
        return self.data * self.tensor * self.pipeline * self.sequence


@dataclass(frozen=True)
class Step:
    """Seconds of one optimizer step: what is computed, and what nothing hides."""

    compute: float
    bubble: float
    tensor: float
    sequence: float
    data: float
    optimizer: float
    stragglers: float
    tokens_per_gpu: float

    @property
    def seconds(self) -> float:
        waits = self.bubble + self.tensor + self.sequence + self.data + self.stragglers
        return self.compute + self.optimizer + waits

    @property
    def tokens_per_second(self) -> float:
        """Of one GPU."""
        return self.tokens_per_gpu / self.seconds


def ring(num_bytes: float, ranks: int, inner: int, cluster: Cluster) -> float:
    """An all-gather or a reduce-scatter: each of n - 1 hops carries an n-th (an all-reduce is both).

    Args:
        num_bytes: Of the whole tensor.
        ranks: Of the group.
        inner: GPUs between two of them: what lies inside of the group's stride, such as tensor ranks.
    """
    if ranks == 1:
        return 0.0
    on_node = max(1, min(ranks, cluster.per_node // inner))  # of this group; the node's networks are shared
    nodes = ceil(ranks / on_node)
    rate = cluster.link if nodes == 1 else min(cluster.link, on_node * cluster.network)
    between = nodes if nodes > 1 else 0
    latency = (ranks - 1 - between) * cluster.link_latency if ranks - 1 > between else 0.0
    return (ranks - 1) / ranks * num_bytes / rate + latency + between * cluster.network_latency


def exposed(transfer: float, beside: float, pieces: int) -> float:
    """What of a transfer in pieces is waited for: one piece, and what `beside` seconds do not hide."""
    return transfer / pieces + max(0.0, transfer * (1 - 1 / pieces) - beside)


def predict(shape: Shape, cluster: Cluster, plan: Plan) -> Step:
    """One optimizer step."""
    replica = plan.tensor * plan.pipeline * plan.sequence
    tokens = plan.rows * shape.length  # of a micro-batch
    work = shape.flops_per_token * tokens / replica / cluster.flops  # of a micro-batch on one GPU
    forward, backward = work * FORWARD, work * (1 - FORWARD) + work * FORWARD * plan.recompute
    layers = max(1, shape.layers // plan.pipeline)
    activation = tokens / plan.sequence * shape.hidden * plan.weight_bytes
    passes = 3 if plan.recompute else 2  # forward, again, backward
    # Four all-reduces a layer, two each way (Megatron-LM), and nothing to do meanwhile.
    tensor = 2 * passes * layers * ring(activation, plan.tensor, 1, cluster)
    # Ulysses: queries, keys, values and outputs change hands, each way.
    sequence = 4 * passes * layers * ring(activation, plan.sequence, plan.tensor, cluster) / plan.sequence
    of_one = forward + backward + tensor + sequence
    handed = 0.0
    if plan.pipeline > 1:
        handed = 2 * activation / min(cluster.link, cluster.network) + 2 * cluster.network_latency
    bubble = (plan.pipeline - 1) * (of_one + handed) + plan.micro_batches * handed
    data = _data(shape, cluster, plan, (forward, backward))
    kept = shape.parameters / plan.tensor / plan.pipeline
    if plan.stage:
        kept /= plan.data * plan.sequence
    return Step(
        compute=plan.micro_batches * (forward + backward),
        bubble=bubble,
        tensor=plan.micro_batches * tensor,
        sequence=plan.micro_batches * sequence,
        data=data,
        optimizer=kept * OPTIMIZER_BYTES / cluster.memory,
        stragglers=plan.micro_batches * work * cluster.straggling * sqrt(2 * log(plan.world)),
        tokens_per_gpu=plan.micro_batches * tokens * plan.data / plan.world,
    )


def _data(shape: Shape, cluster: Cluster, plan: Plan, work: tuple[float, float]) -> float:
    """Seconds a step waits for weights and gradients of the data-parallel (and sequence) ranks."""
    forward, backward = (each * cluster.overlap for each in work)
    ranks, inner = plan.data * plan.sequence, plan.tensor
    layers = max(1, shape.layers // plan.pipeline)
    kept = shape.parameters / plan.tensor / plan.pipeline

    def all_gather(pieces: int, ranks: int = ranks) -> float:
        return pieces * ring(kept * plan.weight_bytes / pieces, ranks, inner, cluster)

    reduce_scatter = layers * ring(kept * plan.reduce_bytes / layers, ranks, inner, cluster)
    if plan.stage == 0:
        return exposed(2 * reduce_scatter, backward, layers)
    if plan.stage < 3:
        reductions = plan.micro_batches if plan.stage == 2 else 1
        return reductions * exposed(reduce_scatter, backward, layers) + all_gather(1)
    again = all_gather(layers)
    if plan.hpz:
        again = all_gather(layers, min(ranks, max(1, cluster.per_node // inner)))
    fetched = exposed(all_gather(layers), forward, layers) + exposed(again + reduce_scatter, backward, layers)
    return plan.micro_batches * fetched


def fitted(shape: Shape, cluster: Cluster, plan: Plan, tokens_per_second: float) -> Cluster:
    """The cluster with the FLOPs a second at which this plan gives these tokens a second of one GPU.

    Raises:
        ValueError: no rate does: communication alone takes longer.
    """
    low, high = 1.0, 1e18
    if predict(shape, replace(cluster, flops=high), plan).tokens_per_second < tokens_per_second:
        raise ValueError(f"{tokens_per_second:g} tokens/s: communication alone takes longer")
    for _ in range(100):
        middle = (low * high) ** 0.5
        reached = predict(shape, replace(cluster, flops=middle), plan).tokens_per_second
        low, high = (middle, high) if reached < tokens_per_second else (low, middle)
    return replace(cluster, flops=high)
