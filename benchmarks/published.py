"""Published speeds of others' runs beside what pipeline/planner predicts: `python benchmarks/published.py`

Prints the tables of docs/performance.md. published_speeds.jsonl has the runs, `fit`: calibrate.py may look at
them, `test`: it may not. scaled_runs.py predicts more and more GPUs.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import mean, median

from pipeline.planner.hardware import COMPILED, EAGER, Gpu, Kernels, Rates, find_gpu, rates_of
from pipeline.planner.timing import Job, step_time

SPEEDS = Path(__file__).with_name("published_speeds.jsonl")
# torchtitan's H100s have slower memory, and half the watts of others.
H100_HBM2E = replace(find_gpu("h100"), bandwidth=2.4e12)
# Software that is not ours: only the calibration looks at it, to tell a card's rates from its software's.
MPT = replace(EAGER, name="llm-foundry: attention by Triton, ALiBi", attention=(0.293, 0.161), stream=271)
MEGATRON = replace(EAGER, name="Megatron style, eager")
KERNELS = {
    "compiled": COMPILED,
    "eager": EAGER,
    "mpt": MPT,
    "megatron": MEGATRON,
    "megatron-rms": replace(MEGATRON, name="the same with a kernel for RMS norm", stream=252),
    "fused": replace(COMPILED, name="Transformer Engine", attention=(0.37, 0.555), stream=78, waiting=0.17),
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
    job: Job
    tokens_per_second: float

    @property
    def group(self) -> tuple[str, str, str]:
        """Source, kind of card, and what is trained."""
        kind = "LoRA" if not self.job.weight_gradients else ""
        return self.source, self.gpu.partition(" ")[0], kind


def gpu_of(name: str) -> Gpu:
    return H100_HBM2E if name == "H100 500 W" else find_gpu(name)


def load() -> list[Speed]:
    """Every run of the file."""
    known = {field.name for field in fields(Job)}
    found = []
    for line in SPEEDS.read_text().splitlines():
        row = json.loads(line)
        job = Job(**{key: value for key, value in row.items() if key in known})
        told = (row[key] for key in ("source", "model", "gpu", "kernels", "use"))
        found.append(Speed(*told, job, row["tokens_per_second"]))
    return found


def rates_for(speed: Speed, kernels: dict[str, Kernels] | None = None) -> Rates:
    """Of the run's card and software."""
    gpu = gpu_of(speed.gpu)
    # Where nobody says what the network is: what makers' nodes have; it was slower in Aleph Alpha's.
    network = 1.25e10 if speed.source == "Aleph Alpha" else gpu.network
    found = rates_of(gpu, network, kernels=(kernels or KERNELS)[speed.kernels])
    assert found is not None
    return found


def error(speed: Speed, rates: Rates | None = None) -> float:
    """Predicted seconds over published ones, minus 1."""
    reached = step_time(speed.job, rates or rates_for(speed)).tokens_per_second
    return speed.tokens_per_second / reached - 1


def rank_correlation(pairs: list[tuple[float, float]]) -> float:
    """Spearman's, of pairs without ties that matter."""
    places = []
    for side in (0, 1):
        order = sorted(range(len(pairs)), key=lambda k: pairs[k][side])
        places.append({k: place for place, k in enumerate(order)})
    count = len(pairs)
    squares = sum((places[0][k] - places[1][k]) ** 2 for k in range(count))
    return 1 - 6 * squares / (count * (count**2 - 1))


def accuracy() -> str:
    """A table, by source: how far the predicted seconds of a step are from the published ones."""
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


def summary(use: str = "test") -> tuple[int, float, float]:
    """(runs, mean error, rank correlation) of dense models that are trained whole, by torch's kernels."""
    speeds = [s for s in load() if s.use == use and s.job.weight_gradients and s.kernels != "fused"]
    errors = [error(speed) for speed in speeds]
    pairs = [
        (s.tokens_per_second, s.tokens_per_second / (1 + e)) for s, e in zip(speeds, errors, strict=True)
    ]
    return len(speeds), mean(map(abs, errors)), rank_correlation(pairs)


if __name__ == "__main__":
    print(accuracy())
    runs, size, correlation = summary()
    print(f"{runs} runs for the test: mean error {size:.1%}, rank correlation {correlation:.3f}\n")
    import scaled_runs

    print(scaled_runs.markdown())
