"""What pipeline/planner/timing.py predicts of more and more GPUs: the last table of docs/performance.md."""

from __future__ import annotations

from dataclasses import replace

from pipeline.planner.hardware import COMPILED, Rates, find_gpu, rates_of
from pipeline.planner.timing import Job, step_time

LLAMA_8B = Job(8.03e9, 6.98e9, 32, 4096, 8192, vocabulary=128256)
GPUS = (8, 32, 128, 512, 1024)


def h100_rates() -> Rates:
    """Return an H100's rates with the network of its makers' nodes."""
    gpu = find_gpu("h100")
    found = rates_of(gpu, gpu.network, kernels=COMPILED)
    assert found is not None
    return found


def forecasts() -> dict[str, list[float]]:
    """Return tokens a second of one GPU by split, for each of GPUS: Llama 3 8B, 2 rows of 8,192 a GPU.

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
    rates = h100_rates()
    return {
        name: [step_time(replace(job, data=count // job.gpus), rates).tokens_per_second for count in GPUS]
        for name, job in jobs.items()
    }


def markdown() -> str:
    """Return the table of docs/performance.md."""
    lines = ["| tokens a second of one GPU, on | " + " | ".join(f"{count:,}" for count in GPUS) + " |"]
    lines.append("|---|" + "---|" * len(GPUS))
    for name, speeds in forecasts().items():
        lines.append(f"| {name} | " + " | ".join(f"{speed:,.0f}" for speed in speeds) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown())
