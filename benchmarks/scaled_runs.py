"""Published runs at several sizes, and how far pipeline/planner/timing.py is from them.

The first run of each series corrects the speed of the computation; the others are predicted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from published import H100_HBM2E, MPT, REPOSITORIES

from pipeline.planner.hardware import COMPILED, EAGER, Gpu, Kernels, Rates, find_gpu, rates_of
from pipeline.planner.timing import Job, fitted, step_time

LLAMA_8B = Job(8.03e9, 6.98e9, 32, 4096, 8192, vocabulary=128256)
LLAMA_1B = Job(1.236e9, 0.973e9, 16, 2048, 4096, vocabulary=128256)
MPT_1B = Job(1.316e9, 1.209e9, 24, 2048, 2048, vocabulary=50368)
MPT_3B = Job(2.65e9, 2.516e9, 32, 2560, 2048, vocabulary=50368)
MPT_7B = Job(6.66e9, 6.445e9, 32, 4096, 2048, vocabulary=50368)
MPT_13B = Job(12.85e9, 12.58e9, 40, 5120, 2048, vocabulary=50368)
H100, H200, A100_40GB = find_gpu("h100"), find_gpu("h200"), find_gpu("a100-40gb")
TORCHTITAN = "https://github.com/pytorch/torchtitan/blob/main/benchmarks/"
FOUNDRY = REPOSITORIES["llm-foundry"]
NANOTRON = "https://huggingface.co/nanotron/old_bench"


def rates(gpu: Gpu, kernels: Kernels = COMPILED) -> Rates:
    """With the network of its makers' nodes."""
    found = rates_of(gpu, gpu.network, kernels=kernels)
    assert found is not None
    return found


@dataclass(frozen=True)
class Series:
    """Runs that differ in the split alone: (job, tokens a second of one GPU)."""

    name: str
    source: str
    rates: Rates
    runs: tuple[tuple[Job, float], ...]


def _fsdp(
    job: Job, rows: float, recompute: float, *measured: tuple[int, float]
) -> tuple[tuple[Job, float], ...]:
    sharded = replace(job, stage=3, rows=rows, recompute=recompute, reduce_bytes=4)
    return tuple((replace(sharded, data=gpus), rate) for gpus, rate in measured)


def _cut(gpus: int, tensor: int, pipeline: int = 1) -> Job:
    data = gpus // tensor // pipeline
    split = replace(LLAMA_1B, data=data, stage=1, tensor=tensor, pipeline=pipeline, reduce_bytes=4)
    return replace(split, rows=8, micro_batches=1024 // 8 // data)


SERIES = (
    Series(
        "Llama 3.1 8B, FSDP, H100",
        TORCHTITAN + "llama3_h100_202412_torchtitan.md",
        rates(H100_HBM2E, EAGER),
        _fsdp(LLAMA_8B, 2, 0.5, (8, 5762), (128, 5605)),
    ),
    Series(
        "the same, compiled",
        TORCHTITAN + "llama3_h100_202412_torchtitan.md",
        rates(H100_HBM2E),
        _fsdp(LLAMA_8B, 2, 0.5, (8, 6667), (128, 6514)),
    ),
    Series(
        "Llama 3.1 8B, FSDP, H200, fp8",
        TORCHTITAN + "llama3_8b_h200_2025-06_torchtitan.md",
        rates(H200),
        _fsdp(replace(LLAMA_8B, fp8=1.0), 2, 0.5, (32, 10938), (64, 10753)),
    ),
    Series(
        "MPT 7B, FSDP, A100 40 GB",
        FOUNDRY,
        rates(A100_40GB, MPT),
        _fsdp(MPT_7B, 18, 1, (32, 3725), (64, 3665), (128, 3623)),
    ),
    Series(
        "MPT 3B, FSDP, A100 40 GB",
        FOUNDRY,
        rates(A100_40GB, MPT),
        _fsdp(MPT_3B, 6, 0, (64, 9736), (128, 9538)),
    ),
    Series(
        "MPT 13B, FSDP, H100",
        FOUNDRY,
        rates(H100, MPT),
        _fsdp(MPT_13B, 2, 0, (8, 4792), (16, 4767), (32, 4811), (64, 4800)),
    ),
    Series(
        "MPT 1B, FSDP, H100",
        FOUNDRY,
        rates(H100, MPT),
        _fsdp(MPT_1B, 20, 0, (16, 46037), (32, 45130), (64, 44402)),
    ),
    Series(
        "Llama 3.2 1B, tensor and pipeline, H100",
        NANOTRON,
        rates(H100, EAGER),
        ((_cut(8, 2), 33200), (_cut(8, 4), 27800), (_cut(8, 4, 2), 25800), (_cut(16, 8, 2), 14300)),
    ),
)


@dataclass(frozen=True)
class Comparison:
    """One run: tokens a second of one GPU."""

    series: str
    source: str
    job: Job
    published: float
    predicted: float
    is_fit: bool
    """The first of its series: what the speed was fitted to."""

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1


def compared() -> list[Comparison]:
    """Every published run beside what is predicted for it."""
    found = []
    for series in SERIES:
        corrected = fitted(series.runs[0][0], series.rates, series.runs[0][1])
        for place, (job, rate) in enumerate(series.runs):
            reached = step_time(job, corrected).tokens_per_second
            found.append(Comparison(series.name, series.source, job, rate, reached, place == 0))
    return found


GPUS = (8, 32, 128, 512, 1024)


def forecasts(gpus: tuple[int, ...] = GPUS) -> dict[str, list[float]]:
    """Llama 3 8B on H100s, 2 rows of 8,192 a GPU and step: tokens a second of one GPU by split and GPUs.

    What does not fit into memory is predicted all the same.
    """
    plain = replace(LLAMA_8B, rows=2, recompute=0.5)
    # As many rows a GPU as without the cut: one replica has more micro-batches of them.
    jobs = {
        "DDP": plain,
        "ZeRO 1 or 2": replace(plain, stage=1),
        "ZeRO 3": replace(plain, stage=3),
        "ZeRO 3, hpZ": replace(plain, stage=3, hpz=True),
        "tensor 8, ZeRO 1": replace(plain, stage=1, tensor=8, micro_batches=8),
        "pipeline 8, ZeRO 1": replace(plain, stage=1, pipeline=8, rows=1, micro_batches=16),
        "sequence 8, ZeRO 3": replace(plain, stage=3, sequence=8, micro_batches=8),
    }
    found: dict[str, list[float]] = {}
    for name, job in jobs.items():
        sized = [replace(job, data=count // job.gpus) for count in gpus]
        found[name] = [step_time(each, rates(H100)).tokens_per_second for each in sized]
    return found


def markdown() -> str:
    """Both tables of docs/performance.md."""
    lines = ["| published run | GPUs | published | predicted | error |", "|---|---|---|---|---|"]
    for each in compared():
        cut = "".join(
            f", {name} {degree}"
            for name, degree in (("tensor", each.job.tensor), ("pipeline", each.job.pipeline))
            if degree > 1
        )
        error = "fitted" if each.is_fit else f"{each.error:+.1%}"
        lines.append(
            f"| [{each.series}]({each.source}) | {each.job.gpus}{cut} | {each.published:,.0f} "
            f"| {each.predicted:,.0f} | {error} |"
        )
    lines += ["", "| tokens a second of one GPU, on | " + " | ".join(f"{count:,}" for count in GPUS) + " |"]
    lines.append("|---|" + "---|" * len(GPUS))
    for name, speeds in forecasts().items():
        lines.append(f"| {name} | " + " | ".join(f"{speed:,.0f}" for speed in speeds) + " |")
    return "\n".join(lines) + "\n"
