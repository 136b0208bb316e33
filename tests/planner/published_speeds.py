"""Compares published speeds of others' runs with the planner's: `python tests/planner/published_speeds.py`.

Writes the table of docs/explanation/performance-and-planning.md. published_speeds.jsonl has the runs.
Constants of pipeline/planner/timing.py were set by those marked `fit`; those marked `test` set none.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from pipeline.planner.hardware import Gpu, find_gpu
from pipeline.planner.timing import HardwareRates, StepSpec, estimate_rates, estimate_step_time

SPEEDS = Path(__file__).with_name("published_speeds.jsonl")
PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "performance-and-planning.md"
MARKERS = ("<!-- accuracy -->\n", "<!-- end of accuracy -->")
# torchtitan's H100s have slower memory, and half the watts of others.
H100_HBM2E = replace(find_gpu("h100"), bandwidth=2.4e12)
# Other software, by what differs: shares of the peak in attention (A100, H100), bytes of the stream.
OTHERS: dict[str, dict[str, Any]] = {
    "mpt": {"attention": (0.28, 0.16), "stream": 211},
    "megatron": {},
    "megatron-rms": {"stream": 530},
    "fused": {"attention": (0.5, 0.42), "stream": 94, "tensor_waiting": 0.25},
}
REPOSITORIES = {
    "llm-foundry": "https://github.com/mosaicml/llm-foundry/blob/main/scripts/train/benchmarking/README.md",
    "Aleph Alpha": "https://github.com/Aleph-Alpha/NeurIPS-WANT-submission-efficient-parallelization-layouts",
    "torchtitan": "https://github.com/pytorch/torchtitan/blob/4d88a8a44/docs/performance.md",
    "torchtune": "https://github.com/pytorch/torchtune/blob/main/README.md",
    "fms-fsdp": "https://github.com/foundation-model-stack/fms-fsdp/blob/main/README.md",
    "TinyLlama": "https://github.com/jzhang38/TinyLlama/blob/main/README.md",
    "MaxText": "https://github.com/NVIDIA/dgxc-benchmarking/blob/v25.02/maxtext/README_70b.md",
    "NeMo": "https://github.com/NVIDIA/dgxc-benchmarking/tree/v25.02",
    "NeMo AutoModel": "https://github.com/NVIDIA-NeMo/Automodel/blob/main/docs/performance-summary.mdx",
    "Qwen": "https://github.com/QwenLM/Qwen/blob/main/README.md",
}


@dataclass(frozen=True)
class Speed:
    """One published run: tokens a second of one GPU."""

    source: str
    model: str
    gpu: str
    kernels: str
    use: str
    job: StepSpec
    tokens_per_second: float

    @property
    def group(self) -> tuple[str, str, str]:
        """Source, kind of card, and what is trained."""
        kind = "LoRA" if not self.job.weight_gradients else ""
        return self.source, self.gpu.partition(" ")[0], kind


def gpu_of(name: str) -> Gpu:
    return H100_HBM2E if name == "H100 500 W" else find_gpu(name)


def load() -> list[Speed]:
    """Return every run of the file."""
    known = {field.name for field in fields(StepSpec)}
    found = []
    for line in SPEEDS.read_text().splitlines():
        row = json.loads(line)
        job = StepSpec(**{key: value for key, value in row.items() if key in known})
        told = (row[key] for key in ("source", "model", "gpu", "kernels", "use"))
        found.append(Speed(*told, job, row["tokens_per_second"]))
    return found


def rates_for(speed: Speed) -> HardwareRates:
    """Return the rates of the run's card and software."""
    gpu = gpu_of(speed.gpu)
    # Where nobody says what the network is: what makers' nodes have; it was slower in Aleph Alpha's.
    network = 1.25e10 if speed.source == "Aleph Alpha" else gpu.network
    found = estimate_rates(gpu, network, compiled=speed.kernels in ("compiled", "fused"))
    assert found is not None
    changed = dict(OTHERS.get(speed.kernels, {}))
    if "attention" in changed:
        changed["attention"] = changed["attention"][gpu.name.startswith("H100")] * gpu.bf16
    return replace(found, **changed)


def error(speed: Speed) -> float:
    """Return predicted seconds over published ones, minus 1."""
    reached = estimate_step_time(speed.job, rates_for(speed)).tokens_per_second / speed.job.gpus
    return speed.tokens_per_second / reached - 1


def rank_correlation(pairs: list[tuple[float, float]]) -> float:
    """Return Spearman's, of pairs without ties that matter."""
    places = []
    for side in (0, 1):
        order = sorted(range(len(pairs)), key=lambda k: pairs[k][side])
        places.append({k: place for place, k in enumerate(order)})
    count = len(pairs)
    squares = sum((places[0][k] - places[1][k]) ** 2 for k in range(count))
    return 1 - 6 * squares / (count * (count**2 - 1))


def accuracy() -> str:
    """Return a table, by source: how far predicted seconds of a step are from published ones."""
    groups: dict[tuple[str, ...], list[Speed]] = defaultdict(list)
    for speed in load():
        groups[(speed.use, *speed.group)].append(speed)
    lines = ["| runs | card | for | number | mean error | median | worst |", "|---|---|---|---|---|---|---|"]
    for (use, source, card, kind), speeds in sorted(groups.items()):
        errors = [error(speed) for speed in speeds]
        worst = max(errors, key=abs)
        name = f"[{source}]({REPOSITORIES[source]})" + (f", {kind}" if kind else "")
        sizes = [mean(map(abs, errors)), median(map(abs, errors))]
        told = " | ".join(f"{size:.1%}" for size in sizes)
        lines.append(f"| {name} | {card} | {use} | {len(errors)} | {told} | {worst:+.0%} |")
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Summary:
    """Errors for dense models that are trained whole, by torch's kernels."""

    runs: int
    mean_error: float
    within_range: float
    """Share of the runs that are within 20 %."""
    correlation: float


def summary(use: str = "test") -> Summary:
    """Return it of the runs of one use."""
    speeds = [s for s in load() if s.use == use and s.job.weight_gradients and s.kernels != "fused"]
    errors = [error(speed) for speed in speeds]
    pairs = [
        (s.tokens_per_second, s.tokens_per_second / (1 + e)) for s, e in zip(speeds, errors, strict=True)
    ]
    return Summary(
        runs=len(speeds),
        mean_error=mean(map(abs, errors)),
        within_range=mean(abs(each) <= 0.2 for each in errors),
        correlation=rank_correlation(pairs),
    )


def written_table() -> str:
    """Return the table that the page has."""
    return PAGE.read_text().split(MARKERS[0])[1].split(MARKERS[1])[0]


if __name__ == "__main__":
    before, after = PAGE.read_text().split(MARKERS[0] + written_table() + MARKERS[1])
    PAGE.write_text(before + MARKERS[0] + accuracy() + MARKERS[1] + after)
    found = summary()
    print(
        f"{found.runs} runs for the test: mean error {found.mean_error:.1%}, {found.within_range:.0%} within "
        f"20%, rank correlation {found.correlation:.3f}"
    )
