"""Published runs at several sizes, and how far scaling_model.py is from them.

The first run of each series fits the one rate that no data sheet has; the others are predicted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from scaling_model import Cluster, Plan, Shape, fitted, predict

# NCCL's own constants for the latency of a hop of a ring (src/graph/tuning.cc, protocol Simple).
LINK_LATENCY, NETWORK_LATENCY = 3.4e-6, 14e-6
# Of the step, one deviation of a rank from the mean: fitted to all FSDP runs below together.
STRAGGLING = 0.03
# Bus bandwidth of nccl-tests inside a node (NVLink 4: 900 GB/s both ways, NVLink 3: 600); a card a GPU.
H100 = Cluster(4e14, 3.7e11, 5e10, LINK_LATENCY, NETWORK_LATENCY, memory=3.0e12, straggling=STRAGGLING)
H100_HBM2E = replace(H100, memory=2.2e12)
H200 = replace(H100, memory=4.3e12)
A100 = replace(H100, link=2.3e11, network=2.5e10, memory=1.4e12)

LLAMA_8B = Shape(8.03e9, 32, 4096, 8192)
LLAMA_1B = Shape(1.24e9, 16, 2048, 4096)
TORCHTITAN = "https://github.com/pytorch/torchtitan/blob/main/benchmarks/"
FOUNDRY = "https://github.com/mosaicml/llm-foundry/blob/main/scripts/train/benchmarking/README.md"
NANOTRON = "https://huggingface.co/nanotron/old_bench"


@dataclass(frozen=True)
class Series:
    """Runs that differ in the split alone: (plan, tokens a second of one GPU)."""

    name: str
    source: str
    shape: Shape
    cluster: Cluster
    runs: tuple[tuple[Plan, float], ...]


def _fsdp(rows: float, recompute: bool, *measured: tuple[int, float]) -> tuple[tuple[Plan, float], ...]:
    plan = Plan(1, stage=3, rows=rows, recompute=recompute, reduce_bytes=4)
    return tuple((replace(plan, data=gpus), rate) for gpus, rate in measured)


def _cut(gpus: int, tensor: int, pipeline: int = 1) -> Plan:
    data = gpus // tensor // pipeline
    return Plan(data, 1, tensor, pipeline, rows=8, micro_batches=1024 // 8 // data, reduce_bytes=4)


SERIES = (
    Series(
        "Llama 3.1 8B, FSDP, H100",
        TORCHTITAN + "llama3_h100_202412_torchtitan.md",
        LLAMA_8B,
        H100_HBM2E,
        _fsdp(2, False, (8, 5762), (128, 5605)),
    ),
    Series(
        "the same, compiled",
        TORCHTITAN + "llama3_h100_202412_torchtitan.md",
        LLAMA_8B,
        H100_HBM2E,
        _fsdp(2, False, (8, 6667), (128, 6514)),
    ),
    Series(
        "Llama 3.1 8B, FSDP, H200, fp8",
        TORCHTITAN + "llama3_8b_h200_2025-06_torchtitan.md",
        LLAMA_8B,
        H200,
        _fsdp(2, False, (32, 10938), (64, 10753)),
    ),
    Series(
        "MPT 7B, FSDP, A100 40 GB",
        FOUNDRY,
        Shape(6.66e9, 32, 4096, 2048),
        A100,
        _fsdp(18, True, (32, 3725), (64, 3665), (128, 3623)),
    ),
    Series(
        "MPT 3B, FSDP, A100 40 GB",
        FOUNDRY,
        Shape(2.65e9, 32, 2560, 2048),
        A100,
        _fsdp(6, False, (64, 9736), (128, 9538)),
    ),
    Series(
        "MPT 13B, FSDP, H100",
        FOUNDRY,
        Shape(12.85e9, 40, 5120, 2048),
        H100,
        _fsdp(2, False, (8, 4792), (16, 4767), (32, 4811), (64, 4800)),
    ),
    Series(
        "MPT 1B, FSDP, H100",
        FOUNDRY,
        Shape(1.316e9, 24, 2048, 2048),
        H100,
        _fsdp(20, False, (16, 46037), (32, 45130), (64, 44402)),
    ),
    Series(
        "Llama 3.2 1B, tensor and pipeline, H100",
        NANOTRON,
        LLAMA_1B,
        H100,
        ((_cut(8, 2), 33200), (_cut(8, 4), 27800), (_cut(8, 4, 2), 25800), (_cut(16, 8, 2), 14300)),
    ),
)


@dataclass(frozen=True)
class Comparison:
    """One run: tokens a second of one GPU."""

    series: str
    source: str
    plan: Plan
    published: float
    predicted: float
    is_fit: bool
    """The first of its series: what the rate was fitted to."""

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1


def compared() -> list[Comparison]:
    """Every published run beside what is predicted for it."""
    found = []
    for series in SERIES:
        cluster = fitted(series.shape, series.cluster, *series.runs[0])
        for place, (plan, rate) in enumerate(series.runs):
            reached = predict(series.shape, cluster, plan).tokens_per_second
            found.append(Comparison(series.name, series.source, plan, rate, reached, place == 0))
    return found


GPUS = (8, 32, 128, 512, 1024)


def forecasts(gpus: tuple[int, ...] = GPUS) -> dict[str, list[float]]:
    """Llama 3 8B on H100s, 2 rows of 8,192 a GPU and step: tokens a second of one GPU by split and GPUs.

    What does not fit into memory is predicted all the same.
    """
    plan, rate = SERIES[1].runs[0]
    cluster = fitted(LLAMA_8B, H100, plan, rate)

    # As many rows a GPU as without the cut: one replica has more micro-batches of them.
    plans = {
        "DDP": Plan(1, 0, rows=2),
        "ZeRO 1 or 2": Plan(1, 1, rows=2),
        "ZeRO 3": Plan(1, 3, rows=2),
        "ZeRO 3, hpZ": Plan(1, 3, rows=2, hpz=True),
        "tensor 8, ZeRO 1": Plan(1, 1, tensor=8, rows=2, micro_batches=8),
        "pipeline 8, ZeRO 1": Plan(1, 1, pipeline=8, rows=1, micro_batches=16),
        "sequence 8, ZeRO 3": Plan(1, 3, sequence=8, rows=2, micro_batches=8),
    }
    found: dict[str, list[float]] = {}
    for name, each in plans.items():
        inner = each.tensor * each.pipeline * each.sequence
        sized = [replace(each, data=count // inner) for count in gpus]
        found[name] = [predict(LLAMA_8B, cluster, plan).tokens_per_second for plan in sized]
    return found


def markdown() -> str:
    """Both tables of docs/performance.md."""
    lines = ["| published run | GPUs | published | predicted | error |", "|---|---|---|---|---|"]
    for each in compared():
        cut = "".join(
            f", {name} {degree}"
            for name, degree in (("tensor", each.plan.tensor), ("pipeline", each.plan.pipeline))
            if degree > 1
        )
        error = "fitted" if each.is_fit else f"{each.error:+.1%}"
        lines.append(
            f"| [{each.series}]({each.source}) | {each.plan.world}{cut} | {each.published:,.0f} "
            f"| {each.predicted:,.0f} | {error} |"
        )
    lines += ["", "| tokens a second of one GPU, on | " + " | ".join(f"{count:,}" for count in GPUS) + " |"]
    lines.append("|---|" + "---|" * len(GPUS))
    for name, rates in forecasts().items():
        lines.append(f"| {name} | " + " | ".join(f"{rate:,.0f}" for rate in rates) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown())
